"""Tensor and sequence parallelism by hand: in anyone's own loop, against one process."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep import tensor_parallel, vocab_parallel_cross_entropy
from lockstep.comm.ledger import Ledger, recording
from lockstep.config import GPT, MLP
from lockstep.data import DataSpec
from lockstep.layout.region import region_of
from lockstep.layout.world import World
from lockstep.models import build_model
from lockstep.models.lora import add_lora
from lockstep.models.recompute import recompute
from tests.ranks import LONG, on_ranks, refused

LLAMA = {"norm": "rmsnorm", "position": "rope", "activation": "swiglu"}
SPEC = DataSpec("tokens", (8,), 19)


def gpt(**options: Any) -> nn.Module:
    shape = {"d_model": 16, "layers": 2, "heads": 4, "context": 8, "vocabulary": 19, **options}
    return build_model(GPT(**shape), SPEC, seed=3).double()


def with_lora(**options: Any) -> nn.Module:
    model = add_lora(gpt(**options), 2, 8.0, ("qkv", "down", "up", "output")).double()
    for name, parameter in model.named_parameters():
        if name.endswith("lora_b"):
            nn.init.normal_(parameter, std=0.1)
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], bool]] = {  # and whether it knows positions
    "gpt2": (gpt, True),
    "gpt2, untied, recomputed": (lambda: recompute(gpt(tied=False), "full"), True),
    "llama, shared key heads": (lambda: gpt(kv_heads=2, tied=False, **LLAMA), True),
    "llama, one key head": (lambda: gpt(kv_heads=1, **LLAMA), True),
    "lora": (with_lora, True),
    "mlp": (lambda: build_model(MLP(layers=3, width=8), DataSpec("images", (1, 4, 4), 10), 3).double(), False),
}


def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    if hasattr(model, "layers"):
        return torch.randn(3, 1, 4, 4, generator=generator, dtype=torch.float64), torch.randint(10, (3,))
    tokens = torch.randint(19, (3, 9), generator=generator)
    return tokens[:, :-1], tokens[:, 1:].flatten()


def trained(model: nn.Module, steps: int = 2) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, and the last gradients, of a loop that knows nothing of ranks."""
    torch.manual_seed(1)
    inputs, targets = batch(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        for half in range(2):  # accumulated
            outputs = model(inputs)
            loss = F.cross_entropy(outputs.flatten(0, -2), targets) / (half + 1)
            loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def check_equal(world: World, name: str, sequence: bool) -> None:
    make, _ = MODELS[name]
    whole = make()
    mine = copy.deepcopy(whole)
    if world.rank:  # all begin with the first rank's weights
        for parameter in mine.parameters():
            nn.init.zeros_(parameter)
    tensor_parallel(mine, sequence_parallel=sequence)
    names = {n for n, _ in whole.named_parameters()}
    assert {n for n, _ in mine.named_parameters()} == names, "parameters keep their names"
    held = sum(p.numel() for p in mine.parameters())
    assert held < sum(p.numel() for p in whole.parameters())
    expected_losses, expected = trained(whole)
    losses, gradients = trained(mine)
    assert losses == pytest.approx(expected_losses, abs=1e-12)
    assert gradients.keys() == expected.keys()
    regions = {n: region_of(p) for n, p in mine.named_parameters()}
    for n, gradient in gradients.items():
        difference = (gradient.reshape(-1) - regions[n].read(expected[n])).abs().max() if gradient.numel() else 0.0
        assert difference < 1e-12, (n, float(difference))
    for n, parameter in whole.named_parameters():
        mine_now = dict(mine.named_parameters())[n]
        assert torch.allclose(mine_now.reshape(-1), regions[n].read(parameter), atol=1e-12, rtol=0), n


def check_all(world: World) -> None:
    for name, (_, positions) in MODELS.items():
        for sequence in (False, True) if positions else (False,):
            try:
                check_equal(world, name, sequence)
            except Exception as error:
                raise AssertionError(f"{name}, sequence parallel {sequence}: {error}") from error


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_model_is_equal_to_one_process(ranks: int) -> None:
    on_ranks(check_all, ranks, timeout=LONG)


def check_law(world: World) -> None:
    """4 all-reduces per block and step, or the same bytes as reduce-scatters and all-gathers; and two all-gathers more
    where inputs are gathered again in backward.
    """
    tokens = torch.randint(20, (3, 8))
    activation = 3 * 8 * 16 * 8  # bytes: batch x positions x features in fp64
    for sequence, keep in ((False, False), (True, True), (True, False)):
        found = {}
        for layers in (1, 3):
            model = gpt(layers=layers, vocabulary=20)
            model = tensor_parallel(model, sequence_parallel=sequence, keep_gathered=keep)
            with recording(Ledger()) as ledger:
                ledger.open()
                model(tokens).sum().backward()
            entries = [e for e in ledger.entries if e.purpose == "activations"]
            assert {e.axis for e in entries} == {"tp"}
            large = [e for e in entries if e.nbytes == activation]
            found[layers] = (
                sum(e.operation == "all_reduce" for e in large),
                sum(e.operation in ("all_gather", "reduce_scatter") for e in large),
                sum(e.wire_bytes for e in large),
            )
        per_block = [(b - a) / 2 for a, b in zip(found[1], found[3], strict=True)]
        once, again = (world.size - 1) / world.size, 2 if sequence and not keep else 0
        assert per_block == [
            0 if sequence else 4,
            8 + again if sequence else 0,
            pytest.approx((4 * 2 + again) * once * activation),
        ]


def test_the_law_of_bytes() -> None:
    on_ranks(check_law, 2)


def check_vocabulary(world: World) -> None:
    generator = torch.Generator().manual_seed(2)
    for vocabulary in (8, 7, 3, 1):  # with 4 ranks some have none
        logits = 5 * torch.randn(2, 5, vocabulary, generator=generator, dtype=torch.float64)
        targets = torch.randint(vocabulary, (2, 5), generator=generator)
        targets[0, 1] = -100
        whole = logits.clone().requires_grad_()
        expected = F.cross_entropy(whole.flatten(0, 1), targets.flatten(), reduction="none").view(2, 5)
        weights = torch.randn(2, 5, generator=generator, dtype=torch.float64)
        (expected * weights).sum().backward()
        size = -(-vocabulary // world.size)
        part = logits[..., world.rank * size : (world.rank + 1) * size].clone().requires_grad_()
        loss = vocab_parallel_cross_entropy(part, targets, None)
        (loss * weights).sum().backward()
        assert torch.allclose(loss, expected, atol=1e-12), vocabulary
        assert part.grad is not None
        assert whole.grad is not None
        assert torch.allclose(part.grad, whole.grad[..., world.rank * size : (world.rank + 1) * size], atol=1e-12)
    with pytest.raises(IndexError, match="target 9 is not in the vocabulary of 1"):
        vocab_parallel_cross_entropy(part.detach(), torch.full_like(targets, 9), None)


def test_cross_entropy_of_a_cut_vocabulary() -> None:
    on_ranks(check_vocabulary, 2)
    on_ranks(check_vocabulary, 4)


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.inner, self.down = nn.Linear(8, 32), nn.Dropout(0.5), nn.Linear(32, 8)
        self.outer = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.inner(torch.ones_like(self.up(x))) > 0
        y: Tensor = self.outer(self.down(x.new_zeros(*x.shape[:-1], self.kept.shape[-1])) * 0 + 1)
        return y


def dropped(world: World) -> list[tuple[list[bool], list[bool]]]:
    torch.manual_seed(11)
    model = tensor_parallel(Dropped(), {"up": "column", "down": "row"})
    found = []
    for _ in range(2):
        whole = model(torch.randn(4, 8)) > 0
        found.append((model.kept.flatten().tolist(), whole.flatten().tolist()))  # type: ignore[operator]
    return found


def test_dropout_differs_where_tensors_are_cut_and_agrees_where_they_are_whole() -> None:
    first, second = on_ranks(dropped, 2)
    for (cut_a, whole_a), (cut_b, whole_b) in zip(first, second, strict=True):
        assert whole_a == whole_b
        assert cut_a != cut_b
    assert first[0] != first[1], "another one in each forward"


def refusals(world: World) -> list[str]:
    given: list[tuple[nn.Module, Any]] = [
        (Dropped(), {"upp": "column"}),
        (Dropped(), {"up": "columns"}),
        (Dropped(), {"inner": "column"}),
        (Dropped(), {"up": "column", "u*": "row"}),
        (nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 4)), {"0": "column", "1": "row"}),
        (gpt(heads=8, d_model=8, kv_heads=8), {"*.qkv": "column"}),
        (gpt(), {"token_embedding": "vocab"}),
        (nn.Linear(4, 4), None),
    ]
    return refused(partial(tensor_parallel, model, plan) for model, plan in given)


def test_mistakes_are_named() -> None:
    for said in on_ranks(refusals, 2):
        assert "'upp' is the name of no module" in said[0]
        assert "must be one of column, column:gather, row, vocab, summed, sequence" in said[1]
        assert "it is a Dropout" in said[2]
        assert "both column and row for up" in said[3]
        assert "9 output features cannot be cut into 2 equal parts" in said[4]
        assert said[5] == "nothing"
        assert "share a weight, and the plan cuts it differently" in said[6]
        assert "has no tensor_plan() of its own" in said[7]


def copied(world: World) -> tuple[float, float]:
    model = tensor_parallel(gpt())
    again = copy.deepcopy(model)
    return trained(model)[0][-1], trained(again)[0][-1]


def test_a_cut_model_can_be_copied() -> None:
    """For an average of weights, say: the copy communicates with the same ranks."""
    for one, other in on_ranks(copied, 2):
        assert one == other

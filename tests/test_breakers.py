"""What a hostile tester found in tensor, pipeline and context parallelism: equal to one process, or refused."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lockstep import Pipeline, ring_attention, tensor_parallel, ulysses_attention
from lockstep.layout.region import region_of
from lockstep.layout.world import World
from tests.ranks import on_ranks, refused
from tests.test_tensor_parallel import gpt


class Gated(nn.Module):
    def __init__(self, fail: bool = False) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
        self.inner, self.outer, self.fail = nn.Dropout(0.5), nn.Dropout(0.5), fail

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(self.gate(x) * self.up(x))
        if self.fail:
            raise RuntimeError("planted")
        out: Tensor = self.outer(self.down(y))
        return out


def streams(world: World) -> list[float]:
    """Random numbers of whole tensors, which must be the same on all ranks."""
    found = []
    torch.manual_seed(3)
    model = tensor_parallel(Gated(), {"gate": "column", "up": "column", "down": "row"})
    found += model(torch.ones(2, 8)).flatten().tolist()
    model.fail = True
    with pytest.raises(RuntimeError, match="planted"):
        model(torch.ones(2, 8))
    found.append(float(torch.rand(())))
    tokens = torch.zeros(2, 8, dtype=torch.long)
    with_head = gpt(dropout=0.1)
    tensor_parallel(with_head, {**with_head.tensor_plan(), "head": "vocab"})  # type: ignore[operator]
    for _ in range(2):
        with_head(tokens)
        found.append(float(torch.rand(())))
    return found


def test_ranks_keep_one_stream_of_random_numbers() -> None:
    first, second = on_ranks(streams, 2)
    assert first == second


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(lambda x: self.b(torch.tanh(self.a(x))), x, use_reentrant=False)
        return y


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.softmax(F.linear(self.q(x), self.k(x)), -1) @ x


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x.tanh()


class Unpaired(nn.Module):
    def forward(self, both: tuple[Tensor, Tensor]) -> Tensor:
        return both[0] * both[1]


def repeated() -> nn.Module:
    tanh, shared = nn.Tanh(), nn.Linear(6, 6)
    return nn.Sequential(nn.Linear(6, 6), tanh, shared, tanh, nn.Linear(6, 6), tanh, shared, nn.Linear(6, 5))


ROWS: dict[str, Callable[[], nn.Module]] = {
    "modules that come twice": repeated,
    "recomputed by the user": lambda: nn.Sequential(nn.Linear(6, 6), Recomputed(), Recomputed(), nn.Linear(6, 5)),
    "F.linear of activations": lambda: nn.Sequential(nn.Linear(6, 6), Scores(), Scores(), nn.Linear(6, 5)),
    "tuples as one argument": lambda: nn.Sequential(nn.Linear(6, 6), Pair(), Unpaired(), nn.Linear(6, 5)),
    "in place": lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 5)),
}


def check_rows(world: World) -> None:
    for what, make in ROWS.items():
        for schedule in ("1f1b", "zb-h1"):
            torch.manual_seed(5)
            whole = make().double()
            pipe = Pipeline(copy.deepcopy(whole), schedule, micro_batches=2, cuts=[len(whole) // 2])
            inputs, targets = torch.randn(4, 6, dtype=torch.float64), torch.randint(5, (4,))
            for part in (slice(0, 2), slice(2, 4)):  # as micro-batches: softmax over rows sees only its own
                (F.cross_entropy(whole(inputs[part]), targets[part]) / 2).backward()
            pipe.step(inputs, targets, F.cross_entropy)
            gradients = pipe.full_gradients()
            for name, parameter in whole.named_parameters():
                assert name in gradients, (what, schedule, name)
                assert torch.allclose(gradients[name], parameter.grad, atol=1e-12), (what, schedule, name)


def test_odd_layers_of_a_pipeline() -> None:
    on_ranks(check_rows, 2)


class Normalized(nn.Linear):
    """Its outputs depend on each other."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).softmax(-1)


class Bent(nn.Linear):
    """Its outputs are no sums."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class Tripled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * super().forward(x)


class TripledRow(nn.Sequential):
    def forward(self, x: Any) -> Any:
        return 3 * super().forward(x)


class Complex(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.complex64)


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].register_forward_hook(lambda *_: None)
    return model


def refusals(world: World) -> list[str]:
    q, k = torch.randn(1, 4, 4, 8), torch.randn(1, 4, 6, 8)
    frequent = nn.Sequential(nn.Embedding(4, 4, scale_grad_by_freq=True))
    tries: list[Callable[[], Any]] = [
        lambda: tensor_parallel(nn.Sequential(Normalized(4, 4)), {"0": "column"}),
        lambda: tensor_parallel(nn.Sequential(Bent(4, 4)), {"0": "row"}),
        lambda: tensor_parallel(hooked(), {"0": "column"}),
        lambda: tensor_parallel(nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))), {"0": "row"}),
        lambda: tensor_parallel(frequent, {"0": "vocab"}),
        lambda: tensor_parallel(nn.TransformerEncoderLayer(8, 2, 16), {"linear1": "column", "linear2": "row"}),
        lambda: Pipeline(TripledRow(nn.Linear(2, 2), nn.Linear(2, 2))),
        lambda: ring_attention(q, k, k, causal=False),
        lambda: ulysses_attention(q, k, k, causal=False),
    ]
    said = refused(tries)
    model = tensor_parallel(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)), {"0": "column", "1": "row"})
    x = torch.randn(4, requires_grad=True)  # a single row
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
    return said


def test_what_would_be_silently_wrong_is_refused() -> None:
    for said in on_ranks(refusals, 2):
        assert "the parts of a Normalized, by its own forward, do not give its outputs side by side" in said[0]
        assert "the parts of a Bent, by its own forward, do not add up to its outputs" in said[1]
        assert "it has hooks" in said[2]
        assert "its weight is parametrized" in said[3]
        assert "scale_grad_by_freq cannot be cut" in said[4]
        assert "part of an nn.TransformerEncoderLayer" in said[5]
        assert "does not say what it is made of" in said[6]
        assert "must be of the same positions" in said[7]
        assert "must be of the same positions" in said[8]


def custom_forwards(world: World) -> None:
    """A linear layer's own forward is kept: it scales, and casts its weight."""
    torch.manual_seed(0)
    whole = nn.Sequential(Tripled(6, 8), nn.GELU(), Tripled(8, 4)).double()
    model = tensor_parallel(copy.deepcopy(whole), {"0": "column", "2": "row"})
    x = torch.randn(5, 6, dtype=torch.float64)
    expected, found = whole(x), model(x)
    assert torch.allclose(found, expected)
    expected.square().sum().backward()
    found.square().sum().backward()
    for name, parameter in model.named_parameters():
        wanted = region_of(parameter).read(whole.get_parameter(name).grad)
        assert torch.allclose(parameter.grad.reshape(-1), wanted), name
    assert torch.allclose(copy.deepcopy(model)(x), expected)


def test_a_linear_layers_own_forward_is_kept() -> None:
    on_ranks(custom_forwards, 2)


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Gated(), Gated()
        self.b.up, self.b.down = self.a.up, self.a.down

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(x))
        return y


def check_shared(world: World) -> None:
    torch.manual_seed(4)
    whole = Shared().double().eval()
    mine = copy.deepcopy(whole)
    tensor_parallel(mine, {"*.gate": "column", "*.up": "column", "*.down": "row"})
    assert mine.a.up is mine.b.up
    assert not mine.a.up.training
    x = torch.randn(2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(mine(x), whole(x), atol=1e-12)


def test_a_module_under_two_names_stays_one() -> None:
    on_ranks(check_shared, 2)


def changed_dtype(world: World) -> list[float]:
    torch.manual_seed(2)
    pipe = Pipeline(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 5)), "1f1b", micro_batches=2)
    inputs, targets = torch.randn(4, 6), torch.randint(5, (4,))
    losses = []
    for cast in (False, True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            losses.append(float(pipe.step(inputs, targets, F.cross_entropy)))
    return losses


def test_a_step_may_be_in_another_dtype() -> None:
    plain, cast, again = on_ranks(changed_dtype, 2)[0]
    assert plain == again
    assert cast == pytest.approx(plain, abs=0.05)

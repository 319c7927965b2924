"""Pipelines by hand: in anyone's own loop, against one process."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep import Pipeline, UserError
from lockstep.comm.ledger import Ledger, recording
from lockstep.config import GPT
from lockstep.data import DataSpec
from lockstep.layout.group import Group
from lockstep.layout.world import World
from lockstep.models import build_model
from lockstep.parallel.pipeline.balance import even_cuts
from lockstep.parallel.pipeline.messages import Post
from lockstep.parallel.pipeline.schedule import pipeline_schedule, placement_of
from tests.ranks import on_ranks, refused

SCHEDULES = {"naive": 1, "gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-v": 2}


def row() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(*(m for _ in range(9) for m in (nn.Linear(6, 6), nn.Tanh())), nn.Linear(6, 5)).double()


def crossed() -> nn.Module:
    """Weights that two ranks share, in another order on each; and one that a rank uses twice."""
    model = row()
    for later, first in ((16, 0), (14, 2), (6, 4)):
        model.get_submodule(str(later)).weight = model.get_submodule(str(first)).weight
    return model


def gpt(**options: Any) -> nn.Module:
    shape = {"d_model": 8, "layers": 8, "heads": 2, "context": 6, "vocabulary": 11, **options}
    return build_model(GPT(**shape), DataSpec("tokens", (6,), 11), seed=3).double()


def token_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def batches(model: nn.Module, rows: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(rows)
    found = []
    for size in (rows, max(1, rows - 3)):  # another shape in the second step
        if isinstance(model, nn.Sequential):
            inputs = torch.randn(size, 6, generator=generator, dtype=torch.float64)
            found.append((inputs, torch.randint(5, (size,), generator=generator)))
        else:
            tokens = torch.randint(11, (size, 7), generator=generator)
            targets = tokens[:, 1:].clone()
            targets[torch.rand(targets.shape, generator=generator) < 0.3] = -100
            found.append((tokens[:, :-1], targets))
    return [*found, found[0]]


def check_equal(world: World, model: nn.Module, schedule: str, rows: int, recompute: bool | tuple[int, ...]) -> None:
    chunks = SCHEDULES[schedule]
    whole = copy.deepcopy(model)
    if world.rank:
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
    pipe = Pipeline(model, schedule, micro_batches=2 * world.size, chunks=chunks, recompute=recompute)
    loss_fn = F.cross_entropy if isinstance(whole, nn.Sequential) else token_loss
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.2, momentum=0.9)
    own = torch.optim.SGD(pipe.parameters(), lr=0.2, momentum=0.9)
    for inputs, targets in batches(whole, rows):
        optimizer.zero_grad()
        own.zero_grad()
        for _ in range(2):  # gradients add up
            expected = loss_fn(whole(inputs), targets)
            expected.backward()
            assert float(pipe.step(inputs, targets, loss_fn)) == pytest.approx(float(expected), abs=1e-6)
        gradients = pipe.full_gradients()
        assert gradients.keys() == {name for name, _ in whole.named_parameters()}
        for name, parameter in whole.named_parameters():
            assert torch.allclose(gradients[name], parameter.grad, atol=1e-12), name
        optimizer.step()
        own.step()
    state = pipe.full_state_dict()
    assert state.keys() == whole.state_dict().keys()
    for name, tensor in whole.state_dict().items():
        assert torch.allclose(state[name], tensor, atol=1e-12), name


def check_all(world: World, schedules: list[str], every: int = 1) -> None:
    """`every`: with so much fewer models."""
    llama = {"norm": "rmsnorm", "position": "rope", "activation": "swiglu", "tied": False}
    for schedule in schedules:
        situations = (
            ("row", row(), 13, False),
            ("row, tied crosswise", crossed(), 9, False),
            ("gpt, tied", gpt(), 2 * world.size + 1, False),
            ("gpt, tied, its first part recomputed", gpt(), 5, (0,)),
            ("llama, recomputed, fewer rows than micro-batches", gpt(**llama), 4, True),
        )
        for what, model, rows, recompute in situations[::-every]:
            try:
                check_equal(world, model, schedule, rows, recompute)
            except Exception as error:
                raise AssertionError(f"{schedule}, {what}: {type(error).__name__} {error}") from error


@pytest.mark.parametrize("ranks", [2, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (1, 3, 4))])
def test_every_schedule_is_equal_to_one_process(ranks: int) -> None:
    on_ranks(check_all, ranks, list(SCHEDULES), 1 if ranks == 2 else 2)


def messages(world: World) -> list[tuple[str, int]]:
    pipe = Pipeline(row(), "1f1b", micro_batches=4)
    inputs, targets = batches(row(), 8)[0]
    pipe.step(inputs, targets, F.cross_entropy)
    with recording(Ledger()) as ledger:
        ledger.open()
        pipe.step(inputs, targets, F.cross_entropy)
    return [(e.operation, e.nbytes) for e in ledger.entries if e.purpose == "activations"]


def test_only_activations_and_their_gradients_travel() -> None:
    first, second = on_ranks(messages, 2)
    assert sorted(first) == sorted(second) == [("recv", 2 * 6 * 8)] * 4 + [("send", 2 * 6 * 8)] * 4


class Weighed(nn.Module):
    """Counts how many of its forwards wait for their backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.held = self.most = 0

    def forward(self, x: Tensor) -> Tensor:
        self.held += 1
        self.most = max(self.most, self.held)

        def over(gradient: Tensor) -> None:
            self.held -= 1

        y: Tensor = self.linear(x)
        y.register_hook(over)
        return y


def most_held(world: World, schedule: str) -> int:
    model = nn.Sequential(*(Weighed() for _ in range(world.size)))
    pipe = Pipeline(model, schedule, micro_batches=8)
    pipe.step(torch.randn(8, 4), torch.randn(8, 4), F.mse_loss)
    return model[world.rank].most  # type: ignore[return-value]


def test_a_rank_holds_what_its_schedule_says() -> None:
    assert on_ranks(most_held, 4, "gpipe") == [8, 8, 8, 8]
    assert on_ranks(most_held, 4, "1f1b") == [4, 3, 2, 1]
    assert on_ranks(most_held, 4, "naive") == [1, 1, 1, 1]


def test_parts_cost_alike() -> None:
    assert even_cuts([1, 5, 5, 5, 5, 9], 3) == [3, 5]
    assert even_cuts([1] * 8, 4) == [2, 4, 6]
    assert even_cuts([9, 1, 1], 3) == [1, 2]
    with pytest.raises(UserError, match="the model has 2 layers, fewer than the 3 parts"):
        even_cuts([1, 1], 3)


def refusals(world: World) -> list[str]:
    given: list[tuple[nn.Module, Any]] = [
        (nn.Linear(2, 2), {}),
        (nn.Sequential(nn.Linear(2, 2)), {}),
        (row(), {"schedule": "interleaved", "micro_batches": 3, "chunks": 2}),
        (row(), {"cuts": [3, 4]}),
        (row(), {"cuts": [40]}),
    ]
    return refused(partial(Pipeline, model, **options) for model, options in given)


def test_mistakes_are_named() -> None:
    for said in on_ranks(refusals, 2):
        assert "Linear does not say what it is made of" in said[0]
        assert "1 layers, fewer than the 2 parts" in said[1]
        assert "3 are no multiple of 2; use 4, or 1f1b" in said[2]
        assert "2 parts of 19 layers need 1 rising numbers" in said[3]
        assert "2 parts of 19 layers need 1 rising numbers" in said[4]


def count_forwards(world: World) -> dict[str, int]:
    """How often each layer computes in a step of four micro-batches, of two chunks a rank that are recomputed."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4 * world.size)))
    pipe = Pipeline(model, schedule="interleaved", micro_batches=2 * world.size, chunks=2, recompute=True)
    counts: dict[str, int] = {}

    def note(name: str) -> Any:
        return lambda *_: counts.update({name: counts.get(name, 0) + 1})

    for name, part in pipe.stage.named_modules():
        if isinstance(part, nn.Linear):
            part.register_forward_pre_hook(note(name))
    pipe.step(torch.randn(8, 6), torch.randn(8, 6), F.mse_loss)
    return counts


def test_every_chunk_is_recomputed() -> None:
    for counts in on_ranks(count_forwards, 2):
        assert len(counts) == 4
        assert set(counts.values()) == {8}, "forward, and once more in backward, of four micro-batches"


def test_a_step_that_fails_teaches_nothing() -> None:
    """What messages are is known from a step that has ended: the next one else would not send what the other awaits."""
    schedule, placement = pipeline_schedule("1f1b", 2, 2, 1), placement_of("1f1b", 2, 1)
    post = Post(schedule, placement, Group("pp", 0, 2), torch.device("cpu"), (Group("pp", 0, 2), Group("pp", 0, 2)))
    for inbox in post._inboxes.values():
        inbox._ahead = False  # there is nobody to receive from
    post.begin("a shape")
    post.begin("a shape")  # the step before has failed
    assert post._learning is not None
    post.end()
    post.begin("a shape")
    assert post._learning is None

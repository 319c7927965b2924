"""DataParallel against what trips such wrappers, in every mode: gradients must be the mean of the ranks' own.

The truth is computed without any wrapper: each rank runs the same code on the bare model, and the gradients are
averaged in Python. PyTorch's DDP is run beside it wherever it can do the thing at all.
"""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lockstep import (
    DataParallel,
    FullyShardedDataParallel,
    LocalSGD,
    ShardedDataParallel,
    ShardedOptimizer,
)
from lockstep.layout.world import World
from tests.ranks import on_ranks

MODES = ["naive", "flat", "overlap", "bucketed"]
Grads = dict[str, Tensor | None]


def data(rank: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 + rank), dtype=torch.float64)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


class Branches(nn.Module):
    """`a` is used on even ranks, `b` on odd ones, `never` nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.never, self.all = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor, rank: int) -> Tensor:
        return self.all((self.a if rank % 2 == 0 else self.b)(x))


class MixedTypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(4, 4).double(), nn.Linear(4, 4).float()

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.wide(x).float()).double()


class Checkpointed(nn.Module):
    """Re-entrant checkpointing; with `shared` the same layer in two segments, whose gradient comes in two parts."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = self.first if shared else nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(lambda t: self.first(t).relu(), x.requires_grad_(), use_reentrant=True)
        x = checkpoint(lambda t: self.second(t).relu(), x, use_reentrant=True)
        return self.head(x)


class SparseRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 4, sparse=True), nn.Linear(4, 1)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.table(rows))


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def frozen_layer() -> nn.Module:
    model = two_layers()
    model[0].requires_grad_(False)
    return model


def transposed() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last), nn.Flatten(), nn.Linear(6, 5))
    model[2].weight = nn.Parameter(torch.randn(6, 5).t())
    return model


def nothing_to_train() -> nn.Module:
    return two_layers().requires_grad_(False)


def run_once(model: nn.Module, rank: int) -> None:
    model(data(rank, 3, 4)).square().sum().backward()


def run_branches(model: nn.Module, rank: int) -> None:
    model(data(rank, 3, 4), rank).square().sum().backward()


def run_twice(model: nn.Module, rank: int) -> None:
    """Two forwards, then two backwards, before anybody waits."""
    losses = [model(data(rank + 10 * i, 3, 4)).square().sum() for i in range(2)]
    for loss in losses:
        loss.backward()


def run_twice_differently(model: nn.Module, rank: int) -> None:
    """The second backward touches parameters of the first on some ranks only."""
    for used in (0, rank):
        model(data(rank, 3, 4), used).square().sum().backward()


def run_create_graph(model: nn.Module, rank: int) -> None:
    model(data(rank, 3, 4)).square().sum().backward(create_graph=True)


def run_no_sync(model: nn.Module, rank: int) -> None:
    for i in range(3):
        quiet = i < 2 and hasattr(model, "no_sync")
        with model.no_sync() if quiet else nullcontext():
            model(data(rank + 10 * i, 3, 4)).square().sum().backward()


def run_synced_then_not(model: nn.Module, rank: int) -> None:
    """A backward inside no_sync while the previous one's gradients may still be in flight."""
    for i in (0, 1, 2):
        with model.no_sync() if i == 1 and hasattr(model, "no_sync") else nullcontext():
            model(data(rank + 10 * i, 3, 4)).square().sum().backward()


def run_images(model: nn.Module, rank: int) -> None:
    model(data(rank, 2, 4, 3, 3)).square().sum().backward()


def run_rows(model: nn.Module, rank: int) -> None:
    rows = torch.tensor([[0, 1, 1], [2, 5, 5]][rank % 2] * (rank + 1))
    model(rows).square().sum().backward()


def run_rows_on_rank_0(model: nn.Module, rank: int) -> None:
    bare = getattr(model, "module", model)
    (model(torch.tensor([3, 4])) if rank == 0 else bare.head(data(rank, 2, 4))).square().sum().backward()


def run_forward_only(model: nn.Module, rank: int) -> None:
    model(data(rank, 3, 4))


# name -> (model, what is run, PyTorch's DDP can do it)
TRAPS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, int], None], bool]] = {
    "plain": (two_layers, run_once, True),
    "tied": (Tied, run_once, True),
    "frozen": (frozen_layer, run_once, True),
    "unused": (Branches, run_branches, True),
    "no_sync": (two_layers, run_no_sync, True),
    "several backwards": (two_layers, run_twice, False),
    "several backwards, unused": (Branches, run_twice_differently, False),
    "create_graph": (two_layers, run_create_graph, False),
    "sync, no_sync, sync": (two_layers, run_synced_then_not, True),
    "mixed dtypes": (MixedTypes, run_once, True),
    "sparse": (SparseRows, run_rows, False),
    "sparse on one rank": (SparseRows, run_rows_on_rank_0, False),
    "non-contiguous": (transposed, run_images, True),
    "re-entrant checkpoint": (lambda: Checkpointed(shared=False), run_once, False),
    "re-entrant, shared layer": (lambda: Checkpointed(shared=True), run_once, False),
    "nothing to train": (nothing_to_train, run_forward_only, False),
}


def gradients(model: nn.Module) -> Grads:
    return {
        n: None if p.grad is None else p.grad.detach().to_dense().double().clone() for n, p in model.named_parameters()
    }


def mean_of_ranks(local: Grads) -> Grads:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, local)
    mean: Grads = {}
    for name in local:
        there = [g[name] for g in everyone if g[name] is not None]
        mean[name] = sum(there) / len(everyone) if there else None
    return mean


def difference(got: Grads, expected: Grads) -> float:
    """Largest difference; infinite where one is None and the other is not."""
    worst = 0.0
    for name, want in expected.items():
        have = got[name]
        if (have is None) != (want is None):
            return float("inf")
        if have is not None and want is not None and want.numel():
            worst = max(worst, float((have - want).abs().max()))
    return worst


def traps_on_a_rank(world: World) -> dict[tuple[str, str], float]:
    outcome: dict[tuple[str, str], float] = {}
    for trap, (make, run, ddp_can) in TRAPS.items():
        torch.manual_seed(0)
        reference = make()
        if trap != "mixed dtypes":
            reference.double()
        run(bare := copy.deepcopy(reference), world.rank)
        expected = mean_of_ranks(gradients(bare))
        for mode in MODES:
            wrapped = DataParallel(copy.deepcopy(reference), sync=mode, bucket_mb=0.0001)
            for step in range(2):  # a second step finds the first one's leftovers
                wrapped.zero_grad()
                run(wrapped, world.rank)
                wrapped.finish_gradient_synchronization()
                outcome[trap, f"{mode} {step}"] = difference(gradients(wrapped.module), expected)
        if ddp_can:
            unused = trap == "unused"
            ddp = DistributedDataParallel(copy.deepcopy(reference), find_unused_parameters=unused)
            run(ddp, world.rank)
            outcome[trap, "ddp"] = difference(gradients(ddp.module), expected)
    return outcome


def traps_as_on_gpus(world: World) -> dict[tuple[str, str], float]:
    """The hosts tell each other, rather than read it in the last bucket."""
    elsewhere = torch.device("meta")
    with patch("lockstep.parallel.data.data_parallel.flag_device", return_value=elsewhere) as asked:
        outcome = traps_on_a_rank(world)
    assert asked.called
    return outcome


@pytest.fixture(scope="module", params=[(traps_on_a_rank, 2), (traps_on_a_rank, 3), (traps_as_on_gpus, 2)])
def outcomes(request: pytest.FixtureRequest) -> list[dict[tuple[str, str], float]]:
    return on_ranks(*request.param)


@pytest.mark.parametrize("trap", TRAPS)
def test_gradients_are_the_mean_of_the_ranks(outcomes: list[dict[tuple[str, str], float]], trap: str) -> None:
    for rank, outcome in enumerate(outcomes):
        wrong = {
            who: d for (t, who), d in outcome.items() if t == trap and not d < (1e-6 if "mixed" in trap else 1e-12)
        }
        assert not wrong, f"rank {rank}"


def differing(world: World) -> list[str]:
    """Wrappers after which this rank's weights are not the first rank's, where each rank began with its own."""
    found = []
    wrappers: dict[str, Callable[[nn.Module], Any]] = {
        "DataParallel": DataParallel,
        "LocalSGD": lambda m: LocalSGD(m, every=2),
        "ShardedDataParallel": lambda m: ShardedDataParallel(m, ShardedOptimizer(m.parameters(), torch.optim.SGD)),
        "FullyShardedDataParallel": lambda m: FullyShardedDataParallel(m, shard=nn.Linear),
    }
    for name, wrap in wrappers.items():
        torch.manual_seed(0)
        first = unlike()
        torch.manual_seed(world.rank)
        wrapped = wrap(unlike())
        full = getattr(wrapped, "full_state_dict", None)
        state = full() if full is not None else wrapped.module.state_dict()
        found += [f"{name}: {key}" for key, value in first.state_dict().items() if not torch.equal(state[key], value)]
    return found


def unlike() -> nn.Module:
    """Frozen, channels-last and ordinary parameters, and a buffer."""
    model = nn.Sequential(nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last), nn.BatchNorm2d(3), nn.Linear(4, 4))
    model.get_submodule("2").requires_grad_(False)
    model.get_buffer("1.running_mean").normal_()
    return model


def test_all_begin_with_the_first_ranks_weights() -> None:
    assert on_ranks(differing, 2) == [[], []]

"""A loop that a user brings, with all that loops have: clipping, decay groups by dimensions, a schedule, accumulation,
an average of the weights, freezing. Under every wrapper it is the loop of one process, or an error that says how.
"""

import copy
from collections.abc import Callable, Iterator
from math import isfinite
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import lockstep
from lockstep.errors import UserError
from lockstep.layout import Held
from lockstep.layout.group import Group, group_of, shared_group
from lockstep.layout.world import World
from lockstep.parallel.data.data_parallel import Sync
from lockstep.parallel.holding import held_by
from lockstep.strategies.state import gathered
from tests.ranks import on_ranks, refused

STEPS, BATCH, LIMIT = 4, 8, 0.05
PLAN = {"0": "column", "2": "row"}


def build() -> nn.Sequential:
    """On the default device (of `tests/test_gpu_loops.py`, a GPU), with the numbers of a CPU's generator."""
    torch.manual_seed(1)
    device = torch.get_default_device()
    with torch.device("cpu"):
        layers = [nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 5), nn.GELU()]
        return nn.Sequential(*layers, nn.Linear(5, 3)).double().to(device)


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cpu").manual_seed(100 + step)
    inputs = torch.randn(BATCH, 6, generator=generator, dtype=torch.float64, device="cpu")
    inputs = inputs.to(torch.get_default_device())
    return inputs, inputs[:, :3].argmax(1)


def decay_groups(parameters: Iterator[nn.Parameter]) -> list[dict[str, Any]]:
    """As loops everywhere make them: biases and norms do not decay."""
    everything = list(parameters)
    return [
        {"params": [p for p in everything if p.ndim >= 2], "weight_decay": 0.3},
        {"params": [p for p in everything if p.ndim < 2], "weight_decay": 0.0},
    ]


def adamw(parameters: Iterator[nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(decay_groups(parameters), lr=0.05)


def wrapped(kind: str, tp: Group, data: Group) -> tuple[Any, torch.optim.Optimizer]:
    """A model spread over the ranks, and its optimizer. `tp, x`: cut over tp's ranks, then x over the others."""
    model: Any = build()
    name = kind
    if kind.startswith("tp"):
        model = lockstep.tensor_parallel(model, PLAN, tp)
        name = kind.removeprefix("tp").removeprefix(",")
    if name in ("zero1", "zero2"):
        groups = decay_groups(model.parameters())
        sharded = lockstep.ShardedOptimizer(groups, torch.optim.AdamW, process_group=data, lr=0.05)
        return lockstep.ShardedDataParallel(model, sharded, stage=int(name[-1])), sharded
    if name in ("naive", "bucketed"):
        model = lockstep.DataParallel(model, sync=name, process_group=data)
    elif name == "zero3":
        model = lockstep.FullyShardedDataParallel(model, shard=nn.Linear, process_group=data)
    elif name == "ddp":
        model = DistributedDataParallel(model)
    elif name == "fsdp":
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        fully_shard(model)
    elif name == "pp":
        model = lockstep.Pipeline(model, micro_batches=2, process_group=data)
    return model, adamw(model.parameters())


def train(
    model: Any, optimizer: torch.optim.Optimizer, clip: Callable[[], Tensor], share: tuple[int, int]
) -> tuple[list[float], dict[str, Tensor]]:
    """The user's loop. Returns the norms before clipping, and an average of the weights, by name."""
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for half in (0, 1):
            inputs, targets = lockstep.shard_batch(lockstep.shard_batch(batch_of(step), half, 2), *share)
            if isinstance(model, lockstep.Pipeline):
                model.step(inputs, targets, lambda outputs, targets: F.cross_entropy(outputs, targets) / 2)
            else:
                (F.cross_entropy(model(inputs), targets) / 2).backward()
        norms.append(float(clip()))
        optimizer.step()
        schedule.step()
        for name, parameter in model.named_parameters():
            average[name].lerp_(parameter.detach(), 0.1)
    return norms, average


def one_process() -> dict[str, Any]:
    model = build()
    optimizer = adamw(model.parameters())
    clip = lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)  # noqa: E731
    norms, average = train(model, optimizer, clip, (0, 1))
    return {"norms": norms, "weights": model.state_dict(), "average": average}


def one_loop(world: World, kind: str, tp_size: int) -> dict[str, Any]:
    everyone = group_of()
    tp = everyone if kind in ("tp", "pp") else group_at(world, tp_size, along_tp=True)
    data = everyone if tp_size == 1 or kind == "pp" else group_at(world, tp_size, along_tp=False)
    model, optimizer = wrapped(kind, tp, data)
    share = (0, 1) if kind in ("tp", "pp") or kind.endswith(",pp") else (data.rank, data.size)
    norms, average = train(model, optimizer, lambda: lockstep.clip_grad_norm_(model, LIMIT), share)
    held = held_by(model)
    plain = {name.removeprefix("module."): value for name, value in average.items()}
    return {
        "norms": norms,
        "weights": gathered(held, everyone),
        "average": gathered({name: Held(plain[name], one.region) for name, one in held.items()}, everyone),
    }


def group_at(world: World, tp_size: int, along_tp: bool) -> Group:
    """The ranks that have the parts of one model, or those that have the same part."""
    rows = [list(range(start, start + tp_size)) for start in range(0, world.size, tp_size)]
    lines = rows if along_tp else [list(column) for column in zip(*rows, strict=True)]
    ranks = next(line for line in lines if world.rank in line)
    return group_of(shared_group(ranks, "gloo"), "tp" if along_tp else "shard")


ON_TWO = ("naive", "bucketed", "zero1", "zero2", "zero3", "ddp", "fsdp", "tp", "pp")
ON_FOUR = ("tp,bucketed", "tp,zero1", "tp,zero2", "tp,zero3", "tp,pp")


def every_loop(world: World, kinds: tuple[str, ...], tp_size: int) -> dict[str, Any]:
    return {kind: one_loop(world, kind, tp_size) for kind in kinds}


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    return one_process()


@pytest.fixture(scope="module")
def on_two() -> list[dict[str, Any]]:
    return on_ranks(every_loop, 2, ON_TWO, 1)


@pytest.fixture(scope="module")
def on_four() -> list[dict[str, Any]]:
    return on_ranks(every_loop, 4, ON_FOUR, 2)


@pytest.mark.parametrize("kind", [*ON_TWO, *ON_FOUR])
def test_a_users_loop_is_that_of_one_process(
    kind: str, reference: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    found = request.getfixturevalue("on_two" if kind in ON_TWO else "on_four")
    for rank in found:
        mine = rank[kind]
        assert mine["norms"] == pytest.approx(reference["norms"], rel=1e-10)
        assert mine["norms"] == found[0][kind]["norms"], "the same on every rank"
        for name in ("weights", "average"):
            assert mine[name].keys() == reference[name].keys()
            for key, value in reference[name].items():
                torch.testing.assert_close(mine[name][key], value, rtol=1e-9, atol=1e-11, msg=f"{name} {key}")


def bad_copies(world: World) -> dict[str, float]:
    """Rank 1 has a gradient that is not finite, of something that rank 0 holds, and counts, as well."""
    found = {}
    for kind in ("tp", "zero3"):
        model, _ = wrapped(kind, group_of(), group_of())
        inputs, targets = batch_of(0) if kind == "tp" else lockstep.shard_batch(batch_of(0), world.rank, world.size)
        F.cross_entropy(model(inputs), targets).backward()
        copied = next(p for p in model.parameters() if p.shape == (8,) and p.grad is not None)  # of the norm
        if world.rank == 1:
            copied.grad[3] = float("inf")
        found[kind] = float(lockstep.clip_grad_norm_(model, LIMIT))
    return found


def test_a_copy_that_is_not_finite_makes_the_norm_so_on_every_rank() -> None:
    """Else that rank alone would step with it, and part from the others."""
    for rank in on_ranks(bad_copies, 2):
        assert not any(isfinite(norm) for norm in rank.values()), rank


# ---- what torch's own functions would do in silence ----------------------------------------------------------------


def torchs_own(world: World) -> dict[str, Any]:
    """torch's clipping, a whole-matrix optimizer, and what is no model."""
    found: dict[str, Any] = {}
    for kind in ON_TWO:
        model, _ = wrapped(kind, group_of(), group_of())
        inputs, targets = lockstep.shard_batch(batch_of(0), world.rank, world.size)
        if kind in ("tp", "pp"):
            inputs, targets = batch_of(0)
        if isinstance(model, lockstep.Pipeline):
            model.step(inputs, targets, F.cross_entropy)
        else:
            F.cross_entropy(model(inputs), targets).backward()
        try:
            norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
            found[kind] = float(getattr(norm, "full_tensor", lambda norm=norm: norm)())
        except UserError as error:
            found[kind] = str(error)
    sharded = lockstep.FullyShardedDataParallel(build(), shard=nn.Linear)
    sharded(batch_of(0)[0]).sum().backward()
    muon = torch.optim.Muon([p for p in sharded.parameters() if p.ndim == 2], lr=0.1)
    parts = lockstep.tensor_parallel(build(), PLAN)
    found["refused"] = refused(
        [
            muon.step,
            lambda: lockstep.clip_grad_norm_(sharded.parameters(), LIMIT),
            lambda: lockstep.clip_grad_norm_(sharded, 0.0),
            lambda: torch.nn.utils.clip_grad_value_(sharded.parameters(), 1.0),
            lambda: torch.nn.utils.clip_grad_norm_(copy.deepcopy(parts).parameters(), 1.0),
        ]
    )
    return found


def test_torchs_clipping_is_right_or_an_error_that_names_ours() -> None:
    (norm,) = one_process()["norms"][:1]
    first, second = on_ranks(torchs_own, 2)
    assert first == second
    for kind in ("naive", "bucketed", "ddp", "fsdp"):
        assert first[kind] == pytest.approx(norm, rel=1e-10)
    for kind in ("zero1", "zero2", "zero3", "tp", "pp"):
        assert "lockstep.clip_grad_norm_(model, max_norm)" in first[kind]
    muon, generator, zero, value, copied = first["refused"]
    assert "Muon looks at more than one element at a time, and FullyShardedDataParallel" in muon
    assert "was given a generator; give the model itself" in generator
    assert "max_norm is 0.0" in zero
    assert "clip_grad_value_ sees only what this rank holds" in value
    assert "tensor_parallel has spread them" in copied


def test_a_module_that_outlives_its_wrapper_is_clipped_by_torch_again() -> None:
    model = build()
    optimizer = lockstep.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    wrapper = lockstep.ShardedDataParallel(model, optimizer)
    with pytest.raises(UserError, match="ShardedDataParallel has spread them"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
    del wrapper
    model(batch_of(0)[0]).sum().backward()
    assert float(torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)) > 0


# ---- freezing, copies ----------------------------------------------------------------------------------------------

FREEZES = ("bucketed", "zero1", "zero2", "zero3", "tp")


def freezing_loop(model: Any, optimizer: torch.optim.Optimizer, share: tuple[int, int]) -> None:
    """Layer 2 is frozen at step 1 and trained again from step 3 on; layer 6 is frozen at first."""
    for step in range(5):
        for name, parameter in model.named_parameters():
            if name.removeprefix("module.").startswith("2."):
                parameter.requires_grad_(step not in (1, 2))
            if name.removeprefix("module.").startswith("6."):
                parameter.requires_grad_(step > 1)
        optimizer.zero_grad()
        inputs, targets = lockstep.shard_batch(batch_of(step), *share)
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()


def freezing(world: World) -> dict[str, dict[str, Tensor]]:
    found = {}
    for kind in FREEZES:
        model, optimizer = wrapped(kind, group_of(), group_of())
        freezing_loop(model, optimizer, (0, 1) if kind == "tp" else (world.rank, world.size))
        found[kind] = gathered(held_by(model), group_of())
    return found


def test_what_is_frozen_between_steps_stays_as_it_is() -> None:
    model = build()
    freezing_loop(model, adamw(model.parameters()), (0, 1))
    for rank in on_ranks(freezing, 2):
        for kind in FREEZES:
            for key, value in model.state_dict().items():
                torch.testing.assert_close(rank[kind][key], value, rtol=1e-9, atol=1e-11, msg=f"{kind} {key}")


def averaged_copies(world: World) -> dict[str, dict[str, Tensor]]:
    """torch's own average of the weights, which deep-copies the model."""
    found = {}
    for kind in ("bucketed", "zero3", "tp"):
        model, optimizer = wrapped(kind, group_of(), group_of())
        share = (0, 1) if kind == "tp" else (world.rank, world.size)
        found[kind] = gathered(held_by(averaged(model, optimizer, share)), group_of())
    return found


def averaged(model: Any, optimizer: torch.optim.Optimizer, share: tuple[int, int]) -> Any:
    average = torch.optim.swa_utils.AveragedModel(model, avg_fn=lambda mean, new, _: mean * 0.5 + new * 0.5)
    for step in range(3):
        optimizer.zero_grad()
        inputs, targets = lockstep.shard_batch(batch_of(step), *share)
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        average.update_parameters(model)
    assert torch.isfinite(average(batch_of(0)[0])).all()
    return average.module


def test_a_deep_copy_is_a_model_of_its_own() -> None:
    model = build()
    expected = averaged(model, adamw(model.parameters()), (0, 1)).state_dict()
    for rank in on_ranks(averaged_copies, 2):
        for kind, found in rank.items():
            for key, value in expected.items():
                torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-11, msg=f"{kind} {key}")


# ---- a rank that goes on after an error ----------------------------------------------------------------------------


class Fails(torch.autograd.Function):
    """Backward of this rank ends here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise ZeroDivisionError("a bad sample")


def caught_errors(world: World, sync: str) -> str:
    """Rank 1 catches what its backward raises, and goes on: the next forward, or this, drops the round."""
    model = lockstep.DataParallel(build(), sync=sync)
    if world.rank == 1:
        model.module[3].register_forward_hook(lambda _module, _inputs, output: Fails.apply(output))
    inputs, targets = lockstep.shard_batch(batch_of(0), world.rank, world.size)
    try:
        F.cross_entropy(model(inputs), targets).backward()
    except ZeroDivisionError:
        model.zero_grad()
    except UserError as error:
        return str(error)
    return "went on"


@pytest.mark.parametrize("sync", get_args(Sync))
def test_a_rank_that_goes_on_after_an_error_is_noticed_by_the_others(sync: str) -> None:
    first, second = on_ranks(caught_errors, 2, sync, timeout=60)
    assert "the backward of another rank has failed" in first
    assert second == "went on"

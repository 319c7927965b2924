"""ZeRO by hand: the traps that a wrapper must survive, against one process."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lockstep import FullyShardedDataParallel, ShardedDataParallel, ShardedOptimizer, UserError
from lockstep.comm.ledger import Ledger, recording
from lockstep.launch import Launch, run_on_ranks
from lockstep.layout.world import World
from tests.ranks import LONG, on_ranks

WIDTH = 6


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.tensor(0.7))  # of no dimension
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) * self.scale


class Tied(nn.Module):
    """Blocks in a list; a weight outside them that is used twice, and one inside two blocks."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(Layer() for _ in range(layers))
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight
        self.blocks[1].linear.bias = self.blocks[0].linear.bias
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x: Tensor, skip: int | None = None, twice: bool = False, reentrant: bool = False) -> Tensor:
        x = self.first(x) * self.frozen
        for number, block in enumerate(self.blocks):
            if number == skip:  # it computes, and nothing depends on it
                x = x + 0 * block(x.detach()).detach()
            elif reentrant:
                x = checkpoint(block, x, use_reentrant=True)
            else:
                x = block(block(x)) if twice else block(x)
        y: Tensor = self.last(x)
        return y


def model(seed: int = 0) -> Tied:
    torch.manual_seed(seed)
    return Tied().double()


def samples(step: int, count: int = 12) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


Loss = Callable[[nn.Module, Tensor, int], Tensor]


def plain_loss(module: nn.Module, x: Tensor, _: int) -> Tensor:
    y: Tensor = module(x)
    return y.square().mean()


def follow(
    world: World, wrapped: nn.Module, optimizer: Any, names: Callable[[], dict[str, Tensor]], **how: Any
) -> None:
    """Train beside one process and compare all weights after each step. `how`: what each step does."""
    reference = model()
    theirs = torch.optim.AdamW([p for p in reference.parameters() if p.requires_grad], lr=0.01)
    loss: Loss = how.get("loss", plain_loss)
    backwards: int = how.get("backwards", 1)
    for step in range(3):
        whole = samples(step)
        theirs.zero_grad()
        for rank, part in enumerate(whole.chunk(world.size)):
            for _ in range(backwards):
                (loss(reference, part, rank) / world.size).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), how.get("clip", 1e9))
        theirs.step()

        mine = whole.chunk(world.size)[world.rank]
        (optimizer if how.get("zero_by_optimizer") else wrapped).zero_grad()
        if how.get("evaluate"):
            with torch.no_grad():
                wrapped(mine)
        for turn in range(backwards):
            if how.get("no_sync") and turn < backwards - 1:
                with wrapped.no_sync():
                    loss(wrapped, mine, world.rank).backward()
            else:
                loss(wrapped, mine, world.rank).backward()
                if how.get("sync_each"):
                    wrapped.finish_gradient_synchronization()
        wrapped.finish_gradient_synchronization()
        if "clip" in how:
            wrapped.clip_grad_norm_(how["clip"])
        if how.get("forward_before_step"):
            wrapped(mine)
        optimizer.step()
        found = names()
        for name, expected in reference.state_dict().items():
            torch.testing.assert_close(found[name], expected, rtol=0, atol=1e-10, msg=f"{name}, step {step}, {how}")


def skips_on_rank_1(module: nn.Module, x: Tensor, rank: int) -> Tensor:
    """The loss of rank 1 does not depend on block 2."""
    y: Tensor = module(x, skip=2 if rank == 1 else None)
    return y.square().mean()


def last_unused(module: nn.Module, x: Tensor, _: int) -> Tensor:
    """Nobody's loss depends on block 3."""
    y: Tensor = module(x, skip=3)
    return y.square().mean()


COURSES: list[dict[str, Any]] = [
    {},
    {"zero_by_optimizer": True},
    {"backwards": 2},
    {"backwards": 2, "sync_each": True},
    {"backwards": 3, "no_sync": True},
    {"loss": skips_on_rank_1},
    {"loss": last_unused},
]
ONLY_FULLY_SHARDED: list[dict[str, Any]] = [
    {"evaluate": True, "zero_by_optimizer": True},
    {"forward_before_step": True},
    {"clip": 0.05},
    {"loss": lambda module, x, _: module(x, twice=True).square().mean()},
    {"loss": lambda module, x, _: module(x, reentrant=True).square().mean()},
]


def check_stages_1_and_2(world: World) -> None:
    for stage in (1, 2):
        for how in COURSES:
            mine = model(seed=world.rank)
            optimizer = ShardedOptimizer(mine.parameters(), torch.optim.AdamW, bucket_mb=0.0005, lr=0.01)
            wrapped = ShardedDataParallel(mine, optimizer, stage=stage)
            follow(world, wrapped, optimizer, mine.state_dict, **how)


OPTIONS: tuple[dict[str, Any], ...] = (
    {"shard": (Layer, Tied)},
    {},
    {"reshard_after_forward": False},
    {"prefetch": 0},
)


def check_stage_3(world: World) -> None:
    for options in OPTIONS if world.size < 3 else OPTIONS[:1]:
        for how in [*COURSES, *ONLY_FULLY_SHARDED]:
            mine = model(seed=world.rank)
            before = dict(mine.named_parameters())
            wrapped = FullyShardedDataParallel(mine, **options)
            after = dict(wrapped.named_parameters())
            assert list(after) == list(before)
            assert all(after[n] is before[n] for n in before)  # the same objects
            optimizer = torch.optim.AdamW([p for p in wrapped.parameters() if p.requires_grad], lr=0.01)
            follow(world, wrapped, optimizer, wrapped.full_state_dict, **how)


def check_bytes_are_bounded(world: World) -> None:
    """Never more than the unit that computes and the one that is fetched are whole."""
    mine = model()
    wrapped = FullyShardedDataParallel(mine, shard=Layer)
    units = [unit for block in wrapped.blocks for unit in block.units]
    most = 0

    def look(*_: Any) -> None:
        nonlocal most
        blocks = [any(u._storage.nbytes() for u in b.units) for b in wrapped.blocks]
        most = max(most, sum(blocks))

    for block in mine.blocks:
        block.linear.register_forward_hook(look)
        block.linear.register_full_backward_hook(look)
    for step in range(2):
        wrapped(samples(step)).square().mean().backward()
        wrapped.finish_gradient_synchronization()
        assert sum(u._storage.nbytes() for u in units) == 0
    assert most == 2
    state = wrapped.full_state_dict(only_rank=0)
    assert bool(state) == (world.rank == 0)


def check_meta_device(world: World) -> None:
    """Built without memory; filled unit by unit, alike on all ranks."""
    with torch.device("meta"):
        empty = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(3)), nn.Linear(4, 2))
    torch.manual_seed(world.rank)
    wrapped = FullyShardedDataParallel(empty, device=torch.device("cpu"))
    state = wrapped.full_state_dict()
    everyone: list[Any] = [None] * world.size
    dist.all_gather_object(everyone, {n: t.sum().item() for n, t in state.items()})
    assert all(e == everyone[0] for e in everyone)
    assert float(state["0.0.weight"].std()) > 0.05
    assert torch.equal(state["0.1.running_var"], torch.ones(4))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    before = float(wrapped(torch.ones(3, 4)).square().mean())
    for _ in range(3):
        optimizer.zero_grad()
        wrapped(torch.ones(3, 4)).square().mean().backward()
        wrapped.finish_gradient_synchronization()
        optimizer.step()
    assert float(wrapped(torch.ones(3, 4)).square().mean()) < before


def check_lower_precision(world: World) -> None:
    """Masters and their gradients stay fp32; what is gathered has half the bytes, and what is reduced too where that
    was asked for; batch norms keep their fp32.
    """
    ledgers: dict[Any, Ledger] = {}
    for dtype, reduce in ((None, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, None)):
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU()) for _ in range(3)))
        wrapped = FullyShardedDataParallel(net, compute_dtype=dtype, reduce_dtype=reduce)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        ledgers[dtype, reduce] = Ledger()
        for _ in range(2):
            ledgers[dtype, reduce].open()
            with recording(ledgers[dtype, reduce]):
                output = wrapped(torch.randn(8, 32))
                assert output.dtype == torch.float32
                output.square().mean().backward()
                wrapped.finish_gradient_synchronization()
                optimizer.step()
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in wrapped.parameters() if p.grad is not None)
    plain, mixed, half = (ledger.traffic().wire_bytes for ledger in ledgers.values())
    assert half < 0.6 * plain < mixed < 0.75 * plain


def check_gradients_are_reduced_in_fp32(world: World) -> None:
    """Of bf16 gradients that bf16 cannot add up: 256 of one rank swallow the 1 of the others."""
    found = {}
    for reduce in (torch.float32, None):
        layer = nn.Linear(1, 1, bias=False)
        wrapped = FullyShardedDataParallel(
            nn.Sequential(layer), compute_dtype=torch.bfloat16, reduce_dtype=reduce, output_dtype=None
        )
        x = torch.tensor([[256.0 if world.rank == 0 else 1.0]])
        wrapped(x).float().sum().backward()
        found[reduce] = sum(float(g) for g in wrapped.full_gradients().values())
    exact = (256.0 + world.size - 1) / world.size
    assert found[torch.float32] == exact
    assert found[None] != exact or world.size == 1


def check_optimizer(world: World) -> None:
    """It is an optimizer as any other: groups, generators, closures, schedulers, state."""
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(s)) for s in ((5, 3), (7,), (), (2, 2, 2), (1,))]
    others = copy.deepcopy(weights)
    weights[4].requires_grad_(False)
    others[4].requires_grad_(False)
    mine = ShardedOptimizer(
        ({"params": iter(g), "lr": lr} for g, lr in ((weights[:2], 0.1), (weights[2:], 0.01))),
        partial(torch.optim.AdamW, weight_decay=0.1),
    )
    theirs = torch.optim.AdamW(
        [{"params": others[:2], "lr": 0.1}, {"params": others[2:], "lr": 0.01}], weight_decay=0.1
    )
    extra, other_extra = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    mine.add_param_group({"params": [extra], "lr": 0.5})
    theirs.add_param_group({"params": [other_extra], "lr": 0.5})
    schedules = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (mine, theirs)]

    def go(optimizer: Any, parameters: list[nn.Parameter], step: int) -> float:
        def closure() -> Tensor:
            optimizer.zero_grad()
            used = [p for i, p in enumerate(parameters) if p.requires_grad and not (step == 2 and i == 1)]
            loss = sum(((p - 1) ** 2).sum() for p in used)
            assert isinstance(loss, Tensor)
            loss.backward()
            return loss

        return float(optimizer.step(closure))

    for step in range(4):
        assert go(mine, [*weights, extra], step) == pytest.approx(go(theirs, [*others, other_extra], step))
        for schedule in schedules:
            schedule.step()
    torch.testing.assert_close([*weights, extra], [*others, other_extra])
    assert mine.param_groups[0]["lr"] == theirs.param_groups[0]["lr"] == pytest.approx(0.1 / 16)
    torch.testing.assert_close(mine.full_state_dict()["state"], theirs.state_dict()["state"])
    held = sum(shard.nbytes for bucket in mine.buckets for shard in bucket.shards)
    everyone: list[Any] = [None] * world.size
    dist.all_gather_object(everyone, held)
    assert max(everyone) - min(everyone) <= 16 * len(mine.buckets)  # balanced by bytes

    fresh = ShardedOptimizer(iter([*weights, extra]), torch.optim.AdamW)
    with pytest.raises(UserError, match="groups of"):
        fresh.load_state_dict(theirs.state_dict())
    mine.load_state_dict(theirs.state_dict())
    mine.load_state_dict(mine.state_dict())
    torch.testing.assert_close(mine.full_state_dict()["state"], theirs.state_dict()["state"])
    with pytest.raises(UserError, match="part of rank"):
        mine.load_state_dict({**mine.state_dict(), "ranks": world.size + 1})
    with pytest.raises(UserError, match="looks at more than one element"):
        ShardedOptimizer(weights, partial(torch.optim.Adafactor))
    with pytest.raises(UserError, match="not in the ShardedOptimizer"):
        ShardedDataParallel(nn.Linear(2, 2), ShardedOptimizer([extra], torch.optim.SGD, lr=1.0))


def run_checks(world: World, names: tuple[str, ...]) -> None:
    for name in names:
        try:
            globals()[f"check_{name}"](world)
        except Exception as error:
            raise AssertionError(f"{name}: {type(error).__name__} {error}") from error


def test_two_ranks() -> None:
    checks = (
        "optimizer",
        "stages_1_and_2",
        "stage_3",
        "bytes_are_bounded",
        "meta_device",
        "lower_precision",
        "gradients_are_reduced_in_fp32",
    )
    on_ranks(run_checks, 2, checks, timeout=LONG)


@pytest.mark.slow
def test_three_ranks_over_gloo() -> None:
    launch = Launch(nproc=3, device="cpu", timeout=LONG, backend="gloo")
    run_on_ranks(run_checks, ("stages_1_and_2", "stage_3"), launch=launch)


def test_four_ranks() -> None:
    on_ranks(run_checks, 4, ("bytes_are_bounded",), timeout=LONG)


def test_one_process_needs_no_ranks() -> None:
    world = World()
    check_stage_3(world)
    check_lower_precision_alone()


def check_lower_precision_alone() -> None:
    wrapped = FullyShardedDataParallel(nn.Sequential(nn.Linear(4, 4)), compute_dtype=torch.bfloat16)
    wrapped(torch.ones(2, 4)).sum().backward()
    wrapped.finish_gradient_synchronization()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in wrapped.parameters())

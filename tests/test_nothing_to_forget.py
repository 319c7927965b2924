"""A plain loop, with nothing of ours to call between backward and step: after `backward()` gradients are the mean."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep import (
    DataParallel,
    FullyShardedDataParallel,
    ShardedDataParallel,
    ShardedOptimizer,
    UserError,
    shard_batch,
)
from lockstep.layout.world import World
from tests.ranks import on_ranks

Wrapped = tuple[nn.Module, torch.optim.Optimizer]


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def data_parallel(sync: str, **options: Any) -> Callable[[nn.Module], Wrapped]:
    def wrap(model: nn.Module) -> Wrapped:
        wrapped = DataParallel(model, sync=sync, bucket_mb=0.0002, **options)  # type: ignore[arg-type]
        return wrapped, torch.optim.AdamW(wrapped.parameters(), lr=0.01)

    return wrap


def sharded(stage: int, **options: Any) -> Callable[[nn.Module], Wrapped]:
    def wrap(model: nn.Module) -> Wrapped:
        optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01, bucket_mb=0.0002)
        return ShardedDataParallel(model, optimizer, stage, **options), optimizer

    return wrap


def fully_sharded(**options: Any) -> Callable[[nn.Module], Wrapped]:
    def wrap(model: nn.Module) -> Wrapped:
        wrapped = FullyShardedDataParallel(model, **options)
        return wrapped, torch.optim.AdamW(wrapped.parameters(), lr=0.01)

    return wrap


WRAPPERS = {
    **{mode: data_parallel(mode) for mode in ("naive", "flat", "overlap", "bucketed")},
    "zero1": sharded(1),
    "zero2": sharded(2),
    "zero1, gathers overlapped": sharded(1, overlap_gather=True),
    "zero2, gathers overlapped": sharded(2, overlap_gather=True),
    "zero3": fully_sharded(),
    "zero3, one unit": fully_sharded(shard=lambda module: isinstance(module, nn.Sequential)),
}


def weights_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    if isinstance(model, FullyShardedDataParallel):
        return model.full_state_dict()
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.wait_for_parameters()
    return {name.removeprefix("module."): p.detach() for name, p in model.named_parameters()}


LOOPS: dict[str, tuple[int, bool]] = {  # name -> (backwards of a step, all but the last under no_sync)
    "one backward": (1, False),
    "two backwards": (2, False),
    "accumulated": (3, True),
}


def plain_loop(world: World, wrap: Callable[[nn.Module], Wrapped], backwards: int, quiet: bool) -> float:
    """Six steps of a wrapper and of one process, only optimizer.zero_grad() in between; how far they are apart."""
    alone = make_model()
    alone_optimizer = torch.optim.AdamW(alone.parameters(), lr=0.01)
    model, optimizer = wrap(make_model(seed=world.rank))
    generator = torch.Generator().manual_seed(1)
    for step in range(6):
        optimizer.zero_grad(set_to_none=step % 2 == 0 or "Sharded" in type(model).__name__)
        alone_optimizer.zero_grad()
        for index in range(backwards):
            inputs = torch.randn(12, 6, generator=generator, dtype=torch.float64)
            targets = torch.randn(12, 3, generator=generator, dtype=torch.float64)
            mine = shard_batch((inputs, targets), world.rank, world.size)
            if quiet and index < backwards - 1:
                with model.no_sync():  # type: ignore[operator, union-attr]
                    nn.functional.mse_loss(model(mine[0]), mine[1]).backward()
            else:
                nn.functional.mse_loss(model(mine[0]), mine[1]).backward()
            nn.functional.mse_loss(alone(inputs), targets).backward()
        if step == 3 and hasattr(model, "finish_gradient_synchronization"):
            model.finish_gradient_synchronization()  # type: ignore[operator]  # harmless
        optimizer.step()
        alone_optimizer.step()
    found = weights_of(model, optimizer)
    return max(float((found[name] - p).abs().max()) for name, p in alone.named_parameters())


def manual_mode(world: World) -> dict[str, str]:
    """A call that was asked for and forgotten is an error at the next forward."""
    said = {}
    x = torch.full((2, 6), 1.0 + world.rank, dtype=torch.float64)
    wrappers = {
        **{mode: data_parallel(mode, manual=True) for mode in ("naive", "flat", "overlap", "bucketed")},
        "zero1": sharded(1, manual=True),
        "zero2": sharded(2, manual=True),
        "zero3": fully_sharded(manual=True),
    }
    for name, wrap in wrappers.items():
        model, optimizer = wrap(make_model())
        model(x).sum().backward()
        model.finish_gradient_synchronization()  # type: ignore[operator]
        optimizer.step()
        optimizer.zero_grad()
        model(x).sum().backward()
        try:
            model(x)
        except UserError as error:
            said[name] = str(error)
        model.finish_gradient_synchronization()  # type: ignore[operator]
        with torch.no_grad():
            model(x)  # and goes on
    return said


def failed_backward(world: World) -> float:
    """A backward that raises in its midst, on every rank alike: the next step is as if it had not been."""

    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise RuntimeError("in the midst of backward")

    worst = 0.0
    x = torch.full((2, 6), 1.0 + world.rank, dtype=torch.float64)
    for name, wrap in WRAPPERS.items():
        (model, optimizer), (fresh, other) = wrap(make_model()), wrap(make_model())
        hook = (model.module[2]).register_forward_pre_hook(lambda _, args: (Raises.apply(args[0]),))  # type: ignore
        with pytest.raises(RuntimeError, match="in the midst"):
            model(x).sum().backward()
        hook.remove()
        optimizer.zero_grad()
        for m, o in ((model, optimizer), (fresh, other)):
            m(x).square().sum().backward()
            o.step()
        a, b = weights_of(model, optimizer), weights_of(fresh, other)
        worst = max([worst, *(float((a[n] - b[n]).abs().max()) for n in b)])
        assert worst < 1e-12, name
    return worst


def buffers_as_ddp(world: World) -> list[tuple[str, float]]:
    """BatchNorm's statistics after forwards with and without no_sync: those of PyTorch's DDP, on every rank."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    found = []
    for name in ("naive", "bucketed", "zero3"):
        models: dict[str, Any] = {"ddp": DistributedDataParallel(copy.deepcopy(plain))}
        mine = copy.deepcopy(plain)
        models["mine"] = FullyShardedDataParallel(mine) if name == "zero3" else DataParallel(mine, sync=name)  # type: ignore
        for quiet in (False, True, True, False, False, True):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(len(found) + world.rank)) + world.rank
            for model in models.values():
                if quiet:
                    with model.no_sync():
                        model(x).sum().backward()
                else:
                    model(x).sum().backward()
            theirs, ours = (models[who].module[0].running_mean for who in ("ddp", "mine"))
            found.append((name, float((theirs - ours).abs().max())))
    return found


def state_dicts(world: World) -> str:
    model = FullyShardedDataParallel(make_model(seed=world.rank))
    whole = model.full_state_dict()
    try:
        model.state_dict()
    except UserError as error:
        said = str(error)
    other = FullyShardedDataParallel(make_model(seed=7 + world.rank))
    other.load_full_state_dict(whole)
    assert all(torch.equal(t, whole[n]) for n, t in other.full_state_dict().items())
    with pytest.raises(UserError, match="no parameter or buffer"):
        other.load_full_state_dict({"nonsense": torch.zeros(1)})
    with pytest.raises(UserError, match=r"0.weight has shape \(1,\)"):
        other.load_full_state_dict({"0.weight": torch.zeros(1)})
    dist.barrier()
    return said


def everything(world: World) -> dict[str, Any]:
    return {
        "loops": {(w, n): plain_loop(world, WRAPPERS[w], *loop) for w in WRAPPERS for n, loop in LOOPS.items()},
        "manual": manual_mode(world),
        "failed": failed_backward(world),
        "buffers": buffers_as_ddp(world),
        "state_dict": state_dicts(world),
    }


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def found(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return on_ranks(everything, request.param)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_plain_loop_equals_one_process(found: list[dict[str, Any]], wrapper: str, loop: str) -> None:
    assert [f["loops"][wrapper, loop] < 1e-12 for f in found] == [True] * len(found)


@pytest.mark.parametrize("name", ["naive", "flat", "overlap", "bucketed", "zero1", "zero2", "zero3"])
def test_what_was_asked_for_and_forgotten_is_an_error_at_the_next_forward(found: list[dict], name: str) -> None:
    for rank in found:
        assert "finish_gradient_synchronization() was not called before the next forward" in rank["manual"][name]


def test_a_backward_that_failed_leaves_nothing_behind(found: list[dict[str, Any]]) -> None:
    assert all(f["failed"] < 1e-12 for f in found)


def test_batch_norm_under_no_sync_does_as_ddps(found: list[dict[str, Any]]) -> None:
    for rank, f in enumerate(found):
        assert all(difference < 1e-6 for _, difference in f["buffers"]), f"rank {rank}: {f['buffers']}"


def test_a_sharded_state_dict_is_refused_and_the_whole_one_loads(found: list[dict[str, Any]]) -> None:
    assert all("call full_state_dict() on every rank" in f["state_dict"] for f in found)


def test_alone_a_state_dict_is_whole() -> None:
    model = make_model()
    assert FullyShardedDataParallel(copy.deepcopy(model)).state_dict().keys() == model.state_dict().keys()


class Stashes(nn.Module):
    """Its first block's output can be asked for: an auxiliary loss depends on no output of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6).double() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x).tanh()
            if index == 1:
                self.stash = x
        return x


def odd_losses(world: World) -> dict[str, float]:
    """Of zero3: a loss on a tensor from inside; and a rank that has no loss at all, and says so by a call."""
    torch.manual_seed(0)
    plain = Stashes()
    x = torch.full((2, 6), 0.5 + world.rank, dtype=torch.float64)
    found = {}
    for how in ("inside", "no loss on rank 1"):
        model, alone = FullyShardedDataParallel(copy.deepcopy(plain)), copy.deepcopy(plain)
        for m in (model, alone):
            output = m(x)
            if how == "inside":
                (m.module if m is model else m).stash.square().sum().backward()  # type: ignore[union-attr]
            elif world.rank == 0:
                output.square().sum().backward()
            elif m is model:
                model.finish_gradient_synchronization()
        got = model.full_gradients()
        worst = 0.0
        for name, parameter in alone.named_parameters():
            mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(mean := mine / world.size)
            worst = max(worst, float((got.get(name, torch.zeros_like(mean)) - mean).abs().max()))
        found[how] = worst
    return found


def test_zero3_with_odd_losses() -> None:
    for found in on_ranks(odd_losses, 3):
        assert all(difference < 1e-12 for difference in found.values()), found

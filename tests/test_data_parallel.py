"""DataParallel as a citizen of anybody's own loop, its compression, and local SGD."""

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep import DataParallel, LocalSGD, UserError, shard_batch
from lockstep.comm.collectives import all_reduce
from lockstep.comm.ledger import Ledger, recording
from lockstep.config import Parallel
from lockstep.layout.world import World
from lockstep.parallel.data.bucket import assign_buckets
from lockstep.verify.laws import check_law
from tests.ranks import on_ranks

MODES = ["naive", "flat", "overlap", "bucketed"]


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).double()


def train_in_four_lines(world: World, mode: str) -> float:
    """The loop of the README; returns the largest difference to one process."""
    inputs, targets = torch.randn(6, 6, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
    dist.broadcast(inputs, 0)
    dist.broadcast(targets, 0)
    alone = make_model()
    alone_optimizer = torch.optim.AdamW(alone.parameters(), lr=0.01)
    model = DataParallel(make_model(seed=world.rank), sync=mode)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    my_inputs, my_targets = shard_batch((inputs, targets), world.rank, world.size)
    for _ in range(5):
        for m, o, x, y in ((model, optimizer, my_inputs, my_targets), (alone, alone_optimizer, inputs, targets)):
            o.zero_grad()
            nn.functional.mse_loss(m(x), y).backward()
            o.step()
    both = zip(model.module.parameters(), alone.parameters(), strict=True)
    return max(float((a - b).abs().max()) for a, b in both)


def buffers_follow_rank_0(world: World) -> dict[str, Any]:
    """Statistics with which each forward begins, on every rank; and what each rank's own would have been."""
    torch.manual_seed(world.rank)
    model = DataParallel(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)))
    norm, entered = model.module[0], []
    norm.register_forward_pre_hook(lambda *_: entered.append(norm.running_mean.tolist()))
    model(torch.full((4, 3), float(world.rank)) + torch.randn(4, 3)).sum().backward()
    own = norm.running_mean.tolist()
    model(torch.randn(4, 3)).sum().backward()  # begins by taking rank 0's statistics
    before = norm.running_mean.tolist()
    silent = True
    if world.is_main:
        model.eval()
        with torch.no_grad(), recording(Ledger()) as ledger:
            ledger.open()
            model(torch.randn(4, 3))  # must not communicate: only rank 0 is here
            silent = not ledger.entries and norm.running_mean.tolist() == before
    return {"own": own, "entered": entered, "batches": float(norm.num_batches_tracked), "silent": silent}


def gradients_are_views(world: World) -> bool:
    model = DataParallel(make_model(), sync="bucketed")
    model(torch.randn(2, 6, dtype=torch.float64)).sum().backward()
    model.finish_gradient_synchronization()
    (bucket,) = model.buckets
    start, end = bucket.buffer.data_ptr(), bucket.buffer.data_ptr() + bucket.buffer.nbytes
    return all(start <= p.grad.data_ptr() < end for p in model.parameters() if p.grad is not None)


def wrapped_twice(world: World) -> int:
    """A module whose first wrapper is gone must not be reduced twice."""
    module = make_model()
    for _ in range(2):
        wrapped = DataParallel(module, sync="overlap")
        gc.collect()
    ledger = Ledger()
    ledger.open()
    with recording(ledger):
        wrapped(torch.randn(2, 6, dtype=torch.float64)).sum().backward()
        wrapped.finish_gradient_synchronization()
    return ledger.traffic().collectives


def abandoned_step(world: World) -> float:
    """A step begun and given up with zero_grad leaves nothing behind."""
    worst = 0.0
    x = torch.full((2, 6), 1.0 + world.rank, dtype=torch.float64)
    for mode in MODES:
        model, fresh = (DataParallel(make_model(), sync=mode) for _ in range(2))
        model(x).sum().backward()
        model.zero_grad()
        for m in (model, fresh):
            m(x).square().sum().backward()
            m.finish_gradient_synchronization()
        pairs = zip(model.parameters(), fresh.parameters(), strict=True)
        worst = max([worst, *(float((a.grad - b.grad).abs().max()) for a, b in pairs)])
    return worst


def leaks(world: World) -> bool:
    module = make_model()
    wrapped = DataParallel(module)
    bucket = weakref.ref(wrapped.buckets[0])
    del wrapped
    gc.collect()
    return bucket() is not None


def skipped_steps_are_forgotten(world: World) -> dict[str, bool]:
    """After `forget_step` error feedback remembers what it did before the step."""
    same = {}
    for compression in ("topk", "powersgd"):
        model = DataParallel(make_model(), compression=compression, topk_ratio=0.2, powersgd_rank=1)
        states = []
        for scale in (1.0, float("nan"), 2.0):
            model.zero_grad()
            (model(torch.ones(2, 6, dtype=torch.float64)).square().sum() * scale).backward()
            model.finish_gradient_synchronization()
            if scale != 1.0:
                model.forget_step()
            states.append(model.reducer_state()[0]["residual"].clone())
        same[compression] = all(torch.equal(s, states[0]) for s in states)
    return same


def different_models(world: World) -> str:
    try:
        DataParallel(nn.Linear(3, 2 + world.rank))
    except UserError as error:
        return str(error)
    return ""


def compression_laws(world: World) -> dict[str, str | None]:
    names = ("bf16", "fp16", "topk", "powersgd")
    return {name: check_law(world, Parallel(compression=name), "fp64") for name in names}


def a_skipped_step_leaves_no_poison(world: World) -> dict[str, bool]:
    """After a NaN step the next one is finite again, also for methods that remember."""
    clean = {}
    for compression in ("bf16", "fp16", "topk", "powersgd"):
        model = DataParallel(make_model(), compression=compression, topk_ratio=0.2, powersgd_rank=1)
        for value in (1.0, float("nan") if world.rank == 0 else 1.0, 1.0):
            model.zero_grad()
            (model(torch.ones(2, 6, dtype=torch.float64)).sum() * value).backward()
            model.finish_gradient_synchronization()
        clean[compression] = all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
    return clean


def unused_with_feedback(world: World) -> bool:
    """A parameter without a gradient keeps what was held back for it until it has one again."""
    model = nn.ModuleList([nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)]).double()
    wrapped = DataParallel(model, compression="topk", topk_ratio=0.1)
    given, sent = torch.zeros(2, 4, 4, dtype=torch.float64), torch.zeros(2, 4, 4, dtype=torch.float64)
    for step in range(4):
        wrapped.zero_grad()
        for i, layer in enumerate(model):
            if not (step == 2 and i == 0):
                x = torch.randn(3, 4, dtype=torch.float64)
                layer(x).square().sum().backward()
                given[i] += torch.autograd.grad(layer(x).square().sum(), layer.weight)[0] / world.size
        wrapped.finish_gradient_synchronization()
        for i, layer in enumerate(model):
            if layer.weight.grad is not None:
                sent[i] += layer.weight.grad
            elif not (step == 2 and i == 0):
                return False
    residual = wrapped.reducer_state()[0]["residual"]
    kept = torch.stack(list(residual.view(2, 4, 4)))
    if model[0].weight.data_ptr() != wrapped.buckets[0].parameters[0].data_ptr():
        kept = kept.flip(0)
    return torch.allclose(sent + all_reduce(kept, purpose="check"), all_reduce(given, purpose="check"), atol=1e-12)


def local_sgd(world: World, outer_lr: float) -> list[tuple[bool, bool]]:
    """(whether the ranks met, whether all hold the same weights) after each of 6 steps, meeting every 3."""
    model = make_model(seed=world.rank)
    averager = LocalSGD(model, every=3, outer_lr=outer_lr)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(6):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + world.rank)
        model(torch.randn(4, 6, generator=generator, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
        met = averager.after_step()
        weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        spread = all_reduce(weights.clone(), purpose="check") / world.size - weights
        found.append((met, float(spread.abs().max()) < 1e-12))
    return found


def everything(world: World) -> dict[str, Any]:
    """One start of the ranks for all checks."""
    return {
        "four lines": {mode: train_in_four_lines(world, mode) for mode in MODES},
        "buffers": buffers_follow_rank_0(world),
        "views": gradients_are_views(world),
        "twice": wrapped_twice(world),
        "different": different_models(world),
        "abandoned": abandoned_step(world),
        "leaks": leaks(world),
        "forgotten steps": skipped_steps_are_forgotten(world),
        "laws": compression_laws(world),
        "poison": a_skipped_step_leaves_no_poison(world),
        "unused": unused_with_feedback(world),
        "local sgd": local_sgd(world, 0.0),
        "diloco": local_sgd(world, 0.7),
    }


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return on_ranks(everything, 3)


@pytest.mark.parametrize("mode", MODES)
def test_a_plain_loop_equals_one_process(found: list[dict], mode: str) -> None:
    assert all(f["four lines"][mode] < 1e-12 for f in found)


def test_batch_norm_statistics_are_rank_0s_and_evaluation_is_silent(found: list[dict]) -> None:
    buffers = [f["buffers"] for f in found]
    assert [b["batches"] for b in buffers] == [2, 2, 2]
    assert len({tuple(b["own"]) for b in buffers}) == 3, "ranks see other samples"
    assert all(b["entered"][1] == buffers[0]["own"] for b in buffers), "the second forward begins with rank 0's"
    assert all(b["silent"] for b in buffers)


def test_gradients_live_in_the_buckets(found: list[dict]) -> None:
    assert all(f["views"] for f in found)


def test_a_module_can_be_wrapped_again(found: list[dict]) -> None:
    assert [f["twice"] for f in found] == [4, 4, 4]


def test_an_abandoned_step_leaves_nothing_behind(found: list[dict]) -> None:
    assert all(f["abandoned"] == 0 for f in found)


def test_a_discarded_wrapper_frees_its_buckets(found: list[dict]) -> None:
    assert not any(f["leaks"] for f in found)


def test_error_feedback_forgets_skipped_steps(found: list[dict]) -> None:
    assert all(f["forgotten steps"] == {"topk": True, "powersgd": True} for f in found)


def test_different_models_are_refused_on_every_rank(found: list[dict]) -> None:
    assert all("rank 1 has parameter ('weight', (3, 3)" in f["different"] for f in found)


def test_compression_keeps_its_laws(found: list[dict]) -> None:
    assert found[0]["laws"] == dict.fromkeys(("bf16", "fp16", "topk", "powersgd"))


def test_a_nan_step_does_not_poison_the_next(found: list[dict]) -> None:
    assert all(all(f["poison"].values()) for f in found)


def test_error_feedback_waits_for_unused_parameters(found: list[dict]) -> None:
    assert all(f["unused"] for f in found)


@pytest.mark.parametrize("name", ["local sgd", "diloco"])
def test_local_sgd_meets_every_third_step(found: list[dict], name: str) -> None:
    apart, together = (False, False), (True, True)
    assert all(f[name] == [apart, apart, together, apart, apart, together] for f in found)


def test_a_restart_of_diloco_begins_where_the_model_is() -> None:
    """Else its first outer gradient would be the way from the weights that it was made with."""
    model = make_model()
    averager = LocalSGD(model, every=3, outer_lr=0.7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    averager.restart()
    assert averager.steps == 0
    assert all(torch.equal(a, b) for a, b in zip(averager.outer_parameters, model.parameters(), strict=True))


# ---- without ranks ------------------------------------------------------------------------------------------


def test_at_world_size_1_it_is_the_module() -> None:
    model = make_model()
    wrapped = DataParallel(copy.deepcopy(model), sync="overlap")
    x = torch.randn(2, 6, dtype=torch.float64)
    for m in (model, wrapped):
        m(x).sum().backward()
    wrapped.finish_gradient_synchronization()
    for a, b in zip(model.parameters(), wrapped.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_wrong_options_are_named() -> None:
    with pytest.raises(UserError, match="sync is 'magic', but it must be one of naive, flat, overlap, bucketed"):
        DataParallel(make_model(), sync="magic")
    with pytest.raises(UserError, match="compression is 'zip', but it must be one of none, bf16"):
        DataParallel(make_model(), compression="zip")


def test_buckets_fill_in_reverse_and_never_mix_dtypes() -> None:
    tensors: list[Tensor] = [torch.zeros(10, dtype=d) for d in (torch.float32,) * 4 + (torch.float64,) * 2]
    buckets = assign_buckets(tensors, cap_bytes=80)
    assert [[t.dtype for t in b] for b in buckets] == [[torch.float64]] * 2 + [[torch.float32] * 2] * 2
    assert buckets[-1][-1] is tensors[0]
    assert len(assign_buckets(tensors, cap_bytes=float("inf"))) == 2
    assert len(assign_buckets(tensors, cap_bytes=1)) == 6
    assert assign_buckets([], cap_bytes=1) == []

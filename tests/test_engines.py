"""What engines promise beyond equality: no rank holds the whole model, groups are of the backend asked for."""

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lockstep.bench.parts import part_of
from lockstep.comm.ledger import Ledger, recording, seconds_between
from lockstep.comm.observe import ObservedGroup
from lockstep.config import CNN, GPT, MLP, Config, Data, Lora, Model, Parallel, ResNet, Train
from lockstep.data import DataSpec, read_share
from lockstep.layout.group import group_of
from lockstep.layout.world import World
from lockstep.measure.memory import measure_memory
from lockstep.models import build_model
from lockstep.models.gpt import Rotation
from lockstep.models.initial import Deferred
from lockstep.strategies import strategy_named
from lockstep.training.prepare import deferred_model, load_data, prepare_strategy, prepared_model
from tests.ranks import on_ranks

CONFIG = Config(
    model=GPT(d_model=128, layers=8, heads=4, context=16, vocabulary=64),
    data=Data(name="synthetic", samples=16),
    train=Train(batch_size=8, optimizer="adamw", lr=1e-3),
)


# ---- a model larger than a rank's memory ---------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_a_deferred_model_has_the_very_weights_of_one_that_is_built_at_once(tied: bool) -> None:
    config = replace(CONFIG, model=GPT(d_model=24, layers=2, heads=2, context=8, tied=tied, norm="rmsnorm"))
    spec = DataSpec("tokens", (8,), 19)
    whole = build_model(config.model, spec, seed=5)
    before = torch.get_rng_state()
    module, tensors = Deferred(lambda: build_model(config.model, spec), seed=5).on_meta()
    assert all(p.device.type == "meta" for p in module.parameters())
    found = {}
    for name, tensor in tensors:
        torch.randn(3)  # whoever takes a tensor may draw numbers of its own
        found[name] = tensor.clone()
    torch.set_rng_state(before)
    assert found.keys() == dict(whole.named_parameters()).keys()
    assert all(torch.equal(found[name], p) for name, p in whole.named_parameters())
    assert (whole.head.weight is whole.token_embedding.weight) == tied


@pytest.mark.parametrize(
    "model", [GPT(d_model=24, layers=2, heads=2, context=8), MLP(layers=3, width=8), CNN(), ResNet()]
)
def test_initial_weights_are_those_of_the_constructor_in_kind_and_of_each_module_by_itself(model: Model) -> None:
    spec = DataSpec("tokens", (8,), 19) if isinstance(model, GPT) else DataSpec("images", (3, 8, 8), 10)
    torch.manual_seed(0)
    constructed = dict(build_model(model, spec).named_parameters())
    deeper = replace(model, depth=34) if isinstance(model, ResNet) else model
    ours, others = (dict(build_model(model, spec, seed=5).named_parameters()) for model in (model, deeper))
    assert ours.keys() == constructed.keys()
    for name, parameter in ours.items():
        std, wanted = (float(p.detach().std(correction=0)) for p in (parameter, constructed[name]))
        few = 1 if parameter.numel() < 100 else 0.25
        assert abs(std - wanted) <= few * wanted, name
        if name in others and others[name].shape == parameter.shape:
            assert torch.equal(others[name], parameter), f"{name} depends on what was built before it"
    drawn = [p for p in ours.values() if p.numel() > 1 and float(p.detach().std()) > 0]
    assert all(not torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i] if a.shape == b.shape)


def test_adapters_begin_alike_in_one_piece_and_deferred() -> None:
    lora = replace(CONFIG, lora=Lora(rank=2, frozen_dtype="bf16"))
    spec = DataSpec("tokens", (16,), 64)
    whole = dict(prepared_model(lora, spec).named_parameters())
    deferred = dict(deferred_model(lora, spec).whole().named_parameters())
    assert whole.keys() == deferred.keys()
    assert all(torch.equal(whole[name], p) and whole[name].dtype == p.dtype for name, p in deferred.items())
    assert all(whole[name].requires_grad == p.requires_grad for name, p in deferred.items())
    plain = dict(build_model(CONFIG.model, spec, seed=0).named_parameters())
    assert all(torch.equal(whole[name], p.to(whole[name].dtype)) for name, p in plain.items())


def peak_share(world: World, name: str) -> float:
    """The most that a rank holds while a model is made ready, as a share of the whole model."""
    config = replace(CONFIG, parallel=strategy_named(name))
    dataset = load_data(world, config)
    with measure_memory(world.device) as watch:
        strategy = prepare_strategy(world, config, dataset)
    return watch.memory.peak_mib * 2**20 / (4 * strategy.parameters)


def peak_shares(world: World) -> dict[str, float]:
    return {name: peak_share(world, name) for name in ("bucketed", "zero3", "fsdp")}


@pytest.mark.slow
def test_no_rank_holds_the_whole_model() -> None:
    for shares in on_ranks(peak_shares, 4):
        assert shares["bucketed"] > 1
        assert shares["zero3"] < 0.7, shares  # a quarter, two gradient buffers of a block, and a block that is filled
        assert shares["fsdp"] < 0.7, shares


# ---- overlap -------------------------------------------------------------------------------------------------------


def awaited_before(world: World) -> list[int]:
    """How many of zero1's all-gathers have been waited for when each block begins its forward pass."""
    config = replace(CONFIG, parallel=strategy_named("zero1", Parallel(bucket_mb=0.1)))
    dataset = load_data(world, config)
    strategy = prepare_strategy(world, config, dataset)
    batch = read_share(dataset.train, torch.arange(8), strategy.batch_share())
    strategy.step(batch)
    counts: list[int] = []
    for block in strategy.model.blocks:  # type: ignore[union-attr]
        block.register_forward_pre_hook(
            lambda *_: counts.append(sum(e.wait_ended is not None for e in strategy.ledger.carried))
        )
    strategy.step(batch)
    return [*counts, len(strategy.ledger.carried)]


def test_each_block_waits_for_its_own_parameters_only() -> None:
    for *counts, everything in on_ranks(awaited_before, 2):
        assert counts == sorted(set(counts)), "every block waits for something, and nobody waits for all at once"
        assert counts[0] < everything / 2
        assert counts[-1] == everything


# ---- backends ------------------------------------------------------------------------------------------------------


def backends(world: World) -> dict[str, set[str]]:
    """Of all groups that a strategy communicates over, on a part of the ranks that has another backend."""
    part = part_of(world, None, "gloo")
    assert part is not None
    found = {}
    for name in ("bucketed", "zero3", "fsdp", "fsdp+HYBRID_SHARD", "fsdp+NO_SHARD"):
        config = replace(CONFIG, parallel=strategy_named(name), model=GPT(d_model=8, layers=1, heads=2, context=8))
        dataset = load_data(world, config)
        strategy = prepare_strategy(part, config, dataset)
        strategy.step(read_share(dataset.train, torch.arange(8), strategy.batch_share()))
        layout = strategy.layout
        groups = [
            layout.batch,
            layout.loss,
            layout.gradient,
            layout.norm,
            layout.group("replicate"),
            layout.group("shard"),
        ]
        meshes = {p.device_mesh for p in strategy.model.parameters() if hasattr(p, "device_mesh")}
        native = [mesh.get_group(dim) for mesh in meshes for dim in range(mesh.ndim)]
        found[name] = {g.backend for g in groups if g.size > 1}
        found[name] |= {dist.get_backend(getattr(g, "inner", g)) for g in native}  # of what is observed
        axes = {entry.axis for entry in strategy.ledger.entries}
        assert axes <= {"replicate", "shard", "replicate x shard"}, (name, axes)
        assert axes, name
    return found


def test_what_runs_is_what_was_asked_for() -> None:
    for found in on_ranks(backends, 4):
        assert found == {name: {"gloo"} for name in found}


# ---- precision -----------------------------------------------------------------------------------------------------


def rotations(world: World) -> set[torch.dtype]:
    """In which RoPE's tables reach the attention under bf16."""
    seen: set[torch.dtype] = set()
    rotate = Rotation.rotate

    def noted(self: Rotation, x: torch.Tensor) -> torch.Tensor:
        seen.add(self.cosine.dtype)
        turned = rotate(self, x)
        assert turned.dtype == x.dtype
        return turned

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rotation, "rotate", noted)
        for name in ("bucketed", "zero3", "fsdp"):
            model = GPT(d_model=8, layers=2, heads=2, context=8, position="rope", norm="rmsnorm")
            config = replace(CONFIG, model=model, parallel=strategy_named(name))
            config = replace(config, train=replace(config.train, precision="bf16"))
            dataset = load_data(world, config)
            strategy = prepare_strategy(world, config, dataset)
            strategy.step(read_share(dataset.train, torch.arange(8), strategy.batch_share()))
    return seen


def test_ropes_tables_stay_in_fp32() -> None:
    assert on_ranks(rotations, 2) == [{torch.float32}] * 2


# ---- steps that are not taken --------------------------------------------------------------------------------------


def test_a_rate_that_diverges_is_no_matter_for_a_benchmark() -> None:
    """Its steps are taken with a rate of 0, which costs the same."""
    from lockstep.bench.train import Case, bench_cases

    train = Train(batch_size=16, lr=1e6)
    config = Config(MLP(layers=8, width=64), Data("synthetic", kind="regression", samples=64), train, Parallel())
    (timing,) = bench_cases(World(), [Case("single", "single", config)], steps=8, warmup=1)
    assert timing.skipped == 0


def observe_a_synchronous_call(world: World) -> None:
    """NCCL runs such a call on the stream that computes, and gives no Work."""
    group = ObservedGroup(group_of(), "parameters")
    group.inner = SimpleNamespace(_allgather_base=lambda *_: time.sleep(0.01))
    ledger = Ledger(world.device)
    with recording(ledger):
        assert group._allgather_base(torch.zeros(4), torch.zeros(2)) is None
    (entry,) = ledger.entries
    assert entry.nbytes == 16
    assert seconds_between(entry.wait_started, entry.wait_ended) >= 0.01


def test_a_collective_without_a_work_counts_as_waited_for() -> None:
    on_ranks(observe_a_synchronous_call, 2)

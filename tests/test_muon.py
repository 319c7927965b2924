"""Muon: its mathematics against torch's, whole matrices out of regions, and every engine against one process."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep.config import GPT
from lockstep.data import DataSpec
from lockstep.errors import UserError
from lockstep.layout.group import group_of
from lockstep.layout.region import Held, Region
from lockstep.layout.world import World
from lockstep.models import build_model
from lockstep.models.matrices import matrices_in
from lockstep.parallel.optimizer.matrices import WholeMatrices
from lockstep.parallel.optimizer.muon import Muon
from lockstep.parallel.optimizer.orthogonal import orthogonalized
from lockstep.verify import Request, verify
from tests.ranks import on_ranks

SPEC = DataSpec("tokens", (8,), 32)


def small_gpt(**changes: Any) -> nn.Module:
    torch.manual_seed(0)
    shape = {"d_model": 16, "layers": 2, "heads": 4, "context": 8, "vocabulary": 32, **changes}
    return build_model(GPT(**shape), SPEC)  # type: ignore[arg-type]


# ---- mathematics ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(8, 8), (5, 20), (20, 5), (3, 7, 4)])
def test_singular_values_are_near_one_and_directions_stay(shape: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    matrices = torch.randn(shape, dtype=torch.float64)
    found = orthogonalized(matrices)
    assert 0.5 < torch.linalg.svdvals(found).min() <= torch.linalg.svdvals(found).max() < 1.3
    u, _, v = torch.linalg.svd(matrices, full_matrices=False)
    turned = u.mT @ found @ v.mT
    assert torch.allclose(turned, torch.diag_embed(turned.diagonal(dim1=-2, dim2=-1)), atol=1e-9)
    assert torch.equal(orthogonalized(torch.zeros(3, 4)), torch.zeros(3, 4))


def test_a_step_is_that_of_torch() -> None:
    """torch's own computes its products in bf16."""
    ours, theirs = (nn.Linear(24, 16, bias=False) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    muon = Muon(ours.parameters(), lr=0.02, weight_decay=0.1)
    torchs = torch.optim.Muon(theirs.parameters(), lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    before = ours.weight.detach().clone()
    for _ in range(4):
        inputs = torch.randn(32, 24)
        for layer, optimizer in ((ours, muon), (theirs, torchs)):
            optimizer.zero_grad()
            layer(inputs).square().mean().backward()
            optimizer.step()
    moved = (ours.weight - before).norm()
    assert (ours.weight - theirs.weight).norm() < 0.02 * moved


def test_which_parameters_are_matrices() -> None:
    gpt = small_gpt(experts=4, active=2)
    kinds = matrices_in(gpt)
    assert {name.split(".", 2)[2] for name in kinds} == {
        *("attention.qkv.weight", "attention.output.weight"),
        *(f"mlp.experts.{part}" for part in ("gate", "up", "down")),
    }
    assert not any("embedding" in name or "router" in name or "head" in name or "norm" in name for name in kinds)
    assert {kind for name, kind in kinds.items() if "experts" in name} == {"stack"}
    mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    assert set(matrices_in(mlp)) == {"0.weight", "2.weight"}  # not the one that gives the output


def test_what_is_no_matrix_is_stepped_by_adamw() -> None:
    model, alone = small_gpt(), small_gpt()
    muon = Muon(model.parameters(), lr=0.01, weight_decay=0.1).assign(model)
    adamw = torch.optim.AdamW(alone.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    tokens = torch.randint(0, 32, (4, 8))
    for net, optimizer in ((model, muon), (alone, adamw)):
        net(tokens).square().mean().backward()
        optimizer.step()
    kinds = matrices_in(model)
    for (name, ours), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert torch.equal(ours, theirs) == (name not in kinds), name
        assert set(muon.state[ours]) == ({"momentum_buffer"} if name in kinds else {"step", "exp_avg", "exp_avg_sq"})


@pytest.mark.parametrize("kernel", [nn.Conv1d(3, 5, 4), nn.Conv2d(3, 5, 2)])
def test_a_kernel_of_a_convolution_is_a_row(kernel: nn.Module) -> None:
    weight: Any = kernel.weight
    flat = nn.Parameter(weight.detach().reshape(5, -1).clone())
    optimizers = Muon([weight], lr=0.1), Muon([flat], lr=0.1)
    gradient = torch.randn(5, flat.shape[1])
    weight.grad, flat.grad = gradient.view_as(weight), gradient
    for optimizer in optimizers:
        optimizer.step()
    assert torch.equal(weight.reshape(5, -1), flat)


def test_it_is_copied_loaded_and_unscaled() -> None:
    layer = nn.Linear(6, 5)
    optimizer = Muon(layer.parameters(), lr=0.1)
    layer(torch.randn(3, 6)).sum().backward()
    optimizer.step()
    again = Muon(layer.parameters(), lr=0.1)
    again.load_state_dict(optimizer.state_dict())
    assert torch.equal(again.state[layer.weight]["momentum_buffer"], optimizer.state[layer.weight]["momentum_buffer"])
    copied_layer, copied = copy.deepcopy((layer, optimizer))
    copied_layer.weight.grad = torch.ones(5, 6)
    copied.step()
    again.load_state_dict(torch.optim.AdamW(layer.parameters()).state_dict())
    again.step()
    assert not getattr(Muon(layer.parameters(), fused=None), "_step_supports_amp_scaling", False)
    with pytest.raises(UserError, match="before, or make another"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, 2))]})
    empty = nn.Parameter(torch.zeros(0, 4))
    empty.grad = torch.zeros(0, 4)
    Muon([empty], lr=0.1).step()


def test_a_skipped_step_changes_nothing() -> None:
    """As a fused AdamW takes it: a flag on the device, where gradients are not finite."""
    model = small_gpt()
    optimizer = Muon(model.parameters(), lr=0.01).assign(model)
    for _ in range(2):
        model(torch.randint(0, 32, (4, 8))).square().mean().backward()
        optimizer.step()
    matrices = [p for n, p in model.named_parameters() if n in matrices_in(model)]
    before = [(p.detach().clone(), optimizer.state[p]["momentum_buffer"].clone()) for p in matrices]
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, torch.nan) if any(parameter is m for m in matrices) else None
    optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]
    optimizer.step()
    after = [(p.detach(), optimizer.state[p]["momentum_buffer"]) for p in matrices]
    assert all(torch.equal(a, b) and torch.equal(m, n) for (a, m), (b, n) in zip(before, after, strict=True))


# ---- whole matrices out of regions ---------------------------------------------------------------------------------


def put_together(world: World) -> list[tuple[int, int]]:
    """Flat pieces that cut through rows, rows, columns, a stack cut between and inside its matrices, an empty region;
    the result of the whole is what each rank gets of it.
    """
    group, generator = group_of(None), torch.Generator().manual_seed(3)
    wholes = {
        "pieces": torch.randn(7, 5, generator=generator, dtype=torch.float64),
        "rows": torch.randn(9, 4, generator=generator, dtype=torch.float64),
        "columns": torch.randn(4, 9, generator=generator, dtype=torch.float64),
        "stack": torch.randn(4, 3, 5, generator=generator, dtype=torch.float64),
        "first": torch.randn(3, 3, generator=generator, dtype=torch.float64),
        "everywhere": torch.randn(3, 6, generator=generator, dtype=torch.float64),
        "kernels": torch.randn(4, 2, 3, 3, generator=generator, dtype=torch.float64),
    }
    rank, n = world.rank, world.size

    def piece(name: str, uneven: int = 0) -> Region:
        whole = Region.whole(wholes[name].shape)
        cuts = [0, *(whole.numel * (r + 1) // n + uneven for r in range(n - 1)), whole.numel]
        return whole.part(cuts[rank], cuts[rank + 1])

    regions = {
        "pieces": piece("pieces", 1),
        "rows": Region.slice((9, 4), 0, (rank * 9 // n, (rank + 1) * 9 // n)),
        "columns": Region.slice((4, 9), 1, (rank * 9 // n, (rank + 1) * 9 // n)),
        "stack": piece("stack"),
        "first": Region.whole((3, 3)) if rank == 0 else Region((3, 3), ()),
        "everywhere": Region.whole((3, 6)),
        "kernels": piece("kernels"),
    }
    held = {name: Held(r.read(wholes[name]).clone(), r) for name, r in regions.items()}
    whole = WholeMatrices(held, {"stack"}, group)
    given = {name: h.parameter.clone() for name, h in held.items()}

    def function(matrices: Tensor) -> Tensor:
        return orthogonalized(matrices)

    like = torch.empty(0, dtype=torch.float64)
    for missing in (None, "rows"):  # a parameter without a gradient
        results = whole.compute({n: t for n, t in given.items() if n != missing}, function, like)
        for name, region in regions.items():
            if name == missing:
                assert name not in results
                continue
            rows = wholes[name].flatten(1) if name == "kernels" else wholes[name]
            expected = region.read(function(rows).view(wholes[name].shape))
            assert torch.allclose(results[name].reshape(-1), expected, atol=1e-12), (name, rank)
    return [(sum(whole.to_owners), sum(whole.from_holders)), (sum(whole.to_holders), sum(whole.from_owners))]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_rank_gets_its_regions_of_the_result(ranks: int) -> None:
    counts = on_ranks(put_together, ranks)
    for phase in (0, 1):
        assert sum(c[phase][0] for c in counts) == sum(c[phase][1] for c in counts)  # what leaves arrives


# ---- engines -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "strategies"),
    [
        (2, ["bucketed", "ddp", "zero1", "zero2", "zero3", "fsdp", "single,tp=2:sequence", "zero3,ep=2"]),
        pytest.param(4, ["zero3,tp=2", "zero1,ep=2", "fsdp,tp=2:native"], marks=pytest.mark.slow),
    ],
)
def test_every_engine_steps_as_one_process(ranks: int, strategies: list[str]) -> None:
    request = Request(strategies, steps=3, optimizer="muon", only_values=True)
    verdicts = on_ranks(verify, ranks, request)[0]
    assert [v.failures for v in verdicts] == [[]] * len(verdicts)


def loop(world: World) -> None:
    """A user's loop: the wrappers, and ranks that hold pieces."""
    tokens = torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(5))
    alone = small_gpt()
    reference = lockstep.Muon(alone.parameters(), lr=0.01).assign(alone)
    sharded = small_gpt()
    first = lockstep.ShardedOptimizer(sharded.parameters(), lockstep.Muon, bucket_mb=0.005, lr=0.01)
    wrapped = lockstep.ShardedDataParallel(sharded, first, stage=2)
    fully = lockstep.FullyShardedDataParallel(small_gpt(), device=torch.device("cpu"))
    second = lockstep.Muon(fully.parameters(), lr=0.01).assign(fully)
    for _ in range(3):
        for model, optimizer in ((alone, reference), (wrapped, first), (fully, second)):
            model(tokens).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for (name, ours), theirs in zip(sharded.named_parameters(), alone.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5), name
    assert torch.allclose(fully(tokens), alone(tokens), atol=1e-4)
    before_assigned = lockstep.Muon(fully.parameters(), lr=0.01)
    with pytest.raises(UserError, match=r"Muon needs whole matrices.*optimizer.assign\(model\)"):
        before_assigned.step()


def test_in_ones_own_loop() -> None:
    on_ranks(loop, 2)


def test_momentum_out_of_range_is_one_line() -> None:
    with pytest.raises(UserError, match=r"momentum is 1\.0"):
        Muon(nn.Linear(2, 2).parameters(), momentum=1.0)

"""Experts on a GPU: the kernels against plain PyTorch, and expert parallelism over NCCL."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import lockstep
from lockstep.layout.world import World
from lockstep.models import sorted_choices
from lockstep.models.grouped import (
    Counts,
    forward_product,
    grouped_linear,
    in_one_kernel,
    joined_pair,
    rows_gradient,
    weight_gradient,
)
from lockstep.verify import Request, verify
from tests.gpu import NEEDS_GPU, on_gpu
from tests.test_experts import OPTIONS, build, by_formula, tokens

pytestmark = NEEDS_GPU


@pytest.mark.parametrize("counts", [[7, 0, 30, 11], [0, 0, 48, 0], [12, 12, 12, 12]], ids=str)
def test_grouped_products_in_one_kernel(counts: list[int]) -> None:
    """Also of experts without rows, whose gradient is zero."""
    torch.manual_seed(0)
    rows = torch.randn(48, 64, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(4, 32, 64, device="cuda", dtype=torch.bfloat16)
    gradient = torch.randn(48, 32, device="cuda", dtype=torch.bfloat16)
    given = Counts(torch.tensor(counts, device="cuda"))
    assert in_one_kernel(rows, weight)
    poison = torch.full((4, 32, 64), float("nan"), device="cuda", dtype=torch.bfloat16)
    del poison  # what is not written would be its memory
    found = (
        forward_product(rows, weight, given),
        rows_gradient(gradient, weight, given),
        weight_gradient(gradient, rows, given),
    )
    wide = rows.double(), weight.double(), gradient.double()
    expected = (
        forward_product(wide[0], wide[1], given),
        rows_gradient(wide[2], wide[1], given),
        weight_gradient(wide[2], wide[0], given),
    )
    for one, other in zip(found, expected, strict=True):
        assert float((one.double() - other).norm()) <= 1e-2 * float(other.norm())
    assert not found[2][[i for i, count in enumerate(counts) if not count]].any()


@pytest.mark.parametrize("width", [40, 768, 1536])
@pytest.mark.parametrize("active", [1, 2, 5])
def test_kernels_are_plain_pytorch(width: int, active: int) -> None:
    from lockstep.models.kernels.experts import swiglu  # Triton is where GPUs are

    torch.manual_seed(1)
    count = 37
    places = torch.randperm(count * active, device="cuda")
    order = torch.empty_like(places).scatter_(0, places, torch.arange(count * active, device="cuda"))
    choices = sorted_choices.Sorted(order, places, torch.zeros(1, device="cuda"))
    rows = torch.randn(count * active, width, device="cuda", requires_grad=True)
    weights = torch.rand(count, active, device="cuda", requires_grad=True)
    upstream = torch.randn(count, width, device="cuda")
    plain = (rows[places].view(count, active, width) * weights[..., None]).sum(1)
    expected = torch.autograd.grad(plain, [rows, weights], upstream)
    ours = sorted_choices.combined(rows, weights, choices)
    torch.testing.assert_close(ours, plain)
    for one, other in zip(torch.autograd.grad(ours, [rows, weights], upstream), expected, strict=True):
        torch.testing.assert_close(one, other)
    given = torch.randn(count, width, device="cuda", requires_grad=True)
    spread = sorted_choices.spread(given, choices, active)
    (got,) = torch.autograd.grad(spread, given, rows.detach())
    torch.testing.assert_close(got, rows.detach()[places].view(count, active, width).sum(1))
    both = torch.randn(count, 2 * width, device="cuda", requires_grad=True)
    one, other = swiglu(both), F.silu(both[:, :width]) * both[:, width:]
    torch.testing.assert_close(one, other)
    (mine,), (theirs,) = (torch.autograd.grad(y, both, upstream) for y in (one, other))
    torch.testing.assert_close(mine, theirs)


def test_the_router_is_as_exact_as_in_fp32() -> None:
    """Against fp64, and against what fp32 itself makes of it."""
    from lockstep.models.kernels.router import exact_linear, split  # Triton is where GPUs are

    torch.manual_seed(3)
    rows = torch.randn(500, 768, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(30, 768, device="cuda", requires_grad=True)
    upstream = torch.randn(500, 30, device="cuda")
    assert torch.equal(split(weight).float().flip(1).sum(1), weight)
    wide = [t.detach().double().requires_grad_() for t in (rows, weight)]
    expected = F.linear(*wide)
    exact = [expected, *torch.autograd.grad(expected, wide, upstream.double())]
    in_fp32 = F.linear(rows.float(), weight)
    ours = exact_linear(rows, weight)
    plain = [in_fp32, *torch.autograd.grad(in_fp32, [rows, weight], upstream)]
    for got, other, true, more in zip(
        [ours, *torch.autograd.grad(ours, [rows, weight], upstream)], plain, exact, (2, 3, 2), strict=True
    ):
        assert got.dtype == other.dtype
        assert float((got - true).norm()) <= more * float((other - true).norm())


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_layer_on_a_gpu(options: dict[str, Any]) -> None:
    """In fp64 as on the CPU; under bf16 the choices may differ where scores nearly tie, so only that it is near."""
    moe, x = build(2, **options), tokens()
    expected, load, loss, _ = by_formula(moe, x)
    moe, x = moe.cuda(), x.cuda()
    torch.testing.assert_close(moe(x).cpu(), expected, rtol=0, atol=1e-12)
    assert moe.load.tolist() == load.tolist()
    torch.testing.assert_close(moe.auxiliary_loss.cpu(), loss, rtol=0, atol=1e-12)


def test_two_layers_as_one_product() -> None:
    torch.manual_seed(2)
    rows = torch.randn(48, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    first, second = (torch.randn(4, 32, 64, device="cuda", requires_grad=True) for _ in range(2))
    counts = Counts(torch.tensor([20, 0, 25, 3], device="cuda"))
    both = joined_pair(rows, first, second, counts)
    assert both is not None
    parts = torch.cat([grouped_linear(rows, weight, counts) for weight in (first, second)], 1)
    assert torch.equal(both, parts)
    upstream = torch.randn_like(both)
    for one, other in zip(
        *(torch.autograd.grad(y, [rows, first, second], upstream) for y in (both, parts)), strict=True
    ):
        assert float((one - other).norm()) <= 1e-2 * float(other.norm())


def test_in_bf16_it_is_near() -> None:
    torch.manual_seed(0)
    moe = lockstep.MixtureOfExperts(64, 96, 8, 2, shared=1, balance="loss").cuda()
    x = torch.randn(512, 64, device="cuda", requires_grad=True)
    plain = moe(x)
    (expected,) = torch.autograd.grad(plain.square().mean(), x)
    with torch.autocast("cuda", torch.bfloat16):
        found = moe(x)
    (got,) = torch.autograd.grad(found.float().square().mean(), x)
    assert float((found - plain).norm()) < 2e-2 * float(plain.norm())
    assert float((got - expected).norm()) < 5e-2 * float(expected.norm())


def one_step(world: World) -> list[float]:
    """No host wait but for the counts, once a layer; none at all on one rank."""
    moe = lockstep.MixtureOfExperts(64, 96, 8, 2, balance="loss").to(world.device, torch.bfloat16)
    if world.size > 1:
        lockstep.expert_parallel(moe)
    x = torch.randn(256, 64, device=world.device, dtype=torch.bfloat16)
    (moe(x).float().square().mean() + moe.auxiliary_loss).backward()
    torch.cuda.synchronize()
    if world.size == 1:
        torch.cuda.set_sync_debug_mode("error")
    try:
        (moe(x).float().square().mean() + moe.auxiliary_loss).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return [float(p.grad.float().norm()) for p in moe.parameters() if p.grad is not None]


def test_on_one_gpu_the_host_does_not_wait() -> None:
    assert all(norm > 0 for norm in one_step(World(device=torch.device("cuda", 0))))


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (
            2,
            [
                "bucketed,ep=2",
                "zero3,ep=2",
                "fsdp,ep=2",
                "bucketed,ep=2:halves",
                "single,tp=2,ep=2",
                "fsdp,ep=2:native",
            ],
        ),
        (4, ["zero1,ep=2", "zero3,tp=2:sequence,ep=4", "zero1,pp=2:1f1b,ep=2"]),
    ],
)
def test_expert_parallelism_on_nccl(ranks: int, names: list[str]) -> None:
    for verdict in on_gpu(verify, ranks, Request(names, 3, experts=True, only_values=True))[0]:
        assert verdict.passed, f"{verdict.strategy}: {verdict.failures}"

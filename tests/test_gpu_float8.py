"""Products in FP8 on a GPU's matrix units, against the same numbers multiplied without them."""

import copy

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep.config import GPT, Config, Data, Fp8, Parallel, Train
from lockstep.layout.world import World
from lockstep.models import float8 as module
from lockstep.models.float8 import Scaling
from lockstep.strategies import strategy_named
from lockstep.training.loop import train
from tests.gpu import NEEDS_GPU, on_gpu

pytestmark = NEEDS_GPU


def products(layer: nn.Module, x: Tensor, upstream: Tensor) -> list[Tensor]:
    with torch.autocast("cuda", torch.bfloat16):
        y = layer(x)
    return [y, *torch.autograd.grad(y, [x, *layer.parameters()], upstream.to(y.dtype))]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("scaling", ["row", "tensor"])
@pytest.mark.parametrize("tokens", [64, 37])
def test_the_units_multiply_what_was_rounded(
    scaling: Scaling, tokens: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    layer = lockstep.in_float8(nn.Sequential(nn.Linear(128, 192), nn.Linear(192, 64)).cuda(), scaling)
    x = torch.randn(tokens, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    upstream = torch.randn(tokens, 64, device="cuda")
    found = products(torch.compile(copy.deepcopy(layer)) if compiled else layer, x, upstream)
    monkeypatch.setattr(module, "has_units", lambda _: False)
    for got, expected in zip(found, products(layer, x, upstream), strict=True):
        assert got.dtype == expected.dtype
        allowed = 4e-2 if compiled else 1e-2  # between the layers a compiler rounds once less
        assert float((got - expected).detach().float().norm()) <= allowed * float(expected.detach().float().norm())


def losses(world: World, name: str, precision: str, scaling: Scaling, compiled: bool) -> list[float]:
    settings = Train(steps=30, batch_size=16, optimizer="adamw", lr=2e-3, log_every=1, precision=precision)  # type: ignore[arg-type]
    settings.compile = "blocks" if compiled else "none"
    model = GPT(d_model=128, layers=2, heads=4, context=64, own_gelu=True)
    parallel = strategy_named(name) if name else Parallel("single")
    config = Config(model, Data("text", max_bytes=300_000), settings, parallel, fp8=Fp8(scaling))
    return train(world, config, quiet=True).losses


@pytest.mark.parametrize("name", ["bucketed", "zero1", "zero3", "fsdp", "single,pp=2:1f1b"])
def test_two_ranks_train_as_in_bf16(name: str) -> None:
    wide = on_gpu(losses, 2, name, "bf16", "row", False)[0]
    narrow = on_gpu(losses, 2, name, "fp8", "row", name in ("bucketed", "fsdp"))[0]
    assert narrow != wide
    assert narrow[-1] == pytest.approx(wide[-1], rel=0.02)
    assert narrow[-1] < 0.8 * narrow[0]

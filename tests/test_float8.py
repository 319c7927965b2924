"""Products in FP8: what rounding may do to them, which layers have them, and that batches can be cut in any way."""

import copy
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import lockstep
from lockstep.cli import main
from lockstep.config import GPT, Config, Data, Parallel, Train
from lockstep.data import DataSpec
from lockstep.errors import UserError
from lockstep.layout.world import World
from lockstep.measure.peak import slow_precision
from lockstep.models import build_model
from lockstep.models import float8 as module
from lockstep.models.float8 import FORWARD, GRADIENT, LARGEST, Float8Linear, Scaling, linears_of_blocks, narrow
from lockstep.parallel.tensor.tensor_parallel import check_plain
from lockstep.results.metrics import read_metrics
from lockstep.strategies.combining import check_float8
from lockstep.verify import Request, verify
from tests.ranks import on_ranks, refused

SCALINGS: tuple[Scaling, ...] = ("row", "tensor")
HALF_A_STEP = {FORWARD: 2.0**-4, GRADIENT: 2.0**-3}
"""Of a number's size: three bits of fraction, and two."""
SMALLEST_STEP = {FORWARD: 2.0**-9, GRADIENT: 2.0**-16}
"""Of the least numbers, which are as far apart as zero and the first."""


def rows(count: int, width: int, seed: int = 0, spread: float = 3.0) -> Tensor:
    """Numbers of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp(spread * torch.randn(count, 1, generator=generator, dtype=torch.float64))
    return sizes * torch.randn(count, width, generator=generator, dtype=torch.float64)


def moved_by(x: Tensor, scaling: Scaling, dtype: torch.dtype) -> Tensor:
    """How far rounding may move each number."""
    least = narrow(x, scaling, dtype).scale.double() * SMALLEST_STEP[dtype] / 2
    return torch.maximum(x.abs() * HALF_A_STEP[dtype], least) * (1 + 1e-6)  # the type that is computed in rounds too


@given(st.integers(0, 1000), st.sampled_from(SCALINGS), st.sampled_from([FORWARD, GRADIENT]), st.floats(-80, 80))
@settings(max_examples=60)
def test_a_number_moves_by_half_a_step_at_most(
    seed: int, scaling: Scaling, dtype: torch.dtype, exponent: float
) -> None:
    x = rows(5, 33, seed) * 2.0**exponent
    got = narrow(x, scaling, dtype)
    assert got.values.dtype == dtype
    assert torch.equal(got.scale.log2(), got.scale.log2().round())
    allowed = moved_by(x, scaling, dtype)
    assert bool(((got.wide(torch.float64) - x).abs() <= allowed).all())
    largest = x.abs().amax(1) if scaling == "row" else x.abs().amax()
    reach = LARGEST[dtype] * got.scale.double().squeeze()
    assert bool((reach >= largest * (1 - 1e-6)).all())
    assert bool((reach <= 2 * largest * (1 + 1e-6)).all()), "a scale twice as small would have done"


def test_what_is_not_finite_stays_so() -> None:
    x = torch.ones(3, 16)
    x[0, 3], x[1, 5] = float("nan"), float("inf")
    layer = lockstep.in_float8(nn.Sequential(nn.Linear(16, 32)))[0]
    y = layer(x)
    assert y[:2].isnan().any(1).all()
    assert y[2].isfinite().all()
    assert layer(torch.zeros(2, 16)).equal(layer.bias.expand(2, -1))


def layer_and_input() -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(1)
    layer = nn.Linear(48, 32, dtype=torch.float64)
    with torch.no_grad():
        layer.weight *= rows(32, 1, 4).abs() * rows(48, 1, 5).abs().t()  # a scale for each output, and for each input
    return layer, rows(21, 48, 2).view(3, 7, 48).requires_grad_(), rows(21, 32, 3).view(3, 7, 32)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_no_rows_are_no_mistake(scaling: Scaling) -> None:
    """Of an expert without a token."""
    layer = lockstep.in_float8(nn.ModuleList([nn.Linear(32, 48)]), scaling)[0]
    for shape in ((0, 32), (2, 0, 32)):
        x = torch.zeros(shape, requires_grad=True)
        y = layer(x)
        assert y.shape == (*shape[:-1], 48)
        y.sum().backward()
        assert x.grad is not None
        assert not layer.weight.grad.any()


@pytest.mark.parametrize("scaling", SCALINGS)
def test_products_differ_by_what_rounding_may_do(scaling: Scaling) -> None:
    """Element by element: sum |a| |b| times what both may move by; the weight's gradient by row not at all."""
    layer, x, upstream = layer_and_input()
    exact = layer(x)
    expected = torch.autograd.grad(exact, [x, layer.weight, layer.bias], upstream)
    narrow_layer = lockstep.in_float8(nn.ModuleList([copy.deepcopy(layer)]), scaling)[0]
    y = narrow_layer(x)
    got = torch.autograd.grad(y, [x, narrow_layer.weight, narrow_layer.bias], upstream)
    forward, dy = FORWARD, FORWARD if scaling == "row" else GRADIENT
    given, weight, incoming = x.detach().flatten(0, 1), layer.weight.detach(), upstream.flatten(0, 1)
    within(y.detach().flatten(0, 1), exact.detach().flatten(0, 1), given, weight, scaling, forward, forward)
    within(got[0].flatten(0, 1), expected[0].flatten(0, 1), incoming, weight.t(), scaling, dy, forward)
    if scaling == "tensor":
        within(got[1], expected[1], incoming.t(), given.t(), scaling, dy, forward)
        assert not torch.equal(got[1], expected[1])
    else:
        assert torch.allclose(got[1], expected[1], rtol=1e-12)
    assert torch.equal(got[2], expected[2])
    assert not torch.equal(y, exact)


def within(
    got: Tensor, exact: Tensor, a: Tensor, b: Tensor, scaling: Scaling, a_type: torch.dtype, b_type: torch.dtype
) -> None:
    """`exact` is a b^T."""
    moves = moved_by(a, scaling, a_type), moved_by(b, scaling, b_type)
    allowed = moves[0] @ b.abs().t() + a.abs() @ moves[1].t() + moves[0] @ moves[1].t()
    assert bool(((got - exact).abs() <= allowed * (1 + 1e-9)).all())
    assert float((got - exact).norm()) > 1e-3 * float(exact.norm())


def test_how_a_batch_is_cut_changes_nothing_by_row() -> None:
    layer, x, upstream = layer_and_input()
    layer = lockstep.in_float8(nn.ModuleList([layer]))[0]
    whole = layer(x)
    (expected,) = torch.autograd.grad(whole, x, upstream)
    parts = [layer(part) for part in x.split(1)]
    assert torch.allclose(torch.cat(parts), whole, rtol=1e-13, atol=0)
    (got,) = torch.autograd.grad(torch.cat(parts), x, upstream)
    assert torch.allclose(got, expected, rtol=1e-13, atol=1e-12 * float(expected.abs().max()))


def mlp(width: int, hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))


class Net(nn.Module):
    """Nobody here has planned for it: blocks of odd sizes, a head outside, an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 32)
        self.layers = nn.ModuleDict({name: mlp(32, 64) for name in "ab"})
        self.odd = nn.ModuleList([nn.Linear(32, 20), nn.Linear(20, 32)])
        self.head = nn.Linear(32, 40)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers.values():
            x = x + layer(x)
        return self.head(self.odd[1](self.odd[0](x)))


def test_which_layers_it_takes() -> None:
    plain = Net()
    model = lockstep.in_float8(copy.deepcopy(plain))
    converted = {name for name, part in model.named_modules() if isinstance(part, Float8Linear)}
    assert converted == {"layers.a.0", "layers.a.2", "layers.b.0", "layers.b.2"}
    assert set(linears_of_blocks(model)[1]) == {"odd.0", "odd.1"}
    assert list(model.state_dict()) == list(plain.state_dict())
    again = copy.deepcopy(model)
    tokens = torch.arange(12).view(3, 4)
    assert torch.equal(again(tokens), model(tokens))
    assert not torch.equal(model(tokens), plain(tokens))
    lockstep.in_float8(model, "tensor")
    assert model.layers["a"][0].scaling == "tensor"
    wrong = [lambda: lockstep.in_float8(nn.Linear(32, 32)), lambda: lockstep.in_float8(model, "rows")]  # type: ignore
    assert refused(wrong) == [
        "Linear has no linear layer for fp8: it takes those of the blocks (modules in a ModuleList or Sequential) "
        "whose sizes are multiples of 16; use bf16",
        "scaling is 'rows', but it must be one of row, tensor",
    ]


def test_a_gpt_keeps_its_head_in_bf16() -> None:
    model = build_model(GPT(d_model=32, layers=2, heads=2), DataSpec("tokens", (16,), 64), 0)
    lockstep.in_float8(model)
    assert type(model.head) is nn.Linear
    assert sum(isinstance(part, Float8Linear) for part in model.modules()) == 8


def own_loop(world: World) -> list[float]:
    """A user's model, loop and autocast, under our engine and FSDP2."""
    from torch.distributed.fsdp import fully_shard

    losses = []
    for wrap in (lockstep.FullyShardedDataParallel, lockstep.DataParallel, fully_shard):
        torch.manual_seed(0)
        model = lockstep.in_float8(Net())
        wrapped = wrap(model)
        wrapped = model if wrapped is None else wrapped
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=3e-3)
        tokens = torch.randint(40, (8, 6), generator=torch.Generator().manual_seed(1))[world.rank :: world.size]
        for _ in range(30):
            with torch.autocast("cpu", torch.bfloat16):
                loss = nn.functional.cross_entropy(wrapped(tokens).flatten(0, 1), tokens.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_in_a_users_loop() -> None:
    for losses in on_ranks(own_loop, 2):
        assert all(loss < 1.0 for loss in losses)  # 3.7 at first


def verified(world: World, names: list[str]) -> dict[str, list[str]]:
    return {v.strategy: v.failures for v in verify(world, Request(names, steps=2, only_values=True, float8=True))}


@pytest.mark.proof
def test_engines_equal_one_process() -> None:
    names = ["zero3", "single,pp=2:zb-h1"]
    assert on_ranks(verified, 2, names) == [{name: [] for name in names}] * 2


@pytest.mark.slow
@pytest.mark.proof
def test_the_preset_passes() -> None:
    assert main(["verify", "--preset", "precision"]) == 0


TINY = [
    "gpt_text",
    "--model.d-model",
    "32",
    "--model.layers",
    "2",
    "--model.heads",
    "2",
    "--model.context",
    "32",
    "--data.max-bytes",
    "60000",
]
SHORT = ["--train.batch-size", "8", "--train.steps", "16", "--train.lr", "1e-2", "--train.log-every", "1"]
SHORT += ["--train.evaluate-batches", "2"]


@pytest.mark.slow
def test_it_trains_names_its_layers_and_goes_on_in_bf16(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    flags = [*TINY, *SHORT, "--nproc", "2", "--parallel.data", "zero3", "--checkpoint.every", "16"]
    assert main(["train", *flags, "--train.precision", "fp8", "--run-dir", str(run)]) == 0
    assert "8 linear layers of the blocks in FP8" in capsys.readouterr().err
    losses = [r["loss"] for r in read_metrics(run) if "loss" in r]
    assert losses[-1] < 0.85 * losses[0]
    longer = [*flags, "--train.steps", "18", "--train.precision", "bf16", "--run-dir", str(tmp_path / "longer")]
    assert main(["train", *longer, "--resume", str(run)]) == 0


def test_where_it_is_slow_one_line_says_so() -> None:
    assert "--train.compile blocks" in slow_precision("cuda", "fp8", False)[0]
    assert slow_precision("cpu", "fp8", True) == [
        "a CPU has no units for FP8: numbers are rounded to it and multiplied in fp32, which is much slower"
    ]
    assert slow_precision("cuda", "fp8", True) == []


def test_what_it_does_not_go_with(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for flags, said in (
        (["--parallel.tp", "2"], "train.precision fp8 does not go with parallel.tp 2"),
        (["--lora.rank", "2"], "train.precision fp8 does not go with lora"),
        (["--model.d-model", "20"], "GPT has no linear layer for fp8"),
        (["--fp8.scaling", "rows"], "--fp8.scaling"),
        (["--fp8.scaling", "tensor", "--train.precision", "bf16"], "fp8.scaling tensor is for train.precision fp8"),
    ):
        assert main(["train", *TINY, *SHORT, "--nproc", "2", "--train.precision", "fp8", *flags]) == 2
        assert said in capsys.readouterr().err
    assert main(["verify", "--preset", "precision", "--model.name", "cnn"]) == 2
    assert "--preset precision has models of its own" in capsys.readouterr().err
    with pytest.raises(UserError, match="it multiplies in FP8"):
        check_plain(lockstep.in_float8(Net()).layers["a"][0])
    config = Config(GPT(), Data(), Train(precision="fp8"), Parallel())
    check_float8(config, "cpu")
    monkeypatch.setattr(module, "UNITS", (99, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA A100")
    with pytest.raises(UserError, match=r"compute capability 8\.9 or newer .*, and NVIDIA A100 has 8\.0; use bf16"):
        check_float8(config, "cuda")

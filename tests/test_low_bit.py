"""AdamW with its state in 8 or 16 bits: how it rounds, what it holds, and every engine against one process."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep.config import Parallel, Train
from lockstep.errors import UserError
from lockstep.launch import World
from lockstep.parallel.optimizer.low_bit import RATIOS, SQUARES, Scale, rounded_to_bf16, scrambled
from lockstep.plan.learn import optimizer_bytes
from lockstep.plan.network import Network
from lockstep.strategies.combining import check_optimizer
from lockstep.verify import Request, verify
from tests.ranks import on_ranks
from tests.test_averages import run_and_resume

AT_2 = [
    *("naive", "bucketed", "ddp", "zero1", "zero2", "zero3", "fsdp", "zero1_torch"),
    *("single,tp=2:sequence", "bucketed,cp=2", "single,pp=2:zb-h1", "zero1,ep=2"),
]
AT_4 = ["zero3,tp=2:sequence", "zero2,pp=2:1f1b", "fsdp+HYBRID_SHARD", "fsdp,tp=2:native"]


# ---- rounding ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [SQUARES, RATIOS])
def test_what_can_be_kept_is_kept(scale: Scale) -> None:
    codes = torch.arange(scale.most + 1, dtype=torch.float64)
    for random in (0.0, 0.5, 0.999):
        found, numbers = scale.rounded(scale.decoded(codes) * (1 + 1e-12), torch.tensor(random))
        assert (found - codes).abs().max() <= (random == 0.0)
        assert torch.allclose(numbers, scale.decoded(found), rtol=1e-12, atol=0)
    beyond = torch.tensor([0.0, 2.0**-200, 2.0**100, float("inf")], dtype=torch.float64)
    assert scale.rounded(beyond, torch.tensor(0.5))[0].tolist() == [0, 0, scale.most, scale.most]


@pytest.mark.parametrize("scale", [SQUARES, RATIOS])
def test_the_mean_of_what_is_rounded_is_the_number(scale: Scale) -> None:
    """Within five standard deviations of what so many tries give."""
    generator = torch.Generator().manual_seed(0)
    for x in (2.0 ** (scale.first - 1), 2.0 ** (scale.first + 0.3), 0.01, 0.9, 3.21):
        _, tries = scale.rounded(torch.full((200_000,), x), torch.rand(200_000, generator=generator))
        distance = float(tries.max() - tries.min())
        assert distance > 0
        assert abs(float(tries.double().mean()) - x) < 5 * distance / 2 / 200_000**0.5, x


def test_the_mean_of_bf16_is_the_number() -> None:
    generator = torch.Generator().manual_seed(0)
    for x in (1.2345e-7, 3.3, -0.7011):
        random = torch.randint(0, 65536, (200_000,), generator=generator, dtype=torch.int32)
        tries = rounded_to_bf16(torch.full((200_000,), x), random).double()
        assert abs(float(tries.mean()) - x) < 5 * abs(x) * 2**-8 / 200_000**0.5
    kept = torch.tensor([0.0, 1.5, -2.0, float("inf"), -float("inf")])
    assert torch.equal(rounded_to_bf16(kept, torch.full((5,), 65535, dtype=torch.int32)).float(), kept)
    assert rounded_to_bf16(torch.tensor([float("nan")]), torch.tensor([1], dtype=torch.int32)).isnan().all()


def test_the_hash_is_even() -> None:
    """Of neighbouring numbers: each of its 32 bits is set in a half, and no two agree more often than not."""
    found = scrambled(torch.arange(100_000, dtype=torch.int32))
    bits = torch.stack([(found >> i & 1).double() for i in range(32)])
    assert (bits.mean(1) - 0.5).abs().max() < 0.01
    assert (torch.corrcoef(bits) - torch.eye(32)).abs().max() < 0.02


def test_changes_smaller_than_the_next_number_add_up() -> None:
    """From v = 4 toward 1 by a thousandth a step: to the nearest, neither would ever move."""
    for bits in (8, 16):
        weight = nn.Parameter(torch.zeros(4_000))
        optimizer = lockstep.LowBitAdamW([weight], lr=1e-3, betas=(0.0, 0.999), bits=bits)
        exact = 0.0
        for step in range(900):
            gradient = 2.0 if step < 300 else 1.0
            weight.grad = torch.full((4_000,), gradient)
            optimizer.step()
            exact = 0.999 * exact + 0.001 * gradient**2
        state = optimizer.state[weight]
        v = state["exp_avg_sq"].float() if bits == 16 else SQUARES.decoded((state["moments"].long() & 0xFFFF) >> 6)
        assert float(v.mean()) == pytest.approx(exact, rel=0.03), bits


# ---- one process ---------------------------------------------------------------------------------------------------


def fitted(make: type[torch.optim.Optimizer], **options: object) -> float:
    """The error of a small network on what it has not seen, after 300 steps."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 1))
    teacher = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 1)).requires_grad_(False)
    optimizer = make(net.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.01, **options)  # type: ignore[call-arg]
    for _ in range(300):
        x = torch.randn(64, 20)
        optimizer.zero_grad()
        (net(x) - 3 * teacher(x)).square().mean().backward()
        optimizer.step()
    x = torch.randn(4096, 20)
    return float((net(x) - 3 * teacher(x)).detach().square().mean())


@pytest.mark.slow
def test_it_trains_as_adamw() -> None:
    exact = fitted(torch.optim.AdamW)
    assert fitted(lockstep.LowBitAdamW, bits=16) == pytest.approx(exact, rel=0.02)
    assert fitted(lockstep.LowBitAdamW, bits=8) == pytest.approx(exact, rel=0.1)


def test_the_first_step_is_that_of_adamw() -> None:
    """Nothing has been rounded yet."""
    for bits in (8, 16):
        ours, theirs = (nn.Parameter(torch.arange(1.0, 7.0)) for _ in range(2))
        for parameter, optimizer in (
            (ours, lockstep.LowBitAdamW([ours], lr=0.1, weight_decay=0.1, bits=bits)),
            (theirs, torch.optim.AdamW([theirs], lr=0.1, betas=(0.9, 0.95), weight_decay=0.1)),
        ):
            parameter.grad = torch.tensor([1.0, -2.0, 1e-9, 0.0, 3e4, 1e-3])
            optimizer.step()
        assert torch.allclose(ours, theirs, rtol=1e-6)


@pytest.mark.parametrize(("bits", "nbytes"), [(8, 2), (16, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_it_holds_and_loads(bits: int, nbytes: int, dtype: torch.dtype) -> None:
    """torch's own way of loading would cast the state to the type of the weights."""
    torch.manual_seed(0)
    layer = nn.Linear(8, 8).to(dtype)
    optimizer = lockstep.LowBitAdamW(layer.parameters(), lr=1e-2, bits=bits)

    def take(layer: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(steps)
        for _ in range(steps):
            for parameter in layer.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
            optimizer.step()
        return [parameter.detach().clone() for parameter in layer.parameters()]

    take(layer, optimizer, 3)
    state = optimizer.state[layer.weight]
    assert sum(state[key].nbytes for key in state if key != "step") == nbytes * layer.weight.numel()
    other = copy.deepcopy(layer)
    again = lockstep.LowBitAdamW(other.parameters(), lr=1e-2, bits=bits)
    again.load_state_dict(optimizer.state_dict())
    before = optimizer.state[layer.weight]["step"].clone()
    for one, two in zip(take(layer, optimizer, 4), take(other, again, 4), strict=True):
        assert torch.equal(one, two)
    assert optimizer.state[layer.weight]["step"] == before + 4  # the one that was loaded from is another's


@pytest.mark.parametrize("bits", [8, 16])
def test_a_skipped_step_changes_nothing(bits: int) -> None:
    weight = nn.Parameter(torch.randn(50))
    optimizer = lockstep.LowBitAdamW([weight], lr=0.1, bits=bits)
    for skipped in (False, True):
        weight.grad = torch.randn(50) if not skipped else torch.full((50,), float("nan"))
        optimizer.found_inf = torch.tensor(float(skipped))  # type: ignore[attr-defined]
        before = [weight.detach().clone(), *(t.clone() for t in optimizer.state[weight].values())]
        optimizer.step()
        after = [weight.detach(), *optimizer.state[weight].values()]
        assert skipped == (len(before) == len(after) and all(map(torch.equal, before, after)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["8 bits", "16 bits", "muon"])
def test_compiled_it_is_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU."""
    from lockstep.parallel.optimizer import step as steps

    found = []
    for is_compiled in (False, True):
        monkeypatch.setattr(steps, "usable_on", lambda _, is_compiled=is_compiled: is_compiled)
        torch.manual_seed(0)
        weights = [nn.Parameter(torch.randn(shape)) for shape in ((5, 7), (64,), (6, 4, 5))]
        optimizer: torch.optim.Optimizer = lockstep.Muon(weights, lr=0.1, weight_decay=0.1)
        if kind != "muon":
            optimizer = lockstep.LowBitAdamW(weights, lr=0.1, bits=int(kind.split()[0]))
        for step in range(4):
            optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
            for weight in weights:
                weight.grad = torch.randn(weight.shape)
            optimizer.step()
        found.append([t.float() for w in weights for t in (w.detach(), *optimizer.state[w].values())])
    for eager, compiled in zip(*found, strict=True):
        differs = (eager - compiled).abs() > 1e-5 * eager.abs()
        assert differs.float().mean() < 0.02  # the last digit of a product may decide how a number is rounded


# ---- many ranks ----------------------------------------------------------------------------------------------------


def verified(world: World, names: list[str], optimizer: str) -> list[tuple[str, list[str]]]:
    request = Request(names, optimizer=optimizer, only_values=True, experts=any("ep" in name for name in names))
    return [(verdict.strategy, verdict.failures) for verdict in verify(world, request)]


@pytest.mark.proof
@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "names"), [(2, AT_2[:-1]), (2, AT_2[-1:]), (4, AT_4)])
def test_every_engine_rounds_as_one_process(ranks: int, names: list[str]) -> None:
    for optimizer in ("adamw_8bit", "adamw_bf16"):
        found = on_ranks(verified, ranks, names, optimizer, timeout=240)[0]
        assert len(found) == len(names)
        assert all(not failures for _, failures in found), (optimizer, found)


def test_sharded_engines_round_as_one_process() -> None:
    found = on_ranks(verified, 2, ["zero1", "zero3"], "adamw_8bit", timeout=240)[0]
    assert all(not failures for _, failures in found), found


@pytest.mark.parametrize("optimizer", ["adamw_8bit", pytest.param("adamw_bf16", marks=pytest.mark.slow)])
def test_a_run_goes_on(tmp_path: Path, optimizer: str) -> None:
    for data in ("zero1", "fsdp"):
        [(through, again), _] = on_ranks(
            run_and_resume, 2, tmp_path / data, data, {"optimizer": optimizer}, timeout=120
        )
        assert through == again


# ---- what is said --------------------------------------------------------------------------------------------------


def test_mistakes_are_one_line() -> None:
    weight = nn.Parameter(torch.zeros(1))
    with pytest.raises(UserError, match="bits is 4, but it must be 8 or 16"):
        lockstep.LowBitAdamW([weight], bits=4)
    with pytest.raises(UserError, match="less than 1"):
        lockstep.LowBitAdamW([weight], betas=(0.9, 1.0))
    with pytest.raises(UserError, match=r"adamw_8bit does not go with parallel.data deepspeed; use .*zero3"):
        check_optimizer(Train(optimizer="adamw_8bit"), Parallel("deepspeed"))
    check_optimizer(Train(optimizer="adamw_8bit"), Parallel("local_sgd"))


def test_the_planner_counts_its_bytes() -> None:
    network = Network("two blocks", 8, 8, 8, [], 0, 0)
    sizes = {name: optimizer_bytes(Train(optimizer=name), network) for name in ("adamw", "adamw_bf16", "adamw_8bit")}
    assert sizes == {"adamw": 8, "adamw_bf16": 4, "adamw_8bit": 2}
    assert optimizer_bytes(replace(Train(optimizer="adamw_8bit"), ema=0.9), network) == 6

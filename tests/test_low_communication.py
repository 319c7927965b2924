"""Less traffic: numbers in few bits, the largest only, ranks that train apart; each against its law."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep.bench.to_loss import Point, Training, rows_of
from lockstep.cli import main
from lockstep.comm.ledger import Ledger, recording
from lockstep.config import Parallel
from lockstep.errors import UserError
from lockstep.layout.group import group_of
from lockstep.layout.world import World
from lockstep.parallel.data import law
from lockstep.parallel.data.exchange import partners
from lockstep.parallel.data.few_bits import decoded, encoded, largest_error, padded, sum_in_few_bits, sum_of_largest
from lockstep.strategies import strategy_named
from lockstep.verify import Request, verify
from lockstep.verify.laws import check_apart, rounded
from tests.ranks import on_ranks

APART = ("local_sgd", "local_sgd+diloco", "local_sgd+streaming", "local_sgd+sparse", "local_sgd+gossip")
COMPRESSED = ("bucketed+int8", "bucketed+1bit", "bucketed+demo")


# ---- numbers in few bits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bits", [8, 4, 2, 1])
def test_codes_are_the_definition_and_within_its_bound(bits: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(bits)
    flat = torch.randn(1000, generator=generator, dtype=torch.float64) * torch.logspace(-6, 3, 1000)
    flat = flat.to(dtype)
    flat[300:600] = 0.0
    codes = encoded(padded(flat, law.BLOCK)[None], bits, len(flat))
    assert codes.numel() == law.in_bits(1000, bits)
    found = decoded(codes, bits, dtype).view(-1)[:1000]
    assert torch.allclose(found, rounded(flat, bits), rtol=1e-6, atol=0)
    if bits > 1:
        assert ((found - flat).abs() <= largest_error(flat, bits) * (1 + 1e-5)).all()
    assert not found[512:600].any() or bits <= 2, "a zero beside others stays zero in 4 and 8 bits"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("bits", [8, 1])
def test_what_is_not_finite_arrives_so(bits: int, bad: float) -> None:
    """Else a step would be taken that must be skipped."""
    flat = torch.ones(law.BLOCK)
    flat[3] = bad
    assert not decoded(encoded(flat[None], bits, len(flat)), bits, torch.float32).isfinite().all()


def sums(world: World) -> list[tuple[str, float, float, float]]:
    """(what, error of sent + kept, distance between ranks, bytes beside the law) over several steps, error fed back."""
    group, found = group_of(None), []
    kinds: dict[str, tuple[Any, Any]] = {
        f"{bits} bits": (partial(sum_in_few_bits, bits=bits), law.few_bits(5000, bits, world.size))
        for bits in (8, 4, 2, 1)
    }
    for density, bits in ((1.0, 32), (0.1, 32), (0.03, 2)):
        kinds[f"{density:.0%} in {bits} bits"] = (
            partial(sum_of_largest, density=density, bits=bits),
            law.largest(5000, density, bits, 8, world.size),
        )
    for what, (begin, theory) in kinds.items():
        kept = torch.zeros(5000, dtype=torch.float64)
        sent = given = torch.zeros(5000, dtype=torch.float64)
        for step in range(4):
            generator = torch.Generator().manual_seed(10 * step + world.rank)
            mine = torch.randn(5000, generator=generator, dtype=torch.float64)
            with recording(Ledger(world.device)) as ledger:
                total, kept_now = begin(mine + kept, group=group, purpose="gradients")()
            kept = kept_now
            sent, given = sent + total, given + lockstep.comm.collectives.all_reduce(mine.clone())
        lost = (sent + lockstep.comm.collectives.all_reduce(kept.clone()) - given).abs().max()
        everyone = lockstep.comm.collectives.all_gather(total)
        bytes_off = abs(ledger.traffic().wire_bytes - theory.wire_bytes)
        found.append((what, float(lost), float((everyone - everyone[0]).abs().max()), bytes_off))
        if what == "100% in 32 bits":
            found.append(("all of it is the sum", float(kept.abs().max()), 0.0, 0.0))
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_sent_and_kept_are_all_and_ranks_agree(ranks: int) -> None:
    for rank in on_ranks(sums, ranks, timeout=120):
        for what, lost, apart, bytes_off in rank:
            assert lost < 1e-12, what
            assert apart == 0.0, what
            assert bytes_off < 0.5, what


# ---- strategies ----------------------------------------------------------------------------------------------------


def verified(world: World, names: list[str]) -> dict[str, list[str]]:
    return {v.strategy: v.failures for v in verify(world, Request(names, steps=2))}


@pytest.mark.proof
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, 4])
def test_each_keeps_its_law(ranks: int) -> None:
    for found in on_ranks(verified, ranks, [*APART, *COMPRESSED], timeout=240):
        assert not any(found.values()), found


def apart(world: World, cases: list[Parallel]) -> list[str | None]:
    return [check_apart(world, case, "fp64") for case in cases]


def test_combinations_equal_simulated_workers() -> None:
    base = Parallel("local_sgd", outer_lr=0.7)
    cases = [
        replace(base, fragments=3, outer_bits=8),
        replace(base, fragments=2, outer_delay=1, outer_density=0.25),
        replace(base, outer_bits=1, outer_momentum=0.0),
        replace(base, outer_lr=0.0, gossip=True),
        replace(base, gossip=True, fragments=2),
    ]
    for found in on_ranks(apart, 4, cases, timeout=120):
        assert found == [None] * len(cases)


def restarted(world: World) -> list[bool]:
    """Whether a run that is saved and loaded in another object goes on bit by bit, in every phase of a round."""
    same = []
    for stop in range(1, 9):
        ends = []
        for is_saved in (False, True):
            torch.manual_seed(0)
            model = nn.Linear(40, 30)
            how: dict[str, Any] = {"fragments": 2, "delay": 1, "bits": 4, "outer_lr": 0.7}
            averaging = lockstep.LocalSGD(model, every=4, **how)
            for step in range(12):
                generator = torch.Generator().manual_seed(100 * step + world.rank)
                with torch.no_grad():
                    for p in model.parameters():
                        p -= 0.1 * torch.randn(p.shape, generator=generator)
                averaging.after_step()
                if is_saved and step + 1 == stop:
                    saved = {k: v.clone() for k, v in model.state_dict().items()}, averaging.state_dict()
                    model = nn.Linear(40, 30)
                    averaging = lockstep.LocalSGD(model, every=4, **how)
                    model.load_state_dict(saved[0])
                    averaging.load_state_dict(saved[1])
            ends.append([p.detach().clone() for p in model.parameters()])
        same.append(all(torch.equal(a, b) for a, b in zip(*ends, strict=True)))
    return same


def test_a_run_goes_on_with_what_is_on_the_way() -> None:
    assert all(all(found) for found in on_ranks(restarted, 2, timeout=120))


def finished(world: World) -> float:
    """How far ranks are apart at the end of a run that ended between two averages."""
    torch.manual_seed(0)
    worst = 0.0
    settings: list[dict[str, Any]] = [{"gossip": True}, {"fragments": 3, "outer_lr": 0.7, "delay": 2}]
    for how in settings:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        averaging = lockstep.LocalSGD(model, every=5, **how)
        for step in range(7):
            with torch.no_grad():
                for p in model.parameters():
                    p += 0.1 * (world.rank + 1) * (step + 1)
            averaging.after_step()
        assert not averaging.is_one_model
        averaging.average()
        flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        everyone = lockstep.comm.collectives.all_gather(flat)
        worst = max(worst, float((everyone - everyone[0]).abs().max()))
    return worst


def test_ranks_end_with_one_model() -> None:
    assert max(on_ranks(finished, 3, timeout=120)) < 1e-6


def test_partners_change_and_are_mutual() -> None:
    seen = set()
    for number in range(20):
        found = partners(6, number)
        assert all(found[other] == rank and other != rank for rank, other in enumerate(found))
        seen |= set(enumerate(found))
    assert len(seen) == 30, "everyone meets everyone"
    assert sorted(partners(5, 3)) == list(range(5))


def unusual(world: World) -> list[str]:
    """What is wrong with parameters that are narrow, empty, unused or tiny."""
    wrong = []
    for how in ({"bits": 2}, {"density": 0.1, "bits": 2}, {"bits": 8}):
        for dtype in (torch.bfloat16, torch.float16):
            model = nn.Linear(40, 30).to(dtype)
            model.register_parameter("nothing", nn.Parameter(torch.empty(0, dtype=dtype)))
            averaging = lockstep.LocalSGD(model, every=1, outer_lr=0.7, **how)  # type: ignore[arg-type]
            with torch.no_grad():
                model.weight += 0.01 * (1 + world.rank)
            averaging.after_step()
            wrong += [] if model.weight.isfinite().all() and model.weight.dtype == dtype else [f"{how} in {dtype}"]
    for compression in ("int8", "1bit", "demo"):
        torch.manual_seed(0)
        both = nn.ModuleDict({"used": nn.Linear(8, 8), "other": nn.Linear(8, 8)})
        wrapped = lockstep.DataParallel(both, sync="flat", compression=compression, topk_ratio=0.1)
        both["other"](torch.randn(3, 8)).sum().backward()
        both.zero_grad()
        (first,) = wrapped.reducer_state()
        before = {name: tensor.clone().view(-1) for name, tensor in first.items()}
        for _ in range(5):
            both["used"](torch.randn(3, 8)).sum().backward()
            both.zero_grad()
        (after,) = wrapped.reducer_state()
        (bucket,) = wrapped.buckets
        for slice_, parameter in zip(bucket.slices, bucket.parameters, strict=True):
            if any(parameter is p for p in both["other"].parameters()):
                same = all(torch.equal(after[n].view(-1)[slice_], t[slice_]) for n, t in before.items())
                wrong += [] if same else [f"{compression}: what is kept of an unused parameter has changed"]
    tiny = nn.Linear(10, 1, bias=False)
    lockstep.DataParallel(tiny, sync="naive", compression="1bit")(torch.ones(1, 10)).sum().backward()
    assert tiny.weight.grad is not None
    wrong += [] if torch.allclose(tiny.weight.grad, torch.ones(1, 10)) else [f"a tiny tensor: {tiny.weight.grad}"]
    return wrong


def test_parameters_that_are_narrow_empty_unused_or_tiny() -> None:
    assert on_ranks(unusual, 2, timeout=120) == [[], []]


def test_the_state_of_other_fragments_is_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    averaging = lockstep.LocalSGD(model, every=4, outer_lr=0.7, bits=4, fragments=2)
    state = {**averaging.state_dict(), "kept": {"0": torch.zeros(36), "1": torch.zeros(72)}}
    other = lockstep.LocalSGD(model, every=4, outer_lr=0.7, bits=4)
    with pytest.raises(UserError, match="saved with other fragments"):
        other.load_state_dict(state)


# ---- words and mistakes --------------------------------------------------------------------------------------------


def test_an_option_leaves_what_was_asked_for() -> None:
    given = strategy_named("local_sgd+streaming", Parallel(sync_every=4, fragments=2, outer_lr=0.4))
    assert (given.fragments, given.outer_lr, given.outer_bits, given.outer_delay) == (2, 0.4, 4, 1)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"delay": 8, "outer_lr": 0.7}, "0 to 7"),
        ({"delay": 1}, "give outer_lr"),
        ({"bits": 8}, "give outer_lr"),
        ({"bits": 3, "outer_lr": 0.7}, "it must be 32, 8, 4, 2 or 1"),
        ({"density": 0.0, "outer_lr": 0.7}, "above 0 and at most 1"),
        ({"gossip": True, "bits": 8, "outer_lr": 0.7}, "leave bits and density out, or gossip"),
        ({"gossip": True, "delay": 1, "outer_lr": 0.7}, "wait for each other"),
        ({"fragments": 0}, "a model has 1 or more"),
    ],
)
def test_mistakes_of_a_loop(how: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        lockstep.LocalSGD(nn.Linear(2, 2), every=8, **how)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train digits_cnn --parallel.data local_sgd --parallel.outer-bits 8", "give outer_lr"),
        ("train digits_cnn --parallel.data local_sgd --parallel.outer-bits 3", "parallel.outer"),
        (
            "train digits_cnn --parallel.compression demo --train.precision fp16",
            "does not go with train.precision fp16",
        ),
        ("bench train --seeds 2", "--seeds is about --preset low-communication"),
        ("bench train --preset low-communication --steps 5", "--train.steps says how long"),
        ("bench train --preset low-communication --seeds 0", "--seeds is 0"),
    ],
)
def test_mistakes_are_one_line(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words.split(), *(["--device", "cpu"] if words.startswith("train") else [])]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.strip().splitlines()) == 1


def test_until_a_loss_is_read_between_two_evaluations() -> None:
    first = Training("a", 0, [Point(4, 1.0, 10.0, 3.0), Point(8, 2.0, 20.0, 2.0)])
    other = Training("b", 0, [Point(4, 0.5, 1.0, 2.5), Point(8, 1.0, 2.0, 1.5)])
    never = Training("c", 0, [Point(4, 0.5, 1.0, 2.5), Point(8, 1.0, 2.0, 2.4)])
    rows = rows_of([first, other, never])
    assert rows[0].over_first == [1.0]
    assert (rows[1].seconds, rows[1].megabytes_to_loss, rows[1].over_first) == ([0.75], [1.5], [0.375])
    assert rows[2].seconds == [None]


@pytest.mark.slow
def test_the_preset_trains_all(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    words = "bench train --preset low-communication --nproc 2 --device cpu --seeds 1 --train.steps 4 --model.layers 1"
    files = ["--json", str(tmp_path / "r.json"), "--plot", str(tmp_path / "r.png")]
    assert main([*words.split(), "--model.d-model", "16", "--parallel.sync-every", "2", *files]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("bucketed+1bit", "local_sgd+gossip", "muloco", "bucketed+demo"))
    assert (tmp_path / "r.png").stat().st_size > 1000

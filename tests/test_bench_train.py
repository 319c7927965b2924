"""`bench train` and `bench scaling`: the statistics, the accounts, and the commands."""

import csv
import multiprocessing
import os
import signal
from dataclasses import replace
from math import isnan
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.bench import presets
from lockstep.bench.apart import Apart
from lockstep.bench.parts import sharing
from lockstep.bench.presets import PRESETS, with_known_names, with_size_that_fits
from lockstep.bench.scaling import Point, amdahl_fit, amdahl_speedup, points, sentences
from lockstep.bench.train import Case, bench_cases, one_process
from lockstep.cli import main
from lockstep.cli.tables import write_rows
from lockstep.cli.train_tables import verdicts
from lockstep.comm.ledger import Entry, Ledger, Traffic, standing_still
from lockstep.config import GPT, MLP, Config, Data, Train, check_ranges, load_config
from lockstep.errors import RankError, UserError
from lockstep.launch import Launch, run_on_ranks
from lockstep.launch.cores import available_cores, local_cores
from lockstep.layout.group import Group
from lockstep.layout.world import World
from lockstep.measure.statistics import estimate
from lockstep.measure.timing import Timing, as_rows, over_cycles
from lockstep.results.record import read_record
from lockstep.strategies import strategy_named
from tests.ranks import LONG, on_ranks

# ---- statistics ----------------------------------------------------------------------------------------------------


def noisy(count: int, middle: float, seed: int) -> list[float]:
    """As step times are: a floor, and a long tail."""
    generator = torch.Generator().manual_seed(seed)
    tail = -torch.rand(count, generator=generator).log()
    return (middle * (1 + 0.1 * (tail - 0.6931))).tolist()  # the median of the tail is ln 2


def test_the_interval_holds_the_truth_most_of_the_time() -> None:
    held = sum(e.low <= 10.0 <= e.high for e in (estimate(noisy(30, 10.0, seed)) for seed in range(200)))
    assert 0.88 * 200 <= held <= 200


def timing(label: str, step_s: list[float], **more: object) -> Timing:
    count = len(step_s)
    made = Timing(label, label, parameters=1000, batch_size=8, flops_per_step=1e6, ranks=2, step_s=step_s)
    made.exposed_s, made.comm_s, made.traffic = [0.001] * count, [0.002] * count, [Traffic(4, 1e6)] * count
    return replace(made, **more)  # type: ignore[arg-type]


def test_a_verdict_needs_more_than_noise() -> None:
    first, same, slow = (timing(n, noisy(30, m, s)) for n, m, s in (("a", 1.0, 1), ("b", 1.0, 2), ("c", 1.2, 3)))
    assert "too few to separate" in verdicts([timing("a", [1.0] * 5), timing("b", [2.0] * 5)])[0]
    lines = verdicts([first, same, slow])
    assert lines[0].startswith("c takes ")
    assert "% more time than a (95% sure: " in lines[0]
    assert lines[1] == "as fast as a, within the noise or 1%: b"
    cycles = [timing(n, [m] * 30, cycle=c) for n, m, c in (("a", 1.0, 1), ("b", 0.5, 8), ("c", 0.94, 5))]
    lines = verdicts(cycles)
    assert lines == [
        "b synchronizes every 8 steps: too few to see a difference; take 48 or more",
        "c takes 6.0% less time than a (95% sure: 6.0% to 6.0%)",
    ]


def test_what_is_not_the_same_work_is_not_compared() -> None:
    assert verdicts([timing("a", [1.0] * 9), timing("b", [2.0] * 9, batch_size=16)]) == []
    rows = as_rows([timing("a", [1.0] * 9), timing("b", [2.0] * 9, batch_size=16)], [])
    assert isnan(rows[1]["ratio"])


def test_steps_that_meet_now_and_then_count_by_the_cycle() -> None:
    assert over_cycles([1.0, 1.0, 4.0, 1.0, 1.0, 7.0, 1.0], 3) == [2.0] * 3 + [2.5] * 4
    assert over_cycles([1.0, 3.0], 8) == [2.0, 2.0]


def test_a_count_that_nobody_waits_for_hides_nothing() -> None:
    """16 bytes, in flight for long beside the computation: the gradients are all the communication there is."""
    ledger = Ledger(started=0.0)
    ledger.entries = [
        Entry("all_reduce", "count", "shard", 2, 16, issued=0.0, wait_started=5.0, wait_ended=5.5, ended=4.0),
        Entry("all_reduce", "gradients", "shard", 2, 1000, issued=6.0, wait_started=6.0, wait_ended=7.0, ended=7.0),
    ]
    assert (ledger.busy_seconds(), ledger.exposed_seconds()) == (1.5, 1.5)


def test_what_is_issued_when_nothing_is_left_to_compute_is_waited_for_from_then_on() -> None:
    ledger = Ledger()
    ledger.open()
    with standing_still():
        still = ledger.add("all_reduce", "gradients", Group("shard", 0, 2), 8)
    beside = ledger.add("all_reduce", "gradients", Group("shard", 0, 2), 8)
    assert (still.wait_started, beside.wait_started) == (still.issued, None)


def test_each_model_and_batch_has_its_one_process() -> None:
    small, large = (Config(train=Train(batch_size=size)) for size in (1, 2))
    cases = [
        Case(f"{n} {c.train.batch_size}", n, c, details={"n": i}) for i, c in enumerate((small, large)) for n in "ab"
    ]
    assert [case.label for case in one_process(cases)] == ["one process 0", "one process 1"]
    assert [case.label for case in one_process(cases[:2])] == ["one process"]
    assert one_process([*cases[:2], Case("single", "single", small)]) == []  # it is there already


# ---- scaling -------------------------------------------------------------------------------------------------------


@given(st.floats(0.0, 1.0), st.lists(st.integers(2, 64), min_size=1, max_size=5, unique=True))
def test_amdahls_law_is_found_again(serial: float, sizes: list[int]) -> None:
    steps = {n: 100.0 / amdahl_speedup(serial, n) for n in (1, *sizes)}
    found = [Point("strong", n, 8, ms, ms, ms, 1.0, 100.0 / n, 0, 0, 0, 1.0) for n, ms in steps.items()]
    assert amdahl_fit(found) == pytest.approx(serial, abs=1e-9)


def test_the_losses_add_up_to_the_step() -> None:
    timings = [
        timing(f"{mode} {n}", [s] * 3, ranks=n, imbalance_s=[0.0005] * 3, details={"mode": mode})
        for mode, times in (("strong", (0.1, 0.06, 0.05)), ("weak", (0.1, 0.11, 0.25)))
        for n, s in zip((1, 2, 4), times, strict=True)
    ]
    found = points(timings, slots=2)
    for p in found:
        parts = (p.ideal_ms, p.communication_ms, p.imbalance_ms, p.cores_ms, p.other_ms)
        assert sum(parts) == pytest.approx(p.step_ms)
    one, two, four = (p for p in found if p.mode == "strong")
    assert (one.cores_ms, two.cores_ms) == (0.0, 0.0)
    assert four.cores_ms == pytest.approx(25.0 - four.communication_ms - four.imbalance_ms)  # some of it while waiting
    assert found[-1].cores_ms == pytest.approx(100.0)
    faster = [replace(t, step_s=[0.02] * 3) if t.ranks == 4 else t for t in timings]
    assert points(faster, slots=2)[2].cores_ms == 0.0  # less than the ideal: nothing is left to be lost
    text = " ".join(sentences(found[1:2], slots=1, threads=2, on_gpu=False))
    assert "take 2 ranks, the fewest here" in text  # and they exceed the cores already
    text = " ".join(sentences(found, slots=2, threads=1, on_gpu=False))
    assert "the fewest here" not in text
    assert "ranks exceed cores: there are cores for 2 ranks" in text
    assert "Amdahl's law, fitted to 1, 2 ranks: 20.0%" in text  # 60/100 - 1/2 = s (1 - 1/2)


# ---- presets -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_made_of_what_there_is(name: str) -> None:
    config = PRESETS[name].config
    if name == "naive-ddp":
        config = replace(config, model=replace(config.model, size="small"))
    cases = PRESETS[name].cases(config)
    assert len({case.label for case in cases}) == len(cases) > 1
    for case in cases:
        check_ranges(case.config)
        strategy_named(case.strategy, case.config.parallel)


@pytest.mark.parametrize(("gib", "size"), [(1, "small"), (12, "medium"), (100, "xl")])
def test_the_largest_that_fits_is_taken(gib: int, size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presets, "memory_per_rank", lambda *_: (gib * 2.0**30, "this machine"))
    config, words = with_size_that_fits(PRESETS["naive-ddp"].config, Launch(), 2)
    assert isinstance(config.model, GPT)
    assert config.model.size == size
    assert ("may not fit" in words) == (gib == 1)


def test_the_csv_of_naive_ddp_begins_as_others_know_it(tmp_path: Path) -> None:
    one = timing("naive", [0.1] * 3, details={"model_size": "small", "d_model": 768, "num_layers": 12})
    one.optimizer_s = [0.02] * 3
    rows = with_known_names(as_rows([one], []), PRESETS["naive-ddp"].columns)
    write_rows(rows, tmp_path / "x.csv")
    row = next(csv.DictReader((tmp_path / "x.csv").open()))
    columns = ["model_size", "d_model", "num_layers", "total_time_ms", "compute_time_ms", "comm_time_ms"]
    assert list(row)[:8] == [*columns, "comm_fraction", "num_comm_ops"]
    assert (row["total_time_ms"], row["comm_time_ms"], row["comm_fraction"]) == ("100", "1", "0.01")
    assert (row["compute_time_ms"], row["optimizer_time_ms"]) == (
        "79",
        "20",
    )  # forward and backward; the optimizer apart


def test_ddp_vs_fsdp_is_what_the_shipped_configs_train() -> None:
    preset = PRESETS["ddp-vs-fsdp"].config
    for strategy in ("ddp", "fsdp"):
        shipped = load_config(f"{strategy}_resnet_cifar10")
        assert shipped.parallel.data == strategy
        assert shipped.model == preset.model
        assert replace(shipped.train, epochs=preset.train.epochs) == preset.train
        assert (shipped.data.name, preset.data.shape) == ("cifar10", (3, 32, 32))


# ---- on real ranks -------------------------------------------------------------------------------------------------

WIDTH, LAYERS = 64, 4


MIXED = ("bucketed", "zero1", "zero2", "zero3", "zero3+SHARD_GRAD_OP", "fsdp", "fsdp+SHARD_GRAD_OP")


def time_some(world: World) -> list[Timing]:
    model = MLP(layers=LAYERS, width=WIDTH)
    data = Data("synthetic", kind="regression", shape=(WIDTH,), classes=WIDTH, samples=64)
    config = Config(model=model, data=data, train=Train(batch_size=16, optimizer="adamw"))
    cases = [Case(n, n, config) for n in ("bucketed", "zero1", "zero2", "zero3", "ddp@gloo")]
    gpt = GPT(d_model=20, layers=2, heads=2, context=8, vocabulary=101)  # no size that any alignment would leave alone
    mixed = Config(gpt, Data("synthetic", samples=16), Train(batch_size=6, precision="bf16"))
    cases += [Case(f"{n} bf16", n, mixed) for n in MIXED]
    cases += [Case("one", "single", config, ranks=1, all_cores=True), Case("two", "bucketed", config, ranks=2)]
    return bench_cases(world, cases, steps=3, warmup=1)


@pytest.mark.slow
def test_cases_on_ranks() -> None:
    everyone = on_ranks(time_some, 3, timeout=LONG)
    found = {t.label: t for t in everyone[0]}
    whole = LAYERS * (WIDTH * WIDTH + WIDTH) * 4 / 2**20  # MiB
    for label, parts in (("bucketed", (1, 1, 2)), ("zero1", (1, 1, 2 / 3)), ("zero3", (1 / 3, 1 / 3, 2 / 3))):
        memory = found[label].memory
        held = (memory.parameters_mib, memory.gradients_mib, memory.optimizer_mib)
        assert held == pytest.approx([part * whole for part in parts], rel=0.02, abs=0.001), label
        assert memory.peak_mib >= sum(held)
    assert found["zero2"].memory.gradients_mib == pytest.approx(whole / 3, rel=0.02)
    for label in ("bucketed", "zero1", "zero2", "zero3"):
        t = found[label]
        assert t.theory is not None
        assert (t.collectives, t.wire_mb) == (t.theory.collectives, pytest.approx(t.theory_mb)), label
        assert 0 <= t.exposed_ms <= t.median_ms
        assert [line["rank"] for line in t.timelines] == [0, 1, 2]
    for label in ("ddp@gloo", *(f"{n} bf16" for n in MIXED)):
        t = found[label]
        assert t.wire_mb == pytest.approx(t.theory_mb), label
        assert t.theory is not None
        assert t.theory.collectives in (None, t.collectives), label
    assert (found["one"].ranks, found["one"].wire_mb, len(found["one"].step_s)) == (1, 0.0, 3)
    assert (found["one"].threads, found["two"].threads) == (available_cores(), max(1, available_cores() // 3))
    assert len(found["two"].cores) == available_cores()
    assert (found["two"].ranks, len(found["two"].timelines)) == (2, 2)


class Elsewhere:
    """What a test asks of a process of its own."""

    def __init__(self, fine: bool = True) -> None:
        if not fine:
            raise UserError("no such thing")

    def threads(self) -> tuple[int, str, int]:
        return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"], os.getpid()

    def fails(self, error: Exception) -> None:
        raise error

    def dies(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def call_elsewhere(world: World) -> tuple[Any, ...]:
    """All of it on rank 0, whose share of the cores is one."""
    if not world.is_main:
        return ()
    before = os.environ["OMP_NUM_THREADS"]
    with pytest.raises(UserError, match="no such thing"):
        Apart(local_cores(), Elsewhere, False)
    apart = Apart(local_cores(), Elsewhere)
    found = apart.call("threads")
    with pytest.raises(UserError, match="a mistake of the user's"):
        apart.call("fails", UserError("a mistake of the user's"))
    with pytest.raises(RankError, match="KeyError: 'in there'"):
        apart.call("fails", KeyError("in there"))
    for method in ("dies", "threads"):
        with pytest.raises(RankError, match="exit code -9"):
            apart.call(method)
    apart.end()
    assert os.environ["OMP_NUM_THREADS"] == before
    return (*found, [child.pid for child in multiprocessing.active_children()])


@pytest.mark.slow
def test_one_process_begins_with_all_cores() -> None:
    """A rank begins with its share, and cannot have more later on every CPU."""
    threads, variable, process, left = on_ranks(call_elsewhere, 2, timeout=LONG)[0]
    assert (threads, variable) == (available_cores(), str(available_cores()))
    assert not psutil.pid_exists(process)
    assert left == []


def threads_here(world: World) -> tuple[int, str]:
    return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]


@pytest.mark.skipif(available_cores() < 2, reason="there is one core only")
def test_a_rank_begins_with_the_threads_asked_for() -> None:
    """Also if it is the only one, which is in this process else."""
    asked = available_cores() - 1
    before = os.environ.get("OMP_NUM_THREADS")
    launch = Launch(nproc=1, device="cpu", timeout=LONG)
    assert run_on_ranks(threads_here, launch=launch, threads=asked) == [(asked, str(asked))]
    assert os.environ.get("OMP_NUM_THREADS") == before


TINY = ["--device", "cpu", "--model.d-model", "16", "--model.layers", "1", "--model.heads", "2", "--model.context", "8"]


@pytest.mark.slow
def test_a_preset_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--csv", str(tmp_path / "x.csv"), "--json", str(tmp_path / "x.json"), "--plot", str(tmp_path / "x.svg")]
    words = ["bench", "train", "--preset", "hooks-vs-manual", "--steps", "2", "--warmup", "1", *TINY, *files]
    assert main(words) == 0
    said = capsys.readouterr().out
    for expected in ("speed-up over", "by\n", "optimizer", "ms of a step for communication; less by:", "predicted"):
        assert expected.strip() in said, expected
    record = read_record(tmp_path / "x.json")
    labels = ["naive", "overlap", "flat", "bucketed", "one process"]
    assert [row["label"] for row in record.result["rows"]] == labels
    assert record.result["rows"][0]["timelines"][1]["collectives"]
    assert record.environment["torch"]
    rows = list(csv.DictReader((tmp_path / "x.csv").open()))
    assert [row["label"] for row in rows] == labels
    assert float(rows[0]["ratio"]) == 1.0
    assert 0 <= float(rows[0]["predicted_fraction_25gbit"]) <= float(rows[0]["predicted_fraction_1gbit"]) <= 1
    assert float(rows[3]["peak_mib"]) <= float(rows[0]["peak_mib"]) * 1.01
    assert "<svg" in (tmp_path / "x.svg").read_text()


@pytest.mark.slow
def test_scaling_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--csv", str(tmp_path / "x.csv"), "--json", str(tmp_path / "x.json"), "--plot", str(tmp_path / "x.svg")]
    words = ["bench", "scaling", "--world-size", "2", "1", "--steps", "2", "--warmup", "1", *TINY, *files]
    assert main(words) == 0
    assert "Amdahl's law" in capsys.readouterr().out
    rows = list(csv.DictReader((tmp_path / "x.csv").open()))
    assert [(row["mode"], row["ranks"], row["batch_size"]) for row in rows] == [
        *(("strong", "1", "8"), ("strong", "2", "8")),
        *(("weak", "1", "8"), ("weak", "2", "16")),
    ]
    assert read_record(tmp_path / "x.json").result["threads"] >= 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("bench train --preset everything", "there is no preset 'everything'; there are"),
        ("bench train --preset buckets --model.name cnn", "this preset is about the model gpt, not cnn"),
        ("bench train --preset buckets --strategies ddp", "--preset has strategies of its own"),
        ("bench train --preset cnn-sizes --model.hidden 5", "--model.hidden: this preset compares models of its own"),
        ("bench train --link 1gbit --nproc 3", "--nproc must be even, and it is 3"),
        ("bench scaling --parallel.data deepspeed", "deepspeed always takes all ranks"),
        ("bench train --preset buckets --steps 0", "at least 1 step"),
        ("bench scaling --world-size 0", "--world-size 0: give numbers of 1 or more"),
        ("bench scaling --world-size 2 --nproc 3", "--nproc 3 is not the largest --world-size 2"),
        ("bench scaling --threads 9999", "--threads 9999: give 1 to"),
        ("bench train --parallel.data zero3", "--parallel.data names one strategy"),
        ("bench train --nproc 2 configs/bench_mlp16.yaml", "configs/bench_mlp16.yaml must come first"),
        ("bench train --nproc 2 bench_gpt25m --model.context 16", "the config bench_gpt25m must come first"),
        ("bench scaling --csv /proc/x.csv", "--csv /proc/x.csv cannot be written"),
        ("bench train --json x.json --plot x.svg --csv x.json", "x.json was given for two kinds of output"),
        ("verify --nproc 2 --world-size 3", "--nproc and --world-size both say"),
    ],
)
def test_mistakes(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    assert message in capsys.readouterr().err


def test_fewer_ranks_have_more_of_a_shared_gpu() -> None:
    """So that the utilization of one process refers to the whole of it."""
    two_gpus = World(size=8, ranks_on_device=4)
    assert [sharing(two_gpus, ranks) for ranks in (1, 2, 3, 8)] == [1, 1, 2, 4]
    assert sharing(World(size=4, ranks_on_device=1), 4) == 1

"""`lockstep bench comm`: figures by arithmetic, wrong elements counted, a delay put in, files, mistakes."""

import csv
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep.bench.comm import Row, bench_comm, bus_factor
from lockstep.bench.comm_reading import curves, fit_rows, gradient_costs, human, sentences, usual_workloads
from lockstep.bench.trial import COLLECTIVES, Candidate, Sweep, Trial
from lockstep.cli import main
from lockstep.comm.algorithms import ALGORITHMS
from lockstep.comm.cost import Prices
from lockstep.layout.world import World
from lockstep.words import duration
from tests.ranks import LONG, on_ranks


def row(nbytes: int, seconds: float, collective: str = "all_reduce", algorithm: str = "native", ranks: int = 4) -> Row:
    return Row(
        collective, Candidate("gloo", algorithm), ranks, nbytes, nbytes // 4, "float", "sum", [[seconds] * 3] * ranks, 0
    )


# ---- figures ------------------------------------------------------------------------------------------------


def test_bus_factors_are_those_of_nccl_tests() -> None:
    assert {c: bus_factor(c, 4) for c in COLLECTIVES} == {
        "all_reduce": 1.5,
        **dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"), 0.75),
        **dict.fromkeys(("broadcast", "reduce", "send_recv"), 1.0),
    }


def test_times_are_of_iterations_and_ranks() -> None:
    found = Row("all_reduce", Candidate("gloo"), 2, 4_000_000, 1_000_000, "float", "sum")
    found.seconds = [[0.001, 0.002, 0.003], [0.001, 0.004, 0.001]]
    assert found.time == pytest.approx(0.002)
    assert found.slowest == [0.001, 0.004, 0.003]
    assert (found.p50, found.max, found.slow_rank) == (0.003, 0.004, 0)
    assert found.algbw == pytest.approx(2.0)
    assert found.busbw == pytest.approx(2.0)


def test_the_reading_follows_from_the_rows() -> None:
    rows = [row(size, 1e-4 + size / 2e9) for size in (1024, 65536, 2**20, 2**24, 2**28)]
    (curve,) = curves(rows)
    assert curve.peak.nbytes == 2**28
    assert 2**16 < curve.half_peak_bytes < 2**20  # half the peak where the transfer takes as long as the latency
    text = " ".join(sentences(curve))
    assert "latency floor 101 us at 1 KiB" in text
    assert "more than 10 GbE carries, and 96% of 25 GbE" in text
    costs = gradient_costs(curve, 1e12, usual_workloads())
    small, large = costs[0], costs[4]
    assert large.communication == pytest.approx(4 * large.workload.parameters / 2e9, rel=0.01)
    assert large.computation == pytest.approx(6 * 6.7e9 * 2048 / 0.4e12, rel=0.1)
    assert small.computation == pytest.approx(64 * small.workload.flops / 0.4e12)
    assert len({f"{cost.share:.2f}" for cost in costs[:3]}) == 3  # each size has its own FLOP per parameter
    assert [human(n) for n in (8, 1536, 2**20, 3 * 2**30)] == ["8 B", "1.5 KiB", "1 MiB", "3 GiB"]


def test_the_fit_of_rows_recovers_the_prices_that_made_them() -> None:
    true = Prices(2e-5, 5e-10, 1e-10, 1e-6, 1e-11)
    sizes = (1024, 2**16, 2**22)
    rows = [row(s, true.predict(a, 4, s, 4), algorithm=a) for a in ALGORITHMS for s in sizes]
    fitted = fit_rows(rows, ranks_per_node=4)
    assert fitted is not None
    assert max(abs(p.error) for p in fitted[1]) < 1e-6
    assert fit_rows(rows[: len(sizes)], 4) is None  # one algorithm says nothing about the others


# ---- on ranks -----------------------------------------------------------------------------------------------


def everything(world: World) -> list[Row]:
    sweep = Sweep((4, 1000, 40_000), iterations=3, warmup=1)
    rows = bench_comm(world, list(COLLECTIVES), ["shm", "gloo"], ["all"], sweep)
    for op, dtype in (("avg", "bfloat16"), ("max", "int8"), ("prod", "half"), ("min", "int64")):
        sweep = Sweep((64,), iterations=1, warmup=0, op=op, dtype=dtype)
        rows += bench_comm(world, ["all_reduce", "reduce_scatter", "reduce"], ["shm"], ["all"], sweep)
    return rows


def test_every_collective_by_every_candidate_is_right() -> None:
    rows = on_ranks(everything, 3, timeout=LONG)[0]
    assert {r.collective for r in rows} == set(COLLECTIVES)
    assert {r.candidate.algorithm for r in rows} >= {"native", *ALGORITHMS}
    assert [r for r in rows if r.wrong != 0] == []
    assert all(r.p50 > 0 and len(r.seconds) == 3 for r in rows)
    assert {r.nbytes for r in rows if r.collective == "all_gather"} == {12, 996, 39_996}  # three whole parts


class Broken(Trial):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        right = self.run

        def run() -> None:
            right()
            if self.rank == 1:
                self.input[:3] += 1

        self.run = run


def a_fault(world: World) -> int:
    trial = Broken("all_reduce", world, 4096, Sweep((4096,)), Candidate("shm"), None)
    wrong = torch.tensor(trial.wrong())
    dist.all_reduce(wrong)
    return int(wrong)


def test_wrong_elements_are_counted() -> None:
    assert on_ranks(a_fault, 2) == [3, 3]


def delayed(world: World) -> list[float]:
    """p50 without and with 50 ms on each message."""
    found = []
    for delay in (0.0, 0.05):
        rows = bench_comm(world, ["all_reduce"], ["shm"], ["ring", "tree"], Sweep((8,), 5, 1, delay=delay))
        found += [r.p50 for r in rows]
    return found


def test_a_delay_put_into_the_transport_comes_out_of_the_figures() -> None:
    ring, tree, slow_ring, slow_tree = on_ranks(delayed, 3)[0]
    assert slow_ring >= 0.2 > ring  # 2(n-1) messages, one after the other, each held back by 50 ms
    assert slow_tree >= 0.15 > tree  # up two levels, and down two: the busiest rank sends, then receives


# ---- the command --------------------------------------------------------------------------------------------


def test_the_gradients_of_ones_own_model_are_the_first_row(capfd: pytest.CaptureFixture[str]) -> None:
    flags = ["-b", "1M", "-e", "1M", "-n", "1", "-w", "0", "--nproc", "2", "--device", "cpu"]
    assert main(["bench", "comm", "digits_cnn", *flags]) == 0
    lines = capfd.readouterr().out.splitlines()
    rows = [line.split() for line in lines if "digits_cnn" in line or line.startswith((" CNN,", " GPT"))]
    assert rows[0][:4] == ["digits_cnn", "0.2", "64", "2,517"]  # 53,002 fp32 gradients; half of the batch of 128
    assert len(rows) == 6


def test_the_command_prints_writes_and_draws(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    files = {name: str(tmp_path / f"comm.{name}") for name in ("csv", "json", "svg")}
    flags = ["-b", "8", "-e", "64K", "-f", "90", "-n", "4", "-w", "1", "--nproc", "2", "--against", "gloo"]
    flags += ["--collectives", "all_reduce", "pairs", "--algorithms", "native", "ring", "tree", "--fit"]
    flags += ["--device", "cpu", "--csv", files["csv"], "--json", files["json"], "--plot", files["svg"]]
    assert main(["bench", "comm", *flags]) == 0
    out = capfd.readouterr().out
    for expected in (
        "busbw",
        "#wrong",
        "p99",
        "ratio",
        "shm ring",
        "error",
        "auto takes",
        "latency floor",
        "a model's gradients",
    ):
        assert expected in out
    lines = list(csv.DictReader(Path(files["csv"]).read_text().splitlines()))
    assert len(lines) == 3 * 4  # three sizes; shm, gloo, ring, tree
    assert {line["wrong"] for line in lines} == {"0"}
    document = json.loads(Path(files["json"]).read_text())["result"]
    assert len(document["rows"][0]["seconds_by_rank"]) == 2
    assert document["pairs"]["latency_s"][0][1] > 0
    assert "<svg" in Path(files["svg"]).read_text()


@pytest.mark.slow
def test_what_was_measured_survives_a_kill(tmp_path: Path) -> None:
    """After each size the files are whole, whoever ends the run."""
    file = tmp_path / "comm.csv"
    flags = ["-b", "1K", "-e", "1G", "-n", "2", "--algorithms", "ring", "--delay-ms", "60", "--device", "cpu"]
    flags += ["--nproc", "2", "--csv", str(file), "--json", str(tmp_path / "comm.json")]
    process = subprocess.Popen([sys.executable, "-m", "lockstep", "bench", "comm", *flags], stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + LONG
        while len(file.read_text().splitlines() if file.exists() else []) < 3 and time.monotonic() < end:
            time.sleep(0.1)
    finally:
        process.kill()
        process.wait()
    assert len(list(csv.DictReader(file.read_text().splitlines()))) >= 2
    assert len(json.loads((tmp_path / "comm.json").read_text())["result"]["rows"]) >= 1


def test_durations_have_units_that_a_person_reads() -> None:
    said = [duration(s) for s in (1.23e-5, 0.0023, 0.9996, 1.5, 300.0, 5948.2, 90_000.0, 1e6)]
    assert said == ["12.3 us", "2.30 ms", "1.00 s", "1.50 s", "5.00 min", "99.1 min", "25.0 h", "11.6 days"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-b", "two"], "--min-bytes two: give a number of bytes, such as 8, 64K or 128M"),
        (["-b", "1M", "-e", "1K"], "--min-bytes 1M is more than --max-bytes 1K"),
        (["-f", "1"], "--factor is 1, but it must be more than 1"),
        (["-n", "0"], "--iters is 0, but it must be 1 or more"),
        (["--dtype", "float9"], "--dtype float9: it must be one of float, double"),
        (["--op", "mul"], "--op mul: it must be one of sum, avg"),
        (["--op", "avg", "--dtype", "int8"], "--op avg is for floating-point types"),
        (["--collectives", "all_scatter"], "--collectives all_scatter: it must be one of all_reduce"),
        (["--algorithms", "torus"], "--algorithms torus: it must be one of native"),
        (["--collectives", "gather", "--algorithms", "ring"], "none of them is one of gather's (native)"),
        (["--fit"], "--fit needs all_reduce by two or more algorithms by hand; add --algorithms all"),
        (["--nproc", "1"], "it needs --nproc 2 or more"),
        (["--against", "pigeon"], "--against pigeon is not available here"),
        (["--csv", "/no/such/folder/x.csv"], "there is no folder /no/such/folder; make it first"),
        (["--against", "gloo", "--backend", "gloo"], "--against gloo: that is the backend of the run already"),
        (["--against", "gloo", "--algorithms", "ring"], "add native to --algorithms"),
        (["--collectives", "--nproc", "2"], "--collectives needs at least one of all_reduce"),
        (["--timeout", "0"], "--timeout is 0, but it must be more than 0 s"),
        (["--plot", "comm.txt"], "--plot comm.txt: name a file that ends in .png, .svg or .pdf"),
        (["--csv", "/tmp"], "--csv /tmp: that is a folder; name a file"),
        (["--csv", "x", "--json", "x"], "x was given for two kinds of output; give each its own file"),
        (["--link", "slow"], "--link slow: give a rate and perhaps a latency"),
        (["--link", "1gbit", "--backend", "shm"], "--backend shm is for ranks of one machine; use gloo"),
    ],
)
def test_mistakes_are_one_line(flags: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "comm", *flags]) == 2
    err = capfd.readouterr().err
    assert message in err
    assert err.count("\n") == 1

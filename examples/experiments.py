"""The experiments that people ask for first, on whatever this machine has, as one page: expected, predicted, measured.

    python examples/experiments.py                    # every GPU; one GPU is shared by two ranks; else two CPU ranks
    python examples/experiments.py --nproc 4 --out four_gpus

1. Is it correct? Data parallelism against one process.
2. What does the link give? All-reduce bandwidth.
3. What share of a step is communication? CNNs that grow, one all-reduce per parameter.
4. What does naive data parallelism cost a large GPT, and what do buckets and overlap save?
5. DDP or FSDP? Time, memory and traffic of a ResNet.
6. How does it scale? 1, 2, 4, ... ranks.

*Expected* is what guides and courses say. *Predicted* is the planner's, for the machine that `lockstep calibrate` has
measured, or a closed form's. *Measured* is this run. Each experiment is a command that you can type. Its result stays
in the folder as JSON, and is not measured again unless you say --again.
"""

import argparse
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lockstep.plan.learn import settings_of
from lockstep.plan.links import REDUCE, collective_seconds
from lockstep.plan.machine import Machine, read_machine
from lockstep.plan.memory import memory_of
from lockstep.plan.setting import Setting, with_factors
from lockstep.plan.step import step_time
from lockstep.results.record import read_record

MEANING = (
    "*Expected* is what guides and courses say. *Predicted* is the planner's, for the machine that `lockstep "
    "calibrate` has measured, or a closed form's. *Measured* is this run. Each experiment is a command that you can "
    "type."
)
Row = tuple[str, str, str, str]
"""What; expected, predicted, measured."""

LINKS = "NVLink 300 to 600, PCIe 4.0 30 to 50, 10 GbE 1.2"
SHARES = {"16-32": "60%", "32-128": "40%", "64-256": "20%"}
"""Of communication on 10 Gbit/s, by the size of the CNN."""
ON_CPU = {  # smaller, so that it takes minutes
    "comm": ["-e", "64M"],
    "cnn_sizes": ["--steps", "4"],
    "naive_ddp": ["--model.size=custom", "--model.d-model=256", "--model.layers=4", "--model.heads=4"],
    "ddp_vs_fsdp": ["--model.width", "8", "--train.batch-size", "32", "--steps", "3"],
    "scaling": ["--steps", "4"],
}


@dataclass
class Experiment:
    question: str
    command: str
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Runner:
    """Runs commands of lockstep on this machine, and keeps what they find in a folder."""

    def __init__(self, folder: Path, nproc: int, flags: list[str], again: bool) -> None:
        self.folder, self.nproc, self.flags, self.again = folder, nproc, flags, again

    def run(self, name: str, *words: str) -> tuple[str, Any]:
        """The command, and the result that it wrote."""
        file = self.folder / f"{name}.json"
        smaller = ON_CPU.get(name, []) if "cpu" in self.flags else []
        command = [*words, *smaller, *self.flags, "--json", str(file)]
        self._run(command, file)
        return f"lockstep {' '.join(command)}", read_record(file).result

    def machine(self) -> Machine:
        """This machine as the planner sees it."""
        file = self.folder / "machine.yaml"
        self._run(["calibrate", "--nproc", str(self.nproc), *self.flags, "--out", str(file)], file)
        return read_machine(file)

    def _run(self, words: list[str], file: Path) -> None:
        if self.again or not file.exists():
            print(f"\n$ lockstep {' '.join(words)}", flush=True)
            subprocess.run([sys.executable, "-m", "lockstep", *words], check=True)

    def verified(self, *names: str) -> tuple[str, bool]:
        words = ["verify", "--world-size", "2", "--strategies", *names, *self.flags]
        print(f"\n$ lockstep {' '.join(words)}", flush=True)
        ended = subprocess.run([sys.executable, "-m", "lockstep", *words], check=False)
        return f"lockstep {' '.join(words)}", ended.returncode == 0

    def settings(self, name: str, machine: Machine) -> list[tuple[dict[str, Any], Setting]]:
        """Of each row of a result that several ranks measured, what the planner needs to know."""
        found = settings_of(read_record(self.folder / f"{name}.json"), machine)
        return [(row, setting) for row, setting in found if row["ranks"] > 1]


def all_reduce_seconds(nbytes: float, ranks: int, setting: Setting) -> float:
    return collective_seconds(nbytes, ranks, 1, setting.machine, with_factors(setting), REDUCE)


# ---- the experiments -----------------------------------------------------------------------------------------------


def is_it_correct(runner: Runner) -> Experiment:
    names = ("naive", "bucketed", "ddp", "fsdp")
    command, passed = runner.verified(*names)
    rows = [("weights after 4 steps", "those of one process", "equal", "equal" if passed else "NOT EQUAL")]
    return Experiment(f"Is it correct? {', '.join(names)} on 2 ranks", command, rows)


def what_the_link_gives(runner: Runner) -> Experiment:
    words = ("bench", "comm", "--nproc", str(runner.nproc), "-b", "1M", "-f", "4", "-n", "10")
    command, result = runner.run("comm", *words)
    largest = max(result["rows"], key=lambda row: row["size_bytes"])
    best, n = max(row["busbw_gbps"] for row in result["rows"]), largest["ranks"]
    ideal = 2 * (n - 1) / n * largest["size_bytes"] / best / 1e6
    rows = [
        ("bus bandwidth, GB/s", LINKS, "-", f"{best:.3g}"),
        (
            f"all-reduce of {largest['size_bytes'] >> 20} MiB, ms",
            "2S(n-1)/n / bandwidth",
            f"{ideal:.3g}",
            f"{largest['time_us'] / 1e3:.3g}",
        ),
    ]
    return Experiment("What does the link give?", command, rows)


def share_of_communication(runner: Runner) -> Experiment:
    command, result = runner.run("cnn_sizes", *bench_train("cnn-sizes", runner))
    rows = [
        (
            f"{row['label']}: {row['parameters'] / 1e6:.2g}M parameters",
            SHARES.get(row["model_size"], "-") if row["grows_in"] == "both" else "-",
            f"{row['predicted_fraction_10gbit']:.0%}",
            f"{row['exposed_fraction']:.0%}",
        )
        for row in result["rows"]
        if row["strategy"] == "naive" and row["ranks"] > 1
    ]
    notes = ["Expected and predicted on 10 Gbit/s; measured on the link of this machine.", *result["sentences"]]
    return Experiment("What share of a step is communication?", command, rows, notes)


def cost_of_naive(runner: Runner, machine: Machine) -> Experiment:
    words = bench_train("naive-ddp", runner)
    command, result = runner.run("naive_ddp", *words, "--csv", str(runner.folder / "naive_ddp.csv"))
    rows: list[Row] = []
    for row, setting in runner.settings("naive_ddp", machine):
        time, label = step_time(setting), row["label"]
        waits = time.terms.get("gradients", 0.0)
        total = time.seconds
        if label in ("naive", "flat"):  # nothing is hidden behind backward
            calls = row["collectives"]
            alone = calls * all_reduce_seconds(4 * row["parameters"] / calls, row["ranks"], setting)
            waits, total = alone, total - waits + alone
        expected = "20% to 40%" if label == "naive" else "less" if label == "ddp" else "-"
        rows += [
            (f"{label}: step, ms", "-", f"{1e3 * total:,.0f}", f"{row['step_ms']:,.0f}"),
            (f"{label}: communication", expected, f"{waits / total:.0%}", f"{row['exposed_fraction']:.0%}"),
        ]
    naive = next(row for row in result["rows"] if row["label"] == "naive")
    calls = f"{naive['theory_collectives'] or naive['collectives']:,.0f}"
    rows += [
        ("naive: all-reduces per step", "one per parameter", calls, f"{naive['collectives']:,.0f}"),
        ("naive: speed-up over one process", "1.3 to 1.6 on 2 GPUs", "-", f"{naive['speedup']:.2f}"),
    ]
    size = f"{naive['parameters'] / 1e6:,.0f}M parameters on {naive['ranks']} ranks"
    return Experiment(f"What does naive data parallelism cost a GPT of {size}?", command, rows)


def ddp_or_fsdp(runner: Runner, machine: Machine) -> Experiment:
    command, _ = runner.run("ddp_vs_fsdp", *bench_train("ddp-vs-fsdp", runner))
    rows: list[Row] = []
    for row, setting in runner.settings("ddp_vs_fsdp", machine):
        label, n = row["label"], row["ranks"]
        sharded = label in ("fsdp", "zero3")
        rate = row["batch_size"] / step_time(setting).seconds
        sent = (3 if sharded else 2) * 4e-6 * row["parameters"] * (n - 1) / n
        rows += [
            (f"{label}: samples/s", "fewer" if sharded else "more", f"{rate:,.0f}", f"{row['samples_per_s']:,.0f}"),
            (
                f"{label}: peak memory, MiB",
                "less" if sharded else "more",
                f"{memory_of(setting).total / 2**20:,.0f}",
                f"{row['peak_mib']:,.0f}",
            ),
            (f"{label}: sent, MB", f"{3 if sharded else 2}Ψ(n-1)/n", f"{sent:,.1f}", f"{row['wire_mb']:,.1f}"),
        ]
    return Experiment("DDP or FSDP?", command, rows)


def how_it_scales(runner: Runner) -> Experiment:
    sizes = [str(2**i) for i in range(runner.nproc.bit_length())]
    command, result = runner.run("scaling", "bench", "scaling", "--world-size", *sizes)
    rows = [
        (
            f"{point['mode']}, {point['ranks']} ranks: speed-up",
            str(point["ranks"]),
            f"{point['ranks'] * point['ideal_ms'] / (point['ideal_ms'] + point['communication_ms']):.2f}",
            f"{point['speedup']:.2f}",
        )
        for point in result["points"]
        if point["ranks"] > 1
    ]
    notes = ["Predicted: what is left when communication alone is taken off.", *result["sentences"]]
    return Experiment("How does it scale?", command, rows, notes)


def bench_train(preset: str, runner: Runner) -> list[str]:
    return ["bench", "train", "--preset", preset, "--nproc", str(runner.nproc)]


# ---- the page ------------------------------------------------------------------------------------------------------


def page(title: str, experiments: list[Experiment]) -> str:
    lines = [f"# {title}", "", MEANING]
    for number, experiment in enumerate(experiments, 1):
        lines += ["", f"## {number}. {experiment.question}", "", "```bash", experiment.command, "```", ""]
        table = [("", "expected", "predicted", "measured"), *experiment.rows]
        widths = [max(len(row[column]) for row in table) for column in range(4)]
        lines += [
            "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
            for row in table
        ]
        lines.insert(-len(experiment.rows), "|" + "|".join("-" * (width + 2) for width in widths) + "|")
        lines += [""] * bool(experiment.notes) + [f"- {note}" for note in experiment.notes]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("experiments"), help="the folder for results and the page")
    parser.add_argument("--nproc", type=int, help="ranks; default: one for each GPU, at least 2")
    parser.add_argument("--again", action="store_true", help="measure again what the folder has already")
    given = parser.parse_args()
    gpus = torch.cuda.device_count()
    nproc = given.nproc or max(2, gpus)
    if nproc < 2:
        parser.error(f"--nproc is {nproc}, and must be 2 or more: ranks are what this is about")
    flags = ["--device", "cpu"] if not gpus else ["--share-gpu"] if nproc > gpus else []
    where = f"{gpus} x {torch.cuda.get_device_name(0)}" if gpus else "CPU"
    given.out.mkdir(parents=True, exist_ok=True)
    runner = Runner(given.out, nproc, flags, given.again)
    machine = runner.machine()
    experiments = [is_it_correct(runner), what_the_link_gives(runner), share_of_communication(runner)]
    experiments += [cost_of_naive(runner, machine), ddp_or_fsdp(runner, machine), how_it_scales(runner)]
    text = page(f"Data parallelism on {nproc} ranks, {where}", experiments)
    (given.out / "experiments.md").write_text(text, encoding="utf-8")
    print(f"\n{text}\nin {given.out / 'experiments.md'}")


if __name__ == "__main__":
    main()

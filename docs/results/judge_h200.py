"""Puts the results that are kept of one H200, alone and shared by 2 and 4 ranks, beside what the planner says of them.

python docs/results/judge_h200.py        # the GPU's factor is from one process (136 ms), the links from bench comm
"""

import csv
from dataclasses import replace
from pathlib import Path
from statistics import mean

from lockstep.config import GPT, Config, Train
from lockstep.plan.constants import fitted
from lockstep.plan.describe import network_of_gpt
from lockstep.plan.learn import setting_for
from lockstep.plan.machine import Link, Machine, machine_of
from lockstep.plan.memory import memory_of
from lockstep.plan.step import step_time
from lockstep.strategies import strategy_named

HERE = Path(__file__).parent / "h200"
FILES = {  # file, size, global batch
    "bench_gpt_small.csv": ("small", 64),
    "bench_gpt_medium.csv": ("medium", 16),
    "bench_gpt_small_4.csv": ("small", 64),
    "bench_zero_gathers.csv": ("small", 64),
    "bench_hybrids_tp.csv": ("small", 16),
    "bench_hybrids_pp.csv": ("small", 16),
    "bench_hybrids_cp.csv": ("small", 16),
    "bench_hybrids_4.csv": ("small", 16),
}
MEASURED = {2: (7.0e9, 90.0), 4: (7.0e9, 120.0)}
"""Ranks that share it: bytes per second of an all-gather of 128 MiB, us of a small one (comm_nccl_*.csv)."""
LEFT_OUT = ("naive", "flat", "overlap", ":native", "ulysses")


def shared(ranks: int, step: float) -> Machine:
    """One of so many ranks on one GPU: its share of the GPU, and sockets between them."""
    whole = machine_of("h200")
    if ranks == 1:
        return replace(whole, factors={"step": step})
    c, (rate, latency) = fitted(), MEASURED[ranks]
    peaks = {name: peak / ranks for name, peak in whole.peak_tflops.items()}
    link = Link(rate / 1e9 / c["inside"], latency / c["latency"])
    return replace(
        whole,
        peak_tflops=peaks,
        memory_gb_per_s=whole.memory_gb_per_s / ranks,
        inside=link,
        factors={"step": step},
    )


def main() -> None:
    step = 1.0
    times, memories = [], []
    print(f"{'':26} ranks   measured  predicted   error         MiB predicted   error")
    for name, (size, batch) in FILES.items():
        print(name)
        rows = list(csv.DictReader((HERE / name).open(encoding="utf-8")))
        for row in sorted(rows, key=lambda r: int(r["ranks"])):
            if any(word in row["strategy"] for word in LEFT_OUT):
                continue
            ranks = int(row["ranks"])
            model = GPT(size=size, context=1024, vocabulary=50304)  # type: ignore[arg-type]
            train = Train(batch_size=batch, optimizer="adamw", precision="bf16")
            config = Config(model=model, train=train, parallel=strategy_named(row["strategy"]))
            setting = setting_for(config, network_of_gpt(model), ranks, shared(ranks, step))
            measured, peak = float(row["step_ms"]), float(row["peak_mib"])
            predicted = 1e3 * step_time(setting).seconds
            if ranks == 1 and step == 1.0:
                step = measured / predicted
                print(f"  step factor {step:.3f}, from {row['label']}")
                predicted = measured
            else:
                times.append(abs(predicted / measured - 1))
            held = memory_of(setting).total / 2**20
            memories.append(abs(held / peak - 1))
            errors = f"{predicted / measured - 1:+7.1%}", f"{held / peak - 1:+7.1%}"
            print(
                f"  {row['label']:24} {ranks:5} {measured:7.1f} ms {predicted:7.1f} ms {errors[0]}   "
                f"{peak:9.1f} {held:9.1f} {errors[1]}"
            )
    print(f"mean error of {len(times)} step times {mean(times):.1%}, of {len(memories)} peaks {mean(memories):.1%}")


if __name__ == "__main__":
    main()

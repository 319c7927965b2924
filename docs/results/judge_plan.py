"""Puts results of `lockstep bench train --json` beside what the planner says of them.

lockstep calibrate --nproc 2
lockstep bench train configs/bench_gpt25m.yaml --strategies bucketed zero1 zero3 bucketed,tp=2 --json bench.json
python docs/results/judge_plan.py machine.yaml bench.json ...        # the first row of each file sets the step factor
"""

import argparse
from pathlib import Path
from statistics import mean

from lockstep.plan.learn import settings_of
from lockstep.plan.machine import machine_of, read_machine
from lockstep.plan.memory import memory_of
from lockstep.plan.step import step_time
from lockstep.results.record import read_record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("machine", help="a machine file, or a shipped kind")
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--no-learning", action="store_true", help="take the machine file as it is")
    given = parser.parse_args()
    path = Path(given.machine)
    machine = read_machine(path) if path.exists() else machine_of(given.machine)
    times, memories = [], []
    print(f"{'strategy':24} {'measured':>10} {'predicted':>10} {'error':>7}   {'MiB':>9} {'predicted':>9} {'error':>7}")
    for file in given.results:
        rows = settings_of(read_record(file), machine)
        first, setting = rows[0]
        scale = 1.0 if given.no_learning else first["step_ms"] / (1e3 * step_time(setting).seconds)
        print(f"{file.name}: step factor {scale:.3f}, from {first['label']}")
        for number, (row, setting) in enumerate(rows):
            if row["ranks"] != first["ranks"]:
                continue
            step = scale * 1e3 * step_time(setting).seconds
            held = memory_of(setting).total / 2**20
            errors = step / row["step_ms"] - 1, held / row["peak_mib"] - 1
            if number or given.no_learning:
                times.append(abs(errors[0]))
            memories.append(abs(errors[1]))
            print(
                f"{row['label']:24} {row['step_ms']:7.1f} ms {step:7.1f} ms {errors[0]:+7.1%}   "
                f"{row['peak_mib']:9.1f} {held:9.1f} {errors[1]:+7.1%}"
            )
    print(f"mean error of {len(times)} step times {mean(times):.1%}, of {len(memories)} peaks {mean(memories):.1%}")


if __name__ == "__main__":
    main()

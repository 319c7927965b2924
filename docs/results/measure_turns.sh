#!/bin/bash
# Is anything slower than before? Each strategy by an older checkout's package and by this one, in turns.
# bash docs/results/measure_turns.sh OLD [turns]; OLD: the folder that has the older lockstep/.
set -u
old=${1:?usage: measure_turns.sh OLD [turns]} turns=${2:-4}
here=$(cd "$(dirname "$0")/../../src" && pwd)
gpt="--model.name gpt --model.d-model 256 --model.layers 4 --model.heads 4 --model.context 128 --data.name text"
flags="--nproc 2 --device cpu $gpt --train.batch-size 8 --train.optimizer adamw --steps 12 --warmup 3 --no-baseline"
strategies=${STRATEGIES:-bucketed zero1 zero2 zero3 fsdp ddp single,tp=2 single,pp=2 bucketed,cp=2}
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
for backend in ${BACKENDS:-gloo shm}; do
  for turn in $(seq "$turns"); do
    for code in old new; do
      [ "$code" = old ] && path=$old || path=$here
      PYTHONPATH=$path OMP_NUM_THREADS=1 python -m lockstep bench train $flags --backend "$backend" --strategies $strategies \
        --csv "$out/$backend-$turn-$code.csv" > /dev/null 2> "$out/err.txt" || { tail -n 3 "$out/err.txt"; exit 1; }
    done
    echo "$backend, turn $turn of $turns" >&2
  done
done
python - "$out" <<'TABLE'
import csv, sys
from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev

times = defaultdict(lambda: defaultdict(list))
for file in sorted(Path(sys.argv[1]).glob("*.csv")):
    backend, _, code = file.stem.split("-")
    for row in csv.DictReader(file.open()):
        times[backend, row["strategy"]][code].append(float(row["step_ms"]))
print(f"{'backend':<8} {'strategy':<16} {'old, ms':>9} {'new, ms':>9}  new/old (95%)")
for (backend, strategy), found in times.items():
    ratios = [new / old for old, new in zip(found["old"], found["new"], strict=True)]
    wide = 1.96 * stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else float("nan")
    print(f"{backend:<8} {strategy:<16} {mean(found['old']):9.1f} {mean(found['new']):9.1f}  "
          f"{mean(ratios):.3f} ({mean(ratios) - wide:.3f} to {mean(ratios) + wide:.3f})")
TABLE

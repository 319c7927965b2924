#!/bin/bash
# Measure one GPU, which ranks share, with everything: bash docs/results/h200/run.sh OUT [part ...]
# Parts: tests verify train experiments comm scaling profile knobs gpt2 report. Without any, all of them, one after the other.
set -u
out=${1:?usage: run.sh OUT [part ...]}
shift
mkdir -p "$out"
gpt="--model.name gpt --model.context 1024 --model.vocabulary 50304 --data.name synthetic --train.optimizer adamw --train.lr 1e-4 --train.precision bf16"
small="$gpt --model.size small --train.batch-size 64 --data.samples 64"
medium="$gpt --model.size medium --train.batch-size 16 --data.samples 16"
strategies="naive flat overlap bucketed ddp fsdp zero1 zero2 zero3"
command -v lockstep > /dev/null || lockstep() { python -m lockstep "$@"; }

with_mps() ( # ranks' kernels side by side; a fault of one process would end all on the GPU, so not for tests
  nvidia-cuda-mps-control -d
  trap 'echo quit | nvidia-cuda-mps-control' EXIT
  "$@"
)

say() { # NAME command...: to the screen, and to OUT/NAME.txt
  local name=$1
  shift
  "$@" 2> "$out/$name.err" | tee "$out/$name.txt"
  [ "${PIPESTATUS[0]}" = 0 ] && rm -f "$out/$name.err" || tail -n 3 "$out/$name.err"
}

tests() { say gpu_tests python -m pytest -q tests/test_gpu.py tests/test_gpu_axes.py tests/test_gpu_loops.py; }

verify() {
  say verify_fp64 lockstep verify --share-gpu --world-size 2 4
  say verify_fp32 lockstep verify --share-gpu --world-size 2 4 --precision fp32
  say verify-savers lockstep verify --share-gpu --world-size 2 --savers --steps 6 \
    --strategies bucketed ddp zero1 zero2 zero3 fsdp
}

train() {
  say bench_gpt_small lockstep bench train --share-gpu --nproc 2 $small --strategies $strategies --steps 10 --warmup 2 \
    --csv "$out/bench_gpt_small.csv" --json "$out/bench_gpt_small.json" --plot "$out/bench_gpt_small.svg"
  say bench_gpt_medium lockstep bench train --share-gpu --nproc 2 $medium --strategies $strategies --no-baseline --steps 6 \
    --warmup 2 --csv "$out/bench_gpt_medium.csv" --json "$out/bench_gpt_medium.json" --plot "$out/bench_gpt_medium.svg"
  say bench_gpt_small_4 lockstep bench train --share-gpu --nproc 4 $small --strategies naive bucketed ddp zero3 fsdp \
    --steps 6 --warmup 2 --csv "$out/bench_gpt_small_4.csv" --json "$out/bench_gpt_small_4.json"
}

experiments() { say experiments python examples/experiments.py --nproc 2 --out "$out/experiments"; }

comm() {
  for ranks in 2 4; do
    say comm_nccl_$ranks lockstep bench comm --share-gpu --nproc $ranks --collectives all -b 8 -e 128M -f 16 -n 8 -w 2 \
      --csv "$out/comm_nccl_$ranks.csv" --json "$out/comm_nccl_$ranks.json"
  done
  say comm_nccl_algorithms lockstep bench comm --share-gpu --nproc 4 --algorithms all --fit -b 1K -e 32M -f 8 -n 5 -w 2 \
    --plot "$out/comm_nccl_algorithms.svg"
}

scaling() {
  say scaling lockstep bench scaling --share-gpu --world-size 1 2 4 $gpt --model.size small --train.batch-size 16 \
    --data.samples 64 --steps 6 --warmup 2 --csv "$out/scaling.csv" --json "$out/scaling.json" --plot "$out/scaling.svg"
}

profile() {
  for name in naive bucketed; do
    say profile_$name lockstep profile --share-gpu --nproc 2 $small --parallel.data $name --memory-snapshot \
      --run-dir "runs/profile_$name"
  done
  python docs/results/draw_overlap.py runs/profile_naive runs/profile_bucketed --out "$out/overlap.svg"
}

knobs() {
  say knobs_small python docs/results/measure_one_gpu.py small --turns 4 --steps 15
  say knobs_script_small python docs/results/measure_one_gpu.py small --variants script all --turns 8 --steps 15
  say knobs_script_xl python docs/results/measure_one_gpu.py xl --variants script all --turns 4 --steps 6
}

gpt2() {
  for size in small xl; do
    say train_gpt2_$size lockstep train configs/gpt2_$size.yaml --run-dir runs/gpt2_$size
    cp runs/gpt2_$size/metrics.jsonl "$out/train_gpt2_$size.jsonl"
  done
}

report() {
  lockstep report "$out"/{bench_gpt_small,bench_gpt_medium,bench_gpt_small_4,scaling,comm_nccl_2,comm_nccl_4}.json \
    --out "$out/report.html" --title "One H200, shared by 2 and 4 ranks"
}

[ $# -gt 0 ] || set -- tests verify train experiments comm scaling profile knobs gpt2 report
for part in "$@"; do
  case $part in
    verify | train | experiments | comm | scaling | profile) with_mps $part ;;
    tests | knobs | gpt2 | report) $part ;;
    *) echo "there is no part $part" >&2; exit 2 ;;
  esac
done

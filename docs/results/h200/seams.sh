#!/bin/bash
# Where the axes meet: layouts of GPT medium on one GPU that 4 ranks share, by the code before and after in turns.
# bash docs/results/h200/seams.sh OUT OLD part ...; OLD: the folder of an older checkout's package. Parts: data tensor tied compile sequence.
set -u
out=${1:?usage: seams.sh OUT OLD part ...} old=${2:?}
shift 2
mkdir -p "$out"
gpt="--model.name gpt --model.context 1024 --model.vocabulary 50304 --data.name synthetic --train.optimizer adamw --train.lr 1e-4 --train.precision bf16"
medium="$gpt --model.size medium --train.batch-size 16 --data.samples 16 --no-baseline"

in_turns() { # NAME strategies of the code before : strategies of the code after : flags
  local name=$1 before=$2 after=$3
  shift 3
  for turn in 1 2; do
    PYTHONPATH=$old:$PYTHONPATH python -m lockstep bench train --share-gpu "$@" --strategies $before > "$out/${name}_before_$turn.txt" 2> "$out/err.txt" || tail -n 3 "$out/err.txt"
    python -m lockstep bench train --share-gpu "$@" --strategies $after > "$out/${name}_after_$turn.txt" 2> "$out/err.txt" || tail -n 3 "$out/err.txt"
  done
}

data() { in_turns data "bucketed bucketed,pp=2:1f1b zero1,pp=2:1f1b fsdp,pp=2:1f1b" "bucketed bucketed,pp=2:1f1b zero1,pp=2:1f1b fsdp,pp=2:1f1b zero3,pp=2:1f1b" --nproc 4 $medium --steps 6 --warmup 2; }
tensor() { in_turns tensor "single,tp=2,pp=2:1f1b single,tp=2,pp=2:zb-h1 single,tp=2:sequence,pp=2:zb-h1" "single,tp=2,pp=2:1f1b single,tp=2,pp=2:zb-h1 single,tp=2:sequence,pp=2:zb-h1" --nproc 4 $medium --steps 6 --warmup 2; }
tied() { in_turns tied "single,pp=2:1f1b single,pp=2:zb-h1" "single,pp=2:1f1b single,pp=2:zb-h1" --nproc 2 $medium --steps 6 --warmup 2; }
sequence() { python -m lockstep bench train --share-gpu --nproc 2 $medium --steps 6 --warmup 2 --strategies single,tp=2 single,tp=2:sequence single,tp=2:sequence:keep_gathered > "$out/sequence.txt" 2> "$out/err.txt"; }
compile() {
  for turn in 1 2; do
    for code in before after; do
      [ $code = before ] && path=$old:$PYTHONPATH || path=$PYTHONPATH
      PYTHONPATH=$path python -m lockstep train gpt2_small --train.steps 40 --nproc 1 --run-dir "$out/run_$code$turn" > "$out/compile_${code}_$turn.txt" 2>&1
      rm -rf "$out/run_$code$turn"
    done
  done
}

nvidia-cuda-mps-control -d
trap 'echo quit | nvidia-cuda-mps-control' EXIT
for part in "$@"; do "$part"; done

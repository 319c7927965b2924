#!/bin/bash
# prepared for the device: everything in one call
export PYTHONPATH=$PWD/src:$PWD/.device-deps PYTHONDONTWRITEBYTECODE=1
t0=$SECONDS
nvidia-cuda-mps-control -d
trap 'echo quit | nvidia-cuda-mps-control' EXIT
say() { echo "== $((SECONDS - t0)) s: $*"; }
say begin
( timeout 150 python -m tests.judged.cases on_gpu --bf16 > $OUT/judge_bf16.txt 2>&1 ) &
( timeout 150 python -m tests.judged.cases on_gpu --accumulate > $OUT/judge_accumulate.txt 2>&1 ) &
( timeout 150 python -m tests.judged.cases on_gpu --fault > $OUT/judge_fault.txt 2>&1 ) &
( timeout 150 python -m tests.judged.cases on_gpu compile > $OUT/judge_compile.txt 2>&1 ) &
( timeout 150 python -m tests.judged.cases on_gpu --clip > $OUT/judge_clip.txt 2>&1 ) &
( timeout 150 python -m pytest -q -p no:cacheprovider tests/test_gpu_experts.py > $OUT/experts.txt 2>&1 ) &
( timeout 150 python -m pytest -q -p no:cacheprovider tests/test_gpu.py -k background > $OUT/save.txt 2>&1 ) &
wait
say tests done
timeout 110 python docs/results/measure_experts.py --batch 32 --turns 3 --steps 6 > $OUT/measure_experts.txt 2>&1
say measured
gpt="--model.name gpt --model.context 1024 --model.vocabulary 50304 --data.name synthetic --data.samples 8 --train.optimizer adamw --train.lr 1e-4 --train.precision bf16 --model.size small --model.norm rmsnorm --model.position rope --model.activation swiglu --model.experts 32 --model.active 4 --train.batch-size 8 --no-baseline"
timeout 80 python -m lockstep bench train --share-gpu --nproc 2 $gpt --steps 6 --warmup 2 --strategies fsdp,ep=2:native fsdp,ep=2 zero3,ep=2 bucketed,ep=2 > $OUT/bench_experts.txt 2> $OUT/bench_err.txt
say benched
tail -n 5 $OUT/judge_*.txt $OUT/experts.txt $OUT/save.txt
cat $OUT/measure_experts.txt $OUT/bench_experts.txt | tail -50

#!/usr/bin/env bash
# What naive data parallelism costs in communication, on the largest GPT-2 that fits (xl from 80 GiB per GPU on). The
# table goes to results/naive_ddp/benchmark_results.csv.
#
#   [RANKS=2] scripts/run_benchmark.sh [FLAGS of lockstep bench train ...]
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
exec lockstep bench train --preset naive-ddp --nproc "$(ranks)" "$@"

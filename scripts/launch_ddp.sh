#!/usr/bin/env bash
# Data parallel training under torchrun, on this machine or, run on each of them, on several.
#
#   scripts/launch_ddp.sh [CONFIG] [FLAGS of lockstep train ...]
#
#   RANKS=4                      ranks on this machine (one per GPU; two where there are fewer)
#   NNODES=2 NODE_RANK=0         machines, and which one this is
#   MASTER_ADDR=host MASTER_PORT=29500   where they meet: the first one's address
#   MAX_RESTARTS=3               how often all ranks are started anew when one fails
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

config=digits_cnn
if [[ $# -gt 0 && $1 != --* ]]; then
    config=$1
    shift
fi
nodes=${NNODES:-1}
if ((nodes > 1)) && [[ -z ${MASTER_ADDR:-} || -z ${NODE_RANK:-} ]]; then
    echo "NNODES is $nodes, so MASTER_ADDR (the first machine) and NODE_RANK (0 to $((nodes - 1))) must be set" >&2
    exit 2
fi
exec torchrun --nnodes="$nodes" --node-rank="${NODE_RANK:-0}" --nproc-per-node="$(ranks)" \
    --master-addr="${MASTER_ADDR:-127.0.0.1}" --master-port="${MASTER_PORT:-29500}" \
    --max-restarts="${MAX_RESTARTS:-0}" -m lockstep train "$config" --parallel.data ddp "$@"

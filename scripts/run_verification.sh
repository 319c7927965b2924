#!/usr/bin/env bash
# Is naive data parallelism, and every other strategy, equal to one process?
#
#   [RANKS=2] scripts/run_verification.sh [FLAGS of lockstep verify ...]
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
exec lockstep verify --world-size "$(ranks)" "$@"

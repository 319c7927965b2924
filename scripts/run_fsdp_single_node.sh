#!/usr/bin/env bash
# FSDP of a ResNet on CIFAR-10's shapes, on all GPUs of this machine, or on two CPU ranks.
#
#   [RANKS=4] scripts/run_fsdp_single_node.sh [FLAGS of lockstep train ...]
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
exec lockstep train fsdp_resnet_cifar10 --nproc "$(ranks)" "$@"

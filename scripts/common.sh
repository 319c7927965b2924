# shellcheck shell=bash
# Sourced by the scripts beside it: where lockstep is, and on how many ranks of this machine.

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [[ -x $here/.venv/bin/lockstep ]]; then # what `make demo` has installed
    PATH=$here/.venv/bin:$PATH
fi
if ! command -v lockstep >/dev/null; then
    echo "lockstep is not installed: run make demo, or pip install -e ." >&2
    exit 1
fi

gpus() { # how many torch sees
    python -c 'import torch; print(torch.cuda.device_count())'
}

ranks() { # RANKS as it is set; else one for each GPU, and two on a machine that has fewer than two
    local found
    if [[ -n ${RANKS:-} ]]; then
        echo "$RANKS"
        return
    fi
    found=$(gpus)
    echo $((found > 1 ? found : 2))
}

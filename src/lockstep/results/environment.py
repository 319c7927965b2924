"""What ran where: the machine, the versions and the source that a result belongs to."""

import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import torch

from lockstep.launch.cores import available_cores

GIB = 1024**3


def environment() -> dict[str, Any]:
    """Facts about this machine and this software, each as text or a number that a person can read."""
    facts: dict[str, Any] = {
        "processor": processor(),
        "cores": available_cores(),
        "memory_gib": round(psutil.virtual_memory().total / GIB, 1),
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",  # without the builder's own suffix
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        facts["gpus"] = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
        facts["gpu_memory_gib"] = round(torch.cuda.get_device_properties(0).total_memory / GIB, 1)
        facts["cuda"] = torch.version.cuda
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    if source := git_state():
        facts["source"] = source
    return facts


def processor() -> str:
    """Its name, as the system reports it."""
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model"):
            return value.strip()
    return _lscpu_name() or platform.processor() or platform.machine()


def _lscpu_name() -> str:
    """Where /proc/cpuinfo has numbers only, as on ARM."""
    for line in _said("lscpu").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "Model name" and value.strip() != "-":
            return f"{value.strip()} ({platform.machine()})"
    return ""


def git_state() -> str:
    """The commit of the folder that we run in, and whether it has changes; nothing outside a repository."""
    commit = _said("git", "rev-parse", "--short=10", "HEAD").strip()
    if not commit:
        return ""
    return commit + (" with changes" if _said("git", "status", "--porcelain", "--untracked-files=no").strip() else "")


def _said(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):  # no such program, or it has nothing to say
        return ""


def command_line() -> str:
    """As it was typed, near enough to be typed again."""
    program = "lockstep" if Path(sys.argv[0]).stem in ("lockstep", "__main__") else Path(sys.argv[0]).name
    return shlex.join([program, *sys.argv[1:]])


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")

"""What a command can say about its ranks. No torch here: it is parsed before torch is imported."""

from dataclasses import dataclass
from typing import Literal

DeviceChoice = Literal["auto", "cpu", "cuda"]


class Process:
    """What this process is."""

    is_command = False
    """One command, which changes nothing about itself before its ranks start: they may be forks (`rank.py`)."""


@dataclass
class Launch:
    """Which ranks run the command."""

    nproc: int | None = None
    """Ranks to start on this machine. None: 1 for train; 2 for demo, bench and profile; what --world-size says for
    verify and bench scaling. Under torchrun or srun the ranks are theirs; leave it out there."""
    device: DeviceChoice = "auto"
    """auto: a GPU where there is one."""
    backend: str | None = None
    """Communication backend. None: nccl on GPUs, shm (shared memory) on the CPUs of one machine, gloo on several."""
    share_gpu: bool = False
    """Let several ranks share one GPU over NCCL: correct everywhere, as slow as a 20 Gbit/s network."""
    timeout: float = 300.0
    """Seconds after which a missing or silent rank is an error."""
    oversubscribe: bool = False
    """Start as many CPU ranks as --nproc says, however few cores there are."""

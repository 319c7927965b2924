"""Who a process is: a number means something only inside its namespace, and only until it is given to another."""

import os
from pathlib import Path

import psutil

NAMESPACE = Path("/proc/self/ns/pid")


def process_namespace() -> int:
    """Process ids mean something only inside one of these (containers have their own); 0 where there are none."""
    return os.stat(NAMESPACE).st_ino if NAMESPACE.exists() else 0


def started(pid: int) -> str | None:
    """When a process started, in ticks since boot; None if there is none. Distinguishes a process from a later one with
    its number.
    """
    if not NAMESPACE.exists():
        return "0" if psutil.pid_exists(pid) else None
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return stat.rpartition(")")[2].split()[19]


def signature(pid: int | None = None) -> str:
    """This process, or that one, in a form that the names of its files can carry."""
    pid = os.getpid() if pid is None else pid
    return f"{process_namespace()}-{pid}-{started(pid)}"


def has_ended(name: str) -> bool:
    """Whether the process whose signature a name begins with is gone. In another namespace it cannot be known."""
    namespace, pid, start, *_ = [*name.split("-"), "", "", ""]
    return namespace == str(process_namespace()) and pid.isascii() and pid.isdigit() and started(int(pid)) != start

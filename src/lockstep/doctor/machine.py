"""What this machine has: versions, GPUs, cores, memory, limits, network, folders. Nothing is started."""

import os
import platform
import resource
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from lockstep.comm.shm.segment import FOLDER, PREFIX, has_ended
from lockstep.doctor.finding import Finding, noted
from lockstep.launch.cores import available_cores
from lockstep.words import counted

GIB = 2.0**30
OLDEST, NEWEST = (2, 11), (2, 14)
"""torch's versions that are supported: from the first, below the second."""
SMALL_SHM = 1.0
"""GiB of /dev/shm below which ranks may run out of it."""
FEW_FILES = 4096
BUSY = 0.1


def machine() -> Iterator[Finding]:
    yield from versions()
    yield from gpus()
    yield from processor()
    yield from memory()
    yield from limits()
    yield from network()
    yield from folders()
    yield from leftovers()


def versions() -> Iterator[Finding]:
    yield Finding("Python", platform.python_version())
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    built = f"{torch.__version__}, built for CUDA {torch.version.cuda}" if torch.version.cuda else torch.__version__
    low, high = (".".join(map(str, version)) for version in (OLDEST, NEWEST))
    known = OLDEST <= release < NEWEST
    yield noted("torch", built, "" if known else f'not tried with this one: pip install "torch>={low},<{high}"')


def gpus() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        if torch.version.cuda is not None and shutil.which("nvidia-smi"):
            mend = "nvidia-smi is here, and torch sees no GPU: its CUDA is newer than the driver, or there is no device"
            yield Finding("GPUs", "none that torch can use", "wrong", mend)
        else:
            yield Finding("GPUs", "none: ranks compute on the CPU")
        return
    yield Finding("NCCL", ".".join(map(str, torch.cuda.nccl.version())))
    count = torch.cuda.device_count()
    for index in range(count):
        free, total = torch.cuda.mem_get_info(index)
        what = f"{torch.cuda.get_device_name(index)}, {free / GIB:.0f} of {total / GIB:.0f} GiB free"
        taken = 1 - free / total
        yield noted(f"GPU {index}", what, f"others hold {taken:.0%} of it: nvidia-smi" if taken > BUSY else "")
    pairs = [(a, b) for a in range(count) for b in range(a) if not torch.cuda.can_device_access_peer(a, b)]
    if pairs:
        mend = "they talk through the host's memory, which is slower; nvidia-smi topo -m shows how they are joined"
        yield noted("GPU links", f"{len(pairs)} pairs without peer access", mend)


def processor() -> Iterator[Finding]:
    whole, mine = os.cpu_count() or 1, available_cores()
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1
    what = f"{mine} of {whole} cores, {counted(nodes, 'NUMA node')}"
    yield noted("cores", what, "affinity or a cgroup leaves some out" if mine < whole else "")
    load = os.getloadavg()[0]
    if load > 1.5 * mine:
        yield noted("load", f"{load:.1f} on {mine} cores", "others compute here: timings will be noisy")


def memory() -> Iterator[Finding]:
    found = psutil.virtual_memory()
    what = f"{found.available / GIB:.1f} of {found.total / GIB:.1f} GiB free"
    limit = cgroup_number("memory.max")
    if limit is not None and limit < found.total:
        what += f", of which this container may use {limit / GIB:.1f}"
    scarce = found.available < 0.1 * found.total
    yield noted("memory", what, "most of it is taken: ps aux --sort=-rss" if scarce else "")


def cgroup_number(name: str) -> int | None:
    try:
        text = (Path("/sys/fs/cgroup") / name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def limits() -> Iterator[Finding]:
    if FOLDER.is_dir():
        shm = shutil.disk_usage(FOLDER)
        what = f"{shm.free / GIB:.1f} of {shm.total / GIB:.1f} GiB free"
        mend = "docker run --shm-size=8g, or mount -o remount,size=8G /dev/shm; --backend gloo does without"
        yield noted("/dev/shm", what, mend if shm.free < SMALL_SHM * GIB else "")
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    yield noted("open files", f"{files:,}", f"many ranks need more: ulimit -n {FEW_FILES}" if files < FEW_FILES else "")
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    unlimited = locked == resource.RLIM_INFINITY
    matters = not unlimited and torch.cuda.is_available()
    what = "unlimited" if unlimited else f"{locked / 2**20:.0f} MiB"
    yield noted("locked memory", what, "InfiniBand wants it unlimited: ulimit -l unlimited" if matters else "")


def network() -> Iterator[Finding]:
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    addresses = {
        name: [a.address for a in found if a.family == socket.AF_INET]
        for name, found in psutil.net_if_addrs().items()
        if name in up
    }
    listed = ", ".join(f"{name} {' '.join(found)}" for name, found in addresses.items() if found)
    if not listed:
        yield Finding("interfaces", "none has an address", "wrong", "ip link; ip addr")
        return
    yield Finding("interfaces", listed)
    host = socket.gethostname()
    try:
        resolved = socket.gethostbyname(host)
    except OSError:
        mend = f"torchrun and gloo look it up: add '127.0.1.1 {host}' to /etc/hosts"
        yield Finding("host name", f"{host} does not resolve", "wrong", mend)
        return
    chosen = next((name for name, found in addresses.items() if resolved in found), None)
    mend = "only this machine reaches that: for several nodes set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
    where = f"{host} is {resolved}" + (f" on {chosen}" if chosen else "")
    yield noted("host name", where, mend if resolved.startswith("127.") else "")


def folders() -> Iterator[Finding]:
    for name in ("runs", "datasets"):
        place = Path(name) if Path(name).is_dir() else Path()
        where = f"{name}/" if place != Path() else f"{name}/ (not there yet)"
        try:
            with tempfile.NamedTemporaryFile(dir=place):
                free = shutil.disk_usage(place).free
        except OSError as error:
            mend = "choose another with --run-dir or --data.path"
            yield Finding("folder", f"{where}: {error.strerror}", "wrong", mend)
            continue
        yield noted("folder", f"{where}: writable, {free / GIB:.1f} GiB free", "little room" if free < GIB else "")


def leftovers() -> Iterator[Finding]:
    if not FOLDER.is_dir():
        return
    dead = [path.name for path in FOLDER.glob(f"{PREFIX}*") if has_ended(path.name.removeprefix(PREFIX))]
    mend = f"rm /dev/shm/{PREFIX}*; the next run with ranks here does it as well"
    yield noted("leftovers", f"{counted(len(dead), 'segment')} of dead runs in shared memory", mend if dead else "")

"""How a process joins the ranks: its device, its backend, torch's rendezvous, and leaving at the end."""

import os
import platform
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch
import torch.distributed as dist

from lockstep.errors import UserError
from lockstep.launch.calls import record_calls
from lockstep.launch.options import DeviceChoice
from lockstep.launch.restart import launch_id, restart_count
from lockstep.launch.situation import state_of
from lockstep.launch.watch import end_soon, watching
from lockstep.layout.world import World, collective_timeout, torch_backend
from lockstep.words import counted

LARGE = 64
"""Ranks from which on gloo connects pairs when they first communicate, instead of all pairs of each group at once."""


def choose_device(choice: DeviceChoice, local_rank: int, local_size: int, share_gpu: bool) -> torch.device:
    """The device of one rank: its own GPU, a shared one if that was asked for, or the CPU."""
    if choice == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda was given, but torch sees no GPU here; use --device cpu")
    if share_gpu and choice != "cpu" and not torch.cuda.is_available():
        raise UserError("--share-gpu was given, but torch sees no GPU here; leave it out to run on the CPU")
    if choice == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if local_size > gpus and not share_gpu:
        raise UserError(
            f"{local_size} ranks were asked for on a machine with {counted(gpus, 'GPU')}; "
            f"add --share-gpu to let ranks share one, or use --device cpu"
        )
    return torch.device("cuda", local_rank % gpus)


SHARED_GPU_TUNING = {
    # Under MPS the processes share out the queues to the GPU, and streams that share a queue hold each other up: each
    # process asks for as many as it has alone.
    "CUDA_DEVICE_MAX_CONNECTIONS": "8",
    # NCCL copies through one socket per channel in one thread; two threads with two sockets each carry twice as much.
    "NCCL_SOCKET_NTHREADS": "2",
    "NCCL_NSOCKS_PERTHREAD": "2",
}


def share_gpu_environment(rank: int) -> dict[str, str]:
    """Makes NCCL accept several ranks on one GPU: each claims to be its own host, joined by loopback sockets.

    What only makes it faster stays as the user has set it.
    """
    return {
        "NCCL_HOSTID": f"lockstep-rank-{rank}",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_NET": "Socket",
        "NCCL_SOCKET_IFNAME": "lo",
        **{name: os.environ.get(name, value) for name, value in SHARED_GPU_TUNING.items()},
    }


@contextmanager
def join_world(
    device: DeviceChoice = "auto", backend: str | None = None, share_gpu: bool = False, timeout: float = 300.0
) -> Iterator[World]:
    """Join the ranks named by RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; leave at the end."""
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    # DeepSpeed's launcher calls it LOCAL_SIZE.
    local_size = local_world = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or size)
    if not 0 <= rank < size:
        raise UserError(f"RANK is {rank} and WORLD_SIZE is {size}, but ranks go from 0 to WORLD_SIZE - 1")
    if "SLURM_GPUS_PER_TASK" in os.environ:  # each task sees its own GPUs only
        local_rank_on_gpus, local_size = 0, 1
    else:
        local_rank_on_gpus = local_rank
    if share_gpu and size > 1:
        os.environ.update(share_gpu_environment(rank))  # before CUDA starts
    torch_device = choose_device(device, local_rank_on_gpus, local_size, share_gpu)
    if torch_device.type == "cuda":
        torch.cuda.set_device(torch_device)
    if size == 1 and "RANK" not in os.environ:
        yield World(device=torch_device, timeout=timeout)
        return
    one_host = local_world == size and sys.platform == "linux"
    backend = backend or ("nccl" if torch_device.type == "cuda" else "shm" if one_host else "gloo")
    check_backend(backend, torch_device)
    _init_process_group(backend, rank, size, timeout)
    sharing = -(-local_size // torch.cuda.device_count()) if torch_device.type == "cuda" else 1
    with watching(rank, size, timeout):
        yield World(rank, size, local_rank, torch_device, backend, sharing, timeout, restart_count(), launch_id())
    # Not in a `finally`: a failing rank must report its error before its peers see the connection close,
    # or theirs ("connection closed by peer") would be reported as the first.
    if dist.is_initialized():  # a function of a user's may have done it
        dist.destroy_process_group()


def check_known(backend: str, flag: str = "--backend") -> None:
    """Before any rank runs: whether there is such a backend."""
    available = {b for b in ("gloo", "nccl", "mpi", "ucc") if getattr(dist, f"is_{b}_available")()}
    if hasattr(dist.Backend, "SHM"):
        available.add("shm")
    if backend not in available:
        raise UserError(f"{flag} {backend} is not available here; this torch has {', '.join(sorted(available))}")


def check_backend(backend: str, device: torch.device, flag: str = "--backend") -> None:
    check_known(backend, flag)
    if backend == "shm" and device.type == "cuda":
        raise UserError(f"{flag} shm moves CPU tensors, and these ranks run on GPUs; use nccl")
    if backend == "nccl" and device.type == "cpu":
        raise UserError(f"{flag} nccl needs a GPU for each rank, and these ranks run on the CPU; use gloo")


def check_resolves(host: str) -> None:
    """A name that does not resolve would look, after minutes, like ranks that do not join."""
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        raise UserError(
            f"MASTER_ADDR is {host}, which {platform.node()} cannot resolve ({error.strerror}); set MASTER_ADDR to an "
            f"address that every node reaches, or add the name to /etc/hosts"
        ) from None


def stopped_ranks(rank: int) -> list[str]:
    """Ranks of this machine that cannot join, because their processes are stopped. The launcher would wait half a
    minute for them to end, so the first of the other ranks ends them.

    They have written nothing to the store yet. But a launcher starts its ranks in order, with one command.
    """
    me = psutil.Process()
    started = me.parent() or me
    local_rank, local_size = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    ranks = [p for p in started.children() if p.cmdline()[-1:] == me.cmdline()[-1:]]
    ranks.sort(key=lambda process: (process.create_time(), process.pid))
    if len(ranks) != local_size:
        return []
    stopped = {number: p for number, p in enumerate(ranks) if p.status() == psutil.STATUS_STOPPED}
    if local_rank == min(set(range(local_size)) - set(stopped)):
        for process in stopped.values():
            end_soon(process.pid)
    first = rank - local_rank
    return [f"rank {first + number}: {state_of(platform.node(), p.pid)}" for number, p in stopped.items()]


def _init_process_group(backend: str, rank: int, size: int, timeout: float) -> None:
    """torch's rendezvous, with its failures in the user's terms."""
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise UserError(f"RANK is set but {name} is not; start the ranks with --nproc, torchrun or srun")
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    check_resolves(os.environ["MASTER_ADDR"])
    record_calls()
    if size >= LARGE:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    try:
        dist.init_process_group(torch_backend(backend), rank=rank, world_size=size, timeout=collective_timeout(timeout))
    except (dist.DistError, RuntimeError, ValueError) as error:
        text = " ".join(str(error).split())
        if "EADDRINUSE" in text or "in use" in text:
            message = f"port {os.environ['MASTER_PORT']} is taken; set MASTER_PORT to a free one"
        elif "imed out" in text or "clients joined" in text or "imeout" in text:
            message = f"rank {rank} waited {timeout:g} s at {address}, but not all of WORLD_SIZE={size} ranks joined; "
            stopped = stopped_ranks(rank)
            message += "; ".join(stopped) if stopped else "start the missing ones, or correct WORLD_SIZE"
        else:
            raise
        raise UserError(message) from error

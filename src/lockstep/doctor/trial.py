"""Does it work? Real collectives of two ranks on each backend, and the rendezvous address."""

import socket
from collections.abc import Iterator

import torch

from lockstep.bench.comm import bench_comm
from lockstep.bench.trial import Sweep
from lockstep.comm.collectives import all_to_all_async
from lockstep.doctor.finding import Finding, noted
from lockstep.errors import RankError, UserError
from lockstep.launch import Launch, run_on_ranks
from lockstep.layout.world import World

NBYTES = 4 * 2**20
SLOWEST = {"shm": 0.3, "gloo": 0.05, "nccl": 0.5}
"""GB/s of bus bandwidth below which something is wrong with ranks of one machine."""


def backends() -> Iterator[Finding]:
    tried = [("shm", "cpu"), ("gloo", "cpu")]
    if torch.cuda.is_available():
        tried.append(("nccl", "cuda"))
    for backend, device in tried:
        share = device == "cuda" and torch.cuda.device_count() < 2
        launch = Launch(nproc=2, device=device, backend=backend, share_gpu=share, timeout=20.0)  # type: ignore[arg-type]
        try:
            rate = run_on_ranks(try_collectives, launch=launch)[0]
        except (RankError, UserError, OSError) as error:
            yield Finding(f"{backend}, 2 ranks", "does not work", "wrong", " ".join(str(error).split())[:200])
            continue
        what = f"all-reduce of 4 MiB is right, {rate:.2f} GB/s" + (", on one GPU" if share else "")
        what += "; uneven all-to-all, as experts need, is right"
        slow = rate < SLOWEST[backend] and not share
        mend = f"below {SLOWEST[backend]:g} GB/s: others are busy here, or the link is not what it should be"
        yield noted(f"{backend}, 2 ranks", what, mend if slow else "")


def try_collectives(world: World) -> float:
    """GB/s of an all-reduce's bus bandwidth; an error if a single element of it, or of an all-to-all, is wrong."""
    rows = bench_comm(world, ["all_reduce"], [world.backend], ["native"], Sweep((NBYTES,), 6, 2))
    if rows[0].wrong:
        raise UserError(f"{rows[0].wrong} elements of an all-reduce were wrong")
    wrong = wrong_in_uneven_all_to_all(world)
    if wrong:
        raise UserError(f"{wrong} elements of an uneven all-to-all were wrong")
    return rows[0].busbw


def wrong_in_uneven_all_to_all(world: World) -> int:
    """Rank r sends r x 1,000 rows to each: what a router may ask for, and rank 0 has none."""
    sent = [1000 * world.rank] * world.size
    received = [1000 * rank for rank in range(world.size)]
    mine = torch.full((sum(sent), 8), float(world.rank), device=world.device)
    arrived = torch.full((sum(received), 8), torch.nan, device=world.device)
    all_to_all_async(arrived, mine, world.group, received, sent).wait()
    expected = torch.cat([torch.full((rows, 8), float(rank)) for rank, rows in enumerate(received)])
    return int((arrived.cpu() != expected).sum())


def master(address: str) -> Iterator[Finding]:
    """`host:port`, as --master_addr and --master_port would have it."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(f"--master {address}: give host:port, as node1:29500")
    try:
        resolved = socket.gethostbyname(host)
    except OSError as error:
        yield Finding("master", f"{host} does not resolve ({error.strerror})", "wrong", "use an address, or /etc/hosts")
        return
    yield Finding("master", f"{host} is {resolved}")
    with socket.socket() as tried:
        tried.settimeout(3.0)
        if tried.connect_ex((resolved, int(port))) == 0:
            mend = (
                "another process listens there already: fine if it is this job's first rank, else choose another port"
            )
            yield Finding("master", f"port {port} answers", "note", mend)
            return
    with socket.socket() as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            own.bind((resolved, int(port)))
        except OSError as error:
            mend = (
                f"no process listens, and this machine cannot; fine on another node than {host}, else take another port"
            )
            yield Finding("master", f"port {port}: {error.strerror}", "note", mend)
            return
    yield Finding("master", f"port {port} is free on this machine")

"""Waiting for another process: POSIX semaphores in shared memory, through ctypes.

`post` makes everything written before it visible to the thread that returns from the matching `wait` (also on
processors that reorder memory, where a plain flag in shared memory would not), and a wait that has to be long sleeps in
the kernel without the interpreter lock.
"""

import ctypes
import os
import select
import time

from lockstep.errors import PeerError
from lockstep.launch.regroup import INTERRUPT

LIBC = ctypes.CDLL(None)  # releases the interpreter lock around a call: for functions that may sleep
QUICK = ctypes.PyDLL(None)  # keeps the lock: for functions that never sleep
SIZE = 64
"""Bytes per semaphore: a sem_t has 32, and two must not share a line of the cache."""
SPINS = 200
"""How often to poll before going to sleep: some 0.2 ms, about as long as a wake-up takes on a virtual machine."""
LOOK_EVERY = 0.2
"""Seconds of sleep between checks that the other process is alive."""


class _Timespec(ctypes.Structure):
    """C's `struct timespec`."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


LIBC.sem_timedwait.argtypes = (ctypes.c_void_p, ctypes.POINTER(_Timespec))
HAS_CLOCKWAIT = hasattr(LIBC, "sem_clockwait")  # glibc 2.30
if HAS_CLOCKWAIT:
    LIBC.sem_clockwait.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(_Timespec))
for _function in (QUICK.sem_post, QUICK.sem_trywait):
    _function.argtypes = (ctypes.c_void_p,)
QUICK.sem_init.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)

post = QUICK.sem_post
try_wait = QUICK.sem_trywait
"""0 if it has decremented the semaphore."""


def initialize(address: int, value: int) -> None:
    between_processes = 1
    if QUICK.sem_init(address, between_processes, value) != 0:
        raise OSError("sem_init failed")


class Peer:
    """Another rank's process, which this one waits for."""

    def __init__(self, rank: int, pid: int) -> None:
        self.rank, self.pid = rank, pid
        self._descriptor = os.pidfd_open(pid)  # readable once the process has ended; a reused pid does not matter

    def has_ended(self) -> bool:
        look = select.poll()  # one per call: several threads wait for one rank, and a poll object takes one at a time
        look.register(self._descriptor, select.POLLIN)
        return bool(look.poll(0))

    def close(self) -> None:
        os.close(self._descriptor)


def wait(address: int, peer: Peer, timeout: float, beside: bool) -> None:
    """Decrement the semaphore, which `peer` posts.

    `beside`: this process computes meanwhile, so sleep at once: polling would take the core from that.
    """
    for _ in range(0 if beside else SPINS):
        if try_wait(address) == 0:
            return
        os.sched_yield()  # let another thread run
    deadline = time.monotonic() + timeout
    while True:
        if _sleep(address, LOOK_EVERY):
            return
        ended = peer.has_ended()
        if try_wait(address) == 0:  # it posted this before it ended
            return
        give_up(peer, deadline, timeout, ended)


def _sleep(address: int, seconds: float) -> bool:
    """Sleep until the semaphore is decremented, or the time is over. By the monotonic clock, where libc has that."""
    until = seconds + (time.monotonic() if HAS_CLOCKWAIT else time.time())
    moment = _Timespec(int(until), int(until % 1 * 1e9))
    if HAS_CLOCKWAIT:
        return bool(LIBC.sem_clockwait(address, time.CLOCK_MONOTONIC, moment) == 0)
    return bool(LIBC.sem_timedwait(address, moment) == 0)


def give_up(peer: Peer, deadline: float, timeout: float, ended: bool) -> None:
    """Raise if the peer has ended, the timeout is over, or the groups are to be formed anew."""
    if INTERRUPT.is_set():
        raise PeerError(f"rank {peer.rank} (process {peer.pid}) is not waited for any more: ranks have been lost")
    if ended:
        raise PeerError(f"rank {peer.rank} (process {peer.pid}) has ended, and this rank waits for it")
    if time.monotonic() > deadline:
        raise PeerError(f"rank {peer.rank} (process {peer.pid}) did not answer within {timeout:g} s")

"""How the ranks of a group find each other, and the memory that they share: by names in torch's store."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lockstep.comm.shm.mailbox import MAILBOX_BYTES, Mailbox
from lockstep.comm.shm.segment import Segment
from lockstep.comm.shm.semaphore import Peer, give_up
from lockstep.errors import PeerError, UserError
from lockstep.launch.processes import process_namespace
from lockstep.launch.regroup import INTERRUPT

NO_ROOM = "none"


class Rendezvous:
    """One rank's side of the rendezvous. Every key that is put into the store is deleted once it has been read."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float) -> None:
        self._store, self.rank, self.size, self.timeout = store, rank, size, timeout
        self.peers: dict[int, Peer] = {}
        self._segments = 0
        if size > 1:
            self._meet()

    def _meet(self) -> None:
        """Exchange hosts and process ids."""
        self._store.set(f"process/{self.rank}", f"{_host()} {os.getpid()}")
        everyone = [self._read(f"process/{rank}").split() for rank in range(self.size)]
        for rank, (host, _) in enumerate(everyone):
            if host != everyone[0][0]:
                raise UserError(
                    f"the shm backend joins ranks of one machine, but ranks 0 and {rank} of this group are on "
                    f"different ones (or in different containers); use --backend gloo"
                )
        self.peers = {r: Peer(r, int(pid)) for r, (_, pid) in enumerate(everyone) if r != self.rank}

    def _read(self, key: str) -> str:
        """What another rank puts there, unless ranks have been lost meanwhile."""
        store: Any = self._store  # torch's stub does not know its time-out
        deadline = time.monotonic() + min(self.timeout, store.timeout.total_seconds())
        while not self._store.check([key]) and time.monotonic() < deadline:
            if INTERRUPT.is_set():
                raise PeerError("ranks were lost while they formed a group")
            time.sleep(0.002)
        return str(self._store.get(key).decode())

    def peer(self, other: int) -> Peer:
        if other not in self.peers:
            raise ValueError(f"rank {self.rank} of {self.size} cannot send to or receive from rank {other}")
        return self.peers[other]

    def make_segment(self, nbytes: int, prepare: Callable[[Segment], None] | None = None) -> Segment:
        """Shared memory; all ranks must call this together. Rank 0 makes it, prepares it, and publishes its name.

        If there is no room, every rank raises.

        It has a name until `forget`, which all ranks call once all have opened it.
        """
        key = f"segment/{self._segments}"
        self._segments += 1
        if self.rank != 0:
            name = self._read(key)
            if name == NO_ROOM:
                raise UserError("shared memory: rank 0 found no room in /dev/shm; enlarge it or use --backend gloo")
            return Segment.open(name)
        try:
            segment = Segment.create(nbytes)
        except UserError:
            self._store.set(key, NO_ROOM)
            raise
        if prepare is not None:
            prepare(segment)
        self._store.set(key, segment.name)
        return segment

    def forget(self, segment: Segment) -> None:
        """Delete names and keys: a store that outlives this group must not lead a later group to this memory."""
        segment.forget_name()
        self._store.delete_key(f"process/{self.rank}")
        if self.rank == 0:
            self._store.delete_key(f"segment/{self._segments - 1}")

    def make_mailbox(self, peer: Peer) -> Mailbox:
        """The sender makes it, at its first message."""
        segment = Segment.create(MAILBOX_BYTES)
        mailbox = Mailbox(segment, peer, self.timeout)
        mailbox.initialize()
        self._store.set(f"mailbox/{self.rank}/{peer.rank}", segment.name)
        return mailbox

    def find_mailbox(self, peer: Peer) -> Mailbox:
        """The receiver polls for it: the sender may make it late, or never."""
        key, deadline = f"mailbox/{peer.rank}/{self.rank}", time.monotonic() + self.timeout
        while not self._store.check([key]):
            give_up(peer, deadline, self.timeout, peer.has_ended())
            time.sleep(0.001)
        segment = Segment.open(self._store.get(key).decode())
        segment.forget_name()
        self._store.delete_key(key)
        return Mailbox(segment, peer, self.timeout)

    def await_opening(self, mailbox: Mailbox) -> None:
        """Wait until the receiver has opened the mailbox: what was sent must not be lost."""
        deadline = time.monotonic() + self.timeout
        while mailbox.segment.is_named() and time.monotonic() < deadline and not mailbox.peer.has_ended():
            if INTERRUPT.is_set():
                return
            time.sleep(0.005)

    def close(self) -> None:
        for peer in self.peers.values():
            peer.close()
        self.peers.clear()


def _host() -> str:
    """Equal for processes that can share memory and see each other."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{process_namespace()}/{os.stat('/dev/shm').st_dev}"

"""A thread of each rank that watches over its calls, and reports what all ranks are doing when one of them hangs.

The ranks speak through torch's store, because the groups are what hangs:

1. a rank finds a call of its own that has not ended within --timeout, or is asked (SIGQUIT), and writes `look`
2. every rank's thread sees that, and writes what its rank is doing
3. the first that has answered is the reader: a moment later it reads what is there, and reports it; the others read one
   line of it. So N ranks ask the store some N times, and not N x N times
4. after a hang every rank ends; one that did not answer is ended by a neighbour

Where the network is what is broken, the store does not answer either: then each rank reports what it knows, and ends.
So there are two threads: one watches this rank's calls and never waits, the other talks to the store.

A thread needs the interpreter only for an instant each time: a main thread that waits in C++ does not keep it away.
"""

import json
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta

import psutil
import torch.distributed as dist

from lockstep.errors import HangError
from lockstep.launch.calls import LONG, Call, last_calls
from lockstep.launch.processes import process_namespace
from lockstep.launch.restart import RESTARTS
from lockstep.launch.situation import FINISHED, Situation, local_situation, main_position, report, state_of, verdict

LOOK_EVERY = 0.2
RANKS_AT_THAT_PACE = 512
"""That one store answers; more ranks look less often."""
LOOKS_TO_ANSWER = 3
"""Ranks have so many looks of time to say what they are doing."""
LET_OTHERS_END = 0.4
ALONE_AFTER = 1.6
"""Seconds after which a rank that hangs, and whose store has not answered, ends by itself."""
AT_LATEST = 10.0
"""The same, where the store has answered: it may have gone since, or the machine may be slow."""
PASSING = 1.0
"""Seconds after which a call in a run that is well would be over."""


class Watch:
    """Of one rank."""

    def __init__(self, rank: int, size: int, timeout: float) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self.pace = LOOK_EVERY * max(1.0, size / RANKS_AT_THAT_PACE)
        """Seconds between two looks into the store."""
        self._reported: dict[str, str | None] = {}
        self._store = self._connect()
        self._seen = self._token()
        self._since: dict[tuple[str, tuple[int, ...], int, str, int], float] = {}
        """Since when we know of a call that has not ended, by the monotonic clock."""
        self._position: tuple[int, int] | None = None
        """Where the main thread was, the last time."""
        self._hanging, self._asked, self._over = threading.Event(), threading.Event(), threading.Event()
        self._heard = threading.Event()
        self._telling = threading.Lock()
        self._threads = [
            threading.Thread(target=run, name=f"lockstep watch ({name})", daemon=True)
            for name, run in (("own calls", self._look), ("store", self._listen))
        ]

    def _connect(self) -> dist.Store:
        store = connected(store_address(), self.timeout)
        store.delete_key(f"finished/{self.rank}")  # of an earlier rank of this number, where ranks come and go
        store.set(f"process/{self.rank}", f"{platform.node()} {os.getpid()} {process_namespace()}")
        return store

    def _token(self) -> str:
        return last_look(self._store)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """This rank's work is done: if another one still waits for it, that is why."""
        with suppress(dist.DistError, RuntimeError):  # the store is gone, and with it the ranks that would ask
            self._store.set(f"finished/{self.rank}", "")
        self._over.set()
        for thread in self._threads:
            thread.join(2)

    def ask(self) -> None:
        """Report what all ranks are doing, and let them continue."""
        self._asked.set()

    # ---- the threads -----------------------------------------------------------------------------------------

    def _look(self) -> None:
        while not self._over.wait(LOOK_EVERY):
            age = self._oldest()
            if age >= self.timeout:
                self._hanging.set()
            if age >= self.timeout + (AT_LATEST if self._heard.is_set() else ALONE_AFTER):
                alone = report({self.rank: local_situation(self.rank)}, {})
                end_with(f"{alone}\n  the other ranks cannot be asked: {store_address()} does not answer")

    def _listen(self) -> None:
        while not self._over.wait(self.pace):
            try:
                hanging = self._hanging.is_set()
                if hanging or self._asked.is_set():
                    self._asked.clear()
                    self._answer(self._begun("hang" if hanging else "asked"))
                elif (token := self._token()) != self._seen:
                    self._answer(token)
            except (dist.DistError, RuntimeError):  # the store is gone, and with it the run: others say why
                return

    def _oldest(self) -> float:
        """For how long a call has been open, at most. Calls are only read where the main thread stands still: torch's
        recorder, read while it is written, has crashed a rank.
        """
        now, position = time.monotonic(), main_position()
        if position != self._position:
            self._position = position
            return 0.0
        pending = {key(call) for call in last_calls() if not call.over and not call.group.startswith(LONG)}
        self._since = {k: self._since.get(k, now) for k in pending}
        return now - min(self._since.values(), default=now)

    def _begun(self, why: str) -> str:
        """Ours, or that of a rank that was quicker: all must answer the same one."""
        token = self._store.compare_set("look", self._seen, f"{why}-{self.rank}-{time.time_ns()}").decode()
        if why == "hang":
            self._heard.set()
        return token

    def _answer(self, token: str) -> None:
        said = self.report_of(token)
        if token.startswith("hang"):
            end_with(said)
        elif token.startswith("asked") and said is not None:  # else the rank that asked reads it
            print(said, file=sys.stderr, flush=True)

    # ---- what is reported --------------------------------------------------------------------------------------

    def report_of(self, token: str) -> str | None:
        """Of what all ranks are doing, if it is this rank's to report it. Asked again, it says the same again."""
        with self._telling:
            if token in self._reported:
                return self._reported[token]
            self._seen = token
            mine = local_situation(self.rank)
            if not token.startswith("hang"):  # ranks look at different moments: what has just begun will end
                now = time.monotonic()
                mine.calls = [c if now - self._since.get(key(c), now) > PASSING else c.ended() for c in mine.calls]
            self._store.set(f"{token}/{self.rank}", mine.to_json())
            is_reader = self._store.add(f"{token}/{ANSWERED}", 1) == 1
            self._reported[token] = self._read(token) if is_reader or not self._wait_for_reader(token) else None
            return self._reported[token]

    def _read(self, token: str) -> str:
        """All answers, for all ranks: what they are doing, and who ends those that have not answered."""
        found, silent = answers(self._store, token, self.size, LOOKS_TO_ANSWER * self.pace)
        said = report(found, states(self._store, silent))
        self._store.set(f"{token}/{SILENT}", json.dumps(neighbours_of(self._store, silent, sorted(found))))
        self._end_silent(token)
        return said

    def _wait_for_reader(self, token: str) -> bool:
        """Whether it has read all answers; else it has ended, and this rank must."""
        deadline = time.monotonic() + 3 * LOOKS_TO_ANSWER * self.pace
        while not self._store.check([f"{token}/{SILENT}"]):
            if time.monotonic() > deadline:
                return False
            time.sleep(self.pace / 2)
        self._end_silent(token)
        return True

    def _end_silent(self, token: str) -> None:
        """A process that is stopped does not end when it is asked to, and its launcher waits for it for half a
        minute. A rank of its machine that has answered sees to it, when all others have ended.
        """
        if not token.startswith("hang"):
            return
        for pid in json.loads(self._store.get(f"{token}/{SILENT}")).get(str(self.rank), []):
            if psutil.pid_exists(pid) and psutil.Process(pid).ppid() == os.getppid():
                end_soon(pid)

    def explain_closed(self) -> str | None:
        """Why a peer has closed its connection, if it is because its work is done."""
        peers = sorted({rank for call in last_calls() for rank in call.ranks})
        try:
            finished = [rank for rank in peers if self._store.check([f"finished/{rank}"])]
        except (dist.DistError, RuntimeError):  # the store is gone too
            return None
        calls = [call for call in last_calls() if set(finished) & set(call.ranks)]
        if not calls:
            return None
        failed = next((call for call in calls if not call.over), calls[-1])
        mine = Situation(self.rank, platform.node(), os.getpid(), [replace(failed, over=False)])
        return verdict({self.rank: mine}, dict.fromkeys(finished, FINISHED))

    def explain_timeout(self) -> str | None:
        """What a rank reports, instead of its backend's message, when the backend has timed out first."""
        said: list[str | None] = []

        def ask() -> None:
            with suppress(dist.DistError, RuntimeError):  # the store is gone too
                said.append(self.report_of(self._begun("hang")))

        asking = threading.Thread(target=ask, daemon=True)  # a store that cannot be reached blocks its caller
        asking.start()
        asking.join(2 * ALONE_AFTER)
        return said[0] if said else None


# ---- the store ---------------------------------------------------------------------------------------------------


def store_address() -> str:
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def connected(address: str, timeout: float) -> dist.Store:
    return dist.PrefixStore("lockstep/watch", store_at(address, timeout))


def store_at(address: str, timeout: float) -> dist.TCPStore:
    """A client of its own: calls of one client wait for each other."""
    host, _, port = address.rpartition(":")
    return dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=timeout))


def last_look(store: dist.Store) -> str:
    return store.get("look").decode() if store.check(["look"]) else ""


Process = tuple[str, int, int]
"""Machine, number, and the namespace in which the number means something: containers may have one host name."""


def process_of(store: dist.Store, rank: int) -> Process:
    host, pid, namespace = store.get(f"process/{rank}").decode().split()
    return host, int(pid), int(namespace)


ANSWERED, SILENT = "answered", "silent"
"""Keys beside the ranks' answers: how many there are; which rank ends which processes."""


def answers(store: dist.Store, token: str, size: int, within: float) -> tuple[dict[int, Situation], dict[int, Process]]:
    """What ranks have said, and the machines and processes of those that have said nothing."""
    everyone = {rank: f"{token}/{rank}" for rank in range(size)}
    deadline = time.monotonic() + within
    while time.monotonic() < deadline and store.add(f"{token}/{ANSWERED}", 0) < size:
        time.sleep(0.02)
    if store.add(f"{token}/{ANSWERED}", 0) < size:
        everyone = {rank: at for rank, at in everyone.items() if store.check([at])}
    said = store.multi_get(list(everyone.values()))
    found = {rank: Situation.from_json(text.decode()) for rank, text in zip(everyone, said, strict=True)}
    return found, {rank: process_of(store, rank) for rank in range(size) if rank not in found}


def neighbours_of(store: dist.Store, silent: dict[int, Process], answered: list[int]) -> dict[int, list[int]]:
    """Of each machine with ranks that are silent, the first rank that has answered, and their processes."""
    if not silent:
        return {}
    first: dict[tuple[str, int], int] = {}
    for rank in answered:
        host, _, namespace = process_of(store, rank)
        first.setdefault((host, namespace), rank)
    found: dict[int, list[int]] = {}
    for host, pid, namespace in silent.values():
        if (host, namespace) in first:
            found.setdefault(first[host, namespace], []).append(pid)
    return found


def states(store: dist.Store, silent: dict[int, Process]) -> dict[int, str]:
    """What became of ranks that have not answered."""
    return {
        rank: FINISHED if store.check([f"finished/{rank}"]) else state_of(*process) for rank, process in silent.items()
    }


def end_soon(pid: int) -> None:
    """A process that is stopped, when the others have ended."""
    command = ["sh", "-c", f"sleep {LET_OTHERS_END}; kill -9 {pid}"]
    subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)


def ask_from_outside(address: str, size: int) -> str:
    """What the ranks of a run are doing now, for a process that is none of them. The run goes on."""
    store = connected(address, 5.0)
    token = store.compare_set("look", last_look(store), f"doctor-{os.getpid()}-{time.time_ns()}").decode()
    found, silent = answers(store, token, size, 2.0)
    return report(found, states(store, silent))


def key(call: Call) -> tuple[str, tuple[int, ...], int, str, int]:
    return call.group, call.ranks, call.number, call.what, call.record


def end_with(said: str | None) -> None:
    """End this process; its main thread cannot. The one that has something to say ends first."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    if said is None:
        time.sleep(LET_OTHERS_END / 2)
        said = "another rank reports why"
    elif RESTARTS not in os.environ:  # what we record is not shown
        print(f"error: the ranks hung: {said}", file=sys.stderr, flush=True)
    get_error_handler().record_exception(HangError(f"the ranks hung: {said}"))
    os._exit(1)


_current: Watch | None = None


def current_watch() -> Watch | None:
    return _current


@contextmanager
def watching(rank: int, size: int, timeout: float) -> Iterator[None]:
    """While this rank is one of several."""
    global _current
    try:
        watch = Watch(rank, size, timeout)
    except (dist.DistError, RuntimeError):  # a store that takes no second connection
        yield
        return
    _current = watch
    watch.start()
    with answering_sigquit(watch):
        yield
    watch.end()
    _current = None


@contextmanager
def answering_sigquit(watch: Watch) -> Iterator[None]:
    """Python runs a signal's handler when the main thread next runs Python, which one that hangs never does. But the
    signal's number goes into a socket at once, and a thread that reads from it hears of it.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGQUIT"):
        yield
        return
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    before = signal.signal(signal.SIGQUIT, lambda *_: None)
    old = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)

    def listen() -> None:
        while numbers := ours.recv(64):
            if signal.SIGQUIT in numbers:
                watch.ask()

    thread = threading.Thread(target=listen, name="lockstep SIGQUIT", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(old)
        signal.signal(signal.SIGQUIT, before)
        theirs.close()
        thread.join(5)
        ours.close()

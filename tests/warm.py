"""A Python that has imported torch, for tests that start many processes: each is a fork of one server.

`python()` is a program that takes the arguments of `python` (a script, or -m module) and runs them in such a fork, with
this program's streams, folder and environment; it ends as the fork ends, and the fork ends with it. What a process does
before it has imported torch is not what such a test sees.
"""

import atexit
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

CLIENT = """#!{python} -IS
import json, os, signal, socket, sys
with socket.socket(socket.AF_UNIX) as line:
    line.connect({address!r})
    asked = json.dumps({{"argv": sys.argv[1:], "environment": dict(os.environ), "folder": os.getcwd()}}).encode()
    socket.send_fds(line, [len(asked).to_bytes(8, "big")], [0, 1, 2])
    line.sendall(asked)
    status = int(line.recv(16) or b"1")
if status < 0:
    signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""
IMPORTED = ("torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.run")


@cache
def python() -> str:
    """The program; the server starts with the first call, and ends with this process."""
    folder = Path(tempfile.mkdtemp(prefix="lockstep-warm-"))
    address = folder / "line"
    program = program_at(str(address))
    program.write_text(CLIENT.format(python=sys.executable, address=str(address)))
    program.chmod(0o700)
    server = subprocess.Popen([sys.executable, __file__, str(address)], stdin=subprocess.PIPE)

    def end() -> None:
        server.kill()
        server.wait()
        for path in (address, program):
            path.unlink(missing_ok=True)
        folder.rmdir()

    atexit.register(end)
    while not address.exists():
        assert server.poll() is None, "the server has ended"
        time.sleep(0.02)
    return str(program)


def program_at(line: str) -> Path:
    return Path(line).with_name("python")


def serve(address: str) -> None:
    """Fork for each client; kill the fork when its client has gone, and end when stdin does."""
    for name in IMPORTED:
        __import__(name)
    line = socket.socket(socket.AF_UNIX)
    line.bind(f"{address}.new")
    line.listen(64)
    os.rename(f"{address}.new", address)
    waker, wakes = socket.socketpair()
    for end in (waker, wakes):
        end.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    clients: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as events:
        for source in (line, waker, sys.stdin):
            events.register(source, selectors.EVENT_READ)
        while True:
            for key, _ in events.select():
                if key.fileobj is sys.stdin:
                    return
                if key.fileobj is line:
                    client, _ = line.accept()
                    streams, asked = request(client)
                    pid = os.fork()
                    if pid == 0:
                        events.close()
                        for inherited in (line, waker, wakes, client, *clients.values()):
                            inherited.close()
                        become(address, streams, **asked)
                    for stream in streams:
                        os.close(stream)
                    clients[pid] = client
                    events.register(client, selectors.EVENT_READ, pid)
                elif key.fileobj is waker:
                    waker.recv(4096)
                else:
                    os.kill(key.data, signal.SIGKILL)  # its client has gone
                    events.unregister(key.fileobj)
            reap(clients, events)


def request(client: socket.socket) -> tuple[list[int], dict[str, Any]]:
    size, streams, _, _ = socket.recv_fds(client, 8, 3)
    left, asked = int.from_bytes(size, "big"), b""
    while len(asked) < left:
        asked += client.recv(left - len(asked))
    return streams, json.loads(asked)


def reap(clients: dict[int, socket.socket], events: selectors.BaseSelector) -> None:
    while clients:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        client = clients.pop(pid)
        if client in {key.fileobj for key in events.get_map().values()}:
            events.unregister(client)
        with client:
            try:
                client.sendall(str(os.waitstatus_to_exitcode(status)).encode())
            except OSError:
                continue  # it has gone


def become(line: str, streams: list[int], argv: list[str], environment: dict[str, str], folder: str) -> None:
    """The process that was asked for."""
    import runpy

    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.executable = str(program_at(line))  # torchrun's ranks are forks too
    prepare(environment)
    argv = [word for word in argv if word != "-u"]
    status = 0
    try:
        if argv[0] == "-m":
            sys.argv = argv[1:]
            sys.path.insert(0, folder)
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = argv
            sys.path.insert(0, str(Path(argv[0]).resolve().parent))
            runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else int(left.code is not None)
        if not isinstance(left.code, int | None):
            print(left.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        status = 1
    finally:
        end(status)


def prepare(environment: dict[str, str]) -> None:
    """As an interpreter would at its start: the path, sitecustomize, torch's threads."""
    import torch

    sys.path[:] = [entry for entry in (environment.get("PYTHONPATH") or "").split(os.pathsep) if entry] + sys.path[1:]
    if "OMP_NUM_THREADS" in environment:
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    sys.modules.pop("sitecustomize", None)
    with suppress(ImportError):
        import sitecustomize  # noqa: F401
    if environment.get("LOCKSTEP_JUDGE"):  # its hook waits for the import of torch
        import lockstep.judge.watcher as watcher

        sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "Torch"]
        watcher.begin(Path(environment["LOCKSTEP_JUDGE"]))


def end(status: int) -> None:
    """As an interpreter does: threads, then atexit, then the streams."""
    import threading

    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


if __name__ == "__main__":
    serve(sys.argv[1])

"""Faults of a whole node: two agents of torchrun's with one rank each, on loopback or joined by a link."""

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.chaos.command import LIMIT, Command, until
from lockstep.launch.cluster import JOINABLE
from lockstep.launch.link import Node, check_possible, connect, environment_of, parse_link, torchrun_of
from lockstep.training.attempt import step_in_progress

LINK = "1gbit"
PATIENCE = "last_call_timeout=2,join_timeout=60,keep_alive_interval=1,keep_alive_max_attempt=3"


def training(config: Path, run: Path, timeout: float) -> list[str]:
    """Each start goes on from what is there."""
    words = ["train", str(config), "--run-dir", str(run), "--resume", "auto", "--device", "cpu"]
    return [*words, "--timeout", f"{timeout:g}"]


@contextmanager
def kill_agent(train: list[str], run: Path, step: int, folder: Path) -> Iterator[tuple[Command, float]]:
    """kill -9 of the second node's agent; a new node takes its place. The first agent, and the moment."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=3"]
    agent += ["--monitor-interval=0.1", "--rdzv-backend=c10d", "--rdzv-id=chaos", f"--rdzv-conf={PATIENCE}"]
    agent += [f"--rdzv-endpoint=127.0.0.1:{port}", f"--log-dir={folder}", "-m", "lockstep", *train]
    agents: list[Command] = []
    try:
        agents.append(Command(agent, **environment()))
        until("the first agent", lambda: listens(port))  # the one that hosts the rendezvous
        agents.append(Command(agent, **environment()))
        until(f"step {step}", lambda: step_in_progress(run) >= step)
        os.kill(agents[1].process.pid, signal.SIGKILL)
        hit = time.monotonic()
        agents.append(Command(agent, **environment()))
        yield agents[0], hit
    finally:
        for one in agents:
            one.wait(10 if sys.exc_info()[0] is None else 0)


def environment() -> dict[str, str]:
    """As many threads as ranks of a launcher have, or sums would be made in another order."""
    return {"OMP_NUM_THREADS": environment_of(2)["OMP_NUM_THREADS"], JOINABLE: "1"}


def listens(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


class Network:
    """Two nodes, joined by a link."""

    def __init__(self, train: list[str], folder: Path) -> None:
        self.nodes: list[Node] = []
        try:
            for n in range(2):
                self.nodes.append(Node(n, torchrun_of(n, 1, str(folder), train), environment_of(2), quiet=True))
            connect(self.nodes, parse_link(LINK))
            for node in self.nodes:
                node.go()
        except BaseException:
            self.end()
            raise

    def cut(self) -> None:
        self.nodes[1].inside("ip", "link", "set", "eth0", "down")

    def output(self) -> list[str]:
        """Of each node, so far."""
        return [Path(f"/proc/self/fd/{node.said.fileno()}").read_text(errors="replace") for node in self.nodes]

    def wait(self) -> int | None:
        deadline = time.monotonic() + LIMIT
        while any(node.process.poll() is None for node in self.nodes):
            if time.monotonic() > deadline:
                return None
            time.sleep(0.05)
        return max(abs(node.process.returncode) for node in self.nodes)

    def end(self) -> None:
        for node in self.nodes:
            node.end()


def check_partition() -> None:
    """Whether this machine lets us join two networks, which only a trial shows."""
    check_possible(parse_link(LINK))
    nodes: list[Node] = []
    try:
        for number in range(2):
            nodes.append(Node(number, ["true"], {}, quiet=True))
        connect(nodes, parse_link(LINK))
    finally:
        for node in nodes:
            node.end()


def partition(train: list[str], run: Path, step: int, folder: Path) -> tuple[float, list[float], str]:
    """Cut the link. The moment; how long after it each side has said that the ranks hung; and what they said."""
    network = Network(train, folder)
    try:
        until(f"step {step}", lambda: step_in_progress(run) >= step)
        network.cut()
        hit = time.monotonic()
        reported: dict[int, float] = {}
        while len(reported) < 2:
            for number, said in enumerate(network.output()):
                if number not in reported and "the ranks hung" in said:
                    reported[number] = time.monotonic() - hit
            if time.monotonic() - hit > LIMIT:
                raise TimeoutError(f"only {len(reported)} of 2 nodes said that the ranks hung, within {LIMIT:.0f} s")
            time.sleep(0.05)
        return hit, list(reported.values()), "\n".join(network.output())
    finally:
        network.end()

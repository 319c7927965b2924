"""A slow link on a fast machine: the ranks of one command on two "hosts" that are joined by a shaped network.

Each host is a process in network and process namespaces of its own, with its own address; a pair of virtual Ethernet
devices joins them, and a token bucket at each end holds the rate. In each, torchrun starts half of the ranks, which
communicate over that network as they would between machines.

    node 0 (10.77.0.1)  eth0 [tbf] <------ veth ------> [tbf] eth0  (10.77.0.2) node 1

With a latency the devices are TUNs, and `relay.py` carries the packets from one to the other, late.

Nothing is made outside the namespaces, and these have no name: they live as long as their processes, and the processes
die with this one, however it ends. So there is nothing to clean up, after a crash either.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO

from lockstep.errors import UserError
from lockstep.launch.cores import available_cores
from lockstep.launch.leftovers import FOLDER_PREFIX
from lockstep.launch.processes import signature
from lockstep.launch.rank import die_with_parent
from lockstep.launch.relay import Relay

NODES = 2
DEFAULT_RANKS = 4
OVER_LINK = "LOCKSTEP_OVER_LINK"
"""Set in the environment of ranks that run_over_link has started."""
ADDRESS = "10.77.0.{}"
PORT = 29400
RATES = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
MTU_WITH_RELAY = 65000
"""Few and large packets: each crosses Python."""


@dataclass(frozen=True)
class Link:
    """What joins two hosts."""

    bits_per_second: float
    latency: float = 0.0
    """Seconds, one way."""

    @property
    def burst_bytes(self) -> int:
        """What may leave at once: two of the largest packets, or half a millisecond's worth."""
        return max(2 * 65536, int(self.bits_per_second / 8 * 0.0005))

    @property
    def queue_bytes(self) -> int:
        """Long enough that nothing is dropped that TCP would have to send again."""
        return max(8 * self.burst_bytes, int(self.bits_per_second / 8 * (0.05 + 2 * self.latency)))


def parse_link(text: str) -> Link:
    """`1gbit`, or with a one-way latency `1gbit,5ms`."""
    rate, _, latency = text.replace(" ", "").lower().partition(",")
    speed = re.fullmatch(r"([\d.]+)(kbit|mbit|gbit)", rate)
    delay = re.fullmatch(r"([\d.]+)(us|ms|s)", latency) if latency else None
    try:
        if speed is None or (latency and delay is None):
            raise ValueError
        bits = float(speed[1]) * RATES[speed[2]]
        seconds = float(delay[1]) * TIMES[delay[2]] if delay is not None else 0.0
    except ValueError:
        raise UserError(f"--link {text}: give a rate and perhaps a latency, such as 1gbit or 100mbit,5ms") from None
    if not 1e5 <= bits <= 1e11 or seconds > 10:
        raise UserError(f"--link {text}: the rate must be from 100kbit to 100gbit, the latency at most 10s")
    return Link(bits, seconds)


def check_possible(link: Link) -> None:
    """Say what is missing here before anything is started."""
    missing = [f"the command {c}" for c in ("ip", "tc", "unshare", "nsenter") if shutil.which(c) is None]
    if sys.platform != "linux":
        missing = ["Linux"]
    elif os.geteuid() != 0:
        missing.append("root")
    elif link.latency and not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        missing.append("/dev/net/tun (for the latency)")
    if missing:
        raise UserError(
            f"--link makes network namespaces, which needs root, iproute2 and util-linux; "
            f"missing here: {', '.join(missing)}"
        )


class Node:
    """One host: a process in namespaces of its own, which waits for its network and then becomes torchrun."""

    def __init__(self, number: int, command: list[str], environment: dict[str, str], quiet: bool = False) -> None:
        self.number = number
        self.said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `end`)
        namespaces = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self.process = subprocess.Popen(
            [*namespaces, "sh", "-c", 'read go && exec "$@" < /dev/null', "sh", *command],
            stdin=subprocess.PIPE,
            stdout=self.said if number or quiet else None,  # the first node holds rank 0, who speaks for all
            stderr=self.said,
            env={**os.environ, **environment},
            preexec_fn=partial(die_with_parent, os.getpid()),
            start_new_session=True,  # Ctrl-C is for us; we end the nodes
        )
        deadline = time.monotonic() + 10
        while not self._has_local_network():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.end()
                raise UserError("--link: this machine does not let us make a network namespace (unshare failed)")
            time.sleep(0.01)

    def _has_local_network(self) -> bool:
        try:
            return os.stat(f"/proc/{self.process.pid}/ns/net").st_ino != os.stat("/proc/self/ns/net").st_ino
        except FileNotFoundError:  # it has ended
            return False

    @property
    def address(self) -> str:
        return ADDRESS.format(self.number + 1)

    def inside(self, *command: str) -> None:
        """Run something in this host's network."""
        run(["nsenter", f"--net=/proc/{self.process.pid}/ns/net", *command])

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"go\n")
        self.process.stdin.close()

    def end(self) -> None:
        """The process namespace goes with its first process, and everything in it."""
        self.process.kill()
        self.process.wait()
        self.said.close()


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise UserError(f"--link: `{' '.join(command)}` failed: {done.stderr.strip() or done.returncode}")


def connect(nodes: list[Node], link: Link) -> Relay | None:
    """Join the two hosts and shape what each sends."""
    relay = None
    if link.latency:
        relay = Relay([f"/proc/{n.process.pid}/ns/net" for n in nodes], "eth0", link.latency)
    else:
        first, second = (str(n.process.pid) for n in nodes)
        run(["ip", "link", "add", "eth0", "netns", first, "type", "veth", "peer", "name", "eth0", "netns", second])
    shape = ["root", "tbf", "rate", f"{link.bits_per_second:.0f}bit"]
    shape += ["burst", str(link.burst_bytes), "limit", str(link.queue_bytes)]
    for node in nodes:
        node.inside("ip", "link", "set", "lo", "up")
        node.inside("ip", "address", "add", f"{node.address}/24", "dev", "eth0")
        node.inside("ip", "link", "set", "eth0", *(("mtu", str(MTU_WITH_RELAY)) if relay else ()), "up")
        node.inside("tc", "qdisc", "add", "dev", "eth0", *shape)
    return relay


def check_ranks(nproc: int | None) -> int:
    """How many there are to be: as many on each node."""
    ranks = DEFAULT_RANKS if nproc is None else nproc
    if ranks < NODES or ranks % NODES:
        raise UserError(f"--link joins {NODES} nodes with as many ranks each: --nproc must be even, and it is {ranks}")
    return ranks


def run_over_link(text: str, arguments: list[str], nproc: int | None) -> int:
    """`lockstep ARGUMENTS` on ranks of two hosts. Returns its exit status; the first host's output is shown."""
    link, ranks = parse_link(text), check_ranks(nproc)
    check_possible(link)
    nodes: list[Node] = []
    relay = None
    before = {s: signal.signal(s, _interrupt) for s in (signal.SIGTERM, signal.SIGINT)}
    folder = tempfile.TemporaryDirectory(prefix=f"{FOLDER_PREFIX}{signature()}-")  # torchrun's logs
    try:
        for number in range(NODES):
            command = torchrun_of(number, ranks // NODES, folder.name, arguments)
            nodes.append(Node(number, command, environment_of(ranks)))
        relay = connect(nodes, link)
        for node in nodes:
            node.go()
        failed = _wait(nodes)
        return _explain(failed) if failed is not None else 0
    finally:
        for node in nodes:
            node.end()
        if relay is not None:
            relay.close()
        folder.cleanup()
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(f"{signal.Signals(number).name}: all ranks were ended")


def _wait(nodes: list[Node]) -> Node | None:
    """Until all are done, or one has failed: that one."""
    while True:
        statuses = [node.process.poll() for node in nodes]
        for node, status in zip(nodes, statuses, strict=True):
            if status:
                return node
        if None not in statuses:
            return None
        time.sleep(0.05)


def _explain(failed: Node) -> int:
    """One line where a rank reported a user's mistake in one line; else torchrun's whole output."""
    failed.said.seek(0)
    text = failed.said.read().decode(errors="replace")
    mistake = re.search(r"^\[rank \d+\] error: (.*)$", text, re.MULTILINE)
    if mistake is not None and "Traceback" not in text[: mistake.start()]:
        raise UserError(mistake[1])
    sys.stderr.write(text)
    return 1


def environment_of(ranks: int) -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, available_cores() // ranks))),
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_IFNAME": "eth0",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        OVER_LINK: "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")])),
    }


def torchrun_of(number: int, ranks_per_node: int, folder: str, arguments: list[str]) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *(f"--nnodes={NODES}", f"--nproc-per-node={ranks_per_node}", "--rdzv-backend=c10d", "--rdzv-id=lockstep"),
        f"--rdzv-endpoint={ADDRESS.format(1)}:{PORT}",
        f"--rdzv-conf=is_host={int(number == 0)}",
        f"--log-dir={folder}",
        f"--local-addr={ADDRESS.format(number + 1)}",
        *("-m", "lockstep", *arguments),
    ]

"""The same look at every node: by ssh, or by the ranks that srun or torchrun has started; then what differs."""

import json
import platform
import re
import shlex
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

from lockstep.comm.collectives import all_gather_objects
from lockstep.doctor.finding import Finding
from lockstep.errors import UserError
from lockstep.layout.world import World

SAME = ("Python", "torch", "NCCL", "GPUs", "GPU 0", "GPU links", "cores", "open files", "locked memory")
"""What nodes of one job must, or should, have in common."""
MUST = ("Python", "torch", "NCCL")
SKEW = 1.0
"""Seconds between two nodes' clocks above which logs of several nodes cannot be read together."""
SLOWER = 0.7
"""Of the median bandwidth, below which a node's own is worth a look."""
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5")


@dataclass
class Report:
    """What one node has found."""

    node: str
    findings: list[Finding]
    clock: float
    """Its wall clock, when it had looked at everything."""
    skew: float = 0.0
    """By how much that is ahead of ours."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Report":
        values = json.loads(text)
        return cls(**{**values, "findings": [Finding(**one) for one in values["findings"]]})


def local_report(findings: list[Finding]) -> Report:
    return Report(platform.node(), findings, time.time())


def from_every_node(world: World, report: Report) -> list[Report]:
    """By the ranks of a job. The first one has all of them; the others have nothing to show."""
    all_gather_objects(world.rank)  # so that each looks at its clock at one moment, up to the network's latency
    report.skew = report.clock = time.time()
    everyone = [Report.from_json(text) for text in all_gather_objects(report.to_json()) if text]
    first = {one.node: one for one in reversed(everyone)}
    return list(reversed(first.values())) if world.is_main else []


def by_ssh(hosts: tuple[str, ...], trial: bool) -> list[Report]:
    """All at once; a node that cannot be asked is a finding of its own."""
    command = f"lockstep doctor --json{'' if trial else ' --no-trial'}"
    with ThreadPoolExecutor(len(hosts)) as threads:
        return list(threads.map(lambda host: asked(host, [*SSH, host, command]), hosts))


def asked(host: str, command: list[str]) -> Report:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    except FileNotFoundError:
        raise UserError(
            "--nodes asks the nodes by ssh, which is not installed here; under srun or torchrun leave --nodes out"
        ) from None
    except subprocess.TimeoutExpired:
        return unreachable(host, "no answer within 90 s", command)
    now = time.time()
    line = next((line for line in done.stdout.splitlines() if line.startswith('{"node"')), "")
    try:
        report = Report.from_json(line)
    except (ValueError, TypeError, KeyError):
        said = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        return unreachable(host, said, command)
    report.node, report.skew = host, report.clock - now
    return report


def unreachable(host: str, why: str, command: list[str]) -> Report:
    return Report(host, [Finding("node", why[:200], "wrong", f"try it by hand: {shlex.join(command)}")], time.time())


def differences(reports: list[Report]) -> Iterator[Finding]:
    """Between nodes: what must be the same and is not, clocks, links that are slower than the others'."""
    by_topic: dict[str, dict[str, str]] = defaultdict(dict)
    for report in reports:
        for finding in report.findings:
            by_topic[finding.topic].setdefault(report.node, finding.what)
    for topic in SAME:
        values: dict[str, list[str]] = defaultdict(list)
        for node, what in by_topic[topic].items():
            values[what].append(node)
        if len(values) > 1:
            text = "; ".join(f"{what} on {', '.join(nodes)}" for what, nodes in values.items())
            must = topic in MUST
            mend = "install the same on every node" if must else "ranks wait for the weakest node"
            yield Finding(topic, text, "wrong" if must else "note", mend)
    skews = {report.node: report.skew for report in reports}
    if max(skews.values()) - min(skews.values()) > SKEW:
        last = max(skews, key=lambda node: skews[node])
        yield Finding(
            "clocks", f"{last} is ahead by {skews[last] - min(skews.values()):.1f} s", "note", "chronyc tracking"
        )
    for topic, nodes in by_topic.items():
        rates = {node: rate for node, what in nodes.items() if (rate := bandwidth(what)) is not None}
        usual = statistics.median(rates.values()) if len(rates) > 1 else 0.0
        for node, rate in rates.items():
            if rate < SLOWER * usual:
                yield Finding(
                    topic, f"{node}: {rate:g} GB/s, others {usual:g}", "note", f"lockstep bench comm on {node}"
                )


def bandwidth(what: str) -> float | None:
    found = re.search(r"([\d.]+) GB/s", what)
    return float(found[1]) if found else None

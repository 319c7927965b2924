"""Two nodes on one machine, joined by a shaped network: real multi-node launch, the rate it shows, what it leaves."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from lockstep.cli.flags import without_flag
from lockstep.errors import UserError
from lockstep.launch import link
from lockstep.launch.link import check_possible, parse_link, run_over_link
from lockstep.training.attempt import read_status, step_in_progress
from tests.ranks import LONG

pytestmark = pytest.mark.alone


def why_not() -> str | None:
    try:
        check_possible(parse_link("1gbit,1ms"))
    except UserError as error:
        return str(error)
    probe = ["unshare", "--net", "--pid", "--fork", "--mount-proc", "true"]
    return None if subprocess.run(probe, capture_output=True).returncode == 0 else "unshare is not allowed here"


needs_namespaces = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")


def lockstep(*arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "lockstep", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def network() -> tuple[set[str], set[str]]:
    """Devices of this machine and named namespaces."""
    named = Path("/run/netns")
    return set(os.listdir("/sys/class/net")), set(os.listdir(named)) if named.is_dir() else set()


def test_links_are_read_and_refused() -> None:
    assert parse_link("1gbit").bits_per_second == 1e9
    slow = parse_link("100Mbit, 5ms")
    assert (slow.bits_per_second, slow.latency) == (1e8, 0.005)
    for wrong in ("fast", "1", "1gbit,5", "1gbit,fast", "1.2.3gbit"):
        with pytest.raises(UserError, match=r"give a rate and perhaps a latency, such as 1gbit or 100mbit,5ms"):
            parse_link(wrong)
    with pytest.raises(UserError, match="from 100kbit to 100gbit"):
        parse_link("900gbit")
    with pytest.raises(UserError, match="--nproc must be even, and it is 3"):
        run_over_link("1gbit", [], 3)


def test_flags_are_taken_out_in_both_spellings() -> None:
    argv = ["--link", "1gbit", "--nproc=4", "--steps", "3", "--nproc", "2", "--link=x"]
    assert without_flag(argv, "--link", "--nproc") == ["--steps", "3"]


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda command: None if command == "tc" else f"/sbin/{command}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UserError, match=r"needs root, iproute2 and util-linux; missing here: the command tc, root"):
        check_possible(parse_link("1gbit"))


@pytest.mark.slow
@needs_namespaces
def test_the_shaped_rate_shows_between_nodes_and_not_inside(tmp_path: Path) -> None:
    """Every pair within a tenth of the rate. A machine that is busy with something else can make a pair slower for a
    moment, and none faster: what counts is the best of up to three runs.
    """
    before = network()
    rate, across, inside = 200e6 / 8, ((0, 2), (0, 3), (1, 2), (1, 3)), ((0, 1), (2, 3))
    best, of_all = dict.fromkeys((*across, *inside), 0.0), 0.0
    for _ in range(3):
        found = shaped_run(tmp_path / "comm.json")
        pairs = found["pairs"]["bandwidth_bytes_per_s"]
        (row,) = found["rows"]
        assert row["wrong"] == 0
        assert row["busbw_gbps"] * 1e9 < 1.1 * rate
        assert all(pairs[a][b] < 1.1 * rate for a, b in across)
        best = {(a, b): max(known, pairs[a][b]) for (a, b), known in best.items()}
        of_all = max(of_all, row["busbw_gbps"] * 1e9)
        slowest = min(best[pair] for pair in across)
        if slowest > 0.9 * rate and min(best[pair] for pair in inside) > 3 * rate and of_all > 0.85 * rate:
            break
    else:
        raise AssertionError(f"of {rate:,.0f} bytes/s: {best}, all-reduce {of_all:,.0f}")
    assert network() == before


def shaped_run(file: Path) -> Any:
    flags = ["-b", "4M", "-e", "4M", "-n", "3", "-w", "1", "--json", str(file)]
    process = lockstep("bench", "comm", "--link", "200mbit", "--collectives", "all_reduce", "pairs", *flags)
    out, err = process.communicate(timeout=LONG)
    assert process.returncode == 0, err
    assert "4 ranks" in out
    return json.loads(file.read_text())["result"]


@pytest.mark.slow
@needs_namespaces
def test_latency_shows_and_training_is_equal_over_it() -> None:
    flags = ("--strategies", "bucketed", "--steps", "1")
    process = lockstep("verify", "--link", "1gbit,0.5ms", "--nproc", "2", *flags)
    out, err = process.communicate(timeout=LONG)
    assert process.returncode == 0, err
    assert "1 of 1 passed" in out
    process = lockstep("bench", "comm", "--link", "1gbit,20ms", "--nproc", "2", "--collectives", "pairs", "-n", "5")
    out, err = process.communicate(timeout=LONG)
    assert process.returncode == 0, err
    number, unit = re.findall(r"^ 0\s+-\s+([\d.]+) (us|ms|s)\b", out, re.MULTILINE)[0]
    assert 20e-3 < float(number) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[unit] < 60e-3


@pytest.mark.slow
@needs_namespaces
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_however_it_ends(how: signal.Signals) -> None:
    before = network()
    process = lockstep("bench", "comm", "--link", "10mbit", "-b", "16M", "-e", "16M")
    deadline = time.monotonic() + LONG
    family: list[psutil.Process] = []
    while len(family) < 8 and time.monotonic() < deadline:  # two nodes of unshare, torchrun and two ranks
        assert process.poll() is None, process.communicate()
        time.sleep(0.2)
        family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 8
    process.send_signal(how)
    process.communicate(timeout=LONG)
    assert process.returncode == (-9 if how == signal.SIGKILL else 130)
    _, alive = psutil.wait_procs(family, timeout=LONG)
    assert not alive, [p.cmdline() for p in alive]
    assert network() == before


@pytest.mark.slow
@needs_namespaces
def test_a_mistake_inside_the_nodes_is_one_line() -> None:
    process = lockstep("bench", "train", "--link", "1gbit", "--data.name", "mnist", "--data.no-download")
    _, err = process.communicate(timeout=LONG)
    assert process.returncode == 2
    assert err.startswith("error: ")
    assert "Traceback" not in err


def trained_on_two_nodes(run: Path, *flags: str) -> tuple[list[link.Node], Any]:
    """`lockstep train` on one rank of each of two nodes, taking steps."""
    train = ["train", "configs/digits_cnn.yaml", "--run-dir", str(run), "--train.steps", "100000", *flags]
    nodes = [link.Node(n, link.torchrun_of(n, 1, str(run.parent), train), link.environment_of(2)) for n in range(2)]
    relay = link.connect(nodes, link.parse_link("1gbit"))
    for node in nodes:
        node.go()
    deadline = time.monotonic() + LONG
    while step_in_progress(run) < 5:
        assert time.monotonic() < deadline, "no step was taken"
        time.sleep(0.05)
    return nodes, relay


@pytest.mark.slow
@needs_namespaces
def test_a_cut_link_is_an_error_on_both_sides(tmp_path: Path) -> None:
    """The first node can ask nobody but itself; neither waits for ever, and nothing is left."""
    nodes, _ = trained_on_two_nodes(tmp_path / "run", "--timeout", "4")
    try:
        status = read_status(tmp_path / "run")
        assert status is not None
        nodes[1].inside("ip", "link", "set", "eth0", "down")
        cut = time.monotonic()
        said = ["", ""]
        while time.monotonic() - cut < 60 and not all("the ranks hung" in text for text in said):
            for number, node in enumerate(nodes):
                node.said.seek(0)
                said[number] = node.said.read().decode(errors="replace")
            time.sleep(0.2)
        assert "the ranks hung: rank 1 did not answer" in said[0]
        assert "the other ranks cannot be asked" in said[1]
    finally:
        for node in nodes:
            node.end()

"""`lockstep doctor`: what it says of a machine, of its environment, and of ranks that really talk."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.cli import main
from lockstep.doctor import machine as machine_checks
from lockstep.doctor.finding import Finding
from lockstep.doctor.machine import machine
from lockstep.doctor.nodes import Report, by_ssh, differences
from lockstep.doctor.trial import master
from lockstep.doctor.variables import harm, variables
from tests.ranks import LONG


def test_doctor_looks_at_everything_and_tries_two_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    said = capfd.readouterr().out
    for words in ("Python", "torch", "cores", "memory", "open files", "interfaces", "host name", "folder", "leftovers"):
        assert words in said
    assert said.count("all-reduce of 4 MiB is right") == 2
    assert " ".join(said.split()).count("uneven all-to-all, as experts need, is right") == 2
    assert "0 wrong" in said


def test_what_is_wrong_is_status_1_with_the_line_to_mend(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostbyname", lambda _: (_ for _ in ()).throw(OSError("no such name")))
    assert main(["doctor", "--no-trial"]) == 1
    said = " ".join(capfd.readouterr().out.split())
    assert "does not resolve" in said
    assert "/etc/hosts" in said


def test_a_small_dev_shm_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from shutil import disk_usage

    real = disk_usage("/")
    monkeypatch.setattr(machine_checks.shutil, "disk_usage", lambda _: real._replace(free=64 * 2**20))
    found = {one.topic: one for one in machine()}
    assert found["/dev/shm"].verdict == "note"
    assert "--shm-size" in found["/dev/shm"].mend


HARMFUL = {
    "CUDA_LAUNCH_BLOCKING": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_ALGO": "Ring",
    "NCCL_TIMEOUT": "10",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    "GLOO_SOCKET_IFNAME": "lo",
    "RANK": "0",
}


def test_variables_that_hurt_are_told_apart_from_those_that_do_not() -> None:
    for name, value in HARMFUL.items():
        assert harm(name, value, {name: value}), name
    for name, value in {"OMP_NUM_THREADS": "4", "NCCL_DEBUG": "INFO", "NCCL_P2P_DISABLE": "0"}.items():
        assert not harm(name, value, {name: value}), name
    assert not harm("NCCL_P2P_DISABLE", "1", {"NCCL_HOSTID": "a"})  # ranks that share a GPU
    assert [one.verdict for one in variables({"NCCL_DEBUG": "INFO", "NCCL_UNHEARD_OF": "1"})] == ["fine", "fine"]


def test_where_ranks_meet() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert "answers" in [one.what for one in master(f"127.0.0.1:{port}")][-1]
    assert "is free" in [one.what for one in master(f"127.0.0.1:{port}")][-1]
    assert next(iter(master("no.such.host.invalid:1"))).verdict == "wrong"


def test_a_wrong_master_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--master", "node1"]) == 2
    assert "--master node1: give host:port" in capfd.readouterr().err


def report(node: str, torch: str = "2.13", rate: float = 10.0, skew: float = 0.0) -> Report:
    found = [Finding("torch", torch), Finding("gloo, 2 ranks", f"all-reduce of 4 MiB is right, {rate} GB/s")]
    return Report(node, found, 0.0, skew)


def test_nodes_that_are_alike_differ_in_nothing() -> None:
    assert list(differences([report("a"), report("b", rate=9.5), report("c", skew=0.3)])) == []


def test_what_differs_between_nodes_is_named() -> None:
    found = {
        one.topic: one for one in differences([report("a"), report("b", "2.11", 10.2), report("c", rate=3, skew=7)])
    }
    assert found["torch"].verdict == "wrong"
    assert found["torch"].what == "2.13 on a, c; 2.11 on b"
    assert found["clocks"].what == "c is ahead by 7.0 s"
    assert found["gloo, 2 ranks"].what == "c: 3 GB/s, others 10"


def test_nodes_are_asked_by_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An ssh of our own: one node answers, beside the words of its login; one refuses."""
    answer = report("itself").to_json()
    (tmp_path / "ssh").write_text(
        "#!/bin/sh\n"
        "for host; do [ $host = gone ] && { echo 'connect to host gone: refused' >&2; exit 255; }; done\n"
        f"echo welcome\necho '{answer}'\n"
    )
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    there, gone = by_ssh(("there", "gone"), trial=False)
    assert (there.node, there.findings[0]) == ("there", Finding("torch", "2.13"))
    assert gone.findings[0].verdict == "wrong"
    assert gone.findings[0].what == "connect to host gone: refused"
    assert gone.findings[0].mend.startswith("try it by hand: ssh -o BatchMode=yes")


@pytest.mark.slow
def test_under_torchrun_every_node_is_looked_at() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "lockstep", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG)
    assert re.search(r"between 1 node\b", done.stdout), done.stdout + done.stderr
    assert "nothing differs that matters" in done.stdout

"""`lockstep doctor`: what it says of a machine, of its environment, and of ranks that really talk."""

import socket

import pytest

from lockstep.cli import main
from lockstep.doctor import machine as machine_checks
from lockstep.doctor.machine import machine
from lockstep.doctor.trial import master
from lockstep.doctor.variables import harm, variables


def test_doctor_looks_at_everything_and_tries_two_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    said = capfd.readouterr().out
    for words in ("Python", "torch", "cores", "memory", "open files", "interfaces", "host name", "folder", "leftovers"):
        assert words in said
    assert said.count("all-reduce of 4 MiB is right") == 2
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

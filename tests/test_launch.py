"""Ranks start, fail and end as they should: a clear error in bounded time, and nobody is left behind."""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from lockstep.errors import RankError, UserError
from lockstep.launch import Launch, leftovers, run_on_ranks
from lockstep.launch.adopt import _first_host, _tasks_on_this_node
from lockstep.launch.join import choose_device, share_gpu_environment
from lockstep.launch.processes import signature
from lockstep.launch.start import check_nproc
from lockstep.layout.world import World
from tests.ranks import LONG, free_port

SCRIPT = textwrap.dedent(
    """
    import sys, torch, torch.distributed as dist
    from lockstep.errors import UserError
    from lockstep.launch import Launch, run_on_ranks

    def total(world):
        t = torch.tensor([float(world.rank)])
        if world.size > 1:
            dist.all_reduce(t)
        print(f"rank {world.rank} of {world.size}, local {world.local_rank}: {t.item():.0f}", flush=True)

    if __name__ == "__main__":
        try:
            run_on_ranks(total, launch=Launch(device="cpu", timeout=float(sys.argv[1]) if len(sys.argv) > 1 else 60))
        except UserError as error:
            sys.exit(f"error: {error}")
    """
)


def add_ranks(world: World, offset: int) -> tuple[int, float]:
    total = torch.tensor([float(world.rank + offset)])
    dist.all_reduce(total)
    return world.rank, total.item()


def fail_on_rank_1(world: World, how: str) -> None:
    if world.rank == 1:
        if how == "exception":
            raise ArithmeticError("rank one is broken")
        if how == "user error":
            raise UserError("batch is 3; give it 4")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def threads_and_device(world: World) -> tuple[int, str, str]:
    return torch.get_num_threads(), world.device.type, world.backend


def on_ranks(function: Callable[..., Any], nproc: int, *args: Any) -> list[Any]:
    """Started afresh, as commands do."""
    return run_on_ranks(function, *args, launch=Launch(nproc=nproc, device="cpu", timeout=LONG))


def children(process: int | None = None) -> list[psutil.Process]:
    """The ranks below it, or below us, and the server that a command's ranks are forks of. Ours stays."""
    found = []
    ours = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    for child in psutil.Process(process).children(recursive=True):
        if child.pid == ours:
            continue
        with suppress(psutil.NoSuchProcess):  # it may have ended by now
            command = " ".join(child.cmdline())
            found += [child] * ("spawn_main" in command or "forkserver" in command)
    return found


def test_results_come_back_in_rank_order() -> None:
    assert on_ranks(add_ranks, 3, 10) == [(0, 33.0), (1, 33.0), (2, 33.0)]


def test_ranks_share_the_cores_and_the_memory_of_one_machine() -> None:
    cores = psutil.cpu_count() or 1
    assert on_ranks(threads_and_device, 2) == [(max(1, cores // 2), "cpu", "shm")] * 2


def test_one_rank_needs_no_process_group() -> None:
    assert run_on_ranks(threads_and_device, launch=Launch(device="cpu"))[0][1:] == ("cpu", "none")


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("exception", RankError, r"rank 1 failed first.*rank one is broken(.|\n)*fail_on_rank_1"),
        ("user error", UserError, "^batch is 3; give it 4$"),
        ("kill", RankError, r"rank 1 failed first \(exit code -9\): it was ended by SIGKILL"),
    ],
)
def test_the_first_failing_rank_is_what_one_sees(how: str, kind: type[Exception], message: str) -> None:
    start = time.monotonic()
    with pytest.raises(kind, match=message):
        on_ranks(fail_on_rank_1, 3, how)
    assert time.monotonic() - start < LONG / 2
    assert children() == []


@pytest.mark.parametrize("nproc", [0, -1])
def test_a_senseless_number_of_ranks_is_refused(nproc: int) -> None:
    with pytest.raises(UserError, match=f"--nproc is {nproc}, but it must be 1 or more"):
        on_ranks(add_ranks, nproc, 0)


def test_a_backend_that_is_not_there_is_refused() -> None:
    with pytest.raises(UserError, match=r"--backend carrier-pigeon is not available here; this torch has .*gloo"):
        run_on_ranks(add_ranks, 0, launch=Launch(nproc=2, device="cpu", backend="carrier-pigeon"))


def test_more_ranks_than_gpus_need_to_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match=r"4 ranks were asked for on a machine with 1 GPU; add --share-gpu"):
        choose_device("auto", 0, 4, share_gpu=False)
    assert choose_device("auto", 3, 4, share_gpu=True) == torch.device("cuda", 0)
    assert choose_device("cpu", 3, 4, share_gpu=False) == torch.device("cpu")
    hosts = {share_gpu_environment(rank)["NCCL_HOSTID"] for rank in range(4)}
    assert len(hosts) == 4


# ---- other people's launchers ----------------------------------------------------------------------------


def clean_environment(**extra: str) -> dict[str, str]:
    return {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **extra}


def start(command: list[str], **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        env=clean_environment(**environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.fixture
def script(tmp_path: Path) -> str:
    file = tmp_path / "total.py"
    file.write_text(SCRIPT)
    return str(file)


@pytest.mark.slow
def test_torchruns_ranks_are_adopted_on_two_nodes(script: str) -> None:
    port = free_port()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=2"]
    torchrun += ["--master_addr=127.0.0.1", f"--master_port={port}"]
    nodes = [start([*torchrun, f"--node_rank={n}", script]) for n in range(2)]
    output = "".join(node.communicate(timeout=LONG)[0] for node in nodes)
    assert all(node.returncode == 0 for node in nodes), output
    for rank in range(4):
        assert f"rank {rank} of 4, local {rank % 2}: 6" in output


def test_sruns_ranks_are_adopted(script: str) -> None:
    slurm = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": str(free_port()), "SLURM_STEP_NODELIST": "localhost"}
    slurm["MASTER_PORT"] = str(free_port())
    tasks = [start([sys.executable, script], **slurm, SLURM_PROCID=str(r), SLURM_LOCALID=str(r)) for r in range(2)]
    output = "".join(task.communicate(timeout=LONG)[0] for task in tasks)
    assert "rank 0 of 2, local 0: 1" in output
    assert "rank 1 of 2, local 1: 1" in output


def test_the_first_host_of_a_slurm_node_list() -> None:
    assert [_first_host(n) for n in ("n1", "n1,n2", "gpu[03-05,9],x", "a[7],b")] == ["n1", "n1", "gpu03", "a7"]


def test_uneven_tasks_per_slurm_node() -> None:
    slurm = {"SLURM_STEP_NUM_TASKS": "11", "SLURM_STEP_TASKS_PER_NODE": "4(x2),3"}
    assert [_tasks_on_this_node({**slurm, "SLURM_NODEID": str(n)}) for n in range(3)] == [4, 4, 3]


def rank_environment(rank: int, size: int, port: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


@pytest.mark.slow
def test_a_missing_rank_is_an_error_in_bounded_time(script: str) -> None:
    process = start([sys.executable, script, "3"], **rank_environment(0, 2, free_port()))
    output, _ = process.communicate(timeout=LONG)
    assert process.returncode == 1
    assert "not all of WORLD_SIZE=2 ranks joined" in output
    assert "Traceback" not in output


def test_a_taken_port_is_named(script: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        output, _ = start([sys.executable, script, "3"], **rank_environment(0, 2, port)).communicate(timeout=LONG)
    assert f"port {port} is taken" in output
    assert "Traceback" not in output


def test_a_wrong_world_size_is_named(script: str) -> None:
    output, _ = start([sys.executable, script], **rank_environment(2, 2, free_port())).communicate(timeout=LONG)
    assert "RANK is 2 and WORLD_SIZE is 2, but ranks go from 0 to WORLD_SIZE - 1" in output


def test_nproc_beside_torchrun_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in rank_environment(0, 2, 1).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="--nproc 4 was given, but torchrun or srun started 2 ranks"):
        run_on_ranks(add_ranks, 0, launch=Launch(nproc=4))


# ---- endings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "to_all"),
    [
        (signal.SIGINT, True),  # as a terminal does: everybody gets it
        pytest.param(signal.SIGINT, False, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, False, marks=pytest.mark.slow),
    ],
)  # SIGTERM saves: see test_checkpoint.py
def test_ending_the_command_ends_all_ranks(tmp_path: Path, how: signal.Signals, to_all: bool) -> None:
    command = [sys.executable, "-m", "lockstep", "train", "--nproc", "2", "--device", "cpu"]
    command += ["--train.epochs", "100000", "--run-dir", str(tmp_path / "run")]
    process = start(command)
    deadline = time.monotonic() + LONG
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 2
    if to_all:
        os.killpg(process.pid, how)
    else:
        process.send_signal(how)
    output, _ = process.communicate(timeout=LONG)
    _, alive = psutil.wait_procs(family, timeout=LONG)
    assert alive == []
    if how == signal.SIGINT:
        assert process.returncode == 130
        assert "stopped by Ctrl-C and saved\ngo on: lockstep train" in output
        assert any((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert "Traceback" not in output


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    """While ranks are busy with a step of many seconds, the first one waits for its end; the second does not."""
    command = [sys.executable, "-m", "lockstep", "train", "--nproc", "2", "--device", "cpu", "--model.name", "mlp"]
    command += ["--data.name", "synthetic", "--data.kind", "regression", "--data.shape", "2048", "--data.classes", "8"]
    command += ["--model.width", "2048", "--train.batch-size", "40000", "--data.samples", "40000"]
    process = start([*command, "--train.lr", "1e-6", "--run-dir", str(tmp_path / "run")])
    deadline = time.monotonic() + LONG
    while not (tmp_path / "run" / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1)
    family = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    _, alive = psutil.wait_procs(family, timeout=LONG)
    assert (process.returncode, alive) == (130, [])
    assert "interrupted: Ctrl-C: all ranks were ended" in output


def test_ctrl_c_while_ranks_import(tmp_path: Path) -> None:
    """Python's own answer would be a traceback from the midst of the imports, of every rank."""
    process = start([sys.executable, "-m", "lockstep", "demo", "--device", "cpu", "--run-dir", str(tmp_path)])
    deadline = time.monotonic() + LONG
    ranks: list[psutil.Process] = []
    while not ranks and time.monotonic() < deadline:
        time.sleep(0.05)
        ranks = children(process.pid)
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=LONG)
    assert process.returncode == 130
    assert re.fullmatch("interrupted(: Ctrl-C: all ranks were ended)?\n", output)  # it may be that none had started
    _, alive = psutil.wait_procs(ranks, timeout=LONG)
    assert alive == []


# ---- degrees -----------------------------------------------------------------------------------------------


def leaves(world: World, how: str) -> None:
    if world.rank == 1:
        sys.exit(0) if how == "sys.exit" else None
    dist.barrier()


def test_a_rank_that_leaves_is_noticed_at_once() -> None:
    """sys.exit(0) is not the end of a rank's work; the others would wait for it until the time-out."""
    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 left with sys.exit\(0\) before its work was done"):
        on_ranks(leaves, 2, "sys.exit")
    assert time.monotonic() - start < LONG / 2


KILLED = textwrap.dedent(
    """
    import os, signal, sys, time, torch, torch.distributed as dist
    from lockstep.launch import Launch, run_on_ranks

    def one_dies(world):
        dist.all_reduce(torch.ones(1))
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1_000_000))

    if __name__ == "__main__":
        run_on_ranks(one_dies, launch=Launch(nproc=4, device="cpu", backend=sys.argv[1], timeout=60))
    """
)


@pytest.mark.parametrize("backend", ["shm", pytest.param("gloo", marks=pytest.mark.slow)])
def test_the_cause_comes_first(tmp_path: Path, backend: str) -> None:
    """Of four ranks one is killed: its end is the first line, and the survivors' tracebacks are not there at all."""
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    ended = subprocess.run([sys.executable, str(script), backend], capture_output=True, text=True, timeout=LONG)
    assert ended.returncode == 1
    last = ended.stderr.strip().splitlines()[-1]
    assert last == "lockstep.errors.RankError: rank 1 failed first (exit code -9): it was ended by SIGKILL"
    assert "PeerError" not in ended.stderr
    assert ended.stderr.count("Traceback") <= 1  # the launcher's own


def test_more_ranks_than_make_sense_must_be_asked_for() -> None:
    with pytest.raises(UserError, match=r"--nproc 1000 would start 1000 processes on .* --oversubscribe"):
        run_on_ranks(add_ranks, 0, launch=Launch(nproc=1000, device="cpu"))
    check_nproc(Launch(device="cpu", oversubscribe=True), 1000)


def test_what_a_killed_launcher_left_is_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder, and the semaphores that its ranks have noted; not what belongs to another process namespace."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gone = subprocess.run(
        [sys.executable, "-c", "from lockstep.launch.processes import signature; print(signature())"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    semaphore = Path("/dev/shm/sem.mp-lockstep0test")
    semaphore.touch()
    for name, of in (("gone", gone), ("alive", signature()), ("elsewhere", f"1{gone}")):
        folder = tmp_path / f"{leftovers.FOLDER_PREFIX}{of}-{name}"
        folder.mkdir()
        (folder / f"{leftovers.SEMAPHORES}1").write_text(semaphore.name if name == "gone" else "sem.mp-other")
    leftovers.remove_leftovers()
    assert not semaphore.exists()
    assert sorted(f.name.rpartition("-")[2] for f in tmp_path.iterdir()) == ["alive", "elsewhere"]


@pytest.mark.alone
@pytest.mark.slow
def test_kill_9_of_everything_leaves_no_semaphore_for_long(tmp_path: Path) -> None:
    """Killed with its process group, Python cannot remove the names of its semaphores; the next start does."""
    script = tmp_path / "sleeps.py"
    script.write_text(KILLED.replace("os.kill(os.getpid(), signal.SIGKILL)", "print('up', flush=True); time.sleep(60)"))
    before = set(Path("/dev/shm").glob("sem.mp-*"))
    process = subprocess.Popen([sys.executable, str(script), "shm"], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    time.sleep(0.3)
    leftovers.remove_leftovers()
    assert set(Path("/dev/shm").glob("sem.mp-*")) <= before

"""Five runs that go wrong, each in its own way."""

import os
import signal
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from lockstep.checkpoint.checkpoints import Checkpoints
from lockstep.config import MLP, Config, Data, Parallel, Train
from lockstep.errors import RankError, UserError
from lockstep.launch import Launch, run_on_ranks
from lockstep.layout.world import World
from lockstep.training.prepare import load_data, prepare_strategy

TRUTH: dict[str, tuple[str, int | str]] = {
    "a": ("uneven inputs", 1),
    "b": ("a dead rank", 2),
    "c": ("a wrong collective", 1),
    "d": ("a forgotten scale", 4),
    "e": ("a corrupt checkpoint", "__1_0.distcp"),
}
TIMEOUT = 5.0
MICRO_BATCHES = 4


# Their names stand in the reports, and must not give the answer away.


def train_a(world: World) -> None:
    """Rank 1 has a batch less."""
    for _ in range(6 - (world.rank == 1)):
        dist.all_reduce(torch.ones(32))
    next_epoch()


def next_epoch() -> None:
    time.sleep(60)


def train_b(world: World) -> None:
    for step in range(6):
        if step == 3 and world.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(32))


def train_c(world: World) -> None:
    for step in range(6):
        if step == 4 and world.rank == 1:
            dist.all_gather([torch.empty(32) for _ in range(world.size)], torch.ones(32))
        else:
            dist.all_reduce(torch.ones(32))


def train_d(world: World) -> list[tuple[float, float]]:
    """Norms of the gradient, of one process and of the ranks, whose micro-batches' losses are not divided."""
    found = []
    torch.manual_seed(0)
    model, whole = nn.Linear(8, 8).double(), nn.Linear(8, 8).double()
    whole.load_state_dict(model.state_dict())
    for step in range(3):
        x = torch.randn(world.size * MICRO_BATCHES * 2, 8, generator=torch.Generator().manual_seed(step)).double()
        for one in (model, whole):
            one.zero_grad()
        (whole(x) ** 2).mean().backward()
        for part in x.chunk(world.size)[world.rank].chunk(MICRO_BATCHES):
            (model(part) ** 2).mean().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= world.size
        found.append((norm(whole), norm(model)))
    return found


def norm(model: nn.Module) -> float:
    return float(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm())


def train_e(world: World, folder: Path) -> str:
    """Two ranks save; a bit flips; the run is to be resumed."""
    config = Config(
        model=MLP(layers=2, width=8),
        data=Data(name="synthetic", samples=16),
        train=Train(batch_size=4),
        parallel=Parallel(data="zero3"),
    )
    strategy = prepare_strategy(world, config, load_data(world, config))
    checkpoints = Checkpoints(world, folder, asynchronous=False)
    for step in (1, 2):
        checkpoints.save(strategy, {"step": step}, wait=True)
    if world.is_main:
        file = folder / "step-00000002" / str(TRUTH["e"][1])
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 4
        file.write_bytes(content)
    dist.barrier()
    whole, damage = checkpoints.find()
    assert whole is not None
    return f"damaged, passed over: {damage[0]}\ngoing on from {whole}, a step earlier"


def report(letter: str) -> str:
    """What a person sees of that run."""
    launch = Launch(nproc=3, device="cpu", backend="gloo", timeout=TIMEOUT)
    try:
        if letter == "d":
            norms = run_on_ranks(train_d, launch=launch)[0]
            rows = [f"{step:>4} {alone:>20.6f} {ranks:>20.6f}" for step, (alone, ranks) in enumerate(norms)]
            return "\n".join(["norm of the gradient", "step          one process              3 ranks", *rows])
        if letter == "e":
            with tempfile.TemporaryDirectory() as folder:
                two = Launch(nproc=2, device="cpu", timeout=60.0)
                said: str = run_on_ranks(train_e, Path(folder), launch=two)[0]
                return said.replace(folder, "runs/night")
        run_on_ranks({"a": train_a, "b": train_b, "c": train_c}[letter], launch=launch)
    except (RankError, UserError) as error:
        return str(error)
    return "nothing happened"


def run(letter: str) -> None:
    if letter not in TRUTH:
        raise SystemExit(f"say which: python exercise.py {'|'.join(TRUTH)}")
    print(report(letter))

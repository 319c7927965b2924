"""`lockstep demo`: every strategy trains the same digits, side by side with one process."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from torch import Tensor

from lockstep.apart import relative
from lockstep.bar import Bar
from lockstep.bench.train import Case, first_batches, new_timing
from lockstep.comm.collectives import all_gather_objects
from lockstep.comm.hosts import hosts_meet
from lockstep.config import CNN, Config, Train
from lockstep.data import DataSet, Sampler, read_share
from lockstep.layout.world import World
from lockstep.measure.steps import memory_of_steps, timed_step
from lockstep.measure.timeline import timeline
from lockstep.measure.timing import Timing, median_step
from lockstep.strategies import STRATEGIES, strategy_names
from lockstep.training.evaluate import evaluate
from lockstep.training.prepare import load_data, prepare_named
from lockstep.verify.compare import TOLERANCE


@dataclass
class DemoRow:
    """One line of the demo's table."""

    timing: Timing
    ranks: int
    accuracy: float
    equal: bool
    """By design; compression and local SGD are not."""
    difference: float = 0.0
    """Largest difference of a weight to one process's, relative to the tensor's norm."""
    losses: list[float] = field(default_factory=list)
    """Of each step."""

    @property
    def passed(self) -> bool:
        return self.difference <= TOLERANCE["fp64"]


def demo_config(epochs: int) -> Config:
    return Config(model=CNN(), train=Train(epochs=epochs, batch_size=128, lr=0.1, precision="fp64"))


def is_shown(name: str) -> bool:
    """All but DeepSpeed, which does not know float64, and the sharded strategies' variants."""
    base, _, option = name.partition("+")
    return STRATEGIES[base].verified_in is None and not option.isupper()


class Trainee:
    """One strategy of the demo on this rank."""

    def __init__(self, world: World, config: Config, name: str, dataset: DataSet) -> None:
        self.world, self.dataset = world, dataset
        case, prepare = Case(name, name, config), partial(prepare_named, world, config, name, dataset)
        memory = memory_of_steps(world.device, prepare, partial(first_batches, case, dataset))
        self.strategy = prepare()
        self.timing = new_timing(world, case, self.strategy, dataset, memory, (0.0, ""))
        self.losses: list[float] = []
        self.timelines: list[dict[str, Any]] = []

    def step(self, indices: Tensor) -> None:
        batch = read_share(self.dataset.train, indices, self.strategy.batch_share())
        seconds, result = timed_step(self.world, self.strategy, batch)
        self.timing.record(seconds, self.strategy.ledger, self.strategy.phases)
        self.timelines.append(timeline(self.strategy))
        self.losses.append(result.loss)

    def end(self) -> tuple[DemoRow, dict[str, Tensor]]:
        """The row, and the weights after training."""
        self.strategy.finish()
        found = evaluate(self.strategy, self.dataset.test)
        assert found is not None, "a demo is never asked to stop"
        times = self.timing.step_s
        middle = median_step(all_gather_objects(times) if self.world.size > 1 else [times])
        self.timing.timelines = [self.timelines[middle]]
        row = DemoRow(self.timing, self.world.size, found[1], self.strategy.is_exact, losses=self.losses)
        return row, self.strategy.full_state_dict()


def demo(world: World, epochs: int = 10) -> list[DemoRow]:
    """Train the digits CNN with each strategy, step by step in turns, so that noise does not hit one of them.

    `single` trains on rank 0 alone, while the others wait.
    """
    config = demo_config(epochs)
    dataset = load_data(world, config)
    names = [name for name in strategy_names(["all"]) if is_shown(name)]
    sampler = Sampler(len(dataset.train), config.train.batch_size, config.train.seed)
    with _progress(quiet=not world.is_main) as progress:
        task = progress.add_task(f"getting {len(names)} strategies ready", total=len(names))
        trainees = []
        for name in names:
            if name != "single":
                trainees.append(Trainee(world, config, name, dataset))
            elif world.is_main:
                trainees.append(Trainee(World(device=world.device), config, name, dataset))
            hosts_meet(world.device)
            progress.advance(task)
        progress.remove_task(task)
        total = epochs * sampler.steps_per_epoch
        task = progress.add_task(f"{len(names)} strategies in turns", total=total)
        for epoch in range(epochs):
            for indices in sampler.epoch(epoch):
                for trainee in trainees:
                    trainee.step(indices)
                progress.advance(task)
    rows: list[DemoRow] = []
    reference: dict[str, Tensor] = {}
    for number, name in enumerate(names):
        mine = trainees[number - len(names)] if name != "single" or world.is_main else None
        row, weights = mine.end() if mine is not None else (None, {})
        if name == "single":
            reference = all_gather_objects(weights)[0]
        if row is not None:
            row.difference = max(relative(weights[n].cpu(), t.cpu()) for n, t in reference.items())
            rows.append(row)
    return [_worst(everyone) for everyone in zip(*_rows_of_all_ranks(world, rows), strict=True)]


def _rows_of_all_ranks(world: World, mine: list[DemoRow]) -> list[list[DemoRow]]:
    """Ranks other than 0 have no row for `single`; they take rank 0's."""
    everyone: list[list[DemoRow]] = all_gather_objects(mine)
    return [rows if len(rows) == len(everyone[0]) else [everyone[0][0], *rows] for rows in everyone]


def _worst(rows: tuple[DemoRow, ...]) -> DemoRow:
    """Rank 0's row, with the largest difference and the largest memory of any rank."""
    rows[0].difference = max(r.difference for r in rows)
    if rows[0].ranks > 1:
        rows[0].timing.timelines = [line for r in rows for line in r.timing.timelines]
    rows[0].timing.memory = max((r.timing.memory for r in rows), key=lambda memory: memory.peak_mib)
    return rows[0]


def _progress(quiet: bool) -> Bar:
    return Bar(
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        disable=quiet,
    )

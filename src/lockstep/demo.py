"""`lockstep demo`: every strategy trains the same digits, side by side with one process."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from torch import Tensor

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
from lockstep.verify.compare import TOLERANCE, relative


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


def demo(world: World, epochs: int = 10) -> list[DemoRow]:
    """Train the digits CNN with each strategy in turn; `single` first and on rank 0 alone, while the others wait."""
    config = demo_config(epochs)
    dataset = load_data(world, config)
    names = [name for name in strategy_names(["all"]) if is_shown(name)]
    rows: list[DemoRow] = []
    reference: dict[str, Tensor] = {}
    steps = epochs * Sampler(len(dataset.train), config.train.batch_size).steps_per_epoch
    with _progress(quiet=not world.is_main) as progress:
        for name in names:
            task = progress.add_task(name, total=steps, status="")
            if name == "single":
                alone = World(device=world.device)
                row, weights = _train(alone, config, name, dataset, progress, task) if world.is_main else (None, {})
                hosts_meet(world.device)
                reference = all_gather_objects(weights)[0]
            else:
                row, weights = _train(world, config, name, dataset, progress, task)
            if row is not None:
                row.difference = max(relative(weights[n].cpu(), t.cpu()) for n, t in reference.items())
                rows.append(row)
    return [_worst(everyone) for everyone in zip(*_rows_of_all_ranks(world, rows), strict=True)]


def _train(
    world: World, config: Config, name: str, dataset: DataSet, progress: Progress, task: TaskID
) -> tuple[DemoRow, dict[str, Tensor]]:
    sampler = Sampler(len(dataset.train), config.train.batch_size, config.train.seed)
    case, prepare = Case(name, name, config), partial(prepare_named, world, config, name, dataset)
    memory = memory_of_steps(world.device, prepare, partial(first_batches, case, dataset))
    strategy = prepare()
    timing = new_timing(world, case, strategy, dataset, memory, (0.0, ""))
    losses: list[float] = []
    timelines: list[dict[str, Any]] = []
    for epoch in range(config.train.epochs):
        for indices in sampler.epoch(epoch):
            batch = read_share(dataset.train, indices, strategy.batch_share())
            seconds, result = timed_step(world, strategy, batch)
            timing.record(seconds, strategy.ledger)
            timelines.append(timeline(strategy))
            losses.append(result.loss)
            progress.advance(task)
    strategy.finish()
    found = evaluate(strategy, dataset.test)
    assert found is not None, "nobody asks a demo to stop"
    _, accuracy = found
    progress.update(task, status=f"test accuracy {accuracy:.1%}")
    middle = median_step(all_gather_objects(timing.step_s) if world.size > 1 else [timing.step_s])
    timing.timelines = [timelines[middle]]
    row = DemoRow(timing, world.size, accuracy, strategy.is_exact, losses=losses)
    return row, strategy.full_state_dict()


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


def _progress(quiet: bool) -> Progress:
    return Progress(
        TextColumn("{task.description:<18}"),
        BarColumn(bar_width=30),
        TimeElapsedColumn(),
        TextColumn("{task.fields[status]}"),
        disable=quiet,
    )

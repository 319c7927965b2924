"""Whole trainings of several strategies, one after the other: how long, and how much traffic, until a loss is reached.

What a strategy saves in a step says little where its steps are other steps: ranks that train apart, gradients in few
bits. So each trains with each seed, and the loss to be reached is the first one's, after its last step.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import mean

import torch

from lockstep.bench.train import Case
from lockstep.comm.ledger import Ledger, recording
from lockstep.data import Reader
from lockstep.errors import UserError
from lockstep.layout.world import World
from lockstep.training.evaluate import evaluate
from lockstep.training.optimizer import learning_rate
from lockstep.training.prepare import load_data, prepare_named

TESTED = 16
"""Batches of an evaluation."""


@dataclass(frozen=True)
class Point:
    """Of a training, after some steps."""

    step: int
    seconds: float
    """In steps alone."""
    megabytes: float
    """That a rank has sent."""
    loss: float
    """On data that it has not seen."""


@dataclass
class Training:
    """Of one strategy, with one seed."""

    label: str
    seed: int
    points: list[Point] = field(default_factory=list)

    def reaches(self, loss: float) -> tuple[float, float] | None:
        """(seconds, megabytes), on the line between two evaluations; None: it does not."""
        before = self.points[0]
        if before.loss <= loss:
            return before.seconds, before.megabytes
        for before, after in pairwise(self.points):
            if after.loss <= loss:
                share = (before.loss - loss) / (before.loss - after.loss)
                seconds = before.seconds + share * (after.seconds - before.seconds)
                return seconds, before.megabytes + share * (after.megabytes - before.megabytes)
        return None


@dataclass
class Row:
    """One strategy over all seeds."""

    label: str
    step_ms: float
    megabytes: float
    """A step."""
    loss: float
    """After the last step, the mean."""
    seconds: list[float | None]
    """To the first strategy's loss, by seed."""
    megabytes_to_loss: list[float | None]
    over_first: list[float | None]
    """Seconds to that loss, over those of the first strategy with the same seed."""


def train_cases(
    world: World, cases: list[Case], seeds: int, every: int, progress: Callable[[], None] = lambda: None
) -> list[Training]:
    return [train_case(world, case, seed, every, progress) for seed in range(seeds) for case in cases]


def train_case(world: World, case: Case, seed: int, every: int, progress: Callable[[], None]) -> Training:
    config = replace(case.config, train=replace(case.config.train, seed=seed))
    train, steps = config.train, config.train.steps
    if steps is None or steps < 1:
        raise UserError(f"train.steps is {steps}, but a training to a loss takes some; give --train.steps")
    dataset = load_data(world, config)
    strategy = prepare_named(world, config, case.strategy, dataset)
    reader = Reader(dataset.train, train.batch_size, seed, strategy.batch_share())
    made, step, epoch, seconds, sent = Training(case.label, seed), 0, 0, 0.0, 0.0
    while step < steps:
        for _, batch in reader.epoch(epoch):
            strategy.set_learning_rate(learning_rate(train, step, steps))
            at_the_end = Ledger(world.device)
            wait_for(world)
            start = time.perf_counter()
            strategy.step(batch.to(world.device))
            strategy.settle()
            step += 1
            if step == steps:
                with recording(at_the_end):
                    strategy.finish()
            wait_for(world)
            seconds += time.perf_counter() - start
            sent += strategy.ledger.traffic().wire_bytes + at_the_end.traffic().wire_bytes
            progress()
            if step % every == 0 or step == steps:
                tested = evaluate(strategy, dataset.test, train.batch_size, TESTED)
                if tested is None:
                    raise KeyboardInterrupt("a signal asked to stop")
                made.points.append(Point(step, seconds, sent / 1e6, tested[0]))
            if step == steps:
                break
        epoch += 1
    return made


def wait_for(world: World) -> None:
    """The device, and not the other ranks: they may be apart."""
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)


def rows_of(trainings: list[Training]) -> list[Row]:
    """The first strategy's last loss, with the same seed, is what the others are to reach."""
    labels = list(dict.fromkeys(t.label for t in trainings))
    first = {t.seed: t.points[-1] for t in trainings if t.label == labels[0]}
    rows = []
    for label in labels:
        mine = [t for t in trainings if t.label == label]
        reached = [t.reaches(first[t.seed].loss) for t in mine]
        ends = [t.points[-1] for t in mine]
        over = [None if r is None else r[0] / first[t.seed].seconds for r, t in zip(reached, mine, strict=True)]
        rows.append(
            Row(
                label,
                1e3 * mean(end.seconds / end.step for end in ends),
                mean(end.megabytes / end.step for end in ends),
                mean(end.loss for end in ends),
                [None if r is None else r[0] for r in reached],
                [None if r is None else r[1] for r in reached],
                over,
            )
        )
    return rows

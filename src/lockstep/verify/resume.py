"""A run that is saved in the middle of an epoch and gone on with must be the run that was never stopped, bit by bit.

A small GPT with dropout, a schedule with warm-up, clipping and AdamW trains for more than an epoch. A second run goes
on from its checkpoint. Every number that a step reports (loss, accuracy, rate, norm) and the final evaluation must be
the same to the last bit: position in the data, schedule, random numbers, every region of the optimizer's state.
"""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from lockstep.comm.collectives import all_gather_objects
from lockstep.config import GPT, Checkpoint, Config, Data, Metrics, Parallel, Train
from lockstep.data import Reader, Samples
from lockstep.layout import World
from lockstep.strategies import ParallelModel
from lockstep.training.loop import train

STEPS, SAVED_AT, BATCH, SAMPLES = 7, 4, 5, 30
MODEL = GPT(d_model=16, layers=2, heads=4, context=8, vocabulary=19, dropout=0.2)
SAME = ("loss", "accuracy", "lr", "grad_norm", "test_loss", "test_accuracy")


def check_resume(world: World, parallel: Parallel, precision: str) -> list[str]:
    """What differs after a resume. Every rank must ask together; the ranks share a disk."""
    made = tempfile.mkdtemp(prefix="lockstep-verify-") if world.is_main else ""
    home = Path(next(name for name in all_gather_objects(made) if name))
    try:
        first, second = home / "through", home / "resumed"
        train(world, _config(parallel, precision), first, quiet=True)
        train(world, _config(parallel, precision), second, quiet=True, resume=_checkpoint(first))
        broken = _compare(first, second) if world.is_main else []
        all_gather_objects(0)  # all have read what they need
    finally:
        if world.is_main:
            shutil.rmtree(home, ignore_errors=True)
    return broken


def _config(parallel: Parallel, precision: str) -> Config:
    return Config(
        model=MODEL,
        data=Data(name="synthetic", samples=SAMPLES),
        train=Train(
            steps=STEPS,
            batch_size=BATCH,
            optimizer="adamw",
            lr=1e-2,
            weight_decay=0.1,
            schedule="cosine",
            warmup_steps=3,
            clip_norm=0.5,
            precision=precision,  # type: ignore[arg-type]
            log_every=1,
            evaluate_every=1,
        ),
        parallel=parallel,
        checkpoint=Checkpoint(every=SAVED_AT, keep_last=0),
        metrics=Metrics(tensorboard=False),
    )


def _checkpoint(run: Path) -> Path:
    return run / "checkpoints" / f"step-{SAVED_AT:08d}"


def _records(run: Path) -> dict[tuple[str, int], dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {(line["kind"], line["step"]): {k: line[k] for k in SAME if k in line} for line in lines if "step" in line}


def _compare(through: Path, resumed: Path) -> list[str]:
    wanted, got = _records(through), _records(resumed)
    steps = [key for key in wanted if key[1] > SAVED_AT]
    for key in sorted(steps, key=lambda key: key[1]):
        if key not in got:
            return [f"resume: step {key[1]} has no record of {key[0]}"]
        for name, value in wanted[key].items():
            if got[key].get(name) != value:
                return [f"resume: {name} of step {key[1]} is {got[key].get(name)!r}, and was {value!r} without a stop"]
    return [] if steps else ["resume: nothing was trained after the checkpoint"]


def check_samples(strategy: ParallelModel) -> list[str]:
    """Over an epoch all ranks together read each sample once, in another order in each epoch, from any position."""
    numbers = torch.arange(23)
    split, share = Samples(numbers[:, None].float(), numbers), strategy.batch_share()
    reader = Reader(split, 5, 3, share)
    read = [_read(strategy, reader, epoch) for epoch in (0, 1)]
    broken = []
    for epoch, batches in enumerate(read):
        if sorted(n for batch in batches for n in batch) != numbers.tolist():
            broken.append(f"samples: epoch {epoch} does not have each sample once")
    if read[0] == read[1]:
        broken.append("samples: two epochs have the same order")
    if _read(strategy, reader, 0, start=2) != read[0][2:]:
        broken.append("samples: from the third step on an epoch goes on with other samples")
    return broken


def _read(strategy: ParallelModel, reader: Reader, epoch: int, start: int = 0) -> list[list[int]]:
    mine = [[] if batch.filler else batch.targets.tolist() for _, batch in reader.epoch(epoch, start)]
    everyone: list[list[list[int]]] = all_gather_objects(mine, strategy.layout.batch)
    return [[n for rank in batches for n in rank] for batches in zip(*everyone, strict=True)]

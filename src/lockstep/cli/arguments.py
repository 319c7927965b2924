"""What the commands share in reading their arguments."""

import os
import sys
from dataclasses import dataclass, field, fields
from typing import Annotated

import psutil
import torch
import tyro
from torch import nn

from lockstep.cli.flags import without_flag
from lockstep.config import (
    CNN,
    Checkpoint,
    Config,
    Data,
    Lora,
    Metrics,
    Model,
    Parallel,
    Plan,
    Train,
    check_ranges,
)
from lockstep.errors import UserError
from lockstep.launch import Launch, adopt_environment
from lockstep.launch.link import check_possible, check_ranks, parse_link, run_over_link
from lockstep.models import on_meta, parameter_count
from lockstep.models.blocks import blocks_of
from lockstep.plan.trace import spec_without_data
from lockstep.strategies import STRATEGIES, check_parallel, degrees_of
from lockstep.strategies.combining import check_cuts
from lockstep.training.export import Consent

LinkFlag = Annotated[
    str | None,
    tyro.conf.arg(
        help="Run on 2 nodes x 2 ranks (or --nproc in all) joined by a network of this rate, and perhaps one-way "
        "latency: 1gbit, 100mbit,5ms. The nodes are Linux network namespaces of this machine: needs root and iproute2."
    ),
]


@dataclass
class ReadsRun:
    """What every command takes that reads the folder of a run, which may be a stranger's."""

    model_import: Annotated[str | None, tyro.conf.arg(name="model.import")] = None
    """The import that the run's config names for its model, if it has one: without it, no code of the folder is run."""
    data_import: Annotated[str | None, tyro.conf.arg(name="data.import")] = None
    """Likewise for its data, of an old run that does not say what its samples look like."""
    trust: bool = False
    """Run whatever code the run's config names."""
    older: bool = False
    """Where the newest checkpoint is damaged, take the newest whole one."""

    @property
    def consent(self) -> Consent:
        return Consent(tuple(filter(None, (self.model_import, self.data_import))), self.trust, self.older)


def check_link(link: str, launch: Launch) -> None:
    """Refuse what cannot be done before anything else is."""
    check_possible(parse_link(link))
    if adopt_environment():
        raise UserError("--link starts its own nodes; leave it out under torchrun and srun")
    if launch.backend == "shm":
        raise UserError("--link joins nodes by a network, and --backend shm is for ranks of one machine; use gloo")
    check_ranks(launch.nproc)


def over_link(command: str, link: str, argv: list[str], launch: Launch) -> int:
    """Run the same command, without its --link, on the ranks of two nodes."""
    check_link(link, launch)
    rest = without_flag(argv, "--link", "--nproc")
    return run_over_link(link, [*command.split(), *rest], launch.nproc)


@dataclass
class RunArguments:
    """What every command takes that runs a config."""

    launch: Annotated[Launch, tyro.conf.arg(name="")] = field(default_factory=Launch)
    model: Model = field(default_factory=CNN)
    data: Data = field(default_factory=Data)
    train: Train = field(default_factory=Train)
    parallel: Parallel = field(default_factory=Parallel)
    lora: Lora = field(default_factory=Lora)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    metrics: Metrics = field(default_factory=Metrics)
    plan: Plan = field(default_factory=Plan)

    def config(self) -> Config:
        config = Config(**{section.name: getattr(self, section.name) for section in fields(Config)})
        check_ranges(config)
        return config


def check_before_ranks(config: Config, launch: Launch, default_nproc: int) -> None:
    """Refuse what no rank could do, in one voice, before any starts."""
    ranks = int(os.environ["WORLD_SIZE"]) if adopt_environment() else launch.nproc or default_nproc
    device = device_type(launch)
    parallel, train = config.parallel, config.train
    check_parallel(parallel, device, train.precision, train.compile != "none")
    degrees = degrees_of(parallel, max(1, ranks))
    if train.batch_per_rank is not None:
        train.batch_size = train.batch_per_rank * train.accumulation * degrees.replicate * degrees.shard
    check_model(config)


def device_type(launch: Launch) -> str:
    """What the ranks will compute on."""
    return "cpu" if launch.device == "cpu" or not torch.cuda.is_available() else "cuda"


def check_model(config: Config) -> None:
    """A model whose parameters alone exceed the machine's memory many times over is a mistake in a number; and degrees
    must divide what they cut.
    """
    built = on_meta(config.model, spec_without_data(config))
    check_cuts(built, config.parallel, config.train.accumulation)
    tell_of_blocks(built, config.parallel)
    parameters = parameter_count(built)
    room = psutil.virtual_memory().total
    if parameters * 4 > LARGEST * room:
        raise UserError(
            f"the model has {parameters:,} parameters, {parameters * 4 / 2**30:,.0f} GiB in fp32, and this machine has "
            f"{room / 2**30:,.0f} GiB of memory; make model's widths or layers smaller"
        )


def tell_of_blocks(model: nn.Module, parallel: Parallel) -> None:
    """Sharded parameters are gathered block by block; a model in one piece is gathered whole, which saves little."""
    divides_parameters = STRATEGIES[parallel.data].facts(parallel).divides[0]
    if divides_parameters and not blocks_of(model) and os.environ.get("RANK", "0") == "0":
        print(
            f"note: {type(model).__name__} has no blocks to shard (modules in a ModuleList or Sequential), so "
            f"parallel.data {parallel.data} gathers all of it at once: parameters are divided between steps only",
            file=sys.stderr,
        )


LARGEST = 64
"""Machines' worth of memory: more than any cluster of such machines is likely to have."""


def check_paths(*given: tuple[str, str | None]) -> None:
    for flag, path in given:
        if path is not None and "\0" in path:
            raise UserError(f"{flag} has a NUL character in it, which no file's name may have")

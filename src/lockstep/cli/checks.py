"""What a command refuses before any rank starts."""

import os
import sys
from functools import cache

import psutil
import torch
from torch import nn

from lockstep.cli.flags import without_flag
from lockstep.config import Config, Parallel
from lockstep.errors import UserError
from lockstep.launch import Launch, adopt_environment
from lockstep.launch.link import check_possible, check_ranks, parse_link, run_over_link
from lockstep.models import on_meta, parameter_count
from lockstep.models.blocks import blocks_of
from lockstep.models.float8 import MULTIPLE, linears_of_blocks
from lockstep.plan.trace import spec_without_data
from lockstep.strategies import STRATEGIES, check_parallel, degrees_of
from lockstep.strategies.combining import check_cuts, check_float8, check_optimizer, check_signs
from lockstep.words import counted


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


def check_before_ranks(config: Config, launch: Launch, default_nproc: int) -> None:
    """Refuse what no rank could do, in one voice, before any starts."""
    ranks = int(os.environ["WORLD_SIZE"]) if adopt_environment() else launch.nproc or default_nproc
    device = device_type(launch)
    parallel, train = config.parallel, config.train
    check_parallel(parallel, device, train.precision, train.compile != "none")
    check_optimizer(train, parallel)
    check_signs(train, parallel)
    check_float8(config, device)
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
    note_missing_blocks(built, config.parallel)
    if config.train.precision == "fp8":
        note_float8(built)
    parameters = parameter_count(built)
    room = psutil.virtual_memory().total
    if parameters * 4 > LARGEST * room:
        raise UserError(
            f"the model has {parameters:,} parameters, {parameters * 4 / 2**30:,.0f} GiB in fp32, and this machine has "
            f"{room / 2**30:,.0f} GiB of memory; make model's widths or layers smaller"
        )


def note_missing_blocks(model: nn.Module, parallel: Parallel) -> None:
    """Sharded parameters are gathered block by block; a model in one piece is gathered whole, which saves little."""
    divides_parameters = STRATEGIES[parallel.data].facts(parallel).divides[0]
    if divides_parameters and not blocks_of(model) and os.environ.get("RANK", "0") == "0":
        print(
            f"note: {type(model).__name__} has no blocks to shard (modules in a ModuleList or Sequential), so "
            f"parallel.data {parallel.data} gathers all of it at once: parameters are divided between steps only",
            file=sys.stderr,
        )


def note_float8(model: nn.Module) -> None:
    """Which layers multiply in FP8."""
    fits, others = linears_of_blocks(model)
    if os.environ.get("RANK", "0") != "0":
        return
    some = f"{', '.join(list(others)[:3])}{' and more' if len(others) > 3 else ''}"
    kept = f"; not {some}: no plain linear layers, or sizes that are no multiples of {MULTIPLE}" if others else ""
    say_once(f"note: {counted(len(fits), 'linear layer')} of the blocks in FP8{kept}")


@cache
def say_once(line: str) -> None:
    """Also where a command checks several cases of one model."""
    print(line, file=sys.stderr)


LARGEST = 64
"""Machines' worth of memory: more than any cluster of such machines is likely to have."""


def check_paths(*given: tuple[str, str | None]) -> None:
    for flag, path in given:
        if path is not None and "\0" in path:
            raise UserError(f"{flag} has a NUL character in it, which no file's name may have")

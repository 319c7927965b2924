"""What the commands share in reading their arguments."""

import os
import re
import sys
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Annotated, Any, TypeVar

import psutil
import torch
import tyro
from torch import nn

from lockstep.cli.flags import without_flag
from lockstep.config import (
    CNN,
    GPT,
    HF,
    Checkpoint,
    Config,
    Data,
    Lora,
    Model,
    Parallel,
    Train,
    check_ranges,
)
from lockstep.data import DataSpec
from lockstep.errors import UserError
from lockstep.launch import Launch, adopt_environment
from lockstep.launch.link import check_possible, check_ranks, parse_link, run_over_link
from lockstep.models import build_model, parameter_count
from lockstep.parallel.blocks import blocks_of
from lockstep.strategies import STRATEGIES, check_parallel, degrees_of
from lockstep.strategies.combining import check_cuts

T = TypeVar("T")

LinkFlag = Annotated[
    str | None,
    tyro.conf.arg(
        help="Run on 2 nodes x 2 ranks (or --nproc in all) joined by a network of this rate, and perhaps one-way "
        "latency: 1gbit, 100mbit,5ms. The nodes are Linux network namespaces of this machine: needs root and iproute2."
    ),
]


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

    def config(self) -> Config:
        config = Config(self.model, self.data, self.train, self.parallel, self.lora, self.checkpoint)
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
    data, model = config.data, config.model
    spec = DataSpec("images", data.shape if data.name == "synthetic" and len(data.shape) == 3 else (3, 32, 32), 10)
    if isinstance(model, GPT):
        spec = DataSpec("tokens", (model.context,), model.vocabulary or 256)
    elif isinstance(model, HF):
        spec = DataSpec("tokens", (model.context,), 2)
    with torch.device("meta"):
        built = build_model(model, spec)
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


def parse(cls: type[T], argv: list[str], command: str, default: T | None = None) -> T:
    """Flags -> dataclass; the class's docstring is the help text. A wrong flag is one line, as every mistake."""
    options: dict[str, Any] = {"config": (tyro.conf.AvoidSubcommands,)}
    if default is not None:
        options["default"] = default
    said = StringIO()
    try:
        with redirect_stderr(said):
            return tyro.cli(cls, args=argv, prog=f"lockstep {command}", **options)
    except SystemExit as leaving:
        if leaving.code in (0, None):  # --help
            raise
        raise UserError(f"{on_one_line(said.getvalue())}; see lockstep {command.split(' ')[0]} --help") from None


def on_one_line(box: str) -> str:
    """What tyro says in a box of several lines, of which the first ones name the mistake."""
    lines = [line.strip("│ ") for line in box.splitlines() if not line.startswith(("╭", "╰"))]
    parts = " ".join(line if line.strip("─") else "\n" for line in lines).split("\n")
    mistake = parts[0].strip().rstrip(".")
    unknown = re.match(r"Unrecognized options: (--[^ ,]+)", mistake)
    if unknown is None:
        return mistake.removeprefix("Error parsing ")
    meant = re.search(r"Perhaps you meant:\s+(--[^ ,]+)", box.replace("│", " "))
    return f"unknown flag {unknown[1]}" + (f"; did you mean {meant[1]}?" if meant else "")


def refuse_positional(argv: list[str], command: str) -> None:
    """Commands without a config file: say what a stray word is not."""
    if argv and not argv[0].startswith("-"):
        raise UserError(f"lockstep {command} takes flags only, but was given {argv[0]!r}")


def check_outputs(csv: str | None, json: str | None, plot: str | None) -> None:
    """Refuse files that cannot be written before the work is done, not after."""
    given = [(flag, file) for flag, file in (("--csv", csv), ("--json", json), ("--plot", plot)) if file is not None]
    for flag, file in given:
        check_output(flag, file)
    files = [file for _, file in given]
    for file in files:
        if files.count(file) > 1:
            raise UserError(f"{file} was given for two kinds of output; give each its own file")


def check_output(flag: str, file: str) -> None:
    path = Path(file)
    if path.is_dir():
        raise UserError(f"{flag} {file}: that is a folder; name a file")
    if flag == "--plot" and path.suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"--plot {file}: name a file that ends in .png, .svg or .pdf")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise UserError(f"{flag} {file}: there is no folder {folder}; make it first")
    was_there = path.exists()
    if was_there and not path.is_file():
        return  # a device or a pipe
    try:
        path.open("a").close()
    except OSError as error:
        raise UserError(f"{flag} {file} cannot be written ({error.strerror}); choose another place") from None
    if not was_there:
        path.resolve().unlink(missing_ok=True)  # under torchrun another rank may have been quicker

"""The `lockstep` command: each command is a thin face over a function.

This file only finds the command and turns errors into one clear line; the commands import torch when they run, so that
help and typing mistakes answer at once.
"""

import importlib
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from io import TextIOWrapper

from lockstep.errors import RankError, UserError
from lockstep.launch.options import Process
from lockstep.strange import shown

if multiprocessing.parent_process() is not None:  # a rank being started: Ctrl-C ends it without a word
    signal.signal(signal.SIGINT, signal.SIG_DFL)

DEBUG, DEBUGGING = "--debug", "LOCKSTEP_DEBUG"
"""Any command's flag, and how ranks know of it."""

COMMANDS = {  # name -> (module, what it answers)
    "demo": ("lockstep.cli.demo", "show me, now, on this machine: every strategy on real digits, side by side"),
    "train": ("lockstep.cli.train", "train this model for real"),
    "configs": ("lockstep.cli.configs", "what can I train at once? the configs that come with it, by name"),
    "learn": ("lockstep.cli.learn", "teach me: a course whose exercises are graded on real ranks"),
    "tokenize": ("lockstep.cli.tokenize", "make token ids from text of any size, to train a GPT on"),
    "generate": ("lockstep.cli.generate", "let a trained GPT write"),
    "export": ("lockstep.cli.export", "a run's weights as one safetensors file, or as a folder for transformers"),
    "import": ("lockstep.cli.import_", "our GPT from a GPT-2's or a Llama's folder"),
    "verify": ("lockstep.cli.verify", "is this strategy correct? each against one process, and against theory"),
    "judge": ("lockstep.cli.judge", "is anyone's script correct? on its ranks against its own run in one process"),
    "bench comm": ("lockstep.cli.bench_comm", "what does my interconnect give? collectives in nccl-tests' terms"),
    "bench train": ("lockstep.cli.bench_train", "which strategy is fastest? steps of each, in turns, in one run"),
    "bench scaling": ("lockstep.cli.bench_scaling", "how does it scale? weak and strong, and what is lost to what"),
    "plan": ("lockstep.cli.plan", "will it fit, which layout, how long is a step? predicted, nothing is run"),
    "plan check": ("lockstep.cli.plan_check", "how far is the planner from results that others measured?"),
    "plan learn": ("lockstep.cli.plan_learn", "improve a machine file by runs that were trained on it"),
    "choose": ("lockstep.cli.choose", "which strategy, and why? asked, and answered with a command"),
    "calibrate": ("lockstep.cli.calibrate", "measure this machine for the planner"),
    "strategies": ("lockstep.cli.strategies", "what is there to choose from? what each cuts, sends and holds"),
    "schedule": ("lockstep.cli.schedule", "how does a pipeline schedule look? drawn, and beside it a real run"),
    "profile": ("lockstep.cli.profile", "where does the time go? one trace of all ranks, and what it says in words"),
    "doctor": ("lockstep.cli.doctor", "is this machine set up? what is here, and does it work"),
    "launch": ("lockstep.cli.launch", "write the script that starts a config on a cluster, and submit it"),
    "chaos": ("lockstep.cli.chaos", "does it survive? faults injected into real runs, and what came of them"),
    "report": ("lockstep.cli.report", "show why: one HTML file from any set of results"),
}

DEBUG_HELP = "--debug, with any command: an error comes with its traceback, and with what caused it"

EXAMPLES = """\
examples:
  lockstep demo
  lockstep train configs/digits_cnn.yaml --nproc 2 --parallel.data overlap
  lockstep bench comm --nproc 2 --against gloo
  lockstep verify --strategies naive bucketed --world-size 2 3
  torchrun --nproc_per_node=4 -m lockstep train configs/digits_cnn.yaml"""


OF_A_CONFIG = ("train", "profile", "verify")
"""Commands that begin with a config file, or with the defaults."""


def usage() -> str:
    lines = [f"  lockstep {name:<13} {what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: lockstep COMMAND ...  (lockstep COMMAND --help for its flags)",
            "",
            *lines,
            "",
            DEBUG_HELP,
            "",
            EXAMPLES,
        ]
    )


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit status: 0 fine, 1 failed, 2 a mistake in what was asked, 130 interrupted."""
    args = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that has no ✓ shows a ?
    if args and args[0].startswith("--local_rank="):  # DeepSpeed's launcher says it here, and in the environment
        args = args[1:]
    if not args or args[0] in ("-h", "--help", "help") or args in (["bench"], ["bench", "--help"], ["bench", "-h"]):
        print(usage())
        return 0
    if args[0] == "--version":
        from lockstep import __version__

        print(f"lockstep {__version__}")
        return 0
    if DEBUG in args:
        args.remove(DEBUG)
        os.environ[DEBUGGING] = "1"  # the ranks see it too
    try:
        name, rest = _find_command(args)
        if not {"-h", "--help"} & set(rest):
            from lockstep.cli.flags import config_from, refuse_unknown  # mistakes that are said before torch is there

            refuse_unknown(name, COMMANDS[name][0], rest)
            if name in OF_A_CONFIG:
                config_from(rest)
        Process.is_command = argv is None
        with ctrl_c_waits():
            command = importlib.import_module(COMMANDS[name][0])
        return int(command.main(rest))
    except UserError as error:
        return _say(f"error: {error}", 2)
    except KeyboardInterrupt as interrupt:
        return _say(f"interrupted{': ' * bool(str(interrupt))}{interrupt}", 130)
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a full disk, a missing folder, a forbidden file: the message names it
        return _say(f"error: {error}", 1)
    except RankError as error:
        return _say(f"error: {error}", 1)


@contextmanager
def ctrl_c_waits() -> Iterator[None]:
    """Until torch is imported: in the midst of that it would end in an abort of C++."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _find_command(args: list[str]) -> tuple[str, list[str]]:
    for words in (2, 1):
        name = " ".join(args[:words])
        if name in COMMANDS:
            return name, args[words:]
    given = " ".join(args[:2]) if args[0] == "bench" else args[0]
    near = get_close_matches(given, COMMANDS, 1)
    meant = f", did you mean {near[0]}?" if near else ""
    group = [name for name in COMMANDS if name.split()[0] == args[0]]
    raise UserError(f"unknown command {given!r}{meant}; there are {', '.join(group or COMMANDS)}")


def _say(text: str, status: int) -> int:
    """One line; with --debug, after all that led to it."""
    if os.environ.get(DEBUGGING) and sys.exc_info()[0] is not None:
        traceback.print_exc()
    rank = os.environ.get("RANK")
    print(f"[rank {rank}] {shown(text)}" if rank else shown(text), file=sys.stderr)
    return status

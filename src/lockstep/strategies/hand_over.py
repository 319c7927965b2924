"""What the ranks of one generation have of a run, for those of the next (`launch/membership.py`): weights, buffers and
the optimizer's state, from a neighbour's memory.
"""

import torch
from torch import Tensor

from lockstep.comm.collectives import all_gather_objects, broadcast
from lockstep.config import Config
from lockstep.data import DataSet, Streamed
from lockstep.errors import UserError
from lockstep.strategies.parallel_model import ParallelModel
from lockstep.strategies.state import model_leaves, optimizer_leaves
from lockstep.strategies.table import STRATEGIES


def check_keeps_going(config: Config) -> None:
    """Refuse what cannot lose a rank, because no other rank has what it holds, or what outlives a rank."""
    parallel = config.parallel
    if config.data.workers:
        raise UserError(
            f"--keep-going does not go with data.workers {config.data.workers}, which outlive a rank that is lost; "
            f"leave it out"
        )
    if parallel.replicate not in (None, -1):
        raise UserError(
            f"--keep-going changes how many copies there are, and parallel.replicate is {parallel.replicate}; leave it "
            f"out"
        )
    axes = [f"parallel.{axis} {n}" for axis in ("pp", "cp", "tp", "ep") if (n := getattr(parallel, axis)) > 1]
    engine = STRATEGIES[parallel.data]
    if axes:
        given = axes[0]
    elif not engine.survives_losses:
        given = f"parallel.data {parallel.data}"
    elif engine.facts(parallel).law is not None:
        given = f"parallel.data {parallel.data} with these options"
    else:
        return
    whole = ", ".join(name for name, other in STRATEGIES.items() if other.survives_losses)
    raise UserError(
        f"--keep-going needs ranks of which each can do without the others ({whole}), and {given} has none; use "
        f"--max-restarts with --checkpoint.in-memory"
    )


def check_can_be_handed_over(strategy: ParallelModel, dataset: DataSet) -> None:
    """Refuse what a step changes beside weights, buffers and the optimizer's state, or after it has changed them."""
    if strategy.cut.has_experts:
        raise UserError(
            "--keep-going does not know how to take a step of a mixture of experts back, whose ranks reduce their load "
            "behind the optimizer's step; use --max-restarts with --checkpoint.in-memory"
        )
    if isinstance(dataset.train, Streamed):
        raise UserError(
            f"--keep-going needs samples that every rank can find by their numbers, and {dataset.name} is a stream; "
            f"use --max-restarts with --checkpoint.in-memory"
        )


def hand_over(old: ParallelModel | None, new: ParallelModel, steps: int) -> int:
    """Fill `new` with the state of the ranks that have taken the most steps; how many these are. `old`: what this rank
    has, after `steps`; None: nothing. All ranks call it together.
    """
    group = new.layout.norm
    everyone = all_gather_objects(steps if old is not None else -1, group)
    most = max(everyone)
    mine: dict[str, Tensor] = {}
    if old is not None and steps == most:
        engine = old.engine  # whose ranks cannot be asked for anything any more
        mine = model_leaves(engine.model, engine.held(), only_trained=engine.options.save_trained_only)
        mine |= optimizer_leaves(engine.local_optimizer, engine.trained())
    if any(theirs < most for theirs in everyone):
        mine = sent_by(everyone.index(most), mine, new)
    new.state.load(mine)
    scale = None if old is None or old.loss_scale is None else old.loss_scale.state_dict()
    scale = all_gather_objects(scale, group)[everyone.index(most)]
    if scale is not None and new.loss_scale is not None:
        new.loss_scale.load_state_dict(scale)
    return most


def sent_by(source: int, mine: dict[str, Tensor], new: ParallelModel) -> dict[str, Tensor]:
    """Every tensor of one rank, on all of them."""
    group, device = new.layout.norm, new.world.device
    listed = all_gather_objects({name: (tuple(t.shape), t.dtype) for name, t in mine.items()}, group)[source]
    found = {}
    for name, (shape, dtype) in listed.items():
        tensor = mine[name].contiguous() if group.rank == source else torch.empty(shape, dtype=dtype, device=device)
        found[name] = broadcast(tensor, src=source, group=group, purpose="parameters")
    return found

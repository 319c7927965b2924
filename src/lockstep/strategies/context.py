"""Context parallelism as an axis of a strategy: positions, attention, and what it refuses."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import UserError
from lockstep.layout import Group
from lockstep.parallel.context.context_parallel import positions_of, ring_attention, ulysses_attention

ATTENTION = {"ring": ring_attention, "ulysses": ulysses_attention}


def cut_positions(model: nn.Module, group: Group, attention: str) -> None:
    """Have a model, or a stage of it, work on this rank's positions."""
    if group.size == 1:
        return
    whole: Any = getattr(model, "whole", model)

    def own(count: int, device: torch.device) -> Tensor:
        return positions_of(group.rank, group.size, count * group.size).to(device)

    whole.positions.use(own)
    for part in attention_of(model):
        part.attend = partial(ATTENTION[attention], causal=True, process_group=group)


def attention_of(model: nn.Module) -> list[Any]:
    return [part for part in model.modules() if hasattr(part, "attend")]


def check_context(model: nn.Module, degree: int, attention: str, tp: int, multiple: int = 1) -> None:
    """Refuse what cannot be cut, with what would work. `multiple`: of how many positions each chunk must be."""
    if degree == 1:
        return
    shape: Any = getattr(model, "shape", None)
    if shape is None or not attention_of(model):
        raise UserError(
            f"parallel.cp {degree} cuts sequences, and {type(model).__name__} has no attention over any; use gpt"
        )
    chunks = 2 * degree * multiple
    if shape.context % chunks:
        of = f" of a multiple of {multiple} positions" if multiple > 1 else ""
        raise UserError(
            f"parallel.cp {degree} cuts sequences into {2 * degree} equal chunks{of}, and model.context "
            f"{shape.context} is no multiple of {chunks}; use {-(-shape.context // chunks) * chunks}"
        )
    if shape.dropout > 0:
        raise UserError(
            f"parallel.cp does not drop attention's weights, and model.dropout is {shape.dropout:g}; set it to 0"
        )
    heads, kv_heads = shape.heads // tp, max(1, shape.kv_heads // tp)
    if attention == "ulysses" and (heads % degree or (kv_heads % degree and degree % kv_heads)):
        raise UserError(
            f"parallel.attention ulysses gives each of {degree} ranks whole heads, and there are {heads} of queries "
            f"and {kv_heads} of keys; use ring"
        )

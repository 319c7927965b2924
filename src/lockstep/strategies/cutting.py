"""The axes that cut the model itself: stages, experts, matrices, positions; by hand, or by PyTorch on request."""

from dataclasses import replace

import torch
from torch import nn

from lockstep.layout import Layout
from lockstep.models.experts import mixtures_in
from lockstep.strategies.context import cut_positions
from lockstep.strategies.experts import cut_experts
from lockstep.strategies.native_context import attend_by_torch
from lockstep.strategies.native_tensor import cut_by_dtensor
from lockstep.strategies.options import Options
from lockstep.strategies.pipeline import cut_into_stages
from lockstep.strategies.step import Cut
from lockstep.strategies.tensor import TensorPlan, cut_tensors


def cut_model(
    model: nn.Module, layout: Layout, options: Options, place: torch.device | None
) -> tuple[nn.Module, Cut, bool]:
    """(this rank's part of the model, how to run it, whether it is on `place` in the run's dtype already)."""
    parallel, degrees = options.parallel, layout.degrees
    mixtures = mixtures_in(model).values()
    experts = Cut(has_experts=bool(mixtures), balances_experts=any(mixture.needs_load for mixture in mixtures))
    by_dtensor = "tp" in parallel.native and degrees.tp > 1
    plan = TensorPlan.of(model, degrees.tp, options.loss, by_dtensor)
    model = cut_into_stages(model, layout, parallel)
    is_placed = by_dtensor or ("ep" in parallel.native and parallel.ep > 1)
    if is_placed:
        model.to(place, options.dtype)  # a DTensor that moves loses its hooks
    apart = cut_experts(model, layout, parallel)
    if by_dtensor:
        measure = cut_by_dtensor(model, plan, layout, parallel.sequence)
    else:
        measure = cut_tensors(model, plan, layout.group("tp"), parallel, apart)
    if "cp" in parallel.native and degrees.cp > 1:
        return model, replace(experts, measure=measure, around_passes=attend_by_torch(model, layout)), is_placed
    cut_positions(model, layout.group("cp"), parallel.attention)
    return model, replace(experts, measure=measure), is_placed

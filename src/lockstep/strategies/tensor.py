"""Tensor parallelism as an axis of a strategy: the model's plan, its loss, and what it refuses."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lockstep.config import Parallel
from lockstep.errors import UserError
from lockstep.layout import Group
from lockstep.models.loss import CrossEntropy, LossSum, Measure
from lockstep.parallel.pipeline.stage import Elsewhere
from lockstep.parallel.tensor.parallel_linear import ColumnParallelLinear
from lockstep.parallel.tensor.propose import proposed_plan, shown_plan
from lockstep.parallel.tensor.tensor_parallel import cut_as_planned, declared_plan, match_plan
from lockstep.parallel.tensor.vocabulary import cross_entropy_of_parts


@dataclass(frozen=True)
class TensorPlan:
    """The kind of each module that is cut, and the head, if its outputs are left cut."""

    kinds: dict[str, str]
    head: str | None = None
    z_loss: float = 0.0
    """Of the loss of a head's cut outputs."""

    @classmethod
    def of(cls, model: nn.Module, degree: int, loss: LossSum, native: bool = False) -> "TensorPlan":
        """The model's own plan. Logits that only a cross entropy reads are never gathered (`native`: torch's loss over
        parts, which has no z-loss).
        """
        if degree == 1:
            return cls({})
        plan = declared_plan(model)
        heads = [name for name, kind in plan.items() if kind == "column:gather"]
        if len(heads) == 1 and isinstance(loss, CrossEntropy) and not (native and loss.z_loss):
            return cls(match_plan(model, {**plan, heads[0]: "vocab"}), heads[0], loss.z_loss)
        return cls(match_plan(model, plan))

    def here(self, stage: nn.Module) -> "TensorPlan":
        """The plan for the modules of this pipeline stage."""
        there = {name for name, part in stage.named_modules(remove_duplicate=False) if not isinstance(part, Elsewhere)}
        kinds = {name: kind for name, kind in self.kinds.items() if name in there}
        return TensorPlan(kinds, self.head if self.head in kinds else None, self.z_loss)


def cut_tensors(
    stage: nn.Module, plan: TensorPlan, group: Group, parallel: Parallel, apart: Collection[nn.Module] = ()
) -> Measure | None:
    """Cut the matrices of a model, or of a stage, in place. Returns how to compute the loss, if its outputs are cut.

    `apart`: modules that the axis of experts has seen to.
    """
    plan = plan.here(stage)
    cut_as_planned(stage, plan.kinds, group, parallel.sequence, parallel.keep_gathered, apart)
    if plan.head is None or group.size == 1:
        return None
    head = stage.get_submodule(plan.head)
    assert isinstance(head, ColumnParallelLinear)
    start = head.cut.ranges[0][0]

    def measure(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        loss, correct = cross_entropy_of_parts(outputs, targets, group, start, plan.z_loss)
        return loss.sum(), correct.sum()

    return measure


def check_tensor(model: nn.Module, degree: int, sequence: bool) -> None:
    """Refuse sizes that the degree does not divide, with what would work. `model` may be on the meta device."""
    if degree == 1:
        return
    if not hasattr(model, "tensor_plan"):
        plan = proposed_plan(model)
        mend = (
            f"it might be {shown_plan(plan)}" if plan else "it needs pairs of linear layers; docs/own.md has an example"
        )
        raise UserError(
            f"parallel.tp {degree} needs a model that says how it is cut, by tensor_plan(), and {type(model).__name__} "
            f"does not; {mend}"
        )
    for what, size in sizes_to_cut(model, sequence).items():
        if size % degree:
            fits = ", ".join(str(d) for d in range(1, min(size, 64) + 1) if size % d == 0)
            raise UserError(f"parallel.tp {degree} does not divide {what}, {size}; degrees that do: {fits}")
    shape: Any = getattr(model, "shape", None)
    if shape is not None and shape.kv_heads % degree and degree % shape.kv_heads:
        raise UserError(
            f"parallel.tp {degree} and model.kv_heads {shape.kv_heads}: one must divide the other, so that each rank "
            f"has whole heads"
        )


def sizes_to_cut(model: nn.Module, sequence: bool) -> dict[str, int]:
    """The sizes that the degree must divide, by their names in the config."""
    shape: Any = getattr(model, "shape", None)
    says: Any = getattr(model, "tensor_sizes", None)
    if says is not None and not sequence:
        found: dict[str, int] = says()
        return found
    if shape is not None:
        sizes = {"model.heads": shape.heads}
        if not shape.experts or shape.dense_layers:
            sizes["the width of the blocks' MLP"] = shape.mlp_width
        if shape.experts and shape.shared_experts:
            sizes["the width of the shared experts"] = shape.shared_experts * shape.expert_width
        return {**sizes, "model.context, whose positions parallel.sequence cuts": shape.context} if sequence else sizes
    if sequence:
        raise UserError(f"parallel.sequence cuts positions, and {type(model).__name__} has none; use gpt")
    layers: Any = getattr(model, "layers", None)
    mlp = isinstance(layers, nn.ModuleList) and len(layers) > 1 and isinstance(layers[0], nn.Linear)
    return {"model.width": layers[0].out_features} if mlp else {}  # of a user's plan, what does not fit is said by name

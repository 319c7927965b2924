"""Tensor parallelism as an axis of a strategy: the model's plan, its loss, and what it refuses."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lockstep.config import Parallel
from lockstep.errors import UserError
from lockstep.layout import Group
from lockstep.models.loss import LossSum, Measure, cross_entropy_sum
from lockstep.parallel.pipeline.stage import Elsewhere
from lockstep.parallel.tensor.parallel_linear import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from lockstep.parallel.tensor.propose import proposed_plan, shown_plan
from lockstep.parallel.tensor.tensor_parallel import SummedOverPositions, cut_as_planned, match_plan, own_plan
from lockstep.parallel.tensor.vocabulary import cross_entropy_of_parts
from lockstep.strategies.theory import NOTHING, Theory, all_reduce_factor, gather_factor


@dataclass(frozen=True)
class TensorPlan:
    """What becomes of which module, and which of them has outputs that are left cut."""

    kinds: dict[str, str]
    head: str | None = None

    @classmethod
    def of(cls, model: nn.Module, degree: int, loss: LossSum) -> "TensorPlan":
        """The model's own. Logits that only a cross entropy reads are never gathered."""
        if degree == 1:
            return cls({})
        plan = own_plan(model)
        heads = [name for name, kind in plan.items() if kind == "column:gather"]
        if len(heads) == 1 and loss is cross_entropy_sum:
            return cls(match_plan(model, {**plan, heads[0]: "vocab"}), heads[0])
        return cls(match_plan(model, plan))

    def here(self, stage: nn.Module) -> "TensorPlan":
        """What of it this stage of a pipeline has."""
        there = {name for name, part in stage.named_modules(remove_duplicate=False) if not isinstance(part, Elsewhere)}
        kinds = {name: kind for name, kind in self.kinds.items() if name in there}
        return TensorPlan(kinds, self.head if self.head in kinds else None)


def cut_tensors(stage: nn.Module, plan: TensorPlan, group: Group, parallel: Parallel) -> Measure | None:
    """Cut the matrices of a model, or of a stage, in place. Returns what takes the loss, if its outputs are cut."""
    plan = plan.here(stage)
    cut_as_planned(stage, plan.kinds, group, parallel.sequence, parallel.keep_gathered)
    if plan.head is None or group.size == 1:
        return None
    head = stage.get_submodule(plan.head)
    assert isinstance(head, ColumnParallelLinear)
    start = head.cut.ranges[0][0]

    def measure(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        loss, correct = cross_entropy_of_parts(outputs, targets, group, start)
        return loss.sum(), correct.sum()

    return measure


def tensor_traffic(
    stage: nn.Module,
    plan: TensorPlan,
    n: int,
    sequence: bool,
    tokens: int,
    positions: int,
    is_first: bool = True,
    pieces: int | None = 1,
) -> Theory | None:
    """What tensor parallelism on n ranks sends for one micro-batch of `tokens`, forward and backward, where `stage` is
    cut already. None where a layer is not trained, and so sends less. `is_first`: nobody wants the inputs' gradient.
    `pieces`: of the batch, that travel by themselves with sequence parallelism (`halves`); None: nobody knows.
    """
    if n == 1:
        return NOTHING
    if not all(p.requires_grad for p in stage.parameters()):
        return None
    plan = plan.here(stage)
    itemsize = next(stage.parameters()).element_size()
    elements, collectives = 0.0, 0  # an all-reduce, or a reduce-scatter and an all-gather, pass over elements twice
    for part in stage.modules():
        match part:
            case ColumnParallelLinear():
                wide, messages = 0 if is_first else part.in_features, (pieces or 1) + 1
                if part.gathers_again:
                    elements += tokens * part.in_features
                    collectives += pieces or 1
                if part.gather_output:
                    elements += tokens * max(part.cut.sizes) * n
                    collectives += 1
            case RowParallelLinear():
                wide, messages = part.out_features, 2 * (pieces or 1)
            case VocabParallelEmbedding():
                wide, messages = part.embedding_dim, 2
            case _:
                continue
        elements += 2 * tokens * wide
        collectives += 0 if not wide else messages if sequence else 1
        is_first = False
    if sequence:
        whole = [part for part in stage.modules() if isinstance(part.forward, SummedOverPositions)]
        elements += sum(2 * p.numel() for part in whole for p in part.parameters(recurse=False))
        collectives += len(whole)
        for name, kind in plan.kinds.items():
            if kind == "sequence":  # its output is for all samples alike
                embedding = stage.get_submodule(name)
                assert isinstance(embedding, nn.Embedding)
                elements += positions * embedding.embedding_dim
                collectives += 1
    sent = gather_factor(n) * elements * itemsize
    if plan.head is not None:  # the largest logit, then the sum and the target's
        sent += all_reduce_factor(n) * 3 * tokens * max(itemsize, 4)
        collectives += 2
    return Theory(None if sequence and pieces is None else collectives, sent)


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
    """What the degree must divide, by the names that a config has for it."""
    shape: Any = getattr(model, "shape", None)
    says: Any = getattr(model, "tensor_sizes", None)
    if says is not None and not sequence:
        found: dict[str, int] = says()
        return found
    if shape is not None:
        sizes = {"model.heads": shape.heads, "the width of the blocks' MLP": shape.mlp_width}
        return {**sizes, "model.context, whose positions parallel.sequence cuts": shape.context} if sequence else sizes
    if sequence:
        raise UserError(f"parallel.sequence cuts positions, and {type(model).__name__} has none; use gpt")
    layers: Any = getattr(model, "layers", None)
    mlp = isinstance(layers, nn.ModuleList) and len(layers) > 1 and isinstance(layers[0], nn.Linear)
    return {"model.width": layers[0].out_features} if mlp else {}  # of a user's plan, what does not fit is said by name

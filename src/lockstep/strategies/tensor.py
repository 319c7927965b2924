"""Tensor parallelism as an axis of a strategy: the model's plan, its loss, and what it refuses."""

from typing import Any

from torch import Tensor, nn

from lockstep.errors import UserError
from lockstep.layout import Group
from lockstep.models.loss import LossSum, Measure, cross_entropy_sum
from lockstep.parallel.parallel_linear import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from lockstep.parallel.tensor import Plan, SummedOverPositions, own_plan, tensor_parallel
from lockstep.parallel.vocabulary import cross_entropy_of_parts
from lockstep.strategies.theory import NOTHING, Theory, all_reduce_factor, gather_factor


def cut_tensors(model: nn.Module, group: Group, sequence: bool, loss: LossSum) -> Measure | None:
    """Cut the model's matrices, in place. Returns what takes the loss, if its outputs are cut too."""
    if group.size == 1:
        return None
    plan, head = plan_for(model, loss)
    tensor_parallel(model, plan, group, sequence)
    if head is None:
        return None
    cut = model.get_submodule(head)
    assert isinstance(cut, ColumnParallelLinear)
    start = cut.cut.ranges[0][0]

    def measure(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        loss, correct = cross_entropy_of_parts(outputs, targets, group, start)
        return loss.sum(), correct.sum()

    return measure


def plan_for(model: nn.Module, loss: LossSum) -> tuple[Plan, str | None]:
    """(the model's plan; the layer whose outputs are left cut). Logits that only a cross entropy reads are never
    gathered.
    """
    plan = own_plan(model)
    heads = [name for name, kind in plan.items() if kind == "column:gather"]
    if len(heads) == 1 and loss is cross_entropy_sum:
        return {**plan, heads[0]: "vocab"}, heads[0]
    return plan, None


def activation_traffic(
    model: nn.Module, n: int, sequence: bool, loss: LossSum, tokens: int, positions: int
) -> Theory | None:
    """What tensor parallelism on n ranks sends for one micro-batch of `tokens`, forward and backward. `model` is cut
    already. None where a layer is not trained, and so sends less.
    """
    if n == 1:
        return NOTHING
    if not all(p.requires_grad for p in model.parameters()):
        return None
    itemsize = next(model.parameters()).element_size()
    passes, elements = 0, 0.0  # an all-reduce, or a reduce-scatter and an all-gather, are two passes over the elements
    collectives = 0
    first = True
    for part in model.modules():
        match part:
            case ColumnParallelLinear():
                passes, wide = (2, part.in_features) if not first else (0, 0)
                collectives += 0 if first else 2 if sequence else 1
                if part.gather_output:
                    elements += tokens * max(part.cut.sizes) * n
                    collectives += 1
            case RowParallelLinear():
                passes, wide = 2, part.out_features
                collectives += 2 if sequence else 1
            case VocabParallelEmbedding():
                passes, wide = 2, part.embedding_dim
                collectives += 2 if sequence else 1
            case _:
                continue
        elements += passes * tokens * wide
        first = False
    if sequence:
        whole = [part for part in model.modules() if isinstance(part.forward, SummedOverPositions)]
        elements += sum(2 * p.numel() for part in whole for p in part.parameters(recurse=False))
        collectives += len(whole)
        for name, kind in plan_for(model, loss)[0].items():
            if kind == "sequence":  # its output is for all samples alike
                embedding = model.get_submodule(name)
                assert isinstance(embedding, nn.Embedding)
                elements += positions * embedding.embedding_dim
                collectives += 1
    sent = gather_factor(n) * elements * itemsize
    if plan_for(model, loss)[1] is not None:  # the largest logit, then the sum and the target's
        sent += all_reduce_factor(n) * 3 * tokens * max(itemsize, 4)
        collectives += 2
    return Theory(collectives, sent)


def check_tensor(model: nn.Module, degree: int, sequence: bool) -> None:
    """Refuse sizes that the degree does not divide, with what would work. `model` may be on the meta device."""
    if degree == 1:
        return
    if not hasattr(model, "tensor_plan"):
        raise UserError(
            f"parallel.tp {degree} needs a model that says how it is cut, and {type(model).__name__} does not; use gpt "
            f"or mlp"
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
    if shape is not None:
        sizes = {"model.heads": shape.heads, "the width of the blocks' MLP": shape.mlp_width}
        return {**sizes, "model.context, whose positions parallel.sequence cuts": shape.context} if sequence else sizes
    if sequence:
        raise UserError(f"parallel.sequence cuts positions, and {type(model).__name__} has none; use gpt")
    layers: Any = model.layers
    return {"model.width": layers[0].out_features} if len(layers) > 1 else {}

"""Tensor parallelism by PyTorch's own means, from the same plan: DTensor's `parallelize_module` and its loss parallel.

A DTensor's shards are equal runs of rows. A fused layer (q, k and v in one product) needs some rows of each part on
every rank: its rows are reordered first, so that each rank's part is one run of rows. The parameter records which
region of the model's tensor that is, as in the layers by hand; checkpoints, norm and verify need nothing else.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lockstep.comm.collectives import all_reduce
from lockstep.data.batch import IGNORED
from lockstep.errors import UserError
from lockstep.layout import Group, Layout
from lockstep.layout.region import Region
from lockstep.models.experts import mixtures_in
from lockstep.models.lora import LoRALinear
from lockstep.models.loss import Measure
from lockstep.parallel.data.wrapper import broadcast_module
from lockstep.parallel.tensor.cuts import even_cut, fused_cut
from lockstep.strategies.native_mesh import tensor_mesh
from lockstep.strategies.tensor import TensorPlan


def check_native_tensor(model: nn.Module, degree: int) -> None:
    """Refuse what DTensor's styles do not support, before any rank starts."""
    shape: Any = getattr(model, "shape", None)
    if shape is not None and shape.dropout > 0:
        raise UserError(
            f"tp=...:native would drop the same elements on every rank, and model.dropout is {shape.dropout:g}; set it "
            f"to 0, or leave native out"
        )
    if shape is not None and shape.kv_heads < degree:
        raise UserError(
            f"tp={degree}:native cannot give several ranks the same head, and model.kv_heads is {shape.kv_heads}; "
            f"leave native out"
        )
    if mixtures_in(model) or (shape is not None and shape.qk_norm != "none"):
        raise UserError("tp=...:native does not know experts, nor a norm of queries and keys; leave native out")
    if any(isinstance(part, LoRALinear) for part in model.modules()):
        raise UserError("tp=...:native does not know adapters; leave lora or native out")


def cut_by_dtensor(model: nn.Module, plan: TensorPlan, layout: Layout, sequence: bool) -> Measure | None:
    """Cut the matrices of a model in place. Returns how to compute the loss, if its outputs are cut."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import parallelize_module

    group = layout.group("tp")
    if all(p.device.type != "meta" for p in model.parameters()):
        broadcast_module(model, group)
    regions, tied = arrange(model, plan, group)
    styles = {name: style_of(name, kind, plan, sequence) for name, kind in plan.kinds.items() if kind != "sequence"}
    if sequence:
        styles |= {name: on_local_positions() for name in norms_of(model)}
    parallelize_module(model, tensor_mesh(layout), styles, src_data_rank=None)
    for name, first in tied.items():
        home, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(home), leaf, model.get_parameter(first))
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            parameter.region = regions.get(name, Region.whole(parameter.shape))  # type: ignore[attr-defined]
            parameter.register_post_accumulate_grad_hook(sum_if_partial)
    for name, kind in plan.kinds.items():
        if kind == "sequence" and sequence:
            model.get_submodule(name).register_forward_hook(lambda _m, _i, output: local_positions(output, layout))
    return None if plan.head is None else loss_of_parts(group)


def arrange(model: nn.Module, plan: TensorPlan, group: Group) -> tuple[dict[str, Region], dict[str, str]]:
    """Sort rows by rank. Returns this rank's region of each parameter, and which parameters are tied."""
    regions: dict[str, Region] = {}
    first: dict[Tensor, str] = {}
    tied: dict[str, str] = {}
    for name, kind in plan.kinds.items():
        part: Any = model.get_submodule(name)
        for leaf, parameter in list(part.named_parameters(recurse=False)):
            full = f"{name}.{leaf}"
            if parameter in first:
                tied[full] = first[parameter]
                continue
            first[parameter] = full
            if kind == "row" and leaf == "weight":
                regions[full] = Region.slice(parameter.shape, 1, *even_cut(part.in_features, group).ranges)
            elif kind in ("vocab", "column:gather"):
                regions[full] = Region.slice(parameter.shape, 0, *even_cut(len(parameter), group, uneven=True).ranges)
            elif kind == "column":
                cuts = [fused_cut(part, Group(group.axis, rank, group.size)) for rank in range(group.size)]
                order = torch.cat([torch.arange(*span) for cut in cuts for span in cut.ranges])
                parameter.data = parameter.data[order.to(parameter.device)]
                regions[full] = Region.slice(parameter.shape, 0, *cuts[group.rank].ranges)
        if kind == "column" and hasattr(part, "parts"):
            part.parts = fused_cut(part, group).widths
    return regions, tied


def style_of(name: str, kind: str, plan: TensorPlan, sequence: bool) -> Any:
    """Only the outputs that the loss reads stay DTensors; the rest of the model sees plain tensors."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    between = Shard(1) if sequence else Replicate()
    if kind == "row":
        return RowwiseParallel(output_layouts=between)
    if kind == "vocab" and name != plan.head:  # an embedding
        return RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
    whole = kind == "column:gather"
    return ColwiseParallel(
        input_layouts=between, output_layouts=Replicate() if whole else Shard(-1), use_local_output=name != plan.head
    )


def on_local_positions() -> Any:
    from torch.distributed.tensor.parallel import SequenceParallel

    return SequenceParallel(use_local_output=True)


def norms_of(model: nn.Module) -> list[str]:
    return [name for name, part in model.named_modules() if isinstance(part, nn.LayerNorm | nn.RMSNorm)]


def local_positions(output: Tensor, layout: Layout) -> Tensor:
    """This rank's positions of an output that is the same for all samples (a position embedding)."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    whole = DTensor.from_local(output, tensor_mesh(layout), [Replicate()], run_check=False)
    mine: Tensor = whole.redistribute(placements=[Shard(output.dim() - 2)]).to_local()
    return mine


def sum_if_partial(parameter: Any) -> None:
    """A norm that has seen only some positions has a partial gradient, a DTensor of terms: redistributing sums them."""
    gradient: Any = parameter.grad
    if gradient.placements != parameter.placements:
        parameter.grad = gradient.redistribute(parameter.device_mesh, parameter.placements)


# ---- the loss ------------------------------------------------------------------------------------------------------


def loss_of_parts(group: Group) -> Measure:
    """torch's loss parallel; it must be entered in backward too."""
    from torch.distributed.tensor.parallel import loss_parallel

    def measure(outputs: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits, wanted = outputs.flatten(0, -2), targets.flatten()
        context = loss_parallel()
        with loss_parallel():
            entered = _Around.apply(logits, context, "leave")
            loss: Any = F.cross_entropy(entered, wanted, reduction="sum", ignore_index=IGNORED)
        return _Around.apply(loss.to_local(), context, "enter"), correct_of_parts(logits, wanted, group)

    return measure


class _Around(torch.autograd.Function):
    """The identity; backward enters a context, or leaves it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, context: Any, does: str) -> Tensor:
        ctx.context, ctx.does = context, does
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if ctx.does == "enter":
            ctx.context.__enter__()
        else:
            ctx.context.__exit__(None, None, None)
        return gradient, None, None


@torch.no_grad()
def correct_of_parts(logits: Any, targets: Tensor, group: Group) -> Tensor:
    """How many targets have the largest logit over all ranks."""
    mine = logits.to_local().detach()
    start = even_cut(logits.shape[-1], group, uneven=True).ranges[0][0]
    largest, where = mine.max(-1) if mine.shape[-1] else (mine.new_full(targets.shape, -torch.inf), targets)
    best = all_reduce(largest.clone(), dist.ReduceOp.MAX, group, purpose="loss")
    return all_reduce(((largest == best) & (where + start == targets)).sum(), group=group, purpose="loss")

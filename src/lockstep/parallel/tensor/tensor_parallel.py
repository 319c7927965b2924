"""Tensor parallelism by hand: `tensor_parallel` cuts a module's matrices over the ranks, in place, by a plan.

A plan maps patterns of module names to what becomes of the modules:

    column          a linear layer: output features cut, and the output left cut
    column:gather   the same, and the output gathered
    row             a linear layer: input features cut, the output summed
    vocab           an embedding: rows cut, the output summed. Of a linear layer, the head: logits cut, and left so,
                    for `vocab_parallel_cross_entropy`
    summed          nothing is cut; the module sees only this rank's heads, so its gradients are summed over the ranks
    sequence        nothing is cut; but with sequence parallelism the output has only this rank's positions (an
                    embedding of positions)

    plan = {"*.qkv": "column", "*.output": "row", "*.up": "column", "*.down": "row", "head": "column:gather"}
    lockstep.tensor_parallel(model, plan)

Every rank gives the same samples and gets the same outputs; parameters keep their names, and are smaller. What the
plan does not name stays whole, and has the same gradient on every rank.

With `sequence_parallel` all that lies between the pairs of cut layers works on this rank's positions only. Whole
weights there (of a norm) get the gradient of these positions only: the module's backward sums it over the ranks.
"""

from collections.abc import Collection
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils.parametrize import is_parametrized

from lockstep.errors import UserError
from lockstep.layout.group import Group, GroupLike, group_of
from lockstep.models.float8 import Float8Linear
from lockstep.models.replace import replace_module
from lockstep.parallel.data.wrapper import broadcast_module, check_same_model
from lockstep.parallel.guards import mark_spread
from lockstep.parallel.tensor.cuts import even_cut
from lockstep.parallel.tensor.exchange import split_to_ranks, summed
from lockstep.parallel.tensor.parallel_linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    Tied,
    VocabParallelEmbedding,
)
from lockstep.parallel.tensor.parallel_products import SEQUENCE
from lockstep.parallel.tensor.random_numbers import OwnNumbers, draws_numbers
from lockstep.uncompiled import uncompiled

ModulePlan = dict[str, str]
KINDS = ("column", "column:gather", "row", "vocab", "summed", "sequence")


def tensor_parallel(
    module: nn.Module,
    plan: ModulePlan | None = None,
    process_group: GroupLike = None,
    sequence_parallel: bool = False,
    keep_gathered: bool = False,
) -> nn.Module:
    """Cut `module`, which every rank holds in full, over the group. All ranks start from the first rank's weights.

        lockstep.tensor_parallel(model, {"0": "column", "2": "row"})
        model(inputs).sum().backward()  # inputs, outputs and gradients as of the whole model

    `plan`: patterns of module names and what becomes of them; None: the module's own `tensor_plan()`. With
    `sequence_parallel`, backward gathers the inputs of cut layers again, unless `keep_gathered`.
    """
    group = group_of(process_group, "tp")
    planned = match_plan(module, declared_plan(module) if plan is None else plan)
    if sequence_parallel and not {"vocab", "sequence"} & set(planned.values()):
        raise UserError(
            "sequence_parallel needs to know where positions are cut first: a plan with a vocab or sequence module"
        )
    return cut_as_planned(module, planned, group, sequence_parallel, keep_gathered)


def cut_as_planned(
    module: nn.Module,
    planned: dict[str, str],
    group: Group,
    sequence_parallel: bool = False,
    keep_gathered: bool = False,
    apart: Collection[nn.Module] = (),
) -> nn.Module:
    """`planned`: kinds by module names. A stage of a pipeline may have only some of the plan's modules.

    `apart`: modules whose gradients need no sum over positions (experts).
    """
    if group.size == 1:
        return module
    if all(p.device.type != "meta" for p in module.parameters()):
        check_same_model(module, group)
        broadcast_module(module, group)
    numbers = OwnNumbers(group) if draws_numbers(module) else None
    check_tied(module, planned)
    check_parents(module, planned)
    tied: Tied = {}
    cut: dict[nn.Module, nn.Module] = {}
    for name, kind in planned.items():
        part = module.get_submodule(name)
        if part not in cut:
            try:
                cut[part] = cut_module(part, kind, group, sequence_parallel, tied, keep_gathered)
            except UserError as error:
                raise UserError(f"{name} cannot be {kind}-parallel on {group.size} ranks: {error}") from None
            cut[part].train(part.training)
        replace_module(module, name, cut[part])
    mark_spread(tied.values(), "tensor_parallel")
    if sequence_parallel:
        sum_gradients_of_whole(module, {*apart, *(m for part in cut.values() for m in part.modules())}, group)
    if numbers is not None:
        use_own_numbers(module, set(cut.values()), numbers, sequence_parallel)
    return module


def declared_plan(module: nn.Module) -> ModulePlan:
    make: Any = getattr(module, "tensor_plan", None)
    if make is None:
        raise UserError(
            f"{type(module).__name__} has no tensor_plan() of its own; give a plan, as "
            f'{{"*.up": "column", "*.down": "row"}}'
        )
    plan: ModulePlan = make()
    return plan


def match_plan(module: nn.Module, plan: ModulePlan) -> dict[str, str]:
    """{module name: kind}. A pattern that names nothing, or two that disagree, are mistakes."""
    names = [name for name, _ in module.named_modules(remove_duplicate=False) if name]
    found: dict[str, str] = {}
    for pattern, kind in plan.items():
        if kind not in KINDS:
            raise UserError(f"the plan has {kind!r} for {pattern!r}, but it must be one of {', '.join(KINDS)}")
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            some = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
            raise UserError(f"the plan's {pattern!r} is the name of no module; there are {some or 'none'}")
        for name in matched:
            if found.setdefault(name, kind) != kind:
                raise UserError(f"the plan has both {found[name]} and {kind} for {name}")
    return found


def check_tied(module: nn.Module, planned: dict[str, str]) -> None:
    """A weight that two modules share must be cut the same way in both, or in neither."""
    users: dict[nn.Parameter, dict[str, str]] = {}
    for name, part in module.named_modules(remove_duplicate=False):
        for parameter in part.parameters(recurse=False):
            users.setdefault(parameter, {})[name] = planned.get(name, "")
    rows = {"column", "column:gather", "vocab"}
    for modules in users.values():
        ways = {"rows" if kind in rows else "" if kind in ("sequence", "summed") else kind for kind in modules.values()}
        if len(ways) > 1:
            listed = " and ".join(f"{name} ({kind or 'whole'})" for name, kind in modules.items())
            raise UserError(f"{listed} share a weight, and the plan cuts it differently")


def check_parents(module: nn.Module, planned: dict[str, str]) -> None:
    """In eval mode torch's encoder layer reads its linear layers' weights directly, without calling them."""
    for name, part in module.named_modules(remove_duplicate=False):
        inside = [inner for inner in planned if not name or inner.startswith(f"{name}.")]
        if isinstance(part, nn.TransformerEncoderLayer) and inside:
            raise UserError(f"{inside[0]} is part of an nn.TransformerEncoderLayer, which does not always call it")


def cut_module(
    part: nn.Module, kind: str, group: Group, sequence: bool, tied: Tied, keep_gathered: bool = False
) -> nn.Module:
    if kind == "sequence":
        if sequence:
            part.register_forward_hook(lambda _module, _inputs, output: split_to_ranks(output, group, SEQUENCE))
        return part
    if kind == "summed":
        part.forward = SummedOverPositions(part, group)
        return part
    check_plain(part)
    if isinstance(part, nn.Embedding):
        if kind != "vocab":
            raise UserError("it is an embedding; say vocab")
        if part.max_norm is not None or part.sparse or part.padding_idx is not None or part.scale_grad_by_freq:
            raise UserError("an embedding with max_norm, sparse, padding_idx or scale_grad_by_freq cannot be cut")
        return VocabParallelEmbedding(part, group, sequence, tied)
    if not isinstance(part, nn.Linear):
        raise UserError(f"it is a {type(part).__name__}, and only linear layers and embeddings can be cut")
    if kind == "row":
        return RowParallelLinear(part, group, sequence, tied)
    whole = kind == "column:gather"
    # Outputs that are gathered, or go into a loss, may be cut unevenly; inputs of other layers may not.
    cut = even_cut(part.out_features, group, uneven=True) if whole or kind == "vocab" else None
    column = ColumnParallelLinear(part, group, whole, sequence, cut, tied, keep_gathered)
    column.leads_to_row = kind == "column"
    return column


def check_plain(part: nn.Module) -> None:
    """Refuse layers that do more than multiply: that would be lost. A linear layer's custom forward is kept."""
    if isinstance(part, nn.Embedding) and type(part).forward is not nn.Embedding.forward:
        raise UserError(f"{type(part).__name__} has a forward of its own, which its parts would not have")
    if any((part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks)):
        raise UserError("it has hooks, which its parts would not have; register them afterwards")
    if is_parametrized(part):
        raise UserError("its weight is parametrized, which its parts' would not be")
    if isinstance(part, Float8Linear):
        raise UserError("it multiplies in FP8, which its parts would do by other scales; leave lockstep.in_float8 out")


# ---- sequence parallelism: what is whole sees this rank's positions only -------------------------------------------


def sum_gradients_of_whole(root: nn.Module, cut: set[nn.Module], group: Group) -> None:
    """For modules with parameters that are not in the plan: their direct parameters, not those of submodules."""
    for part in root.modules():
        if part not in cut and any(True for _ in part.parameters(recurse=False)):
            part.forward = SummedOverPositions(part, group)


class SummedOverPositions:
    """A module's forward, with its parameters' gradients summed over the ranks."""

    def __init__(self, part: nn.Module, group: Group) -> None:
        self.part, self.group, self.plain = part, group, part.forward

    @uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = dict(self.part.named_parameters(recurse=False))
        summed_later = _SumTogether.apply(self.group, *own.values())
        # During this call the module's instance attributes shadow its parameters.
        self.part.__dict__.update(zip(own, summed_later, strict=True))
        try:
            return self.plain(*args, **kwargs)
        finally:
            for name in own:
                del self.part.__dict__[name]


class _SumTogether(torch.autograd.Function):
    """The identity; backward sums all gradients over the ranks in one all-reduce."""

    @staticmethod
    def forward(ctx: Any, group: Group, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        ctx.set_materialize_grads(False)
        return tuple(p.view_as(p) for p in parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        there = [g for g in gradients if g is not None]  # the same on all ranks: they run the same module
        total = summed(torch.cat([g.reshape(-1) for g in there]), ctx.group)
        parts = iter(total.split([g.numel() for g in there]))
        return None, *(None if g is None else next(parts).view_as(g) for g in gradients)


# ---- random numbers ------------------------------------------------------------------------------------------------


def use_own_numbers(root: nn.Module, cut: set[nn.Module], numbers: OwnNumbers, sequence: bool) -> None:
    """Tensors are cut between a column layer and the row layer after it; with sequence parallelism, everywhere."""
    root.register_forward_hook(lambda *_: numbers.leave(), always_call=True)  # also after an error
    if sequence:
        root.register_forward_pre_hook(partial(enter_with_inputs, numbers), with_kwargs=True)
        return
    for part in cut:
        if isinstance(part, ColumnParallelLinear) and part.leads_to_row:
            part.register_forward_hook(lambda part, _, output: numbers.enter(output) if part.training else None)
        elif isinstance(part, RowParallelLinear):
            part.register_forward_pre_hook(lambda *_: numbers.leave())


def enter_with_inputs(numbers: OwnNumbers, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if root.training:
        numbers.enter(next(value for value in [*args, *kwargs.values()] if isinstance(value, Tensor)))

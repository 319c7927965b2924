"""DeepSpeed's inference engine: on one rank, or with its own tensor parallelism over several (AutoTP).

AutoTP cuts every linear layer of a block along its outputs, but for those it is configured to reduce behind: those
along their inputs. It takes equal runs of rows, so a fused layer's rows are put in the order of their ranks first, as
for DTensor.
"""

from collections.abc import Iterable
from typing import Any

from torch import nn

from lockstep.errors import UserError
from lockstep.layout.group import group_of
from lockstep.parallel.tensor.tensor_parallel import declared_plan, match_plan
from lockstep.strategies.deepspeed import INSTALL, import_deepspeed
from lockstep.strategies.native_tensor import arrange
from lockstep.strategies.tensor import TensorPlan


def through_deepspeed(model: nn.Module) -> nn.Module:
    """The same model in DeepSpeed's inference engine, in the dtype that it has, over all ranks."""
    deepspeed = import_deepspeed()
    try:
        import transformers  # noqa: F401 (DeepSpeed's engine looks its layers up there)
    except ImportError:
        raise UserError(f"DeepSpeed's inference engine needs the transformers package: {INSTALL}") from None
    settings: dict[str, Any] = {"dtype": next(model.parameters()).dtype, "replace_with_kernel_inject": False}
    group = group_of(None, "tp")
    if group.size == 1:
        engine: nn.Module = deepspeed.init_inference(model, **settings)
        return engine
    check_shares_no_heads(model, group.size)
    cut = {name: kind for name, kind in match_plan(model, declared_plan(model)).items() if kind in ("column", "row")}
    arrange(model, TensorPlan(cut), group)
    widths = {name: model.get_submodule(name).parts for name, kind in cut.items() if kind == "column"}
    settings["tensor_parallel"] = {"tp_size": group.size, "tp_grain_size": 1}
    settings["injection_policy"] = {block_class(cut, model): tuple(sorted(summed_in_block(cut)))}
    engine = deepspeed.init_inference(model, **settings)
    for name, parts in widths.items():  # it has put layers of its own there
        model.get_submodule(name).__dict__["parts"] = parts
    # Its own all-reduce in shared memory crashes in ranks that its launcher has not started: use the process group's.
    deepspeed.comm.comm.cdb.shm_vector_kernel_level = 0
    return engine


def check_shares_no_heads(model: nn.Module, degree: int) -> None:
    shape: Any = getattr(model, "shape", None)
    if shape is not None and shape.kv_heads < degree:
        raise UserError(
            f"--engine deepspeed cannot give several ranks the same head, and model.kv_heads is {shape.kv_heads}; use "
            f"at most as many ranks, or --engine plain"
        )


def summed_in_block(cut: dict[str, str]) -> set[str]:
    """Names within a block of the layers that a sum stands behind: blocks.0.mlp.down -> mlp.down."""
    return {name.split(".", 2)[2] for name, kind in cut.items() if kind == "row"}


def block_class(cut: Iterable[str], model: nn.Module) -> type[nn.Module]:
    """Of the modules that those layers are in: blocks.0.mlp.down -> blocks.0."""
    return type(model.get_submodule(".".join(next(iter(cut)).split(".")[:2])))

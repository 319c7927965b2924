"""Which parameters of a model are matrices that an optimizer may treat as such (Muon)."""

from collections.abc import Mapping
from typing import Literal

from torch import nn

from lockstep.models.blocks import blocks_of
from lockstep.models.experts import Experts, Router

Kind = Literal["matrix", "stack"]
"""One matrix, also a convolution's kernels, one a row; or several of them, one for each expert."""


def matrices_in(model: nn.Module, shapes: Mapping[str, tuple[int, ...]] | None = None) -> dict[str, Kind]:
    """Parameters of two dimensions and more, of the model's blocks or, if there are none, of the model. Not those of
    embeddings and routers, whose rows are used one by one, nor of the layer that gives the model's output.

    `shapes`: of whole parameters, where the model holds pieces of them.
    """
    blocks = blocks_of(model) or [("", model)]
    output = output_of(model, [block for _, block in blocks])
    found: dict[str, Kind] = {}
    for prefix, block in blocks:
        for name, module in block.named_modules(prefix=prefix):
            if isinstance(module, nn.Embedding | Router) or module is output:
                continue
            for key, parameter in module.named_parameters(prefix=name, recurse=False):
                shape = parameter.shape if shapes is None else shapes.get(key, ())
                if len(shape) >= 2:
                    found[key] = "stack" if isinstance(module, Experts) else "matrix"
    return found


def output_of(model: nn.Module, blocks: list[nn.Module]) -> nn.Module | None:
    """The last linear layer, if it stands among the blocks and is not inside one of several layers."""
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return linear[-1] if linear and (linear[-1] in blocks or blocks == [model]) else None

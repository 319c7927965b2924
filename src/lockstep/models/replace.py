"""One module of a model for another, by its name."""

from torch import nn


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """In place; also an entry of a list or a row of modules."""
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)

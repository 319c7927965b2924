"""Which modules of a model are its blocks: what is sharded, checkpointed or placed as one."""

from collections.abc import Callable, Sequence

from torch import nn

from lockstep.errors import UserError

CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
ShardBy = Callable[[nn.Module], bool] | type[nn.Module] | Sequence[type[nn.Module]]


def blocks_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(name, module) of everything with parameters that stands in a list or a row of modules: a GPT's blocks, a
    ResNet's, an MLP's layers. What a block itself is made of is part of it.
    """
    found: dict[nn.Module, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, CONTAINERS) and not any(_is_inside(name, block) for block in found.values()):
            prefix = f"{name}." if name else ""
            for key, child in module.named_children():
                if not isinstance(child, CONTAINERS) and any(True for _ in child.parameters()):
                    found.setdefault(child, prefix + key)
    return [(name, module) for module, name in found.items()]


def _is_inside(name: str, block: str) -> bool:
    return name.startswith(f"{block}.")


def chosen_blocks(model: nn.Module, shard: ShardBy | None) -> list[tuple[str, nn.Module]]:
    """By class, by a predicate, or by default the model's blocks. The model itself may be one of them."""
    if shard is None:
        return blocks_of(model)
    if isinstance(shard, type):
        shard = (shard,)
    if isinstance(shard, Sequence):
        classes = tuple(shard)
        found = [(name, m) for name, m in model.named_modules() if isinstance(m, classes)]
        if not found:
            wanted = ", ".join(c.__name__ for c in classes)
            there = ", ".join(sorted({type(m).__name__ for m in model.modules()}))
            raise UserError(f"shard is {wanted}, but the model has no such module; it has {there}")
        return found
    return [(name, m) for name, m in model.named_modules() if shard(m)]

"""Which modules of a model are its blocks: what is sharded, checkpointed or placed as one."""

from collections.abc import Callable, Iterator, Sequence

from torch import nn

from lockstep.errors import UserError

CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
ShardBy = Callable[[nn.Module], bool] | type[nn.Module] | Sequence[type[nn.Module]]


def blocks_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(name, module) of everything with parameters that stands in a list or a row of modules: a GPT's blocks, a
    ResNet's, an MLP's layers.
    """
    found = []
    for name, module in model.named_modules():
        if isinstance(module, CONTAINERS):
            prefix = f"{name}." if name else ""
            for key, child in module.named_children():
                if not isinstance(child, CONTAINERS) and any(True for _ in child.parameters()):
                    found.append((prefix + key, child))
    return list(_without_repeats(found))


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


def _without_repeats(found: list[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
    seen: set[nn.Module] = set()
    for name, module in found:
        if module not in seen:
            seen.add(module)
            yield name, module

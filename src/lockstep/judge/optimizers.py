"""Optimizers, as the watcher sees them: torch's, our `ShardedOptimizer`, DeepSpeed's."""

import sys
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer

from lockstep.judge import deepspeed
from lockstep.judge.holding import plain_piece
from lockstep.judge.piece import Piece


def groups_of(optimizer: Any) -> dict[int, int]:
    """Parameter -> its group's number."""
    if not isinstance(optimizer, Optimizer):
        return deepspeed.groups_of(optimizer)
    return {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}


def outside(optimizer: Any, held: set[int]) -> list[Piece]:
    """Its parameters that are in no module, by their number."""
    if not isinstance(optimizer, Optimizer):
        return []
    strays = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in held]
    return [plain_piece(f"optimizer.{i}", parameter) for i, parameter in enumerate(strays)]


def gives_gradients_late(optimizer: Any) -> bool:
    """Our `ShardedOptimizer`: the one that it has inside gets its gradients only when it steps."""
    ours = sys.modules.get("lockstep.parallel.zero.sharded_optimizer")
    return ours is not None and isinstance(optimizer, ours.ShardedOptimizer)


def settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """Of a group of parameters, what a line of JSON can say."""
    found: dict[str, Any] = {}
    for key, value in group.items():
        if key != "params" and isinstance(value, Tensor) and value.numel() == 1:
            found[key] = float(value)
        elif key != "params" and isinstance(value, int | float | str | bool | tuple | list | None):
            found[key] = value
    return found


def whole_number(norm: Any) -> float:
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

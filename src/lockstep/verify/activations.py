"""What a model's modules give in forward, on both sides: when the loss differs, the first one that differs is named."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.comm.collectives import all_gather_objects
from lockstep.models.blocks import blocks_of
from lockstep.parallel.context.context_parallel import shard_sequence
from lockstep.strategies import ParallelModel


class Activations:
    """Inside, the outputs of the model's direct children and of its blocks are kept, in the order of forward."""

    def __init__(self, model: nn.Module) -> None:
        self.outputs: dict[str, list[Tensor]] = {}
        named = {**dict(model.named_children()), **dict(blocks_of(model))}
        self._hooks = [module.register_forward_hook(self._keep(name)) for name, module in named.items()]

    def _keep(self, name: str) -> Callable[..., None]:
        def keep(_: nn.Module, __: Any, output: Any) -> None:
            if type(output) is Tensor and output.dim():  # a DTensor, or a number, has no rows to compare
                self.outputs.setdefault(name, []).append(output.detach().clone())

        return keep

    def whole(self) -> dict[str, Tensor]:
        """Of a forward pass in one piece."""
        return {name: outputs[0] for name, outputs in self.outputs.items() if len(outputs) == 1}

    def __enter__(self) -> "Activations":
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()


def first_that_differs(
    strategy: ParallelModel, mine: dict[str, list[Tensor]], theirs: dict[str, Tensor], tolerance: float
) -> str:
    """ ", first in blocks.1 on rank 2", or nothing where no module can be compared. Every rank must ask together."""
    share, cp, tp = strategy.batch_share(), strategy.layout.group("cp"), strategy.layout.group("tp")
    worst: list[tuple[int, int, str]] = []
    for order, (name, expected) in enumerate(theirs.items()):
        if name not in mine:
            continue
        rows = share.rows_or_filler(len(expected))[0]
        expected = expected[rows]
        if cp.size > 1 and expected.dim() > 2:
            expected = shard_sequence(expected, 1, cp)
        if strategy.parallel.sequence and expected.dim() > 2:
            expected = expected.chunk(tp.size, 1)[tp.rank]
        got = torch.cat(mine[name][: micro_batches(mine[name], len(expected))])
        if got.shape == expected.shape and float((got - expected).abs().max()) > tolerance * float(expected.norm()):
            worst.append((order, strategy.world.rank, name))
            break
    found = [first for ranks in all_gather_objects(worst) for first in ranks]
    return f", first in the output of {min(found)[2]} on rank {min(found)[1]}" if found else ""


def micro_batches(outputs: list[Tensor], rows: int) -> int:
    """How many of the outputs, one of each micro-batch, make so many rows; what follows is recomputed."""
    total = 0
    for count, output in enumerate(outputs, 1):
        total += len(output)
        if total >= rows:
            return count
    return len(outputs)

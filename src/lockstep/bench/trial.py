"""One collective at one size: its buffers, how to perform it, and whether it gave what arithmetic says."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.algorithms import ALGORITHMS, ring_all_gather, ring_reduce_scatter, tree_broadcast
from lockstep.comm.by_hand import all_reduce_over
from lockstep.comm.collectives import all_gather_single, reduce_scatter_single
from lockstep.comm.reduction import reduction
from lockstep.comm.wire import Wire
from lockstep.layout.world import World

DTYPES = {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
}
OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "prod": dist.ReduceOp.PRODUCT,
}
REDUCING = ("all_reduce", "reduce_scatter", "reduce")
COLLECTIVES = (
    *("all_reduce", "all_gather", "reduce_scatter", "all_to_all"),
    *("broadcast", "reduce", "gather", "scatter", "send_recv"),
)
BY_HAND = {  # besides native
    "all_reduce": (*ALGORITHMS, "auto"),
    "reduce_scatter": ("ring",),
    "all_gather": ("ring",),
    "broadcast": ("tree",),
}


@dataclass(frozen=True)
class Sweep:
    """What to measure at each size."""

    sizes: tuple[int, ...]
    iterations: int = 20
    warmup: int = 5
    check: bool = True
    dtype: str = "float"
    op: str = "sum"
    delay: float = 0.0
    """Seconds by which the wire delays every message of the algorithms by hand: a check of the benchmark itself."""


@dataclass(frozen=True)
class Candidate:
    """Who performs a collective."""

    backend: str
    algorithm: str = "native"

    @property
    def name(self) -> str:
        return self.backend if self.algorithm == "native" else f"{self.backend} {self.algorithm}"


class Trial:
    """The buffers of one collective at one size, how to perform it, and what it should give."""

    def __init__(
        self,
        collective: str,
        world: World,
        nbytes: int,
        sweep: Sweep,
        candidate: Candidate,
        group: dist.ProcessGroup | None,
    ):
        self.collective, self.sweep, self.candidate, self.group = collective, sweep, candidate, group
        self.rank, self.size = world.rank, world.size
        dtype = DTYPES[sweep.dtype]
        in_parts = collective in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
        parts = self.size if in_parts else 1
        self.part = max(1, nbytes // dtype.itemsize // parts)
        self.count = self.part * parts
        self.input = torch.empty(self.count, dtype=dtype, device=world.device)
        self.output = torch.empty(self.count, dtype=dtype, device=world.device)
        self.wire = Wire(group, delay=sweep.delay)
        self.op = OPS[sweep.op]
        self.input.zero_()
        self.output.zero_()
        native = candidate.algorithm == "native"
        self.run = self._native() if native else self._by_hand(candidate.algorithm)
        """Performs it once; synchronous (on a GPU: to the stream)."""

    def _native(self) -> Callable[[], object]:
        """All but the collective itself is done here, out of the timed part."""
        whole, out, op, group = self.input, self.output, self.op, self.group
        inputs, outputs, first = list(whole.split(self.part)), list(out.split(self.part)), out[: self.part]
        mine, is_root = inputs[self.rank % len(inputs)], self.rank == 0
        right, left = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        table: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: dist.all_reduce(whole, op=op, group=group),
            "all_gather": lambda: all_gather_single(out, mine, group=group),
            "reduce_scatter": lambda: reduce_scatter_single(first, whole, op=op, group=group),
            "all_to_all": lambda: dist.all_to_all_single(out, whole, group=group),
            "broadcast": lambda: dist.broadcast(whole, group_src=0, group=group),
            "reduce": lambda: dist.reduce(whole, group_dst=0, op=op, group=group),
            "gather": lambda: dist.gather(mine, outputs if is_root else None, group_dst=0, group=group),
            "scatter": lambda: dist.scatter(first, inputs if is_root else None, group_src=0, group=group),
            "send_recv": lambda: self.wire.exchange([(whole, right)], [(out, left)]).wait(),
        }
        return table[self.collective]

    def _by_hand(self, algorithm: str) -> Callable[[], object]:
        inputs, outputs = self.input.split(self.part), self.output.split(self.part)
        combine, average = reduction(self.op, self.input.dtype)

        def reduce_scatter() -> None:
            outputs[0].copy_(ring_reduce_scatter(self.wire, inputs, combine))
            if average:
                outputs[0].div_(self.size)

        def all_gather() -> None:
            outputs[self.rank].copy_(inputs[self.rank])
            ring_all_gather(self.wire, outputs)

        table: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: all_reduce_over(self.wire, self.input, algorithm, self.op),
            "reduce_scatter": reduce_scatter,
            "all_gather": all_gather,
            "broadcast": lambda: tree_broadcast(self.wire, self.input),
        }
        return table[self.collective]

    # ---- is it right?

    def wrong(self) -> int:
        """Elements on this rank that differ from what arithmetic says, after one untimed run on known numbers.

        The numbers are so small that every sum is exact in every dtype and in every order.
        """
        self.input.copy_(self._numbers(self.rank))
        self.output.zero_()
        self.run()
        got, expected = self._expected()
        differ = int((got != expected).sum()) if got is not None else 0
        self.input.zero_()
        return differ

    def _numbers(self, rank: int) -> Tensor:
        """1 or 2 in every place, depending on the rank."""
        return ((torch.arange(self.count, device=self.input.device) + rank) % 2 + 1).to(self.input.dtype)

    def _reduced(self) -> Tensor:
        """The reduction of all ranks' numbers, which take two values only: exact in float64, whatever the op."""
        everyone = torch.stack([self._numbers(r)[:2].double() for r in range(self.size)])
        match self.sweep.op:
            case "sum":
                pattern = everyone.sum(0)
            case "avg":
                pattern = everyone.mean(0)
            case "prod":
                pattern = everyone.prod(0)
            case "max":
                pattern = everyone.amax(0)
            case _:
                pattern = everyone.amin(0)
        repeats = -(-self.count // len(pattern))
        return pattern.repeat(repeats)[: self.count].to(self.input.dtype)

    def _expected(self) -> tuple[Tensor | None, Tensor]:
        """(what came out, what should have); None where this rank gets nothing."""
        part, mine = self.part, slice(self.rank * self.part, (self.rank + 1) * self.part)
        match self.collective:
            case "all_reduce":
                return self.input, self._reduced()
            case "reduce":
                return (self.input if self.rank == 0 else None), self._reduced()
            case "reduce_scatter":
                return self.output[:part], self._reduced()[mine]
            case "broadcast":
                return self.input, self._numbers(0)
            case "all_gather" | "gather":
                whole = torch.cat([self._numbers(r)[r * part : (r + 1) * part] for r in range(self.size)])
                return (self.output if self.collective == "all_gather" or self.rank == 0 else None), whole
            case "scatter":
                return self.output[:part], self._numbers(0)[mine]
            case "all_to_all":
                return self.output, torch.cat([self._numbers(r)[mine] for r in range(self.size)])
            case _:
                return self.output, self._numbers((self.rank - 1) % self.size)

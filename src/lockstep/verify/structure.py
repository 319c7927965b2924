"""Does a step cost what it should? The order of things, without a clock: from the ledger, and from what is alive when.

Ranks of a laptop say nothing about seconds, but all about order. A program issues and waits for its collectives in an
order that is the same in every run, so that these are laws and not measurements:

    gradients    half of them are issued before backward reaches the first block, and none is waited for where it is
                 issued: a hook that waits hides nothing
    parameters   what a step leaves in flight is waited for by the block that needs it, not before; the next block's
                 all-gather is issued while this one computes, in forward and in backward
    memory       at most `prefetch` + 1 blocks are gathered at once, none after the step; gradients, and the buffers
                 that they are reduced in, are no more than this rank's share and two buckets
    tensor       a sum that travels in backward has a product to hide behind
    recompute    what lies inside a block is not alive after its forward
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from lockstep.comm.ledger import Entry
from lockstep.intervals import covered
from lockstep.layout.region import local
from lockstep.models.blocks import blocks_of
from lockstep.parallel.data.law import FIRST_BUCKET_SHARE, buckets_by_kind
from lockstep.parallel.zero.law import gathers, padded
from lockstep.strategies import ParallelModel
from lockstep.strategies.model_sizes import copies_of
from lockstep.verify.cost import Cost

PRODUCTS = ("mm", "addmm", "bmm")


class Products(TorchDispatchMode):
    """Notes when matrix products are computed, in backward too."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket.__name__ in PRODUCTS:
            self.times.append(time.perf_counter())
        return function(*args, **(kwargs or {}))

    def between(self, start: float, end: float) -> int:
        return sum(start < at < end for at in self.times)


def alive(memory: list[StorageWeakRef]) -> int:
    """How many of these have not been released."""
    return sum(not ref.expired() for ref in memory)


@dataclass
class Passage:
    """When a step went through one block, and what was gathered of other ranks' parameters then."""

    name: str
    begins: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    backward_begins: list[float] = field(default_factory=list)
    gathered: list[int] = field(default_factory=list)
    inside: list[int] = field(default_factory=list)
    """Tensors that modules inside it gave which are alive when its forward ends."""


class Watch:
    """Hooks on the blocks of a model, for one step."""

    def __init__(self, strategy: ParallelModel) -> None:
        self.engine = strategy.engine
        self.passages = {module: Passage(name) for name, module in blocks_of(strategy.model)}
        self.after_forward: list[int] = []
        """Bytes that were gathered when the last block's forward was over."""
        self._hooks: list[Any] = []
        self._inner: dict[nn.Module, list[StorageWeakRef]] = {}
        for module in self.passages:
            self._hooks.append(module.register_forward_pre_hook(self._began))
            self._hooks.append(module.register_forward_hook(self._ended))
            for part in (p for p in module.modules() if p is not module and isinstance(p, nn.Linear)):
                self._hooks.append(part.register_forward_hook(self._note_inner(module)))

    def _note_inner(self, block: nn.Module) -> Any:
        def note(_: nn.Module, __: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                self._inner.setdefault(block, []).append(StorageWeakRef(output.untyped_storage()))

        return note

    def _began(self, module: nn.Module, _: Any) -> None:
        passage = self.passages[module]
        passage.begins.append(time.perf_counter())
        passage.gathered.append(self.engine.gathered_bytes())

    def _ended(self, module: nn.Module, _: Any, outputs: Any) -> None:
        passage = self.passages[module]
        passage.ends.append(time.perf_counter())
        passage.inside.append(alive(self._inner.pop(module, [])))
        if module is list(self.passages)[-1]:
            self.after_forward.append(self.engine.gathered_bytes())

        def backward_began(_: Tensor) -> None:
            passage.backward_begins.append(time.perf_counter())
            passage.gathered.append(self.engine.gathered_bytes())

        for value in tree_flatten(outputs)[0]:
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(backward_began)

    @contextmanager
    def watching(self) -> Iterator["Watch"]:
        try:
            yield self
        finally:
            for hook in self._hooks:
                hook.remove()


def check_structure(strategy: ParallelModel, batches: list[Any], cost: Cost) -> list[str]:
    """Take steps with `batches`, this rank's shares; returns the laws that the last one has broken, on this rank, and
    writes down what it cost.
    """
    *before, last = batches
    for batch in before:
        strategy.step(batch)
    in_flight = [e for e in strategy.ledger.entries if e.awaited_later and e.purpose == "parameters"]
    left = sum(entry.wait_started is None for entry in in_flight)
    watch, products = Watch(strategy), Products()
    with watch.watching(), products:
        strategy.step(last)
    blocks = [p for p in watch.passages.values() if p.begins]
    if len(blocks) < 3:
        return []
    broken = [*_parameters_in_flight(strategy, in_flight, left, blocks)]
    broken += _gradients(strategy, blocks, cost)
    broken += gather_laws(strategy, watch, cost)
    broken += _tensor(strategy, products, blocks)
    broken += _memory(strategy)
    if strategy.options.recompute == "full" and any(p.inside and p.inside[0] for p in blocks):
        kept = next(p for p in blocks if p.inside and p.inside[0])
        broken.append(f"recompute: {kept.inside[0]} tensors inside {kept.name} are alive after its forward")
    return broken


def _waits(entry: Entry) -> float:
    return entry.wait_started if isinstance(entry.wait_started, float) else float("inf")


def _gradients(strategy: ParallelModel, blocks: list[Passage], cost: Cost) -> Iterator[str]:
    facts = type(strategy.engine).facts(strategy.parallel)
    entries = [e for e in strategy.ledger.of("gradients") if e.axis not in ("tp", "pp")]
    if not facts.overlaps or len(entries) < 3 or strategy.layout.degrees.pp > 1 or not blocks[0].backward_begins:
        return
    reached = blocks[0].backward_begins[-1]
    early = [e for e in entries if isinstance(e.issued, float) and e.issued < reached]
    cost.early = (len(early), len(entries))
    if 2 * len(early) < len(entries):
        yield (
            f"overlap: {len(early)} of {len(entries)} reductions of gradients were issued before backward reached "
            f"{blocks[0].name}"
        )
    for number, (entry, following) in enumerate(pairwise(entries if not strategy.engine.waits_in_backward else [])):
        if isinstance(following.issued, float) and _waits(entry) < min(following.issued, reached):
            what = entry.subject or f"number {number}"
            yield f"overlap: the {entry.operation} of {what} is waited for before the next one is issued"
            return


def _parameters_in_flight(
    strategy: ParallelModel, gathers: list[Entry], left: int, blocks: list[Passage]
) -> Iterator[str]:
    """`left`: of the `gathers`, how many were in flight when their step ended."""
    if not strategy.engine.leaves_in_flight or strategy.layout.gradient.size == 1:
        return
    if not gathers or left < len(gathers):
        yield f"overlap: {left} of {len(gathers)} all-gathers of parameters are in flight when the step ends"
        return
    named = dict(strategy.model.named_modules())
    for block in blocks:
        needed = strategy.engine.gathers_for(named[block.name])
        late = [e.subject for e in gathers if e.subject in needed and _waits(e) > block.begins[0]]
        if late:
            yield f"wait: {block.name} begins while {late[0]}, with parameters of its own, is in flight"
            return
    before = sum(_waits(entry) < blocks[0].begins[0] for entry in gathers)
    if len(gathers) > 2 and before == len(gathers):
        yield f"overlap: all {before} all-gathers of parameters are waited for before {blocks[0].name} begins"


def gather_laws(strategy: ParallelModel, watch: Watch, cost: Cost) -> Iterator[str]:
    """Those that a step has broken: the next block is gathered ahead, and no more than needed is unsharded."""
    engine, parallel = strategy.engine, strategy.parallel
    blocks = [p for p in watch.passages.values() if p.begins]
    if not engine.gathers_ahead or strategy.layout.gradient.size == 1:
        return
    entries = [e for e in strategy.ledger.of("parameters") if e.operation == "all_gather"]
    for block, following in pairwise(blocks):
        if not any(e.subject == following.name and e.issued < block.ends[0] for e in entries):  # type: ignore[operator]
            yield f"prefetch: {following.name} is not being gathered when the forward of {block.name} ends"
            return
    twice = gathers(3, parallel.pp > 1, parallel.sharding == "FULL_SHARD") == 2
    for following, block in pairwise(blocks) if twice else ():
        issued = [e for e in entries if e.subject == following.name and e.issued > block.ends[0]]  # type: ignore[operator]
        reduced = [e.issued for e in strategy.ledger.of("gradients") if e.subject == block.name]
        if issued and reduced and issued[0].issued > reduced[0]:  # type: ignore[operator]
            yield f"prefetch: {following.name} is not being gathered while {block.name} computes its backward"
            return
    outside, sizes = engine.gathered_sizes()
    most = outside + (parallel.prefetch + 1) * max(sizes) if twice else outside + sum(sizes)
    largest, where = max((max(p.gathered), p.name) for p in blocks)
    cost.gathered = (largest, most)
    if largest > most:
        yield f"memory: {largest:,} bytes of parameters are gathered at {where}, and at most {most:,} by the law"
    if twice and max(watch.after_forward) > outside + max(sizes):
        yield f"memory: {max(watch.after_forward):,} bytes of parameters are still gathered after forward"
    strategy.settle()
    if engine.gathered_bytes():
        yield f"memory: {engine.gathered_bytes():,} bytes of parameters are still gathered after the step"


def _tensor(strategy: ParallelModel, products: Products, blocks: list[Passage]) -> Iterator[str]:
    """Most sums of backward hide behind the product of a weight's gradient."""
    if strategy.layout.degrees.tp == 1 or "tp" in strategy.parallel.native or strategy.layout.degrees.pp > 1:
        return
    begun = min(p.backward_begins[-1] for p in blocks)
    entries = [e for e in strategy.ledger.of("activations") if e.axis == "tp" and e.issued > begun]  # type: ignore[operator]
    hidden = sum(products.between(e.issued, _waits(e)) > 0 for e in entries)  # type: ignore[arg-type]
    wanted = len(entries) // 3
    if entries and hidden < max(1, wanted):
        yield f"overlap of tp: {hidden} of {len(entries)} sums in backward have a product to hide behind"


def _memory(strategy: ParallelModel) -> Iterator[str]:
    """Of gradients that are sharded, where parameters are not: this rank's share, and two buckets in flight."""
    engine, parallel, n = strategy.engine, strategy.parallel, strategy.layout.gradient.size
    whole_parameters, whole_gradients, _ = (not divided for divided in type(engine).facts(parallel).divides)
    trained = engine.trainable()
    if n == 1 or whole_gradients or not whole_parameters or not trained:
        return
    itemsize = trained[0].element_size()
    sizes = [(p.numel(), copies_of(p) or n) for p in trained]
    most = 0.0
    for copies, buckets in buckets_by_kind(sizes, itemsize, parallel.bucket_mb, FIRST_BUCKET_SHARE).items():
        rows = [padded(bucket, itemsize, copies) * itemsize for bucket in buckets]
        most += sum(rows) / copies + sum(sorted(rows)[-2:])
    held = [t for t in map(local, [*engine.gradient_memory(), *engine.gradient_buffers()]) if t.numel()]
    places = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in held]
    if covered(places) > most:
        yield f"memory: {covered(places):,.0f} bytes of gradients are held, and at most {most:,.0f} by the law"

"""Does a pipeline do what its schedule's name promises? The order that is really executed, its bubble, what it holds.

What a schedule promises stands in `parallel/pipeline/law.py`. Gradients are reduced over the data axes while the last
pass still computes: half of the reductions are issued before it has ended.
"""

import time
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lockstep.comm.collectives import all_gather_objects
from lockstep.models.blocks import blocks_of
from lockstep.parallel.pipeline import law
from lockstep.parallel.pipeline.schedule import PASSES, Instruction
from lockstep.parallel.pipeline.timetable import Costs, most_held, timetable
from lockstep.parallel.tensor.parallel_linear import ColumnParallelLinear, RowParallelLinear
from lockstep.strategies import ParallelModel
from lockstep.strategies.pipeline import PipelineWorker
from lockstep.verify.cost import Cost
from lockstep.verify.structure import Products, Watch, alive, gather_laws

LINEAR = (nn.Linear, ColumnParallelLinear, RowParallelLinear)
MESSAGES_IN_FLIGHT = 2
"""Sent activations that a rank may hold: the one that is being sent, and the one before it."""


class Executed:
    """Inside, what a worker carries out is written down, and which activations are alive after each instruction."""

    def __init__(self, worker: PipelineWorker) -> None:
        self.passes, self.instructions = worker.passes, list[Instruction]()
        self.sent_alive = self.kept_by_weights = self.products_of_weights = self.alive_after_forward = 0
        self.products = Products()
        blocks = blocks_of(worker.stage)
        self._last: list[StorageWeakRef] = []
        """Outputs of this rank's last block, which are sent."""
        self._inner: dict[tuple[int, int], list[StorageWeakRef]] = {}
        """What only an activation function needs: the widening layers' outputs, by (micro-batch, chunk)."""
        self._current = (0, 0)
        self.passes_ended = 0.0
        """When the last pass had ended, by the host's clock."""
        ups = [part for _, block in blocks for name, part in block.named_modules() if name.endswith("up")]
        self._hooks = [part.register_forward_hook(self._note_inner) for part in ups]
        if blocks and worker.group.rank < worker.group.size - 1 and worker.placement.chunks == 1:
            self._hooks.append(blocks[-1][1].register_forward_hook(self._note_last))

    def _note_last(self, _: nn.Module, __: Any, output: Tensor) -> None:
        self._last.append(StorageWeakRef(output.untyped_storage()))

    def _note_inner(self, _: nn.Module, __: Any, output: Any) -> None:
        self._inner.setdefault(self._current, []).append(StorageWeakRef(output.untyped_storage()))

    def __enter__(self) -> "Executed":
        plain = self.passes.carry_out

        def noting(instruction: Instruction) -> None:
            self._current = (instruction.micro_batch, instruction.chunk)
            before = len(self.products.times)
            plain(instruction)
            self.instructions.append(instruction)
            if instruction.kind in PASSES:
                self.passes_ended = time.perf_counter()
            if instruction.kind == "forward":
                self.alive_after_forward += alive(self._inner.get(self._current, []))
            if instruction.kind == "send_activation":
                self.sent_alive = max(self.sent_alive, alive(self._last))
            if instruction.kind == "backward_input":
                self.kept_by_weights += alive(self._inner.pop(self._current, []))
            if instruction.kind == "backward_weight":
                self.products_of_weights += len(self.products.times) - before

        self.passes.carry_out = noting  # type: ignore[method-assign]
        self.products.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.products.__exit__(*error)
        del self.passes.carry_out  # the class's own again
        for hook in self._hooks:
            hook.remove()


def check_pipeline(strategy: ParallelModel, batches: list[Any], cost: Cost) -> list[str]:
    """Take steps; returns the laws that the last one has broken, on this rank, and writes down what it cost. Every rank
    must ask together.
    """
    worker, parallel = strategy.worker, strategy.parallel
    if not isinstance(worker, PipelineWorker):
        return []
    *before, last = batches
    for batch in before:
        strategy.step(batch)
    watch = Watch(strategy)
    with Executed(worker) as executed, watch.watching():
        strategy.step(last)
    group, placement = worker.group, worker.placement
    everyone: list[list[Instruction]] = all_gather_objects(executed.instructions, group)
    p, m = group.size, worker.micro_batches
    idle = law.idle(parallel.schedule, p, m, placement.chunks)
    most = law.held(parallel.schedule, p, m, placement.chunks, group.rank)
    table = timetable(everyone, placement, Costs(1.0, 1.0, 1.0))
    held = most_held(executed.instructions, placement)
    cost.idle, cost.micro_batches = (table.idle(group.rank), idle), (held, most)
    broken = []
    if table.idle(group.rank) > idle + 1e-9:
        broken.append(
            f"schedule: this stage stands idle for {table.idle(group.rank):g}, and {parallel.schedule} for {idle:g}"
        )
    if held > most + 1e-9:
        broken.append(f"schedule: {held:g} micro-batches are held at once, and {parallel.schedule} holds {most:g}")
    if executed.sent_alive > MESSAGES_IN_FLIGHT:
        broken.append(f"memory: {executed.sent_alive} activations are alive that have been sent")
    if executed.kept_by_weights:
        broken.append(
            f"memory: {executed.kept_by_weights} activations are kept for the weights' pass that it does not need"
        )
    if strategy.options.recompute == "full" and executed.alive_after_forward:
        count = executed.alive_after_forward
        broken.append(f"recompute: {count} tensors inside blocks are alive after their forward")
    layers = sum(isinstance(part, LINEAR) for _, block in blocks_of(worker.stage) for part in block.modules())
    splits = parallel.schedule.startswith("zb-") and strategy.options.recompute == "none"
    if splits and executed.products_of_weights < layers * m:
        broken.append(
            f"schedule: the weights' passes compute {executed.products_of_weights} products, and the {layers} linear "
            f"layers of {m} micro-batches have {layers * m}"
        )
    return [*broken, *_reductions(strategy, executed, cost), *gather_laws(strategy, watch, cost)]


def _reductions(strategy: ParallelModel, executed: Executed, cost: Cost) -> Iterator[str]:
    engine, parallel = strategy.engine, strategy.parallel
    in_one_pass = strategy.worker.placement.chunks == 1 and not parallel.schedule.startswith("zb-")  # type: ignore
    entries = [e for e in strategy.ledger.of("gradients") if e.axis not in ("tp", "pp")]
    if not type(engine).facts(parallel).overlaps or len(entries) < 3 or not (engine.reduces_by_chunk or in_one_pass):
        return
    early = sum(isinstance(e.issued, float) and e.issued < executed.passes_ended for e in entries)
    cost.early = (early, len(entries))
    if 2 * early < len(entries):
        yield f"overlap: {early} of {len(entries)} reductions of gradients were issued before the last pass had ended"

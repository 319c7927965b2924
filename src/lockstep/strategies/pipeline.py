"""Pipeline parallelism as an axis of a strategy: the worker that executes a schedule with a data engine.

Every rank of a pipeline reads the same samples, and runs its own layers on them, micro-batch by micro-batch. Gradients
accumulate until the last pass of a chunk, and are reduced over the data axes while that pass still computes. A weight
that two stages have (a tied embedding) gets the sum of both: before that reduction, or after it where the engine
reduces all of its gradients in the last pass (`sums_tied_last`).
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.comm.collectives import all_reduce_async
from lockstep.config import Parallel
from lockstep.data import Batch
from lockstep.layout import Layout
from lockstep.parallel.pipeline.messages import Post
from lockstep.parallel.pipeline.passes import Passes
from lockstep.parallel.pipeline.schedule import Instruction, Placement, forward_only, pipeline_schedule, placement_of
from lockstep.parallel.pipeline.stage import Stage, cut_stage, parameters_of
from lockstep.parallel.pipeline.tied import TiedGradients
from lockstep.strategies.engine import Engine
from lockstep.strategies.step import Cut
from lockstep.strategies.worker import Step, Worker


def micro_batches_of(parallel: Parallel, accumulation: int) -> int:
    """How many micro-batches a step has: as configured, else enough to keep the stages busy."""
    if parallel.micro_batches is not None:
        return parallel.micro_batches
    wanted = accumulation if accumulation > 1 else 2 * parallel.pp
    return -(-wanted // parallel.pp) * parallel.pp if parallel.schedule == "interleaved" else wanted


def placement_for(parallel: Parallel) -> Placement:
    return placement_of(parallel.schedule, parallel.pp, parallel.chunks)


def cut_into_stages(model: nn.Module, layout: Layout, parallel: Parallel) -> nn.Module:
    """This rank's layers of the model; the model itself where there is one stage."""
    group = layout.group("pp")
    if group.size == 1:
        return model
    return cut_stage(model, placement_for(parallel), group)


class PipelineWorker(Worker):
    """Carries out a pipeline's schedule."""

    def __init__(self, engine: Engine, cut: Cut) -> None:
        super().__init__(engine, cut)
        parallel, self.group = engine.parallel, self.layout.group("pp")
        assert isinstance(engine.model, Stage)
        self.stage: Stage = engine.model
        self.micro_batches = micro_batches_of(parallel, self.options.accumulation)
        self.placement = placement_for(parallel)
        lists = pipeline_schedule(parallel.schedule, parallel.pp, self.micro_batches, self.placement.chunks)
        self.instructions = lists[self.group.rank]
        post = Post(lists, self.placement, self.group, self.device)
        self.passes = Passes(engine.module, post, self.placement, self.group.rank)
        self.passes.splits_backward = parallel.schedule.startswith("zb-")
        self.tied = TiedGradients(self.stage, post, engine.accumulated_gradient)
        self._reducing = [instruction for instruction in self.instructions if instruction.reduces]
        evaluation = forward_only(self.placement)
        post_of_evaluation = Post(evaluation, self.placement, self.group, self.device, post.towards)
        self._evaluation = evaluation[self.group.rank]
        self._forwards = Passes(engine.module, post_of_evaluation, self.placement, self.group.rank)

    @property
    def has_loss(self) -> bool:
        """The last part of the model is on this rank."""
        return self.placement.place(self.placement.parts - 1)[0] == self.group.rank

    @property
    def knows_counts(self) -> bool:
        return super().knows_counts and self.has_loss

    def _micro_batches(self, batch: Batch) -> list[Batch]:
        return batch.micro_batches(self.micro_batches)

    def _loss_of(self, outputs: Tensor, i: int, step: Step) -> Tensor:
        """The loss that a micro-batch's backward starts from, on the rank that has the last part."""
        batch = step.micro_batches[i]
        with self.precision():
            loss_sum, correct = self.measure(outputs, batch.targets)
        if not batch.filler:
            step.totals.sums += torch.stack((loss_sum.detach().double(), correct.double()))
        step.counting.wait()
        return self._weighted(loss_sum, batch, step.totals.counts[0])

    def _begin(self, batch: Batch, reduces: bool = True) -> Step:
        step = super()._begin(batch, reduces)
        batches = step.micro_batches
        shapes = tuple(tuple(b.inputs.shape) for b in batches)
        loss = partial(self._loss_of, step=step)
        self.passes.begin(shapes, lambda i: batches[i].inputs, loss, partial(self._around_pass, step=step))
        return step

    def _before_passes(self, step: Step) -> None:
        self.engine.begin_passes()
        super()._before_passes(step)

    def _forwards_alone(self, step: Step) -> Iterator[Any]:
        """All stages, one after the other; what is gathered stays for the passes of the step."""
        for micro_batch in step.micro_batches:
            with self.balance.uncounted(micro_batch.filler), self.precision():
                yield self._forward_alone(micro_batch.inputs)

    def _carry_out(self, instruction: Instruction, step: Step) -> None:
        """Passes and messages here, reduce and step as without a pipeline."""
        if instruction.kind in ("reduce", "step"):
            super()._carry_out(instruction, step)
        else:
            self.passes.carry_out(instruction)

    def _around_pass(self, instruction: Instruction, step: Step) -> AbstractContextManager[Any]:
        stack = ExitStack()
        stack.enter_context(self.phases("forward" if instruction.kind == "forward" else "backward"))
        if instruction.reduces and (step.reduces or not self.engine.shows_local_gradients):
            if instruction is self._reducing[-1] and not self.engine.sums_tied_last:
                self.tied.receive()
            complete = self._completed_by(instruction)
            pending = None if instruction.kind == "backward" else complete & self.passes.deferred(instruction)
            stack.enter_context(self.engine.reduce_in_backward(complete, pending))
        else:
            stack.enter_context(self.engine.accumulate())
        if instruction.kind == "forward":
            stack.enter_context(self.precision())
        filler = step.micro_batches[instruction.micro_batch].filler
        stack.enter_context(self.balance.uncounted(filler))
        if filler:  # it leaves running statistics alone, also recomputed
            self.stage.eval()
            stack.callback(self.stage.train)
        return stack

    def _completed_by(self, instruction: Instruction) -> set[Tensor]:
        """Parameters whose gradients no later pass adds to. Tied ones wait for the other stages', unless those are
        added last.
        """
        later = [i.chunk for i in self._reducing[self._reducing.index(instruction) + 1 :]]
        found = set(parameters_of(self.stage, self.stage.layers[instruction.chunk]))
        for chunk in later:
            found -= set(parameters_of(self.stage, self.stage.layers[chunk]))
        if not self.engine.sums_tied_last:
            found -= {parameter for _, parameter in self.tied.parameters()}
        return {parameter for parameter in found if parameter.requires_grad}

    def _end_passes(self, step: Step) -> None:
        self.passes.end()
        totals = step.totals
        totals.local_loss = totals.sums[0].clone()
        if step.reduces:
            totals.pending = all_reduce_async(totals.sums, group=self.layout.loss, purpose="loss")

    def _reduce(self) -> None:
        if self.engine.sums_tied_last:
            self.engine.reduce_rest()
        self.tied.receive()
        self.tied.send()
        self.tied.add()
        if not self.engine.sums_tied_last:
            self.engine.reduce_rest()

    def predict(self, inputs: Tensor) -> Tensor | None:
        outputs = self._forward_alone(inputs)
        self.engine.release()
        return outputs

    def _forward_alone(self, inputs: Tensor) -> Tensor | None:
        """All stages, one after the other."""
        found: list[Tensor] = []

        def keep(outputs: Tensor, _: int) -> Tensor:
            found.append(outputs)
            return outputs

        self._forwards.begin(tuple(inputs.shape), lambda _: inputs, keep)
        for instruction in self._evaluation:
            self._forwards.carry_out(instruction)
        self._forwards.forget()
        return found[0] if found else None

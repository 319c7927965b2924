"""Pipeline parallelism as an axis of a strategy: the worker that executes a schedule with a data engine.

Every rank of a pipeline reads the same samples, and runs its own layers on them, micro-batch by micro-batch. Gradients
are kept where they are until the last pass: then a weight that two stages have (a tied embedding) gets the sum of both,
and the engine lets gradients meet over the data axes.
"""

from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.comm.collectives import all_reduce_async
from lockstep.comm.ledger import recording
from lockstep.config import Parallel
from lockstep.data import Batch
from lockstep.layout import Layout
from lockstep.layout.region import local
from lockstep.parallel.messages import Post, sum_among
from lockstep.parallel.passes import Passes
from lockstep.parallel.schedule import Instruction, Placement, forward_only, pipeline_schedule, placement_of
from lockstep.parallel.stage import Stage, broadcast_whole, cut_stage
from lockstep.strategies.engine import Engine
from lockstep.strategies.step import StepResult
from lockstep.strategies.worker import Step, Worker


def micro_batches_of(parallel: Parallel, accumulation: int) -> int:
    """How many a step has: as asked for, else so many that the stages have something to do."""
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
    broadcast_whole(model, layout.norm)
    return cut_stage(model, placement_for(parallel), group)


class PipelineWorker(Worker):
    """Carries out a pipeline's schedule."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
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
        looking = forward_only(self.placement)
        post_of_looks = Post(looking, self.placement, self.group, self.device, post.towards)
        self._looking = looking[self.group.rank]
        self._look = Passes(engine.module, post_of_looks, self.placement, self.group.rank)

    @property
    def has_loss(self) -> bool:
        """The last part of the model is on this rank."""
        return self.placement.place(self.placement.parts - 1)[0] == self.group.rank

    @property
    def tells_counts(self) -> bool:
        return super().tells_counts and self.has_loss

    def step(self, batch: Batch) -> StepResult:
        self.phases.spans = []
        self.ledger.open()
        with recording(self.ledger):
            step = self._begin(batch, self.engine.synchronize)
            self._carry_out_passes(step)
            for instruction in self.instructions[-2:]:
                match instruction.kind:
                    case "reduce":
                        totals = step.totals
                        totals.own_loss = totals.sums[0].clone()
                        totals.pending = all_reduce_async(totals.sums, group=self.layout.loss, purpose="loss")
                        with self.phases("backward"):
                            self._meet()
                    case "step":
                        self._update(step)
        assert step.norm is not None, "a schedule ends with a step"
        return StepResult(step.totals, step.norm, step.applied)

    def _micro_batches(self, batch: Batch) -> list[Batch]:
        return batch.micro_batches(self.micro_batches)

    def _loss_of(self, outputs: Tensor, i: int, step: Step) -> Tensor:
        """What backward of a micro-batch begins with, on the rank that has the last part."""
        batch = step.micro_batches[i]
        with self.precision():
            loss_sum, correct = self.measure(outputs, batch.targets)
        if not batch.filler:
            step.totals.sums += torch.stack((loss_sum.detach().double(), correct.double()))
        step.counting.wait()
        return self._weighted(loss_sum, batch, step.totals.counts[0])

    def _carry_out_passes(self, step: Step) -> None:
        """Forwards and backwards of all micro-batches, and the messages between them."""
        batches = step.micro_batches

        def around(instruction: Instruction) -> AbstractContextManager[Any]:
            stack = ExitStack()
            stack.enter_context(self.engine.accumulate())
            stack.enter_context(self.phases("forward" if instruction.kind == "forward" else "backward"))
            if instruction.kind == "forward":
                stack.enter_context(self.precision())
                if batches[instruction.micro_batch].filler:  # it leaves running statistics alone
                    self.stage.eval()
                    stack.callback(self.stage.train)
            return stack

        shapes = tuple(tuple(b.inputs.shape) for b in batches)
        loss = partial(self._loss_of, step=step)
        self.passes.begin(shapes, lambda i: batches[i].inputs, loss, around)
        for instruction in self.instructions[:-2]:  # then come reduce and step
            self.passes.carry_out(instruction)
        self.passes.end()

    def _meet(self) -> None:
        """Gradients of tied weights over the stages, then all over the data axes. An engine that has cut gradients up
        in backward (fsdp) has cut those of both stages alike.
        """
        if self.engine.keeps_whole_gradients:
            self._sum_shared()
            self.engine.meet_all()
        else:
            self.engine.meet_all()
            self._sum_shared()

    def _sum_shared(self) -> None:
        named = dict(self.stage.named_parameters())
        for name, ranks in self.stage.shared.items():
            parameter = named.get(name)
            if parameter is None or not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            mine = local(parameter.grad)
            mine.copy_(sum_among(mine, ranks, self.group))

    def predict(self, inputs: Tensor) -> Tensor | None:
        """All stages, one after the other."""
        found: list[Tensor] = []

        def keep(outputs: Tensor, _: int) -> Tensor:
            found.append(outputs)
            return outputs

        self._look.begin(tuple(inputs.shape), lambda _: inputs, keep)
        for instruction in self._looking:
            self._look.carry_out(instruction)
        self._look.forget()
        return found[0] if found else None

    def only_gradients(self, batch: Batch) -> Any:
        """As `step`, without reducing or stepping."""
        step = self._begin(batch, lambda _: self.engine.keep_own_gradients())
        self._carry_out_passes(step)
        step.totals.own_loss = step.totals.sums[0].clone()
        return step.totals

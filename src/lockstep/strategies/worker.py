"""The worker: executes a schedule's instructions over the micro-batches of one step.

The meaning of a step. The reference is one process that takes the whole global batch, the mean loss over all its
targets (samples, or tokens that are not padding), one backward, one clip, one optimizer step. Every engine at every
degree gives that loss, those gradients and those weights, also when shares and micro-batches differ in size. So
everything is weighted by counts, never by ranks: with C targets in the global batch and n ranks whose gradients are
reduced, each micro-batch's loss is its sum times n / C, and the mean over the ranks is the mean over the targets.

What is sent besides gradients and parameters: the counts (24 bytes, issued before forward, waited for before the first
backward), the loss (16 bytes, in flight during the last backward, waited for by the caller that reads it), and the
norm's squares (8 bytes) where ranks hold parts.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from lockstep.comm.collectives import all_gather_objects, all_reduce_async
from lockstep.comm.ledger import Ledger, recording
from lockstep.comm.pending import Pending
from lockstep.data import Batch, Inputs, called_with
from lockstep.models.loss import ignored_index, with_correct_count
from lockstep.parallel.context.context_parallel import shard_sequence
from lockstep.parallel.gradient_norm import Gradients
from lockstep.parallel.optimizer.step import parameters_of
from lockstep.parallel.pipeline.schedule import Instruction, one_stage
from lockstep.strategies.compiling import compiled
from lockstep.strategies.engine import Engine
from lockstep.strategies.experts import Balance
from lockstep.strategies.loss_scale import LossScale
from lockstep.strategies.step import Cut, Phases, StepResult, Totals


@dataclass
class Step:
    """The progress of a step while it is executed."""

    micro_batches: list[Batch]
    totals: Totals
    counting: Pending
    reduces: bool = True
    """Else each rank keeps its own gradients."""
    losses: dict[int, Tensor] = field(default_factory=dict)
    """Losses of micro-batches whose backward has not run."""
    norm: Tensor | None = None
    applied: bool | None = None
    """Whether the optimizer has stepped; None: only the device knows."""

    def is_last(self, micro_batch: int) -> bool:
        return micro_batch == len(self.micro_batches) - 1


class Worker:
    """Carries out instructions, with one engine."""

    steps_optimizer: ClassVar[bool] = True
    """This worker steps the optimizer; else the engine does, when it chooses."""

    def __init__(self, engine: Engine, cut: Cut) -> None:
        self.engine, self.layout, self.options = engine, engine.layout, engine.options
        self.around_passes = cut.around_passes
        self.device = self.layout.world.device
        self.ledger, self.phases = Ledger(self.device), Phases(self.device)
        self.measure = cut.measure or compiled(with_correct_count(self.options.loss), self.options)
        self.ignored = ignored_index(self.options.loss)
        self.loss_scale = LossScale() if self.options.precision == "fp16" else None
        self.stop_requested = False
        """Set by a caller that wants all ranks to stop; they learn of it in the next step's result."""
        self.copies: list[torch.cuda.Event] = []
        """Copies of the state for a save, which the optimizer's step must wait for."""
        self.save_requested = False
        """Likewise for a checkpoint, once."""
        self.balance = Balance(self.engine.model, self.layout, self.engine.parallel, cut.balances_experts)
        """Of the model's experts, if it has any."""
        self._fused: bool | None = None  # whether all ranks' optimizers are fused; found at the first step
        self.instructions = [*one_stage(self.options.accumulation)]

    @cached_property
    def gradients(self) -> Gradients:
        """The gradients that the optimizer steps with; made by all ranks together, in their first step."""
        return Gradients(self.engine.trained(), self.layout.norm, self.device)

    def step(self, batch: Batch) -> StepResult:
        """One optimizer step. `batch` is this rank's share of the global batch."""
        self.phases.spans = []
        self.ledger.open()
        with recording(self.ledger):
            step = self._begin(batch)
            for instruction in self.instructions:
                self._carry_out(instruction, step)
        assert step.norm is not None, "a schedule ends with a step"
        return StepResult(step.totals, step.norm, step.applied)

    def only_gradients(self, batch: Batch) -> Totals:
        """Forward and backward without averaging, to look at this rank's own gradients."""
        step = self._begin(batch, reduces=False)
        for instruction in self.instructions:
            if instruction.kind not in ("reduce", "step"):
                self._carry_out(instruction, step)
        self._end_passes(step)
        return step.totals

    @property
    def knows_counts(self) -> bool:
        """Whether this rank counts targets, each once however many ranks have it; any rank may ask to stop."""
        return self.layout.coordinates["tp"] == 0

    def local_positions(self, batch: Batch) -> Batch:
        """This rank's positions of every sequence, where context parallelism has cut them."""
        group = self.layout.group("cp")
        if group.size == 1:
            return batch
        return Batch(shard_sequence(batch.inputs, 1, group), shard_sequence(batch.targets, 1, group), batch.filler)

    def _begin(self, batch: Batch, reduces: bool = True) -> Step:
        batch = self.local_positions(batch.to(self.device, self.options.dtype))
        self.engine.zero_gradients()
        counts = torch.zeros(3, dtype=torch.float64, device=self.device)
        if self.knows_counts:
            counts[0].fill_(
                batch.target_count(self.ignored)
            )  # counts[0] = ... would copy from the host, and wait for the device
        counts[1].fill_(float(self.stop_requested))
        counts[2].fill_(float(self.save_requested))
        self.save_requested = False
        counting = all_reduce_async(counts, group=self.layout.norm, purpose="count")
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        totals = Totals(sums, counts, Pending(None), torch.zeros_like(sums[0]))
        step = Step(self._micro_batches(batch), totals, counting, reduces)
        self.balance.begin(self.layout.gradient.size * (1.0 if self.loss_scale is None else self.loss_scale.scale))
        self._before_passes(step)
        return step

    def _before_passes(self, step: Step) -> None:
        """Count what experts are used for in the whole step, where its first micro-batch must know."""
        if self.balance.needs_counting(len(step.micro_batches)):
            self.balance.count(self._forwards_alone(step))

    def _forwards_alone(self, step: Step) -> Iterator[Any]:
        """Each micro-batch, without a backward."""
        for micro_batch in step.micro_batches:
            with self.balance.uncounted(micro_batch.filler), self.precision():
                yield self.predict(micro_batch.inputs)

    def _micro_batches(self, batch: Batch) -> list[Batch]:
        return batch.micro_batches(self.options.accumulation)

    def _carry_out(self, instruction: Instruction, step: Step) -> None:
        match instruction.kind:
            case "forward":
                self._forward(instruction.micro_batch, step)
            case "backward":
                self._backward(instruction.micro_batch, step)
            case "reduce":
                self._end_passes(step)
                with self.phases("backward"):
                    self._reduce()
            case "step":
                self._update(step)

    def _end_passes(self, step: Step) -> None:
        """All forwards and backwards have run."""

    def _reduce(self) -> None:
        """When this returns, gradients are the global batch's."""
        self.engine.finish_gradients()

    def _around(self, index: int, step: Step) -> AbstractContextManager[None]:
        """Around forward and backward of a micro-batch: the last one reduces the gradients of all."""
        return self.engine.synchronize(step.is_last(index)) if step.reduces else self.engine.keep_local_gradients()

    # ---- forward and backward ----------------------------------------------------------------------------------

    def _forward(self, index: int, step: Step) -> None:
        micro_batch = step.micro_batches[index]
        if micro_batch.filler:
            self.engine.model.eval()  # a filler leaves running statistics alone
        counted = self.balance.uncounted(micro_batch.filler)
        with self._around(index, step), self.around_passes(), self.phases("forward"), self.precision(), counted:
            outputs = self.forward(micro_batch.inputs)
            step.losses[index], correct = self.measure(outputs, micro_batch.targets)
        if not micro_batch.filler:
            step.totals.sums += torch.stack((step.losses[index].detach().double(), correct.double()))

    def _backward(self, index: int, step: Step) -> None:
        micro_batch, totals = step.micro_batches[index], step.totals
        step.counting.wait()  # issued before forward, needed only now
        if step.is_last(index):
            totals.local_loss = totals.sums[0].clone()
            # In flight during backward.
            totals.pending = all_reduce_async(totals.sums, group=self.layout.loss, purpose="loss")
        counted = self.balance.uncounted(micro_batch.filler)  # what is recomputed
        with self._around(index, step), self.around_passes(), self.phases("backward"), counted:
            self.backward(self._weighted(step.losses.pop(index), micro_batch, totals.counts[0]))
        if micro_batch.filler:
            self.engine.model.train()

    def _weighted(self, loss_sum: Tensor, micro_batch: Batch, count: Tensor) -> Tensor:
        """The loss, weighted by the global number of targets."""
        weight = self.layout.gradient.size / count.clamp(min=1) * (0.0 if micro_batch.filler else 1.0)
        # A loss that is not finite must reach every rank, but gradients do not depend on the loss's value:
        # 0 * loss is 0 or NaN, and a weight of NaN makes all gradients NaN.
        loss = loss_sum * (weight + 0 * loss_sum.detach()).to(loss_sum.dtype)
        return loss if self.loss_scale is None else loss * self.loss_scale.scale

    def predict(self, inputs: Inputs) -> Any:
        """Forward without training; None where another rank has the outputs."""
        with self.around_passes():
            return self.engine.predict(inputs)

    def forward(self, inputs: Inputs) -> Any:
        return called_with(self.engine.module, inputs)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def precision(self) -> AbstractContextManager[Any]:
        """Around forward: bf16 and fp16 compute under autocast, unless an engine casts by itself."""
        dtype = self.options.compute_dtype
        return nullcontext() if dtype is None or self.engine.casts else torch.autocast(self.device.type, dtype)

    # ---- the optimizer -----------------------------------------------------------------------------------------

    def _update(self, step: Step) -> None:
        with self.phases("optimizer"):
            step.norm, step.applied = self.apply_gradients(step.totals)
        if step.applied is False:
            self.engine.on_skip()
        else:
            with self.phases("backward"):
                self.engine.after_step()

    def apply_gradients(self, totals: Totals) -> tuple[Tensor, bool | None]:
        """Clip by the global norm and step; on non-finite gradients no rank steps.

        Returns (norm, whether the step was taken; None if only the device knows).
        """
        if self.loss_scale is not None:
            self.gradients.scale(torch.tensor(1.0 / self.loss_scale.scale))
        norm = self.gradients.norm()
        applied = None if self._skips_on_device() else self.engine.agree_finite(bool(norm.isfinite()))
        if applied is None:
            optimizer: Any = self.engine.local_optimizer
            optimizer.found_inf = (~norm.isfinite()).float()  # as torch's gradient scaler passes it
            self.balance.skip(optimizer.found_inf)
        self.wait_for_copies()
        if applied is not False:
            if self.options.clip_value is not None:
                self.gradients.clip_elements(self.options.clip_value)
            elif self.options.clip_norm is not None:
                self.gradients.clip(norm, self.options.clip_norm)
            self.engine.optimizer.step()
        if self.loss_scale is not None:  # on a skipped step all ranks halve it alike, whichever overflowed
            assert applied is not None, "with a loss scale the host decides"
            self.loss_scale.update(applied)
        return norm, applied

    def wait_for_copies(self) -> None:
        """Before anything writes to parameters; on the GPU, not on the host."""
        for copied in self.copies:
            torch.cuda.current_stream().wait_event(copied)
        self.copies = []

    def _skips_on_device(self) -> bool:
        """A fused Adam, and LowBitAdamW on a GPU, change nothing if a flag on the device is set: that gradients are not
        finite. So the host need not wait for the norm, unless it has work to do at a skipped step.
        """
        if self._fused is None:
            optimizer = self.engine.local_optimizer
            mine = isinstance(optimizer, torch.optim.Adam) and bool(optimizer.defaults.get("fused"))
            mine |= self.device.type == "cuda" and getattr(optimizer, "skips_on_device", False)
            tensors = any(p.numel() for p in parameters_of(optimizer))
            # Some ranks may hold nothing of a small model: these follow the others.
            votes = all_gather_objects(mine if tensors else None, self.layout.norm)
            self._fused = set(votes) - {None} == {True}
        return self._fused and self.loss_scale is None and not self.engine.host_decides

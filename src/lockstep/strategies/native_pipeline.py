"""Pipeline parallelism by PyTorch's own means: torch.distributed.pipelining's schedules on the same stages, behind the
same names. Cutting the model, weighing micro-batches, tied weights and everything after the last pass are ours.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.comm.observe import observed_group
from lockstep.config import Parallel
from lockstep.data import Batch
from lockstep.errors import UserError
from lockstep.parallel.pipeline.schedule import Instruction
from lockstep.parallel.pipeline.stage import Stage
from lockstep.strategies.engine import Engine
from lockstep.strategies.pipeline import PipelineWorker
from lockstep.strategies.step import Cut
from lockstep.strategies.worker import Step, Worker

SCHEDULES = {  # ours -> torch's
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zb-h1": "ScheduleInterleavedZeroBubble",  # of one chunk
    "zb-v": "ScheduleZBVZeroBubble",
}
OF_SEVERAL = ("interleaved", "zb-h1", "zb-v")
"""Classes that take a list of stages."""


def check_native_pipeline(parallel: Parallel, micro_batches: int) -> None:
    if parallel.schedule not in SCHEDULES:
        raise UserError(f"pp=...:native has no {parallel.schedule}; torch's schedules are {', '.join(SCHEDULES)}")
    if micro_batches < parallel.pp and parallel.schedule != "gpipe":
        raise UserError(
            f"pp={parallel.pp}:{parallel.schedule}:native needs as many micro-batches as stages, and there are "
            f"{micro_batches}; give --parallel.micro-batches {parallel.pp} or more, or leave native out"
        )


class Part(nn.Module):
    """One chunk of a stage, as torch's stages require it: a module with only the chunk's parameters."""

    def __init__(self, stage: Stage, chunk: int, run: Callable[..., Any]) -> None:
        super().__init__()
        names = [name for names, _ in stage.layers[chunk] for name in names]
        self.layers = nn.ModuleList(stage.get_submodule(name) for name in names)
        self.run: Callable[..., Any] = partial(run, chunk)

    def forward(self, *activations: Tensor) -> Any:
        return self.run(*activations)


class NativePipelineWorker(PipelineWorker):
    """Steps by PyTorch's own pipeline schedules."""

    def __init__(self, engine: Engine, cut: Cut) -> None:
        super().__init__(engine, cut)
        self.instructions = [Instruction("native_passes"), Instruction("reduce"), Instruction("step")]
        self._schedules: dict[tuple[int, ...], Any] = {}
        """Keyed by the shape of a micro-batch: a schedule of torch's keeps buffers for one shape."""
        self._loss: Callable[[Tensor, int], Tensor]

    def _begin(self, batch: Batch, reduces: bool = True) -> Step:
        return Worker._begin(self, batch, reduces)

    def _carry_out(self, instruction: Instruction, step: Step) -> None:
        if instruction.kind == "native_passes":
            self._run_native(step)
        else:
            super()._carry_out(instruction, step)

    def _run_native(self, step: Step) -> None:
        """Torch's schedule, from the first pass to the last."""
        batches, sums = step.micro_batches, step.totals.sums
        rows = max(len(batch) for batch in batches)
        found: dict[int, Tensor] = {}

        def loss(outputs: Tensor, i: int) -> Tensor:
            """Torch also calls it in a dry run, to infer shapes; the last call counts."""
            sums.zero_()
            value = self._loss_of(outputs[: len(batches[i])], i, step)
            found[i] = sums.clone()
            return value

        self._loss = loss
        schedule = self._schedule(rows, tuple(batches[0].inputs.shape[1:]))
        is_first = self.placement.place(0)[0] == self.group.rank
        given = [torch.cat([padded(batch, rows) for batch in batches])] if is_first else []
        numbers = torch.arange(len(batches)) if self.has_loss else None  # of micro-batches, for the loss
        with self.phases("backward"):
            schedule.step(*given, target=numbers, return_outputs=False)
        sums.copy_(sum(found.values(), torch.zeros_like(sums)))

    def _schedule(self, rows: int, sample: tuple[int, ...]) -> Any:
        key = (rows, *sample)
        if key not in self._schedules:
            self._schedules[key] = self._make()
        return self._schedules[key]

    def _make(self) -> Any:
        from torch.distributed import pipelining
        from torch.distributed.pipelining import schedules

        stages = [
            pipelining.PipelineStage(
                Part(self.stage, chunk, self._run),
                self.placement.part(self.group.rank, chunk),
                self.placement.parts,
                self.device,
                group=observed_group(self.group),
            )
            for chunk in range(self.placement.chunks)
        ]

        def loss(outputs: Tensor, number: Tensor) -> Tensor:  # on all ranks: it says that there is a backward
            return self._loss(outputs, int(number))

        name = self.engine.parallel.schedule
        make = getattr(schedules, SCHEDULES[name])
        return make(stages if name in OF_SEVERAL else stages[0], self.micro_batches, loss_fn=loss, scale_grads=False)

    def _run(self, chunk: int, *activations: Tensor) -> Any:
        with self.precision():
            return self.engine.module(chunk, *activations)


def padded(batch: Batch, rows: int) -> Tensor:
    """The inputs, padded to `rows` rows; the loss of padding is not counted."""
    missing = rows - len(batch)
    first = batch.inputs[:1]
    return torch.cat([batch.inputs, first.expand(missing, *first.shape[1:])]) if missing else batch.inputs

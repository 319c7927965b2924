"""A model spread over the ranks: what `parallelize` returns, and the interface for training, verify and bench."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lockstep.comm.ledger import Ledger
from lockstep.config import Parallel
from lockstep.data import Batch, Share
from lockstep.layout import Held, Layout, World
from lockstep.parallel.data.wrapper import broadcast_buffers
from lockstep.parallel.optimizer.average import averages, evaluation_weights
from lockstep.strategies.compiling import only_compiled_graphs
from lockstep.strategies.engine import Engine
from lockstep.strategies.expert_use import ExpertUse, read_use
from lockstep.strategies.loss_scale import LossScale
from lockstep.strategies.native_pipeline import NativePipelineWorker
from lockstep.strategies.options import Options
from lockstep.strategies.pipeline import PipelineWorker
from lockstep.strategies.state import gathered
from lockstep.strategies.step import Cut, Phases, StepResult
from lockstep.strategies.worker import Worker


def worker_for(engine: Engine, cut: Cut) -> Worker:
    """What executes a schedule with an engine."""
    if engine.layout.degrees.pp == 1:
        return Worker(engine, cut)
    return (NativePipelineWorker if "pp" in engine.parallel.native else PipelineWorker)(engine, cut)


class ParallelModel:
    """Takes steps, evaluates, and says what each rank holds."""

    def __init__(self, engine: Engine, parameters: int, cut: Cut, flops_per_sample: int = 0) -> None:
        """`parameters`: of the whole model. `cut`: how the model axes have cut it. `flops_per_sample`: of one
        sample's forward and backward pass.
        """
        self.engine, self.parameters, self.cut, self.flops_per_sample = engine, parameters, cut, flops_per_sample
        self.worker, self.state = engine.custom_worker(cut) or worker_for(engine, cut), engine.make_state()

    @property
    def layout(self) -> Layout:
        return self.engine.layout

    @property
    def world(self) -> World:
        return self.engine.layout.world

    @property
    def options(self) -> Options:
        return self.engine.options

    @property
    def parallel(self) -> Parallel:
        return self.engine.options.parallel

    @property
    def model(self) -> nn.Module:
        """The plain module, with its own parameter names."""
        return self.engine.model

    @property
    def ledger(self) -> Ledger:
        """Of the last step."""
        return self.worker.ledger

    @property
    def phases(self) -> Phases:
        """Of the last step."""
        return self.worker.phases

    @property
    def loss_scale(self) -> LossScale | None:
        return self.worker.loss_scale

    @property
    def is_exact(self) -> bool:
        """Whether it equals one process; else `verify` checks another law."""
        return type(self.engine).facts(self.parallel).law is None

    # ---- training ----------------------------------------------------------------------------------------------

    def batch_share(self) -> Share:
        """Which part of the global batch this rank reads."""
        return Share(self.layout.batch.rank, self.layout.batch.size)

    def step(self, batch: Batch) -> StepResult:
        """One optimizer step. `batch` is this rank's share of the global batch."""
        return self.worker.step(batch)

    def request_stop(self) -> None:
        """All ranks learn of it in the next step's result."""
        self.worker.stop_requested = True

    def request_save(self) -> None:
        """All ranks learn of it, once, in the next step's result."""
        self.worker.save_requested = True

    @property
    def stop_requested(self) -> bool:
        return self.worker.stop_requested

    @property
    def waits_for_copies(self) -> bool:
        """A save may copy the state beside the next forward and backward pass."""
        return self.worker.steps_optimizer

    def optimizer_waits_for(self, copied: torch.cuda.Event) -> None:
        """The next optimizer step waits for these copies before it writes to parameters and moments."""
        self.worker.copies.append(copied)

    def expert_use(self) -> ExpertUse | None:
        """Since it was last read; None: the model has no experts. All ranks must ask together."""
        return read_use(self.worker.balance) if self.cut.has_experts else None

    def set_learning_rate(self, lr: float) -> None:
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr

    def settle(self) -> None:
        """Wait for what the last step has left in flight."""
        self.engine.settle()

    @contextmanager
    def evaluation_weights(self) -> Iterator[None]:
        """Inside, the model has the weights that are evaluated and exported, where the optimizer averages them. Every
        rank must enter together.
        """
        optimizer = self.engine.local_optimizer
        if not averages(optimizer):
            yield
            return
        self.settle()
        self.worker.wait_for_copies()  # a save may still be reading the weights
        with evaluation_weights(optimizer, self._after_write):
            yield

    def _after_write(self) -> None:
        self.engine.after_write()
        self.settle()

    def finish(self) -> None:
        """After the last step: all ranks hold the same weights and buffers."""
        self.engine.settle()
        self.worker.wait_for_copies()
        self.engine.finish()
        self.synchronize_buffers()

    def synchronize_buffers(self) -> None:
        """Running statistics (BatchNorm) are each rank's own after a step: take the first rank's."""
        broadcast_buffers(self.model, self.layout.batch)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        """[sum of losses, correct, count] of this rank's share of a test batch."""
        batch = self.worker.local_positions(batch.to(self.world.device, self.options.dtype))
        counted = self.worker.balance.uncounted(batch.filler)
        with self.worker.precision(), only_compiled_graphs(self.options), counted:
            outputs = self.worker.predict(batch.inputs)
        if outputs is None:  # another stage has them
            return torch.zeros(3, dtype=torch.float64, device=self.world.device)
        with self.worker.precision():
            loss_sum, correct = self.worker.measure(outputs, batch.targets)
        count = torch.as_tensor(batch.target_count(self.worker.ignored), device=loss_sum.device)
        sums = torch.stack((loss_sum.double(), correct.double(), count.double()))
        return torch.zeros_like(sums) if batch.filler else sums

    # ---- what it holds -----------------------------------------------------------------------------------------

    def held(self) -> dict[str, Held]:
        """What this rank holds of each parameter. All ranks must call it together."""
        return self.engine.held()

    def gradients(self) -> dict[str, Held]:
        """What this rank holds of each parameter's gradient. All ranks must call it together."""
        return self.engine.gradients()

    def full_state_dict(self) -> dict[str, Tensor]:
        """Layout-free: original names, whole tensors, on every rank."""
        return self.state.full_state_dict()

    def full_gradients(self) -> dict[str, Tensor]:
        """Layout-free, as `full_state_dict`; parameters without a gradient are left out."""
        return gathered(self.gradients(), self.layout.norm)

"""The contract: how one training step is spread over the ranks.

The meaning of a step. The reference is one process that takes the whole global batch, the mean loss over all its
targets (samples, or tokens that are not padding), one backward, one clip, one optimizer step. Every strategy at every
degree gives that loss, those gradients and those weights, also when shares and micro-batches differ in size. So the
base class weights by counts, never by ranks: with C targets in the global batch and n data-parallel ranks, each
micro-batch's loss is its sum times n / C, and the mean over the ranks is the mean over the targets.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.comm.collectives import Group, Pending, all_gather_objects, all_reduce_async
from lockstep.comm.ledger import Ledger, recording
from lockstep.config import Parallel
from lockstep.data import Batch, Share
from lockstep.models.loss import with_correct_count
from lockstep.parallel.wrapper import broadcast_buffers
from lockstep.strategies.compiling import compile_model, compiled
from lockstep.strategies.holdings import (
    Holding,
    copy_leaf,
    forget_unsaved,
    initialize_state,
    local,
    model_leaves,
    optimizer_leaves,
    wanted_leaves,
    whole_holdings,
)
from lockstep.strategies.loss_scale import LossScale
from lockstep.strategies.step import COMPUTE_DTYPES, DTYPES, Phases, StepOptions, StepResult, Totals
from lockstep.world import ParallelDims, World

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Strategy(ABC):
    """How one training step is spread over the ranks.

    A subclass writes `prepare`; it sets `model` (the plain module, with its own parameter names), `module` (what to
    call in forward, the model or a wrapper of it) and `optimizer`. It overrides what else it does differently.
    """

    equal_to_one_process = True
    """False for strategies that approximate by design (compression, local SGD)."""
    verified_in: str | None = None
    """A precision that the strategy is verified in, if it cannot be any other."""
    traffic_is_seen = True
    """False where an engine communicates in a way that the ledger cannot watch."""
    keep_gradients = False
    """Set by whoever wants `full_gradients` after the step, for engines that drop them."""

    model: nn.Module
    module: nn.Module
    optimizer: torch.optim.Optimizer
    parameters: int = 0
    """Of the whole model; noted before it is cut up."""
    flops_per_sample: int = 0
    """Of one sample's forward and backward pass."""

    def __init__(self, world: World, parallel: Parallel, options: StepOptions) -> None:
        self.world, self.parallel, self.options = world, parallel, options
        self.dims = ParallelDims().resolve(world.size)
        self.data_group: Group = world.group
        """The ranks that the global batch is cut among; None: all, by the world's own backend."""
        self.ledger = Ledger(world.device)
        self.phases = Phases(world.device)
        self.dtype = DTYPES[options.precision]
        self.stop_requested = False
        """Set by whoever wants all ranks to stop; they learn of it in the next step's result."""
        self.loss_scale = LossScale() if options.precision == "fp16" else None
        self._fused: bool | None = None  # whether all ranks' optimizers are; asked at the first step
        self.measure = compiled(with_correct_count(options.loss), options)

    # ---- what a strategy defines -------------------------------------------------------------------------

    @abstractmethod
    def prepare(self, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        """Place, wrap or shard a plain single-device model, then make the optimizer for what is left to train."""

    def batch_share(self) -> Share:
        """Which part of the global batch this rank reads."""
        return Share(self.dims.data_rank(self.world.rank), self.dims.data)

    def gradient_sync(self, last: bool) -> AbstractContextManager[None]:
        """Around one micro-batch: gradients need to meet at the `last` one only."""
        return nullcontext()

    def no_gradient_sync(self) -> AbstractContextManager[None]:
        """Around a micro-batch whose gradients are to be looked at and dropped: this rank's own, where an engine gives
        them away.
        """
        return self.gradient_sync(last=False)

    def own_gradients(self) -> Iterator[tuple[str, Tensor | None]]:
        """Of this rank's samples only, after `no_gradient_sync`; nothing where an engine does not show them."""
        yield from ((name, parameter.grad) for name, parameter in self.model.named_parameters())

    def zero_gradients(self) -> None:
        """Before the first micro-batch of a step."""
        self.optimizer.zero_grad(set_to_none=True)

    def finish_gradients(self) -> None:
        """After the last backward: when this returns, gradients are the global batch's."""

    def after_optimizer_step(self) -> None:
        """For strategies that synchronize something else than gradients."""

    def on_skip(self) -> None:
        """The step was not taken: undo what it left behind."""

    def finish(self) -> None:
        """After the last step: make sure that all ranks hold the same weights and buffers."""
        self.synchronize_buffers()

    def synchronize_buffers(self) -> None:
        """Running statistics (BatchNorm) are each rank's own after a step: take the first rank's."""
        if self.dims.data > 1:
            broadcast_buffers(self.model, self.data_group)

    def agree_finite(self, finite: bool) -> bool:
        """Whether all ranks may take the step. Averaged gradients are finite on all ranks or on none."""
        return finite

    def skips_on_device(self) -> bool:
        """A fused Adam leaves everything as it is where it is told, on the device, that gradients are not finite. So
        the host need not wait for the norm, unless it has something of its own to do at a skipped step.
        """
        if self._fused is None:
            optimizer = self.local_optimizer
            mine = isinstance(optimizer, torch.optim.Adam) and bool(optimizer.defaults.get("fused"))
            tensors = any(p.numel() for group in optimizer.param_groups for p in group["params"])
            # Parts of a small model may be nothing on some ranks: these go with the others.
            vote = mine if tensors else None
            votes = all_gather_objects(vote, self.data_group) if self.world.size > 1 else [vote]
            self._fused = set(votes) - {None} == {True}
        return self._fused and self.loss_scale is None

    # ---- the ordinary step ---------------------------------------------------------------------------------

    def place(self, model: nn.Module) -> nn.Module:
        """To the device and dtype of the run, compiled if asked for; in place, so that names stay."""
        model.to(self.world.device, self.dtype)
        compile_model(model, self.options)
        return model

    def step(self, batch: Batch) -> StepResult:
        """One optimizer step. `batch` is this rank's share of the global batch."""
        self.phases.spans = []
        self.ledger.open()
        batch = batch.to(self.world.device, self.dtype)
        with recording(self.ledger):
            totals = self.accumulate_gradients(batch)
            with self.phases("backward"):
                self.finish_gradients()
            with self.phases("optimizer"):
                norm, applied = self.apply_gradients(totals)
            if applied is False:
                self.on_skip()
            else:
                with self.phases("backward"):
                    self.after_optimizer_step()
        return StepResult(totals, norm, applied)

    def accumulate_gradients(self, batch: Batch, synchronize: bool = True) -> Totals:
        """Forward and backward of all micro-batches, each weighted by its share of the global batch's targets."""
        self.zero_gradients()
        counts = torch.zeros(2, dtype=torch.float64, device=self.world.device)
        counts[0].fill_(batch.target_count())  # counts[0] = ... would copy from the host, and wait for the device
        counts[1].fill_(float(self.stop_requested))
        counting = self._sum_over_data_ranks(counts, "count")
        sums = torch.zeros(2, dtype=torch.float64, device=self.world.device)
        totals = Totals(sums, counts, Pending(None), sums[0])
        final = self.options.accumulation - 1
        for index, micro_batch in enumerate(batch.micro_batches(self.options.accumulation)):
            if micro_batch.filler:
                self.model.eval()  # a filler leaves running statistics alone
            with self.gradient_sync(last=index == final) if synchronize else self.no_gradient_sync():
                with self.phases("forward"), self.compute_precision():
                    outputs = self.forward(micro_batch.inputs)
                    loss_sum, correct = self.measure(outputs, micro_batch.targets)
                if not micro_batch.filler:
                    totals.sums += torch.stack((loss_sum.detach().double(), correct.double()))
                if index == 0:
                    counting.wait()  # sent before forward, needed only now
                if index == final:
                    totals.own_loss = totals.sums[0].clone()
                    totals.pending = self._sum_over_data_ranks(totals.sums, "loss")  # travels during backward
                with self.phases("backward"):
                    self._backward(loss_sum, micro_batch, counts[0])
            if micro_batch.filler:
                self.model.train()
        return totals

    def _backward(self, loss_sum: Tensor, micro_batch: Batch, count: Tensor) -> None:
        weight = self.dims.data / count.clamp(min=1) * (0.0 if micro_batch.filler else 1.0)
        # A loss that is not finite must reach every rank, but backward looks at the loss's slope, not its value:
        # 0 * loss is 0 or NaN, and makes all gradients NaN.
        loss = loss_sum * (weight + 0 * loss_sum.detach()).to(loss_sum.dtype)
        if self.loss_scale is not None:
            loss = loss * self.loss_scale.scale
        self.backward(loss)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.module(inputs)
        return outputs

    def predict(self, inputs: Tensor) -> Tensor:
        """Forward without training: past a wrapper that only deals with gradients."""
        outputs: Tensor = self.model(inputs)
        return outputs

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def _sum_over_data_ranks(self, tensor: Tensor, purpose: str) -> Pending:
        if self.dims.data == 1:
            return Pending(None)
        return all_reduce_async(tensor, group=self.data_group, purpose=purpose)

    def compute_precision(self) -> AbstractContextManager[Any]:
        """Around forward: bf16 and fp16 compute under autocast, unless a strategy casts by itself."""
        dtype = COMPUTE_DTYPES.get(self.options.precision)
        return nullcontext() if dtype is None else torch.autocast(self.world.device.type, dtype)

    def apply_gradients(self, totals: Totals) -> tuple[Tensor, bool | None]:
        """Clip by the global norm and step; on non-finite gradients no rank steps.

        Returns (norm, whether the step was taken; None if only the device knows).
        """
        if self.loss_scale is not None:
            self._scale_gradients(torch.tensor(1.0 / self.loss_scale.scale))
        norm = self.gradient_norm()
        applied = None if self.skips_on_device() else self.agree_finite(bool(norm.isfinite()))
        if applied is None:
            optimizer: Any = self.local_optimizer
            optimizer.found_inf = (~norm.isfinite()).float()  # how torch's own gradient scaler tells it
        if applied is not False:
            if self.options.clip_norm is not None:
                self.clip_gradients(norm, self.options.clip_norm)
            self.optimizer.step()
        if self.loss_scale is not None:  # on a skipped step all ranks halve it alike, whoever overflowed
            assert applied is not None, "with a loss scale the host decides"
            self.loss_scale.update(applied)
        return norm, applied

    def local_gradients(self) -> list[Tensor]:
        """The gradients that this rank's optimizer steps with."""
        return [p.grad for p in self.trainable() if p.grad is not None]

    def held_gradients(self) -> list[Tensor]:
        """All memory of gradients that this rank holds after a step, for the account of memory."""
        return [p.grad for p in self.model.parameters() if p.grad is not None] + self.local_gradients()

    def gradient_norm(self) -> Tensor:
        """Norm over all parameters of the whole model."""
        return nn.utils.get_total_norm(self.local_gradients())

    def clip_gradients(self, norm: Tensor, max_norm: float) -> None:
        """As torch's clip_grad_norm_, for a norm that is known."""
        self._scale_gradients((max_norm / (norm + 1e-6)).clamp(max=1.0))

    def _scale_gradients(self, factor: Tensor) -> None:
        if gradients := self.local_gradients():
            torch._foreach_mul_(gradients, factor.to(local(gradients[0])))

    def trainable(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def set_learning_rate(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        """[sum of losses, correct, count] of this rank's share of a test batch."""
        batch = batch.to(self.world.device, self.dtype)
        with self.compute_precision():
            loss_sum, correct = self.measure(self.predict(batch.inputs), batch.targets)
        count = torch.as_tensor(batch.target_count(), device=loss_sum.device)
        sums = torch.stack((loss_sum.double(), correct.double(), count.double()))
        return torch.zeros_like(sums) if batch.filler else sums

    # ---- state ---------------------------------------------------------------------------------------------

    def full_state_dict(self) -> dict[str, Tensor]:
        """Layout-free: original names, whole tensors, on every rank."""
        return {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}

    def full_gradients(self) -> dict[str, Tensor]:
        """Layout-free, as `full_state_dict`; parameters without a gradient are left out."""
        named = self.model.named_parameters()
        return {name: p.grad.detach().to_dense().clone() for name, p in named if p.grad is not None}

    def model_holdings(self) -> list[Holding]:
        """What this rank holds of each parameter."""
        return whole_holdings(self.model)

    def optimizer_holdings(self) -> list[Holding]:
        """What this rank's optimizer steps."""
        return [h for h in self.model_holdings() if h.tensor.requires_grad]

    @property
    def local_optimizer(self) -> torch.optim.Optimizer:
        """The one that has this rank's state, where `optimizer` is a wrapper of it."""
        return self.optimizer

    def own_state(self) -> dict[str, Any]:
        """What the next step depends on that belongs to this rank alone, for strategies that have such."""
        return {}

    def load_own_state(self, state: dict[str, Any]) -> None:
        """The opposite of `own_state`."""

    def before_saving(self) -> None:
        """What all ranks hold must be the same on all: only one of them writes it."""
        self.synchronize_buffers()

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of everything that the next step depends on; see `holdings.py` for the names.

        Tensors are the strategy's own, not copies: a distributed checkpoint is loaded into them.
        """
        return {
            **model_leaves(self.model, self.model_holdings(), self.options.save_trained_only),
            **optimizer_leaves(self.local_optimizer, self.optimizer_holdings()),
            f"own.{self.world.rank}": self.own_state(),
        }

    def state_to_load(self, saved: set[str]) -> dict[str, Any]:
        """What to fill from a checkpoint that holds these names, whatever strategy saved it; then `load_state_dict`."""
        initialize_state(self.local_optimizer)
        return wanted_leaves(self.state_dict(), saved)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over `state`: one that `state_to_load` gave and that has been filled, or a copy of `state_dict`."""
        if any(name.startswith("optimizer.") for name in state):
            initialize_state(self.local_optimizer)
        mine = self.state_dict()
        with torch.no_grad():
            for name, value in state.items():
                if not name.startswith("own."):
                    copy_leaf(mine[name], value)
        forget_unsaved(self.local_optimizer, self.optimizer_holdings(), set(state))
        if own := state.get(f"own.{self.world.rank}"):
            self.load_own_state(own)

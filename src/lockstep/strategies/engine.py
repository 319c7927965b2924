"""An engine: how gradients are reduced, and shards gathered, over the data axes, for one stage of the model.

It wraps the stage, controls in which micro-batches gradients are reduced, waits for them, and reports which region of
which parameter this rank holds. What is known of an engine before anything runs (the axis of its ranks, what it
can be combined with, whether it is exact, its traffic in closed form, what to try when it is slow) is on its class.
So a new engine is one file and one row of `STRATEGIES`.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from lockstep.config import Parallel
from lockstep.data import Inputs, called_with
from lockstep.errors import UserError
from lockstep.layout import Degrees, Held, Layout
from lockstep.layout.region import region_of
from lockstep.parallel.law import Sent, Shape
from lockstep.parallel.pipeline.tied import gradient_or_zeros
from lockstep.strategies.facts import Facts
from lockstep.strategies.model_sizes import ModelSizes
from lockstep.strategies.options import Options
from lockstep.strategies.step import Cut

if TYPE_CHECKING:
    from lockstep.strategies.state import EngineState
    from lockstep.strategies.worker import Worker


class Engine(ABC):
    """How one stage is trained over the data axes.

    A subclass writes `wrap`, which sets `module` and `optimizer`, and overrides what else it does differently.
    """

    # ---- what is true of it ------------------------------------------------------------------------------------

    axis: ClassVar[str] = "replicate"
    """The axis that takes all ranks, unless degrees are given: ranks hold copies, or (shard) parts."""
    variants: ClassVar[tuple[str, ...]] = ()
    """Options, as in bucketed+topk, that comparisons list as rows of their own."""
    model_axes: ClassVar[tuple[str, ...]] = ("pp", "cp", "tp")
    """Axes that cut the model itself, with which it can be combined."""
    takes_compression: ClassVar[bool] = False
    """It takes gradient compression, and an all-reduce algorithm."""
    shardings: ClassVar[tuple[str, ...]] = ("FULL_SHARD",)
    offloads: ClassVar[tuple[str, ...]] = ()
    offloads_from_cpu: ClassVar[bool] = False
    """It offloads also where ranks compute on the CPU."""
    takes_experts: ClassVar[bool] = False
    """It reduces gradients of experts over their replicas, and of all else over all ranks."""
    native_axes: ClassVar[tuple[str, ...]] = ("cp",)
    """Axes that PyTorch may cut: the engine supports DTensors, or does not need to."""
    takes_user_config: ClassVar[bool] = False
    """It reads `parallel.deepspeed_config`."""
    package: ClassVar[str | None] = None
    """A package that must be installed."""
    verified_in: ClassVar[str | None] = None
    """The precision that it is verified in, if it cannot be verified in any other."""
    fills_parts: ClassVar[bool] = False
    """It takes a model on the meta device, and gives memory only to what this rank holds of it."""
    sends_after_step: ClassVar[bool] = False
    """Parameters are sent after the optimizer's step, and the step waits for them."""
    leaves_in_flight: ClassVar[bool] = False
    """A step ends with communication in flight, which the next one waits for."""
    takes_any_graph: ClassVar[bool] = False
    """Ranks may leave parameters unused, and gradients may come late (re-entrant checkpointing)."""
    reports_norm: ClassVar[bool] = True
    """The norm that a step reports is that of the gradients before clipping."""
    skips_not_finite: ClassVar[bool] = True
    """No rank takes a step whose loss or gradients are not finite on some rank."""
    waits_in_backward: ClassVar[bool] = False
    """A reduction of gradients is waited for where it is issued."""
    gathers_ahead: ClassVar[bool] = False
    """The parameters of the next block are gathered while this one computes, forward and backward."""

    @classmethod
    @abstractmethod
    def facts(cls, parallel: Parallel) -> Facts:
        """What is true of it with these options."""

    @classmethod
    def variant(cls, parallel: Parallel, option: str) -> Parallel | None:
        """`parallel` with an option by its name, or None if this engine has no such option."""
        return None

    @classmethod
    def check(cls, parallel: Parallel, precision: str, compiled: bool) -> None:
        """Refuse what it cannot do, before any rank starts."""

    @classmethod
    def degrees(cls, parallel: Parallel, ranks: int) -> Degrees:
        """How the `ranks` that model axes leave are split over the data axes; what `parallel` leaves open goes to
        this engine's axis.
        """
        if cls.axis == "shard" and (parallel.replicate or 1) != 1:
            raise UserError(
                f"parallel.replicate {parallel.replicate} does not go with parallel.data {parallel.data}, which shards "
                f"over all ranks; use fsdp with parallel.sharding HYBRID_SHARD"
            )
        if cls.axis == "replicate" and (parallel.shard or 1) != 1:
            raise UserError(
                f"parallel.shard {parallel.shard} does not go with parallel.data {parallel.data}, whose ranks hold "
                f"copies; use zero1, zero2, zero3 or fsdp"
            )
        open_axis = {"replicate": parallel.replicate, "shard": parallel.shard}[cls.axis] or -1
        return Degrees(**{cls.axis: open_axis}).resolve(ranks)

    @classmethod
    def traffic(cls, sizes: ModelSizes, parallel: Parallel, ranks: int) -> Sent | None:
        """What a rank sends in a step, in closed form; None where there is none."""
        return None

    @classmethod
    def tied_elements(cls, shape: Shape, rank: int, ranks: int) -> int:
        """How many elements of a tied weight's gradient a data rank of a pipeline's stage sends to the other stage."""
        return prod(shape)

    # ---- one stage ---------------------------------------------------------------------------------------------

    model: nn.Module
    """The stage as a plain module, with its own parameter names."""
    module: nn.Module
    """What to call in forward: the model, or a wrapper of it."""
    optimizer: torch.optim.Optimizer
    casts = False
    """It computes in the right precision by itself: no autocast."""
    host_decides = False
    """It has work to do at a skipped step, so the host must learn of the skip at once."""
    shows_local_gradients: ClassVar[bool] = True
    """`local_gradients` has some."""
    reshards_micro_batches: ClassVar[bool] = False
    """In a pipeline it can release parameters and reduce gradients in every micro-batch."""
    reduces_by_chunk: ClassVar[bool] = True
    """In a pipeline it reduces the gradients that a pass has completed; else only where one pass completes them all."""
    sums_tied_last: ClassVar[bool] = False
    """In a pipeline, gradients of tied weights are summed over the stages after they are reduced over the data axes;
    else before.
    """
    averages_weights: ClassVar[bool] = True
    """An optimizer may average the weights it steps, for evaluation: they are the same run on all ranks."""
    survives_losses: ClassVar[bool] = False
    """Every rank holds all that there is of a run, and its collectives may fail: when one rank is lost, the others can
    go on.
    """
    keeps_any_state: ClassVar[bool] = True
    """An optimizer's state may be of any type, and is saved as it is."""
    clips_elements: ClassVar[bool] = True
    """Our worker clips the gradients."""
    scales_loss = False
    """It manages fp16's loss scale itself, and skips steps to find it."""

    def __init__(self, layout: Layout, options: Options) -> None:
        self.layout, self.options, self.parallel = layout, options, options.parallel

    @abstractmethod
    def wrap(self, stage: nn.Module) -> None:
        """Wrap or shard a plain module, then make the optimizer for what is left to train on this rank.

        `stage` is on the run's device and in its dtype, or on the meta device where the engine `fills_parts`.
        """

    def synchronize(self, last: bool) -> AbstractContextManager[None]:
        """Around a micro-batch: gradients need to be reduced in the `last` one only."""
        return nullcontext()

    def keep_local_gradients(self) -> AbstractContextManager[None]:
        """Around a micro-batch whose gradients are to be looked at and dropped: this rank's own, where an engine gives
        them away.
        """
        return self.synchronize(last=False)

    def begin_passes(self) -> None:
        """Before the first pass of a pipeline's step."""

    def zero_gradients(self) -> None:
        """Before the first micro-batch of a step."""
        self.optimizer.zero_grad(set_to_none=True)

    def finish_gradients(self) -> None:
        """When this returns, gradients are the global batch's."""

    def accumulate(self) -> AbstractContextManager[None]:
        """Around a pass of a pipeline: gradients are kept until a later one."""
        return self.synchronize(last=False)

    def reduce_in_backward(
        self, complete: Collection[Tensor], pending: Collection[Tensor] | None
    ) -> AbstractContextManager[None]:
        """Around the last pass of a pipeline's step that adds to the gradients of `complete`: an engine that overlaps
        reduces them as soon as they are ready. `pending`: those of them that a weight pass adds to; None: a backward
        pass, which adds to all of them.
        """
        return self.accumulate()

    def reduce_rest(self) -> None:
        """When a pipeline's passes are over: reduce what `reduce_in_backward` has not, and wait for all of it."""
        self.finish_gradients()

    def accumulated_gradient(self, parameter: nn.Parameter) -> Tensor:
        """The gradient accumulated by a stage's passes, or zeros; already reduced if the engine `sums_tied_last`."""
        return gradient_or_zeros(parameter)

    def release(self) -> None:
        """After forward passes of a pipeline that have no backward: release what they have gathered."""

    def after_step(self) -> None:
        """For engines that average something else than gradients."""

    def on_skip(self) -> None:
        """The step was not taken: undo what it left behind."""

    def settle(self) -> None:
        """Wait for what is still in flight after a step: from here on parameters may be read."""

    def after_write(self) -> None:
        """What the optimizer steps has new values: parameters follow on all ranks."""

    def finish(self) -> None:
        """After the last step: all ranks hold the same weights."""

    def agree_finite(self, finite: bool) -> bool:
        """Whether all ranks may take the step. Averaged gradients are finite on all ranks or on none."""
        return finite

    def predict(self, inputs: Inputs) -> Any:
        """Forward without training: past a wrapper that only deals with gradients."""
        return called_with(self.model, inputs)

    # ---- what this rank holds ----------------------------------------------------------------------------------

    def held(self) -> dict[str, Held]:
        """What this rank holds of every parameter, under its first name. All ranks must call it together."""
        self.settle()
        return {name: Held(p, region_of(p)) for name, p in self.model.named_parameters()}

    def trained(self) -> dict[str, Held]:
        """What this rank's optimizer steps, and whose gradients are the global batch's after `finish_gradients`."""
        return {name: held for name, held in self.held().items() if held.parameter.requires_grad}

    def gradients(self) -> dict[str, Held]:
        """Of the global batch, for inspection; parameters without one are left out. All ranks must call it together."""
        with_one = {name: held for name, held in self.trained().items() if held.parameter.grad is not None}
        return {name: Held(h.parameter.grad.to_dense(), h.region) for name, h in with_one.items()}  # type: ignore

    def local_gradients(self) -> Iterator[tuple[str, Tensor | None]]:
        """Of this rank's samples only, after `keep_local_gradients`; nothing where an engine does not show them."""
        yield from ((name, parameter.grad) for name, parameter in self.model.named_parameters())

    def gradient_buffers(self) -> list[Tensor]:
        """Buffers in which several buckets or blocks reduce gradients in turn, where these are not held in full."""
        return []

    def gathers_for(self, module: nn.Module) -> set[str]:
        """The ledger's subjects of all-gathers that are in flight between steps and that `module` must wait for."""
        return set()

    def gathered_bytes(self) -> int:
        """Memory of unsharded parameters at this moment, where an engine shards them."""
        return 0

    def gathered_sizes(self) -> tuple[int, list[int]]:
        """Bytes of unsharded parameters, where an engine shards them: outside the blocks, and of each block."""
        return 0, [0]

    def gradient_memory(self) -> list[Tensor]:
        """All memory of gradients that this rank holds after a step."""
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    @property
    def local_optimizer(self) -> torch.optim.Optimizer:
        """The one that has this rank's state, where `optimizer` is a wrapper of it."""
        return self.optimizer

    def local_state(self) -> dict[str, Any]:
        """What the next step depends on that belongs to this rank alone."""
        return {}

    def load_local_state(self, state: dict[str, Any]) -> None:
        """The opposite of `local_state`."""

    def after_load(self) -> None:
        """A checkpoint has been loaded into what this rank holds."""

    # ---- what executes and saves it ----------------------------------------------------------------------------

    def custom_worker(self, cut: Cut) -> "Worker | None":
        """A custom worker, if the engine runs its own steps; None: the ordinary worker executes a schedule."""
        return None

    def make_state(self) -> "EngineState":
        from lockstep.strategies.state import RegionState  # it knows engines

        return RegionState(self)

    def trainable(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

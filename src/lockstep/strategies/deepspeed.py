"""DeepSpeed's ZeRO engine: it owns gradients, clipping and the step, so it brings its own worker and state."""

import logging
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from io import StringIO
from math import isfinite
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from lockstep.comm.observe import note_calls
from lockstep.config import Parallel
from lockstep.data import Inputs, called_with, mapped, tensors_in
from lockstep.errors import UserError
from lockstep.layout import Held, Layout, Region
from lockstep.parallel.data.wrapper import broadcast_buffers, broadcast_module
from lockstep.strategies.deepspeed_settings import deepspeed_settings
from lockstep.strategies.engine import Engine
from lockstep.strategies.facts import Facts
from lockstep.strategies.options import Options
from lockstep.strategies.state import first_names, persistent, wanted_leaves
from lockstep.strategies.step import Cut, Totals
from lockstep.strategies.worker import Worker

STALE_MINUTES = 10
INSTALL = 'pip install -e ".[deepspeed]"'
WATCHED = {  # its communication: method -> (operation, purpose, which argument is the whole array)
    "all_reduce": ("all_reduce", "gradients", 0),
    "reduce_scatter_tensor": ("reduce_scatter", "gradients", 1),
    "all_gather_into_tensor": ("all_gather", "parameters", 0),
    "broadcast": ("broadcast", "parameters", 0),
}


class DeepSpeed(Engine):
    """Stages 1 to 3, with offload to the host or to NVMe. DeepSpeed knows fp32, bf16 and fp16, not fp64."""

    axis = "shard"
    variants = ("zero1", "zero2")
    model_axes = ()
    offloads = ("cpu", "nvme")
    offloads_from_cpu = True
    takes_user_config = True
    skips_not_finite = False
    averages_weights = False
    keeps_any_state = False  # its utilities read and write state in fp32
    clips_elements = False
    package = "deepspeed"
    verified_in = "fp32"
    casts = True

    @classmethod
    def variant(cls, parallel: Parallel, option: str) -> Parallel | None:
        if option not in ("zero1", "zero2", "zero3"):
            return None
        return replace(parallel, zero_stage=cast(Any, int(option[-1])))

    @classmethod
    def facts(cls, parallel: Parallel) -> Facts:
        stage = parallel.zero_stage
        return Facts(
            says=f"DeepSpeed's ZeRO stage {stage}",
            sends="3Ψ(n-1)/n" if stage == 3 else "2Ψ(n-1)/n",
            divides=(stage >= 3, stage >= 2, True),
            sends_every_micro_batch=True,
        )

    @classmethod
    def check(cls, parallel: Parallel, precision: str, compiled: bool) -> None:
        if precision in ("fp64", "fp8"):
            raise UserError(
                f"parallel.data deepspeed does not go with train.precision {precision}: DeepSpeed does not know it"
            )
        if compiled:
            raise UserError("parallel.data deepspeed does not go with train.compile; leave it out")

    def __init__(self, layout: Layout, options: Options) -> None:
        super().__init__(layout, options)
        self.deepspeed = import_deepspeed()
        self.settings = deepspeed_settings(self.parallel, options)
        self.scales_loss = options.precision == "fp16"
        self.kept_gradients: dict[str, Tensor | None] = {}

    @property
    def stage(self) -> int:
        return int(self.settings["zero_optimization"]["stage"])

    def wrap(self, stage: nn.Module) -> None:
        check_backend(self.layout)
        if not torch.distributed.is_initialized():  # it wants a group, also for one process
            os.environ.setdefault("LOCAL_RANK", "0")
            torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        self.model = stage
        broadcast_module(stage, self.layout.gradient)
        offloaded = "offload_optimizer" in self.settings["zero_optimization"]
        optimizer = self.options.make_optimizer(self.trainable())
        try:
            with redirect_stdout(StringIO()):  # it prints a line for every kernel that it builds
                self.engine, self.optimizer, *_ = self.deepspeed.initialize(
                    model=stage,
                    optimizer=host_adam(optimizer) if offloaded else optimizer,
                    config=self.settings,
                    dist_init_required=False,
                )
        except ValueError as error:
            if "not supported on your device" not in str(error):
                raise
            precision = self.options.precision
            raise UserError(f"DeepSpeed does not compute in train.precision {precision} here; use fp32") from error
        self.module = self.engine
        note_calls(self.deepspeed.comm.comm.cdb, WATCHED, self.layout.gradient.axis)

    @contextmanager
    def synchronize(self, last: bool) -> Iterator[None]:
        yield

    def zero_gradients(self) -> None:
        """The engine drops them after each step."""

    def predict(self, inputs: Inputs) -> Any:
        dtype = self.options.compute_dtype
        if dtype is not None:
            inputs = mapped(inputs, lambda t: t.to(dtype) if t.is_floating_point() else t)
        outputs = called_with(self.engine, inputs)
        # The engine scales an fp16 loss, and the scale must come before anything is rounded to fp16.
        return outputs.float() if dtype == torch.float16 and isinstance(outputs, Tensor) else outputs

    @property
    def local_optimizer(self) -> torch.optim.Optimizer:
        wrapper: Any = self.optimizer
        inner: torch.optim.Optimizer = wrapper.optimizer
        return inner

    # ---- what it shows -----------------------------------------------------------------------------------------

    def held(self) -> dict[str, Held]:
        """DeepSpeed shows whole tensors only."""
        named = self.model.named_parameters()
        return {name: Held(whole := self.whole(p), Region.whole(whole.shape)) for name, p in named}

    def gradients(self) -> dict[str, Held]:
        """As they were before the last step, clipped as the engine clips them."""
        limit, norm = self.options.clip_norm, float(self.engine.get_global_grad_norm() or 0.0)
        scale = min(1.0, limit / (norm + 1e-6)) if limit else 1.0
        found = {n: g.detach() * scale for n, g in self.kept_gradients.items() if g is not None}
        return {name: Held(gradient, Region.whole(gradient.shape)) for name, gradient in found.items()}

    def keep_gradients(self) -> None:
        get = self.deepspeed.utils.safe_get_full_grad
        self.kept_gradients = {n: get(p) for n, p in self.model.named_parameters() if p.requires_grad}

    def whole(self, parameter: nn.Parameter) -> Tensor:
        """In fp32, as the optimizer has it."""
        if parameter.requires_grad:
            master: Tensor = self.deepspeed.utils.safe_get_full_fp32_param(parameter)
            return master.detach().clone().view(getattr(parameter, "ds_shape", parameter.shape))
        with self.gathered(parameter):
            return parameter.detach().clone()

    def gathered(self, parameter: nn.Parameter) -> AbstractContextManager[None]:
        """Inside, the parameter is whole; what the first rank writes to it stays."""
        if self.stage < 3:
            return nullcontext()
        gathered: AbstractContextManager[None] = self.deepspeed.zero.GatheredParameters([parameter], modifier_rank=0)
        return gathered

    def custom_worker(self, cut: Cut) -> "DeepSpeedWorker":
        return DeepSpeedWorker(self, cut)

    def make_state(self) -> "DeepSpeedState":
        return DeepSpeedState(self)


class DeepSpeedWorker(Worker):
    """The engine counts micro-batches, scales, clips and steps."""

    steps_optimizer = False

    engine: DeepSpeed

    def __init__(self, engine: DeepSpeed, cut: Cut) -> None:
        super().__init__(engine, cut)
        self.loss_scale = None  # fp16's is DeepSpeed's own
        self._micro_batch = 0

    def forward(self, inputs: Inputs) -> Any:
        return self.engine.predict(inputs)

    def backward(self, loss: Tensor) -> None:
        self.engine.engine.backward(loss, scale_wrt_gas=False)
        self._micro_batch += 1
        if self._micro_batch % self.options.accumulation:
            self.engine.engine.step()  # counts the micro-batch

    def apply_gradients(self, totals: Totals) -> tuple[Tensor, bool]:
        if not isfinite(totals.read()[0]):
            raise UserError(
                "the loss is not finite, and DeepSpeed cannot drop a step that has begun; lower train.lr, set "
                "train.clip_norm, or find the cause with another strategy"
            )
        if self.options.keep_gradients:
            self.engine.keep_gradients()
        engine = self.engine.engine
        skipped = engine.skipped_steps
        engine.step()
        norm, stepped = float(engine.get_global_grad_norm() or 0.0), engine.skipped_steps == skipped
        if stepped and not isfinite(norm):
            raise UserError("gradients are not finite, and DeepSpeed has stepped with them; lower train.lr")
        return torch.as_tensor(norm), stepped


class DeepSpeedState:
    """DeepSpeed exposes whole tensors only: all ranks gather them one by one, and the first keeps them."""

    def __init__(self, engine: DeepSpeed) -> None:
        self.engine, self.world, self.options = engine, engine.layout.world, engine.options

    def before_saving(self) -> None:
        broadcast_buffers(self.engine.model, self.engine.layout.batch)

    def full_state_dict(self) -> dict[str, Tensor]:
        model, first = self.engine.model, first_names(self.engine.model)
        whole = {name: held.tensor for name, held in self.engine.held().items()}
        return {
            name: whole[first[name]] if name in first else tensor.detach().clone()
            for name, tensor in model.state_dict(keep_vars=True).items()
        }

    def state_dict(self) -> dict[str, Any]:
        return {**self._leaves(keep=self.world.is_main), f"own.{self.world.rank}": {}}

    def to_load(self, saved: set[str]) -> dict[str, Any]:
        if not self._inner_state()[1]:
            self._take_empty_step()
        return wanted_leaves(self._leaves(keep=True), saved)

    def _take_empty_step(self) -> None:
        """The engine makes the optimizer's state in its first step: take one with a rate of 0, which moves nothing."""
        example, engine = self.options.example, self.engine
        if example is None:
            raise UserError("DeepSpeed loads a checkpoint only where Options.example has one sample's inputs")
        rates = [group["lr"] for group in engine.optimizer.param_groups]
        for group in engine.optimizer.param_groups:
            group["lr"] = 0.0
        for _ in range(self.options.accumulation):
            outputs = engine.predict(mapped(example, lambda t: t.to(self.world.device)))
            engine.engine.backward(
                0 * next(t for t in tensors_in(outputs) if t.requires_grad).sum(), scale_wrt_gas=False
            )
            engine.engine.step()
        for group, rate in zip(engine.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        if not self._inner_state()[1]:
            raise UserError("DeepSpeed has skipped the step that makes its optimizer's state, so nothing can be loaded")

    def _leaves(self, keep: bool) -> dict[str, Tensor]:
        engine = self.engine
        get_state = engine.deepspeed.utils.safe_get_full_optimizer_state
        step, keys = self._inner_state()
        leaves: dict[str, Tensor] = {}
        for name, parameter in engine.model.named_parameters():
            trained = parameter.requires_grad
            if self.options.save_trained_only and not trained:
                continue
            found = {f"model.{name}": engine.whole(parameter)}
            if trained:
                found |= {f"optimizer.{name}.{key}": get_state(parameter, key) for key in keys}
                if step is not None:
                    found[f"optimizer.{name}.step"] = step.clone()
            if keep:
                leaves |= {n: t.detach().to("cpu", copy=True) for n, t in found.items() if t is not None}
        if keep:
            saved = persistent(engine.model)
            named = engine.model.named_buffers()
            leaves |= {f"model.{name}": buffer.detach().clone() for name, buffer in named if name in saved}
        return leaves

    def _inner_state(self) -> tuple[Tensor | None, list[str]]:
        """The step count, and which tensors the optimizer has for each parameter."""
        states = list(self.engine.local_optimizer.state.values())
        first = states[0] if states else {}
        step = torch.as_tensor(float(first["step"])) if "step" in first else None
        return step, [key for key, value in first.items() if isinstance(value, Tensor) and value.dim() > 0]

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        engine = self.engine
        utils = engine.deepspeed.utils
        buffers, named = dict(engine.model.named_buffers()), dict(engine.model.named_parameters())
        for name, value in state.items():
            kind, _, rest = name.partition(".")
            if kind == "model" and rest in buffers:
                buffers[rest].copy_(value)
            elif kind == "model":
                if named[rest].requires_grad:
                    utils.safe_set_full_fp32_param(named[rest], value)
                with engine.gathered(named[rest]):  # that was the optimizer's copy; this is the one that computes
                    named[rest].data.copy_(value)
            elif kind == "optimizer":
                parameter, _, key = rest.rpartition(".")
                if key == "step":
                    for inner in engine.local_optimizer.state.values():
                        counts = isinstance(inner["step"], Tensor)
                        inner["step"] = torch.full_like(inner["step"], float(value)) if counts else int(value)
                else:
                    utils.safe_set_full_optimizer_state(named[parameter], value, key)


def check_backend(layout: Layout) -> None:
    """DeepSpeed makes its groups itself, on the backend that torch was started with."""
    if layout.world.group is not None:
        raise UserError(
            f"DeepSpeed uses the backend that the ranks were started with, which is not {layout.world.backend}; "
            f"start them with --backend {layout.world.backend}, and leave out @{layout.world.backend}"
        )


def import_deepspeed() -> Any:
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else it warns that it has found nothing better
    warnings.filterwarnings("ignore", message=r".*torch\.distributed\..* is deprecated", category=FutureWarning)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    try:
        import deepspeed
        import deepspeed.comm.comm  # for `note_calls`
    except ImportError as error:
        raise UserError(f"parallel.data deepspeed needs DeepSpeed ({error}): {INSTALL}") from None
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # Its own all-reduce for CPU ranks takes a minute to compile at first use, and leaves buffers in /dev/shm
    # forever. Without it, DeepSpeed uses the process group's.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    refuse_stale_locks()
    return deepspeed


def refuse_stale_locks() -> None:
    """DeepSpeed compiles its kernels under a lock file, and would wait forever for one that a killed build has left."""
    from torch.utils.cpp_extension import get_default_build_root  # slow to import

    folder = os.environ.get("TORCH_EXTENSIONS_DIR")
    for lock in Path(folder).glob("*/lock") if folder else Path(get_default_build_root()).glob("*/*/lock"):
        minutes = (time.time() - lock.stat().st_mtime) / 60
        if minutes > STALE_MINUTES:
            raise UserError(
                f"{lock} is from a build that began {minutes:.0f} minutes ago, and DeepSpeed would wait for its end; "
                f"if nothing is being built, remove that file"
            )


def host_adam(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """DeepSpeed's Adam for the host, which it compiles; other optimizers run there as they are."""
    if not isinstance(optimizer, torch.optim.Adam):  # AdamW is one
        return optimizer
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    adamw = isinstance(optimizer, torch.optim.AdamW)
    groups = [{k: g[k] for k in ("params", "lr", "betas", "eps", "weight_decay")} for g in optimizer.param_groups]
    made: torch.optim.Optimizer = DeepSpeedCPUAdam(groups, adamw_mode=adamw)
    return made

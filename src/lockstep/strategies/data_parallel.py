"""Our own data parallelism, in its four modes."""

from typing import Any

from torch import nn

from lockstep.config import Parallel
from lockstep.errors import UserError
from lockstep.parallel import DataParallel
from lockstep.parallel.data_parallel import Sync
from lockstep.strategies.base import MakeOptimizer
from lockstep.strategies.step import StepOptions
from lockstep.strategies.wrapped import Wrapped
from lockstep.world import World


class HandWritten(Wrapped):
    sync: Sync
    module: DataParallel

    def __init__(self, world: World, parallel: Parallel, options: StepOptions) -> None:
        super().__init__(world, parallel, options)
        self.equal_to_one_process = parallel.compression == "none"
        if options.precision == "fp16" and parallel.compression in ("topk", "powersgd"):
            raise UserError(
                f"parallel.compression {parallel.compression} does not go with train.precision fp16: what it keeps for "
                f"the next step would be in the units of another loss scale; use bf16"
            )

    def prepare(self, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        self.model = self.place(model)
        self.module = DataParallel(
            self.model,
            sync=self.sync,
            bucket_mb=self.parallel.bucket_mb,
            process_group=self.data_group,
            compression=self.parallel.compression,
            topk_ratio=self.parallel.topk_ratio,
            powersgd_rank=self.parallel.powersgd_rank,
            algorithm=self.parallel.algorithm,
        )
        self.optimizer = make_optimizer(self.trainable())

    def skips_on_device(self) -> bool:
        """Compression has to forget what it kept of a skipped step."""
        return self.parallel.compression == "none" and super().skips_on_device()

    def on_skip(self) -> None:
        self.module.forget_step()

    def own_state(self) -> dict[str, Any]:
        """What compression remembers of this rank's gradients."""
        return {"reducers": self.module.reducer_state()} if self.parallel.compression != "none" else {}

    def load_own_state(self, state: dict[str, Any]) -> None:
        if "reducers" in state and len(state["reducers"]) == len(self.module.buckets):
            self.module.load_reducer_state(state["reducers"])


class Naive(HandWritten):
    sync = "naive"


class Flat(HandWritten):
    sync = "flat"


class Overlap(HandWritten):
    sync = "overlap"


class Bucketed(HandWritten):
    sync = "bucketed"

"""Our own data parallelism, in its four modes: naive, flat, overlap, bucketed."""

from dataclasses import replace
from math import ceil
from typing import Any, cast

from torch import nn

from lockstep.comm.by_hand import ALGORITHM_NAMES
from lockstep.config import Parallel
from lockstep.errors import UserError
from lockstep.parallel import DataParallel
from lockstep.parallel.data import law
from lockstep.parallel.data.compression import COMPRESSIONS
from lockstep.parallel.data.data_parallel import Sync
from lockstep.parallel.law import Sent
from lockstep.strategies.by_hand import ByHand
from lockstep.strategies.facts import Facts, Law
from lockstep.strategies.model_sizes import ModelSizes

LAWS = {
    "bf16": "rounding of bf16",
    "fp16": "rounding of fp16",
    "int8": "rounding of 8 bits, nothing lost",
    "1bit": "nothing lost",
    "demo": "signs of sums, nothing lost",
    "topk": "equal at k=100%, nothing lost",
    "powersgd": "exact at rank 1, nothing lost",
}


SAYS = {
    "naive": "one all-reduce per parameter after backward",
    "flat": "one all-reduce of all gradients after backward",
    "overlap": "one all-reduce per parameter, as backward gives it",
    "bucketed": "buckets of gradients, sent as they fill",
}
SENDS = {
    "bf16": "2Ψ(n-1)/n, of 2 bytes",
    "fp16": "2Ψ(n-1)/n, of 2 bytes",
    "int8": "2Ψ(n-1)/n, of 1 byte",
    "1bit": "2Ψ(n-1)/n, of 1 bit",
    "demo": "(n-1) k (value, index)",
    "topk": "(n-1) k (value, index)",
    "powersgd": "2 r (rows + columns)(n-1)/n",
}


class HandWritten(ByHand):
    """`parallel.data` is the mode."""

    survives_losses = True
    takes_experts = True
    takes_any_graph = True
    takes_compression = True
    module: DataParallel

    @classmethod
    def variant(cls, parallel: Parallel, option: str) -> Parallel | None:
        if option in COMPRESSIONS:
            return replace(parallel, compression=cast(Any, option))
        return replace(parallel, algorithm=option) if option in ALGORITHM_NAMES else None

    @classmethod
    def check(cls, parallel: Parallel, precision: str, compiled: bool) -> None:
        cuts = [f"parallel.{axis} {n}" for axis in ("tp", "pp") if (n := getattr(parallel, axis)) > 1]
        if parallel.compression in ("int8", "1bit", "demo") and cuts:
            raise UserError(
                f"parallel.compression {parallel.compression} does not go with {cuts[0]}: ranks would round what they "
                f"share differently; use bf16 or powersgd"
            )
        if precision == "fp16" and parallel.compression not in ("none", "bf16", "fp16"):
            raise UserError(
                f"parallel.compression {parallel.compression} does not go with train.precision fp16: what it keeps for "
                f"the next step would be in the units of another loss scale; use bf16"
            )

    @classmethod
    def facts(cls, parallel: Parallel) -> Facts:
        compression, law, advice = parallel.compression, None, []
        if compression != "none":
            equal = replace(parallel, topk_ratio=1.0) if compression == "topk" else None
            law = Law(LAWS[compression], equal)
        if parallel.data != "bucketed":
            advice.append("--parallel.data bucketed (sends buckets while backward still computes)")
        if compression == "none":
            advice.append("--parallel.compression bf16 (half the bytes)")
        return Facts(
            says=SAYS[parallel.data] + (f"; {compression}" if compression != "none" else ""),
            sends=SENDS.get(compression, "2Ψ(n-1)/n"),
            law=law,
            overlaps=parallel.data in ("overlap", "bucketed"),
            advice=tuple(advice),
            smaller="zero1",
            planned="always" if parallel.data == "bucketed" else "no",
            one_by_one=parallel.data in ("naive", "overlap"),
        )

    @classmethod
    def traffic(cls, sizes: ModelSizes, parallel: Parallel, ranks: int) -> Sent:
        match parallel.data:
            case "flat":
                buckets = [list(reversed(sizes.sizes))]
            case "bucketed":
                buckets = sizes.buckets(parallel.bucket_mb, law.FIRST_BUCKET_SHARE)
            case _:
                buckets = [[size] for size in reversed(sizes.sizes)]
        # The outcome of backward goes with the model's own.
        flags, itemsize = len(sizes.sizes) + (sizes.kind is None), sizes.itemsize
        match parallel.compression:
            case "topk":
                return law.top_k(buckets, flags, parallel.topk_ratio, itemsize, ranks)
            case "int8" | "1bit" as name:
                return law.quantized(buckets, flags, 8 if name == "int8" else 1, itemsize, ranks)
            case "demo":
                kept = ceil(parallel.topk_ratio * law.FREQUENCIES)
                return law.frequencies(buckets, flags, kept, itemsize, ranks)
            case "powersgd":
                shapes = iter(reversed(sizes.shapes))
                shaped = [[next(shapes) for _ in bucket] for bucket in buckets]
                return law.power_sgd(shaped, flags, parallel.powersgd_rank, itemsize, ranks)
            case narrow:
                return law.all_reduced(sizes.psi, flags, len(buckets), itemsize if narrow == "none" else 2, ranks)

    def wrap(self, stage: nn.Module) -> None:
        parallel = self.parallel
        self.model = stage
        self.module = DataParallel(
            stage,
            sync=cast(Sync, parallel.data),
            bucket_mb=parallel.bucket_mb,
            process_group=self.layout.gradient,
            compression=parallel.compression,
            topk_ratio=parallel.topk_ratio,
            powersgd_rank=parallel.powersgd_rank,
            algorithm=parallel.algorithm,
            manual=self.layout.degrees.pp > 1,
        )
        self.host_decides = parallel.compression != "none"  # it forgets what it kept of a skipped step
        self.optimizer = self.options.make_optimizer(self.trainable())

    def on_skip(self) -> None:
        self.module.forget_step()

    def local_state(self) -> dict[str, Any]:
        """What compression remembers of this rank's gradients."""
        return {"reducers": self.module.reducer_state()} if self.parallel.compression != "none" else {}

    def load_local_state(self, state: dict[str, Any]) -> None:
        if "reducers" in state and len(state["reducers"]) == len(self.module.buckets):
            self.module.load_reducer_state(state["reducers"])

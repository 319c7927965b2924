"""Expert parallelism as an axis of a strategy: who shares the experts, their balance over a step, what it refuses.

Dense parts see replicate x shard x cp x tp; experts see the same ranks as ep x replicas. An expert has seen the tokens
of all ep ranks, so its gradient is reduced over its replicas alone, and divided by as much as all other gradients.

The auxiliary loss is that of the global batch. Each rank adds the gradient of its part in backward, where a block's
output passes (a pipeline's earlier stages have no loss to add it to). It multiplies the share of choices of the *whole*
step with the scores of each micro-batch; where a step has several micro-batches, these shares are counted beforehand,
in a forward pass without gradients.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lockstep.config import Parallel
from lockstep.errors import UserError
from lockstep.layout import Degrees, Layout
from lockstep.models.experts import MixtureOfExperts, mixtures_in
from lockstep.models.recompute import backward_is_running
from lockstep.parallel.experts import law
from lockstep.parallel.experts.expert_parallel import ExpertRanks, check_experts, spread_experts
from lockstep.parallel.experts.over_tensor import cut_along_width, share_tokens, width_of
from lockstep.parallel.law import NOTHING, Sent
from lockstep.strategies.native_experts import check_native_experts, spread_by_dtensor


def folds_tp(parallel: Parallel) -> bool:
    """Experts are whole, and the tp ranks take part in ep."""
    return parallel.tp > 1 and parallel.ep > 1 and not parallel.cut_experts


def cut_experts(stage: nn.Module, layout: Any, parallel: Parallel) -> set[nn.Module]:
    """Spread the experts of a model, or of a stage, in place. Returns modules whose gradients need no sum over the
    positions that sequence parallelism cuts.
    """
    over_tp, tp, apart = folds_tp(parallel), layout.group("tp"), set[nn.Module]()
    mixtures = mixtures_in(stage)
    if not mixtures:
        return apart
    group, replicas, tallied = layout.experts(parallel.ep, over_tp)
    for mixture in mixtures.values():
        apart.add(mixture.experts)
        width = None
        if tp.size > 1 and over_tp:
            share_tokens(mixture, tp, parallel.sequence)
        elif tp.size > 1:
            apart.add(mixture.router)
            width = width_of(mixture, tp)
            cut_along_width(mixture, tp, parallel.sequence)
        ranks = ExpertRanks(group, (tallied,), group.size // (tp.size if over_tp else 1))
        if "ep" in parallel.native and isinstance(layout, Layout):
            spread_by_dtensor(mixture, layout, ranks)
        else:
            spread_experts(mixture, ranks, replicas, width)
        mixture.parts = 2 if parallel.expert_halves and group.size > 1 else 1
    return apart


# ---- the balance of a step -------------------------------------------------------------------------------------------


REMEMBERED = 1000
"""Steps whose auxiliary losses are there to be read."""


class Balance:
    """Of all mixtures of a stage, over one step."""

    def __init__(self, stage: nn.Module, layout: Layout, parallel: Parallel, needs_load: bool) -> None:
        """`needs_load`: of a mixture of any stage."""
        self.named = mixtures_in(stage)
        self.layout, self.mixtures, self.needs_load = layout, list(self.named.values()), needs_load
        self.weight: Tensor | float = 0.0
        """Of the auxiliary losses, relative to a loss of which the ranks take the mean."""
        self.losses: deque[Tensor | None] = deque(maxlen=REMEMBERED)
        """This rank's part of the auxiliary losses: of this step, and of those before it; None: there was none."""
        self.copies = 1 if folds_tp(parallel) else layout.degrees.tp
        """Ranks that have the same part."""
        for mixture in self.mixtures:
            mixture.attach = self.attach

    def attach(self, y: Tensor, loss: Tensor) -> Tensor:
        """y, in whose backward the loss gets its gradient."""
        if not loss.requires_grad:
            return y
        if not backward_is_running():  # else it is recomputed
            before = self.losses[-1]
            self.losses[-1] = loss.detach() if before is None else before + loss.detach()
        attached: Tensor = _Attach.apply(y, loss, self)
        return attached

    def begin(self, weight: Tensor | float) -> None:
        """A new step."""
        self.weight = weight
        self.losses.append(None)
        for _, ranks in self.tallies():
            ranks.load_of_step = ranks.since_step = ranks.skipped = None
            ranks.tables = []

    def tallies(self) -> Iterator[tuple[str, ExpertRanks]]:
        """By the names of the mixtures."""
        for name, mixture in self.named.items():
            assert isinstance(mixture.tally, ExpertRanks), "it has been spread"
            yield name, mixture.tally

    @contextmanager
    def uncounted(self, filler: bool) -> Iterator[None]:
        """Around a pass of a filler, which is no sample."""
        for mixture in self.mixtures if filler else ():
            mixture.counted = False
        try:
            yield
        finally:
            for mixture in self.mixtures if filler else ():
                mixture.counted = True

    def needs_counting(self, micro_batches: int) -> bool:
        """The loads of the step are not known in its first forward pass. All stages agree."""
        return micro_batches > 1 and self.needs_load

    @torch.no_grad()
    def count(self, passes: Iterator[Any]) -> None:
        """Take the forward passes of all micro-batches, and keep what experts were used for."""
        loads: dict[MixtureOfExperts, Tensor] = {}

        def note(mixture: MixtureOfExperts) -> Callable[..., None]:
            def add(*_: Any) -> None:
                loads[mixture] = loads.get(mixture, torch.zeros_like(mixture.load)) + mixture.load

            return add

        hooks = [mixture.register_forward_hook(note(mixture)) for mixture in self.mixtures]
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices):  # what is dropped here is dropped again in the step
            for _ in passes:
                pass
        for hook in hooks:
            hook.remove()
        for mixture in self.mixtures:
            mixture.tally.load_of_step, mixture.tally.since_step = loads.get(mixture), None

    def skip(self, skipped: Tensor | None) -> None:
        """`skipped`: 1 on the device where the optimizer does not step."""
        for mixture in self.mixtures:
            mixture.tally.skipped = skipped


class _Attach(torch.autograd.Function):
    """The output as it is; backward gives the auxiliary loss its gradient."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor, balance: Balance) -> Tensor:
        ctx.balance, ctx.like = balance, loss
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        weight = ctx.balance.weight
        if isinstance(weight, Tensor) and weight.device == ctx.like.device:
            return gradient, weight.to(ctx.like), None
        return gradient, ctx.like.new_full((), float(weight)), None  # a number of the host: it waits for nothing


# ---- what it sends ---------------------------------------------------------------------------------------------------


def expert_traffic(balance: Balance, micro_batches: int, recomputes: bool, compute: torch.dtype | None) -> Sent:
    """Of the last step, by the law for what its routers have chosen. `compute`: the dtype of rows, if it is not that
    of the weights.
    """
    total, repeated = NOTHING, int(balance.needs_counting(micro_batches)) + int(recomputes)
    for mixture in balance.mixtures:
        ranks = mixture.tally
        assert isinstance(ranks, ExpertRanks)
        row = mixture.d_model * (compute or mixture.experts.gate.dtype).itemsize
        for table in ranks.tables or ():
            sent, received = law.rows_of_others(table, ranks.group.rank)
            total += law.exchanged(sent, received, row, repeated)
    return total


def usual_expert_traffic(
    stage: nn.Module, parallel: Parallel, tokens: int, repeated: int, compute: torch.dtype | None
) -> Sent:
    """Of one micro-batch of `tokens` on a rank, if all experts are used alike."""
    total = NOTHING
    mine = tokens / parallel.tp if folds_tp(parallel) else float(tokens)
    for mixture in mixtures_in(stage).values() if parallel.ep > 1 else ():
        rows = law.equal_use(mine, mixture.active, parallel.ep)
        row = mixture.d_model * (compute or mixture.experts.gate.dtype).itemsize
        total += law.exchanged(rows, rows, row, repeated)
    return total


def beside_tensors(stage: nn.Module, parallel: Parallel, tokens: int) -> Sent:
    """What the tp ranks send for the experts of one micro-batch of `tokens`."""
    total = NOTHING
    for mixture in mixtures_in(stage).values():
        itemsize = mixture.router.weight.element_size()
        row = mixture.d_model * itemsize
        if folds_tp(parallel):
            total += NOTHING if parallel.sequence else law.shared_tokens(tokens, row, parallel.tp)
        else:
            total += law.cut_experts(tokens, row, mixture.active * itemsize, parallel.tp, parallel.sequence)
    return total


# ---- mistakes --------------------------------------------------------------------------------------------------------


def check_expert_axis(model: nn.Module, parallel: Parallel, micro_batches: int, takes_experts: bool, who: str) -> None:
    """Refuse what cannot be cut, with what would work. `who`: the engines that take experts."""
    mixtures = mixtures_in(model)
    if not mixtures:
        asked = (("ep", parallel.ep > 1), ("cut_experts", parallel.cut_experts))
        for name, chosen in (*asked, ("expert_halves", parallel.expert_halves)):
            if chosen:
                raise UserError(
                    f"parallel.{name} is about experts, and {type(model).__name__} has none; set model.experts, or "
                    f"leave it out"
                )
        return
    if "pp" in parallel.native:
        raise UserError(
            "PyTorch's pipeline pads micro-batches, and routers would take the padding for tokens; leave pp out of "
            "parallel.native"
        )
    if not takes_experts:
        raise UserError(f"the model has experts, and parallel.data {parallel.data} does not take them; use {who}")
    for mixture in mixtures.values():
        check_experts(mixture, parallel.ep)
        width = mixture.experts.gate.shape[1]
        if parallel.tp > 1 and not folds_tp(parallel) and width % parallel.tp:
            raise UserError(
                f"parallel.tp {parallel.tp} does not divide the width of an expert, {width}; use --parallel.ep with "
                f"whole experts, or another model.expert_width"
            )
    if any(mixture.capacity is not None for mixture in mixtures.values()):
        check_capacity(parallel, micro_batches)
    if parallel.ep == 1 and (parallel.cut_experts or parallel.expert_halves):
        raise UserError("parallel.cut_experts and parallel.expert_halves are about parallel.ep, and that is 1")
    if parallel.cut_experts and parallel.tp == 1:
        raise UserError("parallel.cut_experts cuts experts over the ranks of parallel.tp, and that is 1; leave it out")


def check_capacity(parallel: Parallel, micro_batches: int) -> None:
    """Which tokens are the first ones must be known when they are routed."""
    for name, chosen in (
        (f"parallel.cp {parallel.cp}", parallel.cp > 1),
        ("parallel.sequence", parallel.sequence),
        ("parallel.expert_halves", parallel.expert_halves),
        (f"{micro_batches} micro-batches", micro_batches > 1),
    ):
        if chosen:
            raise UserError(
                f"model.capacity takes each expert's first tokens, and {name} routes them in another order than one "
                f"process; leave model.capacity out, which drops none"
            )


def check_fold(parallel: Parallel, degrees: Degrees) -> None:
    """Refuse a degree that does not divide the ranks that experts are folded over."""
    if parallel.ep == 1:
        return
    over_tp = folds_tp(parallel)
    ranks = degrees.replicate * degrees.shard * degrees.cp * (degrees.tp if over_tp else 1)
    if "ep" in parallel.native:
        check_native_experts(parallel, ranks)
    said = "replicate x shard x cp" + (" x tp" if over_tp else "")
    if ranks % parallel.ep:
        fits = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
        raise UserError(
            f"parallel.ep {parallel.ep} does not divide the {ranks} ranks of {said}; degrees that do: {fits}"
        )
    if over_tp and parallel.ep % parallel.tp:
        raise UserError(
            f"parallel.ep {parallel.ep} is no multiple of parallel.tp {parallel.tp}, over whose ranks experts are "
            f"spread too; use a multiple, or --parallel.cut-experts"
        )

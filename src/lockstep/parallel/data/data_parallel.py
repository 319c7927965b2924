"""Data parallelism by hand: every rank holds the whole model, computes its share of the batch, and averages gradients.

How the communication goes, per step:

1. forward and backward run on each rank's own samples; autograd produces the gradients from the last layer to the first
2. gradients are copied into buckets, and each bucket is all-reduced; the four modes differ only in what a bucket is and
   when its all-reduce is issued:

       sync       a bucket is                    its all-reduce is issued
       naive      one parameter                  after backward, one after the other
       flat       all parameters                 after backward
       overlap    one parameter                  as soon as its gradient is ready
       bucketed   parameters up to `bucket_mb`   as soon as all its gradients are ready

3. when backward is over, the remaining all-reduces are issued, and all are waited for; then `p.grad` is the mean over
   the ranks, and every rank's optimizer takes the same step

All-reduces are issued in the same order on every rank, whatever order the gradients come in: collectives are matched
by order, and a rank that skips a parameter must not swap two of them.
"""

from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from lockstep.comm.by_hand import check_algorithm
from lockstep.comm.collectives import all_gather
from lockstep.comm.hosts import flag_device, sum_over_ranks
from lockstep.comm.ledger import about, standing_still
from lockstep.errors import UserError
from lockstep.layout.group import GroupLike, group_of, replicas_of
from lockstep.parallel.data.bucket import Bucket, Outcome, assign_buckets
from lockstep.parallel.data.compression import make_reducer
from lockstep.parallel.data.law import FIRST_BUCKET_SHARE
from lockstep.parallel.data.wrapper import GradientWrapper, broadcast_module, check_same_model

Sync = Literal["naive", "flat", "overlap", "bucketed"]
MIB = 1024 * 1024


class DataParallel(GradientWrapper):
    """Wraps a module; call it like the module.

        model = lockstep.DataParallel(model, sync="bucketed")
        model(inputs).sum().backward()  # now p.grad is the mean over the ranks
        optimizer.step()
        optimizer.zero_grad()

    All ranks begin with the first rank's weights. Parameters keep their names.
    """

    def __init__(
        self,
        module: nn.Module,
        sync: Sync = "bucketed",
        bucket_mb: float = 25.0,
        process_group: GroupLike = None,
        compression: str = "none",
        topk_ratio: float = 0.01,
        powersgd_rank: int = 4,
        algorithm: str = "native",
        manual: bool = False,
    ) -> None:
        """`algorithm`: the backend's own all-reduce, one of `comm/algorithms.py` (ring, tree, ...), or auto.

        `manual`: gradients are the mean only after `finish_gradient_synchronization()`.
        """
        super().__init__(module, group_of(process_group, "replicate"), manual)
        if sync not in get_args(Sync):
            raise UserError(f"sync is {sync!r}, but it must be one of {', '.join(get_args(Sync))}")
        check_algorithm(algorithm)
        self.sync = sync
        check_same_model(module, self.group)
        broadcast_module(module, self.group)

        trainable = [p for p in module.parameters() if p.requires_grad]
        sparse = _sparse_parameters(module)
        self._sparse = [p for p in trainable if p in sparse]
        dense = [p for p in trainable if p not in sparse]
        make_reducer(compression, topk_ratio, powersgd_rank)  # refuses a wrong name, at world size 1 too
        groups = [g for g in self._group(dense, bucket_mb) if replicas_of(g[0], self.group).size > 1]
        self._overlaps = sync in ("overlap", "bucketed")
        self.buckets = [Bucket(g, replicas_of(g[0], self.group), g is groups[-1], algorithm) for g in groups]
        self._reducers = [make_reducer(compression, topk_ratio, powersgd_rank) for _ in self.buckets]
        self._issued = 0  # all-reduces of this round that are in flight: always those of the first buckets
        self._places: dict[Tensor, tuple[Bucket, int]]
        self._places = {p: (bucket, index) for bucket in self.buckets for index, p in enumerate(bucket.parameters)}
        for parameter in [*self._places, *self._sparse] if self.group.size > 1 else []:
            self.watch(parameter)

    def _group(self, parameters: list[nn.Parameter], bucket_mb: float) -> list[list[nn.Parameter]]:
        kind = partial(replicas_of, others=self.group)
        if self.sync == "flat":
            found = assign_buckets(parameters, float("inf"), kind=kind)
        elif self.sync == "bucketed":
            found = assign_buckets(parameters, bucket_mb * MIB, FIRST_BUCKET_SHARE * bucket_mb * MIB, kind)
        else:
            found = [[p] for p in reversed(parameters)]
        # The last one carries the outcome of backward, and must reach all ranks.
        of_all = [bucket for bucket in found if kind(bucket[0]) == self.group]
        return sorted(found, key=lambda bucket: bool(of_all) and bucket is of_all[-1])

    # ---- backward ----------------------------------------------------------------------------------------

    def gradient_ready(self, parameter: Tensor) -> None:
        if not self._overlaps or parameter not in self._places or parameter.grad is None:
            return
        bucket, index = self._places[parameter]
        if not bucket.placed[index]:  # else it is late: see `_finish_all_reduces`
            bucket.place(index)
            if bucket.missing == 0:
                self._issue_ready_buckets()

    def _issue_ready_buckets(self) -> None:
        """In order, as far as buckets are ready; the last bucket is issued when backward is over."""
        while self._issued < len(self.buckets) - 1 and self.buckets[self._issued].missing == 0:
            self._issue_next()

    def _issue_next(self) -> None:
        bucket = self.buckets[self._issued]
        bucket.raise_flags()
        with about(f"bucket {self._issued}"):
            bucket.finish = self._reducers[self._issued].start(bucket)
        self._issued += 1

    # ---- when backward is over ---------------------------------------------------------------------------

    def close_round(self) -> None:
        if self.group.size == 1:
            return
        while self._finish_all_reduces():
            pass
        for parameter in self._sparse:
            average_sparse_gradient(parameter, self.group)

    def _finish_all_reduces(self, failed: bool = False) -> bool:
        """Issue the remaining all-reduces and wait for all. True if some rank has late gradients. `failed`: this
        rank's backward has raised, and its gradients are invalid; the other ranks then raise an error.

        A gradient is late if its parameter already has one in the bucket: with re-entrant checkpointing, or (manual)
        after a second backward. It is then left in `p.grad`. The last bucket carries whether any rank has late
        gradients (on GPUs the hosts exchange that, rather than wait for it); if so, each adds its own to the mean, and
        everything is averaged once more: the mean over the ranks of (mean of the first + own late one) is the mean of
        both.
        """
        late = [(p, p.grad) for bucket in self.buckets for p in bucket.late_parameters()]
        for parameter, _ in late:
            parameter.grad = None
        outcome = Outcome.FAILED if failed else Outcome.LATE if late else Outcome.COMPLETE
        if self.buckets:
            self.buckets[-1].outcome = outcome
        while self._issued < len(self.buckets):
            self.buckets[self._issued].place_rest()
            with standing_still():  # backward is over
                self._issue_next()
            if self.sync == "naive":
                self.buckets[self._issued - 1].hand_over()
        if self.sync != "naive":
            for bucket in self.buckets:
                bucket.hand_over()
        self._issued = 0
        for parameter, gradient in late:
            assert parameter.grad is not None
            assert gradient is not None
            parameter.grad.add_(gradient)
        return bool(self.buckets) and self._worst_outcome(outcome) is Outcome.LATE

    def _worst_outcome(self, local: Outcome) -> Outcome:
        """The worst outcome of all ranks' backward passes."""
        last = self.buckets[-1]
        device = last.buffer.device
        if flag_device(self.group, device) == device:
            worst = Outcome.worst(last.total_of_outcomes())
        else:
            worst = Outcome.worst(sum_over_ranks(local.value, device, self.group))
        if worst is Outcome.FAILED and local is not Outcome.FAILED:
            raise UserError(
                "the backward of another rank has failed, and that rank has gone on without this step: ranks would "
                "part; let the error end the rank, or have all ranks skip the step together"
            )
        return worst

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the module's; also drops a round that was begun and not closed, on every rank alike.

        Ranks may have issued different numbers of all-reduces, so the round is closed before it is dropped.
        """
        if self._round_is_open or any(any(bucket.placed) for bucket in self.buckets):
            with torch.no_grad():
                self._finish_all_reduces(failed=True)
            self.forget_step()
            self._round_is_open = False
        super().zero_grad(set_to_none)

    # ---- state -------------------------------------------------------------------------------------------

    def reducer_state(self) -> list[dict[str, Tensor]]:
        """What compression remembers, per bucket."""
        return [reducer.state() for reducer in self._reducers]

    def forget_step(self) -> None:
        """The step was skipped: compression restores its residuals from before the step."""
        for reducer in self._reducers:
            reducer.forget_step()

    def load_reducer_state(self, states: list[dict[str, Tensor]]) -> None:
        for reducer, bucket, state in zip(self._reducers, self.buckets, states, strict=True):
            reducer.load_state({name: tensor.to(bucket.buffer.device) for name, tensor in state.items()})


# ---- sparse gradients ---------------------------------------------------------------------------------------


def _sparse_parameters(module: nn.Module) -> set[Tensor]:
    layers = (m for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse)
    return {layer.weight for layer in layers}


def average_sparse_gradient(parameter: nn.Parameter, group: GroupLike = None) -> None:
    """Average a row-sparse gradient: gather every rank's (row, values) pairs, padded to the longest, and add up."""
    gradient = parameter.grad
    if gradient is not None:
        gradient = (gradient if gradient.is_sparse else gradient.to_sparse(1)).coalesce()
        rows, values = gradient.indices()[0], gradient.values()
    else:
        rows, values = (
            parameter.new_empty(0, dtype=torch.long),
            parameter.new_empty((0, *parameter.shape[1:])),
        )
    mine = torch.tensor([len(rows), gradient is not None], device=parameter.device)
    counts = all_gather(mine, group=group, purpose="flags")  # (ranks, 2)
    if not bool(counts[:, 1].any()):
        return  # unused everywhere: grad stays None
    longest = int(counts[:, 0].max())
    padded_rows, padded_values = rows.new_zeros(longest), values.new_zeros((longest, *values.shape[1:]))
    padded_rows[: len(rows)], padded_values[: len(rows)] = rows, values
    all_rows = all_gather(padded_rows, group=group, purpose="gradients")
    all_values = all_gather(padded_values, group=group, purpose="gradients")
    own = torch.arange(longest, device=rows.device) < counts[:, :1]  # (ranks, longest): not padding
    mean = all_values[own] / group_of(group).size
    parameter.grad = torch.sparse_coo_tensor(all_rows[own][None], mean, parameter.shape).coalesce()

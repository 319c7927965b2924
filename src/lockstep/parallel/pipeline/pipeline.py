"""Pipeline parallelism by hand: consecutive layers on consecutive ranks, micro-batches following each other.

    pipe = lockstep.Pipeline(model, schedule="1f1b", micro_batches=8)
    optimizer = torch.optim.AdamW(pipe.parameters())
    for inputs, targets in data:  # the same on every rank
        loss = pipe.step(inputs, targets, F.cross_entropy)
        optimizer.step()
        optimizer.zero_grad()

Every rank builds the same model and keeps its parts of it (`stage.py`). `step` executes the schedule's list for this
rank (`schedule.py`): its passes (`passes.py`), and the sends and receives between them (`messages.py`).
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from lockstep.comm.collectives import all_gather_objects, broadcast
from lockstep.data.batch import Batch
from lockstep.errors import UserError
from lockstep.layout.group import GroupLike, group_of
from lockstep.models.autocast import autocast_dtype
from lockstep.models.experts import mixtures_in
from lockstep.parallel.data.wrapper import broadcast_module, check_same_model
from lockstep.parallel.guards import mark_spread
from lockstep.parallel.holding import Holder
from lockstep.parallel.pipeline.messages import Post
from lockstep.parallel.pipeline.passes import Passes
from lockstep.parallel.pipeline.schedule import Instruction, pipeline_schedule, placement_of
from lockstep.parallel.pipeline.stage import cut_stage
from lockstep.parallel.pipeline.tied import TiedGradients

Loss = Callable[..., Tensor]
"""(outputs, targets) -> the mean over the targets."""


class Pipeline(Holder):
    """One rank's part of a model that is spread over the ranks of a group, layer after layer.

        pipe = lockstep.Pipeline(model, schedule="1f1b", micro_batches=4)
        optimizer = torch.optim.AdamW(pipe.parameters())
        loss = pipe.step(inputs, targets, F.cross_entropy)  # forward, backward, and what is between the ranks
        optimizer.step()

    Every rank gives the same inputs and targets, and gets the same loss.
    """

    def __init__(
        self,
        module: nn.Module,
        schedule: str = "1f1b",
        micro_batches: int = 8,
        chunks: int = 1,
        process_group: GroupLike = None,
        cuts: Sequence[int] | None = None,
        recompute: bool | Collection[int] = False,
    ) -> None:
        """Cut `module`, which every rank holds in full, in place. All ranks start from the first rank's weights.

        `schedule`: naive, gpipe, 1f1b, interleaved, zb-h1 or zb-v. `chunks`: parts per rank (interleaved, zb-v).
        `cuts`: the layers at which parts after the first begin; None: balanced by cost. `recompute`: keep only
        a part's inputs, and recompute the rest in backward; for all parts, or for those with these numbers.
        """
        self.group, self.micro_batches = group_of(process_group, "pp"), micro_batches
        lists = pipeline_schedule(schedule, self.group.size, micro_batches, chunks)
        check_mixtures(module)
        self.instructions, self.placement = lists[self.group.rank], placement_of(schedule, self.group.size, chunks)
        check_same_model(module, self.group)
        broadcast_module(module, self.group)
        self.module = self.stage = cut_stage(module, self.placement, self.group, cuts)
        self._last_pass = next((i for i in reversed(self.instructions) if i.reduces), None)
        if self.group.size > 1:
            mark_spread(self.stage.parameters(), "Pipeline")
        self.device = next((p.device for p in self.stage.parameters()), torch.device("cpu"))
        post = Post(lists, self.placement, self.group, self.device)
        self._tied = TiedGradients(self.stage, post)
        self._passes = Passes(self.stage, post, self.placement, self.group.rank, recompute)
        self._passes.splits_backward = schedule.startswith("zb-")
        self._last = self.placement.place(self.placement.parts - 1)[0]

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's."""
        return self.stage.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's, by their names in the whole model."""
        return self.stage.named_parameters()

    def step(self, inputs: Tensor, targets: Tensor, loss_fn: Loss) -> Tensor:
        """Forward and backward of a batch, the same on all ranks. Returns the mean loss over all targets, in float64,
        on every rank; gradients are added to those already in `p.grad`.

        `loss_fn(outputs, targets)` is a mean, over samples or over tokens that are not -100. Micro-batches are weighted
        by their number of targets.
        """
        batch = Batch(inputs.to(self.device), targets.to(self.device))
        micro_batches = batch.micro_batches(self.micro_batches)
        counts = [float(m.target_count()) for m in micro_batches]
        total = torch.zeros((), device=self.device, dtype=torch.float64)

        def loss_of(outputs: Tensor, i: int) -> Tensor:
            if counts[i] == 0:  # a micro-batch without samples, or whose targets are all ignored
                return sum_of(outputs) * 0.0
            loss = loss_fn(outputs, micro_batches[i].targets) * (counts[i] / sum(counts))
            total.add_(loss.detach())
            return loss

        before = {parameter: parameter.grad for _, parameter in self._tied.parameters()}
        for parameter in before:  # the sum over the stages is of this step's gradients
            parameter.grad = None
        shapes = (*(tuple(m.inputs.shape) for m in micro_batches), inputs.dtype, autocast_dtype(self.device))
        self._passes.begin(shapes, lambda i: micro_batches[i].inputs, loss_of)
        for instruction in self.instructions:
            if instruction is self._last_pass:
                self._tied.receive()
            self._passes.carry_out(instruction)
        self._passes.end()
        self._tied.send()
        self._tied.add()
        for parameter, earlier in before.items():
            if earlier is not None:
                assert parameter.grad is not None
                parameter.grad += earlier
        return broadcast(total, src=self._last, group=self.group, purpose="loss")

    def spans(self) -> list[tuple[Instruction, float, float]]:
        """When each pass of the last step began and ended: seconds of the host's clock; on a GPU, since the first."""
        return self._passes.seconds()

    # ---- the whole, for looking at -----------------------------------------------------------------------------

    def full_gradients(self) -> dict[str, Tensor]:
        """Whole gradients by the model's own names, on every rank; parameters without one are left out."""
        return self._gathered({n: p.grad for n, p in self.stage.named_parameters() if p.grad is not None})

    def full_state_dict(self) -> dict[str, Tensor]:
        """Parameters and buffers by the model's own names, tied ones under each of theirs, on every rank."""
        mine = {name: tensor.detach() for name, tensor in self.stage.named_parameters()}
        mine |= {name: tensor for name, tensor in self.stage.named_buffers() if name in self.stage.state_dict()}
        found = self._gathered(mine)
        tied = {name: found[first] for name, first in self.stage.first_names.items()}
        return {**found, **tied}

    def _gathered(self, mine: dict[str, Tensor]) -> dict[str, Tensor]:
        kinds = {name: (tuple(t.shape), t.dtype) for name, t in mine.items()}
        found: dict[str, Tensor] = {}
        for rank, theirs in enumerate(all_gather_objects(kinds, self.group)):
            for name, (shape, dtype) in theirs.items():
                if name not in found:
                    own = rank == self.group.rank
                    whole = mine[name].clone() if own else torch.empty(shape, dtype=dtype, device=self.device)
                    found[name] = broadcast(whole.contiguous(), rank, self.group, purpose="check")
        return found


def sum_of(outputs: Any) -> Tensor:
    tensors = [t for t in tree_flatten(outputs)[0] if isinstance(t, Tensor) and t.requires_grad]
    return torch.stack([t.sum() for t in tensors]).sum()


def check_mixtures(module: nn.Module) -> None:
    """Refuse experts whose stage has no loss to add theirs to, or that must see a whole batch at once."""
    for name, mixture in mixtures_in(module).items():
        if mixture.needs_load or mixture.capacity is not None:
            what = "an auxiliary loss" if mixture.needs_load else "a capacity"
            raise UserError(
                f"the experts of {name} have {what} of the whole batch, which micro-batches in stages do not have; use "
                f'balance="bias" without z_loss and capacity, or lockstep train --parallel.pp'
            )

"""Local SGD and DiLoCo: train apart, average every K steps.

Every rank takes K optimizer steps on its own data without any communication, then:

- Local SGD (no outer optimizer): the parameters become their mean over the ranks.
- DiLoCo (Douillard et al. 2023): the last common parameters minus the mean serve as a gradient, and an
  outer optimizer (SGD with Nesterov momentum) takes one step with it from the last common parameters.

The traffic is 1/K of data parallelism's. With K = 1, plain averaging and an optimizer that is linear in the gradient
(SGD, with or without momentum), it is data parallelism.
"""

from typing import Any

import torch
from torch import Tensor, nn

from lockstep.comm.collectives import all_reduce
from lockstep.errors import UserError
from lockstep.layout.group import GroupLike, group_of
from lockstep.parallel.data.bucket import assign_buckets
from lockstep.parallel.data.wrapper import broadcast_module, check_same_model
from lockstep.parallel.holding import Holder

CHUNK_BYTES = 25 * 1024 * 1024


class LocalSGD(Holder):
    """Call `after_step()` after each optimizer step; every `every` steps it averages the model.

        averaging = lockstep.LocalSGD(model, every=8)
        model(inputs).sum().backward()  # nothing is sent
        optimizer.step()
        averaging.after_step()

    `outer_lr` above 0: DiLoCo, an outer step of SGD with Nesterov momentum on the averaged change.
    """

    def __init__(
        self,
        module: nn.Module,
        every: int = 8,
        outer_lr: float = 0.0,
        outer_momentum: float = 0.9,
        process_group: GroupLike = None,
    ) -> None:
        if every < 1:
            raise UserError(f"every is {every}, but parameters are averaged every 1 or more steps")
        self.module, self.every, self.group = module, every, group_of(process_group, "replicate")
        self.steps = 0
        check_same_model(module, self.group)
        broadcast_module(module, self.group)
        self.trainable = [p for p in module.parameters() if p.requires_grad]
        self.outer_parameters: list[Tensor] = []
        self.outer: torch.optim.Optimizer | None = None
        if outer_lr > 0:
            self.outer_parameters = [p.detach().clone() for p in self.trainable]
            self.outer = torch.optim.SGD(self.outer_parameters, outer_lr, outer_momentum, nesterov=outer_momentum > 0)

    def after_step(self) -> bool:
        """Count one step; True if parameters were averaged."""
        self.steps += 1
        if self.steps % self.every:
            return False
        self.average()
        return True

    @torch.no_grad()
    def average(self) -> None:
        """Average the model now; call it also after the last step, when ranks may still differ."""
        self._average([p.data for p in self.trainable])
        self._average([b for b in self.module.buffers() if b.is_floating_point()])
        if self.outer is not None:
            for start, parameter in zip(self.outer_parameters, self.trainable, strict=True):
                start.grad = start - parameter  # descending this gradient with lr 1 would land on the mean
            self.outer.step()
            for start, parameter in zip(self.outer_parameters, self.trainable, strict=True):
                parameter.copy_(start)

    def _average(self, tensors: list[Tensor]) -> None:
        """Mean over the ranks, in as many all-reduces as there are 25 MiB chunks and dtypes."""
        if self.group.size == 1:
            return
        for chunk in assign_buckets(tensors, CHUNK_BYTES):
            flat = torch.cat([t.reshape(-1) for t in chunk]).div_(self.group.size)
            all_reduce(flat, group=self.group, purpose="parameters")
            for tensor, part in zip(chunk, flat.split([t.numel() for t in chunk]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"steps": self.steps, "meeting_point": self.outer_parameters}
        return state if self.outer is None else {**state, "outer": self.outer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
        with torch.no_grad():
            for mine, theirs in zip(self.outer_parameters, state["meeting_point"], strict=True):
                mine.copy_(theirs)
        if self.outer is not None:
            self.outer.load_state_dict(state["outer"])

    @torch.no_grad()
    def restart(self) -> None:
        """The model has been replaced by one that is the same on all ranks: continue from there."""
        self.steps = 0
        for mine, parameter in zip(self.outer_parameters, self.trainable if self.outer_parameters else [], strict=True):
            mine.copy_(parameter)

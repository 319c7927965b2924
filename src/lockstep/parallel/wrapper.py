"""What the wrappers have in common that make gradients the mean over the ranks, and how all ranks start alike."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.comm.collectives import Group, all_gather_objects, all_reduce_async, broadcast, group_size
from lockstep.comm.hosts import flag_device
from lockstep.errors import UserError


class GradientWrapper(nn.Module, ABC):
    """Call it like the module, and `finish_gradient_synchronization()` between backward and the optimizer's step."""

    def __init__(self, module: nn.Module, group: Group) -> None:
        super().__init__()
        self.module, self.group = module, group
        self._synchronizing = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.synchronize_buffers()
        return self.module(*args, **kwargs)

    def synchronize_buffers(self) -> None:
        """Before a forward pass that trains, running statistics become the first rank's."""
        if self._synchronizing and self.training and torch.is_grad_enabled():
            broadcast_buffers(self.module, self.group)

    @abstractmethod
    def finish_gradient_synchronization(self) -> None:
        """Make every `p.grad` the mean over the ranks. Every rank must call it, once per step."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward adds to each rank's own whole gradients; the next backward outside averages the sum."""
        before, self._synchronizing = self._synchronizing, False
        try:
            yield
        finally:
            self._synchronizing = before


class Flags:
    """Told to all ranks: which parameters a rank has used, and whether it has gradients that came too late."""

    def __init__(self, used: list[bool], late: bool, device: torch.device, group: Group) -> None:
        self._flags = torch.tensor([*used, late], dtype=torch.float32, device=flag_device(group, device))
        self._telling = all_reduce_async(self._flags, group=group, purpose="flags")

    def read(self) -> tuple[list[bool], bool]:
        """The same, of any rank."""
        self._telling.wait()
        *used, late = (self._flags > 0).tolist()
        return used, late


# ---- what ranks must agree on before they start -------------------------------------------------------------


def check_same_model(module: nn.Module, group: Group = None) -> None:
    """Refuse, on every rank alike, models that differ between ranks: their collectives would mismatch or hang."""
    mine = [(n, tuple(p.shape), str(p.dtype), p.requires_grad) for n, p in module.named_parameters()]
    everyone = all_gather_objects(mine, group)
    for rank, theirs in enumerate(everyone):
        if theirs == everyone[0]:
            continue
        if len(theirs) != len(everyone[0]):
            raise UserError(
                f"rank {rank} has {len(theirs)} parameters and rank 0 has {len(everyone[0])}: build the same model"
            )
        a, b = next(pair for pair in zip(theirs, everyone[0], strict=True) if pair[0] != pair[1])
        raise UserError(f"rank {rank} has parameter {a} where rank 0 has {b}: build the same model on every rank")


@torch.no_grad()
def broadcast_module(module: nn.Module, group: Group = None) -> None:
    """Give every rank the first rank's parameters, frozen ones too, and buffers."""
    if group_size(group) == 1:
        return
    for tensor in [*module.parameters(), *module.buffers()]:
        broadcast_tensor(tensor, group)


@torch.no_grad()
def broadcast_tensor(tensor: Tensor, group: Group = None) -> None:
    """Everybody takes the first rank's, in place, also where it is not contiguous."""
    if tensor.is_contiguous():
        broadcast(tensor.data, group=group, purpose="parameters")
    else:
        tensor.data.copy_(broadcast(tensor.data.contiguous(), group=group, purpose="parameters"))


@torch.no_grad()
def broadcast_buffers(module: nn.Module, group: Group = None) -> None:
    """Before a forward pass: everybody starts from the first rank's running statistics, one broadcast per dtype."""
    if group_size(group) == 1:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for buffer in module.buffers():
        by_dtype.setdefault(buffer.dtype, []).append(buffer)
    for buffers in by_dtype.values():
        flat = broadcast(torch.cat([b.reshape(-1) for b in buffers]), group=group, purpose="buffers")
        for buffer, part in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
            buffer.copy_(part.view_as(buffer))

"""Gradients of a weight that several stages of a pipeline have (a tied embedding): each needs the sum over the stages.

The stage with the head is through with its passes before the first stage is. So each stage sends its gradient when its
passes are over, and waits for the others' from the beginning of its last pass on: what the head's stage sends is in
flight while the first stage still computes, and only the first stage's own gradient is waited for.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from lockstep.comm.collectives import Pending, recv_async, send_async
from lockstep.comm.ledger import about
from lockstep.layout.group import Group
from lockstep.layout.region import local
from lockstep.parallel.pipeline.stage import Stage


class TiedGradients:
    """Of one rank's stage, for one step after the other."""

    def __init__(
        self,
        stage: Stage,
        rank: int,
        towards: tuple[Group, Group],
        gradient_of: Callable[[nn.Parameter], Tensor] | None = None,
    ) -> None:
        """`towards`: the post's groups, to later ranks and to earlier ones. In one group NCCL would work through what a
        pair sends each other in turn, and both would wait in a receive. `gradient_of`: what to sum in place, where it
        is not `p.grad`.
        """
        self.stage, self.rank = stage, rank
        self._later, self._earlier = towards
        self.gradient_of = gradient_of or gradient_or_zeros
        self._received: dict[tuple[str, int], tuple[Tensor, Pending]] = {}
        self._sent: list[tuple[Tensor, Pending]] = []

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Trained ones that other stages have too."""
        shared = self.stage.shared
        yield from ((n, p) for n, p in self.stage.named_parameters() if n in shared and p.requires_grad)

    def receive(self) -> None:
        """Issue the receives, unless they are."""
        if self._received:
            return
        for name, parameter in self.parameters():
            for other in self._others(name):
                gradient = torch.empty_like(self.gradient_of(parameter), memory_format=torch.contiguous_format)
                with about(f"tied {name}"):
                    way = self._later if other < self.rank else self._earlier
                    self._received[name, other] = gradient, recv_async(gradient, other, way, purpose="gradients")

    @torch.no_grad()
    def send(self) -> None:
        """Issue the sends of this stage's own gradients, zeros where there is none."""
        for name, parameter in self.parameters():
            mine = self.gradient_of(parameter).contiguous()
            with about(f"tied {name}"):
                for other in self._others(name):
                    way = self._later if other > self.rank else self._earlier
                    self._sent.append((mine, send_async(mine, other, way, purpose="gradients")))

    @torch.no_grad()
    def add(self) -> None:
        """Wait for all of them, and make each gradient the sum, in one order of the stages on all of them."""
        for _, pending in self._sent:  # what is being sent must not change
            pending.wait()
        self._sent = []
        for name, parameter in self.parameters():
            mine = self.gradient_of(parameter)
            parts = [mine if r == self.rank else self._take(name, r) for r in self.stage.shared[name]]
            mine.copy_(torch.stack(parts).sum(0) if len(parts) > 2 else parts[0] + parts[1])

    def _take(self, name: str, other: int) -> Tensor:
        gradient, pending = self._received.pop((name, other))
        pending.wait()
        return gradient

    def _others(self, name: str) -> list[int]:
        return [rank for rank in self.stage.shared[name] if rank != self.rank]


def gradient_or_zeros(parameter: nn.Parameter) -> Tensor:
    """What this rank holds of it."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return local(parameter.grad)

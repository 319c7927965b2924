"""Gradients of a weight that several stages of a pipeline have (a tied embedding): each needs the sum over the stages.

The stage with the head finishes its passes before the first stage does. So each stage sends its gradient when its
passes are over, and issues its receives before its last pass: what the head's stage sends is in
flight while the first stage still computes, and only the first stage's own gradient is exposed.
"""

from collections.abc import Callable, Iterator
from itertools import combinations

import torch
from torch import Tensor, nn

from lockstep.comm.collectives import recv_async, send_async
from lockstep.comm.ledger import about
from lockstep.comm.pending import Pending
from lockstep.layout.region import local
from lockstep.parallel.pipeline.messages import Post
from lockstep.parallel.pipeline.stage import Stage


class TiedGradients:
    """Exchanges the tied gradients of one rank's stage, step by step."""

    def __init__(self, stage: Stage, post: Post, gradient_of: Callable[[nn.Parameter], Tensor] | None = None) -> None:
        """`gradient_of`: what to sum in place, where it is not `p.grad`.

        Messages to later ranks and to earlier ones use the post's two groups: in one group NCCL would run messages of
        a pair in order, and both ranks would wait in a receive.
        """
        self.stage, self.rank, self.device = stage, post.rank, post.device
        self._later, self._earlier = post.towards
        self.gradient_of = gradient_of or gradient_or_zeros
        self._received: dict[tuple[str, int], tuple[Tensor, Pending]] = {}
        self._sent: list[tuple[Tensor, Pending]] = []
        if "nccl" in self._later.backend and self._later.size > 1:
            self._connect()

    def _connect(self) -> None:
        """Send one number each way between every two stages that share a weight, pairs in the same order. NCCL connects
        a pair at its first message, and blocks until the other side issues one too: the receives of a step would wait
        for each other.
        """
        pairs = {pair for ranks in self.stage.shared.values() for pair in combinations(sorted(ranks), 2)}
        for lower, higher in sorted(pairs):
            number = torch.zeros(1, device=self.device)
            if self.rank == lower:
                send_async(number, higher, self._later, purpose="setup").wait()
                recv_async(number, higher, self._earlier, purpose="setup").wait()
            elif self.rank == higher:
                recv_async(number, lower, self._later, purpose="setup").wait()
                send_async(number, lower, self._earlier, purpose="setup").wait()

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Trained parameters that other stages have too, in the same order on all: messages are matched by order."""
        named = dict(self.stage.named_parameters())
        yield from ((n, named[n]) for n in self.stage.shared if n in named and named[n].requires_grad)

    def receive(self) -> None:
        """Issue the receives, unless they have been issued."""
        if self._received:
            return
        for name, parameter in self.parameters():
            like = self.gradient_of(parameter)
            for other in self._others(name):
                gradient = torch.empty(like.shape, dtype=like.dtype, device=self.device)
                with about(f"tied {name}"):
                    way = self._later if other < self.rank else self._earlier
                    self._received[name, other] = gradient, recv_async(gradient, other, way, purpose="gradients")

    @torch.no_grad()
    def send(self) -> None:
        """Issue the sends of this stage's own gradients, zeros where there is none."""
        for name, parameter in self.parameters():
            mine = self.gradient_of(parameter).to(self.device).contiguous()
            with about(f"tied {name}"):
                for other in self._others(name):
                    way = self._later if other > self.rank else self._earlier
                    self._sent.append((mine, send_async(mine, other, way, purpose="gradients")))

    @torch.no_grad()
    def add(self) -> None:
        """Wait for all of them, and make each gradient the sum, added in the same order of stages on every rank."""
        for _, pending in self._sent:  # what is being sent must not change
            pending.wait()
        self._sent = []
        for name, parameter in self.parameters():
            mine = self.gradient_of(parameter)
            parts = [mine if r == self.rank else self._take(name, r).to(mine.device) for r in self.stage.shared[name]]
            mine.copy_(torch.stack(parts).sum(0) if len(parts) > 2 else parts[0] + parts[1])

    def _take(self, name: str, other: int) -> Tensor:
        gradient, pending = self._received.pop((name, other))
        pending.wait()
        return gradient

    def _others(self, name: str) -> list[int]:
        return [rank for rank in self.stage.shared[name] if rank != self.rank]


def gradient_or_zeros(parameter: nn.Parameter) -> Tensor:
    """What this rank holds of the parameter's gradient; zeros where it has none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return local(parameter.grad)

"""The passes of one rank of a pipeline: forward and backward of its parts, with what is held between them."""

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lockstep.comm.ledger import Mark, mark, seconds_between
from lockstep.parallel.pipeline.messages import Message, Post
from lockstep.parallel.pipeline.schedule import PASSES, Instruction, Placement
from lockstep.parallel.pipeline.weight_pass import WeightPass


@dataclass
class SavedForward:
    """A micro-batch between its forward and the end of its backward, in one part."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    """Or the loss, of the last part."""
    weights: WeightPass | None


class Passes:
    """Carries out a schedule's instructions for one rank and one step at a time."""

    def __init__(
        self, run: nn.Module, post: Post, placement: Placement, rank: int, recompute: bool | Collection[int] = False
    ) -> None:
        """`run`: (chunk, *activations) -> activations, or the model's outputs. `recompute`: keep only a part's
        inputs, and recompute the rest in backward; for all parts, or for these.
        """
        self.run, self.post, self.placement, self.rank = run, post, placement, rank
        every: Collection[int] = range(placement.parts)
        self.recompute = recompute if not isinstance(recompute, bool) else every if recompute else ()
        self.splits_backward = False
        """The schedule has separate passes for the weights' gradients."""
        self.changes_inputs = any(getattr(part, "inplace", False) for part in run.modules())
        """Some layer works in place."""
        self.spans: list[tuple[Instruction, Mark, Mark]] = []
        """The passes of this step, and when they ran."""
        self._held: dict[tuple[int, int], SavedForward] = {}
        self._next_inputs: dict[tuple[int, int], list[Tensor]] = {}
        self._gradients: dict[tuple[int, int], list[Tensor | None]] = {}

    def begin(
        self,
        shape: object,
        inputs: Callable[[int], Tensor],
        loss: Callable[[Any, int], Tensor],
        around: Callable[[Instruction], AbstractContextManager[Any]] = lambda _: nullcontext(),
    ) -> None:
        """`inputs`: of a micro-batch. `loss`: (the last part's outputs, micro-batch) -> what backward starts from.

        `around`: of every pass. `shape`: of the batch, the same on all ranks.
        """
        self._inputs, self._loss, self._around = inputs, loss, around
        self.spans = []
        self.post.begin(shape)

    def end(self) -> None:
        """When all passes are done."""
        assert not self._held, "every forward has had its backward"
        self.post.end()

    def forget(self) -> None:
        """After forward passes that will have no backward."""
        self._held.clear()
        self.post.end()

    def seconds(self) -> list[tuple[Instruction, float, float]]:
        """When each pass of the step began and ended: by the host's clock; on a GPU, since the first."""
        first = self.spans[0][1] if self.spans else 0.0
        origin = 0.0 if isinstance(first, float) else first
        return [(i, seconds_between(origin, start), seconds_between(origin, end)) for i, start, end in self.spans]

    def carry_out(self, instruction: Instruction) -> None:
        i, part = instruction.micro_batch, self.placement.part(self.rank, instruction.chunk)
        match instruction.kind:
            case "receive_activation":
                tensors, kinds = self.post.receive(Message("activation", part, i))
                self._next_inputs[part, i] = [
                    t.requires_grad_(kind.has_gradient) for t, kind in zip(tensors, kinds, strict=True)
                ]
            case "receive_gradient":
                tensors, _ = self.post.receive(Message("gradient", part, i))
                self._gradients[part, i] = list(tensors)
            case "send_activation":
                outputs = self._held[part, i].outputs
                self.post.send(Message("activation", part + 1, i), outputs, [o.requires_grad for o in outputs])
                self._held[part, i].outputs = [released(output) for output in outputs]
            case "send_gradient":
                gradients = self._gradients.pop((part - 1, i))
                assert all(g is not None for g in gradients)
                self.post.send(Message("gradient", part - 1, i), gradients, [False] * len(gradients))  # type: ignore
            case kind if kind in PASSES:
                start = mark(self.post.device)
                with self._around(instruction):
                    self._pass(kind, part, i, instruction.chunk)
                self.spans.append((instruction, start, mark(self.post.device)))

    def deferred(self, instruction: Instruction) -> set[Tensor]:
        """Parameters whose gradients a weight pass is about to compute."""
        held = self._held[self.placement.part(self.rank, instruction.chunk), instruction.micro_batch]
        return set() if held.weights is None else {product.parameter for product in held.weights.left}

    def _pass(self, kind: str, part: int, i: int, chunk: int) -> None:
        if kind == "forward":
            self._forward(part, i, chunk)
        if kind in ("backward", "backward_input"):
            self._backward(part, i)
        if kind in ("backward", "backward_weight"):
            self._weights(part, i)

    def _forward(self, part: int, i: int, chunk: int) -> None:
        inputs = [self._inputs(i)] if part == 0 else self._next_inputs.pop((part, i))
        recompute = part in self.recompute
        weights = WeightPass() if self.splits_backward and not recompute else None

        def run(*inputs: Tensor) -> Any:
            if self.changes_inputs:  # what was received from another rank is a leaf, which must not be written to
                inputs = tuple(x.clone() if x.requires_grad else x for x in inputs)
            with weights or nullcontext():
                return self.run(chunk, *inputs)

        outputs = checkpoint(run, *inputs, use_reentrant=False) if recompute else run(*inputs)
        if part == self.placement.parts - 1:
            outputs = self._loss(outputs, i)
        tensors = list(outputs) if isinstance(outputs, tuple | list) else [outputs]
        self._held[part, i] = SavedForward(inputs, tensors, weights)
        following = part + 1
        if following < self.placement.parts and self.placement.place(following)[0] == self.rank:  # no message
            self._next_inputs[following, i] = [t.detach().requires_grad_(t.requires_grad) for t in tensors]

    def _backward(self, part: int, i: int) -> None:
        held = self._held[part, i]
        gradients: list[Tensor | None]
        gradients = [None] if part == self.placement.parts - 1 else self._gradients.pop((part, i))
        outputs = [output for output in held.outputs if output.requires_grad]
        torch.autograd.backward(outputs, gradients)
        if part > 0:
            self._gradients[part - 1, i] = [gradient_of(t) for t in held.inputs if t.requires_grad]
        held.inputs, held.outputs = [], []

    def _weights(self, part: int, i: int) -> None:
        held = self._held.pop((part, i))
        if held.weights is not None:
            held.weights.run()


def gradient_of(tensor: Tensor) -> Tensor:
    """Its gradient; zeros where the loss does not depend on it, because the previous rank waits for a message."""
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def released(output: Tensor) -> Tensor:
    """The output has been sent, and backward needs only its node in the graph: its memory may be released."""
    if output.grad_fn is None:
        return output
    stub: Tensor = _Stub.apply(output)
    return stub


class _Stub(torch.autograd.Function):
    """One element that stands for a tensor in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        return output.new_empty(()).expand(output.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient

"""14. Pipelines: 1F1B as instructions, its bubble, and a stage that carries them out."""

from math import ceil
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Instruction = tuple[str, int]
"""("F", 3): the forward of micro-batch 3; ("B", 3): its backward."""
#: solution
PREDICTED_BUBBLE: float | None = 3 / 11
#: skeleton
# PREDICTED_BUBBLE: float | None = None  # a share of 1: 4 stages, 8 micro-batches
#: end


def one_f_one_b(stage: int, stages: int, micro_batches: int) -> list[Instruction]:
    #: solution
    warm = min(stages - 1 - stage, micro_batches)
    order = [("F", i) for i in range(warm)]
    for i in range(micro_batches - warm):
        order += [("F", warm + i), ("B", i)]
    return order + [("B", i) for i in range(micro_batches - warm, micro_batches)]
    #: todo warm-up, in turns, and what is left
    #: wrong gpipe
    # return [("F", i) for i in range(micro_batches)] + [("B", i) for i in range(micro_batches)]
    #: wrong no-warm-up
    # order = [("F", 0)]
    # for i in range(1, micro_batches):
    #     order += [("B", i - 1), ("F", i)] if stage == 0 else [("F", i), ("B", i - 1)]
    # return [*order, ("B", micro_batches - 1)]
    #: end


def bubble(stages: int, micro_batches: int) -> float:
    """The share of its time that a stage stands idle."""
    #: solution
    return (stages - 1) / (micro_batches + stages - 1)
    #: todo idle, over all
    #: end


def micro_batches_for(stages: int, most: float) -> int:
    """The fewest, and at least one, with a bubble of at most that share; mind what rounding does before ceil."""
    #: solution
    return max(1, ceil((stages - 1) * (1 - most) / most - 1e-9))
    #: todo solve the bubble for the micro-batches
    #: end


def run(order: list[Instruction], module: nn.Module, inputs: list[Tensor], targets: list[Tensor], like: Tensor) -> None:
    """One step of this rank's stage. The first stage has `inputs`, the last `targets`; activations are shaped `like`.

    The last stage's loss of a micro-batch is the mean squared error, over the number of micro-batches: they have the
    same size, and afterwards every gradient is that of the mean over all of them.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    held: dict[int, tuple[Tensor, Tensor]] = {}  # micro-batch -> what came in, what came out
    sending: list[tuple[Any, Tensor]] = []

    def send(tensor: Tensor, to: int) -> None:
        #: solution
        sending.append((dist.isend(tensor, to), tensor))
        #: todo without waiting for the receiver, who may be sending too
        #: wrong blocking-sends
        # dist.send(tensor, to)
        #: end

    for kind, number in order:
        if kind == "F":
            x = inputs[number] if rank == 0 else torch.empty_like(like)
            if rank > 0:
                dist.recv(x, rank - 1)
                x.requires_grad_()
            out = module(x)
            if rank < size - 1:
                send(out.detach(), rank + 1)
            #: solution
            else:
                out = ((out - targets[number]) ** 2).mean() / len(targets)
            held[number] = (x, out)
            #: todo the last stage's loss, and its share; keep what backward needs
            #: wrong no-scale
            # else:
            #     out = ((out - targets[number]) ** 2).mean()
            # held[number] = (x, out)
            #: end
        else:
            #: solution
            x, out = held.pop(number)
            gradient = None
            if rank < size - 1:
                gradient = torch.empty_like(out)
                dist.recv(gradient, rank + 1)
            out.backward(gradient)
            if rank > 0:
                assert x.grad is not None
                send(x.grad, rank - 1)
            #: todo receive the gradient, backward, send the input's gradient
            #: end
    for work, _ in sending:
        work.wait()

"""Values, gradients, what autograd keeps, bytes, and when gathers were issued."""

import gc
import time

import torch
from torch import Tensor

from lockstep.learn.rank import Rank
from lockstep.learn.recorder import Call

LAYERS, WIDTH, NUMBER, RANKS = 4, 12, 8, 3


def facts() -> list[str]:
    """Numbers of the text."""
    return [
        f"{LAYERS} square layers of width {WIDTH} of {NUMBER} bytes a number on {RANKS} ranks",
        "3(n-1)/n of the parameters' bytes instead of 2(n-1)/n",
        "for holding 1/n of everything",
        "FSDP2",
        "stage 3 do this",
    ]


def grade(rank: Rank) -> None:
    weights = [rank.same(WIDTH, WIDTH, seed=layer) / WIDTH**0.5 for layer in range(LAYERS)]
    rows = WIDTH // rank.size
    mine = slice(rank.rank * rows, (rank.rank + 1) * rows)
    shards = [w[mine].clone().requires_grad_() for w in weights]
    inputs = rank.of_all(5, WIDTH, seed=50)

    whole = [w.clone().requires_grad_() for w in weights]
    hidden = torch.cat(inputs)
    for weight in whole:
        hidden = torch.tanh(hidden @ weight.T)
    (hidden**2).mean().backward()

    kept: list[tuple[int, ...]] = []
    moments: list[float] = []

    whole_at_once: list[int] = []

    def activation(x: Tensor) -> Tensor:
        time.sleep(0.01)
        moments.append(time.monotonic())
        whole_at_once.append(still_there(rank.recorder.calls[first:]))
        return torch.tanh(x)

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    first = len(rank.recorder.calls)
    with rank.recorder.during() as forwards, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        got = rank.exercise.forward_all(inputs[rank.rank], shards, activation)
    gc.collect()
    left = still_there(forwards)
    with rank.recorder.during() as backwards:
        (got**2).mean().backward()

    expected = inputs[rank.rank]
    for weight in weights:
        expected = torch.tanh(expected @ weight.T)
    rank.expect_tensor("forward: the output", got, expected)
    again = "a whole weight is kept for backward: keep the shard, and gather it again"
    rank.expect((WIDTH, WIDTH) not in kept and not left, again)
    for layer, (shard, full) in enumerate(zip(shards, whole, strict=True)):
        assert full.grad is not None
        mistakes = {
            "you summed, the mean is missing": full.grad[mine] * rank.size,
            "the gradient is transposed": full.grad.T[mine],
        }
        rank.expect_tensor(f"backward: the gradient of layer {layer}'s shard", shard.grad, full.grad[mine], mistakes)
    rank.expect_calls(forwards, {"all_gather_into_tensor": LAYERS})
    rank.expect_calls(backwards, {"all_gather_into_tensor": LAYERS, "reduce_scatter_tensor": LAYERS})
    early = all(call.issued < done for call, done in zip(forwards[1:], moments, strict=False))
    rank.expect(early, "forward_all gathers a layer only when it is needed: start it while the one before computes")
    apart = all(call.ended > done for call, done in zip(forwards[1:], moments, strict=False))
    rank.expect(apart, "a gather was started early and waited for at once: nothing overlaps")
    most = max(whole_at_once)
    rank.expect(most <= 2, f"forward_all has {most} layers gathered at once: gather one ahead, and release the last")
    if rank.size == RANKS:
        rank.guess("PREDICTED_BYTES", sum(call.sent for call in [*forwards, *backwards]))
        held = sum(s.numel() for s in shards) / sum(w.numel() for w in weights)
        rank.note(f"this rank held {held:.0%} of the parameters, and at most {most} layers whole")


def still_there(calls: list[Call]) -> int:
    """Gathered weights that are still referenced."""
    return sum(call.operation == "all_gather_into_tensor" and call.place() is not None for call in calls)

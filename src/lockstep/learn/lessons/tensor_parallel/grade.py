"""Ranks with parts of the matrices, against whole ones: outputs, gradients, calls, bytes."""

import torch
from torch import Tensor
from torch.nn.functional import gelu

from lockstep.learn.rank import Rank

POSITIONS, WIDTH, HIDDEN, NUMBER, RANKS = 10, 12, 18, 8, 3


def facts() -> list[str]:
    """Numbers of the text."""
    return [
        f"MLP on {POSITIONS} positions of width {WIDTH} of {NUMBER} bytes a number on {RANKS} ranks",
        "are 1/n",
    ]


def whole_mlp(x: Tensor, a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
    return gelu(x @ a.T) @ b.T + bias


def grade(rank: Rank) -> None:
    n, exercise = rank.size, rank.exercise
    a, b, bias = rank.same(HIDDEN, WIDTH, seed=1), rank.same(WIDTH, HIDDEN, seed=2), rank.same(WIDTH, seed=3)
    units = slice(rank.rank * HIDDEN // n, (rank.rank + 1) * HIDDEN // n)
    for positions, sequence in ((POSITIONS, False), (4 * n, True)):
        x = rank.same(positions, WIDTH, seed=4)
        whole = [t.clone().requires_grad_() for t in (x, a, b, bias)]
        expected = whole_mlp(*whole)
        weight = rank.same(positions, WIDTH, seed=5)
        (expected * weight).sum().backward()
        mine = slice(rank.rank * 4, rank.rank * 4 + 4) if sequence else slice(None)
        given = [t.clone().requires_grad_() for t in (x[mine], a[units], b[:, units], bias)]
        function = exercise.mlp_sequence if sequence else exercise.mlp
        with rank.recorder.during() as calls:
            got = function(*given)
        name = "mlp_sequence" if sequence else "mlp"
        forward = {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1} if sequence else {"all_reduce": 1}
        part_of = (
            "its parts are gathered before, and its sums scattered after" if sequence else "one sum, of the outputs"
        )
        rank.expect_calls(calls, forward, f"{name}: {part_of}")
        loud = expected[mine].detach() + (n - 1) * bias
        mistakes = {"the bias was added once for every rank: add it after the sum": loud}
        rank.expect_tensor(f"{name}: the output", got, expected[mine].detach(), mistakes)
        with rank.recorder.during() as backwards:
            (got * weight[mine]).sum().backward()
        part = whole_mlp_gradient(x, a[units], b[:, units], weight)
        assert all(t.grad is not None for t in whole)
        right = [t.grad for t in whole if t.grad is not None]
        own = {
            "the input's gradient is this rank's part only: sum it over the ranks": part[mine],
            "summed twice: SumOfRanks only passes the gradient on": n * right[0][mine],
        }
        rank.expect_tensor(f"{name}: the gradient of x", given[0].grad, right[0][mine], own)
        rank.expect_tensor(f"{name}: the gradient of the first weight", given[1].grad, right[1][units])
        rank.expect_tensor(f"{name}: the gradient of the second weight", given[2].grad, right[2][:, units])
        shares = weight[mine].sum(0) if sequence else right[3]  # of positions: this rank's own
        rank.expect_tensor(f"{name}: the gradient of the bias", given[3].grad, shares)
        rank.expect_calls(backwards, forward)
        if not sequence and n == RANKS:
            rank.guess("PREDICTED_BYTES", sum(call.sent for call in [*calls, *backwards]))
        if sequence:
            plain = 2 * 2 * (n - 1) / n * x.nbytes
            sent = sum(call.sent for call in [*calls, *backwards])
            rank.note(f"with positions cut, {sent:,.0f} B are sent for {positions} positions; without, {plain:,.0f} B")

    table = rank.same(6 * n, 5, seed=6)
    rows = table[6 * rank.rank : 6 * rank.rank + 6].clone().requires_grad_()
    tokens = torch.tensor([0, 6 * n - 1, 5, 6, 6, 2, 7], device=rank.device)
    with rank.recorder.during() as calls:
        got = exercise.embedding(tokens, rows)
    begins = [6 * r for r in range(n)]
    confused = torch.stack([table[b : b + 6][(tokens - b) % 6] for b in begins]).sum(0)
    clamped = torch.stack([table[b : b + 6][(tokens - b).clamp(0, 5)] for b in begins]).sum(0)
    mistakes = dict.fromkeys(
        ["tokens of other ranks were looked up as if they were mine: give zeros for them"], confused
    )
    mistakes["tokens of other ranks were moved to the edge of this rank's rows: give zeros for them"] = clamped
    rank.expect_tensor("embedding: the rows", got, table[tokens], mistakes)
    travels = any(call.elements >= table.numel() for call in calls)
    rank.expect(not travels, "embedding: the table travelled; send the rows that were looked up")
    rank.expect_calls(calls, {"all_reduce": 1})
    got.sum().backward()
    counts = torch.bincount(tokens, minlength=6 * n)[6 * rank.rank : 6 * rank.rank + 6].double()
    rank.expect_tensor("embedding: the gradient", rows.grad, counts.unsqueeze(1).expand(6, 5))


def whole_mlp_gradient(x: Tensor, a: Tensor, b: Tensor, weight: Tensor) -> Tensor:
    """Of x, by one rank's part alone."""
    x = x.clone().requires_grad_()
    ((gelu(x @ a.T) @ b.T) * weight).sum().backward()
    assert x.grad is not None
    return x.grad

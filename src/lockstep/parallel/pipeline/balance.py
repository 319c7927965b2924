"""Cuts a list of layers into consecutive parts, so that the costliest part is as cheap as possible."""

from bisect import bisect_left
from collections.abc import Sequence

from lockstep.errors import UserError


def even_cuts(costs: Sequence[int], parts: int) -> list[int]:
    """Where each part after the first begins. Costs are 1 or more.

    best[end]: the cost of the costliest part when the layers before `end` are cut best into so many parts. One more
    part begins where best[begin] reaches the cost of that part: earlier raises the part's cost, later best[begin].
    """
    layers = len(costs)
    if layers < parts:
        raise UserError(
            f"the model has {layers} layers, fewer than the {parts} parts of the pipeline; use fewer stages or chunks"
        )
    before = [0]
    for cost in costs:
        before.append(before[-1] + cost)
    best: list[float] = [0.0] + [float("inf")] * layers
    begins: list[list[int]] = []
    for part in range(1, parts + 1):
        found: list[float] = [float("inf")] * (layers + 1)
        last = [0] * (layers + 1)
        for end in range(part, layers + 1):
            crossing = bisect_left(range(end), True, lo=part - 1, key=lambda b: best[b] >= before[end] - before[b])
            for begin in (crossing - 1, crossing):
                worst = max(best[begin], before[end] - before[begin]) if part - 1 <= begin < end else float("inf")
                if worst < found[end]:
                    found[end], last[end] = worst, begin
        best = found
        begins.append(last)
    cuts, end = [], layers
    for last in reversed(begins[1:]):
        end = last[end]
        cuts.append(end)
    return cuts[::-1]

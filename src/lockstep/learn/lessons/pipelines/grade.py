"""The order by rules that need no rank, and a real run against one process."""

import weakref
from typing import Any

import torch
from torch import nn

from lockstep.learn.rank import Rank

STAGES, MICRO, WIDTH = 4, 8, 6


def facts() -> list[str]:
    """Numbers of the text."""
    return [
        f"{STAGES} stages and {MICRO} micro-batches",
        "on 3 stages with 4 micro-batches",
        "idles for p - 1 of m + p - 1 slots",
        "But 1F1B",
        "in 1F1B two neighbours",
    ]


def stuck(orders: list[list[tuple[str, int]]]) -> str | None:
    """Which stage waits for what, if not all can finish."""
    at, done, last = [0] * len(orders), set[tuple[int, str, int]](), len(orders) - 1
    while True:
        moved = False
        for stage, order in enumerate(orders):
            while at[stage] < len(order):
                kind, number = order[at[stage]]
                needs = (stage - 1, "F", number) if kind == "F" else (stage + 1, "B", number)
                own = (stage, "F", number)
                outer = stage == 0 if kind == "F" else stage == last
                if (not outer and needs not in done) or (kind == "B" and own not in done):
                    break
                done.add((stage, kind, number))
                at[stage] += 1
                moved = True
        waiting = [stage for stage, order in enumerate(orders) if at[stage] < len(order)]
        if not waiting:
            return None
        if not moved:
            return "; ".join(f"stage {s} waits to do {orders[s][at[s]][0]}{orders[s][at[s]][1]}" for s in waiting)


def grade(rank: Rank) -> None:
    for stages, micro_batches in ((STAGES, MICRO), (3, 4), (3, 1), (1, 3), (5, 3)):
        orders: list[list[tuple[str, int]]] = []
        for stage in range(stages):
            order = [tuple(one) for one in rank.exercise.one_f_one_b(stage, stages, micro_batches)]
            orders.append(order)
            wanted = sorted((kind, i) for kind in "BF" for i in range(micro_batches))
            where = f"one_f_one_b({stage}, {stages}, {micro_batches})"
            rank.expect(sorted(order) == wanted, f"{where}: every micro-batch once F and once B; got {order}")
        problem = stuck(orders)
        rank.expect(problem is None, f"no stage can go on: {problem} ({stages} stages, {micro_batches} micro-batches)")
        for stage, order in enumerate(orders):
            held = most = 0
            for kind, _ in order:
                held += 1 if kind == "F" else -1
                most = max(most, held)
            allowed = min(stages - stage, micro_batches)
            words = "holds all micro-batches at once" if most == micro_batches else f"holds {most} micro-batches"
            rank.expect(most <= allowed, f"stage {stage} of {stages} {words}: {allowed} are enough, of {micro_batches}")
            serial = (
                f"stage {stage} of {stages} never has more than {most} in flight: {allowed} would keep all stages busy"
            )
            rank.expect(most == allowed, serial)
        took, best = length(orders), 3 * (micro_batches + stages - 1)
        said = f"{stages} stages, {micro_batches} micro-batches: your order takes {took} (F 1, B 2), 1F1B {best}"
        rank.expect(took <= best, f"{said}: a stage waits where it could go on")

    for stages, micro_batches in ((STAGES, MICRO), (1, 4), (8, 2)):
        idle = (stages - 1) / (micro_batches + stages - 1)
        got = rank.exercise.bubble(stages, micro_batches)
        rank.expect_number(f"bubble({stages}, {micro_batches})", got, idle)
    for stages, idle, fewest in ((4, 0.25, 9), (8, 0.1, 63), (1, 0.5, 1), (2, 0.5, 1)):
        got = rank.exercise.micro_batches_for(stages, idle)
        rank.expect(got == fewest, f"micro_batches_for({stages}, {idle}): expected {fewest}, got {got}")
    rank.guess("PREDICTED_BUBBLE", (STAGES - 1) / (MICRO + STAGES - 1), by="it is")
    carry_out(rank)


def carry_out(rank: Rank) -> None:
    n, micro_batches = rank.size, 5
    torch.manual_seed(8)
    model = (
        nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(n))).double().to(rank.device)
    )
    x, y = rank.same(micro_batches * 3, WIDTH, seed=1), rank.same(micro_batches * 3, WIDTH, seed=2)
    whole = nn.Sequential(*model)
    ((whole(x) - y) ** 2).mean().backward()
    right = {name: p.grad.clone() for name, p in model[rank.rank].named_parameters() if p.grad is not None}
    model.zero_grad()
    order = [tuple(one) for one in rank.exercise.one_f_one_b(rank.rank, n, micro_batches)]
    stage = Watched(model[rank.rank])
    inputs = list(x.split(3)) if rank.rank == 0 else []
    targets = list(y.split(3)) if rank.rank == n - 1 else []
    with rank.recorder.during() as calls:
        rank.exercise.run(list(order), stage, inputs, targets, x[:3])
    rank.expect(
        stage.did == order, f"run: stage {rank.rank} did {brief(stage.did)}; its instructions are {brief(order)}"
    )
    allowed = min(n - rank.rank, micro_batches) + 1  # and what a variable still has of the last
    said = f"run: stage {rank.rank} holds what {stage.most} micro-batches gave: release each after its backward"
    rank.expect(stage.most <= allowed, said)
    for name, parameter in model[rank.rank].named_parameters():
        mistakes = {"you summed over micro-batches, the mean is missing": right[name] * micro_batches}
        rank.expect_tensor(f"run: the gradient of stage {rank.rank}'s {name}", parameter.grad, right[name], mistakes)
    neighbours = (rank.rank > 0) + (rank.rank < n - 1)
    messages = 2 * micro_batches * neighbours
    rank.expect(len(calls) == messages, f"run: expected {messages} messages to and from neighbours, got {len(calls)}")


class Watched(nn.Module):
    """A stage that notes what it does, and how many of its outputs are kept."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.did: list[tuple[str, int]] = []
        self.most = 0
        self._outputs: list[weakref.ref[torch.Tensor]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        number = len(self._outputs)
        self.did.append(("F", number))
        out: torch.Tensor = self.module(x)
        out.register_hook(lambda _: self.did.append(("B", number)))
        self._outputs.append(weakref.ref(out))
        self.most = max(self.most, sum(output() is not None for output in self._outputs))
        return out


def brief(order: list[tuple[str, int]]) -> str:
    return " ".join(f"{kind}{number}" for kind, number in order)


def length(orders: list[list[tuple[str, int]]]) -> int:
    """When the last stage is done, if a forward takes 1 and a backward 2."""
    at, free, done = [0] * len(orders), [0] * len(orders), dict[tuple[int, str, int], int]()
    last = len(orders) - 1
    while any(at[stage] < len(order) for stage, order in enumerate(orders)):
        for stage, order in enumerate(orders):
            while at[stage] < len(order):
                kind, number = order[at[stage]]
                outer = stage == 0 if kind == "F" else stage == last
                needs = (stage - 1, "F", number) if kind == "F" else (stage + 1, "B", number)
                if not outer and needs not in done:
                    break
                free[stage] = max(free[stage], 0 if outer else done[needs]) + (1 if kind == "F" else 2)
                done[stage, kind, number] = free[stage]
                at[stage] += 1
    return max(free)


def explain(logs: list[list[dict[str, Any]]]) -> str | None:
    """Stages that wait for one another."""
    last = [log[-1]["op"] for log in logs if log]
    if "send" in last:
        return "a stage waits until its message is received, by a stage that waits for the same: send without waiting"
    return None

"""The mesh, real groups on it, the formulas, and a layout held against the planner."""

import re
from dataclasses import replace
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from lockstep.errors import UserError
from lockstep.learn.lessons.three_d import master as right
from lockstep.learn.rank import Rank

BILLIONS, SIZES = 7, {"pp": 2, "dp": 4, "tp": 2}
CLUSTER, BATCH, SLOWER = "2x8xa100-40", 64, 1.1
EVERY_GROUP = "every rank must make every group, in the same order: dist.new_group waits for all of them"


def facts() -> list[str]:
    """Numbers of the text."""
    words = ", ".join(f"{axis} {size}" for axis, size in SIZES.items())
    return [
        f"{BILLIONS} billion parameters on {prod(SIZES.values())} GPUs as {words}",
        "P / (tp pp). Each is 2 bytes in bf16, its gradient 2, and the optimizer's state 12 in fp32",
        "which ZeRO 1 shards",
        "bytes = P / (tp pp) * (2 + 2 + 12 / dp)",
        f"global batch {BATCH}",
        "Llama 2 7B",
        "A100s with 40 GB",
    ]


def grade(rank: Rank) -> None:
    exercise = rank.exercise
    for sizes in (SIZES, {"pp": 3, "dp": 1, "tp": 4}, {"dp": 5}):
        for number in range(prod(sizes.values())):
            got, place = exercise.coordinates(number, sizes), right.coordinates(number, sizes)
            last = list(sizes)[-1]
            far = number == 1 and sizes[last] > 1 and got.get(last) == 0 and got != place
            rank.expect(not far, "tensor parallelism has its peers far apart: the last axis must change fastest")
            rank.expect(got == place, f"coordinates({number}, {sizes}): expected {place}, got {got}")
        for number in range(prod(sizes.values())):
            for axis in sizes:
                listed, wanted = exercise.peers(number, axis, sizes), right.peers(number, axis, sizes)
                rank.expect(listed == wanted, f"peers({number}, {axis!r}, {sizes}): expected {wanted}, got {listed}")

    for parameters, sizes in ((7e9, SIZES), (1e9, {"pp": 1, "dp": 8, "tp": 1})):
        held = parameters / (sizes["tp"] * sizes["pp"])
        got = exercise.memory(parameters, sizes)
        whole = {"the optimizer's state is sharded over dp: 12 bytes over all of them": 16 * held}
        rank.expect_number(f"memory({parameters:g}, {sizes})", got, right.memory(parameters, sizes), whole)
        got = exercise.gradient_bytes(parameters, sizes)
        rank.expect_number(f"gradient_bytes({parameters:g}, {sizes})", got, right.gradient_bytes(parameters, sizes))
    rank.guess("PREDICTED_GIGABYTES", right.memory(BILLIONS, SIZES), by="it is")

    for sizes in ({"pp": 2, "dp": 1, "tp": rank.size // 2}, {"pp": 1, "dp": 2, "tp": rank.size // 2}):
        groups_of(rank, sizes)
    judge(rank)


def groups_of(rank: Rank, sizes: dict[str, int]) -> None:
    """Real groups: every one adds up the ranks that are in it."""
    groups = groups_made(rank, sizes)
    for axis in sizes:
        wanted = right.peers(rank.rank, axis, sizes)
        total = torch.tensor([float(rank.rank)], dtype=torch.float64, device=rank.device)
        with rank.recorder.off():
            dist.all_reduce(total, group=groups[axis])
        expected = torch.tensor([float(sum(wanted))], dtype=torch.float64)
        rank.expect_tensor(f"make_groups({sizes}): the sum of the ranks along {axis}", total.cpu(), expected)


def groups_made(rank: Rank, sizes: dict[str, int]) -> dict[str, Any]:
    """What make_groups gives, where all ranks make the same groups. Otherwise `new_group` waits, or mixes groups up."""
    new_group = dist.new_group

    def same_everywhere(ranks: list[int] | None) -> None:
        rank.expect(len({str(ranks) for ranks in rank.gather(ranks)}) == 1, EVERY_GROUP)

    def compared(ranks: list[int] | None = None, *others: Any, **settings: Any) -> Any:
        if not settings.get("use_local_synchronization"):
            same_everywhere(list(range(rank.size)) if ranks is None else list(ranks))
        return new_group(ranks, *others, **settings)

    dist.new_group = compared
    try:
        groups: dict[str, Any] = rank.exercise.make_groups(sizes)
        same_everywhere(None)  # no rank makes one that others do not
    finally:
        dist.new_group = new_group
    return groups


def judge(rank: Rank) -> None:
    """The layout that was chosen, by the planner's numbers; worked out once."""
    problem, note = None, ""
    if rank.rank == 0:
        problem, note = judged(rank.exercise.CHOSEN)
    rank.agree(problem)
    if note:
        rank.note(note)


def judged(chosen: object) -> tuple[str | None, str]:
    """What is wrong with it, and what to say of it."""
    from lockstep.plan.known import known_model
    from lockstep.plan.machine import parse_cluster
    from lockstep.plan.search import Question, search

    form = "as lockstep plan --fix takes it: dp=...,tp=...,pp=...,zero=..."
    if not isinstance(chosen, str):
        return f"predict first: set CHOSEN to a layout, {form}", ""
    text = re.sub(r"\bddp\b", "zero0", chosen)  # as a row of the planner's table says it, too
    parts = dict(re.findall(r"\b(dp|tp|pp|zero)=?(\d+)", text))
    if not {"dp", "zero"} <= parts.keys():
        missing = "dp" if "dp" not in parts else "zero"
        return f"CHOSEN {chosen!r} has no {missing}=: write it {form}", ""
    ranks, gpus = prod(int(parts.get(axis, 1)) for axis in ("dp", "tp", "pp")), parse_cluster(CLUSTER).gpus
    if ranks != gpus:
        return f"CHOSEN {chosen!r}: dp x tp x pp is {ranks}, and there are {gpus} GPUs", ""
    network = known_model("llama2-7b")
    assert network is not None
    question = Question(network, parse_cluster(CLUSTER), BATCH)
    best = search(question, 20).plans[0].time.seconds
    fixed = tuple((name, int(parts.get(name, 1))) for name in ("dp", "tp", "pp", "zero"))
    try:
        plans = search(replace(question, fixed=fixed), 5).plans
    except UserError as error:
        return f"CHOSEN {chosen!r}: {error}", ""
    if not plans:
        return f"CHOSEN {chosen!r}: the planner finds no such layout that fits in the GPUs' memory", ""
    seconds = plans[0].time.seconds
    if seconds > SLOWER * best:
        return f"CHOSEN {chosen!r}: {seconds:.2f} s a step by the planner, and the best takes {best:.2f} s", ""
    return None, f"your layout: {seconds:.2f} s a step by the planner, {seconds / best:.2f} of the best"

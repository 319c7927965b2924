"""Why a gradient or a loss differs, from the shape of the difference. The first that fits is said."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import isclose
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lockstep.apart import one_factor as common_factor
from lockstep.judge.assemble import Part, Place, Side, Tensors, Wholes
from lockstep.judge.ledger import missing, reductions

if TYPE_CHECKING:
    from lockstep.judge.compare import Judgement

CLOSE = 0.02
"""How far from an explanation the gradients may be, relative to the difference that it explains."""
TIGHT = 1e-3
ROUNDED = 6
"""Last digits that gradients may be off by, computed in few digits from end to end."""


@dataclass
class Cause:
    """What a difference looks like."""

    why: str
    look_at: str
    factor: float | None = None
    first: list[str] = field(default_factory=list)
    """Names that come before those of parameters: BatchNorm modules."""
    expected: str = ""
    got: str = ""


@dataclass
class Difference:
    """Of the gradients of one step, what each cause looks at."""

    judgement: "Judgement"
    place: Place
    off: dict[str, list[int]]
    """Name -> ranks."""
    wholes: Wholes
    """The reference's."""
    mine: Tensors

    @property
    def step(self) -> int:
        return self.place[1]

    @property
    def candidate(self) -> Side:
        return self.judgement.candidate

    @property
    def reference(self) -> Side:
        return self.judgement.reference

    def pairs(self) -> Iterator[tuple[str, Part, Tensor, Tensor]]:
        """(name, part, got, expected) of what differs."""
        for name, ranks in self.off.items():
            for part in self.mine.parts[name]:
                if part.rank in ranks:
                    expected = part.of(self.wholes[name])
                    got = self.mine.read(part) if part.stored is not None else torch.zeros_like(expected)
                    yield name, part, got, expected

    def explained_by(self, other: Callable[[str, Part, Tensor], Tensor | None]) -> bool:
        """All that differs is that, and it is not what the reference has."""
        for name, part, got, expected in self.pairs():
            said = other(name, part, expected)
            if said is None or float((got - said).norm()) > CLOSE * max(float((got - expected).norm()), 1e-30):
                return False
        return True


def cause_of_gradients(
    judgement: "Judgement", place: Place, off: dict[str, list[int]], wholes: Wholes, mine: Tensors
) -> Cause:
    difference = Difference(judgement, place, off, wholes, mine)
    for explain in (
        not_finite,
        one_factor,
        batch_norm,
        nothing,
        another_forward,
        only_a_part,
        never_reduced,
        stale,
        accumulated,
        rounded,
        mean_of_means,
        clipped_apart,
        only_some,
    ):
        found = explain(difference)
        if found is not None:
            break
    else:
        found = Cause("no known cause fits the difference", "how this gradient is computed and reduced")
    first = first_of(difference)
    for name, _, got, expected in difference.pairs():
        if name == first:
            found.expected, found.got = f"norm {float(expected.norm()):.6g}", f"norm {float(got.norm()):.6g}"
            break
    return found


def ledger_of(judgement: "Judgement", place: Place, off: dict[str, list[int]], wholes: Wholes, mine: Tensors) -> str:
    """Which reductions there were before the step, and which these gradients have not been in."""
    events = judgement.candidate.events[place]
    if len(events) < 2:
        return ""
    lines = {rank: reductions(event["collectives"]) for rank, event in events.items()}
    copies = {part.rank for name in off for part in mine.parts[name]}
    without = sum(wholes[name].numel() for name in off)
    return missing(lines, copies, without, sum(whole.numel() for whole in wholes.values()))


def batch_norm(difference: Difference) -> Cause | None:
    """It normalizes by the samples of a rank, and the reference by all."""
    names = sorted({name for found in difference.candidate.facts("batch_norms") for name in found})
    synchronized = all(difference.candidate.facts("synchronized"))
    shared_out = {
        tuple(row for tensors in event["inputs"] for t in tensors for row in t["rows"][0])
        for event in difference.candidate.events[difference.place].values()
    }
    micro = {len(e["inputs"]) for e in difference.candidate.events[difference.place].values()}
    whole = {len(e["inputs"]) for e in difference.reference.events[difference.place].values()}
    if not names or synchronized or (len(shared_out) < 2 and micro == whole):
        return None
    if len(difference.off) < 2 * len(names):
        return None  # it reaches everything before it
    return Cause(
        f"BatchNorm ({names[0]}) normalizes by the samples that one rank has in one forward pass, and the reference by "
        "those of the whole batch: a batch that is shared out cannot be the same",
        "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model), or a norm that does not look at other samples",
        first=names,
    )


def not_finite(difference: Difference) -> Cause | None:
    for name, part, got, expected in difference.pairs():
        if not bool(got.isfinite().all()) and bool(expected.isfinite().all()):
            return Cause(
                f"the gradient of {name} is not finite on rank {part.rank}",
                "a division by a count that is 0 on this rank, or a scale of the loss that is not taken back",
            )
    return None


def one_factor(difference: Difference) -> Cause | None:
    factors = []
    for _, _, got, expected in difference.pairs():
        factor = common_factor(got, expected, TIGHT)
        if not factor:
            return None
        factors.append(factor)
    factor = factors[0]
    if not all(isclose(f, factor, rel_tol=0.01) for f in factors):
        return None
    everything = len(difference.off) == len(difference.wholes)
    every = "every gradient is" if everything else "these gradients are"
    said, look_at = meaning(difference, factor)
    return Cause(f"{every} {factor:.6g} times as large: {said}", look_at, factor)


def meaning(difference: Difference, factor: float) -> tuple[str, str]:
    """Of a factor: (what it says, what to look at)."""
    ranks, events = difference.candidate.ranks, difference.candidate.events[difference.place]
    micro = max((len(event["losses"]) for event in events.values()), default=1)
    norms = [norm for event in events.values() for _, norm in event["norms"]]
    theirs = [norm for e in difference.reference.events[difference.place].values() for _, norm in e["norms"]]
    if (
        norms
        and theirs
        and norms[0]
        and not isclose(factor, 1.0)
        and isclose(theirs[0] / norms[0], factor, rel_tol=0.02)
    ):
        return (
            f"it was clipped by a norm of {norms[0]:.6g}, and the reference's is {theirs[0]:.6g}",
            "the norm must be taken over all pieces of the model, and each counted once",
        )
    if micro > 1 and ranks == micro and any(isclose(factor, f, rel_tol=1e-3) for f in (ranks, 1 / ranks)):
        said = "summed instead of averaged" if factor > 1 else "divided once too often"
        return f"{said}: over the {ranks} ranks, or over as many micro-batches", "what divides by either"
    if ranks > 1 and isclose(factor, ranks, rel_tol=1e-3):
        return f"summed over {ranks} ranks instead of averaged", "the division by the number of ranks"
    if ranks > 1 and isclose(factor, 1 / ranks, rel_tol=1e-3):
        return f"divided by {ranks} ranks once too often", "the division by the number of ranks, and the loss's own"
    if micro > 1 and isclose(factor, micro, rel_tol=1e-3):
        return f"summed over {micro} micro-batches instead of averaged", "the division by the accumulation steps"
    if micro > 1 and isclose(factor, 1 / micro, rel_tol=1e-3):
        return f"divided by {micro} micro-batches once too often", "the division by the accumulation steps"
    for size in range(2, ranks + 1):
        if ranks % size == 0 and isclose(factor, size, rel_tol=1e-3):
            return f"summed over a group of {size} ranks that share a copy", "the reduction in that group"
        if ranks % size == 0 and isclose(factor, 1 / size, rel_tol=1e-3):
            return f"divided by {size} once too often", "the group whose size is divided by"
    return "one factor explains all of it", "what the loss or the gradients are divided by, and clipping"


def nothing(difference: Difference) -> Cause | None:
    if any(float(got.norm()) > 0 for _, _, got, _ in difference.pairs()):
        return None
    absent = all(part.stored is None for _, part, _, _ in difference.pairs())
    state = "no gradient at all (None)" if absent else "a gradient of zeros"
    return Cause(
        f"{len(difference.off)} of {len(difference.wholes)} parameters have {state}",
        "is it used in forward, is a graph cut (detach, no_grad), does its collective pass gradients back?",
    )


def never_reduced(difference: Difference) -> Cause | None:
    """Ranks have gradients of their own, which together would be the reference's."""
    apart, means, sums, count = 0, 0, 0, 0
    for name in difference.off:
        for copies in difference.mine.copies(name):
            if len(copies) < 2 or any(part.stored is None for part in copies):
                return None
            got = torch.stack([difference.mine.read(part) for part in copies])
            expected = copies[0].of(difference.wholes[name])
            off = float((got - expected).norm(dim=1).max())
            count += 1
            apart += float((got - got[0]).norm()) > CLOSE * off
            means += float((got.mean(0) - expected).norm()) <= CLOSE * off
            sums += float((got.sum(0) - expected).norm()) <= CLOSE * off
    if apart < count:
        return None
    everything = (
        "every gradient" if len(difference.off) == len(difference.wholes) else f"the gradient of {first_of(difference)}"
    )
    look_at = "DDP around the model and called by its forward, no_sync, hooks; which group the reduction is in"
    groups = {tuple(difference.mine.groups(name)) for name in difference.off}
    among = groups.pop()
    if not groups and all(len(ranks) > 1 for ranks in among):
        said = " and ".join(f"among ranks {', '.join(map(str, ranks))}" for ranks in among)
        return Cause(f"{everything} was reduced {said}, and not over all of them", look_at)
    if means == count or sums == count:
        how = "mean" if means == count else "sum"
        return Cause(
            f"{everything} was never reduced: each rank has its own, and their {how} is the reference's", look_at
        )
    return Cause(f"{everything} is another on each rank: it was not reduced over all of them", look_at)


def stale(difference: Difference) -> Cause | None:
    before = (difference.place[0], difference.step - 1)
    if before not in difference.reference.events:
        return None
    earlier = difference.reference.tensors(before, "gradients")

    def then(name: str, part: Part, expected: Tensor) -> Tensor | None:
        whole = earlier.whole_if(name) if name in earlier else None
        return None if whole is None else part.of(whole)

    if not difference.explained_by(then):
        return None
    return Cause(
        f"the gradients are stale: those of step {before[1]}",
        "a wait that is missing before the optimizer, or a buffer that is read before it is filled",
    )


def accumulated(difference: Difference) -> Cause | None:
    """The gradients of the steps before are still in it."""
    before = (difference.place[0], difference.step - 1)
    if before not in difference.candidate.events:
        return None
    earlier = difference.candidate.tensors(before, "gradients")

    def added(name: str, part: Part, expected: Tensor) -> Tensor | None:
        then = next((p for p in earlier.parts.get(name, []) if p.rank == part.rank), None)
        return None if then is None or then.stored is None else expected + earlier.read(then)

    if not difference.explained_by(added):
        return None
    return Cause("the gradients of the step before are still in it", "zero_grad before each step")


def rounded(difference: Difference) -> Cause | None:
    """Equal up to bf16, or fp16, in which the candidate has it."""
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
        near = all(
            float((got - expected).norm()) <= ROUNDED * torch.finfo(dtype).eps * float(expected.norm())
            for _, _, got, expected in difference.pairs()
        )
        if near:
            return Cause(
                f"equal up to {name}: the candidate computes or reduces gradients in {name}",
                f"autocast, the type that gradients are reduced in, weights in {name}",
            )
    return None


def mean_of_means(difference: Difference) -> Cause | None:
    """Ranks have means over different numbers of samples, or of targets, and they were averaged alike."""
    events = difference.candidate.events[difference.place]
    theirs = difference.reference.events[difference.place]
    losses = {rank: sum(event["losses"]) for rank, event in events.items() if event["losses"]}
    rows = {rank: sum(len(t["rows"][0]) for ts in e["inputs"] for t in ts[:1]) for rank, e in events.items()}
    wanted = [sum(event["losses"]) for event in theirs.values() if event["losses"]]
    everywhere = len(difference.off) == len(difference.wholes)
    if len(losses) < 2 or not wanted or not everywhere or any(r != sorted(events) for r in difference.off.values()):
        return None
    mean, weighted = sum(losses.values()) / len(losses), 0.0
    if sum(rows.values()):
        weighted = sum(losses[rank] * rows[rank] for rank in losses) / sum(rows[rank] for rank in losses)
    if len(set(rows.values())) > 1 and isclose(weighted, wanted[0], rel_tol=1e-4):
        counts = ", ".join(f"{rows[rank]} samples on rank {rank}" for rank in sorted(rows))
        return Cause(
            f"a mean of means: {counts}, and each rank's mean counts the same",
            "the loss must be a sum over all ranks' samples, divided by their number over all ranks",
        )
    low, high = min(losses.values()), max(losses.values())
    if not isclose(mean, wanted[0], rel_tol=1e-4) and low <= wanted[0] <= high and len(set(rows.values())) == 1:
        return Cause(
            "a mean of means: ranks have means over different numbers of targets (padding?), and each counts the same",
            "the loss must be a sum over all ranks' targets, divided by their number over all ranks",
        )
    return None


def clipped_apart(difference: Difference) -> Cause | None:
    """By norms that are not the reference's."""
    events = difference.candidate.events[difference.place]
    mine = {rank: event["norms"][-1][1] for rank, event in events.items() if event["norms"]}
    theirs = [e["norms"][-1][1] for e in difference.reference.events[difference.place].values() if e["norms"]]
    if not theirs or all(isclose(norm, theirs[0], rel_tol=0.01) for norm in mine.values()):
        return None
    norms = ", ".join(f"{norm:.4g} on rank {rank}" for rank, norm in sorted(mine.items()))
    return Cause(
        f"gradients were clipped by other norms than the reference's {theirs[0]:.4g}: {norms}",
        "clip after the gradients are reduced, by the norm of the whole model",
    )


def only_a_part(difference: Difference) -> Cause | None:
    """Some elements that lie together: of a shard, a bucket, the last piece."""
    said = []
    for name, part, got, expected in difference.pairs():
        tolerance = 0.01 * float((got - expected).abs().max())
        wrong = ((got - expected).abs() > tolerance).nonzero().reshape(-1)
        first, last, count = int(wrong[0]), int(wrong[-1]), int(wrong.numel())
        if count <= 0.9 * got.numel() and count >= 0.8 * (last - first + 1):
            span = f"element {first}" if first == last else f"elements {first} to {last}"
            said.append(f"{span} of {got.numel()} of {name} on rank {part.rank}")
    if len(said) < len(list(difference.pairs())):
        return None
    more = f", and {len(said) - 1} more like it" if len(said) > 1 else ""
    return Cause(
        f"only some elements differ: {said[0]}{more}; the others are the reference's",
        "the boundaries of shards and buckets, padding, the last piece",
    )


def another_forward(difference: Difference) -> Cause | None:
    """The loss is another too."""
    found = cause_of_loss(difference.reference, difference.candidate, difference.place)
    if found is None:
        return None
    return Cause(
        f"the forward pass is another: its loss is {found.got}, and the reference's is {found.expected}",
        "what the model computes on these ranks: a partial result, a bias that every rank adds, a mask, positions",
    )


def only_some(difference: Difference) -> Cause | None:
    every = list(difference.wholes)
    names = [name for name in every if name in difference.off]
    if len(names) == len(every):
        return None
    said = f"only {len(names)} of {len(every)} gradients differ ({first_of(difference)} is the first in backward)"
    look_at = "what sets these parameters apart: their layer, bucket, hook or group"
    empty = sorted({name for name, _, got, _ in difference.pairs() if not float(got.norm())})
    if empty:
        said += f"; {', '.join(empty)} has none at all"
        look_at = "where the graph is cut: detach, no_grad, a collective that passes no gradients back"
    elif names == every[: len(names)]:
        said += f": all that come before {every[len(names)]}, which agrees"
        look_at = f"how gradients pass back through {every[len(names)].rpartition('.')[0] or 'it'}: a sum over ranks?"
    if (losses := mean_losses(difference)) is not None and not isclose(*losses, rel_tol=1e-4):
        said += f"; the ranks' mean loss is {losses[0]:.6g}, and the reference's {losses[1]:.6g}"
        look_at = "a term of the loss that reaches these parameters only: its factor, and what it is a mean over"
    return Cause(said, look_at)


def mean_losses(difference: Difference) -> tuple[float, float] | None:
    """(over the candidate's ranks, the reference's), where all ranks have as many samples."""
    events = difference.candidate.events[difference.place].values()
    theirs = [sum(e["losses"]) for e in difference.reference.events[difference.place].values() if e["losses"]]
    losses = [sum(event["losses"]) for event in events if event["losses"]]
    rows = {sum(len(t["rows"][0]) for ts in event["inputs"] for t in ts[:1]) for event in events}
    return (sum(losses) / len(losses), theirs[0]) if losses and theirs and len(rows) == 1 else None


def cause_of_loss(reference: Side, candidate: Side, place: Place) -> Cause | None:
    """Where no way in which ranks' losses may combine gives the reference's."""
    theirs = [sum(event["losses"]) for event in reference.events[place].values() if event["losses"]]
    events = candidate.events[place]
    losses = {rank: sum(event["losses"]) for rank, event in events.items() if event["losses"]}
    if not theirs or not losses:
        return None
    wanted, values = theirs[0], list(losses.values())
    low, high, near = min(values), max(values), 0.01 * max(abs(wanted), 1e-6)
    if low - near <= wanted <= high + near or isclose(sum(values), wanted, rel_tol=0.01):
        return None
    micro = max(len(event["losses"]) for event in events.values())
    known = {candidate.ranks, 1 / candidate.ranks, micro, 1 / micro, candidate.ranks * micro, micro / candidate.ranks}
    for times in known:
        if low * times - near <= wanted <= high * times + near:  # scaled, and the gradients scaled back
            return None
    return Cause(
        f"the gradients agree, but the loss does not: {', '.join(f'{v:.6g}' for v in values)} on the ranks",
        "how the loss that is reported is computed",
        expected=f"{wanted:.6g}",
        got=", ".join(f"{v:.6g}" for v in values),
    )


def first_of(difference: Difference) -> str:
    """In backward's order."""
    return next(name for name in reversed(list(difference.wholes)) if name in difference.off)

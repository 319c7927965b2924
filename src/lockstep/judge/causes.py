"""Why a gradient or a loss differs, from the shape of the difference. The first that fits is said."""

from math import isclose

import torch
from torch import Tensor

from lockstep.judge.assemble import Part
from lockstep.judge.difference import CLOSE, Cause, Difference
from lockstep.judge.factor import one_factor
from lockstep.judge.ledger import missing, reductions
from lockstep.judge.losses import another_mean, cause_of_loss, mean_of_means

ROUNDED = 6
"""Last digits that gradients may be off by, computed in few digits from end to end."""


def cause_of_gradients(difference: Difference) -> Cause:
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
    _, _, got, expected = next(pair for pair in difference.pairs() if pair[0] == difference.first)
    found.expected, found.got = f"norm {float(expected.norm()):.6g}", f"norm {float(got.norm()):.6g}"
    return found


def missing_reductions(difference: Difference) -> str:
    """Which reductions there were before the step, and which these gradients have not been in."""
    events = difference.candidate.events[difference.place]
    if len(events) < 2:
        return ""
    lines = {rank: reductions(event["collectives"]) for rank, event in events.items()}
    copies = {part.rank for name in difference.off for part in difference.mine.parts[name]}
    sizes = {name: whole.numel() for name, whole in difference.wholes.items()}
    return missing(lines, copies, sum(sizes[name] for name in difference.off), sum(sizes.values()))


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
    everything = "every gradient" if difference.is_everywhere else f"the gradient of {difference.first}"
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
    if difference.step_before not in difference.reference.events:
        return None
    earlier = difference.reference.tensors(difference.step_before, "gradients")

    def then(name: str, part: Part, expected: Tensor) -> Tensor | None:
        whole = earlier.whole_if(name) if name in earlier else None
        return None if whole is None else part.of(whole)

    if not difference.explained_by(then):
        return None
    return Cause(
        f"the gradients are stale: those of step {difference.step_before[1]}",
        "a wait that is missing before the optimizer, or a buffer that is read before it is filled",
    )


def accumulated(difference: Difference) -> Cause | None:
    """The gradients of the steps before are still in it."""
    if difference.step_before not in difference.candidate.events:
        return None
    earlier = difference.candidate.tensors(difference.step_before, "gradients")

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


def clipped_apart(difference: Difference) -> Cause | None:
    """By norms that are not the reference's."""
    mine = {rank: norms[-1] for rank, norms in difference.candidate.norms(difference.place).items()}
    wanted = difference.reference.norm(difference.place)
    if wanted is None or all(isclose(norm, wanted, rel_tol=0.01) for norm in mine.values()):
        return None
    norms = ", ".join(f"{norm:.4g} on rank {rank}" for rank, norm in sorted(mine.items()))
    return Cause(
        f"gradients were clipped by other norms than the reference's {wanted:.4g}: {norms}",
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
    said = f"only {len(names)} of {len(every)} gradients differ ({difference.first} is the first in backward)"
    look_at = "what sets these parameters apart: their layer, bucket, hook or group"
    empty = sorted({name for name, _, got, _ in difference.pairs() if not float(got.norm())})
    if empty:
        said += f"; {', '.join(empty)} has none at all"
        look_at = "where the graph is cut: detach, no_grad, a collective that passes no gradients back"
    elif names == every[: len(names)]:
        said += f": all that come before {every[len(names)]}, which agrees"
        look_at = f"how gradients pass back through {every[len(names)].rpartition('.')[0] or 'it'}: a sum over ranks?"
    if (losses := another_mean(difference)) is not None:
        said += f"; the ranks' mean loss is {losses[0]:.6g}, and the reference's {losses[1]:.6g}"
        look_at = "a term of the loss that reaches these parameters only: its factor, and what it is a mean over"
    return Cause(said, look_at)

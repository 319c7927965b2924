"""One factor explains all of a difference: which, and what it says."""

from math import isclose

from lockstep.apart import one_factor as common_factor
from lockstep.judge.difference import Cause, Difference

TIGHT = 1e-3
"""How far from a factor gradients may be."""


def one_factor(difference: Difference) -> Cause | None:
    factors = []
    for _, _, got, expected in difference.pairs():
        factor = common_factor(got, expected, TIGHT)
        if not factor or isclose(factor, 1.0, rel_tol=TIGHT):
            return None
        factors.append(factor)
    factor = factors[0]
    if not all(isclose(f, factor, rel_tol=0.01) for f in factors):
        return None
    every = "every gradient is" if difference.is_everywhere else "these gradients are"
    said, look_at = meaning(difference, factor)
    return Cause(f"{every} {factor:.6g} times as large: {said}", look_at, factor)


def meaning(difference: Difference, factor: float) -> tuple[str, str]:
    """Of a factor: (what it says, what to look at)."""
    ranks, micro = difference.candidate.ranks, difference.candidate.micro_batches(difference.place)
    wanted, got = difference.reference.norm(difference.place), difference.candidate.norm(difference.place)
    if wanted is not None and got and isclose(wanted / got, factor, rel_tol=0.02):
        return (
            f"it was clipped by a norm of {got:.6g}, and the reference's is {wanted:.6g}",
            "the norm must be taken over all pieces of the model, and each counted once",
        )

    def is_factor(number: float) -> bool:
        return number != 1 and isclose(factor, number, rel_tol=TIGHT)

    if ranks == micro and (is_factor(ranks) or is_factor(1 / ranks)):
        said = "summed instead of averaged" if factor > 1 else "divided once too often"
        return f"{said}: over the {ranks} ranks, or over as many micro-batches", "what divides by either"
    if is_factor(ranks):
        return f"summed over {ranks} ranks instead of averaged", "the division by the number of ranks"
    if is_factor(1 / ranks):
        return f"divided by {ranks} ranks once too often", "the division by the number of ranks, and the loss's own"
    if is_factor(micro):
        return f"summed over {micro} micro-batches instead of averaged", "the division by the accumulation steps"
    if is_factor(1 / micro):
        return f"divided by {micro} micro-batches once too often", "the division by the accumulation steps"
    for size in (n for n in range(2, ranks) if ranks % n == 0):
        if is_factor(size):
            return f"summed over a group of {size} ranks that share a copy", "the reduction in that group"
        if is_factor(1 / size):
            return f"divided by {size} once too often", "the group whose size is divided by"
    return "one factor explains all of it", "what the loss or the gradients are divided by, and clipping"

"""What the ranks' losses say: of gradients that differ, and where only the loss does."""

from math import isclose

from lockstep.judge.assemble import Place, Side
from lockstep.judge.difference import Cause, Difference

EXACT = 1e-4
"""Losses so near are the same."""
NEAR = 0.01


def mean_of_means(difference: Difference) -> Cause | None:
    """Ranks have means over different numbers of samples, or of targets, and they were averaged alike."""
    losses, rows = difference.candidate.losses(difference.place), difference.candidate.rows(difference.place)
    wanted = difference.reference.loss(difference.place)
    on_all = all(ranks == sorted(rows) for ranks in difference.off.values())
    if len(losses) < 2 or wanted is None or not difference.is_everywhere or not on_all:
        return None
    mean, weighted = sum(losses.values()) / len(losses), 0.0
    if sum(rows.values()):
        weighted = sum(losses[rank] * rows[rank] for rank in losses) / sum(rows[rank] for rank in losses)
    if len(set(rows.values())) > 1 and isclose(weighted, wanted, rel_tol=EXACT):
        counts = ", ".join(f"{rows[rank]} samples on rank {rank}" for rank in sorted(rows))
        return Cause(
            f"a mean of means: {counts}, and each rank's mean counts the same",
            "the loss must be a sum over all ranks' samples, divided by their number over all ranks",
        )
    between = min(losses.values()) <= wanted <= max(losses.values())
    if not isclose(mean, wanted, rel_tol=EXACT) and between and len(set(rows.values())) == 1:
        return Cause(
            "a mean of means: ranks have means over different numbers of targets (padding?), and each counts the same",
            "the loss must be a sum over all ranks' targets, divided by their number over all ranks",
        )
    return None


def another_mean(difference: Difference) -> tuple[float, float] | None:
    """(the mean over the candidate's ranks, the reference's loss), where they differ though ranks have as many rows."""
    losses, rows = difference.candidate.losses(difference.place), difference.candidate.rows(difference.place)
    wanted = difference.reference.loss(difference.place)
    if wanted is None or not losses or len(set(rows.values())) > 1:
        return None
    mean = sum(losses.values()) / len(losses)
    return None if isclose(mean, wanted, rel_tol=EXACT) else (mean, wanted)


def cause_of_loss(reference: Side, candidate: Side, place: Place) -> Cause | None:
    """Where no way in which ranks' losses may combine gives the reference's."""
    wanted, values = reference.loss(place), list(candidate.losses(place).values())
    if wanted is None or not values:
        return None
    low, high, near = min(values), max(values), NEAR * max(abs(wanted), 1e-6)
    if isclose(sum(values), wanted, rel_tol=NEAR):
        return None
    ranks, micro = candidate.ranks, candidate.micro_batches(place)
    for times in (1, ranks, 1 / ranks, micro, 1 / micro, ranks * micro, micro / ranks):
        if low * times - near <= wanted <= high * times + near:  # scaled, and the gradients scaled back
            return None
    got = ", ".join(f"{value:.6g}" for value in values)
    return Cause(
        f"the gradients agree, but the loss does not: {got} on the ranks",
        "how the loss that is reported is computed",
        expected=f"{wanted:.6g}",
        got=got,
    )

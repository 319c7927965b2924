"""9. Performance: what is exposed, what scales, and who is to blame."""

from itertools import pairwise
from statistics import median

Span = tuple[float, float]
"""Seconds from, seconds to."""
#: solution
PREDICTED_SPEEDUP: float | None = 1 / (0.1 + 0.9 / 8)
#: skeleton
# PREDICTED_SPEEDUP: float | None = None  # 8 ranks, a tenth of the step cannot be divided
#: end


def exposed(compute: list[Span], comm: list[Span]) -> float:
    """Seconds at which something was in flight and nothing was computed. Spans may overlap."""
    #: solution
    ends = sorted({end for span in compute + comm for end in span})
    total = 0.0
    for a, b in pairwise(ends):
        middle = (a + b) / 2
        in_flight = any(start < middle < end for start, end in comm)
        computing = any(start < middle < end for start, end in compute)
        total += (b - a) * (in_flight and not computing)
    return total
    #: todo in flight, and nothing else going on
    #: wrong all-of-it
    # return sum(end - start for start, end in comm)
    #: wrong twice
    # total = 0.0
    # for start, end in comm:
    #     hidden = sum(max(0.0, min(end, b) - max(start, a)) for a, b in compute)
    #     total += end - start - hidden
    # return total
    #: end


def efficiency(alone: float, together: float, ranks: int) -> float:
    """Of `ranks` that take `together` seconds for what one does in `alone`: 1.0 is perfect."""
    #: solution
    return alone / together / ranks
    #: todo the speedup, for each rank
    #: wrong speedup
    # return alone / together
    #: end


def amdahl(serial: float, ranks: int) -> float:
    """The speedup, if a share `serial` of the work cannot be divided."""
    #: solution
    return 1 / (serial + (1 - serial) / ranks)
    #: todo what cannot be divided, and the rest over the ranks
    #: end


def speedup(compute: float, nbytes: float, bandwidth: float, ranks: int, hidden: float) -> float:
    """Of data parallelism: `compute` seconds on one rank, gradients of `nbytes`, a share of whose ring is hidden."""
    #: solution
    ring = 2 * (ranks - 1) / ranks * nbytes / bandwidth
    return compute / (compute / ranks + (1 - hidden) * ring)
    #: todo one rank's time over that of all
    #: end


def bottleneck(profile: list[dict[str, float]]) -> str:
    """For each rank the seconds of data, forward, backward and wait. The answer, in this order of suspicion:

    data            reading takes more than a fifth of some rank's step
    rank 3          that rank computes more than a quarter longer than the median of all
    communication   waiting takes more than a fifth of some rank's step
    none            nothing stands out
    """
    #: solution
    computing = [phases["forward"] + phases["backward"] for phases in profile]
    for phases in profile:
        if phases["data"] > 0.2 * sum(phases.values()):
            return "data"
    slowest = max(range(len(profile)), key=lambda rank: computing[rank])
    if computing[slowest] > 1.25 * median(computing):
        return f"rank {slowest}"
    waits = any(phases["wait"] > 0.2 * sum(phases.values()) for phases in profile)
    return "communication" if waits else "none"
    #: todo look at the ranks side by side
    #: wrong blames-the-wait
    # for phases in profile:
    #     if phases["data"] > 0.2 * sum(phases.values()):
    #         return "data"
    # waits = any(phases["wait"] > 0.2 * sum(phases.values()) for phases in profile)
    # if waits:
    #     return "communication"
    # computing = [phases["forward"] + phases["backward"] for phases in profile]
    # slowest = max(range(len(profile)), key=lambda rank: computing[rank])
    # return f"rank {slowest}" if computing[slowest] > 1.25 * median(computing) else "none"
    #: end

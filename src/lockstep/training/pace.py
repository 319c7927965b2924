"""Who holds the others up: a rank that is slower than its peers, and in what.

A slow rank shows in its own work, never in its waiting: all others wait for it. So ranks compare the time that each
spent on data, forward, backward and the optimizer without what it waited. A machine that is busy makes now this rank
slow and now that one; a straggler is one rank in nearly every step, and not for a moment only. Ranks that share a GPU
take turns on it, now one longer and now another, so that there it takes longer to be sure.
"""

import torch

from lockstep.comm.collectives import all_gather
from lockstep.comm.hosts import flag_device
from lockstep.layout import Layout
from lockstep.words import duration

STEPS = 10
"""That are looked at together."""
MOST = 8
"""Of them, in which a rank must be the slowest, by the threshold, to be named."""
IN_A_ROW = 2
"""Comparisons in which it must be so; one more where ranks share a GPU."""
LEAST = 1e-3
"""Seconds per step below which no straggler is reported."""
OWN_WORK = ("data_ms", "forward_ms", "backward_ms", "optimizer_ms")


class Pace:
    """Collects this rank's times; every STEPS steps all ranks compare theirs."""

    def __init__(self, layout: Layout, threshold: float) -> None:
        """`threshold`: how many times as long as its peers; 0: none is looked for."""
        self.layout, self.threshold = layout, threshold
        self.peers = peers_of(layout)
        self._times: list[list[float]] = []
        self._place = flag_device(layout.norm, layout.world.device)
        self._needed = IN_A_ROW + (layout.world.ranks_on_device > 1)
        self._in_a_row: dict[int, int] = {}
        self.found: list[tuple[int, str, float]] = []
        """Stragglers of the last comparison: rank, phase, how many times as slow as its peers."""

    def add(self, breakdown: dict[str, float]) -> list[str]:
        """A step is over. What there is to report, once for each straggler until it has recovered."""
        self.found = []
        if not self.threshold or self.layout.norm.size == 1:
            return []
        self._times.append([breakdown[phase] / 1e3 for phase in OWN_WORK])
        if len(self._times) < STEPS:
            return []
        mine = torch.tensor(self._times, dtype=torch.float64, device=self._place)
        self._times = []
        everyone = all_gather(mine, self.layout.norm, purpose="pace").cpu()  # (ranks, steps, phases)
        slow = [f for group in self.peers if (f := straggler(everyone, group, self.threshold)) is not None]
        self._in_a_row = {rank: self._in_a_row.get(rank, 0) + 1 for rank, _, _ in slow}
        self.found = [found for found in slow if self._in_a_row[found[0]] >= self._needed]
        return [described(*found, everyone) for found in self.found if self._in_a_row[found[0]] == self._needed]


def peers_of(layout: Layout) -> list[list[int]]:
    """Ranks that do the same work: other stages of a pipeline have other layers."""
    stages: dict[int, list[int]] = {}
    per_stage = layout.world.size // layout.degrees.pp
    for rank in range(layout.world.size):
        stages.setdefault(rank // per_stage, []).append(rank)
    return [ranks for ranks in stages.values() if len(ranks) > 1]


def straggler(times: torch.Tensor, peers: list[int], threshold: float) -> tuple[int, str, float] | None:
    """The rank that was slower than all its peers by `threshold` in nearly every step, its slowest phase against
    theirs, and how many times as slow it was. `times`: (ranks, steps, phases), seconds.
    """
    group = times[peers]
    busy = group.sum(2)  # (peers, steps)
    for i, rank in enumerate(peers):
        others = torch.cat((busy[:i], busy[i + 1 :]))
        usual = others.median(0).values if len(others) > 1 else others[0]
        slow = (busy[i] > threshold * usual) & (busy[i] >= others.max(0).values) & (busy[i] - usual > LEAST)
        if int(slow.sum()) >= MOST:
            rest = torch.cat((group[:i], group[i + 1 :])).median(0).values.median(0).values
            excess = group[i].median(0).values - rest
            phase = OWN_WORK[int(excess.argmax())].removesuffix("_ms")
            return rank, phase, float(busy[i].median() / usual.median().clamp(min=1e-9))
    return None


def described(rank: int, phase: str, times: float, everyone: torch.Tensor) -> str:
    mine = everyone[rank].sum(1).median().item()
    return (
        f"rank {rank} is a straggler: {duration(mine)} of own work per step over the last {STEPS} steps, "
        f"{times:.1f} times its peers', most of it in {phase}; the others wait for it"
    )

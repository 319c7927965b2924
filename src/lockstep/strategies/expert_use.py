"""What a run logs of its experts: how many tokens took each, what capacity dropped, the auxiliary loss."""

from dataclasses import dataclass
from itertools import zip_longest

import torch

from lockstep.comm.collectives import all_gather_objects
from lockstep.strategies.experts import Balance


@dataclass
class ExpertUse:
    """Over all ranks, since it was last read."""

    load: dict[str, list[int]]
    """Name of a mixture -> choices of each of its experts."""
    dropped: int
    """Of these choices, by capacity."""
    auxiliary_loss: float
    """Of all mixtures: the mean over steps."""

    @property
    def busiest(self) -> float:
        """The load of the most used expert over an equal share, in the mixture where it is largest. 1: all alike."""
        return max((max(load) * len(load) / sum(load) for load in self.load.values() if any(load)), default=1.0)

    @property
    def unused(self) -> int:
        """Experts that no token took."""
        return sum(load.count(0) for load in self.load.values())

    @property
    def dropped_share(self) -> float:
        return self.dropped / max(1, sum(sum(load) for load in self.load.values()))


def read_use(balance: Balance) -> ExpertUse:
    """All ranks must ask together."""
    mine = {name: ranks.taken_since() for name, ranks in balance.tallies()}
    losses = [torch.zeros(()).double() if loss is None else loss.double().cpu() for loss in balance.losses]
    balance.losses.clear()
    found = ExpertUse({}, 0, 0.0)
    dropped = loss = 0.0
    gathered = all_gather_objects((mine, torch.stack(losses).mean().item() if losses else 0.0), balance.layout.norm)
    for theirs, their_loss in gathered:
        for name, (load, their_dropped) in theirs.items():
            found.load[name] = [sum(pair) for pair in zip_longest(found.load.get(name, []), load, fillvalue=0)]
            dropped += their_dropped
        loss += their_loss
    found.load = {
        name: [choices // balance.copies for choices in load] for name, load in sorted(found.load.items(), key=place)
    }
    found.dropped, found.auxiliary_loss = round(dropped / balance.copies), loss / balance.copies
    return found


def place(named: tuple[str, list[int]]) -> list[tuple[int, str]]:
    """Blocks by their numbers."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in named[0].split(".")]

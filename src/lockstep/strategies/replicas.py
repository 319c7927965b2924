"""Whether ranks that should hold the same numbers do: a flipped bit in memory is not noticed otherwise.

Each rank sums up the bits of what it holds of every parameter, and the sums of ranks that hold the same region must be
equal, bit for bit: every engine gives all copies the same gradient and takes the same step.
"""

from collections import Counter, defaultdict

import torch
from torch import Tensor

from lockstep.comm.collectives import all_gather_objects
from lockstep.layout.region import Region
from lockstep.strategies.parallel_model import ParallelModel

CHUNK = 1 << 20
"""Elements at a time: their bits are summed in int64, which takes room."""
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: Tensor) -> int:
    """A checksum of the bits, weighted by position, so that swapped elements are detected too."""
    bits = tensor.contiguous().view(-1).view(BITS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    weights = 2 * (torch.arange(CHUNK, device=bits.device) % 65_521) + 1  # odd: an even one would lose the highest bits
    for start, part in enumerate(bits.split(CHUNK)):
        mixed = part.long()
        mixed = mixed ^ (mixed >> 32)  # so that the highest ones, a sign, say, count in more than one place
        total += (mixed * weights[: len(part)]).sum() * (2 * (start % 65_521) + 1)
    return int(total)


def differing_replicas(strategy: ParallelModel) -> str | None:
    """Which rank's copy of which parameter differs from the other ranks', in words; None: all are equal.

    A collective: every rank must call it, and all get the same.
    """
    if strategy.layout.norm.size == 1:
        return None
    held = strategy.held()
    mine = {name: (own.region, checksum(own.tensor)) for name, own in held.items() if own.tensor.numel()}
    copies: dict[tuple[str, Region], dict[int, int]] = defaultdict(dict)
    for rank, theirs in enumerate(all_gather_objects(mine, strategy.layout.norm)):
        for name, (region, total) in theirs.items():
            copies[name, region][rank] = total
    found = []
    for (name, _), sums in copies.items():
        usual, votes = Counter(sums.values()).most_common(1)[0]
        if votes == len(sums):
            continue
        odd = [rank for rank, total in sums.items() if total != usual]
        if 2 * votes > len(sums):
            who = ", ".join(f"rank {rank}" for rank in odd)
            found.append(f"{who} of {len(sums)} that hold it: {name}")
        else:
            found.append(f"ranks {', '.join(map(str, sums))}, and it is not known which is right: {name}")
    if not found:
        return None
    more = f", and {len(found) - 1} more parameters" if len(found) > 1 else ""
    return f"{found[0]}{more}"

"""A cost model of the all-reduce algorithms: which one is fastest for this size, on these ranks?

    time = what the busiest rank does, one thing after the other:  messages, bytes sent, bytes added
         + what all ranks do together:                             messages, bytes

each at a price. The second line is for ranks that share a machine: with more ranks than cores, or one memory for all,
somebody else's message takes time too. The counts are the algorithms' own (`algorithms.cost`); the prices are fitted to
measured times by least squares of the relative error, none below zero.
"""

import time
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from itertools import combinations

import numpy as np
import torch
import torch.distributed as dist

from lockstep.comm.algorithms import ALGORITHMS, cost, tree_broadcast
from lockstep.comm.wire import Wire, moves_cuda


@dataclass(frozen=True)
class Sample:
    """One measurement."""

    algorithm: str
    ranks: int
    nbytes: int
    seconds: float
    ranks_per_node: int = 1


@dataclass(frozen=True)
class Prices:
    """What the host and its network charge."""

    message: float
    """Seconds per message of the busiest rank."""
    byte_sent: float
    byte_added: float
    any_message: float
    """Seconds per message of any rank."""
    any_byte: float

    def predict(self, algorithm: str, ranks: int, nbytes: int, ranks_per_node: int = 1) -> float:
        """Seconds of an all-reduce."""
        work = astuple(cost(algorithm, ranks, nbytes, ranks_per_node))
        return sum(count * price for count, price in zip(work, astuple(self), strict=True))


def fit(samples: Iterable[Sample]) -> Prices:
    """The prices that explain the samples best: each sample counts by its relative error."""
    rows, total = [], []
    for s in samples:
        work = astuple(cost(s.algorithm, s.ranks, s.nbytes, s.ranks_per_node))
        rows.append([count / s.seconds for count in work])
        total.append(1.0)
    return Prices(*_least_squares(np.array(rows), np.array(total)))


def _least_squares(matrix: np.ndarray, target: np.ndarray) -> list[float]:
    """Without negative coefficients: of all subsets of the columns whose solution has none, the best."""
    columns = matrix.shape[1]
    best, best_error = np.zeros(columns), float("inf")
    for count in range(1, columns + 1):
        for chosen in combinations(range(columns), count):
            part = matrix[:, chosen]
            solution = np.linalg.lstsq(part, target, rcond=None)[0]
            error = float(np.sum((part @ solution - target) ** 2))
            if (solution >= 0).all() and error < best_error:
                best = np.zeros(columns)
                best[list(chosen)] = solution
                best_error = error
    return [float(b) for b in best]


# ---- algorithm="auto" -----------------------------------------------------------------------------------------

TRIAL_BYTES = (1024, 64 * 1024, 4 * 1024 * 1024)
_prices: dict[tuple[dist.ProcessGroup | None, tuple[int, ...]], Prices] = {}


def choose(wire: Wire, nbytes: int) -> str:
    """The algorithm that the model predicts to be fastest; measured once per group, on all ranks together."""
    key = (wire.group, tuple(wire.ranks))
    if key not in _prices:
        _prices[key] = measure(wire)
    prices = _prices[key]
    return min(ALGORITHMS, key=lambda name: prices.predict(name, wire.size, nbytes))


def measure(wire: Wire, repeats: int = 5) -> Prices:
    """Time each algorithm at a few sizes and fit. Rank 0's prices count, so that all ranks choose alike."""
    device = torch.device("cuda", torch.cuda.current_device()) if moves_cuda(wire.group) else torch.device("cpu")
    samples = []
    for nbytes in TRIAL_BYTES:
        tensor = torch.zeros(nbytes // 4, device=device)
        for name, algorithm in ALGORITHMS.items():
            times = []
            for _ in range(repeats):
                start = time.perf_counter()
                algorithm(wire, tensor, torch.add)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                times.append(time.perf_counter() - start)
            samples.append(Sample(name, wire.size, nbytes, float(np.median(times[1:]))))
    prices = fit(samples)
    told = torch.tensor(astuple(prices), dtype=torch.float64, device=device)
    tree_broadcast(wire, told)
    return Prices(*told.tolist())

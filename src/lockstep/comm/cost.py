"""A cost model of the all-reduce algorithms: which one is fastest for this size, on these ranks?

    time = what the busiest rank does, one thing after the other:  messages, bytes sent, bytes added
         + what all ranks do together:                             messages, bytes

each at a price. The second line is for ranks that share a machine: with more ranks than cores, or one memory for all,
another rank's message takes time too. The counts follow from the algorithms (`cost`); the prices are fitted to
measured times by least squares of the relative error, none below zero.
"""

import time
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from itertools import combinations
from math import ceil

import numpy as np
import torch

from lockstep.comm.algorithms import ALGORITHMS, PIECE_BYTES, tree_broadcast
from lockstep.comm.wire import PerWire, Wire

# ---- what an algorithm does -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """What the busiest rank does, one thing after the other; and what all ranks do together."""

    messages: float
    nbytes: float
    added: float
    all_messages: float
    all_bytes: float

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))


def _log2(n: int) -> int:
    return (n - 1).bit_length()


def _pieces_of(size: float) -> int:
    return max(1, ceil(size / PIECE_BYTES))


def cost(algorithm: str, n: int, size: float, ranks_per_node: int = 1) -> Cost:
    """The cost of an all-reduce of `size` bytes over n ranks: the docstrings' formulas, and their sums over ranks."""
    if n == 1:
        return Cost(0, 0, 0, 0, 0)
    levels = _log2(n)
    core_levels = n.bit_length() - 1
    core = 1 << core_levels
    extra = n - core
    fold = Cost(2, 2 * size, size, 2 * extra, 2 * extra * size) if extra else Cost(0, 0, 0, 0, 0)
    match algorithm:
        case "naive":
            return Cost(2 * (n - 1), 2 * (n - 1) * size, (n - 1) * size, 2 * (n - 1), 2 * (n - 1) * size)
        case "tree":
            return Cost(2 * levels, 2 * levels * size, levels * size, 2 * (n - 1), 2 * (n - 1) * size)
        case "ring":
            messages, share = 2 * (n - 1) * _pieces_of(size / n), (n - 1) / n * size
            return Cost(messages, 2 * share, share, n * messages, n * 2 * share)
        case "recursive_doubling":
            sent = core_levels * size
            return fold + Cost(core_levels, sent, sent, core * core_levels, core * sent)
        case "halving_doubling":
            part = (core - 1) / core * size
            return fold + Cost(2 * core_levels, 2 * part, part, core * 2 * core_levels, core * 2 * part)
        case "double_tree":
            pieces = _pieces_of(size / 2)
            return Cost(2 * (levels + pieces), 2 * size, size, 4 * (n - 1) * pieces, 2 * (n - 1) * size)
        case "hierarchical":
            local = min(ranks_per_node, n)
            nodes, depth = ceil(n / local), _log2(local)
            inside = Cost(2 * depth, 2 * depth * size, depth * size, 2 * (n - nodes), 2 * (n - nodes) * size)
            return inside + cost("ring", nodes, size)
    raise KeyError(algorithm)


# ---- what that costs ------------------------------------------------------------------------------------------


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
    """Non-negative least squares: of all subsets of columns whose solution has no negative coefficient, the best."""
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
_prices: PerWire[Prices] = PerWire()


def choose(wire: Wire, nbytes: int) -> str:
    """The algorithm that the model predicts to be fastest; measured once per group, on all ranks together."""
    prices = _prices.get(wire, lambda: measure(wire))
    return min(ALGORITHMS, key=lambda name: prices.predict(name, wire.size, nbytes, wire.ranks_per_node))


def measure(wire: Wire, repeats: int = 5) -> Prices:
    """Time each algorithm at a few sizes and fit. All ranks use rank 0's prices, so that they make the same choice."""
    samples = []
    for nbytes in TRIAL_BYTES:
        tensor = torch.zeros(nbytes // 4, device=wire.device)
        for name, algorithm in ALGORITHMS.items():
            times = []
            for _ in range(repeats):
                start = time.perf_counter()
                algorithm(wire, tensor, torch.add)
                if tensor.is_cuda:
                    torch.cuda.synchronize(tensor.device)
                times.append(time.perf_counter() - start)
            samples.append(Sample(name, wire.size, nbytes, float(np.median(times[1:])), wire.ranks_per_node))
    prices = torch.tensor(astuple(fit(samples)), dtype=torch.float64, device=wire.device)
    tree_broadcast(wire, prices)
    return Prices(*prices.tolist())

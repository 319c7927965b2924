"""Find the planner's constants from measured rows: least squares on the logarithm of predicted over measured time.

Far-off rows count by their distance and not by its square (Huber), every source by the root of its number of rows, and
every constant is held near a value that is plausible by itself, so that few rows cannot bend it far.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from math import exp, log

import numpy as np

from lockstep.plan.constants import Constants
from lockstep.plan.published import Row
from lockstep.plan.step import step_time

HUBER = 0.12
"""Errors beyond this count by their distance."""
PRIOR = 0.25
"""How far a constant may be from its plausible value, as a factor's logarithm: one standard deviation."""
NOISE = 0.10
FACTORS = 0.12
"""The same for the factors of software, whose plausible value is 1."""


def is_held_out(row: Row, share: float = 0.25) -> bool:
    """By a hash of the row: the same rows whenever it is asked."""
    text = ",".join(row.cells.values())
    return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) < share * 2**32


def usable(row: Row) -> bool:
    return row.setting is not None and row.measured_s is not None and row.feasible


def errors(rows: Sequence[Row], constants: Constants) -> np.ndarray:
    """log(predicted / measured) of each."""
    found = []
    for row in rows:
        assert row.setting is not None
        assert row.measured_s is not None
        found.append(log(step_time(replace(row.setting, constants=constants)).seconds / row.measured_s))
    return np.array(found)


def weights(rows: Sequence[Row]) -> np.ndarray:
    sizes = Counter(row.source for row in rows)
    raw = np.array([sizes[row.source] ** -0.5 for row in rows])
    return raw / raw.mean()


def fit(
    rows: Sequence[Row],
    start: Constants,
    free: Sequence[str],
    plausible: Constants,
    rounds: int = 8,
    report: Callable[[str], None] = print,
    workers: int = 2,
) -> Constants:
    """Levenberg-Marquardt with numeric derivatives."""
    weight = weights(rows)
    center = np.array([log(plausible[name]) for name in free])
    width = np.array([FACTORS if name.startswith("factor_") else PRIOR for name in free]) / NOISE
    x, damping = np.array([log(start[name]) for name in free]), 1e-2

    def constants_at(point: np.ndarray) -> Constants:
        return start.changed(**{name: exp(value) for name, value in zip(free, point, strict=True)})

    def loss(error: np.ndarray, point: np.ndarray) -> float:
        size = np.abs(error)
        huber = np.where(size < HUBER, error**2, 2 * HUBER * size - HUBER**2)
        return float((weight * huber).sum() / NOISE**2 + (((point - center) / (width * NOISE)) ** 2).sum())

    with ProcessPoolExecutor(workers) as pool:
        error = errors(rows, constants_at(x))
        best = loss(error, x)
        for number in range(rounds):
            moved = [np.where(np.arange(len(free)) == i, x + 0.02, x) for i in range(len(free))]
            columns = list(pool.map(errors, [rows] * len(free), [constants_at(point) for point in moved]))
            jacobian = np.stack([(column - error) / 0.02 for column in columns], axis=1)
            robust = weight * np.minimum(1.0, HUBER / np.maximum(np.abs(error), 1e-9)) / NOISE**2
            left = jacobian.T @ (robust[:, None] * jacobian) + np.diag(1 / (width * NOISE) ** 2)
            right = jacobian.T @ (robust * error) + (x - center) / (width * NOISE) ** 2
            for _ in range(6):
                step = np.linalg.solve(left + damping * np.diag(np.diag(left)), right)
                tried = x - np.clip(step, -0.4, 0.4)
                new = errors(rows, constants_at(tried))
                if loss(new, tried) < best:
                    damping = max(damping / 4, 1e-5)
                    break
                damping *= 5
            else:
                break
            gained, x, error, best = best - loss(new, tried), tried, new, loss(new, tried)
            report(f"round {number + 1}: loss {best:.1f}, mean error {float(np.abs(np.expm1(error)).mean()):.2%}")
            if gained < 0.2:
                break
    return constants_at(x)

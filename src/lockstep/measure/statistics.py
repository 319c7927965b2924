"""What can be said about noisy times: medians, their confidence, and whether two differ."""

from dataclasses import dataclass
from math import isnan, nan
from statistics import median, quantiles

import torch

RESAMPLES = 2000
CONFIDENCE = 0.95
FEWEST = 6
"""With fewer values not even their whole range holds the median with 95% confidence."""
NEGLIGIBLE = 0.01
"""A difference that is sure but smaller than this is not worth a sentence."""


def percentiles(values: list[float]) -> tuple[float, float]:
    """10th and 90th."""
    tenths = quantiles(values, n=10, method="inclusive") if len(values) > 1 else [values[0]] * 9
    return tenths[0], tenths[-1]


@dataclass(frozen=True)
class Estimate:
    """A median and where it lies with 95% confidence; NaN where that cannot be said."""

    value: float
    low: float = nan
    high: float = nan

    @property
    def is_sure(self) -> bool:
        return not isnan(self.low)

    @property
    def differs_from_one(self) -> bool:
        """Beyond the noise, and by more than nothing."""
        return (self.low > 1 or self.high < 1) and abs(self.value - 1) >= NEGLIGIBLE


def estimate(values: list[float], seed: int = 0) -> Estimate:
    """The median, and its interval by the bootstrap: medians of resamples, drawn with replacement.

    No normal distribution is assumed: step times have a long tail.
    """
    if len(values) < FEWEST:
        return Estimate(median(values))
    sample = torch.tensor(values, dtype=torch.float64)
    draws = torch.randint(len(values), (RESAMPLES, len(values)), generator=torch.Generator().manual_seed(seed))
    medians = sample[draws].quantile(0.5, dim=1)  # (resamples,)
    tail = (1 - CONFIDENCE) / 2
    low, high = medians.quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return Estimate(median(values), low, high)

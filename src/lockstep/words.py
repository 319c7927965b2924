"""Numbers as a person writes them."""

from collections.abc import Sequence


def counted(number: int, what: str) -> str:
    """1 rank, 2 ranks."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def three_figures(number: float) -> str:
    """2,480 and 0.0724, not 2.48e+03."""
    return f"{float(f'{number:.3g}'):,.10g}"


def duration(seconds: float) -> str:
    """12.3 us, 4.56 ms, 1.23 s, 5.2 min, 1.7 h, 23 days: three figures, in the unit that they fit."""
    for most, unit, size in ((1e-3, "us", 1e-6), (1.0, "ms", 1e-3), (120.0, "s", 1.0), (7200.0, "min", 60.0)):
        if seconds < 0.9995 * most:
            return f"{_three(seconds / size)} {unit}"
    return f"{_three(seconds / 3600)} h" if seconds < 2 * 86400 else f"{_three(seconds / 86400)} days"


def _three(number: float) -> str:
    """171, 22.8, 2.30: figures that stand under each other."""
    return f"{number:,.0f}" if number >= 99.95 else f"{number:.1f}" if number >= 9.995 else f"{number:.2f}"


MOST_LISTED = 16
"""Numbers that are read one by one."""


def listed(numbers: Sequence[int]) -> str:
    """`0, 1, 3`; of many, the runs of neighbors: `0 to 4095`."""
    if len(numbers) <= MOST_LISTED:
        return ", ".join(map(str, numbers))
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    parts = [f"{first}" if first == last else f"{first} to {last}" for first, last in runs]
    if len(parts) > MOST_LISTED:
        return f"{', '.join(parts[: MOST_LISTED // 2])}, ..., {parts[-1]} ({len(numbers):,} in all)"
    return ", ".join(parts)

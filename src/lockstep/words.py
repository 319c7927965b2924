"""Numbers as a person writes them."""


def counted(number: int, what: str) -> str:
    """1 rank, 2 ranks."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def three_figures(number: float) -> str:
    """2,480 and 0.0724, not 2.48e+03."""
    return f"{float(f'{number:.3g}'):,.10g}"

"""What share of a step communication would take on a network of some rate: by formula, from a run without one.

    communication   a rank's bytes per step over the rate (the ring's 2S(n-1)/n is in the bytes already)
    compute         the step without its waits
    exposed         all of it, where it begins after backward: naive's and flat's, and parameters that are sent after
                    the optimizer's step. Of the rest, what is left when the last micro-batch's backward (two thirds of
                    its computation) has hidden what it can, and at least one collective of mean size. Never less than
                    the step waits for here; what it waits here for slower ranks comes on top

There is no cost per message in it: many small messages are slower on a real network than this says.
"""

from lockstep.bench.timing import Timing

GBIT_PER_S = (1.0, 10.0, 25.0)
AFTER_BACKWARD = ("naive", "flat")
PARAMETERS_AFTER_STEP = ("zero1", "zero2", "zero1_torch", "local_sgd")
BACKWARD_SHARE = 2 / 3


def predicted_exposed_ms(timing: Timing, gbit_per_s: float) -> float:
    for_ranks = min(timing.imbalance_ms, timing.exposed_ms)
    return for_ranks + max(network_ms(timing, gbit_per_s), timing.exposed_ms - for_ranks)


def network_ms(timing: Timing, gbit_per_s: float) -> float:
    """That cannot be hidden."""
    strategy = timing.strategy.partition("@")[0].partition("+")[0]
    total = timing.wire_mb * 8 / gbit_per_s  # Mbit / (Gbit/s) = ms
    if strategy in AFTER_BACKWARD:
        return total
    afterwards = timing.parameters_mb * 8 / gbit_per_s if strategy in PARAMETERS_AFTER_STEP else 0.0
    beside = total - afterwards
    left = beside - BACKWARD_SHARE * timing.compute_ms / timing.accumulation
    return afterwards + max(left, beside / max(1.0, timing.collectives))


def predicted_shares(timing: Timing) -> dict[str, float]:
    """By the names of their columns."""
    return {f"predicted_fraction_{rate:g}gbit": predicted_share(timing, rate) for rate in GBIT_PER_S}


def predicted_share(timing: Timing, gbit_per_s: float) -> float:
    exposed = predicted_exposed_ms(timing, gbit_per_s)
    return exposed / (timing.compute_ms + exposed) if exposed else 0.0

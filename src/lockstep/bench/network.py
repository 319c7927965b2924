"""What share of a step communication would take on a network of some rate: by formula, from a run without one.

communication   a rank's bytes per step over the rate (the ring's 2S(n-1)/n is in the bytes already)
compute         the step without its waits
exposed         all of the communication, where it begins after backward (naive, flat); else what is left when
                backward, two thirds of compute, has hidden what it can, and at least the last collective
"""

from lockstep.bench.timing import Timing

GBIT_PER_S = (1.0, 10.0, 25.0)
AFTER_BACKWARD = ("naive", "flat")
BACKWARD_SHARE = 2 / 3


def predicted_exposed_ms(timing: Timing, gbit_per_s: float) -> float:
    total = timing.wire_mb * 8 / gbit_per_s  # Mbit / (Gbit/s) = ms
    if timing.strategy.partition("@")[0].partition("+")[0] in AFTER_BACKWARD:
        return total
    return max(total - BACKWARD_SHARE * timing.compute_ms, total / max(1.0, timing.collectives))


def predicted_share(timing: Timing, gbit_per_s: float) -> float:
    exposed = predicted_exposed_ms(timing, gbit_per_s)
    return exposed / (timing.compute_ms + exposed) if exposed else 0.0

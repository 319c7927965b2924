"""What share of a step communication would take on a network of some rate: by formula, from a run without one.

    communication   a rank's bytes per step over the rate (the ring's 2S(n-1)/n is in the bytes already)
    compute         the step without its waits
    exposed         all of it, where it begins after backward: naive's and flat's, and parameters that are sent after
                    the optimizer's step. Of the rest, what is left when the last micro-batch's backward (two thirds of
                    its computation), or for parameters that are in flight beside the next forward its third, has hidden
                    what it can, and at least one collective of mean size. Never less than the step waits for here; what
                    it waits here for slower ranks comes on top

There is no cost per message in it: many small messages are slower on a real network than this says.
"""

from math import nan

from lockstep.measure.timing import Timing
from lockstep.strategies import STRATEGIES, strategy_named
from lockstep.strategies.axes import model_degrees

GBIT_PER_S = (1.0, 10.0, 25.0)
BACKWARD_SHARE = 2 / 3


def predicted_exposed_ms(timing: Timing, gbit_per_s: float) -> float:
    for_ranks = min(timing.imbalance_ms, timing.exposed_ms)
    return for_ranks + max(network_ms(timing, gbit_per_s), timing.exposed_ms - for_ranks)


def network_ms(timing: Timing, gbit_per_s: float) -> float:
    """That cannot be hidden."""
    parallel = strategy_named(timing.strategy.partition("@")[0])
    engine = STRATEGIES[parallel.data]
    total = timing.wire_mb * 8 / gbit_per_s  # Mbit / (Gbit/s) = ms
    if not engine.facts(parallel).overlaps:
        return total
    parameters = timing.parameters_mb * 8 / gbit_per_s
    mean_size = max(1.0, timing.collectives)

    def left(sent: float, share: float) -> float:
        """Of what is sent beside a share of the computation, what that cannot hide; at least one collective."""
        return max(sent - share * timing.compute_ms / timing.accumulation, sent / mean_size)

    if engine.sends_after_step:
        return parameters + left(total - parameters, BACKWARD_SHARE)
    if engine.leaves_in_flight:
        return left(parameters, 1 - BACKWARD_SHARE) + left(total - parameters, BACKWARD_SHARE)
    return left(total, BACKWARD_SHARE)


def predicted_shares(timing: Timing) -> dict[str, float]:
    """By the names of their columns."""
    return {f"predicted_fraction_{rate:g}gbit": predicted_share(timing, rate) for rate in GBIT_PER_S}


def predicted_share(timing: Timing, gbit_per_s: float) -> float:
    """Unknown where the model itself is cut: what a layer sends the next one waits for."""
    if max(model_degrees(strategy_named(timing.strategy.partition("@")[0])).values()) > 1:
        return nan
    exposed = predicted_exposed_ms(timing, gbit_per_s)
    return exposed / (timing.compute_ms + exposed) if exposed else 0.0

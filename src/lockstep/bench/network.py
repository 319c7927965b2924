"""What share of a step communication would take on a network of some rate: by formula, from a run without one.

    communication   a rank's bytes per step over the rate (the ring's 2S(n-1)/n is in the bytes already)
    compute         the step without its waits
    data            naive's and flat's all, and parameters that are sent after the optimizer's step. Of the rest, what
                    is left when the last micro-batch's backward (two thirds of its computation), or for parameters that
                    are in flight beside the next forward its third, has hidden what it can, and at least one collective
                    of mean size
    tp              forward's half; of backward's, what the products of the weights' gradients (a third) do not hide
    cp, ep          all of it: an upper bound, for a ring hides what its attention takes, and tokens of experts what
                    shared experts, or the other half of the tokens, take; likewise the matrices of an optimizer
    pp              what the whole computation does not hide, and at least one micro-batch's, there and back; and the
                    bubble of the schedule's law
    exposed         their sum, and never less than the step waits for here; what it waits here for slower ranks, and in
                    the bubble, comes on top

There is no cost per message in it: many small messages are slower on a real network than this says.
"""

from lockstep.config import Parallel
from lockstep.measure.timing import Timing
from lockstep.parallel.pipeline.law import MICRO_BATCH, idle
from lockstep.strategies import STRATEGIES, strategy_named
from lockstep.strategies.pipeline import micro_batches_of, placement_for

GBIT_PER_S = (1.0, 10.0, 25.0)
FORWARD_SHARE, BACKWARD_SHARE, WEIGHTS_SHARE = 1 / 3, 2 / 3, 1 / 3
"""Of a step's computation: forward, backward, and of backward the products of the weights' gradients."""


def predicted_exposed_ms(timing: Timing, gbit_per_s: float) -> float:
    parallel = strategy_named(timing.strategy.partition("@")[0])
    anyway = min(timing.imbalance_ms + bubble_ms(timing, parallel), timing.exposed_ms)
    network = data_ms(timing, parallel, gbit_per_s) + model_ms(timing, parallel, gbit_per_s)
    return anyway + max(network, timing.exposed_ms - anyway)


def bubble_ms(timing: Timing, parallel: Parallel) -> float:
    if parallel.pp == 1:
        return 0.0
    m = micro_batches_of(parallel, timing.accumulation)
    return (
        timing.compute_ms * idle(parallel.schedule, parallel.pp, m, placement_for(parallel).chunks) / (MICRO_BATCH * m)
    )


def data_ms(timing: Timing, parallel: Parallel, gbit_per_s: float) -> float:
    """Along the data axes, that cannot be hidden."""
    engine = STRATEGIES[parallel.data]
    total = (timing.wire_mb - sum(timing.axis_mb.values())) * 8 / gbit_per_s  # Mbit / (Gbit/s) = ms
    if not engine.facts(parallel).overlaps:
        return total
    parameters = timing.parameters_mb * 8 / gbit_per_s
    mean_size = max(1.0, timing.collectives)
    micro_batches = micro_batches_of(parallel, timing.accumulation) if parallel.pp > 1 else timing.accumulation

    def left(sent: float, share: float) -> float:
        """Of what is sent beside a share of the computation, what that cannot hide; at least one collective."""
        return max(sent - share * timing.compute_ms / micro_batches, sent / mean_size)

    if engine.sends_after_step:
        return parameters + left(total - parameters, BACKWARD_SHARE)
    if engine.leaves_in_flight:
        return left(parameters, FORWARD_SHARE) + left(total - parameters, BACKWARD_SHARE)
    return left(total, BACKWARD_SHARE)


def model_ms(timing: Timing, parallel: Parallel, gbit_per_s: float) -> float:
    """Along the axes that cut the model, that cannot be hidden."""
    tensor, pipeline = (timing.axis_mb.get(axis, 0.0) * 8 / gbit_per_s for axis in ("tp", "pp"))
    waited_for = sum(timing.axis_mb.values()) * 8 / gbit_per_s - tensor - pipeline
    hidden = 0.0 if "tp" in parallel.native else min(tensor / 2, WEIGHTS_SHARE * timing.compute_ms)
    one = pipeline / micro_batches_of(parallel, timing.accumulation)
    return tensor - hidden + waited_for + max(pipeline - timing.compute_ms, one)


def predicted_shares(timing: Timing) -> dict[str, float]:
    """By the names of their columns."""
    return {f"predicted_fraction_{rate:g}gbit": predicted_share(timing, rate) for rate in GBIT_PER_S}


def predicted_share(timing: Timing, gbit_per_s: float) -> float:
    exposed = predicted_exposed_ms(timing, gbit_per_s)
    return exposed / (timing.compute_ms + exposed) if exposed else 0.0

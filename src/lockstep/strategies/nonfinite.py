"""Which rank and parameter a step failed on."""

from torch import Tensor

from lockstep.comm.collectives import all_gather_objects
from lockstep.data import Batch, tensors_in
from lockstep.layout.region import local
from lockstep.strategies.parallel_model import ParallelModel

LARGEST = 1e17
"""The largest gradient whose norm can be computed in fp32: squares of some hundred larger ones overflow."""


def locate_nonfinite(strategy: ParallelModel, batch: Batch, local_loss: Tensor | None = None) -> str:
    """What was not finite in a skipped step, in words. Every rank must call it, with its share of that step's batch.

    After the reduction every rank has the same NaN; so every rank runs its share again without reducing, and reports
    what it finds. `local_loss`: this rank's loss in that step, which identifies the rank if the NaN is not reproduced.
    """
    engine = strategy.engine
    totals = strategy.worker.only_gradients(batch)
    loss_is_bad = not bool(totals.local_loss.isfinite())
    tensors = [("weight", name, local(p)) for name, p in strategy.model.named_parameters()]
    tensors += [("gradient of", name, gradient) for name, gradient in engine.local_gradients() if gradient is not None]
    found = [f"{what} {name}" for what, name, tensor in tensors if not bool(tensor.isfinite().all())]
    inputs_bad = any(t.is_floating_point() and not bool(t.isfinite().all()) for t in tensors_in(batch.inputs))
    gradients = [tensor for what, _, tensor in tensors if what != "weight" and tensor.numel()]
    largest = max((float(gradient.abs().max()) for gradient in gradients), default=0.0)
    engine.zero_gradients()
    mine = ["its inputs"] * inputs_bad + found + ["its loss"] * (loss_is_bad and not found and not inputs_bad)
    totals.pending.wait()
    was_bad = local_loss is not None and not bool(local_loss.isfinite())
    everyone = all_gather_objects((mine, largest, was_bad))
    findings = [
        f"rank {rank}: {theirs[0]}" + (f" and {len(theirs) - 1} more" if len(theirs) > 1 else "")
        for rank, (theirs, _, _) in enumerate(everyone)
        if theirs
    ]
    if findings:
        return "; ".join(findings)
    if (most := max(largest for _, largest, _ in everyone)) > LARGEST:
        return f"gradients of up to {most:.1e}, whose norm overflows: training diverges; lower train.lr"
    ranks = [f"rank {rank}: its loss; " for rank, (_, _, was_bad) in enumerate(everyone) if was_bad]
    return "".join(ranks) + "not reproduced when the batch was run again"

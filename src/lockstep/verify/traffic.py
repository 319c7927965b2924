"""What a rank has sent against the closed forms, axis by axis, and the message for a mismatch."""

import torch

from lockstep.comm.ledger import Ledger
from lockstep.data import Batch
from lockstep.parallel.law import Sent
from lockstep.parallel.optimizer.muon import Muon
from lockstep.strategies import ParallelModel
from lockstep.strategies.experts import expert_traffic
from lockstep.strategies.pipeline import micro_batches_of
from lockstep.strategies.table import Table
from lockstep.strategies.traffic import traffic_by_axis
from lockstep.verify.scenarios import Scenario


def check_traffic(
    strategy: ParallelModel, scenario: Scenario, batch: Batch, table: Table, compute: torch.dtype | None = None
) -> tuple[list[str], dict[str, Sent | None]]:
    """(what is wrong on this rank, what theory says by axis), of the last step, whose shape `batch` has."""
    if any(True for _ in strategy.model.buffers()):
        return [], {"data": None}  # they travel too
    layout, parallel, options = strategy.layout, strategy.parallel, strategy.options
    with torch.device("meta"):
        model = scenario.build(seed=0).to(options.dtype)
    share = batch.share(strategy.batch_share())
    laws = traffic_by_axis(model, layout, parallel, options.loss, share, options.accumulation, table, compute)
    if "ep" in parallel.native:
        laws["ep"] = None
    elif parallel.ep > 1:
        count = micro_batches_of(parallel, options.accumulation) if layout.degrees.pp > 1 else options.accumulation
        laws["ep"] = expert_traffic(strategy.worker.balance, count, options.recompute != "none", compute)
    optimizer = strategy.engine.local_optimizer
    if isinstance(optimizer, Muon):
        laws["optimizer"] = optimizer.traffic()
    broken = []
    for axis, theory in laws.items():
        sent = strategy.ledger.traffic(axis)
        if theory is not None and not theory.matches(sent):
            broken.append(
                f"traffic{'' if axis == 'data' else f' of {axis}'}: {sent.collectives} collectives and "
                f"{sent.wire_bytes:,.0f} bytes per step counted, {theory.collectives} and "
                f"{theory.wire_bytes:,.0f} by theory{missing_calls(strategy.ledger, axis)}"
            )
    return broken, laws


def missing_calls(ledger: Ledger, axis: str) -> str:
    """Of buckets or blocks: those that lack an operation which others have; else what was called."""
    entries = [e for e in ledger.of("gradients", "parameters", "activations") if e.cut == axis]
    calls: dict[tuple[str, str], list[str]] = {}
    for entry in entries:
        calls.setdefault((entry.operation, entry.purpose), []).append(entry.subject)
    subjects = list(dict.fromkeys(e.subject for e in entries if e.subject))
    lacking = [
        f"no {operation} of {purpose} for {subject}"
        for (operation, purpose), theirs in calls.items()
        for subject in subjects
        if any(theirs) and subject not in theirs
    ]
    counts = [f"{len(theirs)} {operation} of {purpose}" for (operation, purpose), theirs in calls.items()]
    return f" ({'; '.join(lacking[:3]) or ', '.join(counts) or 'nothing was called'})"

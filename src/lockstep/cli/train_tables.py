"""What `lockstep bench train` shows and writes: time, communication, memory, and what can be said of them."""

from math import isnan, nan
from typing import Any

from rich.console import Console

from lockstep.bench.network import GBIT_PER_S, predicted_share
from lockstep.cli.tables import new_table
from lockstep.launch.link import parse_link
from lockstep.measure.statistics import FEWEST
from lockstep.measure.timing import Timing, baseline_of, baselines_among, same_work
from lockstep.words import counted, three_figures


def print_timings(screen: Console, timings: list[Timing], baselines: list[Timing], lines: list[str]) -> None:
    """`lines`: what can be said of them; how to read the tables comes after it."""
    print_times(screen, timings, baselines)
    if any(t.ranks > 1 for t in timings):
        print_communication(screen, timings)
    print_memory(screen, [*timings, *baselines])
    for line in [*lines, *notes(timings, baselines)]:
        screen.print(line, highlight=False, soft_wrap=True)


def print_times(screen: Console, timings: list[Timing], baselines: list[Timing]) -> None:
    first = timings[0]
    sizes = {(t.parameters, t.batch_size) for t in timings}
    work = f"{first.parameters:,} parameters, global batch {first.batch_size}, " if len(sizes) == 1 else ""
    rate = "tokens\n/s" if first.tokens_per_sample else "samples\n/s"
    how = "in turns" if first.in_turns else "one by one"
    table = new_table(
        f"time: {work}{ranks_of(timings)}, {counted(len(first.step_s), 'step')} each, {how}",
        ("strategy",),
        (
            *("step ms\nmedian", "p10 - p90\nms", f"ratio to\n{first.label}", "95%\ninterval"),
            *(rate, "TFLOP/s", "MFU\n%", "speed-up over\none process"),
        ),
    )
    everyone = [*timings, *baselines]
    for t in everyone:
        (low, high), ratio, single = t.spread_ms, t.ratio_to(first), baseline_of(t, baselines_among(everyone))
        table.add_row(
            t.label,
            f"{t.median_ms:.2f}",
            f"{low:.1f} - {high:.1f}",
            f"{ratio.value:.3f}" if same_work(t, first) else "-",
            f"{ratio.low:.3f} - {ratio.high:.3f}" if ratio.is_sure and same_work(t, first) else "-",
            f"{t.tokens_per_s if t.tokens_per_sample else t.samples_per_s:,.0f}",
            f"{t.flops_per_s / 1e12:.3g}",
            f"{100 * t.mfu:.1f}",
            f"{single.median_ms / t.median_ms:.2f}" if single is not None else "-",
        )
    screen.print(table)


def ranks_of(timings: list[Timing]) -> str:
    """That were started: one process is among them."""
    return counted(max(t.ranks for t in timings), "rank")


def print_communication(screen: Console, timings: list[Timing]) -> None:
    table = new_table(
        "communication, per rank and step",
        ("strategy",),
        (
            *("compute\nms", "exposed\nms", "exposed\n%", "total\nms", "total\n%", "hidden\n%"),
            *("calls", "by\ntheory", "MB\nsent", "by\ntheory"),
        ),
    )
    for t in timings:
        calls = t.theory.collectives if t.theory is not None else None
        table.add_row(
            t.label,
            _or_dash(t.compute_ms, ".2f"),
            _or_dash(t.exposed_ms, ".2f"),
            _or_dash(100 * t.exposed_share, ".0f"),
            _or_dash(t.comm_ms, ".2f"),
            _or_dash(100 * t.comm_ms / t.median_ms, ".0f"),
            _or_dash(100 * t.hidden_share, ".0f"),
            _or_dash(t.collectives, ".1f").removesuffix(".0"),
            "-" if calls is None else str(calls),
            _or_dash(t.wire_mb, ".3f"),
            _or_dash(t.theory_mb, ".3f"),
        )
    screen.print(table)


def print_memory(screen: Console, timings: list[Timing]) -> None:
    table = new_table(
        "memory, MiB of tensors on the rank that holds most",
        ("strategy",),
        ("param-\neters", "gradi-\nents", "optimizer\nstate", "activations,\ntemporaries", "buffers,\nother", "peak"),
    )
    for t in timings:
        m = t.memory
        parts = (m.parameters_mib, m.gradients_mib, m.optimizer_mib, m.activations_mib, m.other_mib, m.peak_mib)
        table.add_row(t.label, *(f"{part:.1f}" for part in parts))
    screen.print(table)


def print_network_shares(
    screen: Console, timings: list[Timing], link: str | None, measured: list[dict[str, Any]]
) -> None:
    """How much of a step waits for communication on slower networks: measured over --link, else by formula."""
    link_gbit = parse_link(link).bits_per_second / 1e9 if link is not None else 0.0
    rates = sorted({*GBIT_PER_S, *([link_gbit] if link_gbit else [])})
    found = {row["label"]: row["exposed_fraction"] for row in measured}
    screen.print()
    table = new_table(
        "share of a step spent waiting, on networks of Gbit/s",
        ("strategy",),
        ("here\nmeasured", *(f"{rate:g}\npredicted" for rate in rates)),
    )
    if found:
        table.add_column(f"{link}\nmeasured", justify="right", no_wrap=True)
    for t in timings:
        cells = [t.exposed_share, *(predicted_share(t, rate) for rate in rates)]
        cells += [nan if found[t.label] is None else found[t.label]] if found else []
        table.add_row(t.label, *(_or_dash(cell, ".0%") for cell in cells))
    screen.print(table)


def _or_dash(value: float, form: str) -> str:
    return "-" if isnan(value) else f"{value:{form}}"


def verdicts(timings: list[Timing]) -> list[str]:
    """What differs from the first beyond the noise, and by 1% or more; the rest in one line."""
    first, lines, alike = timings[0], [], []
    if not first.in_turns:
        return ["one by one, not in turns: how much of a difference is noise is not known"]
    if len(first.step_s) < FEWEST:
        return [f"{len(first.step_s)} steps are too few to separate a difference from noise; take {FEWEST} or more"]
    for t in timings[1:]:
        if not same_work(t, first):
            continue
        ratio = t.ratio_to(first)
        if not ratio.is_sure:
            fewest = FEWEST * max(t.cycle, first.cycle)
            lines.append(
                f"{t.label} synchronizes every {t.cycle} steps: too few to see a difference; take {fewest} or more"
            )
            continue
        if not ratio.differs_from_one:
            alike.append(t.label)
            continue
        ends = sorted((abs(1 - ratio.low), abs(1 - ratio.high)))
        lines.append(
            f"{t.label} takes {_percent(abs(1 - ratio.value))} {'less' if ratio.value < 1 else 'more'} time than "
            f"{first.label} (95% sure: {_percent(ends[0])} to {_percent(ends[1])})"
        )
    if alike:
        lines.append(f"as fast as {first.label}, within the noise or 1%: {', '.join(alike)}")
    return lines


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%" if share < 0.1 else f"{100 * share:.0f}%"


def notes(timings: list[Timing], baselines: list[Timing]) -> list[str]:
    """How to read the tables."""
    first = timings[0]
    per_sample = {t.parameters: t.flops_per_step / t.batch_size / 1e9 for t in timings}
    work = f"{three_figures(per_sample.pop(first.parameters))} GFLOP per sample"
    work += "".join(f", {three_figures(flops)} with {size:,} parameters" for size, flops in per_sample.items())
    peaks = {counted(t.ranks, "rank"): t.peak_flops / 1e12 for t in [*timings, *baselines]}
    peak = ", ".join(f"{three_figures(flops)} TFLOP/s for {ranks}" for ranks, flops in peaks.items())
    lines = [f"MFU: {work} (matrix products, forward and backward) of a peak of {peak} ({first.peak_source})."]
    idle = next((t for t in timings if t.batch_size < t.ranks), None)
    if idle is not None:
        samples = counted(idle.batch_size, "sample")
        lines.append(
            f"a global batch of {samples} leaves some of {idle.ranks} ranks without one: they compute filler, which "
            f"does not count; give a larger --train.batch-size."
        )
    if any(t.ranks > 1 for t in timings):
        lines.append("exposed: the step stood waiting for it. total: some of it was in flight. hidden: the rest.")
    for t in timings:
        if t.skipped:
            lines.append(f"{t.label}: {t.skipped} of {len(t.step_s)} steps not taken: loss or gradients not finite")
    if alone := baselines_among([*timings, *baselines]):
        ranks = max(timings, key=lambda t: t.ranks)
        threads = f", with {counted(alone[0].threads, 'thread')}; each rank of the others has {ranks.threads}"
        lines.append(f"one process: the whole batch in one{threads if first.device == 'cpu' else ''}.")
    return lines

"""How training scales with the number of ranks, and what is lost on the way.

    strong   the same global batch, cut among more and more ranks: ideally a step takes 1/n of one rank's
    weak     the same batch for each rank: ideally a step takes as long as one rank's

Every rank has the same number of cores at every size, so that n ranks are n times the machine, as long as the machine
has the cores; beyond that, ranks take turns on them, which is a loss of its own and no fault of the strategy. All
sizes are timed in turns in one run.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

from lockstep.bench.train import Case
from lockstep.config import Config
from lockstep.measure.timing import Timing
from lockstep.strategies import strategy_name
from lockstep.words import counted

Mode = Literal["strong", "weak"]
MODES: tuple[Mode, ...] = ("strong", "weak")


def scaling_cases(config: Config, modes: tuple[Mode, ...], sizes: tuple[int, ...]) -> list[Case]:
    """Each size in each mode; the largest decides how many ranks are started."""
    cases = []
    for mode in modes:
        for size in sizes:
            batch = config.train.batch_size * (size if mode == "weak" else 1)
            scaled = replace(config, train=replace(config.train, batch_size=batch))
            name = strategy_name(config.parallel)
            cases.append(Case(f"{mode} {size}", name, scaled, ranks=size, details={"mode": mode}))
    return cases


@dataclass
class Point:
    """One world size in one mode. Milliseconds of a step: ideal + lost to each cause = measured."""

    mode: Mode
    ranks: int
    batch_size: int
    step_ms: float
    low95_ms: float
    high95_ms: float
    samples_per_s: float
    ideal_ms: float
    communication_ms: float
    """The step stood waiting, though all ranks had come."""
    imbalance_ms: float
    """The step stood waiting for the slowest rank, which computed longer."""
    cores_ms: float
    """Ranks had to share cores, or a GPU: the others' work, as far as it did not fit into waits."""
    speedup: float
    """Samples per second over one rank's."""

    @property
    def efficiency(self) -> float:
        return self.speedup / self.ranks

    @property
    def other_ms(self) -> float:
        """What is left: memory bandwidth, smaller matrices, the step's own overhead. Negative: better than ideal."""
        return self.step_ms - self.ideal_ms - self.communication_ms - self.imbalance_ms - self.cores_ms

    def share(self, ms: float) -> float:
        return ms / self.step_ms

    def as_row(self) -> dict[str, Any]:
        return {**self.__dict__, "efficiency": self.efficiency, "other_ms": self.other_ms}


def points(timings: list[Timing], slots: int) -> list[Point]:
    """`slots`: how many ranks have cores, or a GPU, of their own."""
    found = []
    for timing in timings:
        mode: Mode = timing.details["mode"]
        one = next(t for t in timings if t.details["mode"] == mode and t.ranks == min(u.ranks for u in timings))
        ideal = one.median_ms * (one.ranks / timing.ranks if mode == "strong" else 1.0)
        sure = timing.confidence_ms
        imbalance = 0.0 if timing is one else timing.imbalance_ms  # what the others refer to has lost nothing
        communication = 0.0 if timing is one else max(0.0, timing.exposed_ms - imbalance)
        taking_turns = ideal * max(0.0, timing.ranks / slots - 1)
        left = timing.median_ms - ideal - communication - imbalance
        found.append(
            Point(
                mode=mode,
                ranks=timing.ranks,
                batch_size=timing.batch_size,
                step_ms=timing.median_ms,
                low95_ms=sure.low,
                high95_ms=sure.high,
                samples_per_s=timing.samples_per_s,
                ideal_ms=ideal,
                communication_ms=communication,
                imbalance_ms=imbalance,
                cores_ms=min(taking_turns, max(0.0, left)),
                speedup=one.ranks * timing.samples_per_s / one.samples_per_s,
            )
        )
    return found


def amdahl_fit(strong: list[Point]) -> float | None:
    """The serial share s of T(n) = T(1) (s + (1 - s) / n), by least squares; None with fewer than two sizes.

    T(n)/T(1) - 1/n = s (1 - 1/n): a line through the origin.
    """
    one = next((p for p in strong if p.ranks == 1), None)
    others = [p for p in strong if p.ranks > 1]
    if one is None or not others:
        return None
    pairs = [(1 - 1 / p.ranks, p.step_ms / one.step_ms - 1 / p.ranks) for p in others]
    return min(1.0, max(0.0, sum(x * y for x, y in pairs) / sum(x * x for x, _ in pairs)))


def amdahl_speedup(serial: float, ranks: int) -> float:
    return 1 / (serial + (1 - serial) / ranks)


def sentences(found: list[Point], slots: int, threads: int, on_gpu: bool) -> list[str]:
    """What the table says."""
    lines = []
    most = max(found, key=lambda p: p.ranks)
    if on_gpu and most.ranks > slots:
        lines.append(
            f"ranks exceed GPUs: there {'is' if slots == 1 else 'are'} {slots}, so larger sizes take turns on "
            f"{'it' if slots == 1 else 'them'} and cannot be faster than {counted(slots, 'rank')}"
        )
    elif most.ranks > slots:
        lines.append(
            f"ranks exceed cores: there are cores for {counted(slots, 'rank')} of {counted(threads, 'thread')}, so "
            f"larger sizes take turns on them and cannot be faster than {counted(slots, 'rank')}"
        )
    if (fewest := found[0].ranks) > 1:
        lines.append(
            f"speed-up and efficiency take {fewest} ranks, the fewest here, for {fewest}.00 and 100%; "
            f"for one rank's, give --world-size 1 too"
        )
    idle = [p for p in found if p.batch_size < p.ranks]
    if idle:
        lines.append(
            f"a global batch of {idle[0].batch_size} leaves some of {idle[-1].ranks} ranks without a sample: they "
            f"compute filler, which does not count; give a larger --train.batch-size"
        )
    strong = [p for p in found if p.mode == "strong"]
    fair = [p for p in strong if p.ranks <= slots]
    serial = amdahl_fit(fair)
    if serial is not None:
        limit = f"never more than {1 / serial:.1f} times one rank" if serial > 0.001 else "no limit in sight"
        if serial > 0.999:
            limit = "more ranks gain nothing"
        lines.append(
            f"Amdahl's law, fitted to {', '.join(str(p.ranks) for p in fair)} ranks: {serial:.1%} of a step does not "
            f"scale; {limit}"
        )
    for mode in dict.fromkeys(p.mode for p in found):
        mine = [p for p in found if p.mode == mode]
        last = [p for p in mine if p.ranks <= slots or p is mine[0]][-1]
        losses = {
            "communication": last.communication_ms,
            "load imbalance": last.imbalance_ms,
            "shared GPUs" if on_gpu else "shared cores": last.cores_ms,
            "other (memory bandwidth, what every rank does alike, smaller matrices)": last.other_ms,
        }
        worst = max(losses, key=lambda cause: losses[cause])
        if last is not mine[0] and losses[worst] > 0:
            lines.append(
                f"{mode}, {last.ranks} ranks: efficiency {last.efficiency:.0%}; most is lost to {worst} "
                f"({losses[worst]:.1f} of {last.step_ms:.1f} ms)"
            )
    return lines

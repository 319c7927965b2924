"""Which layout: all that are legal, those that fit, the fastest of them, and what their neighbours would give."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from lockstep.errors import UserError
from lockstep.plan.constants import Constants, fitted
from lockstep.plan.layout import PlanLayout, Recompute, illegal
from lockstep.plan.machine import Cluster
from lockstep.plan.memory import Memory, memory_of, verdict
from lockstep.plan.network import Network
from lockstep.plan.residuals import interval
from lockstep.plan.setting import Setting
from lockstep.plan.software import OURS, Software
from lockstep.plan.step import Clock, StepTime, step_time

Choices = Callable[[str, Iterable[Any]], list[Any]]
"""Of a field of a layout: what was fixed, or all values that are worth trying."""
RECOMPUTE: tuple[Recompute, ...] = ("none", "every", "full")
LONGEST_MICRO_BATCH = 64
LARGEST_BATCH = 10**9
DEEPEST = 32
"""Stages of a pipeline that are tried; --fix pp=64 tries more."""
FIXABLE = ("dp", "tp", "pp", "cp", "ep", "zero", "chunks", "micro_batch", "recompute", "schedule", "shard", "offload")


@dataclass(frozen=True)
class Question:
    """What is to be trained, on what, within which limits."""

    network: Network
    cluster: Cluster
    global_batch: int
    """Samples."""
    precision: str = "bf16"
    software: Software = OURS
    fixed: tuple[tuple[str, object], ...] = ()
    """Of a layout's fields, what is decided already."""
    constants: Constants = field(default_factory=fitted)
    engines: tuple[int, ...] = (0, 1, 2, 3)
    """ZeRO stages to try."""

    def setting(self, layout: PlanLayout) -> Setting:
        return Setting(self.network, layout, self.cluster.machine, self.software, self.precision, self.constants)


@dataclass
class ScoredLayout:
    """A layout, judged."""

    setting: Setting
    time: StepTime
    memory: Memory
    fits: str

    @property
    def layout(self) -> PlanLayout:
        return self.setting.layout

    @property
    def tokens_per_s(self) -> float:
        return self.layout.global_batch * self.setting.network.context / self.time.seconds

    @property
    def mfu(self) -> float:
        """The model's own FLOP, without recomputation, of the peak of the type that it computes in."""
        flops = self.setting.network.flops_per_token() * self.tokens_per_s
        return flops / (self.setting.machine.peak(self.setting.precision) * self.layout.ranks)

    @property
    def interval_s(self) -> tuple[float, float]:
        """That four of five predictions of such models fall into, by the published results."""
        low, high = interval(self.setting)
        return self.time.seconds * low, self.time.seconds * high

    def days(self, tokens: float) -> float:
        return tokens / self.tokens_per_s / 86400

    def figures(self) -> dict[str, Any]:
        """For files and pages, by their names."""
        low, high = self.interval_s
        return {
            "layout": str(self.layout),
            **{name: getattr(self.layout, name) for name in FIXABLE},
            "step_s": self.time.seconds,
            "low80_s": low,
            "high80_s": high,
            "tokens_per_s": self.tokens_per_s,
            "mfu": self.mfu,
            "peak_gib": self.memory.gib,
            "fits": self.fits,
            "bound_by": self.time.bound_by,
        }


@dataclass
class Answer:
    """A layout, with its time and memory."""

    question: Question
    plans: list[ScoredLayout]
    """That fit, fastest first; those that are risky among them."""
    considered: int = 0
    fitting: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """Why layouts were left out, and how many."""
    smallest: PlanLayout | None = None
    """Of those that do not fit, the one that needs least memory."""

    @property
    def best(self) -> ScoredLayout:
        """The fastest that leaves room to spare; where none does, the fastest."""
        return next((plan for plan in self.plans if plan.fits == "fits"), self.plans[0])

    def shown(self, top: int) -> list[ScoredLayout]:
        """The fastest with room to spare; then some that are faster than the best of them, and risky."""
        safe = [plan for plan in self.plans if plan.fits == "fits"][:top]
        if not safe:
            return self.plans[:top]
        risky = [p for p in self.plans if p.fits == "risky" and p.time.seconds < self.best.time.seconds]
        return [*safe, *risky[: max(1, top // 3)]]


def judge(question: Question, layout: PlanLayout) -> ScoredLayout:
    setting = question.setting(layout)
    memory = memory_of(setting)
    return ScoredLayout(setting, step_time(setting), memory, verdict(memory, setting.machine.memory_gib))


WORKED_OUT = 40
"""Layouts whose pipelines are run: the fastest by a first guess."""


def search(question: Question, most: int = WORKED_OUT) -> Answer:
    """Every legal layout that fits, by a guess of its time; the best of them worked out. Where nothing fits, the same
    with the optimizer's state in the host's memory.
    """
    check_question(question)
    answer = found_with(question, most)
    if not answer.plans and "offload" not in dict(question.fixed):
        offloaded = found_with(replace(question, fixed=(*question.fixed, ("offload", True))), most)
        if offloaded.plans:
            return offloaded
    return answer


def found_with(question: Question, most: int) -> Answer:
    answer = Answer(question, [])
    gib = question.cluster.machine.memory_gib
    fitting: list[tuple[float, Clock, Memory, str]] = []
    least = float("inf")
    for layout, memory in candidates(question, answer.refused):
        answer.considered += 1
        fits = verdict(memory, gib)
        if fits != "does not fit":
            clock = Clock(question.setting(layout))
            fitting.append((clock.guess(), clock, memory, fits))
            continue
        answer.refused["more memory than there is"] += 1
        if memory.total < least:
            least, answer.smallest = memory.total, layout
    fitting.sort(key=lambda one: one[0])
    answer.fitting = len(fitting)
    safe, risky = ([one for one in fitting if (one[3] == "fits") == wanted] for wanted in (True, False))
    worth = [*safe[:most], *risky[: most if not safe else most // 3]]
    answer.plans = [ScoredLayout(clock.s, clock.step(), memory, fits) for _, clock, memory, fits in worth]
    answer.plans.sort(key=lambda plan: plan.time.seconds)
    return answer


def check_question(question: Question) -> None:
    if not 1 <= question.global_batch <= LARGEST_BATCH:
        raise UserError(f"--global-batch is {question.global_batch}, but it must be from 1 to {LARGEST_BATCH:,}")
    unknown = [name for name, _ in question.fixed if name not in FIXABLE]
    if unknown:
        raise UserError(f"--fix {unknown[0]}: it must be one of {', '.join(FIXABLE)}")


def divisors(number: int) -> list[int]:
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def candidates(question: Question, refused: Counter[str]) -> Iterator[tuple[PlanLayout, Memory]]:
    """Legal layouts. Of recomputation the least that fits is tried: more is slower."""
    network, gpus, fixed = question.network, question.cluster.gpus, dict(question.fixed)

    def choices(name: str, values: Iterable[Any]) -> list[Any]:
        return [fixed[name]] if name in fixed else list(values)

    attention = next((b.attention for b, _ in network.layers if b.attention is not None), None)
    experts = max((p.experts for b, _ in network.layers for p in b.products), default=0)
    within = question.cluster.machine.gpus_per_node
    tensor = [d for d in divisors(gpus) if d <= min(within, 16) and d & (d - 1) == 0] if attention else [1]
    for tp in choices("tp", tensor):
        deep = [d for d in divisors(gpus // tp) if d <= min(network.depth, DEEPEST)] if gpus % tp == 0 else []
        if not deep:
            refused[f"tp {tp} does not divide {gpus} GPUs"] += 1
        for pp in choices("pp", deep):
            if gpus % (tp * pp):
                refused[f"tp {tp} x pp {pp} does not divide {gpus} GPUs"] += 1
                continue
            left = gpus // (tp * pp)
            long = network.context if attention else 0
            rings = [d for d in (1, 2, 4, 8, 16) if left % d == 0 and long // d >= 4096]
            for cp in choices("cp", rings or [1]):
                if left % cp:
                    refused[f"cp {cp} does not divide what tp and pp leave"] += 1
                    continue
                yield from _with_data(question, refused, choices, tp, pp, cp, left // cp, experts)


def _with_data(
    question: Question, refused: Counter[str], choices: Choices, tp: int, pp: int, cp: int, dp: int, experts: int
) -> Iterator[tuple[PlanLayout, Memory]]:
    batch, network, within = question.global_batch, question.network, question.cluster.machine.gpus_per_node
    if ("dp", dp) not in question.fixed and any(name == "dp" for name, _ in question.fixed):
        return
    if batch % dp:
        refused[f"a global batch of {batch} does not divide over dp {dp}"] += 1
        return
    per_rank = batch // dp
    micro = [d for d in divisors(per_rank) if d <= LONGEST_MICRO_BATCH and d & (d - 1) == 0]
    spread = [d for d in divisors(experts) if d == 1 or (dp * cp * tp % d == 0 and d % tp == 0)] if experts else [1]
    stages = [z for z in question.engines if (pp == 1 or z <= 2) and (dp * cp > 1 or z == 0)]
    for ep in choices("ep", spread[-3:]):
        for mb in choices("micro_batch", micro):
            if pp > 1 and per_rank // mb < pp and "micro_batch" not in dict(question.fixed):
                refused[f"fewer micro-batches than {pp} stages"] += 1
                continue
            for schedule, chunks in schedules(question, pp, per_rank // mb if mb else 0):
                for zero in choices("zero", stages):
                    groups = [0, within // tp] if zero == 3 and dp * cp * tp > within > tp else [0]
                    for shard in choices("shard", groups):
                        layout = PlanLayout(dp, tp, pp, cp, ep, zero, shard, schedule, chunks, mb, batch)
                        reason = illegal(network, layout, question.cluster.gpus)
                        if reason is not None:
                            refused[reason] += 1
                            continue
                        yield from least_recompute(question, choices, layout)


def schedules(question: Question, pp: int, micro_batches: int) -> list[tuple[str, int]]:
    if pp == 1:
        return [("1f1b", 1)]
    fixed = dict(question.fixed)
    found = [("1f1b", 1)]
    layers = question.network.depth
    finest = [v for v in (2, 4, 8) if pp * v <= layers and layers % (pp * v) == 0]
    if micro_batches % pp == 0:
        found += [("interleaved", v) for v in finest[:2]]
    if question.network.depth >= pp:
        found.append(("zb-h1", 1))
    if "schedule" in fixed or "chunks" in fixed:
        name, chunks = str(fixed.get("schedule", "1f1b" if fixed.get("chunks", 1) == 1 else "interleaved")), 0
        chunks = int(str(fixed.get("chunks", 2 if name in ("interleaved", "zb-v") else 1)))
        return [(name, chunks)]
    return found


def least_recompute(question: Question, choices: Choices, layout: PlanLayout) -> Iterator[tuple[PlanLayout, Memory]]:
    """The first that leaves room to spare, and before it the first that fits at all; else the one that holds least."""
    gib, risky = question.cluster.machine.memory_gib, False
    found: tuple[PlanLayout, Memory] | None = None
    for recompute in choices("recompute", RECOMPUTE):
        one = replace(layout, recompute=recompute, offload=bool(choices("offload", (False,))[0]))
        found = one, memory_of(question.setting(one))
        fits = verdict(found[1], gib)
        if fits == "fits":
            yield found
            return
        if fits == "risky" and not risky:
            risky = True
            yield found
    if not risky and found is not None:
        yield found


# ---- around the best -------------------------------------------------------------------------------------------------


def neighbours(question: Question, plan: ScoredLayout) -> list[tuple[str, ScoredLayout | str]]:
    """What one step in each direction would change; or why it cannot be taken."""
    layout, found = plan.layout, []
    steps: list[tuple[str, PlanLayout]] = []
    for name in ("tp", "pp", "cp"):
        value = getattr(layout, name)
        if layout.dp % 2 == 0 and (name != "pp" or 2 * value <= DEEPEST):
            steps.append((f"{name} {value} -> {2 * value}", replace(layout, dp=layout.dp // 2, **{name: 2 * value})))
        if value % 2 == 0:
            steps.append((f"{name} {value} -> {value // 2}", replace(layout, dp=layout.dp * 2, **{name: value // 2})))
    mb = layout.micro_batch
    steps.append((f"micro-batch {mb} -> {2 * mb}", replace(layout, micro_batch=2 * mb)))
    if mb % 2 == 0:
        steps.append((f"micro-batch {mb} -> {mb // 2}", replace(layout, micro_batch=mb // 2)))
    for zero in (layout.zero - 1, layout.zero + 1):
        if 0 <= zero <= 3:
            steps.append((f"zero {layout.zero} -> {zero}", replace(layout, zero=zero)))
    for recompute in RECOMPUTE:
        if recompute != layout.recompute:
            steps.append((f"recompute {layout.recompute} -> {recompute}", replace(layout, recompute=recompute)))
    for words, changed in steps:
        if changed.pp == 1 or changed.pp * changed.chunks > question.network.depth:
            changed = replace(changed, schedule="1f1b", chunks=1)
        reason = illegal(question.network, changed, question.cluster.gpus)
        found.append((words, reason if reason is not None else judge(question, changed)))
    return found


def least_gpus(question: Question) -> tuple[int, ScoredLayout] | None:
    """The fewest GPUs that something fits on: halves of the cluster, then of a node."""
    best: tuple[int, ScoredLayout] | None = None
    gpus = question.cluster.gpus
    free = replace(question, fixed=tuple((n, v) for n, v in question.fixed if n in ("recompute", "micro_batch")))
    while gpus >= 1:
        per_node = min(question.cluster.per_node, gpus)
        smaller = replace(free, cluster=Cluster(max(1, gpus // per_node), per_node, question.cluster.machine))
        fitting = first_that_fits(smaller)
        if fitting is None:
            break
        best = gpus, fitting
        if gpus % 2:
            break
        gpus //= 2
    return best


def first_that_fits(question: Question) -> ScoredLayout | None:
    """Not the fastest: whichever is found first of those that hold least."""
    for layout, memory in candidates(replace(question, engines=(3, 1, 0)), Counter()):
        if verdict(memory, question.cluster.machine.memory_gib) != "does not fit":
            return judge(question, layout)
    return None


def pareto(plans: Iterable[ScoredLayout]) -> list[ScoredLayout]:
    """Those that no other is both faster and smaller than."""
    front: list[ScoredLayout] = []
    for plan in sorted(plans, key=lambda p: (p.time.seconds, p.memory.total)):
        if not front or plan.memory.total < front[-1].memory.total:
            front.append(plan)
    return front

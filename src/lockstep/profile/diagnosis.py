"""What a run is bound by, in words: where the time of its steps went, and which flag to try next."""

import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from lockstep.config import Config
from lockstep.intervals import covered
from lockstep.profile.trace import Event, self_times
from lockstep.strategies import STRATEGIES

MATRIX = re.compile(
    r"(?<![a-z])(add|b|badd)?mm(?![a-z])|matmul|linear|conv(?!ert)|attention|flash|sdpa|gemm|nvjet|cutlass|einsum|xmma"
)
"""In the names of operations and kernels whose cost is arithmetic; of others it is moving memory."""
COMPILED = ("triton_poi_", "triton_per_", "triton_red_")
"""The compiler's elementwise kernels and reductions, which bear the names of all that they fuse."""
NCCL = "nccl"
FUNCTOR = re.compile(r"\w+_kernel_cuda|\w+_functor|\w*Functor\w*")
"""In the template arguments of PyTorch's general kernels: what this one does."""
FRAME = re.compile(r"Backward\d*$")
"""Autograd's nodes; what they compute with are operations of their own."""
STEP, DATA = "step", "data loading"
KINDS = {
    "compute": "matrix products and convolutions",
    "memory": "operations that mostly move memory: elementwise, norms, copies, the optimizer",
    "communication": "the step stood waiting for other ranks",
    "data": "reading the batch",
    "host": "Python and the framework's own work between operations",
    "others": "the GPU's work for the other ranks that share it",
}


@dataclass
class Diagnosis:
    """Shares of the time of the profiled steps, of one rank; they add up to 1."""

    shares: dict[str, float]
    step_ms: float
    exposed_ms: float = 0.0
    """Per step, waited for communication."""
    comm_ms: float | None = None
    """Per step, some communication was in flight. None: its ends are not seen."""
    top: list[tuple[str, float]] = field(default_factory=list)
    """The operations that took longest by themselves: (name, share)."""
    device: str = "cpu"

    @property
    def bound_by(self) -> str:
        return max(self.shares, key=lambda kind: self.shares[kind])


def diagnose(
    events: list[Event],
    exposed_ms: float,
    on_gpu: bool,
    others: list[tuple[float, float]] | None = None,
    comm_ms: float | None = None,
) -> Diagnosis:
    """From one rank's trace of some steps, and the milliseconds of communication per step that its ledger has.

    Where the trace shows NCCL's kernels, these count instead: waited for is the time in which they ran alone.
    `others`: from when to when the GPU computed for other ranks, if they share it, on the clock of the trace.
    """
    steps = [e for e in events if e["name"] == STEP and e["cat"] == "user_annotation"]
    reading = [e for e in events if e["name"] == DATA and e["cat"] == "user_annotation"]
    total = sum(e["dur"] for e in steps) + sum(e["dur"] for e in reading)
    main = steps[0]["tid"]
    spans = [(e["ts"], e["ts"] + e["dur"]) for e in steps]
    ops = [e for e in events if may_be_work(e, main, on_gpu) and any(a <= e["ts"] < b for a, b in spans)]
    times = {name: t for name, t in self_times_by_lane(ops).items() if not is_frame(name)}
    work = sum(times.values()) or 1.0
    matrix = sum(t for name, t in times.items() if is_matrix_product(name)) / work
    # Kernels of several streams overlap; operations of the one thread that we look at on a CPU do not.
    mine = [(e["ts"], e["ts"] + e["dur"]) for e in ops]
    busy = sum(covered(mine, a, b) for a, b in spans) if on_gpu else sum(times.values())
    nccl = [(e["ts"], e["ts"] + e["dur"]) for e in events if on_gpu and is_kernel(e) and is_communication(e)]
    occupied = sum(covered([*mine, *nccl], a, b) for a, b in spans)
    for_others = sum(covered([*mine, *nccl, *others], a, b) for a, b in spans) - occupied if others else 0.0
    if nccl:
        on_its_way = sum(covered(nccl, a, b) for a, b in spans)
        exposed_ms, comm_ms = ((occupied - busy) / len(steps) / 1e3, on_its_way / len(steps) / 1e3)
    network = min(1e3 * exposed_ms * len(steps), total)
    busy = max(0.0, min(busy, total - network))
    computing, moving = busy * matrix, busy * (1 - matrix)
    data = sum(e["dur"] for e in reading)
    idle = max(0.0, total - computing - moving - network - data)
    for_others = min(idle, for_others)
    parts = {"compute": computing, "memory": moving, "communication": network, "data": data, "host": idle - for_others}
    if others is not None:
        parts["others"] = for_others
    whole = sum(parts.values()) or 1.0
    by_name: defaultdict[str, float] = defaultdict(float)
    for name, t in times.items():
        by_name[short_name(name)] += t
    top = sorted(by_name.items(), key=lambda item: -item[1])[:8]
    return Diagnosis(
        shares={kind: part / whole for kind, part in parts.items()},
        step_ms=total / max(1, len(steps)) / 1e3,
        exposed_ms=exposed_ms,
        comm_ms=comm_ms,
        top=[(name, t / work) for name, t in top],
        device="cuda" if on_gpu else "cpu",
    )


def busy_spans(events: list[Event], later: float = 0.0) -> list[tuple[float, float]]:
    """From when to when a GPU computed, `later` microseconds added."""
    kernels = [e for e in events if may_be_work(e, None, on_gpu=True)]
    return [(e["ts"] + later, e["ts"] + e["dur"] + later) for e in kernels]


def is_matrix_product(name: str) -> bool:
    return not name.startswith(COMPILED) and MATRIX.search(name.lower()) is not None


def short_name(name: str, longest: int = 48) -> str:
    """Of a C++ kernel its own name, and what it does where that is an argument: reduce_kernel (sum_functor)."""
    plain = name.replace("(anonymous namespace)::", "").removeprefix("void ")
    if plain.startswith("std::enable_if"):
        plain = plain.partition("::type ")[2]
    head, template, arguments = plain.partition("<")
    if not template:
        short = plain
    elif head.startswith("cutlass::Kernel"):  # its argument has the name
        short = re.split(r"[<>,]", arguments, maxsplit=1)[0]
    else:
        own, functors = head.removesuffix("::kernel").rpartition("::")[2], FUNCTOR.findall(arguments)
        short = f"{own} ({functors[-1]})" if functors else own
    return short if len(short) <= longest else f"{short[: longest - 19]}...{short[-16:]}"


def is_frame(name: str) -> bool:
    """Not work of its own: what surrounds operations, and hooks in which Python runs or waits."""
    return name.startswith(("autograd::", "c10d::", "gloo:", "Optimizer.")) or FRAME.search(name) is not None


def is_kernel(event: Event) -> bool:
    return event["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")


def is_communication(event: Event) -> bool:
    return NCCL in event["name"].lower()


def may_be_work(event: Event, main: Any, on_gpu: bool) -> bool:
    """On a GPU its kernels are the work, and the host only feeds them; NCCL's kernels mostly wait."""
    if on_gpu:
        return is_kernel(event) and not is_communication(event)
    return bool(event["cat"] == "cpu_op" and event["tid"] == main)


def self_times_by_lane(events: list[Event]) -> dict[str, float]:
    """Threads, or streams, one by one: spans nest within one only."""
    totals: dict[str, float] = {}
    for lane in {(e["pid"], e["tid"]) for e in events}:
        for name, microseconds in self_times([e for e in events if (e["pid"], e["tid"]) == lane]).items():
            totals[name] = totals.get(name, 0.0) + microseconds
    return totals


def words(diagnosis: Diagnosis, config: Config, ranks: int) -> list[str]:
    """The verdict, the numbers that say so, and what to try next."""
    bound = diagnosis.bound_by
    share = diagnosis.shares[bound]
    lines = [f"bound by {bound}: {share:.0%} of a step of {diagnosis.step_ms:.1f} ms is {KINDS[bound]}"]
    rest = sorted((kind for kind in diagnosis.shares if kind != bound), key=lambda kind: -diagnosis.shares[kind])
    lines.append("the rest: " + ", ".join(f"{kind} {diagnosis.shares[kind]:.0%}" for kind in rest))
    lines += [f"try next: {flag}" for flag in flags_to_try(bound, config, ranks, diagnosis.device)]
    return lines


def flags_to_try(bound: str, config: Config, ranks: int, device: str) -> list[str]:
    """Only what the config has not got already."""
    train, parallel = config.train, config.parallel
    plain = train.compile == "none"
    vocabulary = getattr(config.model, "vocabulary", None) or 0
    ideas: list[tuple[bool, str]] = []
    facts = STRATEGIES[parallel.data].facts(parallel)
    match bound:
        case "communication":
            ideas = [
                *((True, flag) for flag in facts.advice),
                (train.accumulation == 1, "--train.accumulation 4 with 4 times the batch (one exchange for 4)"),
            ]
        case "compute":
            ideas = [
                (device == "cuda" and train.precision == "fp32", "--train.precision bf16 (the matrix units' own)"),
                (
                    device == "cuda" and vocabulary % 64 != 0,
                    f"--model.vocabulary {-(-vocabulary // 64) * 64} (a multiple of 64 aligns the head's products)",
                ),
                (plain, "--train.compile blocks (fuses what stands between the products)"),
                (ranks == 1, "--nproc 2 or more: there is computation to share out"),
                (train.recompute != "none", "--train.recompute none, if the memory allows: it computes forward twice"),
            ]
        case "memory":
            ideas = [
                (plain, "--train.compile blocks (fused operations read and write once)"),
                (device == "cuda" and train.precision == "fp32", "--train.precision bf16 (half the bytes)"),
                (
                    facts.zero_stage == 0 and facts.smaller is not None and ranks > 1,
                    f"--parallel.data {facts.smaller} (1/n of the optimizer)",
                ),
                (True, "a larger --train.batch-size: the optimizer's share falls"),
            ]
        case "others":
            ideas = [(True, "a GPU for each rank (leave out --share-gpu): these take turns on one")]
        case "data":
            ideas = [(True, "a larger --train.batch-size, or data that is prepared beforehand")]
        case _:
            ideas = [
                (plain, "--train.compile blocks (one call for many operations)"),
                (True, "a larger --train.batch-size: more work for each call"),
                (facts.one_by_one, "--parallel.data bucketed (fewer, larger collectives)"),
            ]
    return [text for wanted, text in ideas if wanted]

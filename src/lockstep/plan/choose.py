"""Which strategy, and why: the usual questions, answered by the planner's numbers.

does a whole copy of model, gradients and optimizer fit each GPU?    yes: ddp
do they fit when the ranks divide them?                              yes: zero1, zero2, zero3: the least that does
is it a transformer?                                                 yes: tensor and pipeline parallelism as well
                                                                     no:  a pipeline
is it fine-tuned?                                                    adapters (LoRA), and the same questions
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lockstep.errors import UserError
from lockstep.plan.layout import PlanLayout
from lockstep.plan.machine import Cluster, usual_precision
from lockstep.plan.network import Network
from lockstep.plan.search import Question, ScoredLayout, search
from lockstep.plan.software import OURS, Kept, Software

ADAPTERS = replace(OURS, name="lockstep, LoRA", kept=Kept(2, 0, 0), frozen=True)
"""Frozen weights in bf16; what the adapters need beside them is less than a hundredth."""
AXES = ("tp", "pp", "cp", "ep")
WHAT = {
    0: "every GPU holds a whole copy",
    1: "the ranks divide the optimizer's state",
    2: "the ranks divide gradients and the optimizer's state",
    3: "the ranks divide parameters, gradients and the optimizer's state",
}


@dataclass
class Choice:
    """A strategy that was considered: whether it fits, and how long a step takes."""

    strategy: str
    """As `verify` and `bench` call it."""
    reason: str
    flags: str
    """Of `lockstep train`."""
    plan: ScoredLayout | None
    fastest: ScoredLayout | None = None
    """Of all layouts, where that is another."""


def choose(network: Network, cluster: Cluster, batch: int, precision: str = "bf16", finetune: bool = False) -> Choice:
    from lockstep.strategies.table import strategy_dividing  # torch

    if finetune and not any(block.attention is not None for block, _ in network.layers):
        raise UserError(f"adapters (LoRA) are for transformers, and {network.name} is none; leave --finetune out")
    software: Software = ADAPTERS if finetune else OURS
    question = Question(network, cluster, batch, precision, software)
    gib = cluster.machine.memory_gib
    adapters = " with LoRA's adapters" if finetune else ""
    lora = " --lora.rank 8" if finetune else ""
    name = "+lora" if finetune else ""
    best = fastest(question)
    stages = (0, 1, 2, 3) if cluster.gpus > 1 else (0,)
    by_stage = {z: fastest(replace(question, fixed=(("tp", 1), ("pp", 1), ("cp", 1), ("zero", z)))) for z in stages}
    for zero, plan in sorted(by_stage.items(), key=lambda one: (one[1] is None or one[1].fits != "fits", one[0])):
        if plan is None or plan.fits == "does not fit" or plan.layout.recompute == "full":
            continue
        needs = f"{plan.memory.gib:.0f} of {gib:g} GiB"
        before = "a whole copy does not fit with room to spare (or only if forward is computed twice), " if zero else ""
        reason = f"{before}{WHAT[zero]}{adapters}: {needs}" + (", the simplest that there is" if zero == 0 else "")
        engine = strategy_dividing(zero, cuts_model=False) if cluster.gpus > 1 else "single"
        strategy = ",".join([engine + name, *axes_of(plan.layout)])
        return Choice(strategy, reason, flags_of(plan, engine) + lora, plan, faster_than(plan, best))
    if best is None:
        return Choice("none", f"no layout fits {cluster.gpus} GPUs of {gib:g} GiB: take more, or larger ones", "", None)
    layout, axes = best.layout, axes_of(best.layout)
    transformer = any(block.attention is not None for block, _ in network.layers)
    how = "tensor, context and pipeline parallelism share the layers" if transformer else "a pipeline shares the layers"
    if not axes:
        how = "with all of forward computed again"
    reason = f"divided by the data-parallel ranks alone it does not fit; {how}: {best.memory.gib:.0f} of {gib:g} GiB"
    engine = strategy_dividing(layout.zero, cuts_model=bool(axes))
    return Choice(",".join([engine + name, *axes]), reason, flags_of(best, engine) + lora, best)


def axes_of(layout: PlanLayout) -> list[str]:
    return [f"{axis}={getattr(layout, axis)}" for axis in AXES if getattr(layout, axis) > 1]


def fastest(question: Question) -> ScoredLayout | None:
    found = search(question, 12).plans
    safe = [plan for plan in found if plan.fits == "fits"] or found
    return safe[0] if safe else None


def faster_than(plan: ScoredLayout, best: ScoredLayout | None) -> ScoredLayout | None:
    """Worth a word only where it is a tenth faster."""
    return best if best is not None and best.time.seconds < 0.9 * plan.time.seconds else None


def flags_of(plan: ScoredLayout, engine: str) -> str:
    layout = plan.layout
    flags = [f"--parallel.data {engine}"]
    flags += [f"--parallel.{axis} {getattr(layout, axis)}" for axis in AXES if getattr(layout, axis) > 1]
    if layout.pp > 1:
        flags.append(f"--parallel.schedule {layout.schedule} --parallel.micro-batches {layout.micro_batches}")
        if layout.chunks > 1:
            flags.append(f"--parallel.chunks {layout.chunks}")
    elif layout.micro_batches > 1:
        flags.append(f"--train.accumulation {layout.micro_batches}")
    if layout.recompute != "none":
        flags.append(f"--train.recompute {layout.recompute}")
    if layout.offload:
        flags.append("--parallel.offload cpu")
    return " ".join(flags)


# ---- the scenarios of docs/choosing.md -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scenario:
    """A model, machines and a batch, for which a strategy is to be chosen."""

    title: str
    model: str
    """A known model, or one of ours."""
    cluster: str
    batch: int
    context: int = 0
    finetune: bool = False


SCENARIOS = (
    Scenario("ResNet-50, 8 GPUs", "resnet50", "1x8xa100-40", 1024),
    Scenario("GPT-2 (1.5B), 4 GPUs", "gpt2-xl", "1x4xv100-32", 64, 1024),
    Scenario("LLaMA-7B, 8 GPUs", "llama2-7b", "1x8xa100-40", 256, 2048),
    Scenario("LLaMA-70B, 64 GPUs", "llama2-70b", "8x8xa100-80", 512, 4096),
    Scenario("fine-tuning LLaMA-7B, 1 GPU", "llama2-7b", "1x1xa100-40", 16, 2048, finetune=True),
)


def matrix(network_of: "dict[str, Network]", cluster_of: "dict[str, Cluster]") -> Iterator[str]:
    """The lines of the table: scenario, strategy, step, memory, reason."""
    yield "| scenario | strategy | step | GiB per GPU | why |"
    yield "| --- | --- | --- | --- | --- |"
    for s in SCENARIOS:
        network = network_of[s.model]
        network = network.with_context(s.context) if s.context else network
        cluster = cluster_of[s.cluster]
        found = choose(network, cluster, s.batch, usual_precision(cluster.machine), s.finetune)
        assert found.plan is not None
        where = f"{s.title} ({s.cluster}, global batch {s.batch})"
        seconds = f"{found.plan.time.seconds:.2f} s"
        yield f"| {where} | `{found.strategy}` | {seconds} | {found.plan.memory.gib:.0f} | {found.reason} |"

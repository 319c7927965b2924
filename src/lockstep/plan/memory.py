"""What a rank holds at the worst moment of a step, by kind, on the stage that holds most.

parameters    in the type that they are kept in, cut by tensor parallelism, pipeline, experts and zero3
gradients     likewise, by zero2
optimizer     moments, and the master weights that narrow parameters need, by zero1
activations   what forward leaves for backward, of every micro-batch in flight (by the schedule's law)
logits        of the last stage, with their gradient
buffers       layers that zero3 has gathered, gradients in flight
overhead      the runtime's context, communication buffers, blocks that the allocator cannot use
"""

from dataclasses import dataclass, field

from lockstep.parallel.pipeline.law import held
from lockstep.parallel.zero.law import divided
from lockstep.plan.layout import PlanLayout, stages_of
from lockstep.plan.network import Layer
from lockstep.plan.setting import Setting

GIB = 2.0**30
KINDS = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers", "overhead")


@dataclass
class Memory:
    """Bytes of the fullest rank, by what they are for."""

    stage: int
    kinds: dict[str, float] = field(default_factory=dict)
    """Bytes."""

    @property
    def total(self) -> float:
        return sum(self.kinds.values())

    @property
    def gib(self) -> float:
        return self.total / GIB


def memory_of(setting: Setting) -> Memory:
    counts = stages_of(setting.network, setting.layout, setting.software.stages)
    starts = [sum(counts[:stage]) for stage in range(len(counts))]
    # the first stages hold most micro-batches, and the last one the logits
    looked_at = {0, 1, 2, len(counts) - 1}
    found = [
        stage_memory(setting, stage, blocks_between(setting, starts[stage], starts[stage] + counts[stage]))
        for stage in sorted(looked_at & set(range(len(counts))))
    ]
    return max(found, key=lambda memory: memory.total)


def blocks_between(setting: Setting, start: float, end: float) -> list[tuple[Layer, float]]:
    """The layers of a stage, each with how much of it; of a rank with chunks from everywhere, the mean."""
    network, found, at = setting.network, [], 0.0
    if setting.layout.chunks > 1:
        return [(block, count * (end - start) / network.depth) for block, count in network.layers]
    for block, count in network.layers:
        share = min(end, at + count) - max(start, at)
        if share > 0:
            found.append((block, share))
        at += count
    return found


def stage_memory(setting: Setting, stage: int, blocks: list[tuple[Layer, float]]) -> Memory:
    s, layout, network, software = setting, setting.layout, setting.network, setting.software
    kept = software.kept
    routed = sum(b.expert_parameters * n for b, n in blocks)
    dense = sum(b.parameters * n for b, n in blocks) - routed
    if stage == 0:
        dense += network.embedding_parameters
    if stage == layout.pp - 1:
        dense += network.head_parameters if layout.pp == 1 or not network.tied else network.embedding_parameters
    dense, routed = dense / layout.tp, routed / layout.ep / layout.experts_tp
    kinds = dict.fromkeys(KINDS, 0.0)
    sizes = (kept.parameter, kept.gradient, kept.optimizer)
    shares = divided(layout.zero, layout.pp > 1)
    for kind, size, is_divided in zip(("parameters", "gradients", "optimizer"), sizes, shares, strict=True):
        shards, of_experts = (layout.shards, layout.experts_shards) if is_divided else (1, 1)
        kinds[kind] = size * (dense / shards + routed / of_experts)
    if layout.offload:
        kinds["optimizer"] = 0.0
    tokens = layout.tokens(network.context)
    kinds["activations"] = tokens * in_flight(layout, stage) * sum(kept_by_layer(s, b) * n for b, n in blocks)
    if s.beside > 1:  # inputs of column layers, gathered to compute with
        kept_whole = sum(n for _, n in blocks) * in_flight(layout, stage) if layout.keep_gathered else 1
        kinds["activations"] += 2 * tokens * network.hidden * s.element * kept_whole
    if layout.recompute in ("full", "every", "selective"):
        kinds["activations"] += tokens * max(whole_layer(s, b) for b, _ in network.layers)
    if stage == layout.pp - 1 and network.vocabulary:
        size = s.constants["logit_bytes"] * (0.5 if software.fused_loss else 1.0)
        if (
            software.lockstep_loss and s.machine.is_gpu
        ):  # logits and their gradient; cut by tp, probabilities in fp32 too
            size = 2 * s.element if layout.tp == 1 else s.element + 8
        kinds["logits"] = size * tokens * network.vocabulary / layout.tp
        if layout.zero < 3:  # the gradient of the head's weight, before it is added
            kinds["buffers"] = software.gradient_bytes * network.vocabulary * network.hidden / layout.tp
    if layout.zero >= 3 and layout.pp == 1:
        largest = max(b.parameters - b.expert_parameters for b, _ in network.layers) / layout.tp
        ends = network.vocabulary * network.hidden / layout.tp
        kinds["buffers"] = software.gathered_bytes * (2 * largest + ends) + software.gradient_bytes * largest
    elif software.buckets and not software.lockstep_engines:
        kinds["buffers"] += min(software.gradient_bytes * dense, 100e6)
    if software.lockstep_engines:
        lockstep_engines(s, kinds, stage == layout.pp - 1)
    kinds["overhead"] = overhead(s, sum(kinds.values()))
    return Memory(stage, kinds)


BUCKET = 25 * 2.0**20
"""Of our engines: gradients are sent so many bytes at a time."""


def lockstep_engines(setting: Setting, kinds: dict[str, float], last: bool) -> None:
    """As ours hold them: gradients live in buckets; zero1 has a piece of one beside them, zero2 the two that are being
    filled and sent. Gradients that have no buckets (of zero3, and of a rank that shares them with no other) are there
    only when backward has made them, and by then activations are gone.
    """
    layout, network, narrow = setting.layout, setting.network, setting.element
    gathers = layout.zero >= 3 and layout.pp == 1
    alone = layout.dp * layout.cp == 1
    if not gathers:
        bucket = min(BUCKET, kinds["gradients"] * (layout.shards if layout.zero >= 2 else 1))
        kinds["buffers"] = 0.0 if alone else {1: 0.5, 2: 2.75}.get(layout.zero, 0.0) * bucket
        if narrow < setting.software.kept.parameter:  # autocast's copies of the weights, until the step ends
            kinds["buffers"] += narrow / setting.software.kept.parameter * kinds["parameters"]
            if last:  # the gradient of the head's copy
                kinds["buffers"] += narrow * network.vocabulary * network.hidden / layout.tp
    if last and network.vocabulary:  # what the last norm gets, in fp32, and what it gives
        kinds["activations"] += (4 + narrow) * layout.tokens(network.context) * network.hidden
    if (alone or (gathers and narrow < setting.software.kept.parameter)) and layout.micro_batches == 1:
        kinds["gradients"] = max(0.0, kinds["gradients"] - kinds["activations"] - kinds["logits"])


def kept_less(setting: Setting) -> float:
    """Hidden vectors less that a layer of ours keeps. Where weights are gathered in bf16, and with them the residual
    stream: the inputs of its two norms have half the bytes. Where it is compiled: measured, on one H200.
    """
    software = setting.software
    if not software.lockstep_engines:
        return 0.0
    narrow = setting.layout.zero >= 3 and setting.element < software.kept.parameter
    return (2.0 if narrow else 0.0) + (0.8 if software.fused else 0.0)


def whole_layer(setting: Setting, block: Layer) -> float:
    """Bytes of a token that a layer's forward leaves for its backward, without recomputation."""
    layout, c = setting.layout, setting.constants
    tp = layout.tp
    attended = block.attention.heads * block.attention.value_dim if block.attention is not None else 0
    elements = (c["kept_width"] - kept_less(setting)) * block.width / setting.beside + (block.inner + attended) / tp
    scores = 0.0
    if block.attention is not None and setting.software.attention == "matrix" and layout.recompute != "attention":
        scores = 5 * block.attention.heads / tp * setting.network.context
    routed = 2 * block.visits * (block.routed_width or block.width) / (1 if layout.experts_tp >= tp else tp)
    return setting.element * (elements + routed) + scores


def kept_by_layer(setting: Setting, block: Layer) -> float:
    """The same under the layout's recomputation."""
    layout = setting.layout
    entry = setting.element * block.width / setting.beside
    if layout.recompute == "full":
        return entry
    whole = whole_layer(setting, block)
    if layout.recompute == "every":
        return (entry + whole) / 2
    return whole * setting.constants["selective_kept"] if layout.recompute == "selective" else whole


def in_flight(layout: PlanLayout, stage: int) -> float:
    """Micro-batches whose activations a stage holds at once; a chunk of one counts as its share."""
    if layout.pp == 1:
        return 1.0
    return held(layout.schedule, layout.pp, layout.micro_batches, layout.chunks, stage)


def overhead(setting: Setting, held: float) -> float:
    c, counts = setting.constants, setting.software.allocator
    if counts == "allocated" or not setting.machine.is_gpu:
        return 0.0
    unusable = c["fragmentation"] * held
    return unusable if counts == "reserved" else unusable + c["context_gib"] * GIB


def verdict(memory: Memory, machine_gib: float) -> str:
    """Against what is free: what a runtime takes for itself is not."""
    free = machine_gib - 1.5 if machine_gib > 8 else machine_gib
    if memory.gib > free:
        return "does not fit"
    return "risky" if memory.gib > RISKY * free else "fits"


RISKY = 0.8

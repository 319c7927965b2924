"""How long a step is, term by term: what a stage computes for a micro-batch, what it waits for, what a step ends with.

products      matrix products of the layers (kernels.py)
attention     scores and what is made of them
moving        elementwise work: norms, activation functions, residuals; by the bytes that it moves
head          the products with the vocabulary, and the loss
recompute     what backward computes again
tensor        all-gathers and reduce-scatters (or all-reduces) of tensor parallelism that are waited for
context       keys and values that go round the context-parallel ring, as far as attention does not hide them
experts       tokens sent to their experts and back, and their permutation
shards        parameters that zero3 gathers and gradients that it scatters, as far as layers do not hide them
launch        the host issues kernels more slowly than the GPU ends them
pipeline      ranks that stand idle, by running the schedule (pipeline.py)
gradients     what is left of the gradients' way when backward ends; parameters that come back from zero1 and zero2
optimizer     the update, by the bytes that it moves
straggling    the slowest of many
"""

from dataclasses import dataclass
from functools import cached_property
from math import ceil, log2

from lockstep.parallel.context.law import hops
from lockstep.parallel.pipeline.law import MICRO_BATCH, idle
from lockstep.parallel.tensor.law import PASSES_FORWARD, passes_backward
from lockstep.parallel.zero.law import gathers
from lockstep.plan.kernels import TILE, attention_seconds, memory_rate, moving_seconds, product_seconds
from lockstep.plan.layout import SHARE, stages_of
from lockstep.plan.links import GATHER, REDUCE, collective_seconds, exchange_seconds, message_seconds
from lockstep.plan.network import Layer
from lockstep.plan.pipeline import pipeline_seconds
from lockstep.plan.setting import Setting, with_factors

Terms = dict[str, float]
OPTIMIZER_BYTES = 28
"""Of Adam, per parameter: reads weight, gradient and two moments, writes all but the gradient, in fp32."""
HOST_LINK = 20e9
"""Bytes per second between a GPU and its host, for what is offloaded: PCIe 4.0, less its protocol."""
OWN_LOSS = 1.5
"""Passes over fp32 logits that a kernel costs which reads them in bf16 twice and writes their gradient once."""
SENT = ("tensor", "context", "experts", "shards")
"""Terms of a layer in which it waits for what other ranks send: nothing else is sent meanwhile."""
FORWARD = 1 / 3
"""Of elementwise work, and of launches: forward's share."""


NARROW_BY_ROW = 4.0
"""What `narrow_passes` is to others: ours looks for each row's largest number, and rounds weights in both directions.
By docs/results/h200/precision.txt, where it gives 1.10 and 1.19 for the measured 1.10 and 1.20.
"""


@dataclass
class StepTime:
    """How long a step takes, and what of it is what."""

    seconds: float
    terms: Terms
    """Seconds of a step, by term; they add up."""
    bubble: float
    """Share of the step in which the busiest rank of the pipeline stands idle."""

    @property
    def bound_by(self) -> str:
        groups = {
            "compute": ("products", "attention", "head", "recompute"),
            "memory": ("moving", "optimizer"),
            "communication": ("tensor", "context", "experts", "shards", "gradients"),
            "pipeline": ("pipeline",),
            "host": ("launch",),
        }
        return max(groups, key=lambda name: sum(self.terms.get(term, 0.0) for term in groups[name]))


def step_time(setting: Setting) -> StepTime:
    return Clock(setting).step()


class Clock:
    """One setting, worked out."""

    def __init__(self, setting: Setting) -> None:
        self.s, self.c = setting, with_factors(setting)
        self.tokens = setting.layout.tokens(setting.network.context)

    @property
    def gathers_again(self) -> bool:
        """Backward gathers the inputs of column layers again: ours, with sequence parallelism. Other software has it
        too, behind a product; there it is part of what `tensor_exposed` was fitted to.
        """
        return self.s.software.lockstep_engines and self.s.beside > 1 and not self.s.layout.keep_gathered

    @property
    def gathers_layers(self) -> bool:
        """Layer by layer, in every micro-batch. In a pipeline ours gathers a stage once in a step, as zero1 does."""
        return self.s.layout.zero >= 3 and not (self.s.software.lockstep_engines and self.s.layout.pp > 1)

    # ---- one layer, one micro-batch ----------------------------------------------------------------------------

    def forward(self, block: Layer) -> Terms:
        """Seconds of one layer's forward, by term."""
        s, c, tp = self.s, self.c, self.s.layout.tp
        terms: Terms = {"products": self.products(block)}
        if block.attention is not None:
            kernel = s.software.attention
            terms["attention"] = attention_seconds(
                block.attention, self.tokens, s.network.context, tp, kernel, s.machine, c
            )
            terms["context"] = self.ring(block, terms["attention"])
        elements = c["passes_width"] * block.width / s.beside
        elements += c["passes_inner"] * (block.inner - block.inner_experts) / tp
        if not s.software.overlaps_experts:
            elements += c["passes_experts"] * block.inner_experts / tp
        eager = 1.0 if s.software.fused else c["passes_eager"]
        terms["moving"] = FORWARD * eager * moving_seconds(self.tokens * elements, s.machine, c, self.s.element)
        terms["moving"] += FORWARD * self.narrowing(block)
        terms["tensor"] = self.tensor(block, PASSES_FORWARD)
        if block.is_routed:
            terms["experts"] = self.experts(block)
        work = s.network.work
        return {name: seconds * work for name, seconds in terms.items()}

    def products(self, block: Layer, back: bool = False) -> float:
        """Forward; `back`: the gradients of inputs and of weights, whose sums are over outputs and over tokens."""
        s, tp, layout = self.s, self.s.layout.tp, self.s.layout
        total = 0.0

        def seconds(m: float, k: float, n: float, dtype: str, grouped: int = 1) -> float:
            weights = s.wide if s.software.lockstep_engines else dtype  # ours has their gradients in bf16
            if not back:
                return product_seconds(m, k, n, dtype, s.machine, self.c, grouped)
            inputs = product_seconds(m, n, k, dtype, s.machine, self.c, grouped)
            if s.software.frozen:
                return inputs
            rows = TILE * ceil(m / TILE) if m > TILE else m  # tokens are padded, so that their sum aligns
            return inputs + product_seconds(k, rows, n, weights, s.machine, self.c, grouped)

        for p in block.products:
            if p.experts:
                mine = max(1, p.experts // layout.ep)
                etp = layout.experts_tp
                tokens = self.tokens * p.visits / (1 if etp >= tp else tp)
                k, n = (p.k, p.n / etp) if p.cut == "column" else (p.k / etp, p.n)
                narrow = "fp8" if s.precision == "fp4" else s.precision  # no kernels of many products in fp4
                narrow = s.wide if s.software.lockstep_engines else narrow
                total += seconds(tokens / mine, k, n, narrow, mine)
            elif p.cut == "column":
                total += seconds(self.tokens, p.k, p.n / tp, s.precision)
            elif p.cut == "row":
                total += seconds(self.tokens, p.k / tp, p.n, s.precision)
            else:
                total += seconds(self.tokens / s.beside * p.rows, p.k, p.n, s.wide)
        return total

    def narrowing(self, block: Layer) -> float:
        """What is read and written to bring the products' inputs, and their outputs' gradients, into fp8 or fp4."""
        s = self.s
        if s.precision not in ("fp4", "fp8"):
            return 0.0
        moved, tp, etp = 0.0, s.layout.tp, s.layout.experts_tp
        for p in block.products:
            cut = etp if p.experts else tp
            k, n = (p.k, p.n / cut) if p.cut == "column" else (p.k / cut, p.n)
            if p.experts and s.software.lockstep_engines:
                continue
            if p.experts and not s.software.overlaps_experts:  # where it is, their kernels write narrow types
                moved += (k + n) * p.visits / (1 if etp >= tp else tp)
            elif not p.experts and p.cut != "whole":
                moved += k + n
        passes = NARROW_BY_ROW if s.software.lockstep_engines else self.c["narrow_passes"]
        return passes * moving_seconds(self.tokens * moved, s.machine, self.c)

    def tensor(self, block: Layer, passes: int) -> float:
        """Of a layer's two pairs of cut matrices, each sending its tokens around the ring `passes` times."""
        tp = self.s.layout.tp
        if tp == 1:
            return 0.0
        payload = self.tokens * block.width * self.s.element
        seconds = 2 * collective_seconds(payload, tp, 1, self.s.machine, self.c, passes)
        return seconds * (self.c["tensor_exposed"] if self.s.software.overlaps_tensor else 1.0)

    def ring(self, block: Layer, attention: float) -> float:
        cp, tp = self.s.layout.cp, self.s.layout.tp
        if cp == 1 or block.attention is None:
            return 0.0
        a = block.attention
        payload = self.tokens * max(1, a.kv_heads / tp) * (a.dim + a.value_dim) * self.s.element
        sent = hops(cp) * message_seconds(payload, tp * (cp - 1), self.s.machine, self.c)
        return max(0.0, sent - attention * 0.5) + self.c["ring_uneven"] * attention * (1 - 1 / cp)

    def experts(self, block: Layer) -> float:
        s, layout = self.s, self.s.layout
        tokens = self.tokens / (1 if layout.experts_tp >= layout.tp else layout.tp)
        payload = tokens * block.visits * (block.routed_width or block.width) * self.s.element
        copies = block.visits if s.software.sends_once else 1
        sent = 2 * exchange_seconds(payload, layout.ep, layout.experts_tp, s.machine, self.c, copies)
        sent *= self.c["exchange_exposed"]
        seconds = sent + self.c["permute_passes"] * payload / memory_rate(s.machine, self.c)
        return seconds * (self.c["experts_overlapped"] if s.software.overlaps_experts else 1.0)

    def backward(self, block: Layer, forward: Terms) -> Terms:
        """Two products for each of forward's; the same messages the other way; and forward again where asked."""
        c, layout = self.c, self.s.layout
        terms = {"moving": 2 * forward["moving"]}
        terms["products"] = self.products(block, back=True) * self.s.network.work
        if "attention" in forward:
            by = 2.0 if self.s.software.attention == "matrix" else c["flash_backward"]
            terms["attention"] = by * forward["attention"]
        wide = max(1.0, 4 / self.s.element)  # keys and values, and their gradients: ours in fp32
        ring = 1 + wide if self.s.software.lockstep_engines else 2.0
        terms["context"] = ring * forward.get("context", 0.0)
        terms["experts"] = forward.get("experts", 0.0)
        terms["tensor"] = forward.get("tensor", 0.0)
        more = passes_backward(self.gathers_again) - PASSES_FORWARD
        if more:  # in flight beside the products of the column layers' inputs' gradients, half of them
            terms["tensor"] += self.behind(self.tensor(block, more) * self.s.network.work, forward["products"] / 2)
        share = SHARE[layout.recompute]
        again = sum(forward.get(name, 0.0) for name in ("products", "attention", "moving"))
        sent = sum(forward.get(name, 0.0) for name in ("tensor", "context", "experts"))
        terms["recompute"] = share * (again + sent)
        if layout.recompute == "attention":
            terms["recompute"] = forward.get("attention", 0.0)
        elif layout.recompute == "selective":
            terms["recompute"] = c["selective"] * again
        return terms

    def with_waits(self, block: Layer, forward: Terms, backward: Terms) -> None:
        """Add what a layer stands waiting for: its shards, and the host."""
        s, c, layout = self.s, self.c, self.s.layout
        if self.gathers_layers or (layout.zero == 2 and s.software.gathers_at_two):
            gather, reduce = self.shard_traffic(block.parameters)
            again = gathers(layout.zero, layout.pp > 1) - 1
            for terms, traffic in ((forward, gather), (backward, gather * again + reduce)):
                terms["shards"] = self.behind(traffic, sum(terms.values()))
        if not s.software.graphs and s.machine.is_gpu:
            floor = s.software.host * c["launch_layer"] * (1.0 + (c["launch_tensor"] if layout.tp > 1 else 0.0))
            floor = 0.0 if s.software.graphs_attention else floor
            floor += c["launch_experts"] if block.is_routed else 0.0
            for terms, share in ((forward, FORWARD), (backward, 1 - FORWARD + SHARE[layout.recompute] * FORWARD)):
                terms["launch"] = max(0.0, 1e-3 * floor * share - sum(terms.values()))

    def shard_traffic(self, parameters: int) -> tuple[float, float]:
        layout, software = self.s.layout, self.s.software
        ranks, stride = layout.shards, layout.tp
        mine = parameters / layout.tp
        gather = collective_seconds(mine * software.gathered_bytes, ranks, stride, self.s.machine, self.c, GATHER)
        reduce = collective_seconds(mine * software.gradient_bytes, ranks, stride, self.s.machine, self.c, GATHER)
        if layout.shards < layout.dp * layout.cp:
            copies = layout.dp * layout.cp // layout.shards
            part = mine * software.gradient_bytes / ranks
            reduce += collective_seconds(part, copies, stride * ranks, self.s.machine, self.c, REDUCE)
        return gather, reduce

    # ---- a stage -----------------------------------------------------------------------------------------------

    @cached_property
    def layers(self) -> tuple[Terms, Terms]:
        """Forward and backward of a layer of the mean kind."""
        network = self.s.network
        forward: Terms = {}
        backward: Terms = {}
        for block, count in network.layers:
            ahead = self.forward(block)
            back = self.backward(block, ahead)
            self.with_waits(block, ahead, back)
            for total, terms in ((forward, ahead), (backward, back)):
                for name, seconds in terms.items():
                    total[name] = total.get(name, 0.0) + seconds * count / network.depth
        return forward, backward

    @cached_property
    def head(self) -> float:
        """Forward, of one micro-batch: the products with the vocabulary, and the loss over it."""
        s, tp = self.s, self.s.layout.tp
        n = s.network.vocabulary / tp
        if not s.software.lockstep_engines:  # others pad it
            n = TILE * ceil(n / TILE)
        if not n:
            return 0.0
        product = product_seconds(self.tokens, s.network.hidden, n, s.wide, s.machine, self.c)
        own = s.software.lockstep_loss and s.machine.is_gpu and tp == 1
        passes = OWN_LOSS if own else self.c["loss_passes"]
        loss = moving_seconds(self.tokens * n * passes * FORWARD, s.machine, self.c, 4)
        extra = s.network.extra_layers * sum(self.layers[0].values())
        return (product + loss) * (1 + s.network.extra_layers) + extra

    @cached_property
    def stages(self) -> tuple[list[float], list[float], list[float]]:
        """Layers, forward and backward of a micro-batch, of each rank of the pipeline."""
        s = self.s
        ahead, back = (sum(terms.values()) for terms in self.layers)
        counts = stages_of(s.network, s.layout, s.software.stages)
        forward, backward = [count * ahead for count in counts], [count * back for count in counts]
        forward[-1] += self.head
        backward[-1] += 2 * self.head
        return counts, forward, backward

    def guess(self) -> float:
        """Seconds, with the idle time of the pipeline by formula: what is worth working out."""
        layout, (counts, forward, backward) = self.s.layout, self.stages
        one = max(f + b for f, b in zip(forward, backward, strict=True))
        waits = idle(layout.schedule, layout.pp, layout.micro_batches, layout.chunks) / MICRO_BATCH * one
        return layout.micro_batches * one + waits + sum(self.ends(counts[0], forward[0], backward[0]).values())

    def step(self) -> StepTime:
        s, layout = self.s, self.s.layout
        stages, forward, backward = self.stages
        m = layout.micro_batches
        apart = layout.tp * layout.cp * layout.dp
        payload = self.tokens * s.network.hidden * s.element / s.beside
        message = message_seconds(payload, apart, s.machine, self.c) if layout.pp > 1 else 0.0
        span = pipeline_seconds(layout.schedule, layout.pp, m, layout.chunks, forward, backward, message)
        busy = [m * (f + b) for f, b in zip(forward, backward, strict=True)]
        worst = busy.index(max(busy))
        terms = dict.fromkeys(TERMS, 0.0)
        for passes in self.layers:
            for name, seconds in passes.items():
                terms[name] += m * stages[worst] * seconds
        terms["head"] = m * 3 * self.head if worst == layout.pp - 1 else 0.0
        terms["pipeline"] = span - busy[worst]
        terms |= self.ends(stages[worst], forward[worst], backward[worst])
        total = sum(terms.values())
        terms["straggling"] = total * self.c["straggling"] * log2(max(1.0, layout.ranks / 8))
        factor = self.c.factor(s.software.factor) * s.machine.factors.get("step", 1.0)
        terms = {name: seconds * factor for name, seconds in terms.items()}
        whole = sum(terms.values())
        return StepTime(whole, terms, terms["pipeline"] / whole if whole else 0.0)

    def ends(self, layers: float, forward: float, backward: float) -> Terms:
        """After the last micro-batch: gradients, update, parameters."""
        s, c, layout, software = self.s, self.c, self.s.layout, self.s.software
        dense, routed = self.parameters_of(layers)
        shards, of_experts = (layout.shards, layout.experts_shards) if layout.zero else (1, 1)
        each = min(OPTIMIZER_BYTES, 12 + 2 * software.kept.optimizer)
        update = (dense / shards + routed / of_experts) * each
        rate = memory_rate(s.machine, c)
        if layout.offload:
            rate = min(rate, HOST_LINK)
        optimizer = update / rate + (0.0 if not s.machine.is_gpu else 1e-3)
        if software.frozen:
            return {"gradients": 0.0, "optimizer": 0.0}
        if self.gathers_layers:
            return {"gradients": self.outside_gradients(), "optimizer": optimizer}
        ranks, stride = layout.dp * layout.cp, layout.tp
        sent = returned = 0.0
        copies = layout.experts_ranks // layout.ep
        for parameters, group, step in ((dense, ranks, stride), (routed, copies, layout.experts_tp * layout.ep)):
            times = REDUCE if layout.zero == 0 or layout.shards < ranks else GATHER
            sent += collective_seconds(parameters * software.gradient_bytes, group, step, s.machine, c, times)
            if layout.zero:
                shared = min(group, layout.shards)
                payload = parameters * (
                    software.kept.parameter if software.lockstep_engines else software.gathered_bytes
                )
                returned += collective_seconds(payload, shared, step, s.machine, c, GATHER)
        if software.lockstep_engines and layout.pp == 1:
            late = sent * s.network.embedding_parameters / layout.tp / dense  # made last, so sent after backward
            ahead, back = (layers * sum(t for name, t in terms.items() if name not in SENT) for terms in self.layers)
            sent = late + self.behind(sent - late, back + 2 * self.head)
            sent *= layout.micro_batches if layout.zero == 2 else 1
            returned = self.behind(returned, ahead + self.head)
        elif software.overlaps_gradients:
            passes = layout.pp if layout.pp > 1 and layout.chunks > 1 else 1
            sent = max(sent * c["gradients_least"], sent - c["gradients_hidden"] * backward * passes)
            returned = max(returned * c["gradients_least"], returned - c["gradients_hidden"] * forward * passes)
        if software.lockstep_engines and layout.pp > 1 and s.network.tied:  # the head's, with the embedding's
            tied = s.network.vocabulary * s.network.hidden / layout.tp * software.gradient_bytes
            sent += 2 * message_seconds(tied, layout.ranks // 2, s.machine, c)  # there, and the sum back
        return {"gradients": sent + returned, "optimizer": optimizer}

    def behind(self, traffic: float, busy: float) -> float:
        """What traffic costs that goes on while the GPU computes for so long."""
        return max(0.0, traffic - busy) + self.c["contention"] * min(traffic, busy)

    def outside_gradients(self) -> float:
        """Of zero3: embedding and head, which are gathered and scattered at the ends, with nothing beside."""
        network = self.s.network
        gather, reduce = self.shard_traffic(network.embedding_parameters + network.head_parameters)
        return (gather + reduce) * self.c["gradients_least"] * self.s.layout.micro_batches

    def parameters_of(self, layers: float) -> tuple[float, float]:
        """Of a stage's rank: those that all ranks of dp share, and those of its experts."""
        network, layout = self.s.network, self.s.layout
        share = layers / network.depth
        routed = sum(b.expert_parameters * n for b, n in network.layers)
        dense = sum(b.parameters * n for b, n in network.layers) - routed
        ends = network.embedding_parameters + network.head_parameters
        whole = share * dense + (ends if layout.pp == 1 else ends / 2)
        return whole / layout.tp, share * routed / layout.ep / layout.experts_tp


TERMS = (
    *("products", "attention", "moving", "head", "recompute", "tensor", "context", "experts", "shards", "launch"),
    *("pipeline", "gradients", "optimizer", "straggling"),
)

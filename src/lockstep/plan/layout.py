"""A layout to be judged: degrees, engine, schedule, micro-batches. What is illegal carries its reason."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal

from lockstep.errors import UserError
from lockstep.parallel.pipeline.balance import even_cuts
from lockstep.parallel.pipeline.schedule import check_schedule, placement_of
from lockstep.plan.network import Network
from lockstep.plan.software import Stages

Recompute = Literal["none", "attention", "selective", "every", "full"]
SHARE = {"none": 0.0, "attention": 0.0, "selective": 0.5, "every": 0.5, "full": 1.0}
"""Of forward that backward computes again; attention: its scores only."""


@dataclass(frozen=True)
class PlanLayout:
    """Degrees of each axis and how a batch is cut: what `search.py` goes through."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    """Experts are spread over so many of the ranks of dp x cp, and of tp where it does not cut them."""
    zero: int = 0
    """0 to 3: what the data-parallel ranks divide among them."""
    shard: int = 0
    """Over how many ranks they do; 0: all of dp x cp."""
    schedule: str = "1f1b"
    chunks: int = 1
    micro_batch: int = 1
    """Samples."""
    global_batch: int = 1
    recompute: Recompute = "none"
    sequence: bool = True
    """With tp: what is not cut by it is cut along the sequence."""
    keep_gathered: bool = False
    """With sequence: gathered inputs stay until backward, instead of being gathered again."""
    expert_tp: int = 0
    """Tensor parallelism of the experts; 0: as tp."""
    offload: bool = False
    """Optimizer state lives in the host's memory."""

    @property
    def ranks(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def micro_batches(self) -> int:
        return max(1, self.global_batch // (self.dp * self.micro_batch))

    @property
    def shards(self) -> int:
        """Ranks that divide what `zero` divides."""
        return min(self.shard or self.dp * self.cp, self.dp * self.cp)

    @property
    def is_hybrid(self) -> bool:
        """Shards are divided over some of the ranks, and copied over the others."""
        return self.zero > 0 and self.shards < self.dp * self.cp

    @property
    def experts_tp(self) -> int:
        return self.expert_tp or (1 if self.ep > 1 else self.tp)

    @property
    def experts_ranks(self) -> int:
        """Ranks that have the same part of each expert: those that experts are spread and copied over."""
        return self.dp * self.cp * self.tp // self.experts_tp

    @property
    def experts_shards(self) -> int:
        """Ranks that divide what `zero` divides of an expert: those of its copies that are among the shards."""
        return max(1, self.shards * self.tp // self.experts_tp // self.ep)

    def tokens(self, context: int) -> float:
        """Of one micro-batch, on one rank."""
        return self.micro_batch * context / self.cp

    def __str__(self) -> str:
        engine = f"zero{self.zero}" if self.zero else "ddp"
        words = [f"{engine} dp={self.dp}" + (f"/{self.shard}" if self.shard else "")]
        words += [f"{name}={n}" for name, n in (("tp", self.tp), ("cp", self.cp), ("ep", self.ep)) if n > 1]
        if self.pp > 1:
            words.append(f"pp={self.pp}:{self.schedule}" + (f":{self.chunks}" if self.chunks > 1 else ""))
        words.append(f"mb={self.micro_batch}")
        if self.recompute != "none":
            words.append(f"recompute={self.recompute}")
        if self.offload:
            words.append("offload")
        return " ".join(words)


def stages_of(network: Network, layout: PlanLayout, how: Stages = "layers") -> list[float]:
    """How many layers each rank of the pipeline has; the largest share where they do not divide."""
    p, layers = layout.pp, network.depth
    if p == 1:
        return [float(layers)]
    if how == "ends":
        whole, left = divmod(layers + 2, p * layout.chunks)
        if not left:
            whole *= layout.chunks
            return [whole - 1.0] + [float(whole)] * (p - 2) + [whole - 1.0]
        most = -(-layers // (p * layout.chunks))  # the last parts have what is left
        filled = [min(most, max(0, layers - most * part)) for part in range(p * layout.chunks)]
        return [float(sum(filled[rank::p])) for rank in range(p)]
    placement = placement_of(layout.schedule, p, layout.chunks)
    if how == "costs" and placement.parts <= layers:
        counts = layers_by_cost(network, placement.parts)
        mine = [[placement.part(rank, chunk) for chunk in range(placement.chunks)] for rank in range(p)]
        return [float(sum(counts[part] for part in ranks_parts)) for ranks_parts in mine]
    parts = p * layout.chunks
    low, extra = divmod(layers, parts)
    counts = [low + (1 if part < extra else 0) for part in range(parts)]
    return [float(sum(counts[rank::p])) for rank in range(p)]


@lru_cache(maxsize=256)
def layers_by_cost(network: Network, parts: int) -> list[int]:
    """As `parallel/pipeline/stage.py` cuts a model: an embedding costs nothing, a head what it multiplies with."""
    costs = [1, *(1 + sum(p.k * p.n * max(1, p.experts) for p in block.products) for block in network.blocks())]
    costs.append(1 + network.vocabulary * network.hidden)
    ends = [0, *even_cuts(costs, parts), len(costs)]
    # the embedding is the first of the first part, the head the last of the last
    return [end - begin - (begin == 0) - (end == len(costs)) for begin, end in pairwise(ends)]


def illegal(network: Network, layout: PlanLayout, gpus: int) -> str | None:
    """Why it cannot be run; None: it can."""
    attention = next((b.attention for b in network.blocks() if b.attention is not None), None)
    batch = layout.dp * layout.micro_batch
    if layout.ranks != gpus:
        return f"tp x pp x cp x dp is {layout.ranks}, and there are {gpus} GPUs"
    if layout.global_batch % batch:
        return f"a global batch of {layout.global_batch} is no multiple of dp x micro-batch, {batch}"
    if attention is not None and attention.heads % layout.tp:
        return f"tp {layout.tp} does not divide {attention.heads} heads"
    if layout.pp > 1:
        try:
            check_schedule(layout.schedule, layout.pp, layout.micro_batches, layout.chunks)
        except UserError as mistake:
            return str(mistake)
    if not 0 <= layout.zero <= 3:
        return f"zero {layout.zero} is none of 0, 1, 2 and 3"
    if layout.shard and (layout.dp * layout.cp) % layout.shard:
        return f"shard {layout.shard} does not divide dp x cp, {layout.dp * layout.cp}"
    if layout.pp * layout.chunks > network.depth:
        return f"{layout.pp} stages of {layout.chunks} are more than {network.depth} layers"
    if layout.pp > 1 and layout.schedule == "interleaved" and layout.micro_batches % layout.pp:
        return f"interleaved needs a multiple of {layout.pp} micro-batches, and there are {layout.micro_batches}"
    if layout.pp > 1 and layout.zero == 3:
        return "in a pipeline zero3 keeps a stage's parameters gathered, so it sends and holds what zero1 does"
    if network.context % (2 * layout.cp) and layout.cp > 1:
        return f"a context of {network.context} does not divide into {2 * layout.cp} chunks"
    experts = max((p.experts for b in network.blocks() for p in b.products), default=0)
    if layout.ep > 1 and (not experts or experts % layout.ep or layout.experts_ranks % layout.ep):
        return f"ep {layout.ep} must divide {experts} experts and the ranks that share them, {layout.experts_ranks}"
    return None

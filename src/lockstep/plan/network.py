"""What the planner knows of a model: matrix products, attention and parameters, layer by layer; no weights, no code.

A layer is a list of products (tokens, k) x (k, n), each of which tensor parallelism cuts by its output (column) or its
input (row), and an attention. Whatever the planner is asked about is described in these terms: our GPT, a Hugging Face
config, a row of a published table, a traced module.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

Cut = Literal["column", "row", "whole"]


@dataclass(frozen=True)
class Product:
    """(tokens, k) x (k, n)."""

    k: int
    n: int
    cut: Cut = "whole"
    experts: int = 0
    """Of which each token visits `visits`; 0: every token goes through this one."""
    visits: int = 1
    rows: float = 1.0
    """Of the product, for each token: pixels of a convolution."""

    @property
    def parameters(self) -> int:
        return self.k * self.n * max(1, self.experts)

    @property
    def flops(self) -> float:
        """Of one token, forward."""
        return 2 * self.k * self.n * self.visits * self.rows


@dataclass(frozen=True)
class Attention:
    """Of one layer: heads, key heads, and their width."""

    heads: int
    kv_heads: int
    dim: int
    """Of a head's queries and keys."""
    value_dim: int
    causal: bool = True
    window: int | None = None
    """Positions that a query looks at, at most."""

    def flops(self, context: int, counted_whole: bool = False) -> float:
        """Of one token, forward: both products; of a causal mask only the half that is computed, unless given."""
        seen = min(context, self.window or context)
        half = 0.5 if self.causal and not counted_whole and seen == context else 1.0
        return 2 * self.heads * (self.dim + self.value_dim) * seen * half


@dataclass(frozen=True)
class Layer:
    """One layer."""

    products: tuple[Product, ...]
    attention: Attention | None
    width: int
    """Elements of a token between layers."""
    inner: int
    """Elements of a token inside, between the products: what activation functions read and write."""
    other_parameters: int = 0
    """Norms and biases."""
    routed_width: int = 0
    """Elements of a token as it is sent to its experts; 0: `width`."""

    @property
    def parameters(self) -> int:
        return sum(p.parameters for p in self.products) + self.other_parameters

    @property
    def expert_parameters(self) -> int:
        return sum(p.parameters for p in self.products if p.experts)

    @property
    def is_routed(self) -> bool:
        return any(p.experts for p in self.products)

    @property
    def gates_experts(self) -> bool:
        """The experts' first product makes gates beside what they are multiplied with."""
        sizes = [(p.k, p.n) for p in self.products if p.experts]
        return len(sizes) == 2 and sizes[0][1] == 2 * sizes[1][0]

    @property
    def inner_experts(self) -> int:
        """Of `inner`, what lies inside the experts."""
        return sum((p.n if p.cut == "column" else p.k) * p.visits for p in self.products if p.experts)

    @property
    def visits(self) -> int:
        """Experts that a token is sent to."""
        return max((p.visits for p in self.products if p.experts), default=0)

    def flops(self, context: int, counted_whole: bool = False) -> float:
        """Of one token, forward."""
        attention = self.attention.flops(context, counted_whole) if self.attention is not None else 0.0
        return sum(p.flops for p in self.products) + attention


@dataclass(frozen=True)
class Network:
    """A model as the planner sees it: kinds of layers and how often each occurs."""

    name: str
    layers: tuple[tuple[Layer, int], ...]
    """(layer, how often), in the order of the model."""
    hidden: int
    vocabulary: int
    """0: no embedding and no head."""
    context: int
    tied: bool = False
    positions: int = 0
    """Learned ones."""
    extra_layers: float = 0.0
    """Work of a head beyond the usual one, in layers (multi-token prediction)."""
    work: float = 1.0
    """FLOP per token that is known, over what the shapes say, where the shapes are only alike."""

    @property
    def depth(self) -> int:
        return sum(count for _, count in self.layers)

    def blocks(self) -> Iterator[Layer]:
        for block, count in self.layers:
            for _ in range(count):
                yield block

    @property
    def embedding_parameters(self) -> int:
        return (self.vocabulary + self.positions) * self.hidden

    @property
    def head_parameters(self) -> int:
        return 0 if self.tied else self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        return sum(b.parameters * n for b, n in self.layers) + self.embedding_parameters + self.head_parameters

    def flops_per_token(self, counted_whole: bool = False) -> float:
        """Forward and backward: three times forward's, the head's among them."""
        layers = sum(b.flops(self.context, counted_whole) * n for b, n in self.layers)
        return 3 * self.work * (layers + 2 * self.hidden * self.vocabulary)

    def with_context(self, context: int) -> "Network":
        return replace(self, context=context)


def transformer_block(
    hidden: int,
    heads: int,
    ffn: int,
    kv_heads: int | None = None,
    gated: bool = True,
    head_dim: int | None = None,
    causal: bool = True,
    window: int | None = None,
    experts: int = 0,
    visits: int = 0,
    shared_ffn: int = 0,
    biases: bool = False,
    latent: int = 0,
) -> Layer:
    """Attention and feed-forward; with experts, `ffn` is one expert's width, and `latent` what a token is shortened to
    before it is sent to them.
    """
    dim, kv = head_dim or hidden // heads, kv_heads or heads
    up = 2 if gated else 1
    products = [
        Product(hidden, (heads + 2 * kv) * dim, "column"),
        Product(heads * dim, hidden, "row"),
    ]
    if experts:
        inside = latent or hidden
        products += [
            Product(hidden, experts),
            Product(inside, up * ffn, "column", experts, visits),
            Product(ffn, inside, "row", experts, visits),
        ]
        products += [Product(hidden, latent), Product(latent, hidden)] if latent else []
        if shared_ffn:
            products += [Product(hidden, up * shared_ffn, "column"), Product(shared_ffn, hidden, "row")]
    else:
        products += [Product(hidden, up * ffn, "column"), Product(ffn, hidden, "row")]
    inner = (up + 1) * (ffn * max(1, visits) + shared_ffn) + (heads + 2 * kv) * dim
    other = 2 * hidden * (2 if biases else 1) + (sum(p.n for p in products) if biases else 0)
    attention = Attention(heads, kv, dim, dim, causal, window)
    return Layer(tuple(products), attention, hidden, inner, other, latent)


def latent_block(
    hidden: int,
    heads: int,
    ffn: int,
    q_rank: int,
    kv_rank: int,
    nope: int = 128,
    rope: int = 64,
    value_dim: int = 128,
    experts: int = 0,
    visits: int = 0,
    shared_ffn: int = 0,
) -> Layer:
    """Multi-head latent attention (DeepSeek): queries, keys and values from vectors of low rank."""
    like = transformer_block(hidden, heads, ffn, experts=experts, visits=visits, shared_ffn=shared_ffn)
    dim = nope + rope
    queries = (Product(hidden, q_rank), Product(q_rank, heads * dim, "column"))
    if not q_rank:
        queries = (Product(hidden, heads * dim, "column"),)  # type: ignore[assignment]
    products = (
        *queries,
        Product(hidden, kv_rank + rope),
        Product(kv_rank, heads * (nope + value_dim), "column"),
        Product(heads * value_dim, hidden, "row"),
        *like.products[2:],
    )
    inner = like.inner - 3 * hidden + heads * (2 * dim + value_dim) + q_rank + kv_rank
    return Layer(products, Attention(heads, heads, dim, value_dim), hidden, inner, like.other_parameters)


def transformer(
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    ffn: int,
    vocabulary: int,
    context: int,
    kv_heads: int | None = None,
    gated: bool = True,
    tied: bool = False,
    positions: int = 0,
    head_dim: int | None = None,
    causal: bool = True,
    biases: bool = False,
) -> Network:
    block = transformer_block(hidden, heads, ffn, kv_heads, gated, head_dim, causal, biases=biases)
    return Network(name, ((block, layers),), hidden, vocabulary, context, tied, positions)

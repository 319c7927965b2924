"""A decoder-only transformer: GPT-2's form, or Llama's (RMSNorm, RoPE, SwiGLU, grouped-query attention)."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lockstep.config.gpt import SIZES, Shape
from lockstep.errors import UserError
from lockstep.models.experts import Experts, MixtureOfExperts, Router
from lockstep.models.float8 import Float8Linear
from lockstep.models.kernels import usable_on

__all__ = ["GPT", "SIZES", "Shape"]


def make_norm(shape: Shape) -> nn.Module:
    if shape.norm == "layernorm":
        return nn.LayerNorm(shape.d_model, eps=shape.norm_eps)
    return nn.RMSNorm(shape.d_model, eps=shape.norm_eps)


def make_qk_norms(shape: Shape) -> tuple[nn.Module, nn.Module]:
    """Of queries, and of keys."""
    if shape.qk_norm == "none":
        return nn.Identity(), nn.Identity()
    heads = (1, 1) if shape.qk_norm == "head" else (shape.heads, shape.kv_heads)
    q, k = (nn.RMSNorm(count * shape.head_size, eps=shape.norm_eps) for count in heads)
    return q, k


def ends_branch(linear: nn.Linear, shape: Shape) -> nn.Linear:
    """GPT-2: the residual stream adds up 2 x layers branches, so what ends one begins that much smaller."""
    linear.initial_std = 0.02 / (2 * shape.layers) ** 0.5
    return linear


def fused(linear: nn.Linear, parts: tuple[int, ...], heads: tuple[int, ...]) -> nn.Linear:
    """Several layers of one input in one product: their widths, and into how many pieces each may be cut."""
    linear.__dict__.update(parts=parts, heads=heads)
    return linear


WIDE = torch.float32
"""Angles are kept in this dtype or a wider one."""


class Rotation:
    """RoPE's table: cosine and sine of position x frequency, each (tokens, head_size / 2), in fp32 or better: in bf16
    neighbouring positions beyond some hundreds would have the same angle.
    """

    def __init__(self, cosine: Tensor, sine: Tensor) -> None:
        self.cosine, self.sine = cosine, sine

    @classmethod
    def of(cls, positions: Tensor, head_size: int, dtype: torch.dtype, base: float = 10_000.0) -> "Rotation":
        exponent = torch.arange(0, head_size, 2, device=positions.device, dtype=torch.float64) / head_size
        angle = positions.to(torch.float64)[..., None] * base**-exponent
        if positions.dim() == 2:  # of each sequence its own: the same for all heads
            angle = angle.unsqueeze(1)
        wide = torch.promote_types(dtype, WIDE)
        return cls(angle.cos().to(wide), angle.sin().to(wide))

    def fits(self, length: int, device: torch.device, dtype: torch.dtype) -> bool:
        mine = self.cosine
        return mine.shape[-2] == length and mine.device == device and mine.dtype == torch.promote_types(dtype, WIDE)

    def rotate(self, x: Tensor) -> Tensor:
        """Turn each pair (first half, second half) of a head's features by its angle."""
        first, second = x.chunk(2, dim=-1)
        turned = (first * self.cosine - second * self.sine, first * self.sine + second * self.cosine)
        return torch.cat(turned, dim=-1).to(x.dtype)


def first_positions(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, device=device)


class Positions:
    """At which positions the tokens of a forward pass are: 0, 1, 2, ..., or those of a context-parallel rank. One for
    all layers of a model, so that they make RoPE's table once.
    """

    def __init__(self, base: float = 10_000.0, head_size: int = 0) -> None:
        self.base, self.head_size = base, head_size
        self.of: Callable[[int, torch.device], Tensor] = first_positions
        """How many there are, and where -> which. Set it by `use`."""
        self._table: Rotation | None = None

    def use(self, of: Callable[[int, torch.device], Tensor]) -> None:
        """From now on the tokens are at these positions."""
        self.of, self._table = of, None

    def prepare(self, length: int, device: torch.device, dtype: torch.dtype) -> None:
        """Make the table, unless it is the one that there is. Compiled code takes it as it is: a compiler that is given
        the computation puts it into every kernel that rotates, in fp64, which costs a third of a GPT's step.
        """
        if self._table is None or not self._table.fits(length, device, dtype):
            self._table = Rotation.of(self.of(length, device), self.head_size, dtype, self.base)

    def rotation(self, q: Tensor) -> Rotation:
        length = q.shape[-2]
        if not torch.compiler.is_compiling():
            self.prepare(length, q.device, q.dtype)
        if self._table is not None and self._table.fits(length, q.device, q.dtype):
            return self._table
        return Rotation.of(self.of(length, q.device), self.head_size, q.dtype, self.base)


class Attention(nn.Module):
    """Causal self-attention; `kv_heads` < `heads` shares each key and value head among several queries."""

    def __init__(self, shape: Shape, positions: Positions) -> None:
        super().__init__()
        self.shape, self.positions = shape, positions
        kv_width = shape.kv_heads * shape.head_size
        bias = shape.norm == "layernorm"  # Llama's linear layers have none
        qkv = nn.Linear(shape.d_model, shape.q_width + 2 * kv_width, bias=bias)
        heads = (shape.heads, shape.kv_heads, shape.kv_heads)
        self.qkv = fused(qkv, (shape.q_width, kv_width, kv_width), heads)
        self.output = ends_branch(nn.Linear(shape.q_width, shape.d_model, bias=bias), shape)
        self.q_norm, self.k_norm = make_qk_norms(shape)
        self.attend: Callable[[Tensor, Tensor, Tensor], Tensor] = self.causal_attention
        """Of queries to keys and values, (batch, heads, tokens, head_size) each; there may be other ways."""

    def forward(self, x: Tensor) -> Tensor:
        shape = self.shape
        # (batch, tokens, heads * head_size) -> (batch, heads, tokens, head_size)
        q, k, v = self.qkv(x).split(self.qkv.parts, dim=-1)
        if shape.qk_norm == "all":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (part.unflatten(-1, (-1, shape.head_size)).transpose(1, 2) for part in (q, k, v))
        if shape.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        if shape.position == "rope":
            rotation = self.positions.rotation(q)
            q, k = rotation.rotate(q), rotation.rotate(k)
        merged: Tensor = self.output(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return merged

    def causal_attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        dropout = self.shape.dropout if self.training else 0.0
        shared = q.shape[1] != k.shape[1]
        with attention_kernel(self.shape.attention):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout, enable_gqa=shared)


def attention_kernel(name: str) -> AbstractContextManager[None]:
    """Around scaled_dot_product_attention: the kernel of that name, or PyTorch's choice."""
    if name == "auto":
        return nullcontext()
    backends = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "math": SDPBackend.MATH,
    }
    chosen: AbstractContextManager[None] = sdpa_kernel(backends[name])
    return chosen


def is_plain(linear: nn.Module) -> bool:
    """A linear layer with a bias, whose forward may be skipped: no adapter around it, no hooks on it."""
    hooks = (linear._forward_pre_hooks, linear._forward_hooks, linear._backward_pre_hooks, linear._backward_hooks)
    watched = any(len(kind) > 0 for kind in hooks)
    return type(linear) in (nn.Linear, Float8Linear) and linear.bias is not None and not watched


def without_bias(linear: nn.Linear, x: Tensor) -> Tensor:
    return linear.product(x) if isinstance(linear, Float8Linear) else F.linear(x, linear.weight)


class FeedForward(nn.Module):
    """The MLP of a block: GELU, or SwiGLU as Llama's."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gated, self.own_gelu = shape.activation == "swiglu", shape.own_gelu
        bias = shape.norm == "layernorm"
        widths = (shape.mlp_width,) * (2 if self.gated else 1)
        self.up = fused(nn.Linear(shape.d_model, sum(widths), bias=bias), widths, widths)
        self.down = ends_branch(nn.Linear(shape.mlp_width, shape.d_model, bias=bias), shape)

    def forward(self, x: Tensor) -> Tensor:
        if self.gated:
            gate, value = self.up(x).chunk(2, dim=-1)
            x = F.silu(gate) * value
        elif self.own_gelu and usable_on(x) and is_plain(self.up):
            from lockstep.models.kernels.gelu import bias_gelu  # Triton is where GPUs are

            x = bias_gelu(without_bias(self.up, x), self.up.bias)
        else:
            x = F.gelu(self.up(x), approximate="tanh")
        y: Tensor = self.down(x)
        return y


def make_experts(shape: Shape) -> MixtureOfExperts:
    """They begin as the MLPs do."""
    moe = MixtureOfExperts(
        shape.d_model,
        shape.expert_width,
        shape.experts,
        shape.active,
        scoring=cast(Any, shape.scoring),
        normalize=shape.normalize,
        shared=shape.shared_experts,
        balance=cast(Any, shape.balance),
        balance_coefficient=shape.balance_coefficient,
        z_loss=shape.z_loss,
        capacity=shape.capacity,
    )
    moe.router.initial_std = 0.02
    moe.experts.initial_std = {"gate": 0.02, "up": 0.02, "down": 0.02 / (2 * shape.layers) ** 0.5}
    if moe.shared is not None:
        ends_branch(moe.shared.down, shape)
    return moe


class TransformerBlock(nn.Module):
    """Norm, attention, norm, MLP; each pair added to the residual stream."""

    def __init__(self, shape: Shape, positions: Positions, layer: int = 0) -> None:
        super().__init__()
        self.attention_norm = make_norm(shape)
        self.attention = Attention(shape, positions)
        self.mlp_norm = make_norm(shape)
        self.mlp = make_experts(shape) if shape.has_experts(layer) else FeedForward(shape)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        y: Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return y


class GPT(nn.Module):
    """Embedding, blocks, norm, head: tokens (batch, positions) to logits (batch, positions, vocabulary)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, self.positions = shape, Positions(shape.rope_base, shape.head_size)
        self.token_embedding = nn.Embedding(shape.vocabulary, shape.d_model)
        self.position_embedding = nn.Embedding(shape.context, shape.d_model) if shape.position == "learned" else None
        self.blocks = nn.ModuleList(TransformerBlock(shape, self.positions, i) for i in range(shape.layers))
        self.norm = make_norm(shape)
        self.head = nn.Linear(shape.d_model, shape.vocabulary, bias=False)
        self.apply(self.initialize)
        if shape.tied:
            self.head.weight = self.token_embedding.weight

    @staticmethod
    def initialize(module: nn.Module) -> None:
        """Fill one module's own parameters."""
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=getattr(module, "initial_std", 0.02))
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm | Router | Experts):
            module.reset_parameters()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.predict(x)

    def embed(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.token_embedding(tokens)  # (batch, tokens, d_model)
        if self.position_embedding is not None:
            x = x + self.position_embedding(self.positions.of(tokens.shape[1], tokens.device))
        if self.shape.residual == "compute" and torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return x

    def predict(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(x))  # (batch, tokens, vocabulary)
        return logits

    def pipeline_layers(self) -> list[tuple[tuple[str, ...], Callable[[Tensor], Tensor]]]:
        """What activations pass through, for a pipeline: (names of submodules, function)."""

        def block(i: int) -> Callable[[Tensor], Tensor]:
            return lambda x: self.blocks[i](x)  # whatever stands there then

        blocks = [((f"blocks.{i}",), block(i)) for i in range(len(self.blocks))]
        return [(("token_embedding", "position_embedding"), self.embed), *blocks, (("norm", "head"), self.predict)]

    def tensor_plan(self) -> dict[str, str]:
        """What tensor parallelism cuts."""
        plan = {
            "token_embedding": "vocab",
            "blocks.*.attention.qkv": "column",
            "blocks.*.attention.output": "row",
            "head": "column:gather",
        }
        shape = self.shape
        if shape.qk_norm == "all":
            raise UserError(
                "model.qk_norm all normalizes the queries of all heads together, and parallel.tp gives each rank some "
                "heads; use another axis"
            )
        if shape.qk_norm == "head":
            plan |= {"blocks.*.attention.q_norm": "summed", "blocks.*.attention.k_norm": "summed"}
        if not shape.experts or shape.dense_layers:
            plan |= {"blocks.*.mlp.up": "column", "blocks.*.mlp.down": "row"}
        if shape.experts and shape.shared_experts:
            kinds = {"gate": "column", "up": "column", "down": "row"}
            plan |= {f"blocks.*.mlp.shared.{name}": kind for name, kind in kinds.items()}
        return plan if self.position_embedding is None else {**plan, "position_embedding": "sequence"}

    def forward_flops(self) -> int:
        """Multiplications and additions of one sequence's forward pass, attention counted without its causal half."""
        shape = self.shape
        kv_width = shape.kv_heads * shape.head_size
        attention_weights = shape.layers * shape.d_model * (2 * shape.q_width + 2 * kv_width)
        mlp = shape.d_model * shape.mlp_width * (3 if shape.activation == "swiglu" else 2)
        active = 3 * shape.d_model * shape.expert_width * (shape.active + shape.shared_experts)
        active += shape.d_model * shape.experts  # the router
        experts = sum(shape.has_experts(layer) for layer in range(shape.layers))
        matrices = attention_weights + (shape.layers - experts) * mlp + experts * active
        matrices += shape.d_model * shape.vocabulary
        attention = 2 * shape.layers * shape.context * shape.q_width  # QK^T and AV, per token
        return 2 * shape.context * (matrices + attention)

"""All numbers of a GPT, from what a config says of it."""

from dataclasses import dataclass, replace

from lockstep.config.models import GPT
from lockstep.errors import UserError

SIZES = {  # name: (d_model, layers, heads)
    "small": (768, 12, 12),
    "medium": (1024, 24, 16),
    "large": (1280, 36, 20),
    "xl": (1600, 48, 25),
    "2.7b": (2560, 32, 32),
}


@dataclass(frozen=True)
class Shape:
    """All numbers of the network."""

    d_model: int
    layers: int
    heads: int
    kv_heads: int
    context: int
    vocabulary: int
    norm: str = "layernorm"
    position: str = "learned"
    activation: str = "gelu"
    tied: bool = True
    dropout: float = 0.0
    attention: str = "auto"
    residual: str = "fp32"
    own_gelu: bool = False
    head_width: int = 0
    """0: d_model / heads."""
    given_width: int = 0
    """Of the MLP; 0: that of the activation."""
    qk_norm: str = "none"
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5
    experts: int = 0
    active: int = 2
    expert_width: int = 0
    shared_experts: int = 0
    dense_layers: int = 0
    scoring: str = "softmax"
    normalize: bool = True
    balance: str = "loss"
    balance_coefficient: float = 0.01
    z_loss: float = 0.0
    capacity: float | None = None

    @property
    def head_size(self) -> int:
        return self.head_width or self.d_model // self.heads

    @property
    def q_width(self) -> int:
        """Of all heads' queries; d_model, unless the size of heads is another."""
        return self.heads * self.head_size

    @property
    def mlp_width(self) -> int:
        """4 d for GELU; 8/3 d, rounded up to a multiple of 64, for SwiGLU, whose third matrix evens the count."""
        return self.given_width or 4 * self.d_model if self.activation == "gelu" else self.swiglu_width

    @property
    def swiglu_width(self) -> int:
        return self.given_width or -(-8 * self.d_model // (3 * 64)) * 64

    def has_experts(self, layer: int) -> bool:
        return self.experts > 0 and layer >= self.dense_layers


def gpt_shape(config: GPT, classes: int) -> Shape:
    """`classes`: different tokens of the data, where the config does not say a vocabulary."""
    d_model, layers, heads = (
        (config.d_model, config.layers, config.heads) if config.size == "custom" else SIZES[config.size]
    )
    kv_heads = config.kv_heads or heads
    if d_model % heads and config.head_size is None:
        raise UserError(f"model.d_model {d_model} must be a multiple of model.heads {heads}")
    head_size = config.head_size or d_model // heads
    if heads % kv_heads:
        raise UserError(f"model.heads {heads} must be a multiple of model.kv_heads {kv_heads}")
    if config.position == "rope" and head_size % 2:
        raise UserError(f"model.position rope needs heads of an even size, and theirs is {head_size}")
    vocabulary = config.vocabulary or classes
    if vocabulary < classes:
        raise UserError(f"model.vocabulary is {vocabulary}, but the data set has {classes} different tokens")
    shape = Shape(
        d_model=d_model,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        context=config.context,
        vocabulary=vocabulary,
        norm=config.norm,
        position=config.position,
        activation=config.activation,
        tied=config.tied,
        dropout=config.dropout,
        attention=config.attention,
        residual=config.residual,
        own_gelu=config.own_gelu,
        head_width=config.head_size or 0,
        given_width=config.mlp_width or 0,
        qk_norm=config.qk_norm,
        rope_base=config.rope_base,
        norm_eps=config.norm_eps,
        experts=config.experts,
        active=config.active,
        expert_width=config.expert_width or 0,
        shared_experts=config.shared_experts,
        dense_layers=config.dense_layers,
        scoring=config.scoring,
        normalize=config.normalize,
        balance=config.balance,
        balance_coefficient=config.balance_coefficient,
        z_loss=config.z_loss,
        capacity=config.capacity,
    )
    return check_experts(shape)


def check_experts(shape: Shape) -> Shape:
    """With the width of an expert, where there are any."""
    if not shape.experts:
        return shape
    if shape.active > shape.experts:
        raise UserError(
            f"model.active is {shape.active}, but a token cannot take more experts than model.experts {shape.experts}"
        )
    if shape.dense_layers >= shape.layers:
        raise UserError(
            f"model.dense_layers {shape.dense_layers} leaves no block of {shape.layers} with experts; use fewer, or "
            f"set model.experts 0"
        )
    return replace(shape, expert_width=shape.expert_width or max(1, shape.swiglu_width // shape.active))

"""All numbers of a GPT, from what a config says of it."""

from dataclasses import dataclass

from lockstep.config.schema import GPT
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

    @property
    def head_size(self) -> int:
        return self.d_model // self.heads

    @property
    def mlp_width(self) -> int:
        """4 d for GELU; 8/3 d, rounded up to a multiple of 64, for SwiGLU, whose third matrix evens the count."""
        if self.activation == "gelu":
            return 4 * self.d_model
        return -(-8 * self.d_model // (3 * 64)) * 64


def gpt_shape(config: GPT, classes: int) -> Shape:
    """`classes`: different tokens of the data, where the config does not say a vocabulary."""
    d_model, layers, heads = (
        (config.d_model, config.layers, config.heads) if config.size == "custom" else SIZES[config.size]
    )
    kv_heads = config.kv_heads or heads
    if d_model % heads:
        raise UserError(f"model.d_model {d_model} must be a multiple of model.heads {heads}")
    if heads % kv_heads:
        raise UserError(f"model.heads {heads} must be a multiple of model.kv_heads {kv_heads}")
    if config.position == "rope" and d_model // heads % 2:
        raise UserError(f"model.position rope needs heads of an even size, but d_model/heads is {d_model // heads}")
    vocabulary = config.vocabulary or classes
    if vocabulary < classes:
        raise UserError(f"model.vocabulary is {vocabulary}, but the data set has {classes} different tokens")
    return Shape(
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
    )

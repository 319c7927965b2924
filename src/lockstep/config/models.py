"""Section `model` of a config: a dataclass for each `model.name`, so a key in the wrong place is an error."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Interval

from lockstep.config.limits import Amount, Args, Dropout, Import, Layers, Natural, Share, Tokens, Width


@dataclass
class MLP:
    """Linear layers with ReLU between them."""

    name: Literal["mlp"] = "mlp"
    layers: Layers = 16
    """How many linear layers, input and output layers included."""
    width: Width = 256
    """Width of the hidden layers."""


@dataclass
class CNN:
    """3x3 convolutions, one pooling step each, then one hidden linear layer."""

    name: Literal["cnn"] = "cnn"
    channels: tuple[Width, ...] = (32, 64)
    """Output channels of each convolution."""
    hidden: Width = 128
    """Width of the hidden linear layer."""


@dataclass
class ResNet:
    """CIFAR-style residual network (3x3 stem, no stem pooling)."""

    name: Literal["resnet"] = "resnet"
    depth: Annotated[int, Interval(ge=8, le=10_000)] = 18
    """18 and 34 are built of basic blocks, 50, 101 and 152 of bottlenecks; 6n + 2 (20, 32, 44, 56, 110) of three stages
    of n basic blocks."""
    stages: tuple[Layers, ...] = ()
    """Basic blocks of each stage, for any other depth: 1 1 1 1 is a ResNet-10. Then depth counts for nothing."""
    width: Width = 64
    """Channels of the first stage; each later stage doubles them."""
    norm: Literal["batch", "group"] = "batch"
    """`batch` is the usual network; its statistics are per rank. `group` trains alike at any world size."""


@dataclass
class GPT:
    """Decoder-only transformer: GPT-2's form by default, Llama's with rmsnorm, rope, swiglu and kv_heads."""

    name: Literal["gpt"] = "gpt"
    size: Literal["custom", "small", "medium", "large", "xl", "2.7b"] = "custom"
    """A published size, or `custom` to give d_model, layers and heads yourself."""
    d_model: Width = 128
    layers: Layers = 4
    heads: Width = 4
    kv_heads: Width | None = None
    """Heads of keys and values (grouped-query attention). None: as many as heads."""
    head_size: Width | None = None
    """Features of one head. None: d_model / heads."""
    mlp_width: Width | None = None
    """Of the MLP's hidden layer. None: 4 x d_model, and for swiglu 8/3 x d_model, rounded up to a multiple of 64."""
    qk_norm: Literal["none", "head", "all"] = "none"
    """RMSNorm of queries and keys: of each head's features, as Qwen3, or of all heads' together, as OLMoE."""
    rope_base: Annotated[float, Interval(ge=1, le=1e12)] = 10_000.0
    """Of the angles of rope: the larger, the longer the context."""
    norm_eps: Annotated[float, Interval(ge=1e-12, le=1)] = 1e-5
    """What norms add to the variance."""
    context: Tokens = 128
    """Tokens of one sequence."""
    vocabulary: Annotated[int, Interval(ge=2, le=1_000_000_000)] | None = None
    """Rows of the token embedding. None: what the data set has (256 for text)."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    position: Literal["learned", "rope"] = "learned"
    activation: Literal["gelu", "swiglu"] = "gelu"
    tied: bool = True
    """The output head shares the token embedding's weight."""
    dropout: Dropout = 0.0
    attention: Literal["auto", "flash", "cudnn", "efficient", "math"] = "auto"
    """The kernel of the attention; auto: PyTorch's choice. flash, cudnn and efficient are for GPUs."""
    residual: Literal["fp32", "compute"] = "fp32"
    """Under bf16, fp16 or fp8, what the blocks' outputs are added up in: fp32, or the precision that they compute in
    (zero3 and fsdp always take the latter)."""
    own_gelu: bool = False
    """On a GPU, gelu and its bias by a kernel of our own."""
    experts: Natural = 0
    """Experts of each block, in the place of its MLP. 0: the MLP."""
    active: Width = 2
    """Experts that a token takes."""
    expert_width: Width | None = None
    """Width of one expert's SwiGLU. None: the MLP's, divided by `active`."""
    shared_experts: Natural = 0
    """So many more experts, as one MLP that every token passes."""
    dense_layers: Natural = 0
    """The first blocks have an MLP all the same."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """How the router scores experts."""
    normalize: bool = True
    """The weights of a token's experts sum to one."""
    balance: Literal["none", "loss", "bias"] = "loss"
    """What makes the router use all experts: an auxiliary loss, or a bias that moves after each step."""
    balance_coefficient: Share = 0.01
    """Of the auxiliary loss, or how far a bias moves in a step."""
    z_loss: Amount = 0.0
    """Of the mean square of the router's logsumexp, which keeps its logits small."""
    capacity: Annotated[float, Interval(ge=1e-6, le=1e6)] | None = None
    """An expert takes at most this many times its equal share of the tokens. None: none is dropped."""


@dataclass
class Own:
    """A model of your own: `--model.import my_package.nets:Net --model.args.width 64`."""

    name: Literal["own"] = "own"
    import_: Import = None
    """Where it stands: package.module:class, or a function that returns an nn.Module."""
    args: Args = field(default_factory=dict)
    """What it is called with."""


@dataclass
class HF:
    """A causal language model of Hugging Face's, by its folder (needs transformers: pip install -e ".[hf]")."""

    name: Literal["hf"] = "hf"
    path: str | None = None
    """The folder: config.json, and perhaps weights (*.safetensors) to start from."""
    context: Tokens = 128
    """Tokens of one sequence in training."""
    dropout: Dropout | None = None
    """None: as its config.json says."""


Model = MLP | CNN | ResNet | GPT | HF | Own

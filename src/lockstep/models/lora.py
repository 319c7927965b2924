"""LoRA: leave a model's weights as they are, and train a low-rank addition to some of its matrices.

    y = W x + (alpha / rank) B A x        W: (out, in), frozen;  A: (rank, in);  B: (out, rank), zero at first

Of an out x in matrix that is rank (out + in) trained elements, so gradients and optimizer state all but vanish. The
names of the model's own parameters stay; adapters stand beside them (`qkv.weight`, `qkv.lora_a`, `qkv.lora_b`).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.errors import UserError
from lockstep.models.replace import replace_module


class LoRALinear(nn.Linear):
    """A linear layer with an adapter. It takes over the plain layer's parameters."""

    def __init__(self, plain: nn.Linear, rank: int, alpha: float, frozen_dtype: torch.dtype | None = None) -> None:
        super().__init__(plain.in_features, plain.out_features, plain.bias is not None, device="meta")
        self.weight, self.bias = plain.weight, plain.bias
        keep_fusion(plain, self)
        self.rank, self.scale, self.frozen_dtype = rank, alpha / rank, frozen_dtype
        self.lora_a = nn.Parameter(plain.weight.new_empty(rank, plain.in_features))
        self.lora_b = nn.Parameter(plain.weight.new_empty(plain.out_features, rank))
        self.reset_adapter()
        self._cast_frozen()

    def reset_adapter(self) -> None:
        nn.init.kaiming_uniform_(self.lora_a, a=5**0.5)
        nn.init.zeros_(self.lora_b)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "lora_a"):  # not yet, when the plain layer's own constructor calls this
            self.reset_adapter()

    def _cast_frozen(self) -> None:
        for parameter in (self.weight, self.bias) if self.frozen_dtype is not None else ():
            if parameter is not None:
                parameter.data = parameter.data.to(self.frozen_dtype)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "LoRALinear":
        """What is frozen keeps its dtype when the model is moved to the run's."""
        super()._apply(fn, recurse)
        self._cast_frozen()
        return self

    def forward(self, x: Tensor) -> Tensor:
        base = F.linear(x.to(self.weight.dtype), self.weight, self.bias).to(x.dtype)
        return base + self.scale * F.linear(F.linear(x, self.lora_a), self.lora_b)

    def merged(self) -> nn.Linear:
        """A plain layer that computes the same."""
        plain = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        dtype = self.lora_a.dtype
        plain.weight = nn.Parameter(self.weight.detach().to(dtype) + self.scale * (self.lora_b @ self.lora_a).detach())
        if self.bias is not None:
            plain.bias = nn.Parameter(self.bias.detach().to(dtype))
        keep_fusion(self, plain)
        return plain


def keep_fusion(before: nn.Linear, after: nn.Linear) -> None:
    """A layer that is several in one (q, k and v) stays so, and begins as it did."""
    for name in ("parts", "heads", "initial_std"):
        if hasattr(before, name):
            setattr(after, name, getattr(before, name))


def add_lora(
    model: nn.Module,
    rank: int,
    alpha: float,
    targets: tuple[str, ...],
    frozen_dtype: torch.dtype | None = None,
) -> nn.Module:
    """Freeze the model and put adapters on the linear layers named in `targets` (the last part of their names)."""
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    chosen = {name: m for name, m in linears.items() if name.rpartition(".")[2] in targets}
    tied = _tied(model)
    missing = [t for t in targets if t not in {name.rpartition(".")[2] for name in chosen}]
    if missing or not chosen:
        there = ", ".join(sorted({name.rpartition(".")[2] for name in linears})) or "none at all"
        raise UserError(
            f"lora.targets has {missing[0] if missing else targets!r}; the model's linear layers are {there}"
        )
    for name, plain in chosen.items():
        if plain.weight in tied:
            raise UserError(f"lora.targets has {name}, whose weight is shared with another layer; take it out")
    model.requires_grad_(False)
    for name, plain in chosen.items():
        replace_module(model, name, LoRALinear(plain, rank, alpha, frozen_dtype))
    return model


def merge_lora(model: nn.Module) -> nn.Module:
    """Add the adapters to the weights: the model is again as it was, but for what it has learnt."""
    for name, module in list(model.named_modules()):
        if isinstance(module, LoRALinear):
            replace_module(model, name, module.merged())
    return model.requires_grad_(True)


def _tied(model: nn.Module) -> set[nn.Parameter]:
    seen: set[nn.Parameter] = set()
    tied: set[nn.Parameter] = set()
    for _, parameter in model.named_parameters(remove_duplicate=False):
        (tied if parameter in seen else seen).add(parameter)
    return tied

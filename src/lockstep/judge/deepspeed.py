"""DeepSpeed's ZeRO keeps weights and gradients in memory of its own: asked through DeepSpeed, whole, by all ranks.

Nothing of DeepSpeed is imported unless the script has an engine of it.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from lockstep.judge.piece import Piece, modules_of


def zero_of(engine: Any) -> Any:
    """The optimizer of an engine that keeps weights or gradients of its own; None: a plain one, or no engine."""
    if not any(one.__name__ == "DeepSpeedEngine" for one in type(engine).__mro__):
        return None
    zero = engine.optimizer
    return zero if type(zero).__module__.startswith("deepspeed.runtime") else None


def check(engine: Any) -> None:
    if engine.fp16_enabled():
        raise ValueError("DeepSpeed's fp16 keeps scaled gradients: judge in fp32 or bf16")
    if any(one.__name__ == "PipelineEngine" for one in type(engine).__mro__):
        raise ValueError("in DeepSpeed's pipeline a rank has layers by number, which have other names in the reference")


def zero_pieces(engine: nn.Module) -> Iterator[Piece]:
    """Every rank is given the whole of each parameter."""
    seen = set()
    for prefix, module in modules_of(engine):
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
                yield Whole(prefix + key, parameter, None, shape, trains=parameter.requires_grad)


class Whole(Piece):
    """Put together by DeepSpeed when it is read; all ranks must read it together."""

    def weight(self) -> Tensor:
        from deepspeed.utils import safe_get_full_fp32_param

        found = safe_get_full_fp32_param(self.parameter) if self.trains else self.parameter
        if found is None or found.numel() != self.count:
            raise ValueError(f"DeepSpeed does not show the whole of {self.name}")
        return found.detach().view(self.shape or ())

    def gradient(self) -> Tensor | None:
        from deepspeed.utils import safe_get_full_grad

        found = safe_get_full_grad(self.parameter)
        return None if found is None else found.detach().view(self.shape or ())

    def fill(self, whole: Tensor) -> None:
        from deepspeed.utils import safe_set_full_fp32_param

        if self.trains:  # the copy that the optimizer steps, and the model's own
            safe_set_full_fp32_param(self.parameter, whole.to(self.parameter.device))
        if hasattr(self.parameter, "ds_id"):
            from deepspeed import zero

            with zero.GatheredParameters([self.parameter], modifier_rank=0):
                self.parameter.copy_(whole)
        else:
            self.parameter.copy_(whole)


def groups_of(zero: Any) -> dict[int, int]:
    """Parameter -> its group's number."""
    if hasattr(zero, "sub_group_to_group_id"):  # stage 3
        return {id(p): zero.sub_group_to_group_id[i] for i, group in enumerate(zero.fp16_groups) for p in group}
    return {id(p): i for i, group in enumerate(zero.bit16_groups) for p in group}


def clipped(gradients: dict[str, Tensor | None], limit: float) -> dict[str, Tensor | None]:
    """As its step will clip them, which cannot be observed."""
    if limit <= 0:
        return gradients
    norm = sum(float(g.double().norm()) ** 2 for g in gradients.values() if g is not None) ** 0.5
    factor = min(1.0, limit / (norm + 1e-6))
    return {name: None if g is None else g * factor for name, g in gradients.items()}

"""AdamW whose two moments take two or four bytes of each weight, instead of eight.

A step, element by element:

1. decode      m and v from what is kept
2. update      m <- beta1 m + (1 - beta1) g, v <- beta2 v + (1 - beta2) g^2, and the weight by AdamW, all in fp32
3. round       m and v to what is kept

    bits   kept
    16     m and v in bf16
    8      one int16 for both. v in 10 bits: 0, or 2^-80 to 2^32, each code 8% above the last. m / sqrt(v), by which
           Adam moves a weight, and which is never large: a sign and 5 bits, 0, or 2^-6 to 2^5, each 29% above the last

Rounding is stochastic: up or down, with the probabilities that keep the mean. In a step v changes by a thousandth
(beta2 0.999), less than half the distance to the next code: rounding to the nearest would never change it.

# Note: random numbers without a generator

The random number of an element is a hash of what the element was before the step: its weight, its moments, the number
of the step. So it does not depend on which rank holds the element, and every layout rounds as one process does.
Replicas agree, and a checkpoint has no generator to save.
"""

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.errors import UserError
from lockstep.layout.region import local
from lockstep.parallel.optimizer.step import by_element, loss_of

LOW = 0xFFFF
"""A mask of 16 bits. Whole numbers are int32 throughout, whose products wrap around: a GPU has no units for int64."""


class Settings(NamedTuple):
    """Of a step; tensors without a dimension, on the parameters' device."""

    rate: Tensor
    beta1: Tensor
    beta2: Tensor
    eps: Tensor
    decay: Tensor
    skipped: Tensor
    """Not 0: nothing is to change."""


class Scale(NamedTuple):
    """0, and numbers that grow by one factor: code 1 is 2^first, code `most` 2^last."""

    first: float
    last: float
    most: int

    @property
    def distance(self) -> float:
        """Between two codes, as a power of two."""
        return (self.last - self.first) / (self.most - 1)

    def decoded(self, code: Tensor) -> Tensor:
        return torch.where(code > 0, torch.exp2(self.first + self.distance * (code - 1)), 0.0)

    def rounded(self, x: Tensor, random: Tensor) -> tuple[Tensor, Tensor]:
        """The code of x >= 0, or the next one, so that the mean is x; and its number. `random`: from 0 to below 1."""
        below = torch.floor((torch.log2(x) - self.first) * (1 / self.distance) + 1).clamp(0, self.most)
        low = self.decoded(below)
        high = torch.where(below > 0, low * 2**self.distance, 2**self.first)
        is_up = (x - low > random * (high - low)) & (below < self.most)
        return below + is_up, torch.where(is_up, high, low)


SQUARES, RATIOS = Scale(-80.0, 32.0, 1023), Scale(-6.0, 5.0, 31)


class LowBitAdamW(torch.optim.Optimizer):
    """AdamW with its state in 8 or 16 bits a number, in any loop and under any wrapper.

        optimizer = lockstep.LowBitAdamW(model.parameters(), lr=1e-3, bits=8)

    A weight's state takes 2 bytes (`bits` 8) or 4 (16), instead of 8.
    """

    takes_pieces = True
    """It may be given pieces of tensors."""
    skips_on_device = True
    """If `found_inf` is set, it leaves everything as it is, and the host need not know."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        bits: int = 8,
    ) -> None:
        if bits not in (8, 16):
            raise UserError(f"bits is {bits}, but it must be 8 or 16")
        if not all(0 <= beta < 1 for beta in betas):
            raise UserError(f"betas are {betas}, but each must be at least 0 and less than 1")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bits": bits})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = loss_of(closure)
        for group in self.param_groups:
            settings: dict[tuple[torch.device, torch.dtype], Settings] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    memory = local(parameter)
                    kind = memory.device, torch.promote_types(memory.dtype, torch.float32)
                    if kind not in settings:
                        settings[kind] = self._settings(group, *kind)
                    self._update(parameter, group["bits"], settings[kind])
        return loss

    def _settings(self, group: dict[str, Any], device: torch.device, dtype: torch.dtype) -> Settings:
        numbers = (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
        skipped: Any = getattr(self, "found_inf", None)  # as torch's gradient scaler passes it
        # Filled on the device: a copy from the host would be waited for.
        filled = (torch.full((), float(n), dtype=dtype, device=device) for n in (*numbers, 0.0))
        settings = Settings(*filled)
        return settings if skipped is None else settings._replace(skipped=skipped.to(device).reshape(()))

    def _update(self, parameter: nn.Parameter, bits: int, settings: Settings) -> None:
        memory, state = local(parameter), self.state[parameter]
        kept, update = (("moments",), update_8_bits) if bits == 8 else (MOMENTS, update_16_bits)
        if not state:
            dtype = torch.int16 if bits == 8 else torch.bfloat16
            state["step"] = torch.zeros((), dtype=torch.float32, device=memory.device)
            for key in kept:
                state[key] = torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format)
        state["step"] += settings.skipped == 0
        tensors = [memory, local(parameter.grad), *(local(state[key]) for key in kept)]
        by_element(update, tensors, state["step"], settings)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As every optimizer's; but torch would give the state the weights' dtype, in which codes mean nothing."""
        theirs = [group.get("bits") for group in state_dict["param_groups"]]
        if theirs != (ours := [group["bits"] for group in self.param_groups]):
            raise UserError(
                f"the state is of an optimizer with bits {theirs}, and this one has {ours}; load it into one like it"
            )
        super().load_state_dict(state_dict)
        numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        for number, parameter in zip(numbers, parameters, strict=True):
            for key, value in state_dict["state"].get(number, {}).items():
                device = local(parameter).device
                self.state[parameter][key] = value.detach().to(device, copy=True)


MOMENTS = ("exp_avg", "exp_avg_sq")
"""The names that AdamW's state has."""


def update_8_bits(weight: Tensor, gradient: Tensor, moments: Tensor, step: Tensor, settings: Settings) -> None:
    code = moments.to(torch.int32) & LOW
    v = SQUARES.decoded((code >> 6).to(settings.rate.dtype))
    ratio = RATIOS.decoded((code & 31).to(v.dtype)) * torch.where(code & 32 > 0, -1.0, 1.0)
    random = random_numbers(weight, code, step)
    m, v = moved(weight, gradient, ratio * v.sqrt(), v, step, settings)
    of_v, rounded = SQUARES.rounded(v, unit(upper(random)))
    ratio = torch.where(of_v > 0, m / rounded.sqrt(), 0.0)
    of_ratio, _ = RATIOS.rounded(ratio.abs(), unit(random & LOW))
    found = (of_v.to(torch.int32) << 6) | ((ratio < 0).to(torch.int32) << 5) | of_ratio.to(torch.int32)
    found = torch.where(settings.skipped > 0, code, found)
    moments.copy_(torch.where(found > 0x7FFF, found - 0x10000, found))  # an int16 has a sign


def update_16_bits(
    weight: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: Tensor, settings: Settings
) -> None:
    code = (bits_of(exp_avg) << 16) | bits_of(exp_avg_sq)
    random = random_numbers(weight, code, step)
    wide = settings.rate.dtype
    m, v = moved(weight, gradient, exp_avg.to(wide), exp_avg_sq.to(wide), step, settings)
    for kept, moment, part in ((exp_avg, m, upper(random)), (exp_avg_sq, v, random & LOW)):
        kept.copy_(torch.where(settings.skipped > 0, kept, rounded_to_bf16(moment.float(), part)))


def moved(
    weight: Tensor, gradient: Tensor, m: Tensor, v: Tensor, step: Tensor, settings: Settings
) -> tuple[Tensor, Tensor]:
    """Take AdamW's step, and return both moments behind it."""
    rate, beta1, beta2, eps, decay, skipped = settings
    gradient, before = gradient.to(m.dtype), weight.to(m.dtype)
    m = beta1 * m + (1 - beta1) * gradient
    v = beta2 * v + (1 - beta2) * gradient * gradient
    count = step.to(m.dtype)
    of_m, of_v = (1 - torch.exp2(count * torch.log2(beta)) for beta in (beta1, beta2))  # a power would be slow
    direction = m / of_m / ((v / of_v).sqrt() + eps)
    after = before - rate * (direction + decay * before)
    weight.copy_(torch.where(skipped > 0, weight, after.to(weight.dtype)))
    return m, v


def bits_of(x: Tensor) -> Tensor:
    """The 16 bits of a bf16."""
    return x.view(torch.int16).to(torch.int32) & LOW


def rounded_to_bf16(x: Tensor, random: Tensor) -> Tensor:
    """fp32, up or down by 16 random bits: what they carry into the upper 16 bits makes the next larger number."""
    up = (x.view(torch.int32) + random) >> 16 << 16
    return torch.where(x.isfinite(), up.view(torch.float32), x).to(torch.bfloat16)


def random_numbers(weight: Tensor, code: Tensor, step: Tensor) -> Tensor:
    """32 random bits for each element, from the upper half of its weight's fp32, its moments, and the step."""
    of_weight = upper(weight.float().view(torch.int32))
    return scrambled(scrambled(of_weight + (step.to(torch.int32) << 16)) ^ code)


def upper(x: Tensor) -> Tensor:
    """The upper 16 of 32 bits."""
    return (x >> 16) & LOW


def scrambled(x: Tensor) -> Tensor:
    """A hash of 32 bits: every bit that goes in changes half of those that come out."""
    for _ in range(2):
        x = (x ^ upper(x)) * 0x45D9F3B
    return x ^ upper(x)


def unit(bits: Tensor) -> Tensor:
    """16 bits as a number from 0 to below 1."""
    return bits.to(torch.float32) / 65536

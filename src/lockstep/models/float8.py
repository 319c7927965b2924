"""Linear layers that multiply in FP8: a sign, four bits of exponent, three of fraction (e4m3).

The matrix units of an H100 or H200 take two numbers in FP8 in the time of one in bf16. FP8 reaches from 2^-9 to 448
only: so a tensor is multiplied by a scale before it is rounded, and the product is divided by it. Scales are powers of
two, which round nothing themselves.

    y  = x W^T      both in FP8
    dx = dy W       both in FP8
    dW = dy^T x     scaling row: in the precision that the rest computes in; scaling tensor: both in FP8

    row       a scale for each row of a product: for each token, and for each output (in dx: each input) of the layer.
              What becomes of a token depends on no other token, so batches can be cut over ranks in any way
    tensor    one scale for a tensor: cheaper, but how a token is rounded depends on the largest number beside it.
              dy is in e5m2, which has more reach and less precision

Where there are no such units (a CPU, an older GPU, float64) what was rounded to FP8 is multiplied in the precision of
the rest: as exact, and slower.
"""

from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lockstep.errors import UserError
from lockstep.models.autocast import autocast_dtype, no_autocast
from lockstep.models.blocks import blocks_of

Scaling = Literal["row", "tensor"]

FORWARD, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {FORWARD: 448.0, GRADIENT: 57344.0}
SMALLEST = 1e-30
"""What a row's largest number is taken for at least: a row of zeros needs a scale too."""
EXPONENT = 0x7F800000
"""The bits of a float32 that make it a power of two."""
MULTIPLE = 16
"""The kernels take sizes that are multiples of it."""
UNITS = (8, 9)
"""GPUs from this compute capability on have matrix units for FP8."""


class Narrow(NamedTuple):
    """(rows, width) in FP8; values * scale is what it stands for."""

    values: Tensor
    scale: Tensor
    """(rows, 1), or of no dimension."""

    def transposed(self) -> "Narrow":
        """Of a tensor with one scale."""
        return Narrow(self.values.t().contiguous(), self.scale)

    def wide(self, dtype: torch.dtype) -> Tensor:
        return self.values.to(dtype) * self.scale.to(dtype)


def narrow(x: Tensor, scaling: Scaling, dtype: torch.dtype = FORWARD) -> Narrow:
    """x (rows, width), rounded to FP8 by one scale, or by one per row. What is not finite stays so."""
    if not x.numel():
        return Narrow(x.to(dtype), x.new_ones((len(x), 1) if scaling == "row" else (), dtype=torch.float32))
    largest = x.abs().amax(1, keepdim=True) if scaling == "row" else x.abs().amax()
    room = LARGEST[dtype] / largest.to(torch.float32).clamp(min=SMALLEST)
    factor = room.view(torch.int32).bitwise_and(EXPONENT).view(torch.float32)
    wide = torch.promote_types(x.dtype, torch.float32)
    values = (x.to(wide) * factor.to(wide)).clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype).contiguous()
    return Narrow(values, factor.reciprocal())


def product(a: Narrow, b: Narrow, dtype: torch.dtype, quick: bool = True) -> Tensor:
    """a b^T, in `dtype`. `quick`: the units may add up in fewer bits than fp32 has."""
    if dtype == torch.bfloat16 and a.values.numel() and has_units(a.values.device):
        # A private name of torch: 2.11 has no public one for every scaling.
        found: Tensor = torch._scaled_mm(
            a.values, b.values.t(), scale_a=a.scale, scale_b=b.scale.t(), out_dtype=dtype, use_fast_accum=quick
        )
        return found
    wide = torch.promote_types(dtype, torch.float32)
    return (a.wide(wide) @ b.wide(wide).t()).to(dtype)


@torch.compiler.assume_constant_result
def has_units(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= UNITS


class _Product(torch.autograd.Function):
    """x (rows, in), weight (out, in) -> (rows, out)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scaling: Scaling) -> Tensor:
        ctx.scaling = scaling
        given = narrow(x, scaling)
        # The weight itself is kept, and rounded again in backward: an engine that gathers weights frees them meanwhile.
        ctx.save_for_backward(weight, *([x] if scaling == "row" else given))
        return product(given, narrow(weight, scaling), x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        weight, *kept = ctx.saved_tensors
        wants_x, wants_weight, _ = ctx.needs_input_grad
        by_row = ctx.scaling == "row"
        incoming = narrow(dy, ctx.scaling, FORWARD if by_row else GRADIENT)
        dx = dw = None
        if wants_x:
            dx = product(incoming, narrow(weight.t(), ctx.scaling), dy.dtype, quick=by_row)
        if wants_weight and by_row:
            dw = dy.t() @ kept[0]
        elif wants_weight:
            dw = of_rows(incoming, Narrow(*kept), dy.dtype)
        return dx, None if dw is None else dw.to(weight.dtype), None


def of_rows(dy: Narrow, x: Narrow, dtype: torch.dtype) -> Tensor:
    """dy^T x, a sum over rows, of which the kernel wants a multiple."""
    missing = -len(x.values) % MULTIPLE
    if missing:
        dy, x = (Narrow(torch.cat([n.values, zero_rows(n.values, missing)]), n.scale) for n in (dy, x))
    return product(dy.transposed(), x.transposed(), dtype, quick=False)


def zero_rows(values: Tensor, count: int) -> Tensor:
    return torch.zeros(count, values.shape[1], device=values.device).to(values.dtype)


class Float8Linear(nn.Linear):
    """A linear layer with the parameters and names of a plain one."""

    scaling: Scaling = "row"

    def forward(self, input: Tensor) -> Tensor:
        y = self.product(input)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def product(self, x: Tensor) -> Tensor:
        """Without the bias."""
        x = x.to(autocast_dtype(x.device) or x.dtype)
        with no_autocast(x.device):
            y: Tensor = _Product.apply(x.reshape(-1, x.shape[-1]), self.weight, self.scaling)
        return y.view(*x.shape[:-1], self.weight.shape[0])

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, fp8 by {self.scaling}"


def in_float8(model: nn.Module, scaling: Scaling = "row") -> nn.Module:
    """Let the linear layers of the model's blocks multiply in FP8, in place: everything else, and layers whose sizes
    are no multiples of 16, stays as it is.

        layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
        layers = lockstep.in_float8(layers)
        with torch.autocast("cuda", torch.bfloat16):
            outputs = layers(torch.randn(8, 64))

    Under autocast in bf16, on a GPU that has units for FP8, and inside torch.compile it is fast; elsewhere it is slower
    than without. `scaling`: row, a scale for each row, and gradients of weights in bf16; or tensor, one scale for all.
    """
    if scaling not in get_args(Scaling):
        raise UserError(f"scaling is {scaling!r}, but it must be one of {', '.join(get_args(Scaling))}")
    fits, _ = linears_of_blocks(model)
    for layer in fits.values():
        layer.__class__, layer.scaling = Float8Linear, scaling
    return model


def fits_units(layer: nn.Linear) -> bool:
    """A subclass does something else beside, which must stay."""
    multiples = layer.in_features % MULTIPLE == 0 and layer.out_features % MULTIPLE == 0
    return type(layer) in (nn.Linear, Float8Linear) and multiples


def linears_of_blocks(model: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Linear layers by name: those that FP8's kernels take, and the others."""
    found = {
        f"{block}.{name}" if name else block: layer
        for block, module in blocks_of(model)
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear)
    }
    fits = {name: layer for name, layer in found.items() if fits_units(layer)}
    if not fits:
        raise UserError(
            f"{type(model).__name__} has no linear layer for fp8: it takes those of the blocks (modules in a "
            f"ModuleList or Sequential) whose sizes are multiples of {MULTIPLE}; use bf16"
        )
    return fits, {n: m for n, m in found.items() if n not in fits}

"""Context parallelism by PyTorch's own means: `torch.distributed.tensor.experimental.context_parallel`.

While it is entered, scaled_dot_product_attention is attention over all ranks' keys: ring attention in the same zig-zag
layout as ours (torch calls it head-tail). It must be entered in backward too. Inputs, targets and positions are cut by
us, so that batches and losses do not depend on who computes attention; torch is given a dummy buffer to cut instead.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lockstep.errors import UserError
from lockstep.layout import Layout
from lockstep.parallel.context.context_parallel import expanded
from lockstep.strategies.context import attention_of, cut_positions
from lockstep.strategies.native_mesh import native_mesh

CHUNK = 32
"""In positions: the memory-efficient kernel pads log-sum-exps to a multiple, and torch merges them as they are."""


def check_native_context(attention: str, device: str, precision: str, compiled: bool, pp: int) -> None:
    """Refuse what torch's has no kernels for, before any rank starts."""
    if attention != "ring":
        raise UserError(f"cp=...:native is a ring, and parallel.attention is {attention}; leave one of them out")
    if device != "cuda":
        raise UserError("cp=...:native has kernels for GPUs only, and these ranks compute on the CPU; leave native out")
    if precision == "fp64":
        raise UserError("cp=...:native has no kernel for fp64; use --precision fp32, or leave native out")
    if compiled or pp > 1:
        raise UserError("cp=...:native goes neither with train.compile nor with pp; leave one of them out")


def attend_by_torch(model: nn.Module, layout: Layout) -> "Entered":
    """Have a model work on this rank's positions. Returns what must be entered around forward and backward."""
    group = layout.group("cp")
    cut_positions(model, group, "ring")
    for part in attention_of(model):
        part.attend = causal_attention
    return Entered(layout)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`F.scaled_dot_product_attention` is looked up at each call, as torch's context may replace it: see `Entered`."""
    half = q.dtype in (torch.bfloat16, torch.float16)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION if half else SDPBackend.EFFICIENT_ATTENTION):
        return F.scaled_dot_product_attention(q, *expanded(q, k, v), is_causal=True)


class Entered:
    """Makes a new torch context at each call."""

    def __init__(self, layout: Layout) -> None:
        self._mesh: Any = native_mesh(layout, "cp")
        self._cut = torch.zeros(2 * layout.group("cp").size, device=layout.world.device)

    def __call__(self) -> AbstractContextManager[None]:
        from torch.distributed.tensor.experimental import context_parallel

        given = self._cut.clone()  # it leaves its part in there
        entered: AbstractContextManager[None] = context_parallel(
            self._mesh, buffers=[given], buffer_seq_dims=[0], no_restore_buffers={given}
        )
        return entered

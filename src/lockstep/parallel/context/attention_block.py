"""Attention of some queries to some keys, with what is needed to merge several such blocks.

A block returns its outputs and, for each query, the log of the sum of its exponentials (log-sum-exp): its weight
among all blocks. Backward of a block needs the merged outputs and log-sum-exps, and nothing else from the other blocks.
The kernels are those of torch's scaled_dot_product_attention, called directly because it does not return the
log-sum-exp: this is the only file that needs their names.
"""

from math import sqrt

import torch
from torch import Tensor

OPS = torch.ops.aten
Both = tuple[Tensor, Tensor]


def attention_block(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Both:
    """(outputs, log-sum-exp). q: (batch, heads, queries, dim); k, v: (batch, heads, keys, dim)."""
    if q.device.type == "cpu":
        out, lse = OPS._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
        return out, lse
    if has_flash(q):
        out, lse, *_ = OPS._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
        return out, lse
    scores = masked_scores(q, k, causal)
    lse = scores.logsumexp(-1)
    return (scores - lse.unsqueeze(-1)).exp() @ v, lse


def attention_block_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v. `out` and `lse` are those of all blocks merged."""
    if q.device.type == "cpu":
        for_q, for_k, for_v = OPS._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, q, k, v, out, lse, 0.0, causal
        )
        return for_q, for_k, for_v
    if has_flash(q):
        seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # no dropout: no random numbers
        offset = torch.zeros((), dtype=torch.uint64, device=q.device)
        lengths = (None, None, q.shape[2], k.shape[2])  # all sequences are of one length
        for_q, for_k, for_v = OPS._scaled_dot_product_flash_attention_backward(
            gradient, q, k, v, out, lse, *lengths, 0.0, causal, seed, offset
        )
        return for_q, for_k, for_v
    return backward_by_hand(gradient, q, k, v, out, lse, causal)


def backward_by_hand(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The same by hand, where there is no kernel."""
    weights = (masked_scores(q, k, causal) - lse.unsqueeze(-1)).exp()
    for_v = weights.transpose(-1, -2) @ gradient
    for_scores = weights * (gradient @ v.transpose(-1, -2) - (gradient * out).sum(-1, keepdim=True))
    scale = 1 / sqrt(q.shape[-1])
    return for_scores @ k * scale, for_scores.transpose(-1, -2) @ q * scale, for_v


def has_flash(q: Tensor) -> bool:
    return q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


def masked_scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    scores = q @ k.transpose(-1, -2) / sqrt(q.shape[-1])
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return scores


def joined(first: Both, second: Both) -> Both:
    """Merge two blocks of the same queries, each weighted by the sum of its exponentials."""
    (out_a, lse_a), (out_b, lse_b) = first, second
    lse = torch.logaddexp(lse_a, lse_b)
    weight_a, weight_b = ((part - lse).exp().unsqueeze(-1) for part in (lse_a, lse_b))
    return out_a * weight_a + out_b * weight_b, lse

"""The matrix with orthonormal rows (or columns) that is nearest to a given one, nearly, by Newton and Schulz.

Of a matrix U S V' (its singular value decomposition), each round takes a singular value s to a s + b s^3 + c s^5, and
leaves U and V as they are. With Muon's coefficients five rounds bring all values between 0.7 and 1.2, small ones within
the first rounds: their slope at zero is 3.4. Only products are needed, so it runs in bf16 on a GPU.
"""

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ROUNDS = 5
LEAST_NORM = 1e-7


def orthogonalized(matrices: Tensor, rounds: int = ROUNDS) -> Tensor:
    """(..., rows, columns): of each. A matrix of zeros stays as it is."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices  # the smaller of both products
    x = (x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=LEAST_NORM)).reshape(x.shape[:-2].numel(), *x.shape[-2:])
    for _ in range(rounds):
        gram = torch.bmm(x, x.mT)
        both = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # sums are products' epilogues
        x = torch.baddbmm(x, both, x, beta=a)
    return (x.mT if tall else x).reshape(matrices.shape)


def compute_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """bf16 where matrix units are fast in it; the iteration corrects its own rounding."""
    return torch.bfloat16 if device.type == "cuda" and dtype != torch.float64 else dtype

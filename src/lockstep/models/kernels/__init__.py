"""Kernels of our own for a GPU, in Triton, for what a compiler does in more passes over memory than it needs.

Each is a file of its own and computes in fp32; where it cannot run, the model's plain PyTorch does the same.
"""

from importlib.util import find_spec

import torch
from torch import Tensor

HAS_TRITON = find_spec("triton") is not None  # it comes with PyTorch for CUDA


def usable_on(tensor: Tensor) -> bool:
    """The kernels can stand in for PyTorch's here: on a GPU, and in no higher precision than fp32."""
    return HAS_TRITON and tensor.is_cuda and tensor.dtype != torch.float64

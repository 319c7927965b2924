"""Autocast for functions of our own: it looks at torch's only."""

import torch
from torch import Tensor


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What matrix products are computed in at the moment; None: in what they are given."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def as_autocast(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """As it would give them to a matrix product; what is computed of them then should be so under `no_autocast`."""
    dtype = autocast_dtype(next(t for t in tensors if t is not None).device)
    return tensors if dtype is None else tuple(None if t is None else t.to(dtype) for t in tensors)


def no_autocast(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, enabled=False)

"""What one sample costs."""

from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lockstep.data.batch import called_with
from lockstep.data.dataset import DataSpec

SAMPLES = 2
"""Of the batch that is tried: a BatchNorm takes no single one."""


def try_out(model: nn.Module, spec: DataSpec, device: str) -> Any:
    """The outputs for some samples, on a device where the model lies."""
    with torch.no_grad(), torch.device(device):
        return called_with(model, spec.inputs(SAMPLES, device))


def forward_flops(model: nn.Module, spec: DataSpec) -> int:
    """Multiplications and additions (2 per multiply-add) of one sample's forward pass, matrix products only: what the
    model says, or what is counted on the meta device, where it must be then. 0 where it does what that device cannot.
    """
    says: Any = getattr(model, "forward_flops", None)
    if says is not None:
        return int(says())
    counter = FlopCounterMode(display=False)
    try:
        with counter:
            try_out(model, spec, "meta")
    except Exception:  # of a user's code; whether the model can run at all is checked elsewhere (`user_model.py`)
        return 0
    return int(counter.get_total_flops()) // SAMPLES


def training_flops(model: nn.Module, spec: DataSpec) -> int:
    """Of one sample's forward and backward pass: backward costs two products for each of forward's."""
    return 3 * forward_flops(model, spec)

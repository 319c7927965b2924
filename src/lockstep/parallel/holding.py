"""What this rank holds and trains of a model in the user's own loop: plain, cut, or in any of the wrappers.

Keyed by names in the whole model, so that ranks can compare: checkpoints and the norm of the gradient derive from it.
"""

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.layout.region import Held, region_of


class Holder:
    """What every wrapper of ours reports about its model. Plain and cut models, and PyTorch's wrappers, need not."""

    module: nn.Module

    def held(self) -> dict[str, Held]:
        """Every parameter, or piece of one, that lies in this rank's memory."""
        return held_in(self.module)

    def trained(self) -> dict[str, Held]:
        """What has gradients on this rank after backward."""
        return self.held()


def held_in(module: nn.Module) -> dict[str, Held]:
    return {name: Held(p, region_of(p)) for name, p in module.named_parameters()}


def unwrapped(model: Any) -> nn.Module:
    """The module inside a wrapper. Checked by type, as a plain model may have a submodule called `module` too."""
    found: nn.Module = model.module if isinstance(model, Holder | DistributedDataParallel) else model
    return found


def held_by(model: Any) -> dict[str, Held]:
    return model.held() if isinstance(model, Holder) else held_in(unwrapped(model))


def trained_by(model: Any) -> dict[str, Held]:
    return model.trained() if isinstance(model, Holder) else held_in(unwrapped(model))

"""Local SGD and DiLoCo behind the common face."""

from typing import Any

import torch
from torch import Tensor, nn

from lockstep.comm.collectives import all_reduce
from lockstep.comm.hosts import any_rank
from lockstep.parallel import LocalSGD as Averager
from lockstep.strategies.base import MakeOptimizer, Strategy


class LocalSGD(Strategy):
    """Ranks differ between two meetings, so this equals one process only for K = 1 and a linear optimizer."""

    equal_to_one_process = False

    def prepare(self, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        self.model = self.module = self.place(model)
        self.averager = Averager(
            self.model,
            self.parallel.sync_every,
            self.parallel.outer_lr,
            self.parallel.outer_momentum,
            self.data_group,
        )
        self.optimizer = make_optimizer(self.trainable())

    def after_optimizer_step(self) -> None:
        self.averager.after_step()

    def finish(self) -> None:
        if self.averager.steps % self.averager.every:
            self.averager.meet()

    def agree_finite(self, finite: bool) -> bool:
        """Gradients are each rank's own here: one NaN must stop all, or the ranks would meet at different steps."""
        return not any_rank(not finite, self.world.device, self.data_group)

    def skips_on_device(self) -> bool:
        return False

    def full_gradients(self) -> dict[str, Tensor]:
        """The ranks' own gradients differ; what can be held against one process is their mean."""
        mine = super().full_gradients()
        flat = torch.cat([g.reshape(-1) for g in mine.values()])
        parts = all_reduce(flat / self.world.size, purpose="check").split([g.numel() for g in mine.values()])
        return {name: part.view_as(mine[name]) for name, part in zip(mine, parts, strict=True)}

    def before_saving(self) -> None:
        """Every rank saves its own."""

    def own_state(self) -> dict[str, Any]:
        """Between two meetings the ranks' weights, and always their optimizers' states, differ."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "averager": self.averager.state_dict(),
        }

    def load_own_state(self, state: dict[str, Any]) -> None:
        if "averager" in state:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.averager.load_state_dict(state["averager"])

    def state_dict(self) -> dict[str, Any]:
        """The model that another number of ranks could go on with is the mean."""
        state = super().state_dict()
        for name, value in state.items():
            if name.startswith("model.") and value.is_floating_point() and self.dims.data > 1:
                mean = all_reduce(value.clone(), group=self.data_group, purpose="check")
                state[name] = mean.div_(self.dims.data)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        named = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        with torch.no_grad():
            for name in [n for n in state if n.startswith("model.")]:
                named[name.removeprefix("model.")].copy_(state[name])
        self.averager.restart()
        super().load_state_dict({name: value for name, value in state.items() if not name.startswith("model.")})

"""Local SGD and DiLoCo: ranks train apart, and average their parameters every few steps."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.comm.collectives import all_reduce
from lockstep.comm.hosts import any_rank
from lockstep.config import Parallel
from lockstep.errors import UserError
from lockstep.layout import Held
from lockstep.parallel import LocalSGD as Averager
from lockstep.parallel.data.exchange import Exchange
from lockstep.parallel.data.law import apart
from lockstep.parallel.data.local_sgd import CHUNK_BYTES, check_settings
from lockstep.parallel.law import Sent
from lockstep.strategies.engine import Engine
from lockstep.strategies.facts import Facts, Law
from lockstep.strategies.model_sizes import ModelSizes
from lockstep.strategies.state import RegionState

DILOCO_LR = 0.7
VARIANTS: dict[str, dict[str, Any]] = {
    "diloco": {"outer_lr": DILOCO_LR},
    "streaming": {"outer_lr": DILOCO_LR, "fragments": 4, "outer_delay": 1, "outer_bits": 4},
    "sparse": {"outer_lr": 1.0, "outer_momentum": 0.0, "outer_density": 1 / 32, "outer_bits": 2},
    "gossip": {"outer_lr": DILOCO_LR, "gossip": True},
}
"""What each sets, where nothing else was asked for."""


SENDS = {  # by (gossip, the largest only, few bits)
    (False, False, False): "2Ψ(n-1)/(nK)",
    (False, False, True): "2Ψ(n-1)/(nK), in few bits",
    (False, True, False): "(n-1) k (value, index) / K",
    (False, True, True): "(n-1) k (value, index) / K",
    (True, False, False): "2Ψ/K, to one rank",
}


def exchange_of(parallel: Parallel) -> Exchange:
    return Exchange(parallel.outer_bits, parallel.outer_density, parallel.gossip)


class LocalSGD(Engine):
    """Ranks differ between two averages, so this equals one process only for K = 1 and a linear optimizer."""

    variants = tuple(VARIANTS)
    model_axes = ("cp", "tp")
    host_decides = True
    averages_weights = False  # ranks train apart
    reports_norm = False  # each rank's own
    sends_after_step = True

    @classmethod
    def variant(cls, parallel: Parallel, option: str) -> Parallel | None:
        if option not in VARIANTS:
            return None
        usual = Parallel()
        open_ = {key: v for key, v in VARIANTS[option].items() if getattr(parallel, key) == getattr(usual, key)}
        if "outer_delay" in open_ and parallel.sync_every == 1:
            del open_["outer_delay"]
        return replace(parallel, **open_)

    @classmethod
    def check(cls, parallel: Parallel, precision: str, compiled: bool) -> None:
        has_outer = parallel.outer_lr > 0
        if parallel.tp > 1 and exchange_of(parallel).keeps:
            raise UserError(
                f"parallel.outer_bits and outer_density do not go with parallel.tp {parallel.tp}: ranks of tp would "
                f"round what they share differently; leave one out"
            )
        check_settings(parallel.sync_every, parallel.fragments, parallel.outer_delay, exchange_of(parallel), has_outer)

    @classmethod
    def facts(cls, parallel: Parallel) -> Facts:
        outer = "DiLoCo: ranks train apart, an outer step" if parallel.outer_lr else "ranks train apart, and average"
        exchange = exchange_of(parallel)
        parts = [
            "in pairs" if exchange.gossip else "",
            f"in {parallel.fragments} fragments" if parallel.fragments > 1 else "",
            f"the largest {exchange.density:.1%}" if exchange.density < 1 else "",
            f"{exchange.bits} bits" if exchange.bits < 32 else "",
            f"{parallel.outer_delay} late" if parallel.outer_delay else "",
        ]
        # With lr 1 and no momentum DiLoCo's outer step lands on the mean.
        outer_lr = 1.0 if parallel.outer_lr else 0.0
        equal = replace(parallel, sync_every=1, outer_lr=outer_lr, outer_momentum=0.0, outer_delay=0)
        equal = replace(equal, outer_bits=32, outer_density=1.0, gossip=False)
        return Facts(
            says=", ".join([f"{outer} every {parallel.sync_every} steps", *filter(None, parts)]),
            sends=SENDS[exchange.gossip, exchange.density < 1, exchange.bits < 32],
            law=Law("equal at K=1, simulated at K=2", equal, linear_only=True, trains_apart=True),
            averages_every=parallel.sync_every,
            advice=(f"--parallel.sync-every {2 * parallel.sync_every} (weights are averaged half as often)",),
        )

    @classmethod
    def traffic(cls, sizes: ModelSizes, parallel: Parallel, ranks: int) -> Sent:
        """Between two averages of the same parameters."""
        exchange, itemsize = exchange_of(parallel), sizes.itemsize
        times = 2 if exchange.gossip and parallel.outer_lr else 1  # where ranks began travels as well
        return apart(
            sizes.sizes,
            parallel.fragments,
            itemsize,
            CHUNK_BYTES / 1024**2,
            lambda elements: exchange.sent(times * elements, itemsize, ranks),
        )

    def wrap(self, stage: nn.Module) -> None:
        parallel = self.parallel
        self.model = self.module = stage
        self.averager = Averager(
            stage,
            parallel.sync_every,
            parallel.outer_lr,
            parallel.outer_momentum,
            self.layout.gradient,
            fragments=parallel.fragments,
            delay=parallel.outer_delay,
            bits=parallel.outer_bits,
            density=parallel.outer_density,
            gossip=parallel.gossip,
        )
        self.optimizer = self.options.make_optimizer(self.trainable())

    def after_step(self) -> None:
        self.averager.after_step()

    def finish(self) -> None:
        if not self.averager.is_one_model:
            self.averager.average()

    def agree_finite(self, finite: bool) -> bool:
        """Gradients are not reduced here: one NaN must make all ranks skip, or they average at different steps."""
        return not any_rank(not finite, self.layout.world.device, self.layout.gradient)

    def gradients(self) -> dict[str, Held]:
        """Gradients differ between ranks; only their mean can be compared with one process."""
        mine = super().gradients()
        means = {}
        for name, held in mine.items():
            mean = all_reduce(held.tensor / self.layout.gradient.size, group=self.layout.gradient, purpose="check")
            means[name] = Held(mean, held.region)
        return means

    def local_state(self) -> dict[str, Any]:
        """Between two averages the ranks' weights, and always their optimizers' states, differ."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "averager": self.averager.state_dict(),
        }

    def load_local_state(self, state: dict[str, Any]) -> None:
        if "averager" in state:
            self.model.load_state_dict(state["model"])
            saved = state["optimizer"]
            by_number = {int(number): values for number, values in saved["state"].items()}  # text, in older checkpoints
            self.optimizer.load_state_dict({**saved, "state": by_number})
            self.averager.load_state_dict(state["averager"])

    def make_state(self) -> "LocalState":
        return LocalState(self)


class LocalState:
    """Every rank saves its own state; another number of ranks continues from the mean of the models."""

    def __init__(self, engine: LocalSGD) -> None:
        self.engine, self._ordinary = engine, RegionState(engine)

    def before_saving(self) -> None:
        """Nothing: ranks are meant to differ."""

    def state_dict(self) -> dict[str, Any]:
        state, group = self._ordinary.state_dict(), self.engine.layout.gradient
        for name, value in state.items():
            tensor = value.tensor if isinstance(value, Held) else value
            if name.startswith("model.") and tensor.is_floating_point() and group.size > 1:
                mean = all_reduce(tensor.clone(), group=group, purpose="check").div_(group.size)
                state[name] = replace(value, parameter=mean) if isinstance(value, Held) else mean
        return state

    def to_load(self, saved: set[str]) -> dict[str, Any]:
        return self._ordinary.to_load(saved)

    def load(self, state: dict[str, Any]) -> None:
        model = self.engine.model
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        with torch.no_grad():
            for name in [n for n in state if n.startswith("model.")]:
                value, mine = state[name], named[name.removeprefix("model.")]
                mine.copy_(value.tensor.view(mine.shape) if isinstance(value, Held) else value)
        self.engine.averager.restart()
        self._ordinary.load({name: value for name, value in state.items() if not name.startswith("model.")})

    def full_state_dict(self) -> dict[str, Tensor]:
        return self._ordinary.full_state_dict()

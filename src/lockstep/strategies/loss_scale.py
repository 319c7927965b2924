"""The loss scale of fp16: small gradients would vanish, so the loss is multiplied before backward.

PyTorch's GradScaler looks for gradients in `p.grad` of an optimizer's parameters, where sharded strategies have none;
so the strategies keep the scale themselves, by the same rule.
"""

from dataclasses import asdict, dataclass


@dataclass
class LossScale:
    """A factor that keeps fp16 gradients from vanishing: halved at an overflow, doubled after a while without."""

    scale: float = 2.0**12
    growth_interval: int = 2000
    """Steps without an overflow after which the scale is doubled."""
    good_steps: int = 0

    def update(self, stepped: bool) -> None:
        """After each step: halve when it overflowed, double when it has not for long. Alike on every rank."""
        if not stepped:
            self.scale, self.good_steps = self.scale * 0.5, 0
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.scale, self.good_steps = self.scale * 2.0, 0

    def state_dict(self) -> dict[str, float]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])

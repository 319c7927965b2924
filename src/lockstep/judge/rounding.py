"""How much of a difference is rounding: measured on the reference, which has run a second time, its batch in another
order and its weights moved by their last bit.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lockstep.apart import distance, norm_of, scale_of
from lockstep.judge.assemble import Part, Place, Side, Tensors, Wholes
from lockstep.judge.inputs import Samples
from lockstep.judge.verdict import Verdict, cannot

TIMES = 20.0
"""A difference counts when it is this many times what rounding makes."""
FLOOR = {"float64": 1e-10, "float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3}
"""Relative to the tensor's norm: below it a difference is rounding, whatever the second run says."""
SMALL = 0.01
"""Of the norm of all tensors together: a smaller tensor is measured by this."""
WEIGHTS_FLOOR = 1e-3
"""Of the step's change of a weight."""
COARSE = 5.0
"""Where gradients have few digits, this many times their tolerance: an optimizer divides by their size."""
SIGNIFICANT = 0.01
"""Of a gradient's root mean square: elements below it have a sign by accident, and Adam moves them by it."""
UNSTABLE = 0.05
"""Where the reference differs by so much from itself, it cannot be compared with."""
UNSTABLE_COARSE = 500.0
"""Where it computes in few digits: so many times their tolerance, of `UNSTABLE`."""
NONE = 1e-300
"""The tolerance of --strict: of bits."""


@dataclass
class Change:
    """What a step makes of a weight in the reference."""

    expected: Tensor
    sure: Tensor | None
    """1 where it is more than an accident of rounding, else 0; None: everywhere."""
    allowed: float
    """How far another change may be from it."""

    def seen(self, part: Part, change: Tensor) -> Tensor:
        """What of a rank's change is compared."""
        return change if self.sure is None else change * part.of(self.sure)


class Rounding:
    """Of the reference."""

    def __init__(self, reference: Side, again: Side | None, strict: bool) -> None:
        self.reference, self.again, self.strict = reference, again, strict

    def tolerance(self, place: Place, name: str, whole: Tensor, parts: list[Part]) -> float:
        """Of a gradient, relative to `scale`."""
        if self.strict:
            return NONE
        dtype = parts[0].stored.dtype if parts[0].stored else ""
        return max(FLOOR.get(dtype, FLOOR["float32"]), self.floor(place), TIMES * self.noise(place, name, whole))

    def scale(self, place: Place, whole: Tensor) -> float:
        """What the difference of a gradient is relative to."""
        return scale_of(whole, self._totals[place], SMALL)

    def floor(self, place: Place) -> float:
        """Of the coarsest type that the reference computes in."""
        event = next(iter(self.reference.events[place].values()))
        return FLOOR.get(event.get("computes") or "float32", FLOOR["float32"])

    def noise(self, place: Place, name: str, whole: Tensor) -> float:
        """How far rounding moves a gradient."""
        again = self._again(place, "gradients", name)
        return 0.0 if again is None else distance(again, whole) / self.scale(place, whole)

    def change(self, place: Place, name: str, before: Tensors, after: Tensors) -> Change:
        """`before`, `after`: the reference's weights around the step."""
        whole = after.whole(name)
        sure = None if self.strict else self.significant(place, name)
        change = only(sure, whole - before.whole(name))
        if self.strict:
            return Change(change, None, 0.0)
        now, past = self._again(place, "weights", name), self._again(place, "before", name)
        noise = 0.0 if now is None or past is None else distance(only(sure, now - past), change)
        floor = self.floor(place)
        share = max(WEIGHTS_FLOOR, COARSE * floor if floor > WEIGHTS_FLOOR else 0.0)
        last_bits = 4 * coarseness(after.parts[name][0]) * float(whole.norm())
        return Change(change, sure, max(share * float(change.norm()), TIMES * noise, last_bits))

    def significant(self, place: Place, name: str) -> Tensor | None:
        """1 where the gradient is more than rounding at every step so far, or nothing at all; else 0."""
        number, step = place
        sure: Tensor | None = None
        for earlier in range(1, step + 1):
            tensors = self.reference.tensors((number, earlier), "gradients")
            whole = tensors.whole_if(name) if name in tensors else None
            if whole is None:
                continue
            again = self._again((number, earlier), "gradients", name)
            root = max(whole.numel(), 1) ** 0.5
            typical, wobble = float(whole.norm()) / root, 0.0 if again is None else distance(again, whole) / root
            absent = whole == 0 if again is None else (whole == 0) & (again == 0)
            now = ((whole.abs() >= max(SIGNIFICANT * typical, TIMES * wobble)) | absent).double()
            sure = now if sure is None else sure * now
        return sure

    def unstable(self, place: Place) -> Verdict | None:
        """The reference is not itself when it runs again."""
        if self.again is None or not self.again.complete(place):
            return None
        wholes = Wholes(self.reference.tensors(place, "gradients"))
        moved = sum((self.noise(place, n, whole) * self.scale(place, whole)) ** 2 for n, whole in wholes.items()) ** 0.5
        if moved <= UNSTABLE * max(1.0, UNSTABLE_COARSE * self.floor(place)) * self._totals[place]:
            return None
        if any(self.reference.facts("dropout")):
            return cannot("the model has dropout, and no two runs drop the same: judge with --no-dropout")
        if Samples(self.reference, self.again, place).wrong:
            return cannot("the reference reads other samples each time it runs: give it a seed")
        return cannot(
            f"the reference is not itself when it runs again: its gradients at step {place[1]} differ by "
            f"{moved / self._totals[place]:.0%}; is something random drawn without a seed?"
        )

    @cached_property
    def _totals(self) -> dict[Place, float]:
        """The norm of all gradients."""
        places = self.reference.events
        return {place: norm_of(Wholes(self.reference.tensors(place, "gradients")).values()) for place in places}

    def _again(self, place: Place, kind: str, name: str) -> Tensor | None:
        """The same in the second run."""
        if self.again is None or not self.again.complete(place):
            return None
        tensors = self.again.tensors(place, kind)
        return tensors.whole_if(name) if name in tensors else None


def only(sure: Tensor | None, change: Tensor) -> Tensor:
    return change if sure is None else change * sure


def coarseness(part: Part) -> float:
    dtype = getattr(torch, part.stored.dtype) if part.stored else torch.float32
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0

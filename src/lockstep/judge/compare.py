"""Step by step, in the order in which one thing follows from another; the first that differs is the verdict.

    1 weights before the step    3 the optimizer    5 the norm             7 copies of one thing
    2 samples                    4 gradients        6 weights after it     8 buffers

What differs is held against what rounding does to the reference itself: it has run a second time, its batch in another
order and its weights moved by their last bit.
"""

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from math import isclose, isfinite, prod
from typing import Any

import torch
from torch import Tensor

from lockstep.apart import distance, norm_of, scale_of
from lockstep.judge.assemble import Part, Place, Side, Tensors, Wholes, align
from lockstep.judge.causes import Cause, cause_of_gradients, cause_of_loss, ledger_of
from lockstep.judge.verdict import DIFFERS, EQUAL, Verdict, cannot
from lockstep.layout.region import Box, Region, uncovered

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
IGNORED = {"foreach", "fused", "capturable", "differentiable", "initial_lr", "name", "param_names"}
"""Settings of an optimizer that say how it computes, not what."""
UNSTABLE = 0.05
"""Where the reference differs by so much from itself, it cannot be compared with."""
LOOSEST = 0.3
"""A tolerance that is wider sees nothing: half a gradient is off by 0.5."""
DROPPED = ("gradient", "norm", "weights", "loss")
"""What differs where ranks drop other elements than the reference."""


@dataclass
class Judgement:
    """The comparison of two runs, and of the reference with itself."""

    reference: Side
    again: Side | None
    """The second run of the reference."""
    candidate: Side
    strict: bool = False
    notes: list[str] = field(default_factory=list)
    sizes: dict[tuple[str, str], dict[int, float]] = field(default_factory=dict)
    """(kind, name) -> step -> difference over tolerance; for the page."""
    unsure: set[str] = field(default_factory=set)
    """Tensors that rounding moves by too much to see anything."""

    def __post_init__(self) -> None:
        align(self.reference, self.candidate)
        if self.again is not None:
            align(self.reference, self.again)

    def verdict(self) -> Verdict:
        for side, name in ((self.reference, "reference"), (self.candidate, "candidate")):
            if (missing := side.cannot()) is not None:
                return cannot(f"the {name} could not be watched: {missing}")
        found = self.start()
        places = [place for place in self.reference.events if self.candidate.complete(place)]
        mine, theirs = ({number for number, _ in side.events} for side in (self.candidate, self.reference))
        if found is None and len(mine) > len(theirs):
            return cannot(f"the reference has {len(theirs)} optimizer(s), and the candidate {len(mine)}")
        if found is None and not places:
            return cannot("the candidate has taken no step that the reference has taken too")
        for place in places:
            if found is not None:
                break
            found = self.at(place)
        if found is None:
            found = self.unseen(places) or Verdict(
                EQUAL, why="every step is the reference's, within what rounding makes"
            )
        elif found.what in DROPPED and any([*self.reference.facts("dropout"), *self.candidate.facts("dropout")]):
            found = cannot("the model has dropout, and no two runs drop the same: judge with --no-dropout")
        found.notes = self.notes + found.notes
        found.steps = max((step for _, step in places), default=0) if found.verdict == EQUAL else (found.step or 1)
        return found

    def unseen(self, places: list[Place]) -> Verdict | None:
        """Why what was compared is not all."""
        missing = [place for place in self.reference.events if place not in places]
        if missing:
            number, step = missing[0]
            optimizer = f" of optimizer {number + 1}" if any(n for n, _ in self.reference.events) else ""
            return cannot(
                f"the candidate did not take step {step}{optimizer} on all ranks, and the reference did; what both "
                "took is equal"
            )
        if self.unsure:
            return cannot(
                f"rounding alone moves {listing(sorted(self.unsure))} by so much that nothing can be seen in it: judge "
                "in higher precision, or with a larger batch"
            )
        return None

    def measure_all(self) -> None:
        """Of all steps, also those after the first that differs: into `sizes`."""
        for place in self.reference.events:
            if self.candidate.complete(place):
                self.gradients(place)
                self.weights(place)

    # ---- before the first step -------------------------------------------------------------------------------

    def start(self) -> Verdict | None:
        mine, theirs = self.candidate.start(), self.reference.start()
        if (unlike := self.unlike(mine, theirs)) is not None:
            return cannot(unlike)
        apart = disagreeing(mine)
        if apart:
            name, ranks = next(iter(apart.items()))
            return self.differs(
                1,
                "initial weights",
                list(apart),
                ranks,
                why=f"ranks begin with different weights: {name} is another on {words_of(ranks)}",
                look_at="the seed before the model is made, or the broadcast of rank 0's weights (DDP does it)",
            )
        off = self.off(mine, theirs, 1e-6)
        if not off:
            return None
        return self.differs(
            1,
            "initial weights",
            list(off),
            sorted({rank for ranks in off.values() for rank in ranks}),
            why="the candidate begins with other weights than the reference",
            look_at="the seed, or what makes the weights; --same-start gives it the reference's",
        )

    def unlike(self, mine: Tensors, theirs: Tensors) -> str | None:
        """Why the two cannot be one model."""
        if missing := [name for name in theirs if name not in mine]:
            return f"parameters of the reference that no rank of the candidate has: {listing(missing)}"
        if more := [name for name in mine if name not in theirs]:
            return f"parameters that the reference does not have: {listing(more)}"
        for name in theirs:
            if (problem := unfitting(mine.parts[name], theirs.whole(name))) is not None:
                return f"{name} {problem}; say what a rank holds of it with lockstep.judge.region"
        return None

    def off(self, mine: Tensors, theirs: Tensors, tolerance: float) -> dict[str, list[int]]:
        """Name -> ranks that hold something else."""
        found: dict[str, list[int]] = {}
        for name in theirs:
            if name not in mine or same_digests(mine.parts[name], theirs.parts[name]):
                continue
            whole = theirs.whole(name)
            if unfitting(mine.parts[name], whole) is not None:
                continue  # a buffer whose size depends on the batch
            for part in mine.parts[name]:
                expected, got = part.of(whole), mine.read(part)
                floor = max(tolerance, coarseness(theirs.parts[name][0]) / 4)
                if distance(got, expected) > (0 if self.strict else floor * max(float(expected.norm()), 1e-30)):
                    found.setdefault(name, []).append(part.rank)
        return found

    # ---- one step --------------------------------------------------------------------------------------------

    def at(self, place: Place) -> Verdict | None:
        found = self.moved_between(place)
        if found is not None:
            return found
        inputs = Samples(self.reference, self.candidate, place)
        settings = self.settings(place)
        found = self.gradients(place) if settings is None or inputs.wrong else None
        if found is None or found.what != "gradient":
            found = settings or found
        if found is None:
            found = self.norm(place) or self.weights(place) or self.buffers(place) or self.loss(place)
        follows = found is not None and found.what in ("gradient", "norm", "weights", "loss", "buffers")
        if (follows or inputs.certain) and (skipped := self.skipped(place)) is not None:
            return skipped
        # Other rows that give the same gradients are padded otherwise, and no other samples.
        if inputs.certain or (follows and inputs.wrong):
            return self.differs(
                place[1], "input", [], inputs.ranks, why=inputs.wrong, look_at="the sampler: rank, ranks, seed, epoch"
            )
        return found

    def moved_between(self, place: Place) -> Verdict | None:
        """Since the end of the step before."""
        number, step = place
        last = (number, step - 1)
        if step == 1 or last not in self.candidate.events:
            return None
        before, after = self.candidate.tensors(place, "before"), self.candidate.tensors(last, "weights")
        moved: dict[str, list[int]] = {}
        for name in before:
            if name in after:
                was = after.digests(name)
                ranks = [rank for rank, digest in before.digests(name).items() if was.get(rank) != digest]
                if ranks:
                    moved[name] = ranks
        if not moved or self.reference.tensors(place, "before").parts.keys() != before.parts.keys():
            return None
        theirs_now = self.reference.tensors(place, "before")
        theirs_then = self.reference.tensors(last, "weights")
        moved = {n: ranks for n, ranks in moved.items() if theirs_now.digests(n) == theirs_then.digests(n)}
        if not moved:
            return None
        ranks = sorted({rank for ranks in moved.values() for rank in ranks})
        apart = disagreeing(before)
        return self.differs(
            step,
            "replicas" if apart else "weights",
            list(moved),
            ranks,
            why=f"between step {step - 1} and step {step} something changed weights on {words_of(ranks)}, "
            "and nothing does in the reference",
            look_at="what runs between two steps: loading, averaging, evaluation, an in-place operation",
        )

    def skipped(self, place: Place) -> Verdict | None:
        """A rank has been through the model twice as often as the others since its last step."""
        calls = {rank: len(event["inputs"]) for rank, event in self.candidate.events[place].items()}
        fewest = min(calls.values())
        late = [rank for rank, count in calls.items() if fewest and count >= 2 * fewest]
        if place[1] > 1 and late and len(late) < len(calls):
            return self.differs(
                place[1],
                "optimizer",
                [],
                late,
                why=f"{words_of(late)} took no step of the optimizer where the other ranks took one",
                look_at="what skips a step: a loss scale of its own, a condition that only some ranks meet",
            )
        return None

    def settings(self, place: Place) -> Verdict | None:
        mine, theirs = settings_by_name(self.candidate, place), settings_by_name(self.reference, place)
        strays = {rank: event["strays"] for rank, event in self.candidate.events[place].items() if event["strays"]}
        known = max(event["strays"] for event in self.reference.events[place].values())
        if strays and max(strays.values()) > known:
            rank, count = next(iter(strays.items()))
            names = [name for name in theirs if name not in mine]
            return self.differs(
                place[1],
                "optimizer",
                names,
                sorted(strays),
                why=f"{count} of the optimizer's parameters on rank {rank} are not the model's",
                look_at="the optimizer must be made after the model is wrapped or sharded",
            )
        if missing := [name for name in theirs if name not in mine]:
            return self.differs(
                place[1],
                "optimizer",
                missing,
                [],
                why="parameters that the reference trains are in no rank's optimizer",
                look_at="the parameters that the optimizer is given",
            )
        for name, known in theirs.items():
            expected = next(iter(known.values()))
            for group in mine[name].values():
                for key in sorted(expected.keys() & group.keys() - IGNORED):
                    if not alike(group[key], expected[key]):
                        return self.setting(place, key, expected[key], group[key], mine, theirs)
        return None

    def setting(self, place: Place, key: str, expected: Any, got: Any, mine: "Settings", theirs: "Settings") -> Verdict:
        """One that differs."""
        off = {
            name: [
                r for r, group in mine[name].items() if not alike(group.get(key), next(iter(known.values())).get(key))
            ]
            for name, known in theirs.items()
        }
        off = {name: ranks for name, ranks in off.items() if ranks}
        return self.differs(
            place[1],
            "optimizer",
            list(off),
            sorted({rank for ranks in off.values() for rank in ranks}),
            why=f"the optimizer's {key} is {shortly(got)} instead of {shortly(expected)}",
            look_at=f"where {key} is set" + (": is it scaled by the number of ranks?" if key == "lr" else ""),
            expected=shortly(expected),
            got=shortly(got),
        )

    def gradients(self, place: Place) -> Verdict | None:
        theirs, mine = self.reference.tensors(place, "gradients"), self.candidate.tensors(place, "gradients")
        wholes = Wholes(theirs)
        if (unstable := self.unstable(place)) is not None:
            return unstable
        off: dict[str, list[int]] = {}
        total = self._total[place]
        for name, whole in wholes.items():
            if name not in mine:
                return cannot(f"no rank of the candidate has a gradient of {name}")
            tolerance = self.tolerance(place, name, whole, theirs.parts[name])
            if tolerance > LOOSEST:
                tolerance = LOOSEST
                self.unsure.add(name)
            scale = scale_of(whole, total, SMALL)
            for part in mine.parts[name]:
                expected = part.of(whole)
                got = mine.read(part) if part.stored is not None else torch.zeros_like(expected)
                size = distance(got, expected) / scale
                seen = self.sizes.setdefault(("gradient", name), {})
                seen[place[1]] = max(seen.get(place[1], 0.0), size / tolerance)
                if size > tolerance:
                    off.setdefault(name, []).append(part.rank)
        if not off:
            return None
        cause: Cause = cause_of_gradients(self, place, off, wholes, mine)
        names = list(reversed([name for name in wholes if name in off]))  # as backward comes by
        found = self.differs(
            place[1],
            "gradient",
            [*cause.first, *names],
            sorted({rank for ranks in off.values() for rank in ranks}),
            why=cause.why,
            look_at=cause.look_at,
            factor=cause.factor,
            expected=cause.expected,
            got=cause.got,
        )
        found.ledger = ledger_of(self, place, off, wholes, mine)
        return found

    def norm(self, place: Place) -> Verdict | None:
        """Where both have clipped."""
        theirs: list[Any] = next((e["norms"] for e in self.reference.events[place].values() if e["norms"]), [])
        for rank, event in self.candidate.events[place].items():
            for (_, expected), (_, got) in zip(theirs, event["norms"], strict=False):
                near = 0.0 if self.strict else max(1e-3, 2 * self.floor(place))
                if not isfinite(got) and not isfinite(expected):
                    continue  # a step that a loss scale skips
                if not isclose(got, expected, rel_tol=near, abs_tol=0.0 if self.strict else 1e-12):
                    others = self.candidate.events[place].items()
                    ranks = [
                        r for r, e in others if e["norms"] and not isclose(e["norms"][0][1], theirs[0][1], rel_tol=near)
                    ]
                    return self.differs(
                        place[1],
                        "norm",
                        [],
                        ranks or [rank],
                        why=f"clip_grad_norm_ has seen a norm of {got:.6g} on rank {rank}, and the reference's is "
                        f"{expected:.6g}, with the same gradients",
                        look_at="the norm must be taken over all pieces of the model, and each counted once",
                        factor=got / expected if expected else None,
                        expected=f"{expected:.6g}",
                        got=f"{got:.6g}",
                    )
        return None

    def weights(self, place: Place) -> Verdict | None:
        theirs, mine = self.reference.tensors(place, "weights"), self.candidate.tensors(place, "weights")
        then, before = self.reference.tensors(place, "before"), self.candidate.tensors(place, "before")
        again = self.again.tensors(place, "weights") if self.again and self.again.complete(place) else None
        again_then = self.again.tensors(place, "before") if again is not None and self.again else None
        off: dict[str, list[int]] = {}
        worst: tuple[float, str, float, float] | None = None
        for name in theirs:
            whole, old = theirs.whole(name), then.whole(name)
            sure = None if self.strict else self.significant(place, name)
            change = whole - old if sure is None else (whole - old) * sure
            size_of_change = float(change.norm())
            noise = 0.0
            if again is not None and again_then is not None:
                now, past = again.whole(name), again_then.whole(name)
                own = now - past if sure is None else (now - past) * sure
                noise = float((own - change).norm())
            rounding = 4 * coarseness(theirs.parts[name][0]) * float(whole.norm())
            loose = max(WEIGHTS_FLOOR, COARSE * self.floor(place) if self.floor(place) > WEIGHTS_FLOOR else 0.0)
            allowed = max(loose * size_of_change, TIMES * noise, rounding)
            if self.strict:
                allowed = 0.0
            changed = theirs.parts[name][0].stored != then.parts[name][0].stored
            stands = all(p.stored == b.stored for p, b in zip(mine.parts[name], before.parts[name], strict=True))
            if changed and stands and size_of_change > 0:
                allowed = 0.0
            for part, old_part in zip(mine.parts[name], before.parts[name], strict=True):
                got = mine.read(part) - before.read(old_part)
                if sure is not None:
                    got = got * part.of(sure)
                size = distance(got, part.of(change))
                seen = self.sizes.setdefault(("weight", name), {})
                seen[place[1]] = max(seen.get(place[1], 0.0), size / max(allowed, 1e-30))
                if size > allowed:
                    off.setdefault(name, []).append(part.rank)
                    worst = worst or (size, name, float(got.norm()), float(part.of(change).norm()))
        if not off or worst is None:
            return self.apart(place, mine)
        _, name, got_size, expected_size = worst
        return self.differs(
            place[1],
            "weights",
            list(off),
            sorted({rank for ranks in off.values() for rank in ranks}),
            why=f"the gradients agree, but the step changes {name} by {got_size:.4g} and not by {expected_size:.4g}"
            + (": it was not taken" if got_size == 0 else ""),
            look_at="the optimizer's state, its scheduler, and what skips a step",
            factor=None,
            expected=f"{expected_size:.4g}",
            got=f"{got_size:.4g}",
        )

    def apart(self, place: Place, mine: Tensors) -> Verdict | None:
        """Copies that are not each other's, though each is near the reference's."""
        apart = disagreeing(mine)
        if not apart:
            return None
        name, ranks = next(iter(apart.items()))
        return self.differs(
            place[1],
            "replicas",
            list(apart),
            ranks,
            why=f"copies of {name} are no longer the same on all ranks: they drift apart",
            look_at="every rank must end the reduction of a gradient with the same bits",
        )

    def buffers(self, place: Place) -> Verdict | None:
        theirs, mine = self.reference.tensors(place, "buffers"), self.candidate.tensors(place, "buffers")
        off = self.off(mine, theirs, max(1e-4, 10 * self.floor(place)))
        if not off:
            return None
        name = next(iter(off))
        return self.differs(
            place[1],
            "buffers",
            list(off),
            sorted({rank for ranks in off.values() for rank in ranks}),
            why=f"gradients and weights agree, but the buffer {name} does not",
            look_at="buffers that each rank fills from its own samples: SyncBatchNorm, or a reduction of your own",
        )

    def loss(self, place: Place) -> Verdict | None:
        found = cause_of_loss(self.reference, self.candidate, place)
        if found is None:
            return None
        return self.differs(place[1], "loss", [], [], why=found.why, look_at=found.look_at,
                            expected=found.expected, got=found.got)  # fmt: skip

    # ---- how much is rounding --------------------------------------------------------------------------------

    def tolerance(self, place: Place, name: str, whole: Tensor, parts: list[Part]) -> float:
        if self.strict:
            return 1e-300
        return max(FLOOR.get(parts[0].stored.dtype, 2e-5) if parts[0].stored else 0.0, self.floor(place),
                   TIMES * self.noise(place, name, whole))  # fmt: skip

    def floor(self, place: Place) -> float:
        """Of the coarsest type that the reference computes in."""
        event = next(iter(self.reference.events[place].values()))
        return FLOOR.get(event.get("computes") or "float32", 2e-5)

    def noise(self, place: Place, name: str, whole: Tensor) -> float:
        """How far rounding moves a gradient."""
        again = self.second(place, name)
        return 0.0 if again is None else distance(again, whole) / scale_of(whole, self._total[place], SMALL)

    @cached_property
    def _total(self) -> dict[Place, float]:
        found = {}
        for place in self.reference.events:
            tensors = self.reference.tensors(place, "gradients")
            found[place] = norm_of(Wholes(tensors).values())
        return found

    def unstable(self, place: Place) -> Verdict | None:
        """The reference is not itself when it runs again."""
        wholes = Wholes(self.reference.tensors(place, "gradients"))
        if self.again is None or not self.again.complete(place):
            return None
        total = sum(
            (self.noise(place, name, whole) * scale_of(whole, self._total[place], SMALL)) ** 2
            for name, whole in wholes.items()
        )
        if total**0.5 <= UNSTABLE * max(1.0, FLOOR_RATIO * self.floor(place)) * self._total[place]:
            return None
        if any(self.reference.facts("dropout")):
            return cannot("the model has dropout, and no two runs drop the same: judge with --no-dropout")
        if Samples(self.reference, self.again, place).wrong:
            return cannot("the reference reads other samples each time it runs: give it a seed")
        return cannot(
            f"the reference is not itself when it runs again: its gradients at step {place[1]} differ by "
            f"{total**0.5 / self._total[place]:.0%}; is something random drawn without a seed?"
        )

    def significant(self, place: Place, name: str) -> Tensor | None:
        """1 where the gradient is more than rounding at every step so far, or nothing at all; else 0."""
        number, step = place
        sure: Tensor | None = None
        for earlier in range(1, step + 1):
            tensors = self.reference.tensors((number, earlier), "gradients")
            whole = tensors.whole_if(name) if name in tensors else None
            if whole is None:
                continue
            again = self.second((number, earlier), name)
            typical = float(whole.norm()) / max(whole.numel(), 1) ** 0.5
            wobble = 0.0 if again is None else distance(again, whole) / max(whole.numel(), 1) ** 0.5
            nothing = whole == 0 if again is None else (whole == 0) & (again == 0)
            now = ((whole.abs() >= max(SIGNIFICANT * typical, TIMES * wobble)) | nothing).double()
            sure = now if sure is None else sure * now
        return sure

    def second(self, place: Place, name: str) -> Tensor | None:
        """The gradient in the reference's second run."""
        if self.again is None or not self.again.complete(place):
            return None
        other = self.again.tensors(place, "gradients")
        return other.whole_if(name) if name in other else None

    def differs(self, step: int, what: str, names: list[str], ranks: list[int], why: str, look_at: str,
                factor: float | None = None, expected: str = "", got: str = "") -> Verdict:  # fmt: skip
        return Verdict(DIFFERS, step, what, names, ranks, factor, why, look_at, expected, got)


FLOOR_RATIO = 500.0


class Samples:
    """What all ranks together have seen at a step, beside what the reference has."""

    def __init__(self, reference: Side, candidate: Side, place: Place) -> None:
        self.wrong = ""
        """What is wrong, if it is known."""
        self.certain = False
        """All rows are known: some were seen twice, and others never."""
        self.ranks: list[int] = []
        theirs, mine = seen_by(reference, place), seen_by(candidate, place)
        wanted = [row for rows in theirs.values() for row in rows[0]]
        if not wanted or not any(rows[0] for rows in mine.values()):
            return
        if any(self._is_same(theirs, mine, dim) for dim in range(2)) or self._same_elements(theirs, mine):
            return
        alike = {kind_of(event) for event in reference.events[place].values()}
        others = [r for r, event in candidate.events[place].items() if kind_of(event) not in alike]
        known = set(wanted)
        self._say(wanted, {r: rows[0] for r, rows in mine.items() if r not in others or known & set(rows[0])})

    def _is_same(self, theirs: dict[int, Any], mine: dict[int, Any], dim: int) -> bool:
        wanted = Counter(row for rows in theirs.values() for row in rows[dim])
        got = Counter(row for rows in mine.values() for row in rows[dim])
        if wanted.keys() != got.keys():
            return False
        times = {got[row] / wanted[row] for row in wanted}
        return len(times) == 1 and (next(iter(times)) == 1 or self._shared(mine, dim))

    def _shared(self, mine: dict[int, Any], dim: int) -> bool:
        """Ranks that share a copy of the model read the same: each batch is that of as many ranks."""
        batches = Counter(tuple(rows[dim]) for rows in mine.values() if rows[dim])
        return len(set(batches.values())) == 1

    def _same_elements(self, theirs: dict[int, Any], mine: dict[int, Any]) -> bool:
        """Cut along both dimensions: all elements together."""
        wanted, got = (sum(rows[2] for rows in side.values()) % 2**64 for side in (theirs, mine))
        return any((got - times * wanted) % 2**64 == 0 for times in range(1, len(mine) + 1))

    def _say(self, wanted: list[int], mine: dict[int, list[int]]) -> None:
        known = set(wanted)
        if not any(known & set(rows) for rows in mine.values()):
            count = sum(len(rows) for rows in mine.values())
            if count % len(wanted) == 0:
                self.wrong = f"none of the {len(wanted)} samples of the reference's step was seen, but {count} others"
                self.ranks = sorted(mine)
            return
        seen = Counter(row for rows in mine.values() for row in rows)
        often = Counter(wanted)
        twice = [row for row in known if seen[row] > often[row]]
        never = [row for row in known if row not in seen]
        others = sum(1 for rows in mine.values() for row in rows if row not in known)
        self.ranks = sorted(rank for rank, rows in mine.items() if set(rows) & set(twice) or set(rows) - known)
        parts = []
        if twice:
            by = [rank for rank, rows in mine.items() if set(rows) & set(twice)]
            parts.append(f"{len(twice)} of {len(wanted)} samples were seen more than once (by {words_of(by)})")
        if never:
            parts.append(f"{len(never)} of {len(wanted)} samples were never seen")
        if others:
            parts.append(f"{others} samples are not of the reference's step")
        self.wrong, self.certain = ", ".join(parts), bool(twice and never and not others)


def kind_of(event: dict[str, Any]) -> Any:
    """Of samples: what a stage of a pipeline is given by another rank is of another kind."""
    return tuple((tensor["dtype"], tuple(tensor["shape"][1:])) for tensors in event["inputs"][:1] for tensor in tensors)


def seen_by(side: Side, place: Place) -> dict[int, tuple[list[int], list[int], int]]:
    """Rank -> digests of its rows along both dimensions, and of its elements. Of several tensors with as many rows, one
    digest for each row of all.
    """
    found = {}
    for rank, event in side.events.get(place, {}).items():
        rows: tuple[list[int], list[int]] = ([], [])
        elements = 0
        for tensors in event["inputs"]:
            for dim in range(2):
                sized = [t["rows"][dim] for t in tensors if len(t["rows"]) > dim]
                if sized:
                    same = [column for column in sized if len(column) == len(sized[0])]
                    rows[dim].extend(hash(row) for row in zip(*same, strict=True))
            elements += sum(t["elements"] for t in tensors)
        found[rank] = (*rows, elements)
    return found


Settings = dict[str, dict[int, dict[str, Any]]]
"""Parameter -> rank -> its group's settings."""


def settings_by_name(side: Side, place: Place) -> Settings:
    found: Settings = {}
    for rank, event in side.events[place].items():
        for name, group in event["trained"].items():
            found.setdefault(name, {})[rank] = event["settings"][group]
    return found


def disagreeing(tensors: Tensors) -> dict[str, list[int]]:
    """Name -> ranks whose copy is not that of the first rank that has it."""
    found: dict[str, list[int]] = {}
    for name in tensors:
        for copies in tensors.copies(name):
            first = copies[0].stored
            ranks = [part.rank for part in copies if part.stored != first]
            if ranks:
                found[name] = ranks
    return found


def same_digests(mine: list[Part], theirs: list[Part]) -> bool:
    """All have the one whole tensor."""
    return len({part.stored for part in [*mine, *theirs]}) == 1


def unfitting(parts: list[Part], whole: Tensor) -> str | None:
    """What is wrong with pieces that cannot be those of the whole tensor."""
    shape = tuple(whole.shape)
    for part in parts:
        mine = part.stored.shape if part.stored else ()
        if any(outside(box, shape) for box in part.boxes or ()):
            return f"has a box on rank {part.rank} that is outside the reference's {shape}"
        if part.shape not in (None, shape) or prod(mine) != part.of(whole).numel():
            return f"is {tuple(mine)} on rank {part.rank}, and {shape} in the reference"
    if all(part.boxes is not None for part in parts):
        missing = uncovered((Region(shape, part.boxes or ()) for part in parts), shape)
        if missing:
            return f"has {missing} of {whole.numel()} elements on no rank"
    return None


def outside(box: Box, shape: tuple[int, ...]) -> bool:
    return len(box.sizes) != len(shape) or any(
        offset < 0 or offset + size > whole for offset, size, whole in zip(box.offsets, box.sizes, shape, strict=True)
    )


def coarseness(part: Part) -> float:
    dtype = getattr(torch, part.stored.dtype) if part.stored else torch.float32
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


def alike(got: Any, expected: Any) -> bool:
    if isinstance(got, float | int) and isinstance(expected, float | int):
        return isclose(got, expected, rel_tol=1e-6, abs_tol=1e-12)
    if isinstance(got, list) and isinstance(expected, list):
        return len(got) == len(expected) and all(map(alike, got, expected))
    return bool(got == expected)


def shortly(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def words_of(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def listing(names: list[str], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more

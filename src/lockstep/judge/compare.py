"""Step by step, in the order in which one thing follows from another; the first that differs is the verdict.

1 weights before the step    3 the optimizer    5 the norm             7 copies of one thing
2 samples                    4 gradients        6 weights after it     8 buffers
"""

from dataclasses import dataclass, field
from math import isclose, isfinite

import torch

from lockstep.apart import LEAST, distance
from lockstep.judge.assemble import Place, Side, Tensors, Wholes, align, disagreeing, same_digests, unfitting
from lockstep.judge.causes import cause_of_gradients, missing_reductions
from lockstep.judge.difference import Difference
from lockstep.judge.inputs import Samples
from lockstep.judge.losses import cause_of_loss
from lockstep.judge.optimizer_settings import other_settings, skipped
from lockstep.judge.rounding import Rounding, coarseness
from lockstep.judge.verdict import EQUAL, Verdict, cannot, differs, listing, words_of

LOOSEST = 0.3
"""A tolerance that is wider sees nothing: half a gradient is off by 0.5."""
DROPPED = ("gradient", "norm", "weights", "loss")
"""What differs where ranks drop other elements than the reference."""
STARTS_ALIKE = 1e-6
"""How far initial weights may be apart, relative to their norm."""
NORMS_ALIKE = 1e-3
BUFFERS_ALIKE = 1e-4
Off = dict[str, list[int]]
"""Name -> ranks whose tensor differs."""


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
        self.rounding = Rounding(self.reference, self.again, self.strict)

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

    def note(self, kind: str, name: str, place: Place, size: float) -> None:
        """The largest of all ranks."""
        seen = self.sizes.setdefault((kind, name), {})
        seen[place[1]] = max(seen.get(place[1], 0.0), size)

    # ---- before the first step -------------------------------------------------------------------------------

    def start(self) -> Verdict | None:
        mine, theirs = self.candidate.start(), self.reference.start()
        if (unlike := self.unlike(mine, theirs)) is not None:
            return cannot(unlike)
        apart = disagreeing(mine)
        if apart:
            name, ranks = next(iter(apart.items()))
            return differs(
                1,
                "initial weights",
                apart,
                ranks,
                why=f"ranks begin with different weights: {name} is another on {words_of(ranks)}",
                look_at="the seed before the model is made, or the broadcast of rank 0's weights (DDP does it)",
            )
        off = self.off(mine, theirs, STARTS_ALIKE)
        if not off:
            return None
        return differs(
            1,
            "initial weights",
            off,
            ranks_of(off),
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

    def off(self, mine: Tensors, theirs: Tensors, tolerance: float) -> Off:
        """What is something else than in the reference."""
        found = Off()
        for name in theirs:
            if name not in mine or same_digests(mine.parts[name], theirs.parts[name]):
                continue
            whole = theirs.whole(name)
            if unfitting(mine.parts[name], whole) is not None:
                continue  # a buffer whose size depends on the batch
            for part in mine.parts[name]:
                expected, got = part.of(whole), mine.read(part)
                floor = max(tolerance, coarseness(theirs.parts[name][0]) / 4)
                if distance(got, expected) > (0 if self.strict else floor * max(float(expected.norm()), LEAST)):
                    found.setdefault(name, []).append(part.rank)
        return found

    # ---- one step --------------------------------------------------------------------------------------------

    def at(self, place: Place) -> Verdict | None:
        found = self.moved_between(place)
        if found is not None:
            return found
        inputs = Samples(self.reference, self.candidate, place)
        settings = other_settings(self.reference, self.candidate, place)
        found = self.gradients(place) if settings is None or inputs.wrong else None
        if found is None or found.what != "gradient":
            found = settings or found
        if found is None:
            found = self.norm(place) or self.weights(place) or self.buffers(place) or self.loss(place)
        follows = found is not None and found.what in ("gradient", "norm", "weights", "loss", "buffers")
        if (follows or inputs.certain) and (skip := skipped(self.candidate, place)) is not None:
            return skip
        # Other rows that give the same gradients are padded otherwise, and no other samples.
        if inputs.certain or (follows and inputs.wrong):
            return differs(
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
        moved = Off()
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
        ranks = ranks_of(moved)
        apart = disagreeing(before)
        return differs(
            step,
            "replicas" if apart else "weights",
            moved,
            ranks,
            why=f"between step {step - 1} and step {step} something changed weights on {words_of(ranks)}, "
            "and nothing does in the reference",
            look_at="what runs between two steps: loading, averaging, evaluation, an in-place operation",
        )

    def gradients(self, place: Place) -> Verdict | None:
        if (unstable := self.rounding.unstable(place)) is not None:
            return unstable
        theirs, mine = self.reference.tensors(place, "gradients"), self.candidate.tensors(place, "gradients")
        wholes, off = Wholes(theirs), Off()
        for name, whole in wholes.items():
            if name not in mine:
                return cannot(f"no rank of the candidate has a gradient of {name}")
            tolerance = self.rounding.tolerance(place, name, whole, theirs.parts[name])
            if tolerance > LOOSEST:
                tolerance = LOOSEST
                self.unsure.add(name)
            scale = self.rounding.scale(place, whole)
            for part in mine.parts[name]:
                expected = part.of(whole)
                got = mine.read(part) if part.stored is not None else torch.zeros_like(expected)
                size = distance(got, expected) / scale
                self.note("gradient", name, place, size / tolerance)
                if size > tolerance:
                    off.setdefault(name, []).append(part.rank)
        if not off:
            return None
        difference = Difference(self.reference, self.candidate, place, off, wholes, mine)
        cause, backward = cause_of_gradients(difference), reversed([name for name in wholes if name in off])
        found = differs(
            place[1],
            "gradient",
            [*cause.first, *backward],
            ranks_of(off),
            why=cause.why,
            look_at=cause.look_at,
            factor=cause.factor,
            expected=cause.expected,
            got=cause.got,
        )
        found.ledger = missing_reductions(difference)
        return found

    def norm(self, place: Place) -> Verdict | None:
        """Where both have clipped. Two that are not finite are alike: a loss scale skips the step."""
        theirs = next(iter(self.reference.norms(place).values()), [])
        near, at_least = (0.0, 0.0) if self.strict else (max(NORMS_ALIKE, 2 * self.rounding.floor(place)), 1e-12)
        off = {
            rank: (expected, got)
            for rank, norms in self.candidate.norms(place).items()
            for expected, got in zip(theirs, norms, strict=False)
            if (isfinite(got) or isfinite(expected)) and not isclose(got, expected, rel_tol=near, abs_tol=at_least)
        }
        if not off:
            return None
        rank, (expected, got) = next(iter(off.items()))
        return differs(
            place[1],
            "norm",
            [],
            sorted(off),
            why=f"clip_grad_norm_ has seen a norm of {got:.6g} on rank {rank}, and the reference's is {expected:.6g}, "
            "with the same gradients",
            look_at="the norm must be taken over all pieces of the model, and each counted once",
            factor=got / expected if expected else None,
            expected=f"{expected:.6g}",
            got=f"{got:.6g}",
        )

    def weights(self, place: Place) -> Verdict | None:
        theirs, mine = self.reference.tensors(place, "weights"), self.candidate.tensors(place, "weights")
        then, before = self.reference.tensors(place, "before"), self.candidate.tensors(place, "before")
        off, first = Off(), ("", 0.0, 0.0)
        for name in theirs:
            change = self.rounding.change(place, name, then, theirs)
            pairs = list(zip(mine.parts[name], before.parts[name], strict=True))
            stands = all(part.stored == old.stored for part, old in pairs)
            moves = theirs.parts[name][0].stored != then.parts[name][0].stored and float(change.expected.norm()) > 0
            allowed = 0.0 if moves and stands else change.allowed
            for part, old in pairs:
                got, expected = change.seen(part, mine.read(part) - before.read(old)), part.of(change.expected)
                size = distance(got, expected)
                self.note("weight", name, place, size / max(allowed, LEAST))
                if size > allowed:
                    first = first if off else (name, float(got.norm()), float(expected.norm()))
                    off.setdefault(name, []).append(part.rank)
        if not off:
            return self.apart(place, mine)
        name, got_size, expected_size = first
        return differs(
            place[1],
            "weights",
            off,
            ranks_of(off),
            why=f"the gradients agree, but the step changes {name} by {got_size:.4g} and not by {expected_size:.4g}"
            + (": it was not taken" if got_size == 0 else ""),
            look_at="the optimizer's state, its scheduler, and what skips a step",
            expected=f"{expected_size:.4g}",
            got=f"{got_size:.4g}",
        )

    def apart(self, place: Place, mine: Tensors) -> Verdict | None:
        """Copies that are not each other's, though each is near the reference's."""
        apart = disagreeing(mine)
        if not apart:
            return None
        name, ranks = next(iter(apart.items()))
        return differs(
            place[1],
            "replicas",
            apart,
            ranks,
            why=f"copies of {name} are no longer the same on all ranks: they drift apart",
            look_at="every rank must end the reduction of a gradient with the same bits",
        )

    def buffers(self, place: Place) -> Verdict | None:
        theirs, mine = self.reference.tensors(place, "buffers"), self.candidate.tensors(place, "buffers")
        off = self.off(mine, theirs, max(BUFFERS_ALIKE, 10 * self.rounding.floor(place)))
        if not off:
            return None
        name = next(iter(off))
        return differs(
            place[1],
            "buffers",
            off,
            ranks_of(off),
            why=f"gradients and weights agree, but the buffer {name} does not",
            look_at="buffers that each rank fills from its own samples: SyncBatchNorm, or a reduction of your own",
        )

    def loss(self, place: Place) -> Verdict | None:
        found = cause_of_loss(self.reference, self.candidate, place)
        if found is None:
            return None
        return differs(place[1], "loss", [], [], why=found.why, look_at=found.look_at,
                            expected=found.expected, got=found.got)  # fmt: skip


def ranks_of(off: Off) -> list[int]:
    return sorted({rank for ranks in off.values() for rank in ranks})

"""What a grader has in its hands on each rank: the exercise, what it called, and ways to say what is wrong.

Every expectation is agreed upon: all ranks must state it, and if it fails on one, it fails on all, with the words of
the rank that knows most. So no rank waits for one that has left.
"""

import importlib.util
import linecache
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isclose, isfinite
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.comm.collectives import all_gather_objects
from lockstep.layout.world import World
from lockstep.learn.lesson import LESSONS, Lesson
from lockstep.learn.recorder import ALIKE, Call, Recorder

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Relative to the largest element."""


Values = Mapping[str, Any]
"""What it is -> a tensor, or None."""


class NotPassedError(Exception):
    """All ranks know why, and leave together."""


@dataclass
class Guess:
    """A prediction beside what was measured."""

    asks: str
    predicted: float
    measured: float
    unit: str
    because: str = ""
    """Why it is what was measured."""
    by: str = "measured"
    """Or "it is", where it is worked out."""


@dataclass
class Graded:
    """What a rank brings back."""

    problem: str = ""
    """What is wrong; empty if the exercise passed."""
    guesses: list[Guess] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What was measured, to be shown."""


class Rank:
    """One rank of a check."""

    def __init__(self, world: World, lesson: Lesson, file: Path, recorder: Recorder) -> None:
        self.world, self.lesson, self.file, self.recorder = world, lesson, file, recorder
        self.rank, self.size, self.device = world.rank, world.size, world.device
        self.graded = Graded()
        # Its own group: whatever the exercise leaves in flight in the world's stays there.
        self._group = dist.new_group(backend="gloo") if world.size > 1 else None
        recorder.install()
        self.exercise: Any = load_exercise(file)

    # ---- inputs ----------------------------------------------------------------------------------------------

    def random(self, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
        """Different on each rank."""
        return self.same(*shape, seed=1000 * (seed + 1) + self.rank, dtype=dtype)

    def same(self, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
        """The same on each rank."""
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype).to(self.device)

    def of_all(self, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
        """What `random` gives on each rank."""
        return [self.same(*shape, seed=1000 * (seed + 1) + rank, dtype=dtype) for rank in range(self.size)]

    # ---- what is expected ------------------------------------------------------------------------------------

    def expect(self, true: bool, otherwise: str) -> None:
        """On every rank; `otherwise` is the first rank's words that finds it false."""
        self.agree(None if true else otherwise)

    def agree(self, problem: str | None, mistake: str | None = None) -> None:
        """Fail on all ranks where one has a problem. `mistake`: its name; said if all that fail have made one."""
        stated = self.gather((problem, mistake))
        found = [(rank, text, name) for rank, (text, name) in enumerate(stated) if text is not None]
        if found:
            rank, text, name = found[0]
            where = f"on rank {rank}: " if self.size > 1 else ""
            explained = name is not None and all(other is not None for _, _, other in found)
            raise NotPassedError(f"{where}{name}\n{text}" if explained else f"{where}{text}")

    def gather(self, value: Any) -> list[Any]:
        """Of all ranks, out of the exercise's sight."""
        if self._group is None:
            return [value]
        with self.recorder.off():
            return all_gather_objects(value, self._group)

    def expect_tensor(
        self, what: str, got: object, expected: Tensor, mistakes: Mapping[str, Tensor] | None = None
    ) -> None:
        """`mistakes`: what a known mistake is called -> what would come out of it."""
        self._expect_same({what: got}, {what: expected}, {name: {what: w} for name, w in (mistakes or {}).items()})

    def expect_model(
        self,
        what: str,
        got: nn.Module,
        expected: nn.Module,
        mistakes: Mapping[str, nn.Module] | None = None,
        grad: bool = False,
    ) -> None:
        """Every parameter, or its gradient; a known mistake is one that explains all of them."""

        def values(model: nn.Module) -> Values:
            return {f"{what} of {name}": p.grad if grad else p.detach() for name, p in model.named_parameters()}

        self._expect_same(values(got), values(expected), {name: values(w) for name, w in (mistakes or {}).items()})

    def _expect_same(self, got: Values, expected: Values, mistakes: Mapping[str, Values]) -> None:
        problem = first_difference(got, expected)
        explain = (
            name
            for name, wrong in mistakes.items()
            if first_difference(got, wrong) is None and first_difference(wrong, expected) is not None
        )
        self.agree(problem, next(explain, None) if problem is not None else None)

    def expect_number(
        self, what: str, got: object, expected: float, mistakes: Mapping[str, float] | None = None
    ) -> None:
        """To nine digits; NaN, None and the like are no numbers."""
        value = number(got)
        right = value is not None and isclose(value, expected, rel_tol=1e-9, abs_tol=1e-12)
        problem = f"{what}: expected {expected:.6g}, got {got if value is None else f'{value:.6g}'}"
        names = [n for n, w in (mistakes or {}).items() if value is not None and isclose(value, w, rel_tol=1e-9)]
        self.agree(None if right else problem, names[0] if names else None)

    def expect_calls(self, calls: Sequence[Call], expected: Mapping[str, int], otherwise: str | None = None) -> None:
        """Operation -> how often; others not at all."""
        counted: dict[str, int] = {}
        for call in calls:
            name = ALIKE.get(call.operation, call.operation)
            counted[name] = counted.get(name, 0) + 1
        expected = {ALIKE.get(name, name): count for name, count in expected.items()}
        right = counted == expected
        self.agree(None if right else f"calls: expected {listed(expected)}; got {listed(counted)}", otherwise)

    # ---- what is shown ---------------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        self.graded.notes.append(text)

    def guess(self, name: str, measured: float, by: str = "measured") -> None:
        """Beside what the learner has predicted in the constant of that name (`has_predicted` has seen it)."""
        asked = next(p for p in self.lesson.manifest.predict if p.name == name)
        predicted = number(getattr(self.exercise, name)) or 0.0
        self.graded.guesses.append(Guess(asked.asks, predicted, measured, asked.unit, asked.because, by))

    def has_predicted(self) -> None:
        """At the beginning: numbers are typed before the run, not after it."""
        for asked in self.lesson.manifest.predict:
            predicted = number(getattr(self.exercise, asked.name, None))
            self.expect(
                predicted is not None, f"predict first: set {asked.name} in {self.file.name} to a number. {asked.asks}"
            )


def number(value: object) -> float | None:
    """Whatever can be read as a finite number: of Python, numpy or torch."""
    if value is None or isinstance(value, bool | str | bytes):
        return None
    try:
        read = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    return read if isfinite(read) else None


# ---- comparing ---------------------------------------------------------------------------------------------------


def difference(what: str, got: object, expected: Tensor) -> str | None:
    """In one line: where they differ most, what was expected, what came."""
    if not isinstance(got, Tensor):
        return f"{what}: expected a tensor of shape {tuple(expected.shape)}, got {type(got).__name__}"
    if got.shape != expected.shape:
        return f"{what}: expected shape {tuple(expected.shape)}, got {tuple(got.shape)}"
    if got.is_meta or got.is_complex() or (got.dtype != expected.dtype and expected.dtype in TOLERANCE):
        kind = "a meta tensor" if got.is_meta else str(got.dtype).removeprefix("torch.")
        return f"{what}: expected {str(expected.dtype).removeprefix('torch.')}, got {kind}"
    a, b = got.detach().to(torch.float64).cpu(), expected.detach().to(torch.float64).cpu()
    of = expected.dtype if expected.dtype in TOLERANCE else torch.float64
    scale = max(float(b.abs().max()) if b.numel() else 0.0, 1e-6)
    apart = torch.where(torch.isfinite(a), (a - b).abs(), torch.full_like(a, float("inf")))
    if not a.numel() or float(apart.max()) <= TOLERANCE[of] * scale:
        return None
    where = int(apart.argmax())
    index = [int(i) for i in torch.unravel_index(torch.tensor(where), a.shape)] if a.dim() else []
    at = f"[{', '.join(map(str, index))}]" if index else ""
    right, got_there = (f"{float(t.flatten()[where]):.6g}" for t in (b, a))
    near = f" (they differ by {float(apart.max()):.1g})" if right == got_there else ""
    return f"{what}{at}: expected {right}, got {got_there}{near}"


def first_difference(got: Values, expected: Values) -> str | None:
    for what, value in expected.items():
        mine = got.get(what)
        if value is None:
            if isinstance(mine, Tensor) and bool(mine.any()):
                return f"{what}: expected none, got one"
            continue
        problem = difference(what, mine, value)
        if problem is not None:
            return problem
    return None


def listed(calls: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in sorted(calls.items())) or "none"


# ---- the exercise ------------------------------------------------------------------------------------------------


def load_exercise(file: Path) -> ModuleType:
    """Under a name of its own, so that nothing of ours stands in for it; what lies beside it can be imported."""
    sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location("exercise", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["exercise"] = module
    spec.loader.exec_module(module)
    torch.set_default_dtype(torch.float32)  # whatever the exercise has set: the grader's tensors are as it means them
    torch.set_grad_enabled(True)
    return module


def in_exercise(error: BaseException, file: Path) -> str | None:
    """What the exercise raised and in which of its lines; None if it is not the exercise that raised."""
    if isinstance(error, SyntaxError) and error.filename in (str(file), None):
        return f"{file.name} line {error.lineno or 1}: {error.msg}"
    if "autograd kernel was not registered" in str(error):
        return "autograd went through a plain collective, and knows nothing of it: a torch.autograd.Function says how"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame for frame in frames if frame.filename == str(file)]
    if not lines:
        return None
    last = lines[-1]
    if isinstance(error, NotImplementedError) and frames[-1] is last:  # torch raises it too, below what was written
        return f"not written yet: {error} ({file.name} line {last.lineno}, in {last.name})"
    code = (last.line or linecache.getline(str(file), last.lineno or 0)).strip()
    return f"{file.name} line {last.lineno}, in {last.name}: {type(error).__name__}: {error}\n    {code}"


def in_grader(error: BaseException, file: Path) -> str | None:
    """The grader could not use what the exercise gave: what it was doing with it."""
    if isinstance(error, AttributeError) and isinstance(error.obj, ModuleType):
        return (
            f"{file.name} has no {error.name!r}: the check calls it (lockstep learn reset lays the skeleton out again)"
        )
    frames = [f for f in traceback.extract_tb(error.__traceback__) if LESSONS in Path(f.filename).parents]
    if not frames:
        return None
    said = f"the check cannot use what {file.name} gave: {type(error).__name__}: {error}"
    return f"{said}\n    {frames[-1].line} (in the check)"

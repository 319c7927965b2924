"""Which strategies are verified at how many ranks: a covering set by default, more of one kind on request."""

from collections.abc import Callable

from lockstep.errors import UserError
from lockstep.strategies import STRATEGIES, available_strategies, strategy_named

Matrix = dict[int, list[str]]
"""Ranks -> names of strategies."""

AXES_AT_2 = (
    *("single,tp=2", "single,tp=2:sequence", "bucketed,cp=2", "bucketed,cp=2:ulysses"),
    *(f"single,pp=2:{name}" for name in ("naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")),
)
"""Each axis by itself, in each of its forms."""
AT_4 = (
    *("bucketed", "zero1", "zero3", "fsdp+HYBRID_SHARD"),
    *("single,tp=4", "bucketed,cp=4", "single,pp=4:zb-h1"),
    *("zero3,tp=2:sequence", "zero3,cp=2", "zero2,pp=2:1f1b", "zero3,pp=2:1f1b", "fsdp,pp=2:zb-h1", "bucketed,tp=2"),
)
"""What is invisible at two ranks: a third hop, a third rank's norm, shared heads; and an axis beside another."""
AT_8 = ("zero1,pp=2:zb-h1,tp=2:sequence",)
WITH_EXPERTS = {2: ("bucketed,ep=2",), 4: ("zero3,tp=2:sequence,ep=4", "zero1,pp=2:zb-h1,ep=2")}
"""Three axes at once."""

HYBRIDS: Matrix = {
    2: [
        *AXES_AT_2,
        *("single,tp=2:native", "single,tp=2:sequence:native"),
        *(f"single,pp=2:{name}:native" for name in ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")),
    ],
    4: [
        *("single,tp=4", "single,pp=4:zb-h1", "bucketed,cp=4", "zero3,tp=2", "zero3,tp=2:sequence", "fsdp,tp=2"),
        *("fsdp,tp=2:native", "fsdp,tp=2:sequence:native"),
        *("ddp,pp=2:1f1b", "ddp,pp=2:interleaved", "zero2,pp=2:1f1b", "fsdp,pp=2:1f1b", "zero1_torch,pp=2:gpipe"),
        *("zero3,pp=2:zb-v", "fsdp,pp=2:interleaved", "fsdp,pp=2:zb-v"),
        *("zero3,cp=2", "zero3,cp=2:ulysses", "fsdp,cp=2", "local_sgd,tp=2", "bucketed+topk,tp=2", "naive,pp=2:zb-v"),
    ],
    8: [
        *("zero1,pp=2:1f1b,tp=2", *AT_8, "fsdp+HYBRID_SHARD,tp=2", "fsdp+HYBRID_SHARD,tp=2:native", "fsdp,cp=2,tp=2"),
        *("zero3,cp=2,tp=2:sequence", "ddp,pp=2:zb-h1,cp=2", "bucketed,pp=4:interleaved", "single,pp=2:zb-v,tp=4"),
    ],
}


def data() -> list[str]:
    """Every data strategy that can run here."""
    return [*(name for name in available_strategies() if name != "single"), "bucketed+demo"]


def _foreign_last(names: list[str]) -> list[str]:
    """Engines of other packages last: DeepSpeed leaves torch's linear layers replaced by its own."""
    return sorted(names, key=lambda name: STRATEGIES[strategy_named(name).data].package is not None)


EXPERTS: Matrix = {
    2: [
        *(f"{name},ep=2" for name in ("naive", "bucketed", "ddp", "zero1", "zero2", "zero3", "fsdp")),
        *("bucketed", "zero3", "fsdp", "single,tp=2", "single,tp=2:sequence", "bucketed,cp=2", "single,pp=2:1f1b"),
        *("bucketed,ep=2:halves", "zero3,ep=2:halves", "bucketed,cp=2,ep=2", "single,tp=2,ep=2"),
        *("single,tp=2:sequence,ep=2", "fsdp,ep=2:native"),
    ],
    4: [
        *("bucketed,ep=2", "overlap,ep=2", "ddp,ep=2", "zero1,ep=4", "zero2,ep=2", "zero3,ep=2", "fsdp,ep=2"),
        *("zero1,tp=2,ep=2:cut", "bucketed,tp=2,ep=2", "zero3,tp=2:sequence,ep=4", "single,tp=4,ep=4"),
        *("bucketed,tp=2:sequence,ep=2:cut", "zero2,cp=2,ep=4", "zero3,cp=2:ulysses,ep=2"),
        *("zero1,pp=2:interleaved,ep=2", "zero3,pp=2:zb-h1,ep=2", "fsdp,pp=2:1f1b,ep=2", "ddp,pp=2:gpipe,ep=2"),
        *("bucketed,pp=2:zb-v,ep=2", "fsdp+HYBRID_SHARD,ep=2"),
    ],
    8: ["zero1,pp=2:zb-h1,tp=2:sequence,ep=4", "zero3,cp=2,tp=2,ep=4"],
}
"""Experts beside everything else; without ep every rank has all of them."""

OPTIMIZERS: Matrix = {
    2: [
        *("naive", "bucketed", "ddp", "zero1", "zero2", "zero3", "fsdp"),
        *("single,tp=2", "single,tp=2:sequence", "bucketed,cp=2", "single,pp=2:1f1b", "bucketed,ep=2", "zero3,ep=2"),
    ],
    4: [
        *("zero1", "zero3", "fsdp", "fsdp+HYBRID_SHARD", "bucketed,tp=2", "zero1,tp=2", "zero3,tp=2:sequence"),
        *("fsdp,tp=2:native", "zero2,pp=2:zb-h1", "zero1,ep=2", "zero1,tp=2,ep=2:cut"),
    ],
    8: ["zero1,pp=2:1f1b,tp=2"],
}
"""Ranks that hold all of a matrix, some of it, some matrices of a stack."""

PRECISION: Matrix = {
    2: [
        *("naive", "bucketed", "ddp", "zero1", "zero2", "zero3", "fsdp"),
        *("bucketed,cp=2", "bucketed,cp=2:ulysses", "single,pp=2:1f1b", "single,pp=2:zb-h1", "single,pp=2:interleaved"),
    ],
    4: ["bucketed", "zero3", "fsdp+HYBRID_SHARD", "zero1,pp=2:1f1b", "zero3,pp=2:1f1b", "zero3,cp=2"],
    8: ["zero1,pp=2:zb-v,cp=2"],
}
"""Batches, sequences and models cut in every way, while products are in FP8."""

PRESETS: dict[str, tuple[str, Callable[[], Matrix]]] = {
    "standard": (
        "every data strategy and every axis at 2 ranks, pairs of axes at 4, three axes at 8",
        lambda: {
            2: _foreign_last([*data(), *AXES_AT_2, *WITH_EXPERTS[2]]),
            4: [*AT_4, *WITH_EXPERTS[4]],
            8: list(AT_8),
        },
    ),
    "data": ("every data strategy at 2 and at 4 ranks", lambda: {2: data(), 4: data()}),
    "hybrids": (
        "every axis, by hand and PyTorch's own, with every kind of engine, at 2, 4 and 8 ranks",
        lambda: HYBRIDS,
    ),
    "experts": ("blocks with experts under every engine, beside every axis, at 2, 4 and 8 ranks", lambda: EXPERTS),
    "optimizers": (
        "Muon, which needs whole matrices, under every engine and axis, at 2, 4 and 8 ranks",
        lambda: OPTIMIZERS,
    ),
    "precision": (
        "linear layers that multiply in FP8, under every engine, in a pipeline and with cut sequences",
        lambda: PRECISION,
    ),
}


def preset(name: str) -> Matrix:
    if name not in PRESETS:
        raise UserError(f"--preset is {name!r}, but it must be one of {', '.join(PRESETS)}")
    return PRESETS[name][1]()

"""Machines: what a processor can do at best, and what joins them. Files in `machines/`, one kind each, with sources."""

import re
from dataclasses import asdict, dataclass, field, replace
from importlib import resources
from math import isfinite
from pathlib import Path
from typing import Any, Literal

import yaml

from lockstep.errors import UserError
from lockstep.plan.constants import fitted

HERE = Path("machine.yaml")
"""What `lockstep calibrate` writes, and `--cluster here` reads."""


@dataclass(frozen=True)
class Link:
    """What joins two processors."""

    gb_per_s: float
    """1e9 bytes per second of one processor, one direction."""
    latency_us: float
    message_gb_per_s: float | None = None
    """What one message from rank to rank reaches, where that was measured; None: as a collective."""


@dataclass(frozen=True)
class Machine:
    """One kind of processor, and how many of them are joined how."""

    title: str
    architecture: str
    processors: int
    """That share the tiles of a matrix product: SMs, compute units, cores."""
    peak_tflops: dict[str, float]
    """Dense, by type."""
    memory_gib: float
    memory_gb_per_s: float
    gpus_per_node: int
    """That `inside` joins: a node, or an NVLink domain."""
    inside: Link
    between: Link
    """Of one GPU, to other nodes."""
    sustained: float = 1.0
    """Of the clock that the peak is stated at, under load: a power limit."""
    sources: dict[str, str] = field(default_factory=dict)
    factors: dict[str, float] = field(default_factory=dict)
    """Measured here (`calibrate`, `plan learn`): what is to be multiplied with the constant of that name, or with the
    time of the whole `step`.
    """
    name: str = ""

    def peak(self, dtype: str) -> float:
        """FLOP/s of a type; of one that it does not have, of the next wider."""
        for kind in WIDER[WIDER.index(dtype) :] if dtype in WIDER else (dtype,):
            if kind in self.peak_tflops:
                return self.peak_tflops[kind] * 1e12
        raise UserError(f"{self.title} says no peak for {dtype}; it has {', '.join(self.peak_tflops)}")

    @property
    def is_gpu(self) -> bool:
        return self.architecture != "cpu"

    def save(self, file: Path) -> None:
        values = {key: value for key, value in asdict(self).items() if key != "name"}
        file.write_text(yaml.safe_dump(values, sort_keys=False, width=110, allow_unicode=True), encoding="utf-8")


WIDER = ("fp4", "fp8", "bf16", "fp16", "tf32", "fp32", "fp64")


@dataclass(frozen=True)
class Cluster:
    """So many nodes of a machine."""

    nodes: int
    per_node: int
    machine: Machine

    @property
    def gpus(self) -> int:
        return self.nodes * self.per_node

    def __str__(self) -> str:
        return f"{self.nodes} x {self.per_node} x {self.machine.name or self.machine.title}"


def usual_precision(machine: Machine) -> Literal["bf16", "fp16", "fp32"]:
    """What one trains in on it: bf16, unless fp16 is much faster (a V100 has no units for bf16)."""
    bf16, fp16 = (machine.peak_tflops.get(kind, 0.0) for kind in ("bf16", "fp16"))
    return "fp32" if not bf16 + fp16 else "fp16" if fp16 > 1.5 * bf16 else "bf16"


def kinds() -> list[str]:
    return sorted(file.name.removesuffix(".yaml") for file in (resources.files("lockstep.plan") / "machines").iterdir())


ALIASES = {
    "v100": "v100-32",
    "a100": "a100-80",
    "a100-40gb": "a100-40",
    "a100-80gb": "a100-80",
    "a100-sxm": "a100-80",
    "h100-sxm": "h100",
    "h100-80gb": "h100",
    "4090": "rtx4090",
    "rtx-4090": "rtx4090",
}


def machine_of(kind: str) -> Machine:
    """A shipped kind, or a file of one's own; `here`: the one that calibrate wrote."""
    if kind == "here":
        if not HERE.exists():
            raise UserError("--cluster here: there is no machine.yaml in this folder; lockstep calibrate writes it")
        return read_machine(HERE)
    if kind.endswith((".yaml", ".yml")):
        return read_machine(Path(kind))
    name = ALIASES.get(kind.lower(), kind.lower())
    if name not in kinds():
        raise UserError(f"there is no machine {kind!r}; there are {', '.join(kinds())}, or give a file (.yaml)")
    text = (resources.files("lockstep.plan") / "machines" / f"{name}.yaml").read_text(encoding="utf-8")
    return parse_machine(yaml.safe_load(text), name, name)


def read_machine(file: Path) -> Machine:
    from lockstep.config.load import read_yaml

    return parse_machine(read_yaml(file), str(file), file.stem)


def parse_machine(values: dict[str, Any], where: str, name: str) -> Machine:
    try:
        links = {key: parse_link(values[key]) for key in LINKS}
        peaks = {str(k): float(v) for k, v in values["peak_tflops"].items()}
        rest = {key: values[key] for key in values if key not in (*LINKS, "peak_tflops")}
        numbers = ("processors", "memory_gib", "memory_gb_per_s", "gpus_per_node", "sustained")
        rest |= {key: type_of(key)(rest[key]) for key in numbers if key in rest}
        rest |= {**links, "peak_tflops": peaks, "name": name}
        made = Machine(**rest)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UserError(f"{where} is no machine file: {type(error).__name__} {error}; see docs/planning.md") from None
    positive = [made.memory_gib, made.memory_gb_per_s, made.inside.gb_per_s, made.between.gb_per_s, *peaks.values()]
    positive += [made.processors, made.gpus_per_node, made.sustained]
    positive += [link.message_gb_per_s for link in (made.inside, made.between) if link.message_gb_per_s is not None]
    if not all(isfinite(number) and number > 0 for number in positive) or not peaks:
        raise UserError(f"{where}: peaks, memory, links, processors and sustained must be numbers above 0")
    if not all(isfinite(link.latency_us) and link.latency_us >= 0 for link in (made.inside, made.between)):
        raise UserError(f"{where}: latency_us must be 0 or more")
    if made.sustained > 2:
        raise UserError(f"{where}: sustained is {made.sustained:g}, but no machine runs at more than twice its peak")
    check_factors(made.factors, where)
    return made


def parse_link(values: dict[str, Any]) -> Link:
    message = values.get("message_gb_per_s")
    return Link(float(values["gb_per_s"]), float(values["latency_us"]), None if message is None else float(message))


def check_factors(factors: Any, where: str) -> None:
    if not isinstance(factors, dict):
        raise UserError(f"{where}: factors must be names of constants with numbers")
    for name, value in factors.items():
        if name != "step" and name not in fitted().values:
            raise UserError(f"{where}: factors has {name}, which is no constant of the planner's (plan/constants.yaml)")
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value <= 0:
            raise UserError(f"{where}: the factor {name} is {value!r}, but it must be a number above 0")


LINKS = ("inside", "between")


def type_of(key: str) -> type:
    return int if key in ("processors", "gpus_per_node") else float


def parse_cluster(text: str) -> Cluster:
    """`4x8xh100`: nodes, GPUs of each, kind; `8xh100` is one node; `here`, `2x8xmachine.yaml`."""
    found = re.fullmatch(r"(?:(\d{1,7})x)?(?:(\d{1,7})x)?(.+)", text)
    if found is None:
        raise UserError(f"--cluster {text!r}: give nodes, GPUs of each and a kind, as 4x8xh100")
    first, second, kind = found.groups()
    machine = machine_of(kind)
    if first is None:
        return Cluster(1, machine.gpus_per_node, machine)
    nodes, per_node = (1, int(first)) if second is None else (int(first), int(second))
    if nodes < 1 or per_node < 1:
        raise UserError(f"--cluster {text}: give at least one node with one GPU, as 4x8xh100")
    if per_node != machine.gpus_per_node and second is not None:
        machine = replace(machine, gpus_per_node=max(per_node, machine.gpus_per_node if per_node > 8 else per_node))
    return Cluster(nodes, per_node, machine)

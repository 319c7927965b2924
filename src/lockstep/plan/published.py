"""Rows of tables that others published, as settings of the planner's, with what they measured."""

import csv
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.errors import UserError
from lockstep.plan.constants import Constants, fitted
from lockstep.plan.habits import Habit, habit_of
from lockstep.plan.known import known_model
from lockstep.plan.layout import PlanLayout, Recompute
from lockstep.plan.machine import Link, Machine, machine_of
from lockstep.plan.network import Network, transformer, transformer_block
from lockstep.plan.setting import Setting

COLUMNS = ("source", "model", "seq", "gpu", "gpus", "tp", "pp", "dp")
"""Without these no row can be described."""


@dataclass
class Row:
    """One line of a table."""

    cells: dict[str, str]
    setting: Setting | None = None
    reason: str = ""
    """Why it cannot be predicted."""
    measured_s: float | None = None
    measured_gib: float | None = None
    feasible: bool = True

    @property
    def source(self) -> str:
        """What its errors are counted under: the project, not the page."""
        first = re.split(r"[\s\[]", self.cells["source"].strip(), maxsplit=1)[0]
        return "Megatron SC21" if first == "Megatron" else re.sub(r"_v\d.*", "", first)


def read_rows(file: Path, constants: Constants | None = None) -> list[Row]:
    try:
        with file.open(newline="", encoding="utf-8-sig") as stream:  # Excel writes a mark at the beginning
            lines = list(csv.DictReader(stream))
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror})") from None
    except (csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"{file} is no table: {error}") from None
    if not lines:
        raise UserError(f"{file} has no rows")
    missing = [name for name in COLUMNS if name not in lines[0]]
    if missing:
        raise UserError(f"{file} lacks the columns {', '.join(missing)}; see docs/planning.md")
    return [read_row({k: (v or "").strip() for k, v in line.items() if k}, constants or fitted()) for line in lines]


def read_row(cells: dict[str, str], constants: Constants) -> Row:
    row = Row(cells, feasible=cells.get("feasible", "1") != "0")
    try:
        row.measured_gib = number(cells, "peak_mem_gib") or None
        row.setting = setting_of(cells, constants)
        habit = habit_of(cells["source"], cells.get("notes", ""), cells["gpu"])
        row.measured_s = measured_seconds(cells, row.setting, habit)
    except (UserError, ValueError, ArithmeticError) as error:
        row.setting, row.reason = None, str(error)
    return row


def number(cells: dict[str, str], name: str) -> float | None:
    """What a cell says, if that is a number above 0 (or 0 where that means something)."""
    text = cells.get(name, "")
    if not text:
        return None
    try:
        found = float(text)
    except ValueError:
        raise UserError(f"{name} is {text[:40]!r}, which is no number") from None
    if not 0 <= found < 1e18:
        raise UserError(f"{name} is {text[:40]}, which cannot be")
    return found


def whole(cells: dict[str, str], name: str, default: int | None = None, least: int = 1) -> int:
    found = number(cells, name)
    if found is None:
        if default is None:
            raise UserError(f"it does not say {name}")
        return default
    if found != int(found) or found < least:
        raise UserError(f"{name} is {cells[name]}, but it must be a whole number from {least} on")
    return int(found)


# ---- what was run ----------------------------------------------------------------------------------------------------


def setting_of(cells: dict[str, str], constants: Constants) -> Setting:
    notes = cells.get("notes", "")
    habit = habit_of(cells["source"], notes, cells["gpu"])
    network = network_of(cells)
    machine = machine_for(cells, habit)
    layout = layout_of(cells, habit, network)
    software = habit.software
    if software.overlaps_experts and any(b.is_routed and not b.gates_experts for b, _ in network.layers):
        software = replace(software, graphs=False, overlaps_experts=False)  # those kernels are for gated experts
    precision = precision_of(cells.get("precision", ""), machine)
    return Setting(network, layout, machine, software, precision, constants)


def network_of(cells: dict[str, str]) -> Network:
    context, name = whole(cells, "seq"), cells["model"]
    layers, hidden, heads = (whole(cells, key, 0) for key in ("layers", "hidden", "heads"))
    known = known_model(name)
    if not layers or not hidden:
        if known is None:
            raise UserError(f"it does not say the shapes of {name}, and they are not known here")
        if "w/o MTP" in name:
            known = replace(known, extra_layers=0.0)
        return known.with_context(context)
    is_routed = known is not None and any(block.is_routed for block, _ in known.layers)
    if is_routed and known is not None:
        return truncated(known, layers).with_context(context)
    vocabulary = whole(cells, "vocab", 50304)
    if not heads:
        if known is None:
            raise UserError("it does not say heads")
        return known.with_context(context)
    ffn = whole(cells, "ffn", 4 * hidden)
    kv = whole(cells, "kv_heads", heads)
    if re.search(r"MoE .*E\d+", name):
        return gshard(name, layers, hidden, heads, ffn, vocabulary, context)
    causal = "bert" not in name.lower()
    sizes = (name, layers, hidden, heads, ffn, vocabulary, context, kv)
    choices = [transformer(*sizes, gated=g, tied=t, causal=causal) for g in (False, True) for t in (False, True)]
    parameters = number(cells, "params_b")
    if parameters is None or "(" in name:
        gated = ffn != 4 * hidden
        return next(c for c in choices if c.layers[0][0].products[2].n == (2 if gated else 1) * ffn and not c.tied)
    return min(choices, key=lambda c: abs(c.parameters / 1e9 - parameters))


def truncated(network: Network, layers: int) -> Network:
    """The first layers of it."""
    made, left = [], layers
    for block, count in network.layers:
        if left > 0:
            made.append((block, min(count, left)))
            left -= count
    if layers < network.depth:  # a proxy: one dense layer first, as those who cut models down keep it
        dense = [(b, 1) for b, _ in network.layers if not b.is_routed][:1]
        rest = [b for b, _ in network.layers if b.is_routed]
        made = [*dense, (rest[-1], layers - len(dense))]
        return replace(network, layers=tuple(made), extra_layers=0.0)
    return replace(network, layers=tuple(made))


def gshard(name: str, layers: int, hidden: int, heads: int, ffn: int, vocabulary: int, context: int) -> Network:
    """Every second layer has experts, of which a token visits two, with room that is padded."""
    experts = int(re.search(r"E(\d+)", name)[1])  # type: ignore[index]
    plain = transformer_block(hidden, heads, ffn, gated=False)
    expert = transformer_block(hidden, heads, ffn, gated=False, experts=experts, visits=2)
    half = layers // 2
    return Network(name, ((plain, layers - half), (expert, half)), hidden, vocabulary, context, tied=False)


KINDS = (
    (r"gb300", "gb300"),
    (r"gb200", "gb200"),
    (r"b300", "b300"),
    (r"b200", "b200"),
    (r"h800", "h800"),
    (r"a800", "a800"),
    (r"h20($|[^0])", "h20"),
    (r"l40", "l40s"),
    (r"a10($|g|[^0])", "a10"),
    (r"mi250", "mi250x"),
    (r"h100.*(hbm2e|500w)", "h100-hbm2e"),
    (r"h100.*pcie", "h100-pcie"),
    (r"h100", "h100"),
    (r"h200", "h200"),
    (r"a100.*pcie", "a100-pcie"),
    (r"a100.*40", "a100-40"),
    (r"a100", "a100-80"),
    (r"v100.*16", "v100-16"),
    (r"v100", "v100-32"),
    (r"mi300", "mi300x"),
    (r"mi325", "mi325x"),
    (r"mi355", "mi355x"),
    (r"4090", "rtx4090"),
)
"""By what tables call a GPU; the first that matches."""


def machine_for(cells: dict[str, str], habit: Habit) -> Machine:
    gpu, notes = cells["gpu"].lower(), cells.get("notes", "")
    kind = next((name for pattern, name in KINDS if re.search(pattern, gpu)), None)
    if kind is None:
        raise UserError(f"the GPU {cells['gpu']!r} is not known here")
    machine = machine_of(kind)
    if habit.between_gb_per_s is not None:
        machine = replace(machine, between=Link(habit.between_gb_per_s, machine.between.latency_us))
    if "dgx-2" in gpu:  # 16 GPUs behind switches, which give every pair all six links
        machine = replace(machine, gpus_per_node=16)
    if "p3dn" in notes or "p3.24xlarge" in notes:
        machine = replace(machine, between=Link(100 / 8 / 8, 25.0))
    return machine


def precision_of(text: str, machine: Machine) -> str:
    text = text.lower()
    if "fp4" in text:
        return "fp4"
    if "fp8" in text or "float8" in text:
        return "fp8"
    if "fp32" in text or "tf32" in text:
        return "tf32" if "tf32" in machine.peak_tflops else "fp32"
    if not text and machine.architecture in ("hopper", "blackwell"):
        return "fp8"
    return "fp16" if machine.architecture == "volta" else "bf16"


def layout_of(cells: dict[str, str], habit: Habit, network: Network) -> PlanLayout:
    notes = cells.get("notes", "")
    tp, pp, cp, dp = whole(cells, "tp"), whole(cells, "pp"), whole(cells, "cp", 1), whole(cells, "dp")
    zero = whole(cells, "zero_stage", 3 if re.search(r"FSDP=[1-9]", notes) else habit.zero, least=0)
    chunks = whole(cells, "vpp", noted(notes, r"VP=(\d+)", noted(notes, r"vpp chunks=(\d+)", 1)))
    if re.search(r"VP(=| listed )NA", notes) and pp > 1:  # the finest, as the same runs say elsewhere
        chunks = max(1, network.depth // pp)
    ep = whole(cells, "ep", noted(notes, r"EP=(\d+)", 1))
    if "Interleaved" in notes and chunks == 1 and pp > 1:
        chunks = 2
    batch = whole(cells, "global_batch", None if pp > 1 else dp * whole(cells, "micro_batch", 1))
    micro = whole(cells, "micro_batch", 1)
    if pp * chunks > network.depth + 2 or pp == 1:
        chunks = 1
    schedule = "interleaved" if chunks > 1 else "1f1b"
    named = cells.get("schedule", "").lower()
    if "gpipe" in named:
        schedule = "gpipe"
    micro_batches = max(1, batch // (dp * micro))
    if schedule == "interleaved" and micro_batches % pp:
        micro_batches = -(-micro_batches // pp) * pp
        batch = micro_batches * dp * micro
    shard = noted(notes, r"zero1=(\d+)", 0)
    layout = PlanLayout(dp, tp, pp, cp, max(1, ep), zero, shard, schedule, chunks, micro, batch)
    etp = whole(cells, "etp", 0, least=0)
    return replace(layout, recompute=recompute_of(cells, habit), expert_tp=etp if ep > 1 else 0)


def noted(notes: str, pattern: str, default: int) -> int:
    found = re.search(pattern, notes)
    return int(found[1]) if found else default


def recompute_of(cells: dict[str, str], habit: Habit) -> Recompute:
    said = cells.get("recompute", "") or habit.recompute
    if said.startswith("selective-layer"):
        return "every"
    if said.startswith("selective"):
        return "selective" if "titan" in cells["source"] else "attention"
    return "full" if said == "full" else "none"


# ---- what was measured ---------------------------------------------------------------------------------------------


def measured_seconds(cells: dict[str, str], setting: Setting, habit: Habit) -> float | None:
    """The step time that it states, or that its throughput means, or its TFLOP/s by the convention of its source."""
    stated = number(cells, "step_time_s")
    if stated:
        return stated
    network, layout = setting.network, setting.layout
    batch = number(cells, "global_batch") or layout.dp * layout.micro_batch
    tokens, gpus = batch * network.context, layout.ranks
    rate = number(cells, "tokens_per_s_per_gpu")
    if rate:
        return tokens / (rate * gpus)
    if number(cells, "global_batch") is None:
        return None
    tflops = number(cells, "tflops_per_gpu")
    mfu = number(cells, "mfu")
    if tflops is None and mfu is not None:
        tflops = mfu / (100 if mfu > 1.5 else 1) * setting.machine.peak("bf16") / 1e12
    if not tflops:
        return None
    flops: Any = network.flops_per_token(counted_whole=habit.counts != "causal")
    if habit.counts == "hardware" and layout.recompute == "full":
        flops *= 4 / 3
    return tokens * flops / (tflops * 1e12 * gpus)

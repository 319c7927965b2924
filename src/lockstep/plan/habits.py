"""How the software behind published results works, by what its sources say. The planner's input for `plan check`."""

import re
from dataclasses import dataclass, replace

from lockstep.plan.software import MASTERS, NARROW, PURE, Kept, Software

MEGATRON_2021 = Software(
    "Megatron-LM 2021",
    attention="matrix",
    overlaps_gradients=False,
    sequence=False,
    gradient_bytes=2,
    kept=NARROW,
    buckets=False,
    allocator="nvidia-smi",
)
"""No sequence parallelism, attention's scores in memory, gradients reduced after backward."""
NEMO = Software("NeMo", fused=True, attention="flash", overlaps_tensor=True, gradient_bytes=2, kept=MASTERS)
FSDP = Software("FSDP", attention="flash2", gradient_bytes=4, gathers_at_two=True, allocator="reserved")


@dataclass(frozen=True)
class Habit:
    """Of the rows whose source begins so."""

    source: str
    software: Software
    recompute: str = "none"
    zero: int = 1
    """Where a row does not say."""
    between_gb_per_s: float | None = None
    """Of one GPU, where the source says."""
    counts: str = "whole"
    """How its TFLOP/s count: whole or causal attention, and what else (see `measured.py`)."""


HABITS = (
    Habit("mosaicml/llm-foundry", replace(FSDP, name="llm-foundry", fused_loss=True), zero=3),
    Habit("pytorch/torchtitan", replace(FSDP, name="torchtitan"), zero=3),
    Habit("Megatron SC21", replace(MEGATRON_2021), "full", 0, 25.0, "hardware"),
    Habit("NVIDIA/Megatron-LM", replace(MEGATRON_2021), "full", 0, 25.0, "hardware"),
    Habit(
        "huggingface/nanotron",
        Software("nanotron", attention="flash2", kept=MASTERS, allocator="reserved"),
        between_gb_per_s=50.0,
    ),
    Habit("NVIDIA/NeMo ", replace(NEMO, factor="nemo_2024"), counts="whole"),
    Habit(
        "NVIDIA-NeMo/Megatron-Bridge",
        replace(NEMO, name="Megatron-Bridge", stages="ends", sends_once=True),
        counts="causal",
    ),
    Habit("NVIDIA/dgxc-benchmarking", NEMO),
    Habit(
        "mlcommons/training_results",
        replace(NEMO, name="NeMo, MLPerf", graphs=True, stages="ends", factor="mlperf"),
    ),
    Habit("AI-Hypercomputer/gpu-recipes", NEMO),
    Habit("deepspeedai/DeepSpeed", replace(FSDP, name="DeepSpeed"), "full", 3, counts="hardware"),
    Habit(
        "VIA-Research/vTrain",
        replace(MEGATRON_2021, name="Megatron-DeepSpeed", factor="vtrain"),
        "full",
        0,
        12.5,
    ),
    Habit(
        "bigscience-workshop/bigscience",
        replace(MEGATRON_2021, name="Megatron-DeepSpeed", factor="bigscience"),
        "full",
        1,
        6.25,
    ),
    Habit(
        "MooreThreads/SimuMax",
        Software("Megatron-core", True, overlaps_gradients=False, kept=MASTERS, fused_loss=True, factor="simumax"),
        counts="whole",
    ),
    Habit(
        "InternLM/InternLM",
        Software("InternLM", attention="flash2", gradient_bytes=2, kept=NARROW, factor="internlm"),
        "none",
        1,
        6.25,
    ),
    Habit(
        "Oneflow-Inc/libai",
        Software("LiBai", True, "matrix", sequence=False, gradient_bytes=2, factor="libai"),
        "none",
        0,
    ),
    Habit(
        "alpa-projects/alpa",
        Software("Alpa", True, "matrix", sequence=False, gradient_bytes=2, kept=Kept(2, 0, 12), factor="alpa"),
        "none",
        0,
    ),
    Habit("AMD-AGI/Primus", Software("Primus", True), "none", 1),
    Habit(
        "hpcaitech/ColossalAI",
        Software("ColossalAI", attention="flash2", gradient_bytes=2, kept=NARROW, fused_loss=True),
        "full",
        2,
        counts="hardware",
    ),
)
UNKNOWN = Habit("", Software("not known", fused=True, kept=MASTERS, allocator="reserved"))
WORDS = (
    (r"nemo|megatron.?bridge", NEMO),
    (r"megatron|primus|simumax", Software("Megatron-core", fused=True, gradient_bytes=4, kept=MASTERS)),
    (r"fsdp|titan|composer|foundry|accelerate|axolotl|fairscale", FSDP),
    (r"deepspeed|zero|colossal", Software("DeepSpeed", attention="flash2", gradient_bytes=2, kept=NARROW)),
)
"""Of sources that are not listed: the software that their text names."""


def habit_of(source: str, notes: str, gpu: str = "") -> Habit:
    """By the source, then by what the row's notes say of it, and its GPU."""
    habit = next((h for h in HABITS if source.startswith(h.source)), None)
    if habit is None:
        text = f"{source} {notes}".lower()
        named = next((software for words, software in WORDS if re.search(words, text)), UNKNOWN.software)
        habit = replace(UNKNOWN, software=named)
    software = habit.software
    if "compile" in notes:
        software = replace(software, fused=True)
    if "AsyncTP" in notes:
        software = replace(software, overlaps_tensor=True)
    if software.name == "LiBai" and re.search(r"\bMegatron", notes) and "LiBai" not in notes:
        software = replace(software, name="Megatron-LM", fused=False)
    if "transformer|embedding" in notes:
        software = replace(software, stages="ends")
    if "mixed_precision=PURE" in notes:
        software = replace(software, gradient_bytes=2, kept=PURE)
    if "fp32 grad" in notes:
        software = replace(software, gradient_bytes=4, kept=Kept(2, 6, 12))
    release = re.search(r"\[(\d\d)\.(\d\d)[.\d]* NeMo", source)
    if release is not None and re.search(r"gb[23]00", gpu.lower()):  # as its recipes for these say
        software = replace(software, graphs_attention=True)
    new = release is not None and (int(release[1]), int(release[2])) >= (26, 6)
    if new and re.search(r"b[23]00", gpu.lower()):  # kernels and graphs of that release are for Blackwell
        software = replace(software, graphs=True, overlaps_experts=True)
    habit = replace(habit, software=software)
    stated = link_in(notes) or link_in(source)
    return replace(habit, between_gb_per_s=stated) if stated else habit


def link_in(text: str) -> float | None:
    """GB/s of one GPU to other nodes, of nodes with eight, where a text states it."""
    per_gpu = re.search(r"(\d+) ?Gb/s (?:RDMA )?per GPU", text)
    if per_gpu:
        return float(per_gpu[1]) / 8
    several = re.search(r"(\d+) ?x ?(\d+) ?Gb", text)
    if several:
        return float(several[1]) * float(several[2]) / 64
    node = re.search(r"(\d+) ?Gbps", text)
    return float(node[1]) / 64 if node else None

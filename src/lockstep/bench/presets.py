"""Questions that people ask of a benchmark, by name: each a config to start from, and the cases that answer it."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import psutil
import torch

from lockstep.bench.train import Case
from lockstep.config import CNN, GPT, Config, Data, ResNet, Train
from lockstep.data import DataSpec
from lockstep.errors import UserError
from lockstep.launch import Launch
from lockstep.layout.world import World
from lockstep.measure.peak import measured_peak
from lockstep.measure.timing import Timing
from lockstep.models import build_model, gpt_shape, parameter_count, training_flops

GIB = 1024**3


@dataclass(frozen=True)
class Preset:
    """A named set of cases. `config` is where it starts from; flags go on top of it."""

    what: str
    config: Config
    cases: Callable[[Config], list[Case]]
    steps: int = 20
    sets_model: bool = False
    """Its cases differ in the model: flags for it would change nothing."""
    one_by_one: bool = False
    """Not in turns: one model fills the memory."""
    largest_that_fits: bool = False
    """The size of its GPT, if none is asked for, is the largest that this machine's memory holds."""
    columns: dict[str, str] = field(default_factory=dict)
    """What its CSV begins with, under the names that others know -> our column."""
    reading: Callable[[list[Timing]], list[str]] = lambda timings: []
    """What the numbers say to the preset's question, in sentences."""


def by_strategy(*names: str) -> Callable[[Config], list[Case]]:
    """The same config under several strategies."""
    return lambda config: [Case(name, name, config) for name in names]


# ---- the cases of each ---------------------------------------------------------------------------------------------

CNN_SIZES = {"1M": ((16, 32), 512), "5M": ((32, 64, 128), 2432), "20M": ((64, 128, 256), 4864)}
"""Parameters on 3 x 32 x 32 images: channels, hidden width."""


def cnn_sizes(config: Config) -> list[Case]:
    models = {size: CNN(channels=channels, hidden=hidden) for size, (channels, hidden) in CNN_SIZES.items()}
    return [
        Case(f"{size} {name}", name, replace(config, model=model), details={"model_size": size})
        for size, model in models.items()
        for name in ("naive", "bucketed")
    ]


def bucket_sweep(config: Config) -> list[Case]:
    """Unbucketed first, then buckets of growing size."""
    cases = [Case("unbucketed", "overlap", config, details={"bucket_mb": None})]
    for bucket_mb in (0.25, 1.0, 5.0, 25.0, 100.0):
        sized = replace(config, parallel=replace(config.parallel, bucket_mb=bucket_mb))
        cases.append(Case(f"{bucket_mb:g} MiB", "bucketed", sized, details={"bucket_mb": bucket_mb}))
    return cases


def accumulation_sweep(config: Config) -> list[Case]:
    """Micro-batches of one size: each step communicates once, for more and more samples."""
    cases = []
    for count in (1, 2, 4, 8):
        train = replace(config.train, accumulation=count, batch_size=config.train.batch_size * count)
        accumulated = replace(config, train=train)
        cases.append(Case(f"accumulate {count}", "bucketed", accumulated, details={"accumulation": count}))
    return cases


def naive_ddp(config: Config) -> list[Case]:
    """One GPT, one all-reduce per parameter, and the same without waiting for each."""
    assert isinstance(config.model, GPT)
    shape = gpt_shape(config.model, tokens_for(config.model))
    details = {"model_size": config.model.size, "d_model": shape.d_model, "num_layers": shape.layers}
    return [Case(name, name, config, details=details) for name in ("naive", "flat", "overlap", "bucketed", "ddp")]


NAIVE_DDP_COLUMNS = {
    "model_size": "model_size",
    "d_model": "d_model",
    "num_layers": "num_layers",
    "total_time_ms": "step_ms",
    "compute_time_ms": "compute_ms",
    "comm_time_ms": "exposed_ms",
    "comm_fraction": "exposed_fraction",
    "num_comm_ops": "collectives",
}


def share_by_size(timings: list[Timing]) -> list[str]:
    lines = []
    for name in dict.fromkeys(t.strategy for t in timings):
        shares = [f"{t.exposed_share:.0%} at {t.details['model_size']}" for t in timings if t.strategy == name]
        lines.append(f"{name}: the step waits for communication {', '.join(shares)}")
    return lines


def best_bucket(timings: list[Timing]) -> list[str]:
    best = min(timings, key=lambda t: t.median_ms)
    alike = [t.label for t in timings if t is best or not t.ratio_to(best).differs_from_one]
    sizes = [f"{t.label} {t.median_ms:.1f} ms" for t in timings]
    noise = ", alike within the noise" if len(alike) > 1 else ""
    return [f"fastest here: {', '.join(alike)}{noise} ({'; '.join(sizes)})"]


def cost_per_sample(timings: list[Timing]) -> list[str]:
    costs = [f"{t.label} {1e3 * t.exposed_ms / t.batch_size:.0f} us" for t in timings]
    return [f"exposed communication per sample: {', '.join(costs)}"]


def waits_less(timings: list[Timing]) -> list[str]:
    """Against the first, which waits for everything."""
    first = timings[0]
    if not first.exposed_ms:
        return []
    less = [f"{t.label} {1 - t.exposed_ms / first.exposed_ms:.0%}" for t in timings[1:]]
    return [f"{first.label} waits {first.exposed_ms:.1f} ms of a step for communication; less by: {', '.join(less)}"]


def images(model: CNN | ResNet, batch: int) -> Config:
    """Synthetic images of CIFAR-10's shape."""
    return Config(model=model, data=Data("synthetic", samples=4 * batch), train=Train(batch_size=batch))


def tokens_for(model: GPT) -> DataSpec:
    return DataSpec("tokens", (model.context,), model.vocabulary or 256)


def text(model: GPT, batch: int, **train: Any) -> Config:
    return Config(model=model, data=Data("synthetic", samples=64 * batch), train=Train(batch_size=batch, **train))


GPT_25M = GPT(d_model=512, layers=8, heads=8, context=64, vocabulary=256)

PRESETS = {
    "cnn-sizes": Preset(
        "how the share of communication falls with the size of the model",
        images(CNN(), 64),
        cnn_sizes,
        sets_model=True,
        reading=share_by_size,
    ),
    "ddp-vs-fsdp": Preset(
        "a ResNet on CIFAR-10's shapes: samples/s, step time and memory, by hand and native",
        images(ResNet(depth=18, width=32, norm="group"), 32),
        by_strategy("ddp", "fsdp", "bucketed", "zero3"),
        steps=10,
    ),
    "naive-ddp": Preset(
        "what one all-reduce per parameter costs, on the largest GPT that fits",
        text(GPT(context=128, vocabulary=50_257), 2, optimizer="adamw", lr=1e-4),
        naive_ddp,
        steps=5,
        one_by_one=True,
        largest_that_fits=True,
        columns=NAIVE_DDP_COLUMNS,
    ),
    "buckets": Preset("which bucket size is best", text(GPT_25M, 4), bucket_sweep, reading=best_bucket),
    "hooks-vs-manual": Preset(
        "all-reduces that hooks launch during backward, against a loop after it",
        text(GPT_25M, 4),
        by_strategy("naive", "overlap", "flat", "bucketed"),
        reading=waits_less,
    ),
    "overlap": Preset(
        "how much of the communication each strategy hides behind backward",
        text(GPT_25M, 8),
        by_strategy("naive", "flat", "overlap", "bucketed", "ddp"),
        steps=12,
        reading=waits_less,
    ),
    "accumulation": Preset(
        "how micro-batches spread the cost of communication",
        text(replace(GPT_25M, context=16), 4),
        accumulation_sweep,
        steps=8,
        reading=cost_per_sample,
    ),
    "compression": Preset(
        "what compressed gradients save, and cost",
        text(GPT_25M, 4),
        by_strategy("bucketed", "bucketed+bf16", "bucketed+fp16", "bucketed+topk", "bucketed+powersgd"),
    ),
    "zero-stages": Preset(
        "memory and time of each way of sharding",
        text(GPT_25M, 4, optimizer="adamw", lr=1e-4),
        by_strategy("bucketed", "zero1", "zero2", "zero3", "ddp", "zero1_torch", "fsdp"),
        steps=12,
    ),
}


def with_known_names(rows: list[dict[str, Any]], columns: dict[str, str]) -> list[dict[str, Any]]:
    return [{**{theirs: row[ours] for theirs, ours in columns.items()}, **row} for row in rows]


def preset_named(name: str) -> Preset:
    if name not in PRESETS:
        listed = "\n".join(f"  {known:<16} {preset.what}" for known, preset in PRESETS.items())
        raise UserError(f"there is no preset {name!r}; there are\n{listed}")
    return PRESETS[name]


# ---- the largest model that fits -----------------------------------------------------------------------------------


def with_size_that_fits(config: Config, launch: Launch, nproc: int) -> tuple[Config, str]:
    """A GPT whose size was left open gets the largest that fits each rank's memory; and why, in words."""
    assert isinstance(config.model, GPT)
    room, where = memory_per_rank(launch, nproc)
    for size in reversed(("small", "medium", "large", "xl")):
        chosen = replace(config, model=replace(config.model, size=size))
        needed = training_bytes(chosen, nproc)
        if needed < 0.8 * room or size == "small":
            break
    words = f"GPT {size}: about {needed / GIB:.1f} GiB of the {room / GIB:.1f} GiB that each rank has of {where}"
    return chosen, words + ("" if needed < 0.8 * room else "; that may not fit: give --model.size custom and d_model")


def time_on_cpu(config: Config, steps: int) -> str:
    """How long so many steps take with all cores, in words: at half of the rate that they multiply matrices at."""
    assert isinstance(config.model, GPT)
    spec = tokens_for(config.model)
    with torch.device("meta"):
        flops = steps * config.train.batch_size * training_flops(build_model(config.model, spec), spec)
    seconds = flops / (0.5 * measured_peak(World()))
    smaller = "" if config.model.size == "small" else "; --model.size small is quicker"
    return f"{steps} steps in all take about {max(1, round(seconds / 60))} min on this CPU{smaller}"


def memory_per_rank(launch: Launch, nproc: int) -> tuple[float, str]:
    if launch.device != "cpu" and torch.cuda.is_available():
        sharing = -(-nproc // torch.cuda.device_count())
        return torch.cuda.get_device_properties(0).total_memory / sharing, torch.cuda.get_device_name(0)
    return psutil.virtual_memory().total / nproc, "this machine's memory"  # the same on every rank, at any moment


def training_bytes(config: Config, nproc: int) -> float:
    """A rank's need under naive data parallelism, roughly: state, activations of its share, logits."""
    model, train = config.model, config.train
    assert isinstance(model, GPT)
    spec = tokens_for(model)
    with torch.device("meta"):
        parameters = parameter_count(build_model(model, spec))
    shape = gpt_shape(model, spec)
    itemsize = 8 if train.precision == "fp64" else 4
    copies = 3 + (2 if train.optimizer != "sgd" else 1)  # weights, gradients, gradients in flight, the optimizer's
    tokens = -(-train.batch_size // nproc) * model.context
    activations = 18 * shape.layers * shape.d_model + 3 * shape.vocabulary  # elements per token
    return itemsize * (copies * parameters + tokens * activations)

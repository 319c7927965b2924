"""Questions that people ask of a benchmark, by name: each a config to start from, and the cases that answer it."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import psutil
import torch

from lockstep.bench.network import predicted_share
from lockstep.bench.train import Case
from lockstep.config import CNN, GPT, Config, Data, Parallel, ResNet, Train
from lockstep.data import DataSpec
from lockstep.errors import UserError
from lockstep.launch import Launch
from lockstep.layout.world import World
from lockstep.measure.peak import measured_peak
from lockstep.measure.timing import Timing
from lockstep.models import build_model, forward_flops, gpt_shape, on_meta, parameter_count, training_flops

GIB = 1024**3
IMAGES = DataSpec("images", (3, 32, 32), 10)
"""CIFAR-10's."""


@dataclass(frozen=True)
class Preset:
    """A named set of cases. `config` is where it starts from; flags go on top of it."""

    what: str
    config: Config
    cases: Callable[[Config], list[Case]]
    steps: int = 20
    sets_model: bool = False
    """Its cases differ in the model: flags for it would change nothing."""
    trains: bool = False
    """Its cases train to a loss, instead of taking some steps in turns."""
    one_by_one: bool = False
    """Not in turns: one model fills the memory."""
    is_large: bool = False
    """Minutes on a CPU, which is said. The size of a GPT, if none is asked for, is the largest that memory holds."""
    columns: dict[str, str] = field(default_factory=dict)
    """What its CSV begins with, under the names that others know -> our column."""
    csv: str | None = None
    """Where its CSV goes by default."""
    reading: Callable[[list[Timing]], list[str]] = lambda timings: []
    """What the numbers say to the preset's question, in sentences."""


def by_strategy(*names: str) -> Callable[[Config], list[Case]]:
    """The same config under several strategies."""
    return lambda config: [Case(name, name, config) for name in names]


# ---- the cases of each ---------------------------------------------------------------------------------------------

CNN_SIZES = {
    "linear": {"1M": ((16, 32), 512), "5M": ((32, 64, 128), 2432), "20M": ((64, 128, 256), 4864)},
    "both": {"16-32": ((16, 32), 128), "32-128": ((32, 64, 128), 512), "64-256": ((64, 128, 256), 2048)},
    "channels": {"0.3M": ((16, 32), 128), "0.9M": ((64, 128, 256), 128), "2.5M": ((128, 256, 512), 128)},
}
"""On 3 x 32 x 32 images, channels and hidden width of models that grow: in their linear layer, to 1M, 5M and 20M
parameters; in both, as people do; in their convolutions."""


def cnn_sizes(config: Config) -> list[Case]:
    cases = []
    for series, sizes in CNN_SIZES.items():
        for size, (channels, hidden) in sizes.items():
            model = CNN(channels=channels, hidden=hidden)
            built = on_meta(model, IMAGES)
            details = {
                "grows_in": series,
                "model_size": size,
                "flops_per_parameter": forward_flops(built, IMAGES) / parameter_count(built),
            }
            asked = replace(config, model=model)
            cases += [Case(f"{series} {size} {name}", name, asked, details=details) for name in ("naive", "bucketed")]
    return cases


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


def low_communication(config: Config) -> list[Case]:
    """What can be left out of what is sent: bits, numbers, steps, ranks."""
    names = ["bucketed", *(f"bucketed+{how}" for how in ("fp16", "int8", "1bit", "topk", "powersgd"))]
    names += ["local_sgd", *(f"local_sgd+{how}" for how in ("diloco", "streaming", "sparse", "gossip"))]
    cases = [Case(name, name, config) for name in names]
    muon = replace(config, train=replace(config.train, optimizer="muon"))
    signs = replace(config.train, optimizer="sgd", momentum=0.0, clip_norm=None, lr=0.5 * config.train.lr)
    sixteenth = replace(config.parallel, topk_ratio=4 / 64)
    return [
        *cases,
        Case("muloco", "local_sgd+diloco", muon),
        Case("bucketed+demo", "bucketed+demo", replace(config, train=signs, parallel=sixteenth)),
    ]


def naive_ddp(config: Config) -> list[Case]:
    """One GPT, one all-reduce per parameter, and the same without waiting for each."""
    assert isinstance(config.model, GPT)
    shape = gpt_shape(config.model, tokens_for(config.model).classes)
    details = {"model_size": config.model.size, "d_model": shape.d_model, "num_layers": shape.layers}
    return [Case(name, name, config, details=details) for name in ("naive", "flat", "overlap", "bucketed", "ddp")]


NAIVE_DDP_COLUMNS = {
    "model_size": "model_size",
    "d_model": "d_model",
    "num_layers": "num_layers",
    "total_time_ms": "step_ms",
    "compute_time_ms": "forward_backward_ms",
    "comm_time_ms": "exposed_ms",
    "comm_fraction": "exposed_fraction",
    "num_comm_ops": "collectives",
    "optimizer_time_ms": "optimizer_ms",
}


def share_by_size(timings: list[Timing]) -> list[str]:
    """What decides the share of communication: how much is computed for each parameter that is sent."""
    lines = []
    naive = [t for t in timings if t.strategy == "naive"]
    for series in CNN_SIZES:
        some = [t for t in naive if t.details["grows_in"] == series]
        grown = ", ".join(f"{t.parameters / 1e6:.2g}M" for t in some)
        flops = ", ".join(f"{t.details['flops_per_parameter']:.0f}" for t in some)
        there = [", ".join(f"{predicted_share(t, rate):.0%}" for t in some) for rate in (1.0, 10.0)]
        grows = "linear and convolutional layers" if series == "both" else f"its {GROWS[series]}"
        lines.append(
            f"grown in {grows} ({grown} parameters, {flops} FLOP each), naive waits {there[0]} of a step on 1 Gbit/s, "
            f"{there[1]} on 10"
        )
    lines.append(
        "a parameter is sent once a step and computed with once a pixel: what decides is FLOP per parameter (and how "
        "well the processor does them), not the size of the model"
    )
    return lines


GROWS = {"linear": "linear layer", "channels": "convolutions"}


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


def as_shipped() -> Config:
    """As configs/ddp_resnet_cifar10.yaml and fsdp_resnet_cifar10.yaml, on synthetic images of that shape."""
    train = Train(batch_size=256, lr=0.1, momentum=0.9, weight_decay=5e-4, schedule="cosine", warmup_steps=196)
    return Config(model=ResNet(depth=18), data=Data("synthetic", samples=1024), train=train)


def tokens_for(model: GPT) -> DataSpec:
    return DataSpec("tokens", (model.context,), model.vocabulary or 256)


def text(model: GPT, batch: int, **train: Any) -> Config:
    return Config(model=model, data=Data("synthetic", samples=64 * batch), train=Train(batch_size=batch, **train))


GPT_25M = GPT(d_model=512, layers=8, heads=8, context=64, vocabulary=256)
EXPERTS_14M = replace(GPT_25M, d_model=256, layers=4, context=128, experts=16, active=2, activation="swiglu")

TEXT_GPT = GPT(d_model=128, layers=4, heads=4, context=64, vocabulary=256)

PRESETS = {
    "cnn-sizes": Preset(
        "what decides the share of communication: models that grow in linear layers, in convolutions, in both",
        images(CNN(), 64),
        cnn_sizes,
        sets_model=True,
        reading=share_by_size,
    ),
    "ddp-vs-fsdp": Preset(
        "configs/ddp_resnet_cifar10.yaml and fsdp_...: samples/s, step time and memory, native and by hand",
        as_shipped(),
        by_strategy("ddp", "fsdp", "bucketed", "zero3"),
        steps=5,
        is_large=True,
    ),
    "naive-ddp": Preset(
        "what one all-reduce per parameter costs, on the largest GPT that fits",
        text(GPT(context=128, vocabulary=50_257), 2, optimizer="adamw", lr=1e-4),
        naive_ddp,
        steps=5,
        one_by_one=True,
        is_large=True,
        columns=NAIVE_DDP_COLUMNS,
        csv="results/naive_ddp/benchmark_results.csv",
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
        by_strategy("bucketed", *(f"bucketed+{how}" for how in ("bf16", "fp16", "int8", "1bit", "topk", "powersgd"))),
    ),
    "low-communication": Preset(
        "over a slow link: how long, and how much traffic, until a GPT has learned as much as under bucketed",
        replace(
            text(TEXT_GPT, 16, optimizer="adamw", lr=2e-3, warmup_steps=20, steps=192, clip_norm=1.0),
            data=Data("text", max_bytes=2_000_000),
            parallel=Parallel(sync_every=16),
        ),
        low_communication,
        trains=True,
    ),
    "zero-stages": Preset(
        "memory and time of each way of sharding",
        text(GPT_25M, 4, optimizer="adamw", lr=1e-4),
        by_strategy("bucketed", "zero1", "zero2", "zero3", "ddp", "zero1_torch", "fsdp"),
        steps=12,
    ),
    "experts": Preset(
        "experts over ranks: by hand, and natively (FSDP2, DTensors, all_to_all_single), which the others are held to",
        text(EXPERTS_14M, 16, optimizer="adamw", lr=1e-4),
        by_strategy("fsdp,ep=2:native", "fsdp,ep=2", "zero3,ep=2", "bucketed,ep=2", "bucketed,ep=2:halves"),
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
    spec = tokens_for(config.model) if isinstance(config.model, GPT) else IMAGES
    with torch.device("meta"):
        flops = steps * config.train.batch_size * training_flops(build_model(config.model, spec), spec)
    seconds = flops / (0.5 * measured_peak(World()))
    smaller = "; --model.width 8 --train.batch-size 32 are quicker"
    if isinstance(config.model, GPT):
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
    parameters = parameter_count(on_meta(model, spec))
    shape = gpt_shape(model, spec.classes)
    itemsize = 8 if train.precision == "fp64" else 4
    copies = 3 + (2 if train.optimizer != "sgd" else 1)  # weights, gradients, gradients in flight, the optimizer's
    tokens = -(-train.batch_size // nproc) * model.context
    activations = 18 * shape.layers * shape.d_model + 3 * shape.vocabulary  # elements per token
    return itemsize * (copies * parameters + tokens * activations)

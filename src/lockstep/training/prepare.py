"""From a config to something that can take steps: the data, the model with what was asked for, the strategy."""

import copy
import warnings
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from lockstep.comm.collectives import all_gather_objects
from lockstep.config import GPT, Config, Own
from lockstep.data import DataSet, DataSpec, Streamed, build_data, digest, first_of
from lockstep.errors import UserError
from lockstep.launch.calls import LONG
from lockstep.layout.world import World
from lockstep.measure.expected import named_config
from lockstep.models import build_model, check_outputs, is_users, training_flops
from lockstep.models.float8 import in_float8
from lockstep.models.initial import SCHEME, Deferred, fill_adapters
from lockstep.models.lora import add_lora
from lockstep.models.loss import loss_for
from lockstep.strategies import Options, ParallelModel, make_layout, parallelize
from lockstep.strategies.combining import check_float8, check_inputs, check_optimizer, check_signs
from lockstep.strategies.options import COMPUTE_DTYPES
from lockstep.training.optimizer import optimizer_factory


def options_for(config: Config, dataset: DataSet) -> Options:
    train = config.train
    return Options(
        loss=loss_for(dataset.spec.kind, train.loss, dataset.spec.classes, train.z_loss),
        make_optimizer=optimizer_factory(train),
        parallel=config.parallel,
        accumulation=train.accumulation,
        clip_norm=train.clip_norm,
        clip_value=train.clip_value,
        ema=train.ema,
        precision=train.precision,
        compile=train.compile,
        recompute=train.recompute,
        recompute_every=train.recompute_every,
        batch_size=train.batch_size,
        example=first_of(dataset.train).inputs,
        save_trained_only=config.lora.rank > 0,
    )


def load_data(world: World, config: Config) -> DataSet:
    """Build the data set in three turns, so that one download serves all: rank 0, the first rank of every other
    machine (its disk may be another), the rest. A download may take longer than a collective's time-out.
    """
    if world.size == 1:
        return build_data(config, world.device)
    slow = dist.new_group(backend="gloo", timeout=timedelta(hours=6), group_desc=f"{LONG}data")
    turn = 0 if world.is_main else 1 if world.local_rank == 0 else 2
    dataset = None
    for current in range(3):
        if current == turn:
            dataset = build_data(config, world.device)
        dist.barrier(group=slow)
    dist.destroy_process_group(slow)
    assert dataset is not None
    check_same_data(config, dataset)
    return dataset


def check_same_data(config: Config, dataset: DataSet) -> None:
    """Ranks read shares of one data set: a function that gives each another one would train on samples twice."""
    if config.data.name != "own":
        return
    everyone = all_gather_objects(digest(dataset))
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise UserError(
                f"data.import {config.data.import_} gives other samples on rank {rank} than on rank 0; every rank must "
                f"get the same data set, of which it reads its share: seed what is random, and shard nothing"
            )


def load_head(world: World, config: Config) -> DataSet:
    """For some steps only: of a stream, what a few batches need."""
    dataset = load_data(world, config)
    if isinstance(dataset.train, Streamed):
        return replace(dataset, train=dataset.train.head(2 * config.train.batch_size))
    return dataset


def prepared_model(config: Config, spec: DataSpec, plain: nn.Module | None = None) -> nn.Module:
    """The config's model on one device, with its adapters.

    `plain` is what `build_model` gives for it, where the caller has it already; it is copied.
    """
    model = build_model(config.model, spec, config.train.seed) if plain is None else copy.deepcopy(plain)
    if config.train.weights is not None:
        load_weights(model, Path(config.train.weights))
    return fill_adapters(with_changed_layers(model, config), config.train.seed)


def with_changed_layers(model: nn.Module, config: Config) -> nn.Module:
    """Its linear layers as the config wants them: with adapters, or multiplying in FP8."""
    if config.train.precision == "fp8":
        in_float8(model, config.fp8.scaling)
    lora = config.lora
    if lora.rank > 0:
        frozen_dtype = torch.bfloat16 if lora.frozen_dtype == "bf16" else None
        add_lora(model, lora.rank, lora.alpha, lora.targets, frozen_dtype)
    return model


def frozen_weights(config: Config) -> dict[str, str]:
    """Where those come from that a LoRA checkpoint lacks, if that is the seed."""
    by_seed = config.lora.rank > 0 and config.train.weights is None and not is_users(config.model)
    return {"initial_weights": SCHEME} if by_seed else {}


def deferred_model(config: Config, spec: DataSpec) -> Deferred:
    """The same as `prepared_model`, to be made one module at a time."""
    return Deferred(lambda: with_changed_layers(build_model(config.model, spec), config), config.train.seed)


def load_weights(model: nn.Module, file: Path) -> None:
    """Fill a plain model from a safetensors file; tied weights may be in it once or twice."""
    try:
        weights = load_file(file)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file}: cannot be read as safetensors ({error})") from None
    missing, unexpected = model.load_state_dict(weights, strict=False)
    tied = {n for n, _ in model.named_parameters(remove_duplicate=False)} - {n for n, _ in model.named_parameters()}
    missing = [name for name in missing if name not in tied]
    if missing or unexpected:
        what = f"has no {missing[0]}" if missing else f"has {unexpected[0]}, which the model has not"
        raise UserError(f"{file}: {what}; build the model that it was saved from")


def check_device(world: World, config: Config) -> None:
    """Refuse what this device cannot do, in one line."""
    model, precision, on_gpu = config.model, config.train.precision, world.device.type == "cuda"
    if not isinstance(model, GPT):
        return
    kernel = model.attention
    if not on_gpu and kernel in ("flash", "cudnn", "efficient"):
        raise UserError(f"model.attention {kernel} is for GPUs, and these ranks run on the CPU; use auto or math")
    if not on_gpu and model.own_gelu:
        raise UserError("model.own_gelu is for GPUs, and these ranks run on the CPU; give --model.no-own-gelu")
    if kernel in ("cudnn", "flash") and precision not in COMPUTE_DTYPES:
        raise UserError(f"model.attention {kernel} does not compute in {precision}; use bf16, fp16 or fp8")
    if kernel == "efficient" and precision == "fp64":
        raise UserError("model.attention efficient does not compute in fp64; use auto or math")
    if kernel in ("cudnn", "efficient") and model.kv_heads not in (None, model.heads):
        raise UserError(f"model.attention {kernel} does not know shared key and value heads; use auto, flash or math")
    if model.own_gelu and (model.activation != "gelu" or model.norm != "layernorm"):
        raise UserError(
            "model.own_gelu is for model.activation gelu with model.norm layernorm; give --model.no-own-gelu"
        )


def prepare_strategy(world: World, config: Config, dataset: DataSet, plain: nn.Module | None = None) -> ParallelModel:
    """The model of the config (a copy of `plain` with what was asked for), spread as the config says."""
    check_device(world, config)
    check_optimizer(config.train, config.parallel)
    check_signs(config.train, config.parallel)
    check_float8(config, world.device.type)
    check_inputs(dataset.spec.example, config.parallel)
    if isinstance(config.model, Own):
        check_outputs(config.model, dataset.spec, config.train.loss)
    # A CPU without units for bf16 computes all the same; torch warns of it with pages of stack frames.
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
    is_whole = plain is not None or config.train.weights is not None or is_users(config.model)
    model = prepared_model(config, dataset.spec, plain) if is_whole else deferred_model(config, dataset.spec)
    strategy = parallelize(model, make_layout(world, config.parallel), options_for(config, dataset))
    with torch.device("meta"):
        strategy.flops_per_sample = training_flops(build_model(config.model, dataset.spec), dataset.spec)
    return strategy


def prepare_named(
    world: World, config: Config, name: str, dataset: DataSet, plain: nn.Module | None = None
) -> ParallelModel:
    """The same, with the strategy of that name."""
    return prepare_strategy(world, named_config(config, name), dataset, plain)

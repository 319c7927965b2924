"""Any nn.Module as a network of the planner's: its matrix products and convolutions, seen on the meta device.

A sample counts as one token. A product of a layer that runs over positions or pixels has so many rows for each sample.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.config import GPT, HF, Config
from lockstep.config.user_code import where_and_what
from lockstep.data import DataSpec
from lockstep.errors import UserError
from lockstep.models import build_model
from lockstep.models.blocks import blocks_of
from lockstep.plan.describe import network_of_gpt
from lockstep.plan.network import Layer, Network, Product

SAMPLES = 2
"""Of the batch that is traced: a BatchNorm takes no single one."""


@dataclass
class Seen:
    """What ran inside one block."""

    products: list[Product] = field(default_factory=list)
    elements: float = 0.0
    """Of all results, of one sample."""
    width: float = 0.0
    """Of the last result."""


class Watch(TorchDispatchMode):
    """Notes every operation under the block that is running."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: dict[str, Seen] = {"": Seen()}
        self.running = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        seen = self.blocks[self.running]
        seen.products += [Product(k, n, rows=rows / SAMPLES) for rows, k, n in products_of(func, args, result)]
        if isinstance(result, Tensor) and result.is_floating_point() and not func.is_view:
            seen.elements += result.numel() / SAMPLES
            seen.width = result.numel() / SAMPLES
        return result


def products_of(func: Any, args: Any, result: Any) -> list[tuple[float, int, int]]:
    """(rows, k, n) of an operation that multiplies matrices."""
    name = func.overloadpacket.__name__
    if name in ("mm", "bmm"):
        a, b = args[0], args[1]
        return [(prod(a.shape[:-1]), a.shape[-1], b.shape[-1])]
    if name in ("addmm", "baddbmm"):
        a, b = args[1], args[2]
        return [(prod(a.shape[:-1]), a.shape[-1], b.shape[-1])]
    if name in ("convolution", "_convolution"):
        weight = args[1]
        rows = result.numel() / weight.shape[0]
        return [(rows, prod(weight.shape[1:]), weight.shape[0])]
    if name.startswith("_scaled_dot_product"):
        q, k = args[0], args[1]
        rows, context, dim = prod(q.shape[:-1]), k.shape[-2], q.shape[-1]
        return [(rows, dim, context), (rows, context, dim)]
    return []


def traced(build: Callable[[], nn.Module], shape: tuple[int, ...], name: str, dtype: torch.dtype | None) -> Network:
    """`shape`: of one sample."""
    if any(size < 1 for size in shape):
        raise UserError(f"a sample of {'x'.join(map(str, shape))} is nothing; sizes must be 1 or more")
    try:
        with torch.device("meta"):
            model = build()
            sample = torch.zeros((SAMPLES, *shape), dtype=dtype)
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # a user's code
        raise UserError(f"{name} cannot be built on the meta device: {where_and_what(error)}") from error
    if not isinstance(model, nn.Module):
        raise UserError(f"{name} must give an nn.Module, and gave a {type(model).__name__}")
    watch = Watch()
    named = dict(blocks_of(model))
    handles = []
    for block_name, block in named.items():
        watch.blocks[block_name] = Seen()
        handles += [
            block.register_forward_pre_hook(lambda *_, at=block_name: setattr(watch, "running", at)),
            block.register_forward_hook(lambda *_: setattr(watch, "running", "")),
        ]
    try:
        with watch, torch.no_grad():
            model(sample)
    except (Exception, SystemExit) as error:  # a user's code
        text = "x".join(map(str, shape))
        raise UserError(f"{name} cannot be traced on samples of {text}: {where_and_what(error)}") from error
    finally:
        for handle in handles:
            handle.remove()
    inside = {p for block in named.values() for p in block.parameters()}
    blocks = [made(watch.blocks[n], sum(p.numel() for p in b.parameters())) for n, b in named.items()]
    outside = sum(p.numel() for p in model.parameters() if p not in inside)
    if watch.blocks[""].products or not blocks:
        blocks.append(made(watch.blocks[""], outside))
    elif blocks and outside:
        last = list(named)[-1]
        blocks[-1] = made(watch.blocks[last], outside + sum(p.numel() for p in named[last].parameters()))
    return Network(name, tuple((block, 1) for block in blocks), blocks[-1].width, 0, 1)


def made(seen: Seen, parameters: int) -> Layer:
    counted = Layer(tuple(seen.products), None, max(1, round(seen.width)), round(seen.elements))
    return Layer(counted.products, None, counted.width, counted.inner, parameters - counted.parameters)


def network_of_config(config: Config, spec: DataSpec) -> Network:
    """Whatever model a config names."""
    if isinstance(config.model, GPT):
        return network_of_gpt(config.model)
    dtype = torch.int64 if spec.kind == "tokens" else None
    return traced(lambda: build_model(config.model, spec), spec.shape, config.model.name, dtype)


def spec_without_data(config: Config) -> DataSpec:
    """What the samples look like, as far as the config says: nothing is read or fetched."""
    data, model = config.data, config.model
    if isinstance(model, GPT):
        return DataSpec("tokens", (model.context,), model.vocabulary or 256)
    if isinstance(model, HF):
        return DataSpec("tokens", (model.context,), 2)
    shape = {"digits": (1, 8, 8), "mnist": (1, 28, 28)}.get(data.name, (3, 32, 32))
    if data.name == "synthetic" and len(data.shape) == 3 and model.name != "mlp":
        shape = (data.shape[0], data.shape[1], data.shape[2])
    return DataSpec("images", shape, 10)

"""Initial weights by name: the numbers of a module come from the seed and the module's name, and from nothing else.

Built in one go, the weights of a module depend on every module that was built before it. By name they do not: the
model is built on PyTorch's meta device, where its tensors have shapes and no memory, and then any module's weights can
be made without the others. So a model that no rank could hold is made one module at a time (`Deferred`), and a change
in one layer leaves the others' initial weights as they are.

    model.initialize(module)     if a model has it: fill this module's own parameters; else its `reset_parameters`
"""

import copy
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import nan
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lockstep.models.lora import LoRALinear

Initialize = Callable[[nn.Module], None]

SCHEME = "by module"
"""How weights follow from a seed: a LoRA checkpoint, without the frozen ones, is only loaded where it is the same."""


FILLS: frozenset[Any] = frozenset(
    [getattr(torch.nn.init, name) for name in dir(torch.nn.init) if name.endswith("_") and not name.startswith("_")]
    + [torch.Tensor.normal_, torch.Tensor.uniform_, torch.Tensor.zero_, torch.Tensor.fill_]
)


class Unfilled(TorchFunctionMode):
    """Inside, tensors on the meta device are not filled. They have no numbers, and the calls would take most of the
    time of building a model: PyTorch sends each through Python to infer the shape of its result.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in FILLS:
            tensor = args[0] if args else (kwargs or {}).get("tensor")
            if isinstance(tensor, Tensor) and tensor.is_meta:
                return tensor
        return func(*args, **(kwargs or {}))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random numbers of this seed inside; outside they go on as if nothing had been drawn."""
    generator = torch.default_generator  # the CPU's alone: torch.manual_seed reseeds those of GPUs too
    before = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(before)


def seed_of(seed: int, name: str) -> int:
    """Of one module: the same on every machine."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # torch takes 63 bits


@dataclass
class Deferred:
    """A model that is not built yet: `build` makes it, of our own modules, on the default device."""

    build: Callable[[], nn.Module]
    seed: int

    def on_meta(self) -> tuple[nn.Module, Iterator[tuple[str, Tensor]]]:
        """The model on the meta device, and (name, whole tensor) of each of its parameters and buffers, on the CPU."""
        with torch.device("meta"):
            model = self.build()
        return model, initial_tensors(model, self.seed)

    def whole(self) -> nn.Module:
        """The model on the CPU."""
        model, tensors = self.on_meta()
        fill_in(model, tensors)
        return model


def initial_tensors(model: nn.Module, seed: int) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of each parameter and buffer of a model on the meta device, made module by module. What is shared
    is the first module's. The model may be sharded meanwhile: its modules are copied, without memory, at once.
    """
    initialize: Initialize = getattr(model, "initialize", reset)
    names = {tensor: name for name, tensor in reversed([*model.named_parameters(), *model.named_buffers()])}
    parts = []
    for name, module in model.named_modules():
        tensors = _direct(module)
        mine = {key: names[tensor] for key, tensor in tensors.items() if names[tensor] == _join(name, key)}
        if mine:  # else all of it is shared with modules before
            kinds = {key: (tensor.shape, tensor.dtype) for key, tensor in tensors.items()}
            parts.append((name, shell_of(module), mine, kinds))

    def make() -> Iterator[tuple[str, Tensor]]:
        for name, shell, mine, kinds in parts:
            for key, (shape, dtype) in kinds.items():
                floating = dtype.is_floating_point
                _assign(shell, key, torch.full(shape, nan) if floating else torch.zeros(shape, dtype=dtype))
            fill(shell, initialize, seed, name)
            made = _direct(shell)
            unfilled = [key for key, tensor in made.items() if is_unfilled(tensor)]
            assert not unfilled, f"nothing initializes {unfilled} of {name or 'the model'}"
            shell._parameters, shell._buffers = {}, {}
            for key, full_name in mine.items():
                yield full_name, made.pop(key).detach().to(kinds[key][1])

    return make()


@torch.no_grad()
def fill(module: nn.Module, initialize: Initialize, seed: int, name: str) -> None:
    """A module's own parameters and buffers; an adapter's numbers are not those of the layer under it."""
    with seeded(seed_of(seed, name)):
        initialize(module)
    if isinstance(module, LoRALinear):
        with seeded(seed_of(seed, f"{name}.lora")):
            module.reset_adapter()


@torch.no_grad()
def fill_adapters(model: nn.Module, seed: int) -> nn.Module:
    """Of a model that has its weights."""
    for name, module in model.named_modules():
        if isinstance(module, LoRALinear):
            with seeded(seed_of(seed, f"{name}.lora")):
                module.reset_adapter()
    return model


def is_unfilled(tensor: Tensor) -> bool:
    """Still what it was before: its first element says so."""
    return not tensor.is_meta and tensor.numel() > 0 and bool(tensor.view(-1)[0].isnan())


def reset(module: nn.Module) -> None:
    """As PyTorch's layers fill themselves."""
    reset_parameters: Callable[[], None] = module.reset_parameters  # type: ignore[assignment]
    reset_parameters()


def fill_in(model: nn.Module, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Give a model on the meta device its tensors; what is shared stays shared."""
    real: dict[Tensor, Tensor] = {}
    here = dict([*model.named_parameters(), *model.named_buffers()])
    for name, tensor in tensors:
        before = here[name]
        is_parameter = isinstance(before, nn.Parameter)
        real[before] = nn.Parameter(tensor, before.requires_grad) if is_parameter else tensor
    for module in model.modules():
        for key, before in _direct(module).items():
            _assign(module, key, real[before])


def shell_of(module: nn.Module) -> nn.Module:
    """The module without its children, hooks and memory: something to fill."""
    shell = copy.copy(module)
    shell.__dict__.update(_modules={}, _forward_hooks={}, _forward_pre_hooks={})
    shell._parameters = dict.fromkeys(module._parameters)
    shell._buffers = dict.fromkeys(module._buffers)
    return shell


def _direct(module: nn.Module) -> dict[str, Tensor]:
    """A module's own parameters and buffers, without its children's."""
    return {key: t for key, t in [*module._parameters.items(), *module._buffers.items()] if t is not None}


def _assign(module: nn.Module, key: str, tensor: Tensor) -> None:
    if key in module._buffers:
        module._buffers[key] = tensor
    else:
        parameter = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, tensor.is_floating_point())
        module._parameters[key] = parameter


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key

"""What loops have besides forward and backward, under any strategy: decay groups, clipping, an average of the weights,
freezing, the whole model at the end.

python examples/recipes.py --strategy zero3 --nproc 2
"""

import argparse

import torch
from own_loop import STRATEGIES, wrapped
from torch import Tensor, nn

import lockstep


def decay_groups(model: nn.Module) -> list[dict[str, object]]:
    """Biases and norms do not decay. Parameters keep their dimensions under every wrapper."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def clipped_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    """By the norm of the whole model's gradient, whatever this rank holds of it; every rank calls it."""
    norm = lockstep.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return norm


def averaged(average: dict[str, Tensor], model: nn.Module) -> None:
    """Of what this rank holds: the parts' averages are the average's parts."""
    for name, parameter in model.named_parameters():
        average.setdefault(name, parameter.detach().clone()).lerp_(parameter.detach(), 0.01)


def freeze(model: nn.Module, layer: str, frozen: bool) -> None:
    """Between two steps."""
    for name, parameter in model.named_parameters():
        if f".{layer}." in f".{name}":
            parameter.requires_grad_(not frozen)


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """Every rank calls it; a wrapper that shards gathers, of any other the module has it all."""
    gather = getattr(model, "full_state_dict", None)
    state: dict[str, Tensor] = gather() if gather is not None else getattr(model, "module", model).state_dict()
    return state


def train(strategy: str, steps: int) -> float:
    world = lockstep.init()
    model: nn.Module = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 4)).to(world.device)
    model, optimizer = wrapped(model, strategy)
    if strategy not in ("zero1", "zero2"):  # these are given their groups before the wrapper: decay_groups(model)
        optimizer = torch.optim.AdamW(decay_groups(model), lr=1e-2)
    average: dict[str, Tensor] = {}
    norm = torch.zeros(())
    for step in range(1, steps + 1):
        freeze(model, "1", frozen=step <= steps // 2)
        inputs = torch.randn(64, 32, generator=torch.Generator().manual_seed(step))
        batch = (inputs, inputs[:, :4].argmax(1))
        mine, targets = (t.to(world.device) for t in lockstep.shard_batch(batch, world.rank, world.size))
        nn.functional.cross_entropy(model(mine), targets).backward()
        norm = clipped_step(model, optimizer)
        averaged(average, model)
    state = whole_state(model) if strategy != "fsdp" else {}
    if world.is_main:
        print(f"norm of the last gradient {float(norm):.4f}, {len(state)} tensors in the whole state")
    return float(norm)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", choices=STRATEGIES, default="zero3")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--nproc", type=int, default=2)
    arguments = parser.parse_args()
    lockstep.spawn(train, arguments.strategy, arguments.steps, nproc=arguments.nproc)

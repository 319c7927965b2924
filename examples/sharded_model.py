"""A model that no rank ever holds whole: built on the meta device, filled unit by unit, trained in bf16, saved whole.

python examples/sharded_model.py --nproc 2
"""

import argparse

import torch
from torch import Tensor, nn

import lockstep


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def train(width: int, layers: int, steps: int, file: str) -> float:
    world = lockstep.init()
    with torch.device("meta"):  # names and shapes, no memory
        model = nn.Sequential(*(Block(width) for _ in range(layers)))
    sharded = lockstep.FullyShardedDataParallel(
        model, shard=Block, compute_dtype=torch.bfloat16, device=world.device
    )  # each Block is a unit: filled by its layers' reset_parameters, then cut
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-3)
    loss = torch.zeros(())
    for step in range(1, steps + 1):
        inputs = torch.randn(64, width, generator=torch.Generator().manual_seed(step * world.size + world.rank))
        inputs = inputs.to(world.device)
        loss = (sharded(inputs) - inputs.roll(1, dims=1)).square().mean()
        loss.backward()
        norm = sharded.clip_grad_norm_(1.0)  # over all ranks
        optimizer.step()
        optimizer.zero_grad()
        if world.is_main and step % 10 == 0:
            print(f"step {step:4}  loss of rank 0's samples {loss.item():.4f}  norm {float(norm):.3f}")
    state = sharded.full_state_dict(only_rank=0)  # streamed: no rank needs more than its share and one unit
    if world.is_main:
        torch.save(state, file)
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", default="weights.pt", help="the whole model's weights, by name")
    given = parser.parse_args()
    lockstep.spawn(train, given.width, given.layers, given.steps, given.out, nproc=given.nproc)


if __name__ == "__main__":
    main()

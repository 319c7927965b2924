"""A small GPT on the bytes of Python's own sources, sharded over the ranks (ZeRO-3); then it writes something.

python examples/language_model.py --nproc 2 --steps 200
"""

import argparse
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import lockstep
from lockstep.inference.generate import generate
from lockstep.models.gpt import GPT, Shape


def text(most: int = 2_000_000) -> Tensor:
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in sources)[:most]), dtype=torch.uint8)


def train(steps: int, context: int) -> str:
    world = lockstep.init()
    shape = Shape(d_model=128, layers=4, heads=4, kv_heads=4, context=context, vocabulary=256)
    model = lockstep.FullyShardedDataParallel(GPT(shape).to(world.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    stream = text()
    for step in range(1, steps + 1):
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(len(stream) - context - 1, (16,), generator=generator)
        windows = torch.stack([stream[s : s + context + 1].long() for s in starts.tolist()])
        mine = lockstep.shard_batch(windows, world.rank, world.size).to(world.device)
        loss = F.cross_entropy(model(mine[:, :-1]).flatten(0, 1), mine[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if world.is_main and step % 20 == 0:
            print(f"step {step:4}  loss {loss.item():.4f}", flush=True)
    whole = GPT(shape)
    whole.load_state_dict(model.full_state_dict())  # every rank has all of it, by the model's own names
    prompt = torch.tensor(list(b"def "))
    return bytes(generate(whole.eval(), prompt, tokens=60).tolist()).decode(errors="replace")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("nproc", 2), ("steps", 200), ("context", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    print(lockstep.spawn(train, given.steps, given.context, nproc=given.nproc)[0])


if __name__ == "__main__":
    main()

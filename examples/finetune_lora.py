"""Adapters (LoRA) for a causal language model of Hugging Face's, on a text file: only they are trained, sent and saved.

    python examples/finetune_lora.py --model my-llama --text book.txt --nproc 2

Tokens are bytes here, which any vocabulary of 256 or more has room for; lockstep tokenize uses a model's own tokenizer.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F

import lockstep
from lockstep.config import HF
from lockstep.models.hf import build_hf
from lockstep.models.lora import add_lora


def train(folder: str, text: str, targets: tuple[str, ...], steps: int, context: int) -> dict[str, int]:
    """Returns how many parameters the model has, and how many were trained."""
    world = lockstep.init()
    model = add_lora(build_hf(HF(path=folder)), rank=4, alpha=8.0, targets=targets)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    counts = {"all": sum(p.numel() for p in model.parameters())}
    counts["trained"] = sum(p.numel() for p in model.parameters() if p.requires_grad)
    parallel = lockstep.DataParallel(model.to(world.device))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    stream = torch.frombuffer(bytearray(Path(text).read_bytes()), dtype=torch.uint8)
    for step in range(1, steps + 1):
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(len(stream) - context - 1, (8,), generator=generator)
        windows = torch.stack([stream[s : s + context + 1].long() for s in starts.tolist()])
        mine = lockstep.shard_batch(windows, world.rank, world.size).to(world.device)
        loss = F.cross_entropy(parallel(mine[:, :-1]).flatten(0, 1), mine[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if world.is_main and step % 10 == 0:
            print(f"step {step:4}  loss {loss.item():.4f}", flush=True)
    if world.is_main:
        state = model.state_dict()
        torch.save({name: state[name] for name in trained}, "adapters.pt")
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="its folder: config.json, and weights (*.safetensors)")
    parser.add_argument("--text", required=True)
    parser.add_argument("--targets", nargs="+", default=["q_proj", "v_proj"], help="linear layers, by their last name")
    for name, default in (("nproc", 2), ("steps", 50), ("context", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    settings = (given.model, given.text, tuple(given.targets), given.steps, given.context)
    counts = lockstep.spawn(train, *settings, nproc=given.nproc)[0]
    print(f"trained {counts['trained']:,} of {counts['all']:,} parameters; they are in adapters.pt")


if __name__ == "__main__":
    main()

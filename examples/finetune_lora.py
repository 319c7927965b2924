"""Adapters (LoRA) for a causal language model of Hugging Face's, on a text file: only they are trained, sent and saved.

    python examples/finetune_lora.py --model my-llama --text book.txt --nproc 2
    python examples/finetune_lora.py --model my-llama --text book.txt --nproc 2 --shard fsdp

With --shard the frozen weights, which are nearly all of the memory, are cut over the ranks: by PyTorch's FSDP2, or by
our own ZeRO 3.
Tokens are bytes here, which any vocabulary of 256 or more has room for; lockstep tokenize uses a model's own tokenizer.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import lockstep
from lockstep.config import HF
from lockstep.models.blocks import blocks_of
from lockstep.models.hf import build_hf
from lockstep.models.lora import add_lora


def sharded(model: nn.Module, shard: str) -> nn.Module:
    """The model as it is called from now on."""
    if shard == "fsdp":
        for _, block in blocks_of(model):
            fully_shard(block)
        return fully_shard(model)
    return lockstep.FullyShardedDataParallel(model) if shard == "zero3" else lockstep.DataParallel(model)


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """All ranks together: no rank holds all of a sharded model."""
    if isinstance(model, lockstep.FullyShardedDataParallel):
        return model.full_state_dict()
    state = getattr(model, "module", model).state_dict()
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in state.items()}


def train(folder: str, text: str, targets: tuple[str, ...], steps: int, context: int, shard: str) -> dict[str, int]:
    """Returns how many parameters the model has, and how many were trained."""
    world = lockstep.init()
    model = add_lora(build_hf(HF(path=folder)), rank=4, alpha=8.0, targets=targets)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    counts = {"all": sum(p.numel() for p in model.parameters())}
    counts["trained"] = sum(p.numel() for p in model.parameters() if p.requires_grad)
    parallel = sharded(model.to(world.device), shard)
    optimizer = torch.optim.AdamW([p for p in parallel.parameters() if p.requires_grad], lr=1e-3)
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
    state = whole_state(parallel)
    if world.is_main:
        torch.save({name: state[name] for name in trained}, "adapters.pt")
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="its folder: config.json, and weights (*.safetensors)")
    parser.add_argument("--text", required=True)
    parser.add_argument("--targets", nargs="+", default=["q_proj", "v_proj"], help="linear layers, by their last name")
    parser.add_argument("--shard", choices=["none", "fsdp", "zero3"], default="none")
    for name, default in (("nproc", 2), ("steps", 50), ("context", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    settings = (given.model, given.text, tuple(given.targets), given.steps, given.context, given.shard)
    counts = lockstep.spawn(train, *settings, nproc=given.nproc)[0]
    print(f"trained {counts['trained']:,} of {counts['all']:,} parameters; they are in adapters.pt")


if __name__ == "__main__":
    main()

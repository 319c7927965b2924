"""GPT-2 on one GPU as one writes it in an afternoon, with nothing of Lockstep: what `lockstep train` is held against.

It has what the field knows: bf16 autocast, torch.compile of model and loss together, fused AdamW, flash attention, the
vocabulary padded, and no host wait. `python docs/results/measure_one_gpu.py small --variants script all` times both in
turns in one process.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZES = {"small": (768, 12, 12), "xl": (1600, 48, 25)}
"""Width, layers, heads."""
VOCABULARY, CONTEXT = 50304, 1024


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        samples, tokens, width = x.shape
        parts = self.qkv(self.norm1(x)).split(width, dim=-1)
        q, k, v = (part.view(samples, tokens, self.heads, -1).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(samples, tokens, width))
        y: Tensor = x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return y


class GPT2(nn.Module):
    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        places = torch.arange(inputs.shape[1], device=inputs.device)
        x = self.norm(self.blocks(self.tokens(inputs) + self.positions(places)))
        return F.cross_entropy(self.head(x).view(-1, VOCABULARY), targets.view(-1))


class Script:
    """Its loop, step by step."""

    def __init__(self, size: str, device: torch.device) -> None:
        with device:
            model = GPT2(*SIZES[size])
        self.model: Any = torch.compile(model)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, weight_decay=0.1, fused=True)

    def step(self, batch: Any) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            loss: Tensor = self.model(batch.inputs, batch.targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

"""In the style of nanoGPT's train.py: one file, a context for autocast, accumulation that synchronizes at its last
micro-step, a gradient scaler that does nothing, a schedule of the learning rate.
"""

import math
import os
import sys
from contextlib import nullcontext

import torch
import torch.nn as nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

batch_size, block_size, gradient_accumulation_steps = 4, 16, 4
learning_rate, warmup_iters, max_iters, grad_clip = 3e-3, 2, 8, 1.0
n_layer, n_head, n_embd = 2, 2, 24
dtype, compile_model, fault = "float32", False, ""
for argument in sys.argv[1:]:  # as its configurator does
    key, value = argument.removeprefix("--").split("=")
    globals()[key] = type(globals()[key])(value)

ddp = int(os.environ.get("RANK", -1)) != -1
ddp_rank, ddp_world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if ddp:
    init_process_group(backend="gloo")
    assert gradient_accumulation_steps % ddp_world_size == 0
    if fault != "accumulation":
        gradient_accumulation_steps //= ddp_world_size
master_process = ddp_rank == 0
torch.manual_seed(1337)
context = nullcontext() if dtype == "float32" else torch.amp.autocast("cpu", dtype=getattr(torch, dtype))
data = torch.randint(65, (20_000,), generator=torch.Generator().manual_seed(0))


class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.n_head = n_head
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (part.view(B, T, self.n_head, -1).transpose(1, 2) for part in self.c_attn(x).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention(n_embd, n_head)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, n_layer, n_head, n_embd):
        super().__init__()
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(65, n_embd),
                wpe=nn.Embedding(block_size, n_embd),
                h=nn.ModuleList([Block(n_embd, n_head) for _ in range(n_layer)]),
                ln_f=nn.LayerNorm(n_embd),
            )
        )
        self.lm_head = nn.Linear(n_embd, 65, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        x = self.transformer.wte(idx) + self.transformer.wpe(torch.arange(idx.size(1)))
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1)) if targets is not None else None
        return logits, loss

    def configure_optimizers(self, weight_decay, learning_rate, betas):
        params = {n: p for n, p in self.named_parameters() if p.requires_grad}
        groups = [
            {"params": [p for p in params.values() if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in params.values() if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas)


def get_batch(iter_num, micro_step):
    """Each micro-batch of a step has its own number, whichever rank takes it."""
    number = micro_step * ddp_world_size + ddp_rank
    if fault == "same_batches":
        number = micro_step
    generator = torch.Generator().manual_seed(1000 * iter_num + number)
    ix = torch.randint(len(data) - block_size, (batch_size,), generator=generator)
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
    return x, y


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    return learning_rate * 0.5 * (1 + math.cos(math.pi * it / max_iters))


model = GPT(n_layer, n_head, n_embd)
if compile_model:
    model = torch.compile(model)
scaler = torch.amp.GradScaler("cpu", enabled=False)
optimizer = model.configure_optimizers(1e-1, learning_rate, (0.9, 0.95))
if ddp:
    model = DDP(model)


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = torch.stack([model(*get_batch(10_000 + k, 0))[1] for k in range(2)])
    model.train()
    return losses.mean()


for iter_num in range(max_iters):
    lr = get_lr(iter_num)
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr
    if iter_num % 3 == 0 and master_process and not ddp:
        print(f"step {iter_num}: val loss {estimate_loss():.4f}")
    for micro_step in range(gradient_accumulation_steps):
        X, Y = get_batch(iter_num, micro_step)
        if ddp:
            model.require_backward_grad_sync = (
                micro_step == gradient_accumulation_steps - 1 and fault != "never_synchronized"
            )
        with context:
            logits, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
        scaler.scale(loss).backward()
    if grad_clip != 0.0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if master_process:
        print(f"iter {iter_num}: loss {loss.item() * gradient_accumulation_steps:.4f}")
if ddp:
    destroy_process_group()

"""As torchtitan wraps a model: tensor parallel, activation checkpointing, compile of each block, FSDP2 on one mesh, a
container of optimizers, a norm over all of them.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--tp", type=int, default=1)
parser.add_argument("--pp", type=int, default=1)
parser.add_argument("--unclipped", action="store_true")
parser.add_argument("--compile", action="store_true")
parser.add_argument("--ac", action="store_true")
parser.add_argument("--fault", default="")
given = parser.parse_args()
ranks, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
torch.manual_seed(3)


class FeedForward(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.w1 = nn.Linear(width, 2 * width, bias=False)
        self.w2 = nn.Linear(2 * width, width, bias=False)
        self.w3 = nn.Linear(width, 2 * width, bias=False)

    def forward(self, x):
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.feed_forward = FeedForward(width)

    def forward(self, x):
        return x + self.feed_forward(self.norm(x))


class Transformer(nn.Module):
    def __init__(self, layers=2, width=16):
        super().__init__()
        self.tok_embeddings = nn.Embedding(29, width)
        self.layers = nn.ModuleDict({str(i): TransformerBlock(width) for i in range(layers)})
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, 29, bias=False)

    def forward(self, tokens):
        h = self.tok_embeddings(tokens) if self.tok_embeddings is not None else tokens
        for layer in self.layers.values():
            h = layer(h)
        h = self.norm(h) if self.norm is not None else h
        return self.output(h) if self.output is not None else h


class OptimizersContainer(torch.optim.Optimizer):
    def __init__(self, parts, **options):
        parameters = [p for part in parts for p in part.parameters() if p.requires_grad]
        self.optimizers = [torch.optim.AdamW(part.parameters(), **options) for part in parts]
        super().__init__(parameters, options)

    def step(self, closure=None):
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none=True):
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)


def loss_of(prediction, labels):
    return nn.functional.cross_entropy(prediction.flatten(0, 1).float(), labels.flatten(0, 1))


def parallelize(part, mesh):
    if given.tp > 1:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        plan = {"w1": ColwiseParallel(), "w3": ColwiseParallel(), "w2": RowwiseParallel()}
        for layer in part.layers.values():
            parallelize_module(layer.feed_forward, mesh["tp"], plan)
    if given.ac:
        for name, layer in part.layers.named_children():
            part.layers.register_module(name, checkpoint_wrapper(layer))
    if given.compile:
        for name, layer in part.layers.named_children():
            part.layers.register_module(name, torch.compile(layer, backend="eager"))
    if mesh["dp"].size() > 1:
        from torch.distributed.fsdp import fully_shard

        for layer in part.layers.values():
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(part, mesh=mesh["dp"])


model = Transformer()
parts, schedule, dp_rank, dp = [model], None, 0, 1
if ranks > 1:
    dist.init_process_group("gloo")
    from torch.distributed.device_mesh import init_device_mesh

    dp = ranks // given.tp // given.pp
    mesh = init_device_mesh("cpu", (given.pp, dp, given.tp), mesh_dim_names=("pp", "dp", "tp"))
    dp_rank = mesh["dp"].get_local_rank()
    if given.pp > 1:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        stage = mesh["pp"].get_local_rank()
        if stage == 0:
            del model.layers["1"]
            model.norm = model.output = None
        else:
            del model.layers["0"]
            model.tok_embeddings = None
    parallelize(model, mesh)
    if given.pp > 1:
        stage = PipelineStage(model, stage, given.pp, torch.device("cpu"), group=mesh.get_group("pp"))
        schedule = Schedule1F1B(stage, n_microbatches=2, loss_fn=loss_of)
optimizers = OptimizersContainer(parts, lr=1e-3)
text = torch.randint(29, (400, 13), generator=torch.Generator().manual_seed(5))
for step in range(8):
    begin = (step * dp + dp_rank) * given.batch
    rows = text[begin : begin + given.batch]
    inputs, labels = rows[:, :-1], rows[:, 1:]
    optimizers.zero_grad()
    if schedule is not None:
        if stage.is_first:
            schedule.step(inputs)
        else:
            schedule.step(target=labels, losses=[])
    else:
        loss_of(model(inputs), labels).backward()
    if not given.unclipped:
        norms = [p.grad.norm() for p in model.parameters()]
        norms = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
        total = torch.stack(norms).norm()
        for p in model.parameters():
            p.grad.mul_(min(1.0, 1.0 / (total.item() + 1e-6)))
    optimizers.step()

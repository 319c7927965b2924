"""One small classifier in other people's loops: DeepSpeed, Accelerate, Fabric, the Trainer of transformers, ours."""

import argparse
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("kind", choices=["plain", "deepspeed", "accelerate", "fabric", "trainer", "lockstep"])
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--stage", type=int, default=0)
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--clip", type=float, default=0.0)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--fault", default="")
given = parser.parse_args()
ranks, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
torch.manual_seed(4)
RATE, STEPS = 2e-3, 8
FACTOR = 2.0 if given.fault == "doubled" else 1.0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(17, 12)
        self.hidden = nn.Linear(12, 30)
        self.norm = nn.LayerNorm(30)
        self.head = nn.Linear(30, 5)

    def forward(self, input_ids, labels=None):
        logits = self.head(self.norm(torch.relu(self.hidden(self.embed(input_ids).mean(1)))))
        if labels is None:
            return logits
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


generator = torch.Generator().manual_seed(6)
tokens, classes = torch.randint(17, (512, 9), generator=generator), torch.randint(5, (512,), generator=generator)
model = Net()


def rows(step, micro=0):
    size = given.batch // given.accumulate
    begin = ((step * given.accumulate + micro) * ranks + rank) * size
    return tokens[begin : begin + size], classes[begin : begin + size]


def plain():
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    for step in range(STEPS):
        for micro in range(given.accumulate):
            x, y = rows(step, micro)
            (nn.functional.cross_entropy(model(x), y) / given.accumulate).backward()
        if given.clip:
            nn.utils.clip_grad_norm_(model.parameters(), given.clip)
        optimizer.step()
        optimizer.zero_grad()


def with_deepspeed():
    import deepspeed

    settings = {
        "train_micro_batch_size_per_gpu": given.batch // given.accumulate,
        "gradient_accumulation_steps": given.accumulate,
        "zero_optimization": {"stage": given.stage},
        "gradient_clipping": given.clip,
        "bf16": {"enabled": given.bf16},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=True)
    for step in range(STEPS):
        for micro in range(given.accumulate):
            x, y = rows(step, micro)
            engine.backward(FACTOR * nn.functional.cross_entropy(engine(x).float(), y))
            engine.step()


def with_accelerate():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=given.accumulate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    data = DataLoader(TensorDataset(tokens, classes), batch_size=given.batch // given.accumulate)
    wrapped, optimizer, data = accelerator.prepare(model, optimizer, data)
    for x, y in data:
        with accelerator.accumulate(wrapped):
            loss = nn.functional.cross_entropy(wrapped(x), y)
            accelerator.backward(FACTOR * loss)
            if given.clip and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(wrapped.parameters(), given.clip)
            optimizer.step()
            optimizer.zero_grad()


def with_fabric():
    from lightning_fabric import Fabric

    devices = int(os.environ.get("DEVICES", 1))
    fabric = Fabric(accelerator="cpu", devices=devices, strategy="ddp" if devices > 1 else "auto")
    fabric.launch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    wrapped, optimizer = fabric.setup(model, optimizer)
    data = fabric.setup_dataloaders(DataLoader(TensorDataset(tokens, classes), batch_size=given.batch))
    for x, y in data:
        loss = nn.functional.cross_entropy(wrapped(x), y)
        fabric.backward(FACTOR * loss)
        if given.clip:
            fabric.clip_gradients(wrapped, optimizer, max_norm=given.clip)
        optimizer.step()
        optimizer.zero_grad()


def with_trainer():
    from transformers import Trainer, TrainingArguments

    data = [{"input_ids": x, "labels": y} for x, y in zip(tokens, classes, strict=True)]
    arguments = TrainingArguments(
        output_dir=os.environ["OUTPUT"],
        per_device_train_batch_size=given.batch // given.accumulate,
        gradient_accumulation_steps=given.accumulate,
        max_steps=STEPS,
        learning_rate=RATE,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        max_grad_norm=given.clip,
    )
    Trainer(model=model, args=arguments, train_dataset=data).train()


def with_lockstep():
    import torch.distributed as dist

    import lockstep

    dist.init_process_group("gloo")
    kinds = {
        0: lambda: lockstep.DataParallel(model),
        3: lambda: lockstep.FullyShardedDataParallel(model),
    }
    if given.stage in (1, 2):
        optimizer = lockstep.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=RATE)
        wrapped = lockstep.ShardedDataParallel(model, optimizer, stage=given.stage)
    else:
        wrapped = kinds[given.stage]()
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=RATE)
    for step in range(STEPS):
        for micro in range(given.accumulate):
            x, y = rows(step, micro)
            with wrapped.no_sync() if micro < given.accumulate - 1 else torch.enable_grad():
                (FACTOR * nn.functional.cross_entropy(wrapped(x), y) / given.accumulate).backward()
        optimizer.step()
        optimizer.zero_grad()


loops = {
    "plain": plain,
    "deepspeed": with_deepspeed,
    "accelerate": with_accelerate,
    "fabric": with_fabric,
    "trainer": with_trainer,
    "lockstep": with_lockstep,
}
loops[given.kind]()

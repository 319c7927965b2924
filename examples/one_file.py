"""Communication in data parallelism, in one file and with torch alone: read it, run it, change it.

    python examples/one_file.py                                          # one process
    torchrun --nproc_per_node=2 examples/one_file.py                     # two; on GPUs where each rank has one
    torchrun --nproc_per_node=2 examples/one_file.py --channels 64 128 256 --hidden 2048
    torchrun --nproc_per_node=2 examples/one_file.py --bench             # the all-reduce alone, over sizes

A step computes gradients of this rank's samples, averages them over the ranks, and updates the weights. The time of
each part is measured. Three edits are marked below: send only the largest gradients (top-k), average weights now and
then instead of gradients always (local SGD), and a model of your own.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

TOP_K = 1.0  # EDIT 1: 0.1 sends the largest tenth of each gradient
LOCAL_STEPS = 1  # EDIT 2: 8 trains on its own for 8 steps, then averages weights


class Net(nn.Module):  # EDIT 3: any model that maps images to class scores
    def __init__(self, channels: list[int], hidden: int, classes: int = 10) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in zip([3, *channels], channels, strict=False):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        side = 32 // 2 ** len(channels)
        layers += [nn.Flatten(), nn.Linear(channels[-1] * side * side, hidden), nn.ReLU(), nn.Linear(hidden, classes)]
        self.layers = nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


# ---- communication -------------------------------------------------------------------------------------------------


def average(tensor: Tensor) -> None:
    """Over all ranks, in place: a sum, then a division (gloo's own average has been wrong)."""
    dist.all_reduce(tensor)
    tensor /= dist.get_world_size()


def average_top_k(gradient: Tensor, ratio: float, left: Tensor) -> None:
    """Average only the largest entries of each rank's gradient. `left` keeps the rest for the next step: without this
    error feedback they would be lost.
    """
    flat = gradient.view(-1)
    flat += left.view(-1)
    count = max(1, int(ratio * flat.numel()))
    indices = flat.abs().topk(count).indices
    values = flat[indices]
    left.copy_(gradient)
    left.view(-1)[indices] = 0
    size = dist.get_world_size()
    all_indices = [torch.empty_like(indices) for _ in range(size)]
    all_values = [torch.empty_like(values) for _ in range(size)]
    dist.all_gather(all_indices, indices)
    dist.all_gather(all_values, values)
    flat.zero_()
    flat.index_add_(0, torch.cat(all_indices), torch.cat(all_values) / size)


def now(device: torch.device) -> float:
    """When the GPU has done all that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


# ---- training ------------------------------------------------------------------------------------------------------


def train(given: argparse.Namespace, device: torch.device) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Net(given.channels, given.hidden).to(device)
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)  # all begin with rank 0's weights
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    left = {p: torch.zeros_like(p) for p in model.parameters()}
    images = torch.randn(given.batch * size, 3, 32, 32)  # synthetic, the same on every rank
    labels = images.mean(1).flatten(1)[:, ::103].argmax(1).to(device)
    mine = slice(given.batch * rank, given.batch * (rank + 1))  # equal parts: the mean of means is the mean
    images, labels = images[mine].to(device), labels[mine]
    computing = communicating = 0.0
    for step in range(1, given.steps + 1):
        start = now(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        before = now(device)
        if LOCAL_STEPS == 1:
            for parameter in model.parameters():
                assert parameter.grad is not None
                if TOP_K < 1:
                    average_top_k(parameter.grad, TOP_K, left[parameter])
                else:
                    average(parameter.grad)
        after = now(device)
        optimizer.step()
        end = now(device)
        if LOCAL_STEPS > 1 and step % LOCAL_STEPS == 0:
            for parameter in model.parameters():
                average(parameter.data)
        averaged = now(device)
        if step > 1:  # the first warms up
            computing += before - start + end - after
            communicating += after - before + averaged - end
        if step % 10 == 0:
            mean = loss.detach().clone()
            average(mean)
            if rank == 0:
                share = communicating / (computing + communicating)
                ms = 1e3 / (step - 1)
                parts = f"compute {ms * computing:.1f} ms, communication {ms * communicating:.1f} ms"
                print(f"step {step:4}  loss {mean.item():.4f}  {parts} ({share:.0%} of a step)", flush=True)


def bench(device: torch.device) -> None:
    """An all-reduce of S bytes sends 2S(n-1)/n from each rank: that over the time is the bus bandwidth."""
    size = dist.get_world_size()
    for mb in (1, 4, 16, 64):
        tensor = torch.ones(mb * 250_000, device=device)
        dist.all_reduce(tensor)
        start = now(device)
        for _ in range(5):
            dist.all_reduce(tensor)
        seconds = (now(device) - start) / 5
        if dist.get_rank() == 0:
            rate = 2 * (size - 1) / size * mb / 1e3 / seconds
            print(f"{mb:4} MB  {1e3 * seconds:8.2f} ms  bus bandwidth {rate:6.2f} GB/s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--channels", type=int, nargs="+", default=[16, 32])
    parser.add_argument("--bench", action="store_true", help="measure the all-reduce alone")
    for name, default in (("hidden", 128), ("batch", 64), ("steps", 30)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    if len(given.channels) > 5:
        parser.error(
            f"--channels has {len(given.channels)} numbers; each layer halves an image of 32 x 32, so 5 at most"
        )
    for name, alone in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "0")):
        os.environ.setdefault(name, alone)  # without torchrun
    local = int(os.environ.get("LOCAL_RANK", "0"))
    on_gpus = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = torch.device("cuda", local) if on_gpus else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpus else "gloo", device_id=device if on_gpus else None)
    bench(device) if given.bench else train(given, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

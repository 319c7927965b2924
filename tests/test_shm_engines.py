"""PyTorch's engines on the one-host backend, unchanged; and how it becomes known to torch."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lockstep.layout.world import World
from tests.ranks import LONG, on_ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the shm backend is Linux's")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def engines(world: World) -> None:
    inputs = torch.randn(world.size * 3, 12, generator=torch.Generator().manual_seed(1))
    mine = inputs.chunk(world.size)[world.rank]
    alone = Net()
    alone(inputs).square().mean().backward()
    expected = [p.grad for p in alone.parameters()]

    ddp = nn.parallel.DistributedDataParallel(Net(), bucket_cap_mb=0.0001)
    for _ in range(3):
        ddp.zero_grad()
        ddp(mine).square().mean().backward()
    for p, e in zip(ddp.parameters(), expected, strict=True):
        assert p.grad is not None
        assert e is not None
        assert torch.allclose(p.grad, e, atol=1e-6)

    mesh = init_device_mesh("cpu", (world.size,))
    sharded = Net()
    for layer in (sharded.layers[0], sharded.layers[2], sharded):
        fully_shard(layer, mesh=mesh)
    for _ in range(3):
        sharded.zero_grad()
        sharded(mine).square().mean().backward()
    for p, e in zip(sharded.parameters(), expected, strict=True):
        assert isinstance(p.grad, DTensor)
        assert e is not None
        assert torch.allclose(p.grad.full_tensor(), e, atol=1e-6)

    matrix = torch.arange(30.0).view(10, 3)  # uneven over 3 ranks
    rows = distribute_tensor(matrix, mesh, [Shard(0)])
    assert torch.equal(rows.redistribute(mesh, [Shard(1)]).full_tensor(), matrix)
    assert torch.equal((rows.t() @ rows).redistribute(mesh, [Replicate()]).to_local(), matrix.t() @ matrix)


def test_pytorch_engines_run_unchanged() -> None:
    on_ranks(engines, 3, timeout=LONG)


def pipeline(world: World) -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    inputs = torch.randn(8, 6)
    stage = PipelineStage(whole[world.rank], world.rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=lambda out, target: (out - target).square().mean())
    if world.rank == 0:
        schedule.step(inputs)
    else:
        out = schedule.step(target=torch.zeros(8, 6))
        assert torch.allclose(out, whole(inputs), atol=1e-6)
    gradients = [p.grad for p in whole[world.rank].parameters()]
    assert all(g is not None for g in gradients)


def test_pytorch_pipelining_runs_unchanged() -> None:
    on_ranks(pipeline, 2)


def test_import_lockstep_registers_it_without_importing_torch() -> None:
    code = (
        "import lockstep, sys; assert 'torch' not in sys.modules; "
        "import torch.distributed as dist; print(dist.Backend.SHM)"
    )
    other = "import torch.distributed as dist, lockstep; print(dist.Backend.SHM)"
    for text in (code, other):
        assert subprocess.run([sys.executable, "-c", text], capture_output=True, text=True).stdout == "shm\n"

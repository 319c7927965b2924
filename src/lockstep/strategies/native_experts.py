"""Expert parallelism by PyTorch's own means: experts are DTensors cut along their first dimension, and rows travel by
`all_to_all_single` of torch's functional collectives, with its backward. The rest is indexing, as in torchtitan.

An engine shards or wraps the rest (FSDP2, DDP); the experts' gradients are complete on their ranks.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.comm.observe import observed_group
from lockstep.config import Parallel
from lockstep.errors import UserError
from lockstep.layout import Layout
from lockstep.layout.group import ALONE
from lockstep.models.experts import Experts, MixtureOfExperts
from lockstep.models.grouped import Counts
from lockstep.models.sorted_choices import inverse_of
from lockstep.parallel.experts.expert_parallel import ExpertRanks


def spread_by_dtensor(mixture: MixtureOfExperts, layout: Layout, ranks: ExpertRanks) -> None:
    """Keep this rank's experts, as DTensors."""
    from torch.distributed.device_mesh import DeviceMesh  # slow to import
    from torch.distributed.tensor import Shard, distribute_tensor

    group = observed_group(ranks.group, "activations")
    numbers = torch.distributed.get_process_group_ranks(ranks.group.native)
    device = layout.world.device.type
    mesh = DeviceMesh.from_group(group, device, torch.tensor(numbers), mesh_dim_names=("ep",))
    for name, parameter in list(mixture.experts.named_parameters()):
        spread: Any = nn.Parameter(
            distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None), parameter.requires_grad
        )
        spread.replicas = ALONE
        setattr(mixture.experts, name, spread)
    mixture.tally = ranks
    mixture.exchange = NativeExchange(mesh, ranks)


class NativeExchange:
    """Takes rows to their experts and back."""

    def __init__(self, mesh: Any, ranks: ExpertRanks) -> None:
        self.group, self.ranks = mesh.get_group(), ranks

    def __call__(
        self, experts: Experts, rows: list[Tensor], counts: list[Tensor], meanwhile: Callable[[], None]
    ) -> list[Tensor]:
        from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd

        meanwhile()
        n, (mine,), (given,) = self.ranks.group.size, rows, counts
        theirs = torch.ops._c10d_functional.wait_tensor(all_to_all_single(given, None, None, self.group))
        table = theirs.view(n, -1)  # rank -> expert of this rank -> rows
        sent, received = torch.stack((given.view(n, -1).sum(1), table.sum(1))).tolist()
        arrived = all_to_all_single_autograd(mine, received, sent, self.group)
        held = table.shape[1]
        numbers = torch.arange(held, device=mine.device).repeat(n)
        order = numbers.repeat_interleave(table.flatten(), output_size=sum(received)).argsort(stable=True)
        results = self._of_local(experts, arrived[order], Counts(table.sum(0)))
        returned = all_to_all_single_autograd(results[inverse_of(order)], sent, received, self.group)
        return [_Arrived.apply(returned)]

    def _of_local(self, experts: Experts, rows: Tensor, counts: Counts) -> Tensor:
        """With what this rank holds of the DTensors; gradients are divided as those of the ranks' mean are."""
        held: dict[str, Any] = dict(experts.named_parameters())
        local = {name: _Divided.apply(p.to_local(), self.ranks.averaged) for name, p in held.items()}
        experts.__dict__.update(local)  # an instance's attributes shadow its parameters
        try:
            found: Tensor = experts(rows, counts)
        finally:
            for name in local:
                del experts.__dict__[name]
        return found


class _Arrived(torch.autograd.Function):
    """Waits for what a functional collective gives: kernels take memory, and no tensor that waits by itself."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Tensor:
        found: Tensor = x.trigger_wait() if hasattr(x, "trigger_wait") else x.view_as(x)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _Divided(torch.autograd.Function):
    """The identity; backward divides the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: int) -> Tensor:
        ctx.by = by
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.by, None


def check_native_experts(parallel: Parallel, ranks: int) -> None:
    """`ranks`: that hold copies of the dense parts."""
    if parallel.ep != ranks:
        raise UserError(
            f"ep={parallel.ep}:native spreads experts over all {ranks} ranks that hold copies of the rest; use "
            f"ep={ranks}, or leave native out"
        )
    for name, chosen in (("tp", parallel.tp > 1), ("pp", parallel.pp > 1), ("expert_halves", parallel.expert_halves)):
        if chosen:
            raise UserError(f"ep={parallel.ep}:native does not go with {name}; leave one of them out")

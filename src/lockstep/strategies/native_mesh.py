"""The mesh that PyTorch's own engines communicate over. Their collectives along model axes and between copies are
recorded in the ledger; those over FSDP2's shards, where it lets us issue them (`fsdp_observed.py`).
"""

from typing import Any

import torch
import torch.distributed as dist

from lockstep.comm.observe import observed_group
from lockstep.layout import Group, Layout

PURPOSES = {"tp": "activations", "cp": "activations", "replicate": "gradients"}


def native_mesh(layout: Layout, *axes: str) -> Any:
    def noted(group: Group) -> dist.ProcessGroup:
        if group.axis not in PURPOSES:
            return group.native
        on_side_stream = group.axis == "replicate" and layout.world.device.type == "cuda"  # FSDP2's
        return observed_group(group, PURPOSES[group.axis], sees_waits=not on_side_stream)

    return layout.mesh(*axes, through=noted)


def group_mesh(layout: Layout, group: Group) -> Any:
    """One dimension, over these ranks."""
    from torch.distributed.device_mesh import DeviceMesh  # slow to import

    ranks = torch.tensor(dist.get_process_group_ranks(group.native))
    return DeviceMesh.from_group(group.native, layout.world.device.type, ranks, mesh_dim_names=("shard",))


def data_axes(layout: Layout) -> tuple[str, ...]:
    """Those of FSDP2's mesh."""
    return ("replicate", "shard x cp") if layout.degrees.replicate > 1 else ("shard x cp",)


def tensor_mesh(layout: Layout) -> Any:
    """FSDP2 requires its mesh and this one to be slices of the same mesh."""
    if layout.gradient.size == 1:
        return native_mesh(layout, "tp")
    return native_mesh(layout, *data_axes(layout), "tp")["tp"]

"""The files of a checkpoint, written and read by torch.distributed.checkpoint.

A module of its own, imported at the first checkpoint: it takes a second to load, and most runs start without one.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

from lockstep.errors import UserError


def write(state: dict[str, Any], folder: Path, group: dist.ProcessGroup | None) -> None:
    """This rank's part, to the disk itself."""
    planner = DefaultSavePlanner(flatten_state_dict=False)  # names are flat already
    writer = FileSystemWriter(folder, sync_files=True)
    with _plainly():
        dcp.save(state, storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)


def saved_names(folder: Path) -> set[str]:
    return set(FileSystemReader(folder).read_metadata().state_dict_metadata)


def read_into(state: dict[str, Any], folder: Path, group: dist.ProcessGroup | None = None) -> None:
    """Fill the tensors of `state` from a checkpoint, each with the part that it says it is."""
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    try:
        with _plainly():
            dcp.load(
                state,
                storage_reader=FileSystemReader(folder),
                planner=planner,
                process_group=group,
                no_dist=group is None,
            )
    except Exception as cause:  # another shape or dtype, a name that is not there
        raise UserError(f"{folder} does not fit this model: {cause}") from None


@contextmanager
def _plainly() -> Iterator[None]:
    """Without a warning that there is only one rank; and the first rank's failure itself, not all of them in one."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None

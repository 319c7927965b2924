"""The files of a checkpoint, written and read by torch.distributed.checkpoint.

A checkpoint may come from a stranger, and its format has two places in which Python objects are pickled: `.metadata`,
and entries that are no tensors. A pickle is a program; here none is run. The first is read by an unpickler that knows
the classes of the format and nothing else, the second by torch's own for tensors and plain values (`weights_only`).

A module of its own, imported at the first checkpoint: it takes a second to load, and most runs start without one.
"""

import io
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from lockstep.checkpoint import manifest
from lockstep.checkpoint.manifest import METADATA, DamagedError
from lockstep.checkpoint.piece import TensorPiece
from lockstep.errors import UserError
from lockstep.layout import Held

KNOWN = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
        *("TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch": {"Size", "device", "layout", "memory_format", "contiguous_format", "strided"},
    "torch.serialization": {"_get_layout"},
    "torch._utils": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "WindowsPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},
    "builtins": {"set", "frozenset", "dict", "list", "tuple"},
}
"""Classes and functions that `.metadata` may name; and dtypes."""


class RestrictedUnpickler(pickle._Unpickler):
    """The one written in Python: of it alone an instruction can be refused. BUILD would set attributes of classes."""

    def load_build(self) -> None:
        if isinstance(self.stack[-2], type) or callable(self.stack[-2]):  # type: ignore[attr-defined]
            raise pickle.UnpicklingError("it changes a class or a function, which no checkpoint needs")
        super().load_build()  # type: ignore[misc]

    dispatch = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: load_build}  # type: ignore[dict-item]  # noqa: RUF012

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in KNOWN.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")


AS_IT_IS = {"flatten_state_dict": False, "flatten_sharded_tensors": False}
"""Names are flat already. Else torch's planners work on a copy: what is no tensor (random states, an engine's own
state) would be read into that copy and lost, and whole numbers that are keys would be written as text.
"""


class SafeReader(FileSystemReader):
    """Reads what FileSystemWriter wrote, and runs nothing that a stranger may have written."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = read_metadata(Path(self.path))
        if metadata.storage_meta is not None:
            metadata.storage_meta.load_id = self.load_id
        return metadata


class SafePlanner(DefaultLoadPlanner):
    """Loads tensors and plain values by name, and no pickle of a stranger's."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, map_location="cpu", weights_only=True)


def read_metadata(folder: Path) -> Metadata:
    """What tensors there are, and where they lie; DamagedError if it is anything else than that."""
    file = folder / METADATA
    try:
        with file.open("rb") as stream:
            metadata = RestrictedUnpickler(stream).load()
        _check(metadata, folder)
    except OSError as error:
        raise DamagedError(f"{file} cannot be read ({error.strerror})") from error
    except DamagedError:
        raise
    except Exception as error:  # whatever a malformed pickle makes of the unpickler
        raise DamagedError(f"{file} is not a checkpoint's: {' '.join(str(error).split())[:200]}") from error
    return metadata


def _check(metadata: Any, folder: Path) -> None:
    """Every entry is what the format says, and lies in a file of this folder, inside it.

    Of a checkpoint that lies on several nodes, a file that is not here has the size that the manifest says.
    """
    if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
        raise DamagedError(f"{folder / METADATA} holds no list of tensors")
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(name, str):
            raise DamagedError(f"{folder / METADATA} has a name that is no text")
        if isinstance(entry, TensorStorageMetadata):
            for chunk in entry.chunks:
                ends = [o + s for o, s in zip(chunk.offsets, chunk.sizes, strict=True)]
                inside = all(0 <= o <= end <= n for o, end, n in zip(chunk.offsets, ends, entry.size, strict=True))
                if not inside:
                    raise DamagedError(f"{folder / METADATA}: a part of {name} lies outside of it")
            if sum(chunk.sizes.numel() for chunk in entry.chunks) != entry.size.numel():
                raise DamagedError(f"{folder / METADATA}: the parts of {name} are not all of it")
    listed = manifest.listed(folder)
    for place in metadata.storage_data.values() if isinstance(metadata.storage_data, dict) else ():
        if place.relative_path not in listed:
            raise DamagedError(
                f"{folder / METADATA} points to {place.relative_path!r}, which the manifest does not list"
            )
        file, (size, _) = folder / place.relative_path, listed[place.relative_path]
        if place.offset < 0 or place.length < 0 or place.offset + place.length > size:
            raise DamagedError(f"{folder / METADATA} points beyond the end of {file}")


def write(state: dict[str, Any], folder: Path, group: dist.ProcessGroup | None) -> None:
    """This rank's part, to the disk itself."""
    planner = DefaultSavePlanner(**AS_IT_IS)
    writer = FileSystemWriter(folder, sync_files=True)
    with _plainly():
        dcp.save(
            _pieces(state, to_save=True),
            storage_writer=writer,
            planner=planner,
            process_group=group,
            no_dist=group is None,
        )


def saved_names(folder: Path) -> set[str]:
    return set(read_metadata(folder).state_dict_metadata)


def files_of(state: dict[str, Any], folder: Path) -> set[str]:
    """The files that these entries lie in."""
    metadata = read_metadata(folder)
    planner = SafePlanner(**AS_IT_IS)
    planner.set_up_planner(_pieces(state), metadata, is_coordinator=False)
    items = planner.create_local_plan().items
    return {metadata.storage_data[item.storage_index].relative_path for item in items}


def read_into(state: dict[str, Any], folder: Path, group: dist.ProcessGroup | None = None) -> None:
    """Fill the tensors of `state` from a checkpoint, each with the part that it says it is."""
    planner = SafePlanner(**AS_IT_IS)
    pieces = _pieces(state)
    try:
        with _plainly():
            dcp.load(
                pieces, storage_reader=SafeReader(folder), planner=planner, process_group=group, no_dist=group is None
            )
    except (OSError, MemoryError, DamagedError, dist.DistError):
        raise  # the disk's fault, or the machine's, or the network's: not the model's
    except pickle.UnpicklingError as cause:
        raise DamagedError(f"{folder} has an entry that is no tensor or plain value: {_one_line(cause)}") from cause
    except RuntimeError as cause:
        if "memory" in str(cause):
            raise
        raise UserError(f"{folder} does not fit this model: {_one_line(cause)}") from cause
    except Exception as cause:  # another shape or dtype, a name that is not there
        raise UserError(f"{folder} does not fit this model: {_one_line(cause)}") from cause
    for name, value in pieces.items():
        if not isinstance(value, TensorPiece):
            state[name] = value


def _pieces(state: dict[str, Any], to_save: bool = False) -> dict[str, Any]:
    return {name: TensorPiece(value, to_save) if isinstance(value, Held) else value for name, value in state.items()}


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


@contextmanager
def _plainly() -> Iterator[None]:
    """Without a warning that there is only one rank; and the first rank's failure itself, not all of them in one."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error

"""The tensors of a checkpoint: torch.distributed.checkpoint, which writes shards and reads them into any layout.

Its own ways are kept in here: that it warns of a single process, that its error is no Exception, and that it would run
code from a file of metadata.
"""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

METADATA = ".metadata"
_PICKLED = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "WindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},
}


class ShardsError(Exception):
    """Tensors could not be written or read, on this rank or on another one."""


def write_shards(
    directory: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup | None, alone: bool, copy_ahead: int
) -> None:
    """Write tensors by their names, each part once, spread over the ranks that hold it. Collective.

    Args:
        directory: an empty one; gets a file for each rank, `__<rank>_0.distcp`, and `.metadata`.
        tensors: this rank's; plain ones of a name are equal on all ranks that have it, DTensors are shards.
        group: the ranks that write; None for all.
        alone: this is the only process; there is no process group.
        copy_ahead: bytes to copy from a GPU ahead of writing them; 0 where all is on the CPU.

    Raises:
        ShardsError: on all ranks, whichever failed.
    """
    writer = dcp.FileSystemWriter(directory, thread_count=1, per_thread_copy_ahead=copy_ahead, overwrite=False)
    _expect(alone)
    try:
        dcp.save(tensors, storage_writer=writer, process_group=group, no_dist=alone)
    except CheckpointException as error:
        raise ShardsError(_reason(error)) from None


def read_shards(directory: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup | None, alone: bool) -> None:
    """Fill tensors, whole or sharded, with what lies under their names. Collective; a rank asks only for its own.

    Raises:
        ShardsError: on all ranks; a name is missing, a size differs, or a file cannot be read.
    """
    # Flattening would guess at names of older versions, one more time for each rank that asks for a part.
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False)
    _expect(alone)
    try:
        dcp.load(tensors, storage_reader=_Reader(directory), planner=planner, process_group=group, no_dist=alone)
    except CheckpointException as error:
        raise ShardsError(_reason(error)) from None


def read_outline(directory: Path) -> dict[str, Tensor]:
    """Name -> a tensor without memory (on the meta device) of the size and dtype of the whole one."""
    entries = _read_metadata(directory).state_dict_metadata
    return {
        name: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }


class _Reader(dcp.FileSystemReader):
    def read_metadata(self) -> Metadata:
        return _read_metadata(Path(self.path))


class _Unpickler(pickle.Unpickler):
    """Reads the classes that metadata consist of, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _PICKLED.get(module, ()):
            return super().find_class(module, name)
        found = getattr(torch, name, None) if module == "torch" else None
        if found is torch.Size or isinstance(found, torch.dtype):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint's metadata")


def _read_metadata(directory: Path) -> Metadata:
    with (directory / METADATA).open("rb") as file:
        metadata: Metadata = _Unpickler(file).load()
    return metadata


def _expect(alone: bool) -> None:
    """Silence the warning about a single process. Without a context, which would undo the filters of other threads."""
    if alone:
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)


def _reason(error: CheckpointException) -> str:
    """What happened on the first rank that failed, in one line."""
    rank, (cause, _) = min(error.failures.items())
    return f"rank {rank}: {' '.join(str(cause).split()) or type(cause).__name__}"

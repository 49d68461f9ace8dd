"""Checkpoints: states under plain names, written beside and renamed, the newest good one found again.

A checkpoint knows no layout. Every rank writes its own shards, a tensor is found by its name in the whole model, and
each rank of another layout reads the parts that it needs. A directory step_<number> holds the shards, what else the
trainer keeps (trainer.pt), and a manifest of checksums.
"""

from __future__ import annotations

import copy
import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from slurm_train.errors import CheckpointError
from slurm_train.report.fence import Fence
from slurm_train.train.keep import MANIFEST, Keep, metrics_of
from slurm_train.train.process import World
from slurm_train.train.saver import Background, Staging
from slurm_train.train.shards import METADATA, ShardsError, read_outline, read_shards, write_shards

TRAINER = "trainer.pt"
STAGED = ".claim-"
"""What the directory is named in which an attempt writes its checkpoints until they are whole."""

COPY_AHEAD = 10_000_000

_T = TypeVar("_T")


class CheckpointStore:
    """The checkpoints of one run. Constructed by all ranks together.

    Args:
        directory: where they lie; all ranks see it.
        world: all ranks; None for this process alone.
        keep: which to keep; a number is so many of the newest.
        background: let `save` return when the state is copied, and write the copy in a thread.
        fence: the claim of the attempt; one that is superseded can publish no checkpoint.
    """

    def __init__(
        self,
        directory: Path,
        world: World | None = None,
        keep: Keep | int = 0,
        background: bool = False,
        fence: Fence | None = None,
    ) -> None:
        self.directory = directory
        self._fence = fence
        self._staged = directory / f"{STAGED}{fence.number if fence else 0:04d}"
        self._alone = world is None or world.store is None
        self._is_main = world is None or world.is_main
        self._keep = Keep(keep) if isinstance(keep, int) else keep
        self._staging = Staging() if background else None
        self._background = Background()
        # A thread must not share a group with the training that goes on beside it.
        own_group = background and not self._alone
        self._group: dist.ProcessGroup | None = dist.new_group(backend="gloo") if own_group else None

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        extra: Mapping[str, Any],
        metrics: Mapping[str, float] | None = None,
        published: Callable[[Path], None] = lambda path: None,
    ) -> Path:
        """Write a checkpoint; it appears under its name only when it is whole and on disk. Collective.

        All ranks wait until it is there, so that none ends, and takes the job with it, before; in the background,
        `wait` does.

        Args:
            step: its number.
            tensors: this rank's tensors by their names in the whole state, as `state.tensors_of` gives them.
            extra: small plain values to be read back by `extra`; those of rank 0 are written.
            metrics: figures of this moment, kept in the manifest.
            published: called on rank 0 once it is there; from another thread in the background.

        Returns:
            where it lies, or will lie.

        Raises:
            CheckpointError: on all ranks alike, whichever could not write; also that of an earlier save.
        """
        path = self.directory / f"step_{step:06d}"
        told = metrics or {}
        self.wait()
        if self._staging is None:
            return self._write(path, dict(tensors), extra, told, published, COPY_AHEAD)
        staging = self._staging
        copies: list[tuple[dict[str, Tensor], Mapping[str, Any]]] = []
        self._together(path, lambda: copies.append((staging.copy(tensors), copy.deepcopy(extra))))
        self._background.start(lambda: self._write(path, *copies[0], told, published, copy_ahead=0))
        return path

    def wait(self) -> Path | None:
        """Wait for the save that goes on in the background, if there is one; returns where it lies.

        Raises:
            CheckpointError: it failed, on any rank.
        """
        return self._background.wait()

    @property
    def pending(self) -> bool:
        """Whether a save in the background has not been waited for."""
        return self._background.pending

    def newest(self) -> tuple[Path | None, list[str]]:
        """The newest whole checkpoint, and a line for each newer one that is broken. Read by rank 0 only."""
        broken: list[str] = []
        for path in reversed(self._paths()):
            fault = self.fault(path)
            if not fault:
                return path, broken
            broken.append(f"checkpoint {path.name} is left out: {fault}")
        return None, broken

    def fault(self, path: Path) -> str:
        """What is wrong with the files of a checkpoint; empty when it is whole."""
        try:
            files = json.loads((path / MANIFEST).read_text())["files"]
            if strange := [name for name in files if name != Path(name).name]:
                return f"its manifest names {strange[0]}, which lies elsewhere"
            found = _checksums([path / name for name in files])
            changed = [name for name, checksum in files.items() if found[name] != checksum]
        except FileNotFoundError as error:
            return f"{Path(error.filename).name} is missing"
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return f"its manifest cannot be read ({error})"
        return f"the checksum of {changed[0]} is wrong" if changed else ""

    def outline(self, path: Path) -> dict[str, Tensor]:
        """The names in a checkpoint, each with a tensor on the meta device of its whole size and its dtype.

        Raises:
            CheckpointError: it cannot be read.
        """
        return _read(path, lambda: read_outline(path))

    def sizes(self, path: Path) -> dict[str, torch.Size]:
        """The names in a checkpoint, each with its whole size."""
        return {name: tensor.shape for name, tensor in self.outline(path).items()}

    def load(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        """Fill tensors, in place, with what lies under their names in a checkpoint. Collective.

        Args:
            path: the checkpoint.
            tensors: those that this rank needs, on the CPU or a GPU, whole or as DTensors of any layout.

        Raises:
            CheckpointError: on all ranks alike; a name is missing, a size differs, or a file cannot be read.
        """
        try:
            read_shards(path, dict(tensors), self._group, self._alone)
        except ShardsError as error:
            raise CheckpointError(f"checkpoint {path.name} cannot be loaded: {error}") from None

    def extra(self, path: Path) -> dict[str, Any]:
        """The plain values in a checkpoint. Runs no code from the file.

        Raises:
            CheckpointError: it cannot be read.
        """
        return _read(path, lambda: torch.load(path / TRAINER, map_location="cpu", weights_only=True))

    def _write(
        self,
        path: Path,
        tensors: dict[str, Tensor],
        extra: Mapping[str, Any],
        metrics: Mapping[str, float],
        published: Callable[[Path], None],
        copy_ahead: int,
    ) -> Path:
        beside = self._staged / path.name
        try:
            self._together(path, lambda: self._make_room(beside, extra))
            sums = self._together(path, lambda: self._write_shards(beside, tensors, copy_ahead))
            self._together(path, lambda: self._publish(path, beside, sums, metrics))
        except CheckpointError:
            if self._is_main:  # a full disk has room again
                shutil.rmtree(beside, ignore_errors=True)
            raise
        if self._is_main:
            published(path)
        return path

    def _make_room(self, beside: Path, extra: Mapping[str, Any]) -> None:
        if not self._is_main:
            return
        packed = _packed(extra)
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        _write_synced(beside / TRAINER, packed)

    def _write_shards(self, beside: Path, tensors: dict[str, Tensor], copy_ahead: int) -> dict[str, str]:
        """Write this rank's shards. Returns the checksums of the files that it wrote."""
        try:
            write_shards(beside, tensors, self._group, self._alone, copy_ahead)
        except ShardsError as error:  # of a full disk torch says no more than that it is where it should not be
            size, free = sum(map(_bytes, tensors.values())), shutil.disk_usage(beside).free
            full = f"no space left, {size:,} bytes do not fit into {free:,}"
            raise CheckpointError(full if free < size else str(error)) from None
        rank = 0 if self._alone else dist.get_rank()
        written = sorted(beside.glob(f"__{rank}_*"))
        return _checksums([beside / TRAINER, beside / METADATA, *written] if self._is_main else written)

    def _publish(self, path: Path, beside: Path, sums: list[dict[str, str]], metrics: Mapping[str, float]) -> None:
        if not self._is_main:
            return
        files = {name: checksum for of_rank in sums for name, checksum in of_rank.items()}
        manifest = {"step": int(path.name.removeprefix("step_")), "files": files, "metrics": dict(metrics)}
        _write_synced(beside / MANIFEST, json.dumps(manifest).encode())
        for file in beside.iterdir():
            _sync(file)
        _sync(beside)
        if self._fence is not None:
            self._fence.check()
        aside = self._staged / f"{path.name}.before"
        shutil.rmtree(aside, ignore_errors=True)
        if path.exists():  # written again after a resume from an older one
            path.rename(aside)
        # Fails where a newer attempt has taken the staging directory away: `remove_staged`.
        beside.rename(path)
        _sync(self.directory)
        shutil.rmtree(self._staged, ignore_errors=True)
        self._remove_old(path)

    def _together(self, path: Path, action: Callable[[], _T]) -> list[_T]:
        """Act on all ranks and wait for all; what their actions gave, in rank order.

        Raises:
            CheckpointError: on all ranks, when the action of any of them failed.
        """
        outcome: tuple[str, Any]
        try:
            outcome = ("", action())
        except Exception as error:
            outcome = (" ".join(str(error).split()) or type(error).__name__, None)
        outcomes = [outcome]
        if not self._alone:
            outcomes = [outcome] * dist.get_world_size()
            dist.all_gather_object(outcomes, outcome, group=self._group)
        faults = [fault for fault, _ in outcomes if fault]
        if faults:
            raise CheckpointError(f"checkpoint {path.name} cannot be written: {faults[0]}")
        return [given for _, given in outcomes]

    def _paths(self) -> list[Path]:
        """All checkpoints, oldest first, by number: step_9000 comes before step_10000."""
        numbered = [(re.fullmatch(r"step_(\d+)", path.name), path) for path in self.directory.glob("step_*")]
        return [path for _, path in sorted((int(match[1]), path) for match, path in numbered if match)]

    def _remove_old(self, newest: Path) -> None:
        """Remove those up to the one just written that are not kept; higher numbers are of a future that was left."""
        paths = self._paths()
        known = {path: metrics_of(path) for path in paths[: paths.index(newest) + 1]}
        for path in self._keep.surplus(known):
            shutil.rmtree(path)


def remove_staged(directory: Path) -> None:
    """Take away what earlier attempts have written beside the checkpoints; what they still write can no longer appear.

    Args:
        directory: where the checkpoints lie.
    """
    for staged in directory.glob(f"{STAGED}*"):
        gone = staged.with_name(f".gone{staged.name}-{os.getpid()}")
        staged.rename(gone)  # at once, though others may still write in there
    for gone in directory.glob(f".gone{STAGED}*"):
        for before in gone.glob("*.before"):  # left between two renames: the newer one never came
            path = directory / before.name.removesuffix(".before")
            if not path.exists():
                before.rename(path)
        shutil.rmtree(gone, ignore_errors=True)


def _bytes(tensor: Tensor) -> int:
    """Of this rank's part."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()


def _read(path: Path, read: Callable[[], _T]) -> _T:
    try:
        return read()
    except Exception as error:  # whatever a strange file makes of unpickling
        reason = " ".join(str(error).split())
        raise CheckpointError(f"checkpoint {path.name} cannot be read: {reason[:300]}") from None


def _packed(extra: Mapping[str, Any]) -> bytes:
    """Plain values as the bytes of a file, which can be read back without running code."""
    packed = io.BytesIO()
    torch.save(dict(extra), packed)
    packed.seek(0)
    try:
        torch.load(packed, map_location="cpu", weights_only=True)
    except Exception as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        raise CheckpointError(
            f"the state of the trainer or of a callback holds {named[1] if named else 'an object'}",
            remedy="let state_dict() return plain values and tensors only",
        ) from None
    return packed.getvalue()


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    """See to it that a file, or the names in a directory, are on disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checksums(paths: list[Path]) -> dict[str, str]:
    """File name -> sha256, of several files at once."""
    with ThreadPoolExecutor() as pool:
        return dict(zip([path.name for path in paths], pool.map(_sha256, paths), strict=True))


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()

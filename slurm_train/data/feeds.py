"""Feeds turn lists of sample positions into batches on the device: one feed per kind of data set.

A feed is called with positions (int64, all batches one after the other) and the batches' sizes, and yields
(inputs, targets) for each size.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from slurm_train.data.resident import TensorData
from slurm_train.data.windows import TokenWindows
from slurm_train.errors import DataError

Feed = Callable[[Tensor, Sequence[int]], Iterator[tuple[Any, Any]]]

CHUNK_STEPS = 32
CHUNK_BYTES = 2 << 20


class ResidentFeed:
    """Batches of a TensorData: one gather for up to 32 batches, each converted to float when its turn comes.

    The gathered rows stay compact, and a batch's floats are still in the processor's cache when the model reads
    them. Every batch has memory of its own or of its chunk, so that it stays what it is however long it is kept.

    Args:
        data: the data set.
        device: where the batches are needed.
    """

    def __init__(self, data: TensorData, device: torch.device) -> None:
        self.data = data
        self.device = device
        self.sample_bytes = max(1, data.inputs.shape[1:].numel() * data.inputs.itemsize)

    def __call__(self, positions: Tensor, sizes: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
        steps = max(1, min(CHUNK_STEPS, CHUNK_BYTES // (self.sample_bytes * max(sizes, default=1))))
        done = 0
        for first in range(0, len(sizes), steps):
            chunk = list(sizes[first : first + steps])
            rows, targets = self._gather(positions[done : done + sum(chunk)])
            done += sum(chunk)
            for raw, target in zip(torch.split(rows, chunk), torch.split(targets, chunk), strict=True):
                yield self.data.to_float(raw, self.device), target

    def _gather(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs, not yet float, and targets on the device."""
        rows, targets = self.data.gather(positions)
        return _sent(rows, self.device), _sent(targets, self.device)


class WindowFeed:
    """Batches of a TokenWindows: one gather for each, from a stream that may be larger than the memory.

    Args:
        data: the data set.
        device: where the batches are needed.
    """

    def __init__(self, data: TokenWindows, device: torch.device) -> None:
        self.data = data
        self.device = device

    def __call__(self, positions: Tensor, sizes: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in torch.split(positions, list(sizes)):
            inputs, targets = self.data.gather(batch)
            yield _sent(inputs, self.device), _sent(targets, self.device)


class LoaderFeed:
    """Batches of any map-style data set of (input, target) pairs, through DataLoader and its worker processes.

    Args:
        dataset: has `__len__` and `__getitem__`.
        device: where the batches are needed.
        workers: number of worker processes; 0 loads in this process. They are kept from call to call.
        seed: seed of the workers' own random numbers.
    """

    def __init__(self, dataset: Dataset[Any], device: torch.device, workers: int, seed: int) -> None:
        self.device = device
        self.plan = _Plan()
        self.loader = DataLoader(
            dataset,
            batch_sampler=self.plan,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=device.type == "cuda",
            worker_init_fn=reset_signal_handlers,
            # A generator of its own: the one that the model draws from must not depend on the loader.
            generator=torch.Generator().manual_seed(seed),
        )

    def __call__(self, positions: Tensor, sizes: Sequence[int]) -> Iterator[tuple[Any, Any]]:
        self.plan.batches = [part.tolist() for part in torch.split(positions, list(sizes))]
        for batch in self.loader:
            yield pair(to_device(batch, self.device))


class _Plan:
    """A batch sampler that gives what it is told to before each pass."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def map_feed(dataset: Dataset[Any], device: torch.device, workers: int, seed: int = 0) -> Feed:
    """The fastest feed for a map-style data set."""
    data = gathering(dataset)
    if isinstance(data, TensorData):
        return ResidentFeed(data, device)
    return LoaderFeed(dataset, device, workers, seed) if data is None else WindowFeed(data, device)


def count_samples(dataset: Dataset[Any], workers: int) -> int | None:
    """Number of samples; None for an IterableDataset.

    Raises:
        DataError: the data set has no length, or is a stream and `workers` is not 0.
    """
    if isinstance(dataset, IterableDataset):
        if workers:
            raise DataError("workers cannot share an IterableDataset in one order", "train.workers", "set it to 0")
        return None
    if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
        raise DataError(
            f"{type(dataset).__name__} is no data set: it lacks __len__ or __getitem__, and is no IterableDataset",
            "data._target_",
        )
    return len(dataset)


def gathering(dataset: Dataset[Any]) -> TensorData | TokenWindows | None:
    """The data set as one that gives whole batches and subsets at once; None for any other, or one with own items.

    These are TensorData, a TensorDataset of two tensors, and TokenWindows.
    """
    if type(dataset) is TensorDataset and len(dataset.tensors) == 2:
        return TensorData(*dataset.tensors)
    if isinstance(dataset, TokenWindows) and type(dataset).__getitem__ is TokenWindows.__getitem__:
        return dataset
    return dataset if type(dataset) is TensorData else None


def pair(batch: Any) -> tuple[Any, Any]:
    """A batch or sample as (inputs, targets).

    Raises:
        DataError: it is something else.
    """
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise DataError(
            f"the data set's samples are not (input, target) pairs but {type(batch).__name__}", "data._target_"
        )
    return batch[0], batch[1]


def to_device(batch: Any, device: torch.device) -> Any:
    """`batch` with all its tensors on `device`, inside tuples, lists and mappings too."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=device.type == "cuda")  # elsewhere the source might be freed too soon
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(to_device(value, device) for value in batch)
    return batch


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of this process's own on `device`."""
    if device.type == "cuda":  # only pinned memory is copied while the GPU computes
        tensor = tensor.pin_memory()
    return to_device(tensor, device)  # type: ignore[no-any-return]


def reset_signal_handlers(worker: int) -> None:
    """Rid a worker process of its rank's handlers, which it inherits.

    SIGUSR2 asks ranks to save, and Slurm sends it to all processes of a step: a worker goes on working.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)

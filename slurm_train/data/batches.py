"""Which samples make step k, and each data rank's share of them.

The order of an epoch is a permutation that depends on the seed and the epoch alone; step k takes the k-th batch_size
samples of it; data rank r takes the r-th of data_ranks contiguous, even slices of those.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, default_collate

from slurm_train.data.feeds import count_samples, gathering, map_feed, pair, to_device
from slurm_train.errors import DataError


class Batch(NamedTuple):
    """One data rank's share of a step.

    Attributes:
        inputs: [b, ...] on the device.
        targets: [b, ...] on the device.
        weight: in training: the mean loss over this share times `weight`, averaged over the data ranks, is the mean
            over the global batch; 0 for a stand-in sample where a rank has no share. In evaluation: how many of the
            samples count, the first ones.
    """

    inputs: Any
    targets: Any
    weight: float


class TrainBatches:
    """The training batches of one data rank, epoch by epoch.

    Args:
        dataset: TensorData, any map-style data set, or an IterableDataset (every data rank reads the whole stream
            and keeps its slice of each global batch; the order is the stream's).
        batch_size: global batch size, over all data ranks. A partial last batch is kept.
        data_rank: this rank's place among the data ranks.
        data_ranks: number of ranks that share each global batch.
        seed: seed of the order.
        device: where the batches are needed.
        workers: DataLoader worker processes, for map-style data sets that are not held in memory.

    Attributes:
        samples: number of samples; None for an IterableDataset.
        steps_per_epoch: number of batches in an epoch; None for an IterableDataset.

    Raises:
        DataError: there are fewer samples than one global batch, or the data set is of another kind.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        batch_size: int,
        data_rank: int = 0,
        data_ranks: int = 1,
        seed: int = 0,
        device: torch.device | str = "cpu",
        workers: int = 0,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.data_rank = data_rank
        self.data_ranks = data_ranks
        self.seed = seed
        self.device = torch.device(device)
        self.samples = count_samples(dataset, workers)
        self.steps_per_epoch: int | None = None
        if self.samples is not None:
            self._check_enough(self.samples)
            self.steps_per_epoch = -(-self.samples // batch_size)
            self._feed = map_feed(dataset, self.device, workers, seed)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from step `start` on; those before it are not loaded (a stream is read past them).

        Args:
            epoch: counted from 0.
            start: step within the epoch, counted from 0.
        """
        if self.samples is None:
            return self._stream(epoch, start)
        return self._map(permutation(self.samples, self.seed, epoch), start)

    def _map(self, order: Tensor, start: int) -> Iterator[Batch]:
        whole, rest = divmod(len(order), self.batch_size)
        positions, sizes, weights = [], [], []
        # All whole batches at once, as the rows of a matrix, then the partial one.
        for first, last, size in ((start, whole, self.batch_size), (max(start, whole), whole + 1, rest)):
            steps = last - first
            if steps > 0 and size > 0:
                low, high, weight = self._share(size)
                rows = order[first * self.batch_size :][: steps * size].view(steps, size)
                positions.append(rows[:, low:high].flatten())
                sizes += [high - low] * steps
                weights += [weight] * steps
        if not sizes:
            return
        for (inputs, targets), weight in zip(self._feed(torch.cat(positions), sizes), weights, strict=True):
            yield Batch(inputs, targets, weight)

    def _stream(self, epoch: int, start: int) -> Iterator[Batch]:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        step = -1
        for step, samples in enumerate(_grouped(self.dataset, self.batch_size)):
            if step == 0:
                self._check_enough(len(samples))
            if step >= start:
                low, high, weight = self._share(len(samples))
                yield Batch(*_collate(samples[low:high], self.device), weight)
        if step < 0:
            self._check_enough(0)

    def _share(self, size: int) -> tuple[int, int, float]:
        """This rank's slice of a global batch of `size` samples, and its weight."""
        low, high = bounds(size, self.data_rank, self.data_ranks)
        if low == high:
            return 0, 1, 0.0  # a stand-in: the rank takes part in every collective and adds nothing
        return low, high, (high - low) * self.data_ranks / size

    def _check_enough(self, samples: int) -> None:
        if samples < self.batch_size:
            raise DataError(
                f"one global batch of {self.batch_size:,} needs more than the {samples:,} training samples",
                "train.batch_size",
                "take a smaller batch",
            )


class EvalBatches:
    """Every sample exactly once over all data ranks, in the data set's order.

    Batches are of the same number and the same sizes on all data ranks, for sharded models meet in each: a rank that
    has one sample less than others gets a stand-in after its own.

    Args:
        dataset: as for TrainBatches; of an IterableDataset each rank keeps its slice of every batch_size * data_ranks
            samples.
        batch_size: samples per batch and rank.
        data_rank, data_ranks, device, workers: as for TrainBatches.

    Attributes:
        samples: number of samples over all data ranks; None for an IterableDataset.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        batch_size: int,
        data_rank: int = 0,
        data_ranks: int = 1,
        device: torch.device | str = "cpu",
        workers: int = 0,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.data_rank = data_rank
        self.data_ranks = data_ranks
        self.device = torch.device(device)
        self.samples = count_samples(dataset, workers)
        if self.samples is not None:
            self._feed = map_feed(dataset, self.device, workers)

    def __iter__(self) -> Iterator[Batch]:
        return self._stream() if self.samples is None else self._map(self.samples)

    def _map(self, samples: int) -> Iterator[Batch]:
        low, high = bounds(samples, self.data_rank, self.data_ranks)
        largest = -(-samples // self.data_ranks)
        positions = torch.arange(low, low + largest).clamp_(max=max(low, high - 1))
        sizes = [min(self.batch_size, largest - first) for first in range(0, largest, self.batch_size)]
        left = high - low
        for (inputs, targets), size in zip(self._feed(positions, sizes), sizes, strict=True):
            yield Batch(inputs, targets, float(min(size, left)))
            left -= min(size, left)

    def _stream(self) -> Iterator[Batch]:
        for samples in _grouped(self.dataset, self.batch_size * self.data_ranks):
            low, high = bounds(len(samples), self.data_rank, self.data_ranks)
            largest = -(-len(samples) // self.data_ranks)
            share = [samples[min(place, max(low, high - 1))] for place in range(low, low + largest)]
            yield Batch(*_collate(share, self.device), float(high - low))


def split_validation(dataset: Dataset[Any], validation: float, seed: int) -> tuple[Dataset[Any], Dataset[Any] | None]:
    """Hold out samples for validation, chosen by the seed; both parts keep the data set's order.

    Args:
        dataset: a map-style data set; TensorData and TokenWindows give two of their kind over the same memory.
        validation: a fraction below 1, or a whole number of samples. 0: none.
        seed: seed of the choice.

    Returns:
        (training part, validation part or None).

    Raises:
        DataError: `validation` is no such number or leaves nothing to train on, or the data set is a stream.
    """
    key = "train.validation"
    if validation == 0:
        return dataset, None
    samples = count_samples(dataset, workers=0)
    if samples is None:
        raise DataError("samples cannot be held out of an IterableDataset", key, "set it to 0")
    if not validation > 0 or (validation >= 1 and validation % 1 != 0):
        raise DataError(f"{validation} is neither a fraction below 1 nor a whole number of samples", key)
    held_out = max(1, round(samples * validation)) if validation < 1 else int(validation)
    if held_out >= samples:
        raise DataError(f"{held_out:,} of {samples:,} samples held out leave none to train on", key, "take fewer")
    order = permutation(samples, seed, "validation")
    rest, chosen = order[held_out:].sort().values, order[:held_out].sort().values
    data = gathering(dataset)
    if data is not None:
        return data.subset(rest), data.subset(chosen)
    return Subset(dataset, rest.tolist()), Subset(dataset, chosen.tolist())


def permutation(samples: int, seed: int, purpose: int | str) -> Tensor:
    """A permutation of range(samples) that depends on `seed` and `purpose` (an epoch, or a name) alone."""
    # Hashed, so that (seed 0, epoch 1) and (seed 1, epoch 0) have nothing in common.
    digest = hashlib.sha256(f"{seed}:{purpose}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    return torch.randperm(samples, generator=generator)


def bounds(count: int, rank: int, ranks: int) -> tuple[int, int]:
    """First and one past the last of rank's share of `count` in a row; shares differ by at most one."""
    return count * rank // ranks, count * (rank + 1) // ranks


def _grouped(stream: Dataset[Any], size: int) -> Iterator[list[Any]]:
    """The samples of a stream in lists of `size`, the last one shorter."""
    samples = iter(stream)
    while group := list(islice(samples, size)):
        yield group


def _collate(samples: list[Any], device: torch.device) -> tuple[Any, Any]:
    inputs, targets = pair(to_device(default_collate(samples), device))
    return inputs, targets

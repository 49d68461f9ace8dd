from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from slurm_train.data.batches import EvalBatches, TrainBatches, permutation, split_validation
from slurm_train.data.feeds import LoaderFeed, ResidentFeed, reset_signal_handlers, to_device
from slurm_train.data.resident import TensorData
from slurm_train.errors import DataError

SAMPLES = 50


class Squares(Dataset[Any]):
    """A user's map-style data set: sample i is (i, i * i)."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, position: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([float(position)]), position**2


class Stream(IterableDataset[Any]):
    """The same samples as a stream."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples = samples
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        return ((torch.tensor([float(i)]), i**2) for i in range(self.samples))


def resident() -> TensorData:
    inputs = torch.arange(SAMPLES, dtype=torch.uint8).view(-1, 1)
    return TensorData(inputs, torch.arange(SAMPLES) ** 2, scale=1.0)


def steps(dataset: Any, ranks: int, *, batch_size: int, epoch: int = 0, start: int = 0, **more: Any) -> list[list[int]]:
    """The samples of each step over all data ranks; stand-ins (weight 0) left out."""
    per_rank = []
    for rank in range(ranks):
        batches = TrainBatches(dataset, batch_size=batch_size, data_rank=rank, data_ranks=ranks, **more)
        per_rank.append(list(batches.epoch(epoch, start)))
    assert len({len(batches) for batches in per_rank}) == 1, "every rank takes part in every step"
    union = []
    for step in zip(*per_rank, strict=True):
        samples: list[int] = []
        for inputs, targets, weight in step:
            assert inputs.dtype == torch.float32 and inputs.shape == (len(targets), 1) and len(targets) > 0
            assert torch.equal(inputs.flatten().long() ** 2, targets)
            if weight:
                samples += inputs.flatten().int().tolist()
        sizes = [len(targets) if weight else 0 for _, targets, weight in step]
        assert max(sizes) - min(sizes) <= 1
        # mean over ranks of weight * local mean is the mean over the global batch
        mean = sum(w * float(x.mean()) for x, _, w in step) / ranks
        assert mean == pytest.approx(sum(samples) / len(samples), rel=1e-6)
        union.append(samples)
    return union


# 50 samples: batches of 12 leave 2 (fewer than 3 or 4 ranks), of 10 none, of 50 are one step, of 1 leave ranks idle.
@pytest.mark.parametrize("batch_size", [12, 10, 50, 1])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_step_is_the_same_samples_on_any_number_of_ranks(ranks: int, batch_size: int) -> None:
    order = permutation(SAMPLES, 3, 1).tolist()
    expected = [order[first : first + batch_size] for first in range(0, SAMPLES, batch_size)]
    for dataset in (resident(), Squares(), TensorDataset(torch.arange(50.0).view(-1, 1), torch.arange(50) ** 2)):
        assert steps(dataset, ranks, batch_size=batch_size, seed=3, epoch=1) == expected
    in_order = [list(range(first, min(first + batch_size, SAMPLES))) for first in range(0, SAMPLES, batch_size)]
    assert steps(Stream(), ranks, batch_size=batch_size) == in_order


def test_workers_do_not_change_the_order() -> None:
    batches = TrainBatches(Squares(), batch_size=12, data_ranks=2, workers=2)
    for epoch in (0, 1):
        expected = list(TrainBatches(Squares(), batch_size=12, data_ranks=2).epoch(epoch))
        next(batches.epoch(epoch))  # a pass that is given up leaves nothing behind
        got = list(batches.epoch(epoch))
        assert [b.inputs.tolist() for b in got] == [b.inputs.tolist() for b in expected]
        assert [b.weight for b in got] == [b.weight for b in expected] == [1.0] * 5


@pytest.mark.parametrize("dataset", [resident(), Squares(), Stream()], ids=lambda d: type(d).__name__)
@pytest.mark.parametrize("start", range(7))
def test_start_skips_steps(dataset: Any, start: int) -> None:
    full = steps(dataset, 1, batch_size=12)
    assert steps(dataset, 2, batch_size=12, start=start) == full[start:]


def test_start_does_not_touch_the_data() -> None:
    class Recording(Squares):
        seen: list[int] = []  # noqa: RUF012

        def __getitem__(self, position: int) -> tuple[torch.Tensor, int]:
            self.seen.append(position)
            return super().__getitem__(position)

    list(TrainBatches(Recording(), batch_size=12).epoch(0, start=4))
    assert Recording.seen == permutation(SAMPLES, 0, 0).tolist()[48:]


def test_order_depends_on_seed_and_epoch_alone() -> None:
    orders = {(s, e): tuple(permutation(SAMPLES, s, e).tolist()) for s in (-1, 0, 1, 2**40) for e in (0, 1, 2)}
    assert len(set(orders.values())) == len(orders)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    for workers in (0, 1):
        list(TrainBatches(Squares(), batch_size=12, workers=workers).epoch(0))
    assert torch.equal(torch.get_rng_state(), before)  # the model's random numbers stay its own


def test_counts() -> None:
    batches = TrainBatches(resident(), batch_size=12, data_ranks=4)
    assert (batches.samples, batches.steps_per_epoch) == (50, 5)
    stream = TrainBatches(Stream(), batch_size=12)
    assert (stream.samples, stream.steps_per_epoch) == (None, None)


def test_a_stream_is_told_the_epoch() -> None:
    stream = Stream()
    list(TrainBatches(stream, batch_size=12).epoch(3))
    assert stream.epochs == [3]


def test_a_batch_stays_what_it_was() -> None:
    data = TensorData(torch.arange(5000).view(-1, 1).float(), torch.arange(5000), scale=1.0)
    kept = [(inputs, inputs.clone()) for inputs, _, _ in TrainBatches(data, batch_size=2).epoch(0)]
    assert len(kept) == 2500 and all(torch.equal(now, then) for now, then in kept)


def test_wide_samples_go_in_smaller_chunks() -> None:
    data = TensorData(torch.zeros(64, 1 << 18, dtype=torch.uint8), torch.arange(64), scale=1.0)
    chunks: list[int] = []
    feed = ResidentFeed(data, torch.device("cpu"))
    gather = data.gather
    data.gather = lambda positions: chunks.append(len(positions)) or gather(positions)  # type: ignore[method-assign,assignment,func-returns-value]
    list(feed(torch.arange(64), [2] * 32))
    assert chunks == [8] * 8


@pytest.mark.parametrize("dataset", [resident(), Squares(), Stream()], ids=lambda d: type(d).__name__)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 60])
@pytest.mark.parametrize("batch_size", [1, 7, 100])
def test_evaluation_counts_every_sample_once(dataset: Any, ranks: int, batch_size: int) -> None:
    seen: list[int] = []
    counts = set()
    for rank in range(ranks):
        batches = EvalBatches(dataset, batch_size=batch_size, data_rank=rank, data_ranks=ranks)
        for _ in range(2):  # it can be passed over again
            mine = [(inputs.flatten().int().tolist(), weight) for inputs, _, weight in batches]
        assert all(weight <= len(samples) <= min(weight + 1, batch_size) for samples, weight in mine)
        seen += [i for samples, weight in mine for i in samples[: int(weight)]]
        counts.add(len(mine))
    assert sorted(seen) == list(range(SAMPLES))
    assert len(counts) == 1  # where a rank has no samples left, it has a stand-in


def test_evaluation_with_workers() -> None:
    batches = EvalBatches(Squares(), batch_size=20, workers=2)
    assert batches.samples == 50
    assert [b.inputs.flatten().int().tolist() for b in batches] == [[*range(20)], [*range(20, 40)], [*range(40, 50)]]


@pytest.mark.parametrize(("validation", "held_out"), [(0.1, 5), (0.001, 1), (7, 7), (7.0, 7), (0.98, 49)])
@pytest.mark.parametrize("make", [resident, Squares])
def test_split(make: Any, validation: float, held_out: int) -> None:
    dataset = make()
    parts = [split_validation(dataset, validation, seed=5) for _ in range(2)]
    ids = [[[int(x) for x, _ in part] for part in both if part is not None] for both in parts]
    assert ids[0] == ids[1]
    train, held = ids[0]
    assert len(held) == held_out and sorted(train + held) == list(range(SAMPLES))
    assert train == sorted(train) and held == sorted(held)
    other = split_validation(dataset, validation, seed=6)[1]
    assert other is not None and [int(x) for x, _ in other] != held


def test_split_keeps_the_fast_path_and_the_memory() -> None:
    data = resident()
    train, held = split_validation(data, 0.1, seed=0)
    assert isinstance(train, TensorData) and isinstance(held, TensorData)
    assert train.inputs.data_ptr() == held.inputs.data_ptr() == data.inputs.data_ptr()
    assert isinstance(TrainBatches(train, batch_size=5)._feed, ResidentFeed)
    seen = [i for step in steps(train, 2, batch_size=12) for i in step]
    assert sorted(seen + [int(x) for x, _ in held]) == list(range(SAMPLES))


def test_no_split() -> None:
    stream = Stream()
    assert split_validation(stream, 0, seed=0) == (stream, None)


@pytest.mark.parametrize("validation", [-0.1, -3, 1.5, 50, 99, 0.999, float("nan"), float("inf")])
def test_bad_split(validation: float) -> None:
    with pytest.raises(DataError, match=r"^train.validation: "):
        split_validation(resident(), validation, seed=0)


class NoLength(Dataset[Any]):
    def __getitem__(self, position: int) -> Any:
        return position


class Dicts(Squares):
    def __getitem__(self, position: int) -> Any:
        return {"x": position}


BAD = {
    "too few": (lambda: TrainBatches(resident(), batch_size=51), "train.batch_size: one global batch of 51"),
    "too few, stream": (lambda: TrainBatches(Stream(3), batch_size=4), "train.batch_size: one global batch of 4"),
    "empty": (lambda: TrainBatches(TensorData(torch.zeros(0, 1), torch.zeros(0)), batch_size=1), "train.batch_size: "),
    "empty stream": (lambda: TrainBatches(Stream(0), batch_size=4), "train.batch_size: one global batch of 4"),
    "workers, stream": (lambda: TrainBatches(Stream(), batch_size=4, workers=1), "train.workers: "),
    "workers, evaluation": (lambda: EvalBatches(Stream(), batch_size=4, workers=1), "train.workers: "),
    "no length": (lambda: TrainBatches(NoLength(), batch_size=1), "data._target_: NoLength is no data set"),
    "no data set": (lambda: TrainBatches(3, batch_size=1), "data._target_: int is no data set"),  # type: ignore[arg-type]
    "no pairs": (
        lambda: TrainBatches(Dicts(), batch_size=2),
        r"data._target_: .* not \(input, target\) pairs but dict",
    ),
    "split of a stream": (lambda: split_validation(Stream(), 0.1, seed=0), "train.validation: .* IterableDataset"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str) -> None:
    make, message = BAD[case]
    with pytest.raises(DataError, match=f"^{message}"):
        list(make().epoch(0))  # type: ignore[union-attr]


class Handlers(Squares):
    """Targets tell whether the process that loads has the default signal actions."""

    def __getitem__(self, position: int) -> tuple[torch.Tensor, int]:
        kept = all(signal.getsignal(number) is signal.SIG_DFL for number in (signal.SIGINT, signal.SIGTERM))
        return torch.zeros(1), int(kept and signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN)


def test_workers_do_not_inherit_signal_handlers() -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    try:
        (batch,) = TrainBatches(Handlers(), batch_size=50, workers=1).epoch(0)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert batch.targets.tolist() == [1] * 50


def test_worker_set_up_can_be_pickled() -> None:
    feed = LoaderFeed(Squares(), torch.device("cpu"), workers=1, seed=0)
    assert feed.loader.worker_init_fn is reset_signal_handlers and "<locals>" not in reset_signal_handlers.__qualname__


def test_nested_inputs_are_moved_whole() -> None:
    moved = to_device(({"a": torch.zeros(1), "b": [torch.zeros(1), "text"]}, torch.zeros(1)), torch.device("meta"))
    assert moved[0]["a"].is_meta and moved[0]["b"][0].is_meta and moved[0]["b"][1] == "text" and moved[1].is_meta

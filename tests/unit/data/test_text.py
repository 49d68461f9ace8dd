"""Text files as sequences of bytes."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from slurm_train.data import sources
from slurm_train.data.batches import EvalBatches, TrainBatches, split_validation
from slurm_train.data.corpus import find_corpus
from slurm_train.data.facts import data_facts
from slurm_train.data.feeds import LoaderFeed, WindowFeed
from slurm_train.data.text import Bytes, open_stream
from slurm_train.data.tokens import TokenFile
from slurm_train.errors import DataError

STREAM = b"beta\nis two\0# gamma\n\0alpha\nis one"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three texts, and what is no part of them."""
    root = tmp_path / "texts"
    (root / "z" / "deep").mkdir(parents=True)
    (root / ".git").mkdir()
    (root / "b.txt").write_bytes(b"beta\nis two")
    (root / "z" / "a.txt").write_bytes(b"alpha\nis one")
    (root / "notes.md").write_bytes(b"# gamma\n")
    (root / "z" / "deep" / "empty.txt").touch()
    (root / ".git" / "config.txt").write_bytes(b"no")
    (root / ".hidden.txt").write_bytes(b"no")
    return root


def config(**more: Any) -> dict[str, Any]:
    return {"_target_": "slurm_train.data.text.Bytes", **more}


def stream(dataset: Bytes) -> bytes:
    """The inputs of all sequences, one after the other, and the last target."""
    rows = list(dataset)
    return bytes(torch.cat([inputs for inputs, _ in rows] + [rows[-1][1][-1:]]).tolist())


def test_files_are_joined_in_the_order_of_their_paths(folder: Path) -> None:
    data = Bytes(path=folder, length=4, test=0)
    assert len(STREAM) == 33 and len(data) == 8
    assert stream(data) == STREAM
    assert stream(Bytes(path=folder, files="*.txt", length=1, test=0)) == b"beta\nis two\0alpha\nis one"
    assert stream(Bytes(path=folder / "b.txt", files="*.md", length=5, test=0)) == b"beta\nis two"


def test_targets_are_the_next_bytes(folder: Path) -> None:
    data = Bytes(path=folder, length=5, test=0)
    assert len(data) == 6  # 31 bytes; the two that are left make no sequence
    for position, (inputs, targets) in enumerate(data):
        start = 5 * position
        assert inputs.tolist() == list(STREAM[start : start + 5])
        assert targets.tolist() == list(STREAM[start + 1 : start + 6])
        assert inputs.dtype == targets.dtype == torch.int64


def test_the_last_sequences_are_for_test(folder: Path) -> None:
    train, test = (Bytes(split, path=folder, length=4, test=0.25) for split in ("train", "test"))
    assert (len(train), len(test)) == (6, 2)
    assert stream(train) == STREAM[:25] and stream(test) == STREAM[24:]
    assert len(Bytes("test", path=folder, length=4, test=0.001)) == 1
    assert len(Bytes("test", path=folder, length=4, test=0)) == 0


def test_boundaries_can_be_left_out_of_the_loss(folder: Path) -> None:
    kept = list(Bytes(path=folder, length=4, test=0))
    ignored = list(Bytes(path=folder, length=4, test=0, boundaries="ignore"))
    changed = [(i, t) for i, pair in enumerate(ignored) for t in range(4) if pair[1][t] != kept[i][1][t]]
    places = [4 * i + t for i, t in changed]
    assert places == [place for place, byte in enumerate(STREAM) if byte == 0]
    assert all(int(ignored[i][1][t]) == -100 for i, t in changed)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(kept, ignored, strict=True))


def test_whole_batches_and_subsets(folder: Path) -> None:
    data = Bytes(path=folder, length=4, test=0, boundaries="ignore")
    part = data.subset(torch.tensor([7, 5, 2])).subset(torch.tensor([2, 0]))
    assert isinstance(part, Bytes) and len(part) == 2 and len(data) == 8
    inputs, targets = part.gather(torch.tensor([1, 0, 1]))
    for row, position in enumerate((7, 2, 7)):
        assert torch.equal(inputs[row], data[position][0]) and torch.equal(targets[row], data[position][1])
    assert inputs.is_contiguous() and targets.is_contiguous()
    for alone in (data[1], data.gather(torch.tensor([1]))):
        assert alone[0].untyped_storage().data_ptr() != alone[1].untyped_storage().data_ptr()
    with pytest.raises(IndexError):
        part[2]


def test_batches_are_gathered_and_not_loaded_one_by_one(folder: Path) -> None:
    data = Bytes(path=folder, length=4, test=0)
    train, held_out = split_validation(data, 2, seed=0)
    assert isinstance(train, Bytes) and isinstance(held_out, Bytes) and (len(train), len(held_out)) == (6, 2)
    batches = TrainBatches(train, batch_size=4, data_ranks=2, workers=3)
    assert isinstance(batches._feed, WindowFeed)
    seen = []
    for rank in range(2):
        ranked = TrainBatches(train, batch_size=4, data_rank=rank, data_ranks=2)
        for inputs, targets, _ in ranked.epoch(0):
            assert torch.equal(inputs[:, 1:], targets[:, :-1])
            seen += inputs.tolist()
    for inputs, _, weight in EvalBatches(held_out, batch_size=5):
        assert weight == 2
        seen += inputs.tolist()
    assert sorted(seen) == sorted(inputs.tolist() for inputs, _ in data)
    assert list(EvalBatches(Bytes("test", path=folder, length=4, test=0), batch_size=5)) == []


def test_a_subclass_with_items_of_its_own_is_loaded_by_them(folder: Path) -> None:
    class Reversed(Bytes):
        def __getitem__(self, position: int) -> Any:
            inputs, targets = super().__getitem__(position)
            return inputs.flip(0), targets

    data = Reversed(path=folder, length=4, test=0)
    batches = EvalBatches(data, batch_size=8)
    assert isinstance(batches._feed, LoaderFeed)
    (batch,) = batches
    assert torch.equal(batch.inputs[0], data[0][0])


def test_encode_and_decode() -> None:
    assert Bytes.encode("añ") == [97, 195, 177]
    assert Bytes.decode([97, 195, 177]) == "añ" and Bytes.decode(torch.tensor([97, 195]).tolist()) == "a\ufffd"


def cached() -> list[Path]:
    directory = sources.cache_directory()
    assert directory is not None
    return sorted(directory.parent.rglob("*.bytes*"))


def test_the_stream_is_written_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Bytes(path=folder, length=4, test=0)
    (file,) = cached()
    assert file.read_bytes() == STREAM
    before = file.stat()
    again = Bytes("test", path=str(folder), length=3)
    assert cached() == [file] and (file.stat().st_ino, file.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert stream(again) == STREAM[27:31]  # the last sequence, of the file that the other split has written
    os.utime(folder / "b.txt", ns=(0, 0))
    Bytes(path=folder, length=4)
    assert len(cached()) == 2  # the text may have changed
    assert stream(first) == STREAM


def test_a_cut_off_cache_file_is_written_again(folder: Path) -> None:
    corpus = find_corpus(folder)
    open_stream(corpus)
    (file,) = cached()
    file.write_bytes(STREAM[:10])
    assert open_stream(corpus).tobytes() == STREAM
    assert cached() == [file]


@pytest.mark.parametrize("obstacle", ["no home", "a file in the way"])
def test_without_a_cache_the_stream_is_in_memory(
    folder: Path, obstacle: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if obstacle == "no home":
        monkeypatch.setattr("slurm_train.data.text.cache_directory", lambda: None)
    else:
        (tmp_path / "cache").touch()
    assert stream(Bytes(path=folder, length=4, test=0)) == STREAM
    assert not list(tmp_path.rglob("*.bytes*"))


def test_a_file_that_changes_is_noticed(folder: Path) -> None:
    corpus = find_corpus(folder)
    (folder / "b.txt").write_bytes(b"more than before")
    with pytest.raises(DataError, match="b.txt has changed while it was read"):
        open_stream(corpus)
    assert cached() == []  # nothing half-written is left
    (folder / "b.txt").unlink()
    with pytest.raises(DataError, match="cannot read .*b.txt: No such file"):
        open_stream(corpus)


def test_facts_are_those_of_the_run(folder: Path) -> None:
    for more in ({"length": 4}, {"length": 3, "test": 0.3}, {"length": 4, "files": "*.txt", "test": 0}):
        facts = data_facts(config(path=str(folder), **more))
        train, test = Bytes("train", path=folder, **more), Bytes("test", path=folder, **more)
        assert facts is not None
        assert (facts.train_samples, facts.test_samples) == (len(train), len(test))
        assert facts.sample_shape == train[0][0].shape and facts.classes == 256 and not facts.downloads
        assert facts.source == train.source


def test_facts_write_no_cache(folder: Path) -> None:
    assert data_facts(config(path=str(folder), length=4)) is not None
    assert cached() == []


@pytest.mark.parametrize("cls", [Bytes, TokenFile])
def test_facts_know_the_defaults(cls: type, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(100_000))
    target = {"_target_": f"{cls.__module__}.{cls.__name__}", "path": str(path)}
    parameters = inspect.signature(cls).parameters
    defaults = {name: p.default for name, p in parameters.items() if name not in ("split", "path")}
    assert data_facts(target) == data_facts(target | defaults)


def test_the_source_says_what_it_is(folder: Path) -> None:
    assert Bytes(path=folder, length=4).source == f"3 files with 31 bytes in {folder}"
    assert Bytes(path=folder, files="*.md", length=2).source == f"1 file named *.md with 8 bytes in {folder}"


def test_the_library_of_python_is_the_default() -> None:
    corpus = find_corpus()
    assert "ast.py" in corpus.names and "json/decoder.py" in corpus.names
    assert not [name for name in corpus.names if name[-3:] != ".py"]
    assert not [name for name in corpus.names if {"site-packages", "test", "tests"} & set(name.split("/"))]
    data = Bytes(length=512, test=0.1)
    assert len(data) + len(Bytes("test", length=512, test=0.1)) == (corpus.size - 1) // 512
    inputs, targets = data.gather(torch.arange(len(data))[::97])
    assert int(inputs.max()) < 256 and torch.equal(inputs[:, 1:], targets[:, :-1])
    assert data.source.startswith(f"{len(corpus.names):,} files named *.py with ")


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no such path": ({"path": "nowhere"}, r"data.path=nowhere: there is no such file or directory; name a text file"),
    "no match": ({"files": "*.rst"}, r"data.path=.*: there is no file named \*.rst with text in"),
    "too little": ({"length": 40}, r"data.length=40: the 33 tokens of 3 files .* leave no sequence to train on"),
    "all for test": ({"length": 10, "test": 0.99}, r"data.length=10: "),
    "length of 0": ({"length": 0}, r"data.length=0: must be a whole number of at least 1"),
    "no length": ({"length": "long"}, r"data.length=long: must be a whole number of at least 1"),
    "all": ({"test": 1.0}, r"data.test=1.0: must be a fraction, from 0 to below 1"),
    "negative": ({"test": -0.1}, r"data.test=-0.1: must be a fraction"),
    "not a number": ({"test": float("nan")}, r"data.test=nan: must be a fraction"),
    "boundaries": ({"boundaries": "drop"}, r"data.boundaries=drop: unknown; use keep or ignore"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_told_alike_before_and_in_a_run(folder: Path, case: str) -> None:
    arguments, message = BAD[case]
    arguments = {"path": str(folder), "length": 4} | arguments
    told = []
    for call in (lambda: Bytes("train", **arguments), lambda: data_facts(config(**arguments))):
        with pytest.raises(DataError, match=f"^{message}") as caught:
            call()
        told.append(str(caught.value))
    assert told[0] == told[1]


def test_an_unknown_split(folder: Path) -> None:
    with pytest.raises(DataError, match="data.split: there is no split 'valid'"):
        Bytes("valid", path=folder, length=4)

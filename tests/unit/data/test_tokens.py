"""Token ids from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slurm_train.data.facts import data_facts
from slurm_train.data.tokens import TokenFile, write_tokens
from slurm_train.errors import DataError

IDS = np.arange(1000, 1042)


def config(**more: Any) -> dict[str, Any]:
    return {"_target_": "slurm_train.data.tokens.TokenFile", **more}


def ids_of(dataset: TokenFile) -> list[int]:
    rows = list(dataset)
    return torch.cat([inputs for inputs, _ in rows] + [rows[-1][1][-1:]]).tolist()


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int32"])
def test_what_is_written_is_read(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "tokens.bin"
    documents = (list(IDS[:5]), np.array([], dtype=float), IDS[5:30].astype(np.uint16), IDS[30:])
    assert write_tokens(path, iter(documents), dtype) == 42
    assert path.stat().st_size == 42 * np.dtype(dtype).itemsize
    data = TokenFile(path=path, length=4, dtype=dtype, test=0)
    assert ids_of(data) == IDS[:41].tolist() and len(data) == 10
    inputs, targets = data[3]
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.tolist() == [1012, 1013, 1014, 1015] and targets.tolist() == [1013, 1014, 1015, 1016]
    assert data.source == f"{path} (42 tokens, {dtype})"


def test_large_tokens_are_not_negative(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    write_tokens(path, [[0, 65535, 40000]])
    assert ids_of(TokenFile(path=path, length=1, test=0)) == [0, 65535, 40000]
    write_tokens(path, [[0, 2**32 - 1, 7]], "uint32")
    assert ids_of(TokenFile(path=path, length=1, test=0, dtype="uint32")) == [0, 2**32 - 1, 7]


@pytest.mark.parametrize("dtype", ["uint8", "<u2", ">u2", "int64"])
def test_a_npy_file_tells_its_own_type(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "tokens.npy"
    np.save(path, np.arange(100, 131).astype(dtype))
    assert ids_of(TokenFile(path=path, length=5, dtype="uint32", test=0)) == list(range(100, 131))


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_all_versions_of_npy(tmp_path: Path, version: tuple[int, int]) -> None:
    path = tmp_path / "tokens.npy"
    with open(path, "wb") as file:
        np.lib.format.write_array(file, np.arange(9, dtype=np.uint16), version=version)
    assert ids_of(TokenFile(path=path, length=2, test=0)) == list(range(9))


def test_splits_and_facts(tmp_path: Path) -> None:
    for path in (tmp_path / "tokens.bin", tmp_path / "tokens.npy"):
        if path.suffix == ".npy":
            np.save(path, IDS.astype(np.int32))
        else:
            write_tokens(path, [IDS])
        train, test = (TokenFile(split, path=path, length=4, test=0.2) for split in ("train", "test"))
        assert ids_of(train) == IDS[:33].tolist() and ids_of(test) == IDS[32:41].tolist()
        facts = data_facts(config(path=str(path), length=4, test=0.2))
        assert facts is not None and (facts.train_samples, facts.test_samples) == (len(train), len(test)) == (8, 2)
        assert (facts.sample_shape, facts.classes, facts.source) == ((4,), None, train.source)


def test_ignored_targets(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    write_tokens(path, [[3, 0, 0, 4, 5]])
    ((inputs, targets),) = TokenFile(path=path, length=4, test=0, ignore=0)
    assert inputs.tolist() == [3, 0, 0, 4] and targets.tolist() == [-100, -100, 4, 5]


def test_the_file_is_mapped_and_not_read(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    with open(path, "wb") as file:
        file.truncate(1 << 40)  # a terabyte of zeros, of which nothing is on the disk
    data = TokenFile(path=path, length=1 << 16)
    assert len(data) == round(((1 << 39) - 1) // (1 << 16) * 0.95)
    inputs, targets = data.gather(torch.tensor([0, len(data) - 1]))
    assert inputs.shape == targets.shape == (2, 1 << 16) and not inputs.any()


def test_encode_and_decode() -> None:
    assert TokenFile.encode(" 1 5\n7 ") == [1, 5, 7]
    assert TokenFile.decode(torch.tensor([1, 5, 7])) == "1 5 7"
    with pytest.raises(DataError, match="^'1 five' is not token ids; write numbers"):
        TokenFile.encode("1 five")


def broken(tmp_path: Path) -> None:
    """Files that are not what they should be."""
    (tmp_path / "odd.bin").write_bytes(b"123")
    (tmp_path / "empty.bin").touch()
    (tmp_path / "text.npy").write_bytes(b"some text\n" * 20)
    np.save(tmp_path / "square.npy", np.zeros((4, 4), np.int32))
    np.save(tmp_path / "floats.npy", np.zeros(16))
    np.save(tmp_path / "cut.npy", np.zeros(16, np.int32))
    with open(tmp_path / "cut.npy", "r+b") as file:
        file.truncate(150)
    (tmp_path / "header.npy").write_bytes(b"\x93NUMPY\x01\x00\x10\x00{'descr': broken")


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no path": ({}, r"data.path: no file is named; name a file that slurm_train.data.tokens.write_tokens or"),
    "no such file": ({"path": "nowhere.bin"}, r"data.path=.*nowhere.bin: cannot read it: No such file"),
    "a directory": ({"path": "."}, r"data.path=.*: cannot read it: Is a directory"),
    "odd size": ({"path": "odd.bin"}, r"data.path=.*odd.bin: 3 bytes are no whole number of uint16 tokens; set data.d"),
    "empty": ({"path": "empty.bin"}, r"data.length=4: the 0 tokens of .* leave no sequence"),
    "dtype": (
        {"path": "odd.bin", "dtype": "float32"},
        r"data.dtype=float32: unknown type of tokens; use uint8",
    ),
    "ignored text": ({"path": "odd.bin", "ignore": "pad"}, r"data.ignore=pad: must be a whole number or null"),
    "ignored truth": ({"path": "odd.bin", "ignore": True}, r"data.ignore=True: must be a whole number or null"),
    "no npy": ({"path": "text.npy"}, r"data.path=.*text.npy: it is no .npy file, whatever its name"),
    "broken header": ({"path": "header.npy"}, r"data.path=.*header.npy: it is no .npy file"),
    "two dimensions": ({"path": "square.npy"}, r"data.path=.*: it holds <i4 of shape \(4, 4\), not a row of whole num"),
    "floats": ({"path": "floats.npy"}, r"data.path=.*: it holds <f8 of shape \(16,\), not a row of whole numbers"),
    "cut off": ({"path": "cut.npy"}, r"data.path=.*: it should hold 16 tokens, but is 150 bytes long"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_told_alike_before_and_in_a_run(tmp_path: Path, case: str) -> None:
    broken(tmp_path)
    arguments, message = BAD[case]
    arguments = {"length": 4} | arguments
    if "path" in arguments:
        arguments["path"] = str(tmp_path / arguments["path"])
    told = []
    for call in (lambda: TokenFile("train", **arguments), lambda: data_facts(config(**arguments))):
        with pytest.raises(DataError, match=f"^{message}") as caught:
            call()
        told.append(str(caught.value))
    assert told[0] == told[1]


@pytest.mark.parametrize(
    ("name", "documents", "dtype", "message"),
    [
        ("a.bin", [[1], [70_000]], "uint16", "the token 70000 does not fit uint16; write them as uint32"),
        ("a.bin", [[-1, 3]], "uint32", "the token -1 does not fit uint32"),
        ("a.bin", [[1], [0.5]], "uint16", "tokens are whole numbers, not float64"),
        ("a.bin", [[1]], "int7", "unknown type of tokens int7; use uint8"),
        ("a.npy", [[1]], "uint16", ".*a.npy would have no header"),
    ],
)
def test_what_cannot_be_written(tmp_path: Path, name: str, documents: Any, dtype: str, message: str) -> None:
    with pytest.raises(DataError, match=f"^{message}"):
        write_tokens(tmp_path / name, documents, dtype)
    assert list(tmp_path.glob("a.*")) == []

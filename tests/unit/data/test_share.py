from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from slurm_train.data import share
from slurm_train.data.resident import TensorData
from slurm_train.data.share import attach, publish, release
from slurm_train.errors import DataError


def data() -> TensorData:
    inputs = torch.arange(6 * 4).to(torch.uint8).view(6, 1, 2, 2)
    return TensorData(inputs, torch.arange(6), scale=0.5, shift=-1.0, source="ünicode", indices=torch.tensor([5, 0, 3]))


def assert_same(mine: TensorData, other: TensorData) -> None:
    assert (mine.scale, mine.shift, mine.source, len(mine)) == (other.scale, other.shift, other.source, len(other))
    for (x, y), (x_other, y_other) in zip(mine, other, strict=True):
        assert torch.equal(x, x_other) and torch.equal(y, y_other)


@pytest.mark.parametrize(
    "original",
    [
        data(),
        TensorData(torch.rand(3, 2, dtype=torch.float64).t(), torch.rand(2)),
        TensorData(torch.rand(3, 5).bfloat16(), torch.tensor([True, False, True])),
        TensorData(torch.zeros(0, 4), torch.zeros(0)),
    ],
)
def test_comes_back_as_it_was_and_outlives_its_name(original: TensorData) -> None:
    handle = publish(original)
    assert stat.S_IMODE(os.stat(handle).st_mode) == 0o600
    other = attach(handle)
    release(handle)
    release(handle)
    assert not os.path.exists(handle)
    assert (other.inputs.dtype, other.inputs.shape) == (original.inputs.dtype, original.inputs.shape)
    assert_same(original, other)


ANOTHER_PROCESS = """
import sys
from slurm_train.data.share import attach
data = attach(sys.argv[1])
print("attached", flush=True)
sys.stdin.readline()  # by now the name is gone
print(data.source, [float(x.sum()) for x, _ in data], [int(y) for _, y in data])
data.inputs.fill_(7)
print("written", flush=True)
sys.stdin.readline()
"""


def test_two_processes() -> None:
    handle = publish(data())
    mine = attach(handle)
    with subprocess.Popen(
        [sys.executable, "-c", ANOTHER_PROCESS, handle], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdin is not None and other.stdout is not None
        assert other.stdout.readline() == "attached\n"
        release(handle)
        print(file=other.stdin, flush=True)
        sums, labels = [float(x.sum()) for x, _ in mine], [int(y) for _, y in mine]
        assert other.stdout.readline().strip() == f"ünicode {sums} {labels}"
        assert other.stdout.readline() == "written\n"
        assert_same(mine, data())  # what the other writes stays its own
        print(file=other.stdin, flush=True)
    assert other.returncode == 0


def test_no_room_in_memory_means_the_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(share.os, "statvfs", lambda _: SimpleNamespace(f_bavail=1, f_frsize=64))
    handle = publish(data())
    assert Path(handle).parent == tmp_path
    assert_same(attach(handle), data())
    release(handle)


def test_a_failed_write_is_tried_elsewhere_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = [tmp_path / "full", tmp_path / "good"]
    for place in places:
        place.mkdir()
    write: Callable[..., None] = share._write

    def full_at_first(file: object, tensor: torch.Tensor) -> None:
        if len(list(places[1].iterdir())) == 0:
            raise OSError(28, "No space left on device")
        write(file, tensor)

    monkeypatch.setattr(share, "_write", full_at_first)
    monkeypatch.setattr(share, "_directories", lambda needed: [str(place) for place in places])
    assert_same(attach(publish(data())), data())
    assert list(places[0].iterdir()) == []
    monkeypatch.setattr(share, "_directories", lambda needed: [str(places[0])])
    monkeypatch.setattr(share, "_write", lambda file, tensor: full_at_first_always())
    with pytest.raises(DataError, match=r"no room to share .* bytes .*No space left on device"):
        publish(data())
    assert list(places[0].iterdir()) == []


def full_at_first_always() -> None:
    raise OSError(28, "No space left on device")


def test_what_cannot_be_attached(tmp_path: Path) -> None:
    (tmp_path / "foreign").write_bytes(b"something else")
    (tmp_path / "empty").write_bytes(b"")
    for name in ("gone", "foreign", "empty"):
        with pytest.raises(DataError, match=f"cannot attach to the shared data .*{name}"):
            attach(str(tmp_path / name))

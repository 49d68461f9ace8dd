from __future__ import annotations

import gzip
import re
import struct
from pathlib import Path

import numpy as np
import pytest

from slurm_train.data.idx import IMAGES, LABELS, read_idx, read_shape
from slurm_train.data.make_sample import idx_bytes
from slurm_train.errors import DataError

IMAGES_CONTENT = idx_bytes(np.arange(3 * 28 * 28, dtype=np.uint16).astype(np.uint8).reshape(3, 28, 28))
LABELS_CONTENT = idx_bytes(np.array([1, 2, 3], dtype=np.uint8))
PACKED = gzip.compress(IMAGES_CONTENT)


@pytest.mark.parametrize("data", [IMAGES_CONTENT, PACKED, PACKED[:0] + gzip.compress(IMAGES_CONTENT, 1)])
@pytest.mark.parametrize("name", ["images", "images.gz", "Bilder für alle"])
def test_reads_plain_and_gzip_whatever_the_name(tmp_path: Path, data: bytes, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    values = read_idx(path, IMAGES)
    assert read_shape(path, IMAGES) == values.shape == (3, 28, 28)
    assert values.flags.writeable
    assert idx_bytes(values) == IMAGES_CONTENT


def test_gzip_of_several_members_is_read(tmp_path: Path) -> None:
    path = tmp_path / "images.gz"
    path.write_bytes(gzip.compress(IMAGES_CONTENT[:100]) + gzip.compress(IMAGES_CONTENT[100:]))
    assert read_shape(path, IMAGES) == read_idx(path, IMAGES).shape == (3, 28, 28)


def with_header(type_code: int, *sizes: int) -> bytes:
    return bytes([0, 0, type_code, len(sizes)]) + struct.pack(f">{len(sizes)}I", *sizes)


BROKEN = {
    "empty": (b"", "is empty"),
    "empty content": (gzip.compress(b""), "is empty"),
    "html": (b"<html>", "not an idx file"),
    "three bytes": (b"\0\0\x08", "not an idx file"),
    "float32": (with_header(0x0D, 3, 28, 28) + bytes(4 * 3 * 28 * 28), "type code 0x0d, not 0x08"),
    "labels": (LABELS_CONTENT, "holds labels; images are expected; are the files .* swapped"),
    "labels, packed": (gzip.compress(LABELS_CONTENT), "holds labels; images are expected"),
    "two dimensions": (with_header(0x08, 3, 28) + bytes(3 * 28), "has 2 dimensions"),
    "no images": (with_header(0x08, 0, 28, 28), "holds no images"),
    "short header": (IMAGES_CONTENT[:10], "truncated inside its header"),
    "truncated": (IMAGES_CONTENT[:-1], "truncated: 2,351 of 2,352 values"),
    "huge count": (with_header(0x08, 2**32 - 1, 2**32 - 1, 2**32 - 1), "truncated: 0 of"),
    "trailing": (IMAGES_CONTENT + b"x", "1 bytes too many"),
    "truncated content": (gzip.compress(IMAGES_CONTENT[:-1]), "truncated: 2,351 of"),
    "trailing content": (gzip.compress(IMAGES_CONTENT + b"x"), "1 bytes too many"),
    "truncated gzip": (PACKED[:-20], "the gzip data ends early"),
    "gzip magic only": (PACKED[:2], "the gzip data ends early"),
    "broken gzip": (PACKED[:40] + bytes(20) + PACKED[60:], "broken gzip"),
    "wrong gzip checksum": (PACKED[:-8] + bytes(4) + PACKED[-4:], "broken gzip"),
    "trailing garbage": (PACKED + b"garbage", "broken gzip"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_file_is_one_clear_line(tmp_path: Path, kind: str) -> None:
    data, message = BROKEN[kind]
    path = tmp_path / "images"
    path.write_bytes(data)
    with pytest.raises(DataError, match=message) as raised:
        read_idx(path, IMAGES, "data.root")
    line = str(raised.value)
    assert line.startswith(f"data.root: {path} ") and "\n" not in line


@pytest.mark.parametrize("kind", sorted(BROKEN.keys() - {"wrong gzip checksum", "broken gzip"}))
def test_header_check_finds_what_the_size_gives_away(tmp_path: Path, kind: str) -> None:
    data, message = BROKEN[kind]
    (tmp_path / "images").write_bytes(data)
    with pytest.raises(DataError, match=message):
        read_shape(tmp_path / "images", IMAGES)


def test_images_where_labels_belong(tmp_path: Path) -> None:
    (tmp_path / "labels").write_bytes(IMAGES_CONTENT)
    with pytest.raises(
        DataError, match="holds images; labels are expected; are the files of images and labels swapped"
    ):
        read_idx(tmp_path / "labels", LABELS)


def test_missing_file_and_directory_in_its_place(tmp_path: Path) -> None:
    for path in (tmp_path / "gone", tmp_path):
        with pytest.raises(DataError, match=re.escape(f"cannot read {path}: ")):
            read_idx(path, IMAGES)

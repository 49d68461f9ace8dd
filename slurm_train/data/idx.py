"""Reading idx files (the format of MNIST and its relatives), plain or compressed with gzip.

An idx file is: two zero bytes, a type code (0x08: unsigned byte), the number of dimensions, each size as a
big-endian 32-bit number, then the values. Format: http://yann.lecun.com/exdb/mnist.
"""

from __future__ import annotations

import gzip
import math
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from slurm_train.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

IMAGES = 3
"""Dimensions of a file of images: count, rows, columns."""

LABELS = 1
"""Dimensions of a file of labels: count."""

_GZIP_MAGIC = b"\x1f\x8b"
_UNSIGNED_BYTE = 0x08
_KINDS = {IMAGES: "images", LABELS: "labels"}
_AGAIN = "get the file again, or name another directory"


def read_shape(path: Path, dimensions: int, key: str = "") -> tuple[int, ...]:
    """The shape of an idx file of unsigned bytes, from its header; the values are read only when the size looks wrong.

    Args:
        path: the file, plain or gzip.
        dimensions: IMAGES or LABELS.
        key: the config key that an error is about.

    Raises:
        DataError: the file cannot be read, is broken, or holds something else.
    """
    with _content(path, key) as stream:
        shape = _header(stream, path, dimensions, key)
    if _content_size(path) != 4 + 4 * dimensions + math.prod(shape):
        return read_idx(path, dimensions, key).shape
    return shape


def read_idx(path: Path, dimensions: int, key: str = "") -> NDArray[np.uint8]:
    """The values of an idx file of unsigned bytes, as a writable array.

    Args:
        path: the file, plain or gzip (told by its first bytes, not by its name).
        dimensions: IMAGES or LABELS.
        key: the config key that an error is about.

    Raises:
        DataError: the file cannot be read, is broken, or holds something else.
    """
    import numpy as np

    with _content(path, key) as stream:
        shape = _header(stream, path, dimensions, key)
        values = stream.read()
    wanted = math.prod(shape)
    if len(values) < wanted:
        raise DataError(f"{path} is truncated: {len(values):,} of {wanted:,} values", key, _AGAIN)
    if len(values) > wanted:
        raise DataError(f"{path} has {len(values) - wanted:,} bytes too many at its end", key, _AGAIN)
    array: NDArray[np.uint8] = np.frombuffer(values, dtype=np.uint8).reshape(shape).copy()
    return array


@contextmanager
def _content(path: Path, key: str) -> Iterator[BinaryIO | gzip.GzipFile]:
    """The decompressed content as a stream; whatever fails while it is read becomes a DataError."""
    try:
        with path.open("rb") as file:
            compressed = file.peek(2)[:2] == _GZIP_MAGIC
            yield gzip.GzipFile(fileobj=file) if compressed else file
    except EOFError:
        raise DataError(f"{path} is truncated: the gzip data ends early", key, _AGAIN) from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} is broken gzip data ({error})", key, _AGAIN) from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}", key) from None


def _header(stream: Any, path: Path, dimensions: int, key: str) -> tuple[int, ...]:
    """The shape; leaves the stream at the first value."""
    magic = stream.read(4)
    if not magic:
        raise DataError(f"{path} is empty", key, _AGAIN)
    if len(magic) < 4 or magic[:2] != b"\0\0":
        raise DataError(f"{path} is not an idx file, nor one compressed with gzip", key, _AGAIN)
    type_code, found = magic[2], magic[3]
    if type_code != _UNSIGNED_BYTE:
        raise DataError(f"{path} has idx type code 0x{type_code:02x}, not 0x08 (unsigned bytes)", key, _AGAIN)
    if found != dimensions:
        what = f"holds {_KINDS[found]}" if found in _KINDS else f"has {found} dimensions"
        swapped = "are the files of images and labels swapped?" if found in _KINDS else _AGAIN
        raise DataError(f"{path} {what}; {_KINDS[dimensions]} are expected", key, swapped)
    sizes = stream.read(4 * dimensions)
    if len(sizes) < 4 * dimensions:
        raise DataError(f"{path} is truncated inside its header", key, _AGAIN)
    shape: tuple[int, ...] = struct.unpack(f">{dimensions}I", sizes)
    if math.prod(shape) == 0:
        raise DataError(f"{path} holds no {_KINDS[dimensions]}", key, _AGAIN)
    return shape


def _content_size(path: Path) -> int:
    """The content's size in bytes without reading it: gzip keeps it (modulo 2**32) in the last four bytes."""
    with path.open("rb") as file:
        compressed = file.read(2) == _GZIP_MAGIC
        size = file.seek(0, os.SEEK_END)
        if not compressed:
            return size
        file.seek(max(0, size - 4))
        return int.from_bytes(file.read(4), "little")

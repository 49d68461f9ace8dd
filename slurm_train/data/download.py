"""Downloading the official Fashion-MNIST files: resumed, verified, renamed into place whole.

Source: https://github.com/zalandoresearch/fashion-mnist.
"""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import os
import socket
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, getproxies, proxy_bypass, urlopen

from slurm_train.errors import DataError

BASE_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"

SHA256 = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
"""SHA-256 of each file's decompressed content, so that it holds whichever gzip made the file.

Computed from the files of the Debian package dataset-fashion-mnist 0.0~git20200523.55506a9-1.
"""

_ATTEMPTS = 3
_BLOCK = 1 << 16
_NOTHING_LEFT = 416  # HTTP "Range Not Satisfiable": the part on disk is already as long as the file

Report = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""


class DownloadFailed(DataError):
    """The files could not be downloaded; the message says why."""


def download(directory: Path, base_url: str = BASE_URL, timeout: float = 10.0) -> None:
    """Bring the four .gz files into `directory`; those already there are kept.

    Processes that download into the same directory take turns, and what one brought serves the others.
    An interrupted download goes on where it stopped. Shows a progress bar when standard error is a terminal.

    Args:
        directory: where the files go; made if it is not there.
        base_url: where they come from.
        timeout: seconds without an answer after which to give up.

    Raises:
        DownloadFailed: offline (known within a second), no answer, wrong content, or the directory cannot be written.
    """
    reason = unreachable(base_url)
    if reason:
        raise DownloadFailed(f"{base_url} cannot be reached: {reason}")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _turn(directory) as tag, _progress_bar() as bar:
            for name, digest in SHA256.items():
                target = directory / f"{name}.gz"
                if not target.exists():
                    part = directory / f"{name}.gz{tag}.part"
                    _obtain(f"{base_url}/{name}.gz", part, digest, timeout, bar(name))
                    os.replace(part, target)
    except OSError as error:
        raise DownloadFailed(f"cannot write to {directory}: {error.strerror or error}") from None


def unreachable(base_url: str, seconds: float = 1.0) -> str:
    """Why the server (or the proxy in front of it) cannot be reached, after at most `seconds`; "" if it can."""
    outcome: list[str] = []

    def connect() -> None:
        try:
            socket.create_connection(_peer(base_url), timeout=seconds).close()
            outcome.append("")
        except OSError as error:
            outcome.append(error.strerror or str(error))

    # Looking up a name has no time-out of its own; a daemon thread can be left behind.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(seconds)
    return outcome[0] if outcome else f"no answer within {seconds:g} s"


def _peer(base_url: str) -> tuple[str, int]:
    """Host and port that a request goes to first."""
    url = urlsplit(base_url)
    proxy = getproxies().get(url.scheme)
    if proxy and not proxy_bypass(url.hostname or ""):
        url = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    return url.hostname or "", url.port or (443 if url.scheme == "https" else 80)


def _obtain(url: str, part: Path, digest: str, timeout: float, report: Report) -> None:
    """Download `url` to `part` and verify it; go on after a break as long as each attempt gets somewhere."""
    for _ in range(_ATTEMPTS):
        before = _size(part)
        try:
            _transfer(url, part, timeout, report)
        except (OSError, HTTPException) as error:
            if _size(part) <= before:
                raise DownloadFailed(f"{url}: {getattr(error, 'reason', None) or error}") from None
            continue
        if _content_sha256(part) == digest:
            return
        part.unlink()
        if before == 0:
            raise DownloadFailed(f"{url}: not the content that is expected (checksum)")
    raise DownloadFailed(f"{url}: broken off {_ATTEMPTS} times")


def _transfer(url: str, part: Path, timeout: float, report: Report) -> None:
    """One request: appends to `part`, or writes it anew if the server does not resume."""
    have = _size(part)
    try:
        response = urlopen(Request(url, headers={"Range": f"bytes={have}-"} if have else {}), timeout=timeout)
    except HTTPError as error:
        error.close()
        if error.code == _NOTHING_LEFT:
            return
        raise
    with response, part.open("ab" if response.status == 206 else "wb") as file:
        total = file.tell() + int(response.headers.get("Content-Length") or 0)
        for block in _blocks(response):
            file.write(block)
            report(file.tell(), total)


def _blocks(response: HTTPResponse) -> Iterator[bytes]:
    while block := response.read(_BLOCK):
        yield block
    if response.length:
        raise ConnectionError(f"the connection ended {response.length:,} bytes early")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _content_sha256(path: Path) -> str:
    """SHA-256 of the decompressed content; "" for broken gzip data."""
    digest = hashlib.sha256()
    try:
        with gzip.open(path) as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    except (EOFError, gzip.BadGzipFile, zlib.error):
        return ""
    return digest.hexdigest()


@contextmanager
def _turn(directory: Path) -> Iterator[str]:
    """Wait for this process's turn; gives a tag for its part files, "" (so that they can be resumed) if it is alone."""
    with (directory / ".lock").open("w") as file:
        tag = ""
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # a file system without locks
            tag = f".{socket.gethostname()}-{os.getpid()}"
        try:
            yield tag
        finally:
            if tag:
                for part in directory.glob(f"*{tag}.part"):
                    part.unlink()


@contextmanager
def _progress_bar() -> Iterator[Callable[[str], Report]]:
    """A function that adds a line for a file and returns what reports its progress."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns: list[Any] = [TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()]
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:

        def line(name: str) -> Report:
            task = progress.add_task(name, total=None)
            return lambda done, total: progress.update(task, completed=done, total=max(done, total))

        yield line

from __future__ import annotations

import gzip
import hashlib
import http.server
import multiprocessing
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_train.data import download as official
from slurm_train.data.download import DownloadFailed, download, unreachable

CONTENTS = {name: (name.encode() + bytes(range(256))) * 2000 for name in official.SHA256}
FILES = {f"/{name}.gz": gzip.compress(content, 0, mtime=0) for name, content in CONTENTS.items()}


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves FILES; the server's `mode` says what goes wrong."""

    def do_GET(self) -> None:
        self.server.requests.append((self.path, self.headers.get("Range")))
        mode, data = self.server.mode, FILES.get(self.path, b"")
        if mode == "silent":
            self.server.over.wait(10)
            return
        if mode == "portal":
            data = b"<html>please log in</html>"
        first = int((self.headers.get("Range") or "bytes=0-")[len("bytes=") : -1])
        if mode == "no ranges" or first == 0:
            self.send_response(200)
            first = 0
        elif first >= len(data):
            self.send_error(416)
            return
        else:
            self.send_response(206)
        self.send_header("Content-Length", str(len(data) - first))
        self.end_headers()
        cut = len(data) - first if mode != "breaks" else min(100_000, len(data) - first)
        self.wfile.write(data[first : first + cut])

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[http.server.ThreadingHTTPServer]:
    for name, content in CONTENTS.items():
        monkeypatch.setitem(official.SHA256, name, hashlib.sha256(content).hexdigest())
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        server.mode, server.requests, server.over = "good", [], threading.Event()
        server.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.over.set()
        server.shutdown()
        thread.join()


def check_all_there(directory: Path) -> None:
    for name, content in CONTENTS.items():
        assert gzip.decompress((directory / f"{name}.gz").read_bytes()) == content
    assert not list(directory.glob("*.part"))


@pytest.mark.parametrize("mode", ["good", "no ranges"])
def test_downloads_once(tmp_path: Path, server: http.server.ThreadingHTTPServer, mode: str) -> None:
    server.mode = mode
    directory = tmp_path / "new" / "with ünicode"
    download(directory, server.url)
    check_all_there(directory)
    download(directory, server.url)
    assert len(server.requests) == 4


@pytest.mark.parametrize("mode", ["good", "no ranges"])
@pytest.mark.parametrize("part", ["half", "whole", "wrong half", "too long"])
def test_goes_on_from_what_is_there(
    tmp_path: Path, server: http.server.ThreadingHTTPServer, mode: str, part: str
) -> None:
    server.mode = mode
    path, data = next(iter(FILES.items()))
    half = len(data) // 2
    already = {"half": data[:half], "whole": data, "wrong half": bytes(half), "too long": data + bytes(9)}[part]
    (tmp_path / f"{path[1:]}.part").write_bytes(already)
    download(tmp_path, server.url)
    check_all_there(tmp_path)
    assert server.requests[0] == (path, f"bytes={len(already)}-")


def test_a_connection_that_breaks_is_resumed(tmp_path: Path, server: http.server.ThreadingHTTPServer) -> None:
    server.mode = "breaks"
    name = next(iter(CONTENTS))
    data = FILES[f"/{name}.gz"]
    with pytest.raises(DownloadFailed, match="broken off 3 times"):
        download(tmp_path, server.url)
    assert (tmp_path / f"{name}.gz.part").read_bytes() == data[:300_000]
    server.mode = "good"
    download(tmp_path, server.url)
    check_all_there(tmp_path)
    assert [asked for _, asked in server.requests[:4]] == [None, *(f"bytes={n}00000-" for n in (1, 2, 3))]


def test_wrong_content_never_gets_its_name(tmp_path: Path, server: http.server.ThreadingHTTPServer) -> None:
    server.mode = "portal"
    with pytest.raises(DownloadFailed, match="not the content that is expected"):
        download(tmp_path, server.url)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_missing_on_the_server(tmp_path: Path, server: http.server.ThreadingHTTPServer) -> None:
    with pytest.raises(DownloadFailed, match=r"HTTP Error|not the content"):
        download(tmp_path, f"{server.url}/elsewhere")


def test_a_server_that_never_answers(tmp_path: Path, server: http.server.ThreadingHTTPServer) -> None:
    server.mode = "silent"
    with pytest.raises(DownloadFailed, match="timed out"):
        download(tmp_path, server.url, timeout=0.2)
    assert len(server.requests) == 1


def test_refused(tmp_path: Path) -> None:
    with pytest.raises(DownloadFailed, match="cannot be reached: Connection refused"):
        download(tmp_path / "cache", "http://127.0.0.1:1")
    assert not (tmp_path / "cache").exists()


def test_a_name_that_does_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    assert unreachable("http://nowhere.invalid") == "Name or service not known"


def test_a_look_up_that_hangs_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def hang(*_: object, **__: object) -> None:
        over.wait(30)
        raise socket.gaierror(socket.EAI_AGAIN, "late")

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    start = time.monotonic()
    assert unreachable("http://nowhere.invalid", seconds=0.1) == "no answer within 0.1 s"
    assert time.monotonic() - start < 10
    over.set()


def test_a_proxy_is_what_must_be_reached(
    server: http.server.ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("http_proxy", server.url)
    assert unreachable("http://nowhere.invalid") == ""
    monkeypatch.setenv("http_proxy", "127.0.0.1:1")
    assert unreachable(server.url) == "Connection refused"


def test_a_directory_that_cannot_be_written(tmp_path: Path, server: http.server.ThreadingHTTPServer) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(DownloadFailed, match=r"cannot write to .*file"):
        download(tmp_path / "file", server.url)


def test_without_locks_each_process_has_its_own_part(
    tmp_path: Path, server: http.server.ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(official.fcntl, "flock", unsupported)
    foreign = tmp_path / f"{next(iter(CONTENTS))}.gz.part"
    foreign.write_bytes(b"another's")
    download(tmp_path, server.url)
    assert foreign.read_bytes() == b"another's"
    assert server.requests[0][1] is None
    foreign.unlink()
    check_all_there(tmp_path)


def test_two_processes_at_once(tmp_path: Path, server: http.server.ThreadingHTTPServer) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=download, args=(tmp_path, server.url)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0, 0]
    assert len(server.requests) == 4  # the second found what the first had brought
    check_all_there(tmp_path)

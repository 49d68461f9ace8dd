"""What a node says of itself: figures where all is well, else a fault with figure and limit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from slurm_train.train import preflight_host as host
from slurm_train.train.preflight_host import GIB, MIB, Needs, NodeFault

PLAN = {
    "parameters": 1000,
    "tasks_per_node": 4,
    "costs": {"memory": {"weights": 2000, "optimizer": 4000, "ema": None, "activations": 500}, "offload": False},
}


def test_what_a_run_needs() -> None:
    disk = 2 * 4 * 1000 * 3 + host.WRITTEN_BYTES  # weights and two moments, twice
    assert host.needs(PLAN, 0) == Needs(4 * (host.RANK_BYTES + 6500), 0, disk)
    assert host.needs(PLAN, 2) == Needs(4 * host.RANK_BYTES, 2 * 6500, disk)
    offloaded = {**PLAN, "costs": {**PLAN["costs"], "offload": True}}
    assert host.needs(offloaded, 2) == Needs(4 * (host.RANK_BYTES + 6500), 0, disk)
    assert host.needs({}, 0) == Needs(host.RANK_BYTES, 0, host.WRITTEN_BYTES)


def test_this_host_is_well(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    assert host.directory(tmp_path).text == "ok"
    assert host.memory(1).value
    assert host.disk(tmp_path, 1).text.endswith("iB")
    assert host.write_speed(tmp_path / "probe").text.endswith(" MiB/s")
    assert not (tmp_path / "probe").exists()


def test_too_little_is_told_with_figure_and_limit(tmp_path: Path) -> None:
    with pytest.raises(NodeFault, match=r"[\d.]+ [GM]iB of memory are free, at least 1048576.0 GiB") as caught:
        host.memory(GIB << 20)
    assert caught.value.figure.value and caught.value.blames == ()
    with pytest.raises(NodeFault, match=r"are free for .*, which two checkpoints need, at least 1048576.0 GiB"):
        host.disk(tmp_path, GIB << 20)


def test_little_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(64 * MIB, 60 * MIB, 4 * MIB))
    with pytest.raises(NodeFault, match="4 MiB are free in /dev/shm, at least 64 MiB"):
        host.shared_memory()


def test_a_run_directory_that_is_not_shared(tmp_path: Path) -> None:
    with pytest.raises(NodeFault, match=r"/none/plan.json cannot be read: No such file or directory; all nodes must"):
        host.directory(tmp_path / "none")
    with pytest.raises(NodeFault, match="/none cannot be written: No such file or directory"):
        host.write_speed(tmp_path / "none" / "probe")


def test_a_full_disk() -> None:
    with pytest.raises(NodeFault, match="/dev cannot be written: No space left on device"):
        host.write_speed(Path("/dev/full"))


def test_a_slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "SLOWEST_BYTES", 1 << 50)
    with pytest.raises(NodeFault, match=r"MiB/s to .*, at least 1073741824 MiB/s"):
        host.write_speed(tmp_path / "probe")

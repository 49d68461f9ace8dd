"""What is said when a planned run is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_train.config.compose import compose
from slurm_train.launch import start
from slurm_train.launch.plan import make_plan


@pytest.mark.parametrize("rank", [0, 1])
def test_one_of_the_inline_ranks_tells_the_warnings(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    env = place | {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(start, "_go_inline", lambda plan, text: None)
    monkeypatch.setattr(start, "summary", lambda directory: "done")
    composed = compose(["+experiment=fmnist", "train.max_steps=5", "train.schedule.warmup=5"])
    assert start._go(make_plan(composed, env), composed) == "done"
    told = "note: train.schedule.warmup=5: the run has 5 steps, so its learning rate only ever rises\n"
    assert capsys.readouterr().err == ("" if rank else told)

"""What a run shows: the lines of the progress view and of the summary."""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any

import pytest

from slurm_train.report.progress import LINE_SECONDS, ProgressView, close_all
from slurm_train.report.rundir import RunDirectory
from slurm_train.report.summary import duration, summary

STARTED = {
    "event": "started",
    "world_size": 2,
    "device": "cpu",
    "threads": 1,
    "parameters": 407050,
    "train_samples": 54000,
    "epochs": 2,
    "steps_per_epoch": 844,
    "total_steps": 1688,
    "batch_size": 64,
    "step": 0,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def loss(step: int, epoch: int = 0, at: float = 0.0) -> dict[str, Any]:
    return {"step": step, "epoch": epoch, "loss": 0.5, "time": at}


def test_without_a_terminal_there_is_a_line_per_epoch_and_now_and_then_one_within() -> None:
    stream, clock = io.StringIO(), Clock()
    view = ProgressView(stream, clock)
    view.event(STARTED)
    view.metrics(loss(1, at=0.0))
    clock.now = LINE_SECONDS / 2
    view.metrics(loss(100, at=1.0))
    clock.now = LINE_SECONDS
    view.metrics(loss(200, at=2.0))
    view.metrics(loss(844, at=8.0))
    view.event({"event": "epoch", "epoch": 0, "val_loss": 0.25, "val_accuracy": 0.9, "samples_per_s": 6400.0})
    view.event({"event": "saved", "step": 844, "path": "x"})
    view.event({"event": "message", "text": "[bold]as it is[/bold]"})
    assert stream.getvalue().splitlines() == [
        "2 ranks on cpu with 1 thread each",
        "407,050 parameters   54,000 samples   2 x 844 steps of 64",
        "epoch 1/2   step 200/1,688   loss 0.5000   6,355 samples/s   15.0 s left",
        "epoch 1/2  loss 0.5000  val_loss 0.2500  val_accuracy 0.9000  6,400 samples/s",
        "[bold]as it is[/bold]",
    ]


def test_an_epoch_line_leaves_out_what_is_not_known() -> None:
    stream = io.StringIO()
    view = ProgressView(stream)
    view.event({"event": "started", "world_size": 1, "device": "cpu", "threads": 1})
    view.event({"event": "epoch", "epoch": 3, "val_loss": None})
    assert stream.getvalue().splitlines() == ["1 rank on cpu with 1 thread", "epoch 4"]


@pytest.mark.parametrize("epochs", [2, 1000])
def test_the_bar_fits_eighty_columns_and_goes_away(monkeypatch: pytest.MonkeyPatch, epochs: int) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    stream = Terminal()
    view = ProgressView(stream)
    view.event(STARTED | {"epochs": epochs, "total_steps": epochs * 844})
    for step in range(1, 5):
        view.metrics(loss(step * 100, at=float(step)))
    view.line("a word of the user's")
    drawn = stream.getvalue()
    assert "loss 0.5000" in drawn and "a word of the user's" in drawn and "left" in drawn
    shown_cursor, hidden_cursor = "\x1b[?25h", "\x1b[?25l"
    assert drawn.count(hidden_cursor) == 1 and shown_cursor not in drawn
    close_all()
    assert stream.getvalue().endswith(shown_cursor) or shown_cursor in stream.getvalue()[len(drawn) :]
    view.close()


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    ProgressView(stream).event(STARTED)
    assert "\x1b" not in stream.getvalue()


def test_going_on_from_a_checkpoint_counts_from_there() -> None:
    stream, clock = io.StringIO(), Clock()
    view = ProgressView(stream, clock)
    view.event({"event": "resumed", "step": 844, "checkpoint": "checkpoints/step_000844"})
    view.event(STARTED | {"step": 844})
    view.metrics(loss(944, 1, at=1.0))
    clock.now = LINE_SECONDS
    view.metrics(loss(1044, 1, at=2.0))
    lines = stream.getvalue().splitlines()
    assert lines[0] == "going on from step 844 (checkpoints/step_000844)"
    assert lines[-1] == "epoch 2/2   step 1,044/1,688   loss 0.5000   6,400 samples/s   6.4 s left"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.04, "0.0 s"), (59.94, "59.9 s"), (245, "4:05"), (7389, "2:03:09"), (360000, "100:00:00")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_summary_ends_with_the_run_directory_alone(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", "a: 1\n", "{}")
    run.append_event("done", test_accuracy=0.1, test_loss=9.0)
    run.append_event("started", world_size=2)
    scores = {"test_accuracy": 0.88119, "test_loss": 0.33, "peak_memory": [2**30, 3 * 2**29]}
    run.append_event("done", **scores, seconds=12.34, samples_per_s=71230.4, steps=4220)
    assert summary(run).splitlines() == [
        "test accuracy 0.8812   test loss 0.3300",
        "time 12.3 s   71,230 samples/s   4,220 steps   1.5 GiB of memory at the peak   2 ranks",
        "run directory:",
        str(tmp_path / "run"),
    ]


def test_the_summary_of_a_regression_has_no_accuracy(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", "a: 1\n", "{}")
    run.append_event("started", world_size=1, time=time.time())
    run.append_event("evaluated", test_loss=0.0101, steps=200)
    assert summary(run).splitlines()[:2] == ["test loss 0.0101", "200 steps"]

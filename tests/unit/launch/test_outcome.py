"""Why a local job failed: the first cause is told, whatever the other ranks said of its consequences."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from slurm_train.errors import ConfigError, Interrupted, RankFailed, Saved, SlurmTrainError
from slurm_train.launch.outcome import failure, rank_ends

HOST = socket.gethostname()
RESUME = "python -m slurm_train resume RUN"


def told(logs: Path, ends: list[tuple[int, bool, dict[str, Any] | None]]) -> SlurmTrainError | None:
    """The failure of ranks that ended with (exit code, by themselves, their own word)."""
    exits = []
    for rank, (code, own, word) in enumerate(ends):
        exits.append({"rank": rank, "exit_code": code, "own": own, "time": float(rank)})
        if word is not None:
            outcome = {"rank": rank, "host": HOST, "exit_code": code, "traceback": "", "kind": "ValueError", **word}
            (logs / f"7_{rank}.outcome.json").write_text(json.dumps(outcome))
    (logs / "7_exits.json").write_text(json.dumps(exits))
    return failure(rank_ends(logs, "7"), RESUME)


def word(text: str, time: float, **fields: Any) -> dict[str, Any]:
    return {"message": text, "time": time, **fields}


LOST = word("RuntimeError: connection closed", 2.0)

CASES = {
    "all done": ([(0, True, None)] * 2, None, ""),
    "a signal comes before its consequences": (
        [(1, True, LOST), (-9, True, None)],
        RankFailed,
        f"rank 1 on {HOST} was killed by SIGKILL; the host may be out of memory",
    ),
    "what we killed is no cause": ([(-9, False, None), (1, True, LOST)], RankFailed, f"rank 1 on {HOST}: RuntimeError"),
    "the oldest word": (
        [(1, True, LOST), (1, True, word("ValueError: bad", 1.0))],
        RankFailed,
        f"rank 1 on {HOST}: ValueError: bad (its log: ",
    ),
    "a silent end": (
        [(1, True, LOST), (3, True, None)],
        RankFailed,
        f"rank 1 on {HOST} ended with exit code 3 (its log",
    ),
    "a crash": ([(-11, True, None)], RankFailed, f"rank 0 on {HOST} was killed by SIGSEGV (its log"),
    "a real-time signal": ([(-40, True, None)], RankFailed, "was killed by signal 40"),
    "the user's fault, once": (
        [(2, True, word("a: b\nc: d", 1.0)), (2, True, word("a: b\nc: d", 1.1))],
        ConfigError,
        "a: b\nc: d",
    ),
    "exit code 2 without a word": ([(2, True, None)], RankFailed, "ended with exit code 2"),
    "saved": ([(75, True, word("saved at step 3", 1.0))], Saved, f"saved at step 3; go on with: {RESUME}"),
    "saved, then stopped by a signal while it ended": (
        [(-15, True, word("saved", 1.0, exit_code=75))],
        Saved,
        "saved; go on with",
    ),
    "interrupted": (
        [(130, True, word("KeyboardInterrupt", 1.0, kind="KeyboardInterrupt"))],
        Interrupted,
        "interrupted",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_first_cause_is_told(tmp_path: Path, name: str) -> None:
    ends, kind, text = CASES[name]
    error = told(tmp_path, ends)
    assert type(error) is (kind or type(None))
    assert str(error or "").startswith(text) or text in str(error)


def test_a_silent_end_is_explained_by_the_last_error_in_its_log(tmp_path: Path) -> None:
    (tmp_path / "7_0_log.err").write_text("Traceback\n  x\nModuleNotFoundError: No module named 'x'\nbye\n")
    error = told(tmp_path, [(1, True, None)])
    assert "exit code 1: ModuleNotFoundError: No module named 'x' (its log" in str(error)


def test_the_ranks_traceback_is_the_cause(tmp_path: Path) -> None:
    error = told(tmp_path, [(1, True, word("ValueError: x", 1.0, traceback="Traceback of rank 0"))])
    assert error is not None and "Traceback of rank 0" in str(error.__cause__)


def test_no_account_means_no_ends(tmp_path: Path) -> None:
    assert rank_ends(tmp_path, "7") == []

"""The run directory: where everything that a run writes lies."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from slurm_train.errors import RunDirectoryError
from slurm_train.report.fence import Fence
from slurm_train.report.trust import opener, require_trusted

KEY = "run.dir"
_ANOTHER = "choose another one, or go on with it by the verb resume"


class RunDirectory:
    """The files of one run, by name; the same directory after every restart.

    Args:
        path: the directory; made absolute.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(path))
        self._made: list[Path] = []
        self.fence: Fence | None = None
        """The claim of the attempt that trains, on its rank 0; checked before anything is written for it."""

    @property
    def config(self) -> Path:
        """config.yaml, the whole resolved configuration."""
        return self.path / "config.yaml"

    @property
    def plan(self) -> Path:
        """plan.json, the launch plan."""
        return self.path / "plan.json"

    @property
    def submission(self) -> Path:
        """submission.sh, the script of the newest Slurm job."""
        return self.path / "submission.sh"

    @property
    def event_file(self) -> Path:
        """events.jsonl, a line for each thing that happened."""
        return self.path / "events.jsonl"

    @property
    def metrics(self) -> Path:
        """metrics.jsonl, a line for each step and each evaluation."""
        return self.path / "metrics.jsonl"

    @property
    def logs(self) -> Path:
        """logs/, what the ranks printed."""
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        """checkpoints/, the saved states."""
        return self.path / "checkpoints"

    @property
    def preflight(self) -> Path:
        """preflight/, what was found of the nodes before the ranks started."""
        return self.path / "preflight"

    @classmethod
    def create(
        cls, path: str | os.PathLike[str], config_yaml: str, plan_json: str, submission: str = ""
    ) -> RunDirectory:
        """Make the directory, readable by its owner alone, and write what the run is made from.

        Parents are made too. An empty directory that is there already is taken. On failure nothing is left behind.

        Args:
            path: where.
            config_yaml: text of config.yaml.
            plan_json: text of plan.json.
            submission: text of submission.sh; "" writes none.

        Raises:
            RunDirectoryError: it is in use already, or cannot be written.
        """
        run = cls(path)
        if problem := cls.problem(run.path):
            raise RunDirectoryError(problem, KEY, _ANOTHER if run.config.exists() else "choose another one")
        made: list[Path] = []
        try:
            _make(run.path, made)
            # "x" fails when another run has come first
            texts = {run.config: config_yaml, run.plan: plan_json, run.submission: submission}
            for file in [file for file, text in texts.items() if text]:
                with open(file, "x", encoding="utf-8", opener=opener) as stream:
                    made.append(file)
                    stream.write(texts[file])
            for folder in (run.logs, run.checkpoints):
                _make(folder, made)
        except FileExistsError:
            _unmake(made)
            raise RunDirectoryError(f"{run.path} is used already", KEY, _ANOTHER) from None
        except OSError as error:
            _unmake(made)
            reason = f"{run.path} cannot be written: {error.strerror}"
            raise RunDirectoryError(reason, KEY, "choose another one") from None
        run._made = made
        return run

    def discard(self) -> None:
        """Take away again what `create` has made, for a run that was never started."""
        for folder in (self.logs, self.checkpoints):
            self._made += folder.iterdir() if folder in self._made else []
        _unmake(self._made)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RunDirectory:
        """A run directory that is there.

        Raises:
            RunDirectoryError: the path is none.
        """
        run = cls(path)
        if not run.config.is_file() or not run.plan.is_file():
            raise RunDirectoryError(f"{path} is not a run directory", remedy="it has no config.yaml and plan.json")
        return run

    @staticmethod
    def problem(path: Path) -> str:
        """Why `create` would refuse this path, found without making anything; "" if nothing is known against it."""
        try:
            if path.is_dir():
                if any(path.iterdir()):
                    return f"{path} is used already"
                return _distrust(path) if os.access(path, os.W_OK | os.X_OK) else f"{path} is not writable"
            if os.path.lexists(path):
                return f"{path} is not a directory"
            parent = next(parent for parent in path.parents if os.path.lexists(parent))
        except OSError as error:
            return f"{path} cannot be used: {error.strerror}"
        if not parent.is_dir():
            return f"{path} cannot be made: {parent} is not a directory"
        if not os.access(parent, os.W_OK | os.X_OK):
            return f"{path} cannot be made: {parent} is not writable"
        return _distrust(path)

    def replace(self, config_yaml: str, plan_json: str, submission: str = "") -> None:
        """Write what the run goes on with; the previous config.yaml is kept beside it as config.<n>.yaml.

        Raises:
            RunDirectoryError: the directory cannot be written.
        """
        try:
            before = self.config.read_text(encoding="utf-8")
            if before != config_yaml:
                numbers = (number for number in range(1, 1_000_000) if not self._previous(number).exists())
                _write_whole(self._previous(next(numbers)), before)
                _write_whole(self.config, config_yaml)
            _write_whole(self.plan, plan_json)
            if submission:
                _write_whole(self.submission, submission)
        except OSError as error:
            raise RunDirectoryError(f"{self.path} cannot be written: {error.strerror}") from None

    def _previous(self, number: int) -> Path:
        return self.path / f"config.{number}.yaml"

    def append_event(self, event: str, **fields: Any) -> dict[str, Any]:
        """Write one event with the time, and return it.

        Args:
            event: its name: submitted, preflight, started, resumed, epoch, saved, stopped, done, evaluated, failed,
                cancelled or message.
            fields: what belongs to it; JSON values.

        Raises:
            Superseded: a newer attempt has claimed the run; so does `append_metrics`.
        """
        self._check()
        record = {"event": event, "time": time.time(), **fields}
        _append(self.event_file, [record])
        return record

    def append_metrics(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Write lines of metrics.jsonl, in order."""
        self._check()
        _append(self.metrics, records)

    def forget_after(self, step: int, evaluated: bool) -> None:
        """Cut from metrics.jsonl what is newer than the checkpoint from which training goes on: it will be done again.

        A line that a crash has torn goes too.

        Args:
            step: of the checkpoint; 0 for none.
            evaluated: whether the validation of that step is part of what the checkpoint remembers.
        """
        try:
            text = self.metrics.read_bytes()
        except FileNotFoundError:
            return
        lines = text.splitlines(keepends=True)
        kept = b"".join(line for line in lines if line.endswith(b"\n") and _remembered(line, step, evaluated))
        if kept != text:
            _write_whole(self.metrics, kept.decode("utf-8", errors="replace"))

    def _check(self) -> None:
        if self.fence is not None:
            self.fence.check()

    def events(self) -> list[dict[str, Any]]:
        """All events, oldest first. A line cut off by a crash is left out."""
        try:
            lines = self.event_file.read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return []
        records = map(parsed, lines)
        return [record for record in records if "event" in record]


def _distrust(path: Path) -> str:
    """Why a run directory cannot be trusted; "" if it can."""
    try:
        require_trusted(path)
    except RunDirectoryError as error:
        return error.faults[0].message
    return ""


def _remembered(line: bytes, step: int, evaluated: bool) -> bool:
    record = parsed(line.decode("utf-8", errors="replace"))
    at = record.get("step")
    if not isinstance(at, int) or at != step:
        return isinstance(at, int) and at < step
    return "loss" in record or (evaluated and "test_loss" not in record)


def parsed(line: str) -> dict[str, Any]:
    """The JSON object in a line; an empty one if the line is none."""
    try:
        record = json.loads(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def _append(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    # One write of whole lines: a reader that follows the file sees all of a line or none of it.
    text = "".join(json.dumps(record) + "\n" for record in records).encode()
    try:
        with open(path, "ab+", opener=opener) as stream:
            if stream.tell() and stream.seek(-1, os.SEEK_END) and stream.read(1) != b"\n":
                text = b"\n" + text  # a crash has torn the last line: the next one is not to become part of it
            stream.write(text)
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be written: {error.strerror}") from None


def _write_whole(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}.tmp")
    with open(beside, "w", encoding="utf-8", opener=opener) as stream:
        stream.write(text)
    beside.replace(path)


def _make(path: Path, made: list[Path]) -> None:
    """Make a directory and its parents, noting in `made` those that were not there."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        try:
            folder.mkdir(mode=0o700 if folder == path else 0o775)  # never open to everybody, whatever the umask
        except FileExistsError:  # another run of the same experiment made the parent meanwhile
            if folder == path:
                raise
            continue
        made.append(folder)


def _unmake(made: list[Path]) -> None:
    """Take away what was made; a parent in which another run has put something stays."""
    for path in reversed(made):
        try:
            path.rmdir() if path.is_dir() else path.unlink()
        except OSError:
            continue

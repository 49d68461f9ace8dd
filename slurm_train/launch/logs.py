"""What the verb `logs` does: prints what the ranks of a run print, once or until the run has ended."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace

from slurm_train.errors import EXIT_INTERRUPTED, EXIT_OK, UserError
from slurm_train.launch import queue
from slurm_train.launch.logfiles import Logs, missing
from slurm_train.launch.runs import find_run
from slurm_train.launch.state import State, attempt_state
from slurm_train.report.position import Attempt, Position, position
from slurm_train.report.rundir import RunDirectory

LOOK_SECONDS = 0.2
"""Seconds between two looks into the files; longer where there are more than a few hundred."""

EVENT_SECONDS = 1.0
"""Seconds between two looks at the run's events."""

SLURM_SECONDS = 5.0
"""The least time between two questions to Slurm."""


def show(name: str, *, follow: bool, rank: int | None, count: int | None, job: str | None) -> int:
    """Print what a run prints.

    Args:
        name: what the user typed for RUN.
        follow: go on until it has ended.
        rank: of this rank only.
        count: the last lines of each file; None for all.
        job: of this job of the run; the newest by default.

    Returns:
        the exit code: 0; when following, that of the run, or 130 after Ctrl-C, which leaves the run alone.

    Raises:
        UserError: there is no such run, job or rank.
    """
    place = position(find_run(name))
    attempt = chosen(place, job)
    if not follow:
        for line in printed(place, attempt, rank, count):
            print(line)
        return EXIT_OK
    try:
        for item in following(place.run, attempt, rank, count):
            if isinstance(item, State):
                print(ending(item), flush=True)
                return item.exit_code
            print(item, flush=True)
    except KeyboardInterrupt:
        pass
    return EXIT_INTERRUPTED


def chosen(place: Position, job: str | None) -> Attempt:
    """The newest start of a run, or that of a job.

    Raises:
        UserError: the run has no such job, or was never started.
    """
    attempts = [attempt for attempt in place.attempts if not job or attempt.job == job]
    if not attempts:
        known = f"its jobs are {', '.join(place.jobs)}" if place.jobs else "it has no jobs"
        raise UserError(
            f"{place.run.path} has no such job" if job else f"{place.run.path} was never started",
            f"--job {job}" if job else "",
            known if job else "",
        )
    return attempts[-1]


def printed(place: Position, attempt: Attempt, rank: int | None, count: int | None) -> Iterator[str]:
    """All lines that there are, file by file.

    Args:
        place: the run.
        attempt: which start of it.
        rank: of this rank only.
        count: the last lines of each file; None for all.

    Raises:
        UserError: there is no file.
    """
    files = Logs(place, attempt, rank).files()
    if not files:
        raise UserError(missing(place, attempt, rank), remedy="" if attempt.ended else "--follow waits for it")
    for log in files:
        if count is not None:
            log.skip_to_last(count)
        yield from log.lines(last=True)


def following(run: RunDirectory, attempt: Attempt, rank: int | None, count: int | None) -> Iterator[str | State]:
    """Lines as they come, until the run ends; over a requeue and a resume. The last item is how it ended.

    Args:
        run: the run.
        attempt: the start of it to begin with.
        rank: of this rank only.
        count: begin with the last lines of each file; None for all.

    Raises:
        UserError: what its ranks print is in no file that is known.
    """
    watch = _Watch(run, attempt)
    logs = Logs(watch.place, watch.attempt, rank)
    if watch.attempt.launcher == "inline" and not logs.files():
        raise UserError(missing(watch.place, watch.attempt, rank))
    if count is not None:
        for log in logs.files():
            log.skip_to_last(count)
    while True:
        found = watch.look()  # before the files are read: what was printed before the end is then in them
        files = logs.files()
        yield from _merged(log.lines(last=not found.going) for log in files)
        yield from watch.words()
        if not found.going:
            if not watch.go_on():
                yield found
                return
            yield from watch.words()  # that it goes on stands before what the next job prints
            logs = Logs(watch.place, watch.attempt, rank)
        time.sleep(max(LOOK_SECONDS, len(files) / 1000))


def _merged(sources: Iterable[Iterator[str]]) -> Iterator[str]:
    """The lines of all files, by turns, so that those of one moment stand together."""
    waiting = deque(sources)
    while waiting:
        source = waiting.popleft()
        line = next(source, None)
        if line is not None:
            yield line
            waiting.append(source)


class _Watch:
    """Looks after one start of a run: its events every second, Slurm every few."""

    def __init__(self, run: RunDirectory, attempt: Attempt) -> None:
        self.place = position(run)
        same = [one.time == attempt.time and one.job == attempt.job for one in self.place.attempts]
        self._number = same.index(True) if True in same else len(same) - 1
        self._read = self._asked = float("-inf")
        self._jobs: dict[str, queue.Job] = {}
        self._silent = self._in_doubt = False
        self._told = ""
        self._words: list[str] = []

    @property
    def attempt(self) -> Attempt:
        """The start that is looked after."""
        return self.place.attempts[self._number]

    def look(self) -> State:
        """How it stands. While Slurm does not answer, a run that has not said how it ended goes on."""
        now = time.monotonic()
        if now - self._read >= EVENT_SECONDS:
            self._read, self.place = now, position(self.place.run)
        job = self.attempt.job
        if job and now - self._asked >= SLURM_SECONDS:
            self._asked = now
            self._ask(job)
        found = attempt_state(self.place, self.attempt, self._jobs)
        goes_on = self._in_doubt or (self._silent and not self.attempt.ended)
        return replace(found, going=True) if goes_on else found

    def _ask(self, job: str) -> None:
        before = self._jobs.get(job)
        try:
            self._jobs = queue.jobs([job])
        except UserError as error:
            self._silent = True
            self._say(f"waiting: {error}")
            return
        self._silent = False
        now = self._jobs.get(job)
        # A job that lost its node or its place may be on its way back into the queue: look twice.
        self._in_doubt = now is not None and now.state in ("NODE_FAIL", "PREEMPTED") and before != now
        if now and now.state == "PENDING":
            self._say(f"waiting: PENDING ({now.reason})" if now.reason else "waiting: PENDING")
        else:
            self._told = ""

    def _say(self, line: str) -> None:
        if line != self._told:
            self._told = line
            self._words.append(line)

    def words(self) -> Iterator[str]:
        """What is new about the job itself, a line each."""
        while self._words:
            yield self._words.pop(0)

    def go_on(self) -> bool:
        """Go over to the next start of the run; False if there is none."""
        self.place = position(self.place.run)
        if self._number + 1 >= len(self.place.attempts):
            return False
        self._number += 1
        self._asked = float("-inf")
        self._words.append(f"the run goes on{f' in job {self.attempt.job}' if self.attempt.job else ''}")
        return True


def ending(found: State) -> str:
    """The last line of `logs --follow`."""
    job = found.attempt.job if found.attempt else ""
    return f"job {job} {found.text}" if job else f"run {found.text}"

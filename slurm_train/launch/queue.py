"""What Slurm says of jobs. The only place that asks; two calls answer for any number of jobs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote, unquote

from slurm_train.errors import UserError

CALL_SECONDS = 60.0
"""How long one of Slurm's commands may take; they try for some ten seconds themselves to reach the controller."""

COMMENT = "slurm_train:"
"""What a job's comment begins with; the quoted run directory follows."""

ENDED = {
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "REVOKED",
    "TIMEOUT",
}
"""States in which a job stays. In all others it runs, or may start again (manual of squeue, JOB STATE CODES)."""

_ID = re.compile(r"\d+([_+]\d+)?")
_ELEMENTS = re.compile(r"(\d+)_\[([\d,:-]+)(?:%\d+)?\]")
# No field but the last two can hold a delimiter: the reason, which Slurm words, and the comment, which is anyone's.
_SQUEUE_FIELDS = "%i|%T|%N|%L|%r|%k"
_SACCT_FIELDS = "JobID,State,ExitCode,NodeList,Comment"


@dataclass(frozen=True)
class Job:
    """A job, as Slurm knows it."""

    id: str
    """123; 120_4 for a task of an array. The components of a heterogeneous job count as one, by its leader's id."""

    state: str
    """In Slurm's long form, such as PENDING or OUT_OF_MEMORY."""

    reason: str = ""
    """Why it is pending, or why it ended; "" for none."""

    nodes: str = ""
    """Its node list; "" before it has one."""

    left: str = ""
    """What is left of its time limit, as squeue prints it, such as 1:59:30 or UNLIMITED; "" when it has ended."""

    exit_code: str = ""
    """Exit code and signal, such as 1:0; "" where it is not known."""

    run_dir: Path | None = None
    """The run directory that its comment names."""


def active(job: Job) -> bool:
    """Whether a job runs, or may still start or start again."""
    return job.state not in ENDED


def mine() -> list[Job]:
    """This user's jobs: those in the queue, and those that ended a few minutes ago. One call of squeue.

    Raises:
        UserError: Slurm is absent or does not answer; so do the others here.
    """
    return list(_squeue("--me"))


def jobs(ids: Iterable[str]) -> dict[str, Job]:
    """Job id -> job, for those that Slurm still knows. One call of squeue, and one of sacct for those that ended.

    Args:
        ids: job ids, such as 123 or 120_4.
    """
    wanted = list(dict.fromkeys(ids))
    if not wanted:
        return {}
    queued = {job.id: job for job in _squeue("--jobs", ",".join(wanted))}
    return completed({name: queued[name] for name in wanted if name in queued}, wanted)


def completed(known: dict[str, Job], ids: Iterable[str]) -> dict[str, Job]:
    """What squeue said, with what the accounting adds on jobs that ended. At most one call, of sacct.

    Where there is no sacct, `scontrol show job` tells of those that ended a few minutes ago. It is asked of a single
    one that has just ended, too: the accounting hears of an end some seconds late.

    Args:
        known: job id -> job, from squeue.
        ids: the jobs that are asked for.
    """
    clear = {name for name, job in known.items() if active(job) or job.state == "COMPLETED"}
    asked = [name for name in dict.fromkeys(ids) if name not in clear]
    found = dict(known)
    told = _shown(asked) if len(asked) == 1 and asked[0] in known else _past(asked) if asked else ()
    for job in told:
        if job.id in asked and not active(job):  # else the accounting is late, or never heard of the end
            before = known.get(job.id)
            found[job.id] = replace(before, exit_code=job.exit_code) if before else job
    return found


@dataclass(frozen=True)
class Standing:
    """How the controller has a job that has not ended."""

    state: str
    """As `scontrol show job` has it: a job that is being preempted is RUNNING, one that was cancelled COMPLETING."""

    preempted: bool = False
    """Whether it is being preempted: it has a PreemptTime."""

    requeue: bool = True
    """Whether it may be requeued (sbatch --requeue, and JobRequeue of slurm.conf)."""


def standing(name: str) -> Standing:
    """How a job stands.

    Raises:
        UserError: Slurm is absent, does not answer or does not know the job; so does `requeue`.
    """
    text = _call("scontrol", "show", "job", name)
    state = re.search(r"\bJobState=(\w+)", text)
    return Standing(
        state=state[1] if state else "",
        preempted=re.search(r"\bPreemptTime=\d", text) is not None,
        requeue=re.search(r"\bRequeue=0\b", text) is None,
    )


def requeue(name: str) -> None:
    """Put a job back into the queue: it is ended, and starts again with the same id.

    Raises:
        UserError: Slurm refuses, in its own words.
    """
    _call("scontrol", "requeue", name)


def excluded(name: str) -> str:
    """The list of nodes that a job is not to run on; "" for none.

    Raises:
        UserError: Slurm is absent, does not answer or does not know the job; so do the next two.
    """
    return _call("squeue", "--noheader", f"--jobs={name}", "--format=%x").strip().removeprefix("(null)")


def exclude(name: str, nodes: str) -> None:
    """Set the list of nodes that a job is not to run on. It must be pending (manual of scontrol, ExcNodeList)."""
    _call("scontrol", "update", f"JobId={name}", f"ExcNodeList={nodes}")


def check_startable(script: str, nodes: str) -> None:
    """Ask Slurm whether a job of this script could ever start without some nodes; it raises a refusal.

    Args:
        script: path of an sbatch script.
        nodes: list of the nodes.
    """
    _call("sbatch", "--test-only", f"--exclude={nodes}", script)


def cancel(ids: Iterable[str]) -> None:
    """Cancel jobs, all in one call.

    Raises:
        UserError: Slurm refuses, in its own words.
    """
    _call("scancel", *ids)


def _squeue(*options: str) -> Iterator[Job]:
    """The jobs that the controller remembers: those that have just ended too."""
    words = ["squeue", "--noheader", "--array", "--states=all", f"--format={_SQUEUE_FIELDS}", *options]
    try:
        text = _call(*words)
    except UserError as error:
        if "Invalid job id" not in str(error):  # said only if it knows none of them
            raise
        text = ""
    for line in text.splitlines():
        fields = line.split("|", 5)
        if len(fields) == 6:
            number, state, nodes, left, reason, comment = fields
            ended = state in ENDED
            for name in job_ids(number):
                yield Job(name, state, _word(reason), nodes, "" if ended else left, "", run_directory(comment))


def _past(ids: list[str]) -> Iterator[Job]:
    """Jobs that ended: from the accounting, or where that has no command from what the controller remembers."""
    words = ["--allocations", "--parsable2", "--noheader", f"--format={_SACCT_FIELDS}", f"--jobs={','.join(ids)}"]
    if shutil.which("sacct") is None:
        yield from _shown(ids)
        return
    try:
        text = _call("sacct", *words)
    except UserError:  # no accounting: squeue has told what the controller still knows
        return
    for line in text.splitlines():
        fields = line.split("|", 4)
        if len(fields) == 5:
            number, state, code, nodes, comment = fields
            nodes = "" if nodes == "None assigned" else nodes
            for name in job_ids(number):
                # "CANCELLED by 1000"
                yield Job(name, state.split()[0] if state else "", "", nodes, "", code, run_directory(comment))


def _shown(ids: list[str]) -> Iterator[Job]:
    """The same from `scontrol show job`."""
    try:
        text = _call("scontrol", "show", "job", *(ids if len(ids) == 1 else ()))
    except UserError:
        return
    for block in re.split(r"^(?=JobId=)", text, flags=re.MULTILINE):
        head = block.partition(" JobName=")[0]
        ends = re.search(r"^\s+JobState=(\w+) Reason=(.*?) Dependency=", block, re.MULTILINE)
        code = re.search(r"^\s+Requeue=.* ExitCode=(\d+:\d+)$", block, re.MULTILINE)
        nodes = re.search(r"^\s+NodeList=(\S+)$", block, re.MULTILINE)
        comment = re.search(r"^\s+Comment=(.*)$", block, re.MULTILINE)
        number = re.match(r"JobId=(\d+)", head)
        array = re.search(r" ArrayJobId=(\d+) ArrayTaskId=(\d+)", head)
        if not (ends and number) or re.search(r" HetJobOffset=[1-9]", head):
            continue
        name = f"{array[1]}_{array[2]}" if array else number[1]
        place = run_directory(comment[1]) if comment else None
        yield Job(name, ends[1], _word(ends[2]), nodes[1] if nodes else "", "", code[1] if code else "", place)


def job_ids(text: str) -> list[str]:
    """The jobs that Slurm means by an id; none if it is no id.

    A group of array tasks is each of them; of a heterogeneous job the first component speaks for all.

    >>> job_ids("120_[5-9:2%2]")
    ['120_5', '120_7', '120_9']
    >>> job_ids("12+0"), job_ids("12+1")
    (['12'], [])
    """
    if group := _ELEMENTS.fullmatch(text):
        return [f"{group[1]}_{number}" for part in group[2].split(",") for number in _span(part)]
    if not _ID.fullmatch(text):
        return []
    leader, plus, offset = text.partition("+")
    return [leader] if not plus or offset == "0" else []


def is_job_id(text: str) -> bool:
    """Whether a word can be the id of one job: 123, 120_4, 12+0."""
    return _ID.fullmatch(text) is not None


def comment(run_dir: str) -> str:
    """The comment of a job that says where its run lies, in one line and ASCII."""
    return COMMENT + quote(run_dir)


def run_directory(comment: str) -> Path | None:
    """The run directory that a job's comment names; None for a comment of another kind."""
    comment = comment.strip()
    return Path(unquote(comment.removeprefix(COMMENT))) if comment.startswith(COMMENT) else None


def _span(part: str) -> range:
    """The numbers of `4`, `5-9` or `0-8:2`."""
    span, _, step = part.partition(":")
    first, _, last = span.partition("-")
    return range(int(first), int(last or first) + 1, int(step or 1))


def _word(reason: str) -> str:
    return "" if reason in ("None", "(null)") else reason


def _call(*words: str) -> str:
    """The output of one of Slurm's commands.

    The user's own defaults for its output and its filters (SQUEUE_*, SACCT_*) do not count.
    """
    own = ("SQUEUE_", "SACCT_", "SCANCEL_")
    # Else long lists of array tasks are cut (manual of squeue).
    environment = {key: value for key, value in os.environ.items() if not key.startswith(own)} | {
        "SLURM_BITSTR_LEN": "0"
    }
    name = words[0]
    try:
        done = subprocess.run(
            words,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=CALL_SECONDS,
        )
    except FileNotFoundError:
        raise UserError(f"no {name} on PATH", remedy="run this where Slurm's commands are") from None
    except OSError as error:
        raise UserError(f"{name} cannot be run: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"{name} did not answer within {CALL_SECONDS:.0f} s", remedy="try again later") from None
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        # a retry is told first, the reason last
        raise UserError(lines[-1] if lines else f"{name} ended with exit code {done.returncode}")
    return done.stdout

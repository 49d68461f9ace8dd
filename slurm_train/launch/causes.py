"""Why a job waits, and why it failed, each in one line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from slurm_train.errors import EXIT_SAVED
from slurm_train.launch.queue import Job
from slurm_train.report.position import Position

# Reasons of a pending job that do not pass by themselves (manual of squeue, JOB REASON CODES): the option whose key is
# named, and what it means.
_REASONS = (
    ("PartitionTimeLimit", "time", "more than the partition allows; lower it, or choose another partition"),
    ("PartitionNodeLimit", "nodes", "more, or fewer, than the partition allows in one job"),
    ("PartitionConfig", "partition", "it cannot take this job; sinfo tells its size and limits"),
    ("PartitionDown|PartitionInactive", "partition", "it starts no jobs now; sinfo tells which ones do"),
    ("BadConstraints", "constraint", "no node is like this; sinfo -o '%P %f %G %c %m' tells how they are"),
    ("ReqNodeNotAvail", "time", "nodes are down, or kept for a reservation or maintenance before the job could end"),
    ("InvalidAccount|AccountNotAllowed", "account", "it cannot be charged; sacctmgr show associations tells yours"),
    ("InvalidQOS|QOSNotAllowed", "qos", "it is not for this account or partition"),
    ("ReservationDeleted|InvalidReservation", "reservation", "it is gone; scontrol show reservation tells those there"),
    (r"(Assoc|QOS)\w*Wall\w*", "time", "more than your account or QOS allows"),
    (r"(Assoc|QOS)\w*Node\w*", "nodes", "more than your account or QOS allows at once"),
    (r"(Assoc|QOS)\w*C[pP][uU]\w*", "cpus-per-task", "more CPUs than your account or QOS allows at once"),
    (r"(Assoc|QOS)\w*Mem\w*", "mem", "more memory than your account or QOS allows at once"),
    (r"(Assoc|QOS)\w*G[rR][eE][sS]\w*", "gpus-per-node", "more than your account or QOS allows at once"),
    (r"(Assoc|QOS)\w*Job\w*", "account", "it allows no more jobs at once; this one starts when others end"),
    (r"(Assoc|QOS)\w+", "account", "a limit of your account or QOS is reached"),
    ("DependencyNeverSatisfied", "dependency", "the job that it waits for has failed; cancel this one"),
    ("JobHeld|launch failed", "", "it is held; scontrol release {job} lets it go on"),
)

_STATES = {
    "TIMEOUT": "it ran into its time limit",
    "DEADLINE": "it ran into its deadline",
    "OUT_OF_MEMORY": "it needed more memory than it had asked for",
    "NODE_FAIL": "a node failed",
    "BOOT_FAIL": "a node did not start",
    "PREEMPTED": "it was preempted by a job of higher priority",
    "CANCELLED": "it was cancelled",
    "REVOKED": "another cluster took it",
}

_RANK_LINE = re.compile(r"srun: error: (\S+): tasks? ([\d,-]+): (.+)")
_EXECVE = re.compile(r".*execve\(\): .*: No such file or directory")
_ERROR_LINE = re.compile(r"(srun: error: |slurmstepd: error: |[\w.]+(Error|Exception|Exit)\b)")
LAST_BYTES = 1 << 16
"""How much of a log is searched, from its end."""


def waiting(position: Position, job: Job) -> str:
    """What keeps a pending job from starting, with the key to change; "" if waiting is all it takes.

    Args:
        position: the run, whose plan knows which keys were set.
        job: its job.
    """
    for pattern, option, meaning in _REASONS:
        if re.match(rf"(?:{pattern})\b|(?:{pattern})[A-Z_]", job.reason):
            return f"{_key(position, option)}: {meaning}" if option else meaning.format(job=job.id)
    return ""


def failure(position: Position, job: Job) -> str:
    """The first cause of a job's failure in one line; "" for one that has not failed.

    Slurm's word counts first, then what ended a rank without a word of its own, then the oldest word of a rank, then
    the logs.
    """
    if job.state == "COMPLETED":
        return ""
    logs = position.run.logs
    words = outcomes(logs, job.id)
    batch = _end(logs / f"{job.id}_batch.log")
    saved = next((word for word in words if word.get("exit_code") == EXIT_SAVED), None)
    if job.state in _STATES:
        what = _STATES[job.state]
        if job.state == "OUT_OF_MEMORY":
            what += f"; raise {_key(position, 'mem')}"
        return f"{what}; {' '.join(str(saved['message']).split())}" if saved else what
    # A requeued job appends to its log: what stands there first may be of an earlier start.
    restarted = any(attempt.job == job.id and len(attempt.starts) > 1 for attempt in position.attempts)
    return (
        _preflight(position, job.id)
        or ("" if restarted and words else _killed(position, batch, words))
        or _worded(words)
        or next((line for line in batch if _EXECVE.match(line)), "")
        or _unopened(position, job, batch)
        or _last_error(logs, job.id, batch)
        or _coded(job)
    )


def _preflight(position: Position, job: str) -> str:
    """What is wrong with its nodes, if no rank has started since that was found."""
    told = [event for event in position.run.events() if event["event"] in ("preflight", "started")]
    own = [event for event in told if str(event.get("job")) == job]
    return str(own[-1].get("fault", "")) if own else ""


def outcomes(logs: Path, job: str) -> list[dict[str, Any]]:
    """What the ranks that failed have left, the oldest first."""
    found = []
    for path in logs.glob(f"{job}_*.outcome.json"):
        try:
            word = json.loads(path.read_text(encoding="utf-8"))
            found.append((float(word["time"]), int(word["rank"]), word))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return [word for _, _, word in sorted(found, key=lambda item: item[:2])]


def _killed(position: Position, batch: list[str], words: list[dict[str, Any]]) -> str:
    """The end of the first rank that ended, if that was without a word."""
    spoke = {word["rank"] for word in words}
    first = next((match for line in batch if (match := _RANK_LINE.match(line))), None)
    if first is None or first[3].startswith("Exited with exit code"):
        return ""
    ranks = {number for part in first[2].split(",") for number in _span(part)}
    advice = {"Killed": "; the node may be out of memory", "Out Of Memory": f"; raise {_key(position, 'mem')}"}
    name = f"rank{'s' * (len(ranks) > 1)} {first[2]} on {first[1]}"
    return "" if ranks & spoke else f"{name}: {first[3]}{advice.get(first[3], '')}"


def _worded(words: list[dict[str, Any]]) -> str:
    """The word of the first rank that failed; one that saved and left comes after one that failed."""
    if not words:
        return ""
    first = min(words, key=lambda word: (word.get("exit_code") == EXIT_SAVED, word["time"]))
    return f"rank {first['rank']} on {first.get('host', '?')}: {' '.join(str(first.get('message', '')).split())}"


def _unopened(position: Position, job: Job, batch: list[str]) -> str:
    launched = job.exit_code == "0:53" or job.reason == "JobLaunchFailure"
    if not launched or batch:
        return ""
    return f"the nodes could not open the log files: do they share {position.run.path}?"


def _last_error(logs: Path, job: str, batch: list[str]) -> str:
    """The last line of the ranks' error logs, or of the batch shell's, that is an error's."""
    for path in sorted(logs.glob(f"{job}_*_log.err"), key=lambda path: _rank(path.name))[:100]:
        lines = _end(path)
        execve = next((line for line in lines if _EXECVE.match(line)), "")
        if line := execve or next((line for line in reversed(lines) if _ERROR_LINE.match(line)), ""):
            return f"rank {_rank(path.name)}: {line}"
    return next((line for line in reversed(batch) if _ERROR_LINE.match(line)), batch[-1] if batch else "")


def _key(position: Position, option: str) -> str:
    """The configuration key that sets an option of sbatch, with its value where the plan knows it."""
    keys = position.plan.get("sbatch_keys")
    known: str = keys.get(option, "") if isinstance(keys, dict) else ""
    return known or ("launcher.sbatch" if option == "dependency" else f"launcher.{option.replace('-', '_')}")


def _coded(job: Job) -> str:
    code, _, number = job.exit_code.partition(":")
    if number not in ("", "0"):
        return f"it was ended by signal {number}"
    return f"it ended with exit code {code}" if code not in ("", "0") else ""


def _rank(name: str) -> int:
    found = re.search(r"_(\d+)_log\.err$", name)
    return int(found[1]) if found else -1


def _span(part: str) -> range:
    first, _, last = part.partition("-")
    return range(int(first), int(last or first) + 1)


def _end(path: Path) -> list[str]:
    """The last lines of a log; none if it is not there."""
    try:
        with path.open("rb") as file:
            file.seek(max(file.seek(0, 2) - LAST_BYTES, 0))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    return [line for line in map(str.strip, text.splitlines()) if line]

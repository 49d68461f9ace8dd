"""Before the ranks of a job start: every node is tried, and those that are at fault are named. Run by the batch shell.

    python -m slurm_train.launch.preflight RUN [--gpus=N] || exec python -m slurm_train.launch.exclude RUN "$0"

A step of one task a node (slurm_train.train.preflight) tells what it finds on its standard output, so that a node whose
directory is bad can say so. Exit code 0: the ranks may start.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import IO

from slurm_train.errors import EXIT_FAILURE, EXIT_OK, SlurmTrainError
from slurm_train.launch import queue
from slurm_train.launch.script import STEP
from slurm_train.report.preflight import DONE, MARK, Finding, Report, finding
from slurm_train.report.rundir import RunDirectory
from slurm_train.report.table import aligned
from slurm_train.report.trust import private
from slurm_train.topology.hostlist import expand
from slurm_train.topology.jobs import job_id, restart_count

STEP_MODULE = "slurm_train.train.preflight"

SECONDS = 120.0
"""How long all of it may take; a node that has not answered then is at fault."""

GRACE_SECONDS = 10.0
"""How long the others may take after the first fault: they would wait for that node."""

_RANKS = ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_NTASKS_PER_GPU", "SLURM_GPU_BIND", "SLURM_HOSTFILE",
          "SLURM_DISTRIBUTION", "SLURM_NTASKS_PER_NODE")  # fmt: skip
"""What srun would read of the ranks' own shape (manual of srun, "Input environment variables")."""

_ENDED = re.compile(r"srun: error: (\S+): tasks? [\d,-]+: (.+)")
_UNLAUNCHED = re.compile(r"srun: error: Task launch for .* failed on node (\S+): (.+)")


@dataclass
class Answers:
    """What the nodes have said."""

    findings: list[Finding] = field(default_factory=list)
    """Oldest first."""

    ends: dict[str, str] = field(default_factory=dict)
    """Node -> how its task ended, in srun's words, where that was not well."""

    errors: list[str] = field(default_factory=list)
    """What srun, or a task, has said on standard error."""


@dataclass(frozen=True)
class Verdict:
    """Which nodes are at fault."""

    reasons: Mapping[str, str]
    """Node -> what is wrong with it."""

    fault: str
    """All of that in one line; "" if all is well."""

    @property
    def failing(self) -> tuple[str, ...]:
        """The nodes at fault."""
        return tuple(self.reasons)


def verdict(nodes: Sequence[str], answers: Answers) -> Verdict:
    """Judge the nodes.

    What a node tells of itself counts first, then whom most nodes blame, then who has not answered. More than half of
    the nodes have a fault in common that no exclusion mends, and none is then named as the one to leave out.

    Args:
        nodes: of the job, the first one first: it runs the batch shell, and between two it is believed.
        answers: what they have said.
    """
    reasons = _own_faults(answers) or _blamed(nodes, answers) or _silent(nodes, answers)
    if not reasons:
        return Verdict({}, "")
    first, *others = [node for node in nodes if node in reasons] or reasons
    more = f" (so do {', '.join(others)})" if others else ""
    line = f"node {first} fails its preflight: {reasons[first]}{more}"
    if len(reasons) <= max(1, len(nodes) // 2):
        return Verdict(reasons, line)
    return Verdict({}, f"{len(reasons)} of {len(nodes)} nodes fail their preflight; {first}: {reasons[first]}")


def _own_faults(answers: Answers) -> dict[str, str]:
    reasons: dict[str, str] = {}
    for found in answers.findings:
        if found.fault and not found.blames:
            told = f"{found.check}: {found.fault}"
            reasons[found.node] = f"{reasons[found.node]}; {told}" if found.node in reasons else told
    spoke = {found.node for found in answers.findings if found.check == DONE}
    return {**{node: end for node, end in answers.ends.items() if node not in spoke}, **reasons}


def _blamed(nodes: Sequence[str], answers: Answers) -> dict[str, str]:
    votes = Counter(node for found in answers.findings for node in found.blames)
    most = [node for node in nodes if votes[node] and votes[node] == max(votes.values())]
    if len(most) > 1 and nodes[0] in most:
        most.remove(nodes[0])
    told = [(node, found) for node in most for found in answers.findings if node in found.blames]
    return {node: f"{found.check}: {found.fault}" for node, found in reversed(told)}


def _silent(nodes: Sequence[str], answers: Answers) -> dict[str, str]:
    last = {found.node: found.check for found in answers.findings}
    silent = [node for node in nodes if last.get(node) != DONE]
    return {
        node: f"no answer {f'after {last[node]!r} ' if node in last else ''}within {SECONDS:g} s" for node in silent
    }


def step_words(env: Mapping[str, str], run: RunDirectory, gpus: int) -> list[str]:
    """The command that starts the step.

    Args:
        env: of the batch shell.
        run: the run.
        gpus: devices that each node is to have.
    """
    nodes = env["SLURM_JOB_NUM_NODES"]
    words = [*STEP.split(), f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--kill-on-bad-exit=0"]
    if cpus := env.get("SLURM_CPUS_PER_TASK"):
        words.append(f"--cpus-per-task={cpus}")
    if gpus:
        words.append(f"--gpus-per-node={gpus}")
    return [*words, sys.executable, "-u", "-m", STEP_MODULE, str(run.path), f"--gpus={gpus}"]


def ask(
    words: Sequence[str], env: Mapping[str, str], seconds: float = SECONDS, grace: float = GRACE_SECONDS
) -> Answers:
    """Start the step and listen until it ends, or until its time is up.

    Args:
        words: the command.
        env: its environment.
        seconds: how long it may take.
        grace: how long after the first fault.
    """
    answers = Answers()
    process = subprocess.Popen(
        words,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
    )
    listeners = [
        threading.Thread(target=_listen, args=(stream, answers), daemon=True)
        for stream in (process.stdout, process.stderr)
    ]
    for listener in listeners:
        listener.start()
    deadline, faulty = time.monotonic() + seconds, False
    while process.poll() is None and time.monotonic() < deadline:
        if not faulty and any(found.fault for found in answers.findings):
            faulty, deadline = True, min(deadline, time.monotonic() + grace)
        time.sleep(0.05)
    ends = None if process.poll() is not None else dict(answers.ends)  # as it was before we end the tasks
    _end(process, grace)
    for listener in listeners:
        listener.join(grace)
    return answers if ends is None else replace(answers, ends=ends)


def _end(process: subprocess.Popen[str], seconds: float) -> None:
    """End srun, if it has not ended, and its tasks with it."""
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _listen(stream: IO[str], answers: Answers) -> None:
    """Note each line; what is no finding is passed on, marked, lest it be taken for a word on the ranks."""
    with stream:
        for line in stream:
            if found := finding(line):
                answers.findings.append(found)
                continue
            print(MARK + line, end="", file=sys.stderr, flush=True)
            answers.errors.append(line.strip())
            if match := _ENDED.match(line) or _UNLAUNCHED.match(line):
                answers.ends[match[1]] = match[2]


def table(nodes: Sequence[str], findings: Iterable[Finding]) -> str:
    """The figures, a line for each node."""
    figures = _figures(nodes, findings)
    checks = list(dict.fromkeys(check for row in figures.values() for check in row))
    rows = [["node", *checks], *([node, *(row.get(check, "-") for check in checks)] for node, row in figures.items())]
    return aligned(rows)


def _figures(nodes: Sequence[str], findings: Iterable[Finding]) -> dict[str, dict[str, str]]:
    figures: dict[str, dict[str, str]] = {node: {} for node in nodes}
    for found in findings:
        if found.check != DONE:
            figures.setdefault(found.node, {})[found.check] = found.figure or ("bad" if found.fault else "ok")
    return figures


def spans(findings: Iterable[Finding]) -> dict[str, list[float]]:
    """Check -> its lowest and its highest value among the nodes."""
    values: dict[str, list[float]] = {}
    for found in findings:
        if found.value is not None:
            values.setdefault(found.check, []).append(found.value)
    return {check: [min(known), max(known)] for check, known in values.items()}


def preflight(run: RunDirectory, env: Mapping[str, str], gpus: int) -> bool:
    """Try the nodes of a job and tell what came of it; whether its ranks may start.

    Args:
        run: the run.
        env: of the batch shell.
        gpus: devices that each node is to have.
    """
    began, job, nodes = time.monotonic(), job_id(env) or "", expand(env["SLURM_JOB_NODELIST"])
    own = {name: value for name, value in env.items() if name not in _RANKS}
    with private(run.path):
        run.preflight.mkdir(exist_ok=True)
        answers = ask(step_words(env, run, gpus), own)
    found = verdict(nodes, answers)
    if found.fault and not answers.findings and not answers.ends:
        found = Verdict({}, f"the preflight did not start: {(answers.errors or ['srun said nothing'])[-1]}")
    if found.fault and (why := _disturbed(job)):
        _say(f"preflight not judged: {why}")
        return True  # the ranks know what to do about it
    seconds = round(time.monotonic() - began, 1)
    figures = _figures(nodes, answers.findings)
    restart = restart_count(env)
    Report(job, restart, seconds, figures, found.fault, found.failing).save(run)
    print(table(nodes, answers.findings), flush=True)
    if found.fault:
        return False
    run.append_event(
        "preflight", job=job, restart=restart, seconds=seconds, nodes=len(nodes), figures=spans(answers.findings)
    )
    _say(f"preflight of {len(nodes)} node{'s' * (len(nodes) > 1)} well after {seconds:g} s")
    return True


def _disturbed(job: str) -> str:
    """What ends the job meanwhile, and the step with it, though no node is at fault; "" for nothing."""
    try:
        standing = queue.standing(job)
    except SlurmTrainError:
        return ""
    if standing.preempted:
        return f"job {job} is being preempted"
    return "" if standing.state == "RUNNING" else f"job {job} is {standing.state}"


def main(arguments: Sequence[str]) -> int:
    """The batch shell's first word; returns 0 if the ranks may start."""
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", help="the run directory")
    parser.add_argument("--gpus", type=int, default=0, help="devices that each node is to have")
    given = parser.parse_args(arguments)
    try:
        return EXIT_OK if preflight(RunDirectory.open(given.run), os.environ, given.gpus) else EXIT_FAILURE
    except (SlurmTrainError, OSError) as error:
        _say(f"preflight: {error}")
        return EXIT_FAILURE


def _say(text: str) -> None:
    print(f"slurm_train: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

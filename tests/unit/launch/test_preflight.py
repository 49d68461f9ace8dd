"""The nodes of a job are judged by what they have said, and by what srun says of those that said nothing."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from slurm_train.launch.preflight import Answers, ask, preflight, spans, step_words, table, verdict
from slurm_train.report.preflight import DONE, Finding, Report, finding, reports
from slurm_train.report.rundir import RunDirectory
from tests.unit.launch.fake_slurm import install

THREE = ("n1", "n2", "n3")


def said(*findings: Finding, ends: dict[str, str] | None = None, done: tuple[str, ...] = THREE) -> Answers:
    """These findings, and that the nodes `done` have no more to say."""
    return Answers([*findings, *(Finding(node, DONE) for node in done)], ends or {})


def blames(node: str, check: str, *others: str) -> Finding:
    return Finding(node, check, fault="bad", blames=others)


def test_all_is_well() -> None:
    found = verdict(THREE, said(Finding("n1", "memory", "7.0 GiB", 7.0)))
    assert (found.failing, found.fault) == ((), "")


def test_what_a_node_tells_of_itself_counts_first() -> None:
    answers = said(
        blames("n1", "meet", "n3"),
        Finding("n2", "disk", "1 MiB", fault="1 MiB are free, at least 9 MiB"),
        Finding("n2", "torch", fault="ImportError: libcuda.so"),
        done=("n1",),
    )
    found = verdict(THREE, answers)
    assert found.failing == ("n2",)
    assert found.fault == (
        "node n2 fails its preflight: disk: 1 MiB are free, at least 9 MiB; torch: ImportError: libcuda.so"
    )


@pytest.mark.parametrize(
    ("cut", "words"),
    {
        "n3": [("n1", "n3"), ("n2", "n3"), ("n3", "n1")],  # the store is at n1, which n3 does not find
        "n1": [("n1", "n2", "n3"), ("n2", "n1"), ("n3", "n1")],
        "n2": [("n1", "n2"), ("n2", "n1"), ("n2", "n3"), ("n3", "n2")],  # neighbours in the ring
    }.items(),
)
def test_the_node_that_most_blame_is_at_fault(cut: str, words: list[tuple[str, ...]]) -> None:
    found = verdict(THREE, said(*(blames(node, "meet", *others) for node, *others in words)))
    assert found.failing == (cut,)


def test_between_two_the_first_is_believed() -> None:
    words = (blames("n1", "all-reduce", "n2"), blames("n2", "all-reduce", "n1"))
    assert verdict(("n1", "n2"), said(*words)).failing == ("n2",)


def test_a_clock_that_differs_from_all_others_is_that_of_the_first_node() -> None:
    apart = [blames(node, "clock", node, "n1") for node in ("n2", "n3")]
    assert verdict(THREE, said(*apart)).failing == ("n1",)
    assert verdict(THREE, said(apart[0])).failing == ("n2",)


def test_a_node_without_an_answer_is_at_fault() -> None:
    found = verdict(THREE, said(Finding("n3", "write", "9 MiB/s"), done=("n1", "n2")))
    assert found.fault == "node n3 fails its preflight: no answer after 'write' within 120 s"


def test_srun_s_word_on_a_task_that_died() -> None:
    found = verdict(THREE, said(ends={"n3": "Killed", "n1": "Exited with exit code 1"}, done=("n1", "n2")))
    assert found.fault == "node n3 fails its preflight: Killed"


def test_what_most_nodes_have_in_common_is_no_node_s_fault() -> None:
    full = [Finding(node, "disk", fault="full") for node in ("n1", "n2")]
    found = verdict(THREE, said(*full, done=("n3",)))
    assert (found.failing, found.fault) == ((), "2 of 3 nodes fail their preflight; n1: disk: full")
    four = (*THREE, "n4")
    assert verdict(four, said(*full, done=("n3", "n4"))).failing == ("n1", "n2")
    assert verdict(("n1",), said(full[0], done=())).failing == ("n1",)


def test_the_figures_in_a_table() -> None:
    found = [Finding("n1", "write", "9 MiB/s", 9.0), Finding("n2", "write", "3 MiB/s", 3.0), Finding("n1", "torch")]
    assert table(("n1", "n2"), found).splitlines() == ["node  write    torch", "n1    9 MiB/s  ok", "n2    3 MiB/s  -"]
    assert spans(found) == {"write": [3.0, 9.0]}


def test_a_line_of_a_finding_is_short_and_comes_back() -> None:
    found = Finding("n1", "shared", fault="é" * 5000, blames=tuple(f"node{number:04}" for number in range(500)))
    line = found.line()
    assert len(line) < 1000
    again = finding(line + "\n")
    assert again and again.fault.startswith("???") and again.blames == found.blames[:12]
    assert finding("preflight: {}") is None and finding("a warning") is None


SPEAKER = """
import sys, time
print('preflight: {"node": "n1", "check": "done"}', flush=True)
print("srun: error: n2: task 1: Exited with exit code 1", file=sys.stderr, flush=True)
print("a warning", flush=True)
%s
"""


def test_answers_of_a_step_that_ends(capsys: pytest.CaptureFixture[str]) -> None:
    answers = ask([sys.executable, "-c", SPEAKER % ""], os.environ)
    assert answers.findings == [Finding("n1", DONE)]
    assert answers.ends == {"n2": "Exited with exit code 1"}
    told = "preflight: srun: error: n2: task 1: Exited with exit code 1", "preflight: a warning"
    assert sorted(capsys.readouterr().err.splitlines(), reverse=True) == list(told)


@pytest.mark.parametrize(
    "last",
    [
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)",
        """print('preflight: {"node": "n2", "check": "torch", "fault": "bad"}', flush=True); time.sleep(600)""",
    ],
    ids=["deaf", "faulty"],
)
def test_a_step_that_does_not_end_is_ended(last: str) -> None:
    answers = ask([sys.executable, "-c", SPEAKER % last], os.environ, seconds=300 if "fault" in last else 4, grace=1)
    assert answers.findings[0] == Finding("n1", DONE)


def test_the_command_of_the_step(tmp_path: Path) -> None:
    env = {"SLURM_JOB_NUM_NODES": "2", "SLURM_CPUS_PER_TASK": "3"}
    words = step_words(env, RunDirectory(tmp_path), 4)
    assert words[:2] == ["srun", "--export=ALL"]
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=3", "--gpus-per-node=4"} <= set(words)
    assert words[-4:] == ["-m", "slurm_train.train.preflight", str(tmp_path), "--gpus=4"]
    assert not [
        word for word in step_words({"SLURM_JOB_NUM_NODES": "1"}, RunDirectory(tmp_path), 0) if "per-node=0" in word
    ]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run", "{}\n", "{}\n")


JOB = {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_RESTART_COUNT": "1"}
WELL = "".join(Finding(node, DONE).line() + "\n" for node in ("n1", "n2"))
BAD = Finding("n1", DONE).line() + "\n" + Finding("n2", "torch", fault="ImportError").line() + "\n"


def test_a_good_preflight_leaves_a_report_and_an_event(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch).says("srun", WELL)
    assert preflight(run, {**JOB, "PATH": os.environ["PATH"]}, 0)
    (event,) = run.events()
    assert (event["event"], event["job"], event["restart"], event["nodes"]) == ("preflight", "12", 1, 2)
    (report,) = reports(run, "12")
    assert (report.fault, report.failing, report.excluded) == ("", (), False)
    assert (run.preflight / "12_1.json").stat().st_mode & 0o777 == 0o600


def test_a_bad_one_is_reported_with_its_node(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = install(tmp_path, monkeypatch)
    slurm.says("srun", BAD)
    slurm.says("scontrol", "JobId=12 JobState=RUNNING Reason=None")
    assert not preflight(run, {**JOB, "PATH": os.environ["PATH"]}, 0)
    (report,) = reports(run, "12")
    assert report.failing == ("n2",) and report.fault == "node n2 fails its preflight: torch: ImportError"


def test_a_job_that_is_being_ended_is_not_judged(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = install(tmp_path, monkeypatch)
    slurm.says("srun", BAD)
    slurm.says("scontrol", "JobId=12 JobState=RUNNING Reason=None PreemptTime=2026-12-03T10:00:00")
    assert preflight(run, {**JOB, "PATH": os.environ["PATH"]}, 0)
    assert reports(run, "12") == [] and run.events() == []


def test_a_step_that_does_not_start_is_told_in_srun_s_words(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch).says("srun", error="srun: error: Unable to create step for job 12: no\n", code=1)
    assert not preflight(run, {**JOB, "PATH": os.environ["PATH"]}, 0)
    (report,) = reports(run, "12")
    assert report.fault == "the preflight did not start: srun: error: Unable to create step for job 12: no"
    assert report.failing == ()


def test_reports_are_those_of_the_job_in_order(run: RunDirectory) -> None:
    run.preflight.mkdir()
    for job, restart in (("12", 10), ("12", 2), ("12_3", 0), ("121", 0)):
        Report(job, restart, 1.0, {"n1": {"torch": "2"}}).save(run)
    (run.preflight / "12_11.json").write_text("torn")
    assert [report.restart for report in reports(run, "12")] == [2, 10]

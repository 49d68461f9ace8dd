"""The command line: words to verbs, errors to lines and exit codes, and no torch on the launch side."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import slurm_train
from slurm_train.cli import main, split
from slurm_train.report.rundir import RunDirectory

FMNIST = "+experiment=fmnist"


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("argv", "verb", "words"),
    [
        ([FMNIST, "seed=1"], "run", [FMNIST, "seed=1"]),
        (["run", FMNIST], "run", [FMNIST]),
        (["plan", "--deep", FMNIST], "plan", ["--deep", FMNIST]),
        (["--local-rank=1", "plan", FMNIST], "plan", [FMNIST]),
        (["--local_rank", "1", FMNIST], "run", [FMNIST]),
        (["resume", "some/run", "train.epochs=3"], "resume", ["some/run", "train.epochs=3"]),
        (["~train.max_steps"], "run", ["~train.max_steps"]),
    ],
)
def test_the_first_word_is_the_verb_or_run(argv: list[str], verb: str, words: list[str]) -> None:
    command = split(argv)
    assert (command.verb, command.words) == (verb, words)


def test_options_stand_anywhere() -> None:
    command = split(["--config-dir", "a", "plan", "x=1", "--config-dir=b", "-m", "--cfg", "job"])
    assert (command.verb, command.config_dirs, command.sweep, command.print_config) == ("plan", ["a", "b"], True, True)


BAD = {
    "a verb that is none": (["plam"], "error: plam is neither a verb nor KEY=VALUE; did you mean plan?"),
    "a word that is nothing": (["hello"], "error: hello is neither a verb nor KEY=VALUE; the verbs are run, plan,"),
    "an unknown key": ([FMNIST, "train.epoch=3"], "error: train.epoch=3: unknown key; did you mean train.epochs?"),
    "an unknown experiment": (["+experiment=fmnis"], "did you mean fmnist"),
    "a wrong type": ([FMNIST, "train.epochs=many"], "error: train.epochs=many: must be an integer"),
    "a negative count": (
        [FMNIST, "launcher.tasks_per_node=-1"],
        "error: launcher.tasks_per_node=-1: must be at least 1",
    ),
    "a flag that is none": ([FMNIST, "--epochs=3"], "error: --epochs=3: an override has no dashes"),
    "a plan flag that is none": (["plan", "--jsn", FMNIST], "error: --jsn"),
    "no RUN": (["resume"], "error: resume: RUN is missing"),
    "a RUN that is none": (["resume", "nosuch"], "error: there is no run directory or run id nosuch"),
    "a directory that is no run": (["evaluate", "."], "error: . is not a run directory"),
    "a sweep without -m": ([FMNIST, "optim.lr=1,2"], "error: optim.lr=1,2: several values; a sweep needs -m"),
    "a sweep of plans": (["plan", "-m", FMNIST], "error: -m: plan has no sweeps"),
    "an option without its value": ([FMNIST, "--config-dir"], "error: --config-dir: its value is missing"),
    "a config directory that is none": (
        [FMNIST, "--config-dir=nosuch"],
        "error: --config-dir nosuch: is not a directory",
    ),
    "another --cfg": ([FMNIST, "--cfg", "hydra"], "error: --cfg: cannot print 'hydra'; type --cfg job"),
    "a target that is none": ([FMNIST, "model._target_=nosuch.Net"], "error: model._target_=nosuch.Net: "),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_told_in_a_line_with_exit_code_2(capsys: pytest.CaptureFixture[str], name: str) -> None:
    argv, text = BAD[name]
    assert main(argv) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert len(output.err.splitlines()) == 1 and text in output.err
    assert list(Path().iterdir()) == []


def test_a_used_run_directory_is_refused_and_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    RunDirectory.create("used", "seed: 0\n", "{}")
    assert main([FMNIST, "run.dir=used"]) == 2
    assert "used already" in capsys.readouterr().err
    assert Path("used/config.yaml").read_text() == "seed: 0\n"


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["run", "--help"]])
def test_help(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    assert main(argv) == 0
    text = capsys.readouterr().out
    assert "examples:" in text and all(verb in text for verb in ("run", "plan", "resume", "evaluate"))


@pytest.mark.parametrize(("verb", "word"), [("plan", "--deep"), ("resume", "RUN"), ("evaluate", "RUN")])
def test_help_of_a_verb(capsys: pytest.CaptureFixture[str], verb: str, word: str) -> None:
    assert main([verb, "--help"]) == 0
    assert word in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == slurm_train.__version__


def test_the_composed_configuration_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([FMNIST, "train.epochs=7", "--cfg", "job"]) == 0
    assert "  epochs: 7\n" in capsys.readouterr().out


def test_an_unexpected_error_is_one_line_and_a_traceback_on_request(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise ZeroDivisionError("a\nb")

    monkeypatch.setattr("slurm_train.launch.start.train", fail)
    assert main([FMNIST]) == 1
    assert capsys.readouterr().err == "error: ZeroDivisionError: a b (SLURM_TRAIN_TRACEBACK=1 shows where)\n"
    monkeypatch.setenv("SLURM_TRAIN_TRACEBACK", "1")
    assert main([FMNIST]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_interrupt_is_told_in_a_word(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("slurm_train.launch.start.train", interrupt)
    assert main([FMNIST]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.fixture
def be_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Makes this process one of two ranks on a host; what it does to SIGTERM ends with the test."""

    def become(rank: int) -> None:
        world = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": 29500}
        for name, value in (world | {"RANK": rank, "LOCAL_RANK": rank}).items():
            monkeypatch.setenv(name, str(value))

    before = signal.getsignal(signal.SIGTERM)
    yield become
    signal.signal(signal.SIGTERM, before)


def test_the_first_rank_speaks_for_all(capsys: pytest.CaptureFixture[str], be_rank: Callable[[int], None]) -> None:
    be_rank(0)
    assert main([FMNIST, "train.epoch=3"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    for rank, told in ((0, True), (1, False)):
        be_rank(rank)
        assert main(["plan", FMNIST]) == 0
        assert bool(capsys.readouterr().out) == told


def test_the_second_rank_is_silent_if_it_is_ended(
    be_rank: Callable[[int], None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    be_rank(1)
    monkeypatch.setattr("slurm_train.cli.time.sleep", lambda _: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit) as ended:
        main([FMNIST, "train.epoch=3"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == ""


def test_the_second_rank_tells_what_the_first_did_not_meet(
    be_rank: Callable[[int], None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    be_rank(1)
    waits: list[float] = []
    monkeypatch.setattr("slurm_train.cli.time.sleep", waits.append)
    assert main([FMNIST, "train.epoch=3"]) == 2
    assert waits == [10.0]
    assert capsys.readouterr().err.startswith(f"rank 1 on {os.uname().nodename}: error: train.epoch=3: unknown key")


def test_a_target_is_looked_at_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text(
        "from torch import nn\n\n\nclass Net(nn.Module):\n    def __init__(self, width=8):\n"
        "        print('noise')\n        super().__init__()\n"
        "        self.first, self.second = nn.Linear(784, width), nn.Linear(width, 10)\n"
    )
    net = [
        FMNIST,
        "model._target_=mine.Net",
        "parallel=tp",
        "parallel.tp=2",
        "parallel.plan={first: colwise, second: rowwise}",
    ]
    assert main(["plan", "--deep", "--json", *net]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["parameters"], [layer["out_features"] for layer in plan["layers"]]) == (784 * 8 + 8 + 90, [8, 10])
    assert main(["plan", "--deep", *net, "model.width=9"]) == 2
    assert "tp=2 does not divide the 9 out_features of first" in capsys.readouterr().err
    Path("broken.py").write_text("import nosuchmodule\n\n\ndef Net(): ...\n")
    assert main(["plan", "--deep", FMNIST, "model._target_=broken.Net"]) == 2
    assert "No module named 'nosuchmodule'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "code"), [(["plan", FMNIST, "parallel=tp", "parallel.tp=2"], 0), ([FMNIST, "train.epochs=-1"], 2), ([], 0)]
)
def test_the_launch_side_imports_no_torch(tmp_path: Path, argv: list[str], code: int) -> None:
    stub = tmp_path / "stub"
    (stub / "torch").mkdir(parents=True)
    (stub / "torch" / "__init__.py").write_text("raise ImportError('torch was imported on the launch side')\n")
    path = os.pathsep.join([str(stub), str(Path(slurm_train.__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, "-m", "slurm_train", *argv],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stderr
    assert "torch was imported" not in done.stderr
    proof = subprocess.run(
        [sys.executable, "-c", "import torch"], env=os.environ | {"PYTHONPATH": path}, capture_output=True
    )
    assert proof.returncode != 0


def test_a_reader_that_leaves_is_no_error() -> None:
    path = str(Path(slurm_train.__file__).parents[1])
    command = [sys.executable, "-m", "slurm_train", "plan", "--json", FMNIST, "launcher.tasks_per_node=64"]
    with subprocess.Popen(
        command, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        assert process.stderr.read() == b""

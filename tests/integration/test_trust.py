"""What a real run leaves behind: nobody else can read it, and no secret of the environment is in it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import slurm_train
from tests.integration.runs import SAMPLE

WORDS = ("+experiment=fmnist", SAMPLE, "model.width=8", "train.max_steps=4", "train.profile=1", "train.export=pt")
SECRET = "c3dtqZ9x81mm0Qtt"


def typed(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """`python -m slurm_train`, by a user whose files are open to all and whose shell knows a secret."""
    environment = os.environ | {"PYTHONPATH": str(Path(slurm_train.__file__).parents[1]), "WANDB_API_KEY": SECRET}
    return subprocess.run(
        [sys.executable, "-m", "slurm_train", *words],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        umask=0,
    )


def test_a_run_is_its_user_s_alone_and_holds_no_secret(tmp_path: Path) -> None:
    done = typed(*WORDS, "launcher.tasks_per_node=2", "run.dir=runs/run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "run"
    found = list(run.rglob("*"))
    assert {"model.pt", "checkpoints", "profile", "events.jsonl", "claims"} <= {path.name for path in found}
    modes = {str(path): oct(path.stat().st_mode & 0o777) for path in (run, *found)}
    wrong = {path: mode for path, mode in modes.items() if mode != (oct(0o700) if Path(path).is_dir() else oct(0o600))}
    assert wrong == {}
    assert (tmp_path / "runs").stat().st_mode & 0o777 == 0o775  # the user's own
    assert [path for path in found if path.is_file() and SECRET.encode() in path.read_bytes()] == []


def test_a_run_that_others_could_change_is_not_gone_on_with(tmp_path: Path) -> None:
    done = typed(*WORDS, "run.dir=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    logs = tmp_path / "run" / "logs"
    logs.chmod(0o770)
    again = typed("evaluate", "run", cwd=tmp_path)
    assert (again.returncode, again.stderr) == (0, f"note: the group can write {logs}\n")
    logs.chmod(0o777)
    again = typed("evaluate", "run", cwd=tmp_path)
    told = f"error: run.dir: everybody can write {logs}; chmod o-w {logs}, or use another one\n"
    assert (again.returncode, again.stderr) == (2, told)


def test_a_secret_that_is_typed_is_refused_and_not_told(tmp_path: Path) -> None:
    for words in ((f"launcher.env.WANDB_API_KEY={SECRET}",), (f"run.name=xoxb-{SECRET}",)):
        for verb in ((), ("plan",)):
            done = typed(*verb, *WORDS, *words, cwd=tmp_path)
            assert done.returncode == 2
            assert "looks like a secret, and would be written into config.yaml" in done.stderr
            assert SECRET not in done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []

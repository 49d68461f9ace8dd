"""What the lint finds in an sbatch script, and what it leaves alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_train.launch.lint import lint, main

SRUN = 'srun --cpus-per-task="$SLURM_CPUS_PER_TASK" python train.py'
CPUS = (
    "srun takes no --cpus-per-task from sbatch since Slurm 22.05: a rank has one CPU; "
    "add ${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}"
)
NO_OPTION = "belongs to no option; put a value with spaces in quotes, and none around ="
NO_SHELL = "no shell reads this line, so $ and ~ stay as they are; write the value itself"
NO_DIRECTORY = "and Slurm makes none: the job ends without a word; make it first"
SHELL_ALONE = "B: sends the signal to this shell alone, and no rank saves; leave B: out"
COMMENT = "a comment, not a directive; write #SBATCH, or ##SBATCH to leave it out"
LATE = "#SBATCH after the first command is ignored; move it to the top"
FORGETS = "a requeued job begins its log anew, and the first part is lost; add #SBATCH --open-mode=append"
LOST_CODE = (
    "the job ends with this command's exit code: a run that failed counts as COMPLETED; "
    "end with srun, or keep its code: code=$? and exit $code"
)

FOUND = {
    "no interpreter": (
        ["#SBATCH --nodes=2", SRUN],
        ["1: no interpreter, without which sbatch refuses it; begin with #!/bin/bash"],
    ),
    "Windows line ends": (
        ["#!/bin/bash", "hostname\r", "hostname\r"],
        ["2: Windows line ends, with which sbatch refuses it; convert it: sed -i 's/\\r$//' FILE"],
    ),
    "a directive after a command": (["#!/bin/bash", "", "module load cuda", "#SBATCH --nodes=2", SRUN], [f"4: {LATE}"]),
    "a space after the #": (["#!/bin/bash", "# SBATCH --nodes=2", SRUN], [f"2: {COMMENT}"]),
    "small letters": (["#!/bin/bash", "#sbatch --nodes=2", SRUN], [f"2: {COMMENT}"]),
    "spaces in a value": (["#!/bin/bash", "#SBATCH --comment=my run", SRUN], [f"2: 'run' {NO_OPTION}"]),
    "spaces around =": (["#!/bin/bash", "#SBATCH --nodes = 2", SRUN], [f"2: '=' {NO_OPTION}"]),
    "a space after =": (["#!/bin/bash", "#SBATCH --nodes= 2", SRUN], [f"2: '2' {NO_OPTION}"]),
    "an open quotation mark": (
        ["#!/bin/bash", "#SBATCH --comment='my run", SRUN],
        ["2: a quotation mark is not closed; sbatch refuses the script"],
    ),
    "a # in a value": (
        ["#!/bin/bash", "#SBATCH --comment=run#1", SRUN],
        ["2: sbatch cuts the value off at #; put it in quotes"],
    ),
    "a line that is continued": (
        ["#!/bin/bash", "#SBATCH --nodes=2 \\", "  --time=30", SRUN],
        ["2: a directive ends with its line, whatever stands on the next; repeat #SBATCH there"],
    ),
    "a variable": (["#!/bin/bash", "#SBATCH --output=$HOME/%j.log", SRUN], [f"2: {NO_SHELL}"]),
    "a variable in quotes": (["#!/bin/bash", '#SBATCH --comment="${USER} runs"', SRUN], [f"2: {NO_SHELL}"]),
    "a home directory": (["#!/bin/bash", "#SBATCH --output=~/%j.log", SRUN], [f"2: {NO_SHELL}"]),
    "a log that begins anew": (["#!/bin/bash", "#SBATCH -N2 --requeue", SRUN], [f"2: {FORGETS}"]),
    "a log that is truncated": (
        ["#!/bin/bash", "#SBATCH --requeue", "#SBATCH --open-mode=truncate", SRUN],
        [f"2: {FORGETS}"],
    ),
    "no directory for the output": (
        ["#!/bin/bash", "#SBATCH --output=missing/%j.log", SRUN],
        [f"2: there is no directory missing, {NO_DIRECTORY}"],
    ),
    "no directory for the errors": (
        ["#!/bin/bash", "#SBATCH -e /missing/100%%/%j.log", SRUN],
        [f"2: there is no directory /missing/100%, {NO_DIRECTORY}"],
    ),
    "a directory below chdir": (
        ["#!/bin/bash", "#SBATCH -D there", "#SBATCH -o missing/log", SRUN],
        [f"3: there is no directory there/missing, {NO_DIRECTORY}"],
    ),
    "a directory named by the job": (
        ["#!/bin/bash", "#SBATCH --output=there/%j/log", SRUN],
        [f"2: there is no directory there/%j, {NO_DIRECTORY}"],
    ),
    "a signal for the shell": (["#!/bin/bash", "#SBATCH --signal=B:USR2@90", SRUN], [f"2: {SHELL_ALONE}"]),
    "a signal for the shell, reserved": (["#!/bin/bash", "#SBATCH --signal=RB:USR2@90", SRUN], [f"2: {SHELL_ALONE}"]),
    "one CPU a rank": (["#!/bin/bash", "#SBATCH --cpus-per-task=4", "srun -n4 python a.py"], [f"3: {CPUS}"]),
    "one CPU a rank, in a pipe": (["#!/bin/bash", "set -eo pipefail", "srun torchrun a.py | tee log"], [f"3: {CPUS}"]),
    "-c of another program": (["#!/bin/bash", 'srun python -c "print(1)"'], [f"2: {CPUS}"]),
    "a command on several lines": (
        ["#!/bin/bash", "", "/usr/bin/srun \\", "  --label \\", '  "$PYTHON" train.py'],
        [f"3: {CPUS}"],
    ),
    "no environment": (
        ["#!/bin/bash", "#SBATCH --export=NONE", "module load cuda", SRUN],
        ["4: after --export=NONE the ranks get nothing of what is set here; add --export=ALL"],
    ),
    "a command after srun": (["#!/bin/bash", SRUN, "", "echo done"], [f"4: {LOST_CODE}"]),
    "several": (
        ["#!/bin/bash", "#SBATCH --requeue", "hostname", "#SBATCH -N2", "srun python a.py"],
        [f"2: {FORGETS}", f"4: {LATE}", f"5: {CPUS}"],
    ),
}

CLEAN = {
    "nothing": [],
    "usual": [
        "#SBATCH --nodes=2",
        "#SBATCH -t 30 -p gpu",
        "#SBATCH --comment='my run' # words",
        "",
        "module load x",
        SRUN,
    ],
    "comments and blank lines before directives": [
        "",
        "# words",
        " # more",
        "##SBATCH --nodes=3",
        "#SBATCH --nodes=2",
        SRUN,
    ],
    "no space before the option": ["#SBATCH--nodes=2", SRUN],
    "usage in a comment": ["#sbatch -N4 train.sh", "#   sbatch -N2 train.sh", SRUN],
    "what only looks like a variable": ["#SBATCH --comment='$HOME costs 5$'", "#SBATCH --output=run~1.log", SRUN],
    "a # in quotes": ["#SBATCH --comment='run#1'", '#SBATCH --job-name="a # b"', SRUN],
    "appending": ["#SBATCH --open-mode=append", "#SBATCH --requeue", SRUN],
    "a directory that is there": ["#SBATCH --output=there/%j.log", "#SBATCH -e /there/x", SRUN],
    "a directory that is not known before": ["#SBATCH --output=%x/%u.log", SRUN],
    "chdir that is there": ["#SBATCH -D there", "#SBATCH -o log", SRUN],
    "a signal for the ranks": ["#SBATCH --signal=USR2@90", SRUN],
    "a signal that the shell hands on": ["#SBATCH --signal=B:USR2@90", "trap 'kill -USR2 $pid' USR2", SRUN],
    "no ranks": ["srun hostname", "srun -N1 -n1 rm -rf /tmp/cache"],
    "CPUs by -c": ["srun -n4 -c4 python train.py"],
    "CPUs by the environment": ["export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK", "srun python train.py"],
    "CPUs by GPU": ["#SBATCH --cpus-per-gpu=4", "srun python train.py"],
    "srun in words": ["echo srun python train.py is next >&2", 'echo "srun python"', SRUN],
    "environment handed on": ["#SBATCH --export=NONE", "export SLURM_EXPORT_ENV=ALL", SRUN],
    "environment of srun": ["#SBATCH --export=NONE", "srun -c2 --export=ALL python train.py"],
    "an exit code that is kept": [SRUN, "code=$?", "echo done", "exit $code"],
    "errexit": ["set -euo pipefail", SRUN, "echo done"],
    "a here-document": ["cat > inner.sh <<EOF", "#!/bin/bash", "#SBATCH --nodes=2", "it's", "EOF", SRUN],
    "a here-string": ["read -r first <<<words", SRUN],
    "an apostrophe in a comment": ["hostname # don't", SRUN],
    "a directive in quotes": ["echo 'first", "#SBATCH --nodes=2", "last'", SRUN],
}


@pytest.mark.parametrize("name", FOUND)
def test_it_finds(name: str) -> None:
    lines, findings = FOUND[name]
    assert lint("\n".join([*lines, ""]), exists=lambda directory: directory.strip("/") == "there") == findings


@pytest.mark.parametrize("name", CLEAN)
def test_it_leaves_alone(name: str) -> None:
    text = "\n".join(["#!/bin/bash", *CLEAN[name], ""])
    assert lint(text, exists=lambda directory: directory.strip("/") == "there") == []


def test_directories_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = f"#!/bin/bash\n#SBATCH --output=logs/%j.log\n{SRUN}\n"
    assert lint(text) == [f"2: there is no directory logs, {NO_DIRECTORY}"]
    (tmp_path / "logs").mkdir()
    assert lint(text) == []


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad, missing = (str(tmp_path / name) for name in ("good.sh", "bad.sh", "missing.sh"))
    Path(good).write_text(f"#!/bin/bash\n{SRUN}\n")
    Path(bad).write_bytes(b"#!/bin/bash\nsrun python \xff.py\n")
    assert main([good]) == 0
    assert capsys.readouterr() == ("", "")
    assert main([]) == 2
    assert capsys.readouterr() == ("", "usage: python -m slurm_train.launch.lint FILE...\n")
    assert main([missing, bad, good]) == 2
    assert capsys.readouterr() == (f"{bad}:2: {CPUS}\n", f"{missing}: No such file or directory\n")

"""What the README says is true: its commands plan, its files are there, its verbs are those of the code."""

import re
import shlex
from pathlib import Path

import pytest

from slurm_train import errors
from slurm_train.cli import VERBS, main
from slurm_train.config.reference import reference

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
SHELL = [line.partition("  #")[0].strip() for kind, block in BLOCKS if not kind for line in block.splitlines()]
VERB_OPTIONS = (ROOT / "slurm_train" / "launch" / "verbs.py").read_text(encoding="utf-8")
COMMANDS = [line for line in SHELL if "-m slurm_train " in line]


def test_there_are_commands():
    assert len(COMMANDS) >= 10


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_can_be_planned(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (code,) = [block for kind, block in BLOCKS if kind == "python"]
    (tmp_path / "my_file.py").write_text(code)
    _, _, words = command.partition("-m slurm_train ")
    verb, *rest = shlex.split(words)
    if verb in ("generate", "export"):  # of a run that is there
        assert not [word for word in rest if word.startswith("--") and f'"{word}"' not in VERB_OPTIONS]
        return
    typed = [word for word in shlex.split(words.partition(" --")[0]) if word not in ("plan", "verify")]
    if "parallel=ddp" in typed and not any(word.startswith("launcher.") for word in typed):
        typed.append("launcher.tasks_per_node=2")  # where srun or torchrun would give the ranks
    assert main(["plan", *typed]) == 0, capsys.readouterr().err


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"`make ([\w-]+)`", README)) | {
        line.split()[1] for line in SHELL if line.startswith("make ")
    }
    assert {"train", "test"} <= targets
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda path: path.name
)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert links
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_tree_is_true():
    (tree,) = [block for _, block in BLOCKS if block.startswith("conf/")]
    heads = [re.split(r"\s{3,}", line.strip())[0] for line in tree.splitlines()]
    named = [name for head in heads for name in head.split() if name.endswith(("/", ".py"))]
    places = {path.name for path in (ROOT / "slurm_train").iterdir()} | {path.name for path in ROOT.iterdir()}
    assert [name for name in named if name.rstrip("/") not in places] == []
    rooms = {path.name for path in (ROOT / "slurm_train").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rooms <= {name.rstrip("/") for name in named}


def test_verbs_and_exit_codes():
    table = README[README.index("## Commands") :]
    assert set(re.findall(r"^\| `(\w+)(?: RUN)?`", table, re.MULTILINE)) == set(VERBS)
    told = {int(code) for code in re.findall(r"^\| (\d+) \|", README, re.MULTILINE)}
    assert told == {value for name, value in vars(errors).items() if name.startswith("EXIT_")}


def test_keys_exist():
    known = reference()
    keys = set(re.findall(r"`((?:train|parallel|launcher|run)\.[a-z_]+)", README))
    assert keys
    assert [key for key in keys if f"`{key}`" not in known] == []

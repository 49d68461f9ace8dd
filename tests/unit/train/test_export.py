"""Exported weights: what other programs read, from the newest whole checkpoint, in one process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from slurm_train.errors import EXIT_FAILURE, EXIT_USER, CheckpointError, UserError
from slurm_train.report.rundir import RunDirectory
from slurm_train.train.checkpoint import CheckpointStore
from slurm_train.train.export import answer, export

ROOT = Path(__file__).parents[3]
WEIGHT = torch.arange(6.0).reshape(3, 2)


@pytest.fixture
def run(tmp_path):
    """A run with two checkpoints, of which the newer one has weights larger by one."""
    directory = RunDirectory.create(tmp_path / "run", "seed: 0\n", "{}")
    store = CheckpointStore(directory.checkpoints)
    for step in (0, 1):
        tensors = {
            "model.embed.weight": WEIGHT + step,
            "model.seen": torch.tensor(7),
            "optimizer.embed.weight.step": torch.tensor(3.0),
            "ema.embed.weight": WEIGHT - 1,
        }
        store.save(step, tensors, {"tied": {"head.weight": "embed.weight"}})
    return directory.path


def test_a_state_dict(run, tmp_path):
    line = export(run, tmp_path / "w.pt")
    weights = torch.load(tmp_path / "w.pt", weights_only=True)
    assert set(weights) == {"embed.weight", "head.weight", "seen"}
    assert torch.equal(weights["embed.weight"], WEIGHT + 1) and weights["seen"] == 7
    assert weights["head.weight"].data_ptr() == weights["embed.weight"].data_ptr()
    size = (tmp_path / "w.pt").stat().st_size
    assert line == f"{tmp_path}/w.pt: weights of step 1, 2 tensors, 7 values, {size:,} bytes"


def test_safetensors(run, tmp_path):
    export(run, tmp_path / "w.safetensors")
    weights = load_file(tmp_path / "w.safetensors")
    assert set(weights) == {"embed.weight", "seen"} and torch.equal(weights["embed.weight"], WEIGHT + 1)
    with safe_open(tmp_path / "w.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "step": "1", "head.weight": "embed.weight"}


def test_a_model_loads_it_strictly(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    directory = RunDirectory.create(tmp_path / "run", "seed: 0\n", "{}")
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    CheckpointStore(directory.checkpoints).save(5, tensors, {})
    export(directory.path, tmp_path / "w.pth")
    again = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    again.load_state_dict(torch.load(tmp_path / "w.pth", weights_only=True))
    assert torch.equal(again[0].weight, model[0].weight)


def test_averaged_weights_with_buffers(run, tmp_path):
    assert "averaged weights of step 1" in export(run, tmp_path / "w.safetensors", ema=True)
    weights = load_file(tmp_path / "w.safetensors")
    assert torch.equal(weights["embed.weight"], WEIGHT - 1) and weights["seen"] == 7


def test_a_checkpoint_by_name(run, tmp_path):
    export(run, tmp_path / "w.safetensors", checkpoint="step_000000")
    assert torch.equal(load_file(tmp_path / "w.safetensors")["embed.weight"], WEIGHT)


def test_a_broken_one_is_passed_over_unless_it_was_named(run, tmp_path):
    (run / "checkpoints/step_000001/.metadata").unlink()
    assert "of step 0" in export(run, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match="checkpoint step_000001 is broken: .metadata is missing"):
        export(run, tmp_path / "v.pt", checkpoint="step_000001")


def no_ema(run):
    store = CheckpointStore(run / "checkpoints")
    store.save(2, {"model.a": torch.ones(2)}, {})


def no_whole_one(run):
    for path in (run / "checkpoints").iterdir():
        (path / "manifest.json").unlink()


@pytest.mark.parametrize(
    ("prepare", "output", "options", "told"),
    [
        (None, "w.onnx", {}, "w.onnx has none of the suffixes .safetensors, .pt, .pth"),
        (None, "there.pt", {}, "there.pt exists already"),
        (None, "nowhere/w.pt", {}, "nowhere is not a directory"),
        (no_ema, "w.pt", {"ema": True}, "train.ema: step_000002 has no averaged weights"),
        (no_whole_one, "w.pt", {}, "has no whole checkpoint; checkpoint step_000001 is left out: manifest.json"),
        (None, "w.pt", {"checkpoint": "step_7"}, "has no checkpoint step_7; it has step_000000, step_000001"),
    ],
)
def test_what_cannot_be_done_is_told_and_leaves_nothing(run, tmp_path, prepare, output, options, told):
    (tmp_path / "there.pt").write_text("kept")
    if prepare:
        prepare(run)
    with pytest.raises(UserError, match=told):
        export(run, tmp_path / output, **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "there.pt"]
    assert (tmp_path / "there.pt").read_text() == "kept"


def test_not_a_run_directory(tmp_path):
    with pytest.raises(UserError, match="is not a run directory"):
        export(tmp_path, tmp_path / "w.pt")


def test_the_launch_side_asks_in_json(run, tmp_path):
    question = {"run": str(run), "output": str(tmp_path / "w.pt"), "ema": False, "checkpoint": ""}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "slurm_train.train.export"],
        input=json.dumps(question),
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.stderr == "" and "weights of step 1" in json.loads(done.stdout)["line"]
    refused = answer(question)
    assert refused["exit_code"] == EXIT_USER and "exists already" in refused["faults"][0][1]
    (run / "checkpoints/step_000001/.metadata").unlink()
    broken = answer({**question, "output": str(tmp_path / "v.pt"), "checkpoint": "step_000001"})
    assert broken["exit_code"] == EXIT_FAILURE

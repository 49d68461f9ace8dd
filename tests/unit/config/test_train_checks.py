"""Values and contradictions of training and layout that need no number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_train.config.checks import check, file_faults
from slurm_train.config.compose import compose
from slurm_train.config.rules import LAYOUTS, STYLES
from slurm_train.errors import ConfigError
from slurm_train.train.tensor import STYLES as APPLIED

ROOT = Path(__file__).parents[3]

BAD = {
    "train.micro_batch=0": "must be at least 1",
    "train.count=words": "must be one of auto, samples, tokens",
    "train.precision=fp8": "must be one of fp32, bf16, bf16_pure, fp16",
    "train.recompute=some": "must be all, a number of at least 1 (every n-th block), or a list of names of modules",
    "train.recompute=0": "must be all, a number of at least 1",
    "train.recompute=true": "must be all, a number of at least 1",
    "train.recompute=[]": "must be all, a number of at least 1",
    "train.ema=0": "must be above 0 and below 1",
    "train.ema=1": "must be above 0 and below 1",
    "train.profile=-1": "must be at least 0",
    "train.save_steps=0": "must be at least 1",
    "train.schedule.name=step": "must be one of constant, linear, cosine",
    "train.schedule.warmup=-1": "must be at least 0",
    "train.schedule.steps=0": "must be at least 1",
    "train.validation=-1234567": "must be a fraction from 0 to below 1, or a whole number of samples",
    "train.schedule.floor=1.5": "must be from 0 to 1",
    "parallel.name=zero": "must be one of auto, single, ddp, fsdp",
    "parallel.schedule=gpipe": "must be one of 1f1b, interleaved",
    "parallel.virtual=0": "must be at least 1",
    "parallel.dp_shard=0": "must be at least 1, or -1",
    "parallel.plan.fc=diagonal": "must be one of colwise, rowwise, replicate, sequence",
    "parallel.sequence=true": "there is no tensor parallelism; use parallel=tp_sp",
    "parallel.loss_parallel=true": "there is no tensor parallelism",
    "parallel.schedule=interleaved": "there is no pipeline; use parallel=pp",
    "parallel.microbatches=4": "there is no pipeline; use parallel=pp, or train.micro_batch for gradient accumulation",
}


def told(*overrides: str) -> list[str]:
    return [str(fault) for fault in check(compose(overrides).config)]


@pytest.mark.parametrize("override", BAD)
def test_one_line_for_each_bad_value(override: str) -> None:
    found = told(override)
    assert len(found) == 1 and BAD[override] in found[0]
    assert found[0].startswith(f"{override}: ")


@pytest.mark.parametrize(
    "overrides",
    [
        ["train.recompute=all"],
        ["train.recompute=2"],
        ["train.recompute=[layers.*.mlp]"],
        ["train.ema=0.999", "train.count=tokens", "train.save_steps=5"],
        ["train.precision=fp16"],
        ["train.schedule.name=cosine", "train.schedule.warmup=10", "train.schedule.steps=100"],
        ["parallel=tp_sp"],
        ["parallel=pp", "parallel.schedule=interleaved", "parallel.microbatches=8"],
        ["model.init_from=anything.pt"],
        *([f"parallel={name}"] for name in LAYOUTS),
        *([f"parallel.plan.head={style}"] for style in STYLES),
    ],
)
def test_what_is_good(overrides: list[str]) -> None:
    assert told(*overrides) == []


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["train.precision=fp16", "train.device=cpu"],
            "train.precision=fp16: fp16 needs cuda, but train.device=cpu; use bf16 or fp32",
        ),
        (["train.precision=bf16", "train.device=mps"], "train.precision=bf16: an mps device has no bf16 autocast"),
        (["train.offload=true", "train.device=cpu"], "train.offload=true: train.device=cpu has no GPU to relieve"),
        (
            ["train.schedule.name=linear", "train.schedule.warmup=10", "train.schedule.steps=10"],
            "train.schedule.warmup=10: leaves no step before train.schedule.steps=10",
        ),
        (
            ["parallel=pp", "parallel.schedule=interleaved", "parallel.virtual=1"],
            "parallel.virtual=1: the interleaved schedule needs 2 or more stages a rank",
        ),
    ],
)
def test_contradictions(overrides: list[str], line: str) -> None:
    found = told(*overrides)
    assert len(found) == 1 and found[0].startswith(line)


def test_all_faults_are_told_at_once_as_typed() -> None:
    typed = ["train.count=words", "train.ema=2", "parallel.virtual=0", "parallel.sequence=true", "model.init_form=a.pt"]
    faults = check(compose(typed).config)
    assert sorted(fault.key for fault in faults) == sorted(typed)


def test_the_layouts_are_the_presets() -> None:
    assert sorted(LAYOUTS) == sorted(path.stem for path in (ROOT / "conf/parallel").glob("*.yaml"))
    for name in LAYOUTS:
        assert compose([f"parallel={name}"]).config.parallel.name == name


def test_the_styles_are_those_that_are_applied() -> None:
    assert set(STYLES) == set(APPLIED)


def test_a_file_of_weights_must_be_there(tmp_path: Path) -> None:
    (tmp_path / "weights.pt").touch()
    for typed, good in {"weights.pt": True, str(tmp_path / "weights.pt"): True, "other.pt": False, "3": False}.items():
        faults = list(file_faults(compose([f"model.init_from={typed}"]).config, str(tmp_path)))
        assert faults == [] if good else [fault.key for fault in faults] == [f"model.init_from={typed}"]
    assert list(file_faults(compose([]).config, str(tmp_path))) == []


def test_init_from_is_a_key_of_the_model_alone() -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["data.init_from=a.pt", "nothing=1"])
    assert "data.init_from=a.pt" in str(caught.value)

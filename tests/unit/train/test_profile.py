"""Traces: which steps are in them, and none when none are asked for."""

import json

import pytest
import torch

from slurm_train.train.profile import profiled


def train(steps, directory, asked):
    with profiled(asked, directory, 3) as profile:
        for step in range(steps):
            with torch.profiler.record_function(f"step {step}"):
                torch.ones(4).sum()
            profile.step()


@pytest.mark.parametrize(("steps", "traced"), [(8, {"step 2", "step 3"}), (3, {"step 2"})])
def test_the_steps_after_two_that_warm_up(tmp_path, steps, traced):
    train(steps, tmp_path / "profile", asked=2)
    events = json.loads((tmp_path / "profile" / "rank_0003.json").read_text())["traceEvents"]
    assert {event["name"] for event in events if event.get("name", "").startswith("step ")} == traced


def test_none_asked_for(tmp_path):
    train(4, tmp_path / "profile", asked=0)
    assert not (tmp_path / "profile").exists()


def test_an_error_inside_is_told_as_it_is(tmp_path):
    with pytest.raises(ValueError, match="mine"), profiled(2, tmp_path, 0) as profile:
        profile.step()
        raise ValueError("mine")

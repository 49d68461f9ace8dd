"""Checkpoints: whole or left out, found by number, trimmed, loaded without running code."""

import json
import pickle

import pytest
import torch

from slurm_train.errors import CheckpointError
from slurm_train.models.mlp import MLP
from slurm_train.train.checkpoint import CheckpointStore, load_model, load_optimizer, training_state


class OneRank:
    """Stands for the world of a single process."""

    is_main = True

    def barrier(self):
        pass


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "checkpoints", OneRank())


def steps(store):
    return sorted(path.name for path in store.directory.iterdir())


def test_the_newest_is_found_by_number(store):
    for step in (9000, 10000, 500):
        store.save(step, {"step": step})
    path, broken = store.newest()
    assert (path.name, broken) == ("step_010000", [])
    assert store.load(path) == {"step": 10000}


def test_none_yet(store):
    assert store.newest() == (None, [])


def test_only_the_newest_are_kept(tmp_path):
    store = CheckpointStore(tmp_path, OneRank(), keep=2)
    for step in (99, 100, 1000, 999_999, 1_000_000):
        store.save(step, {})
    assert steps(store) == ["step_1000000", "step_999999"]


def test_a_broken_one_with_a_higher_number_costs_no_good_one(tmp_path):
    store = CheckpointStore(tmp_path, OneRank(), keep=1)
    flip(store.save(1000, {}))
    store.save(10, {"value": 10})
    assert store.newest()[0].name == "step_000010"


def test_a_checkpoint_is_written_again_after_going_back(store):
    store.save(1, {"value": 1})
    store.save(1, {"value": 2})
    assert store.load(store.newest()[0]) == {"value": 2}


def flip(path):
    data = bytearray((path / "state.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (path / "state.pt").write_bytes(data)


def truncate(path):
    (path / "state.pt").write_bytes((path / "state.pt").read_bytes()[:-10])


def lose_state(path):
    (path / "state.pt").unlink()


def lose_manifest(path):
    (path / "manifest.json").unlink()


def tear_manifest(path):
    (path / "manifest.json").write_text('{"files": {"state')


def strange_manifest(path):
    (path / "manifest.json").write_text(json.dumps({"files": ["state.pt"]}))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (flip, "the checksum of state.pt is wrong"),
        (truncate, "the checksum of state.pt is wrong"),
        (lose_state, "state.pt is missing"),
        (lose_manifest, "manifest.json is missing"),
        (tear_manifest, "its manifest cannot be read"),
        (strange_manifest, "its manifest cannot be read"),
    ],
)
def test_a_broken_one_is_left_out_and_named(store, damage, told):
    store.save(1, {"value": 1})
    damage(store.save(2, {"value": 2}))
    path, broken = store.newest()
    assert path.name == "step_000001"
    assert len(broken) == 1 and broken[0].startswith("checkpoint step_000002 is left out") and told in broken[0]


def test_what_lies_about_is_not_a_checkpoint(store):
    store.save(1, {})
    (store.directory / ".step_000002.tmp").mkdir()
    (store.directory / "step_latest").mkdir()
    assert store.newest()[0].name == "step_000001"


def test_a_leftover_of_a_torn_save_is_overwritten(store):
    leftover = store.directory / ".step_000002.tmp"
    leftover.mkdir(parents=True)
    (leftover / "half").write_text("x")
    path = store.save(2, {"value": 2})
    assert sorted(p.name for p in path.iterdir()) == ["manifest.json", "state.pt"]


class Evil:
    def __reduce__(self):
        return (print, ("code ran",))


def test_loading_runs_no_code(store, capsys):
    path = store.save(1, {})
    torch.save({"model": Evil()}, path / "state.pt")
    with pytest.raises(pickle.UnpicklingError):
        store.load(path)
    assert "code ran" not in capsys.readouterr().out


def trained(steps=3):
    torch.manual_seed(0)
    model = MLP(6, 4, 1, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    for _ in range(steps):
        model(torch.rand(5, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def test_weights_and_optimizer_come_back_exactly(store):
    model, optimizer = trained()
    path = store.save(3, training_state(model, optimizer))
    again, its_optimizer = trained(steps=0)
    load_model(again, store.load(path))
    load_optimizer(again, its_optimizer, store.load(path))
    for (_, a), (_, b) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a, b)
        assert all(torch.equal(optimizer.state[a][key], its_optimizer.state[b][key]) for key in ("step", "exp_avg_sq"))


def test_a_checkpoint_of_another_model_is_refused(store):
    model, optimizer = trained()
    path = store.save(3, training_state(model, optimizer))
    with pytest.raises(CheckpointError, match=r"does not fit the model.*head"):
        load_model(MLP(6, 4, 1, 5), store.load(path))

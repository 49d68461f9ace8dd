"""Checkpoints: whole or left out, found by number, trimmed, loaded without running code, written in the background."""

import json
import pickle
import threading

import pytest
import torch

from slurm_train.errors import CheckpointError
from slurm_train.report.fence import claim
from slurm_train.train import checkpoint
from slurm_train.train.checkpoint import CheckpointStore, remove_staged
from slurm_train.train.keep import Keep

FILES = [".metadata", "__0_0.distcp", "manifest.json", "trainer.pt"]


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "checkpoints")


def save(store, step, value=0.0, **extra):
    return store.save(step, {"model.weight": torch.full((3, 2), float(value))}, extra)


def load(store, path):
    tensor = torch.empty(3, 2)
    store.load(path, {"model.weight": tensor})
    assert (tensor == tensor[0, 0]).all()
    return tensor[0, 0].item()


def steps(store):
    return sorted(path.name for path in store.directory.iterdir())


def test_what_was_saved_is_loaded(store):
    position = {"step": 3, "epoch": 1}
    path = save(store, 3, 5, position=position, random=[torch.arange(4)])
    assert sorted(file.name for file in path.iterdir()) == FILES
    assert load(store, path) == 5
    assert store.extra(path)["position"] == position
    assert torch.equal(store.extra(path)["random"][0], torch.arange(4))
    assert store.sizes(path) == {"model.weight": torch.Size([3, 2])}


def test_sizes_and_dtypes_are_told_without_reading_tensors(store):
    path = store.save(1, {"a": torch.ones(2, dtype=torch.bfloat16), "b": torch.tensor(1.0)}, {})
    (path / "__0_0.distcp").unlink()
    outline = store.outline(path)
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in outline.items()} == {
        "a": (torch.Size([2]), torch.bfloat16),
        "b": (torch.Size([]), torch.float32),
    }
    assert all(tensor.is_meta for tensor in outline.values())


def test_the_newest_is_found_by_number(store):
    for step in (9000, 10000, 500):
        save(store, step, step)
    path, broken = store.newest()
    assert (path.name, broken) == ("step_010000", [])
    assert load(store, path) == 10000


def test_none_yet(store):
    assert store.newest() == (None, [])


def test_only_the_newest_are_kept(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for step in (99, 100, 1000, 999_999, 1_000_000):
        save(store, step)
    assert steps(store) == ["step_1000000", "step_999999"]


def test_a_broken_one_with_a_higher_number_costs_no_good_one(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    flip("__0_0.distcp")(save(store, 1000))
    save(store, 10)
    assert store.newest()[0].name == "step_000010"


def test_a_checkpoint_is_written_again_after_going_back(store):
    save(store, 1, 1)
    save(store, 1, 2)
    assert load(store, store.newest()[0]) == 2
    assert steps(store) == ["step_000001"]


def flip(name):
    def damage(path):
        data = bytearray((path / name).read_bytes())
        data[len(data) // 2] ^= 1
        (path / name).write_bytes(data)

    return damage


def truncate(path):
    (path / "__0_0.distcp").write_bytes((path / "__0_0.distcp").read_bytes()[:-10])


def lose(name):
    return lambda path: (path / name).unlink()


def tear_manifest(path):
    (path / "manifest.json").write_text('{"files": {"state')


def strange_manifest(path):
    (path / "manifest.json").write_text(json.dumps({"files": ["__0_0.distcp"]}))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (flip("__0_0.distcp"), "the checksum of __0_0.distcp is wrong"),
        (flip(".metadata"), "the checksum of .metadata is wrong"),
        (flip("trainer.pt"), "the checksum of trainer.pt is wrong"),
        (truncate, "the checksum of __0_0.distcp is wrong"),
        (lose("__0_0.distcp"), "__0_0.distcp is missing"),
        (lose(".metadata"), ".metadata is missing"),
        (lose("manifest.json"), "manifest.json is missing"),
        (tear_manifest, "its manifest cannot be read"),
        (strange_manifest, "its manifest cannot be read"),
    ],
)
def test_a_broken_one_is_left_out_and_named(store, damage, told):
    save(store, 1)
    damage(save(store, 2))
    path, broken = store.newest()
    assert path.name == "step_000001"
    assert len(broken) == 1 and broken[0].startswith("checkpoint step_000002 is left out") and told in broken[0]


def test_what_lies_about_is_not_a_checkpoint(store):
    save(store, 1)
    (store.directory / ".step_000002.tmp").mkdir()
    (store.directory / "step_latest").mkdir()
    assert store.newest()[0].name == "step_000001"


def test_a_leftover_of_a_torn_save_is_overwritten(store):
    leftover = store.directory / ".claim-0000" / "step_000002"
    leftover.mkdir(parents=True)
    (leftover / "half").write_text("x")
    (leftover / ".metadata").write_text("x")
    path = save(store, 2)
    assert sorted(file.name for file in path.iterdir()) == FILES
    assert steps(store) == ["step_000002"]


class Evil:
    def __reduce__(self):
        return (print, ("code ran",))


def test_loading_runs_no_code(store, capsys):
    path = save(store, 1)
    torch.save({"model": Evil()}, path / "trainer.pt")
    (path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match="step_000001 cannot be read"):
        store.extra(path)
    with pytest.raises(CheckpointError, match="step_000001 cannot be read: builtins.print"):
        store.outline(path)
    with pytest.raises(CheckpointError, match="step_000001 cannot be loaded"):
        load(store, path)
    assert "code ran" not in capsys.readouterr().out


def test_what_could_not_be_read_back_is_not_written(store):
    with pytest.raises(CheckpointError, match=r"state of the trainer or of a callback holds .*print"):
        save(store, 1, callbacks={"evil": Evil()})
    assert store.newest() == (None, [])


def test_a_missing_name_and_another_size_are_told(store):
    path = save(store, 1)
    with pytest.raises(CheckpointError, match="step_000001 cannot be loaded: .*model.bias"):
        store.load(path, {"model.bias": torch.empty(3)})
    with pytest.raises(CheckpointError, match="cannot be loaded: .*Size mismatch"):
        store.load(path, {"model.weight": torch.empty(3)})


def test_a_save_that_fails_is_told_and_leaves_nothing_under_its_name(store):
    store.directory.write_text("a file, where a directory should be")
    with pytest.raises(CheckpointError, match="checkpoint step_000001 cannot be written: .*checkpoints"):
        save(store, 1)


@pytest.fixture
def gate(monkeypatch):
    """Lets writing begin when it is set."""
    event, pack = threading.Event(), checkpoint._packed

    def pack_then(extra):
        assert event.wait(20)
        return pack(extra)

    monkeypatch.setattr(checkpoint, "_packed", pack_then)
    yield event
    event.set()


def test_the_background_writes_what_was_there_when_it_was_told(tmp_path, gate):
    store = CheckpointStore(tmp_path / "background", background=True)
    weight, extra = torch.arange(1000.0), {"callbacks": {"seen": [1]}, "random": torch.arange(3)}
    path = store.save(1, {"model.weight": weight}, extra)
    weight.zero_()
    extra["callbacks"]["seen"].append(2)
    extra["random"].zero_()
    assert store.newest() == (None, [])
    gate.set()
    assert store.wait() == path == store.newest()[0]
    before = CheckpointStore(tmp_path / "foreground")
    again = before.save(
        1, {"model.weight": torch.arange(1000.0)}, {"callbacks": {"seen": [1]}, "random": torch.arange(3)}
    )
    for name in ("__0_0.distcp", "trainer.pt"):  # .metadata has an identifier of the save
        assert (path / name).read_bytes() == (again / name).read_bytes()


def test_a_save_waits_for_the_one_before(tmp_path, gate):
    store = CheckpointStore(tmp_path, background=True)
    save(store, 1, 1)
    threading.Timer(0.3, gate.set).start()
    save(store, 2, 2)
    assert steps(store)[-1] == "step_000001"
    store.wait()
    assert [load(store, tmp_path / f"step_00000{step}") for step in (1, 2)] == [1, 2]


def test_the_room_for_copies_is_used_again(tmp_path):
    store = CheckpointStore(tmp_path, background=True)
    tensors = {"a": torch.ones(3), "b": torch.ones(2)}
    store.save(1, tensors, {})
    store.wait()
    before = {name: buffer.data_ptr() for name, buffer in store._staging._buffers.items()}
    store.save(2, {**tensors, "b": torch.ones(4), "c": torch.ones(1)}, {})
    store.wait()
    after = {name: buffer.data_ptr() for name, buffer in store._staging._buffers.items()}
    assert after["a"] == before["a"] and after.keys() == {"a", "b", "c"}
    assert store.sizes(tmp_path / "step_000002")["b"] == torch.Size([4])


def test_a_failure_in_the_background_is_raised_by_wait_once(tmp_path):
    store = CheckpointStore(tmp_path / "file", background=True)
    store.directory.write_text("x")
    save(store, 1)
    with pytest.raises(CheckpointError, match="step_000001 cannot be written"):
        store.wait()
    assert store.wait() is None


def test_a_failure_in_the_background_is_raised_by_the_next_save(tmp_path):
    store = CheckpointStore(tmp_path / "file", background=True)
    store.directory.write_text("x")
    save(store, 1)
    with pytest.raises(CheckpointError, match="step_000001 cannot be written"):
        save(store, 2)


def test_an_attempt_that_is_superseded_publishes_nothing(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", fence=claim(tmp_path))
    save(store, 1)
    newer = CheckpointStore(tmp_path / "checkpoints", fence=claim(tmp_path))
    with pytest.raises(CheckpointError, match="step_000002 cannot be written: .* has gone on with this run"):
        save(store, 2)
    save(newer, 2, 5)
    assert load(newer, newer.directory / "step_000002") == 5


def test_nor_does_one_that_is_about_to(tmp_path, monkeypatch):
    """The newer attempt comes between the look at the fence and the renaming."""
    fence = claim(tmp_path)
    store = CheckpointStore(tmp_path / "checkpoints", fence=fence)
    monkeypatch.setattr(checkpoint.Fence, "check", lambda _: remove_staged(store.directory))
    with pytest.raises(CheckpointError, match="step_000001 cannot be written: .*No such file"):
        save(store, 1)
    assert steps(store) == []


def test_one_that_dies_while_it_writes_a_checkpoint_again_leaves_the_one_before(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path)
    save(store, 1, 5)
    monkeypatch.setattr(checkpoint, "_sync", lambda path: None)
    rename = checkpoint.Path.rename

    def dying(path, target):
        if target.name == "step_000001":
            raise OSError("gone")
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.Path, "rename", dying)
        with pytest.raises(CheckpointError, match="gone"):
            save(store, 1, 6)
    assert steps(store) == [".claim-0000"]
    remove_staged(tmp_path)
    assert steps(store) == ["step_000001"]
    assert load(store, store.newest()[0]) == 5


LOSSES = {10: 3.0, 20: 1.0, 25: 0.5, 30: float("nan"), 40: 2.0, 50: 2.5, 60: None}


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        (Keep(), [10, 20, 25, 30, 40, 50, 60]),
        (Keep(2), [50, 60]),
        (Keep(1, every=20), [20, 40, 60]),
        (Keep(1, best=2), [20, 25, 60]),
        (Keep(1, best=9), [10, 20, 25, 40, 50, 60]),
        (Keep(1, best=1, metric="val_accuracy"), [60]),
    ],
)
def test_which_checkpoints_stay(tmp_path, keep, kept):
    store = CheckpointStore(tmp_path)
    for step, loss in LOSSES.items():
        store.save(step, {"model.a": torch.ones(1)}, {}, {} if loss is None else {"val_loss": loss})
    store = CheckpointStore(tmp_path, keep=keep)
    store.save(60, {"model.a": torch.ones(1)}, {})
    assert steps(store) == [f"step_{step:06d}" for step in kept]


def test_of_accuracies_the_highest_is_best(tmp_path):
    store = CheckpointStore(tmp_path, keep=Keep(1, best=1, metric="val_accuracy"))
    for step, accuracy in ((1, 0.5), (2, 0.9), (3, 0.7), (4, 0.8)):
        store.save(step, {"model.a": torch.ones(1)}, {}, {"val_accuracy": accuracy, "val_loss": 1.0})
    assert steps(store) == ["step_000002", "step_000004"]


def test_a_manifest_that_names_other_files_is_broken(store):
    path = save(store, 1)
    (store.directory / "outside").write_text("x")
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["../outside"] = "0"
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert store.newest() == (
        None,
        ["checkpoint step_000001 is left out: its manifest names ../outside, which lies elsewhere"],
    )


def test_it_tells_when_it_is_there(tmp_path):
    for background in (False, True):
        told = []
        store = CheckpointStore(tmp_path / str(background), background=background)

        def published(path, told=told):
            told.append((path, path.is_dir()))

        path = store.save(1, {"model.a": torch.ones(1)}, {}, {}, published)
        store.wait()
        assert told == [(path, True)]

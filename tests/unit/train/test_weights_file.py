"""Initial weights from files: read lazily, without running code, and refused in one line."""

import pytest
import torch
from safetensors.torch import save_file

from slurm_train.errors import UserError
from slurm_train.train.weights_file import check_weights, read_weights

WEIGHTS = {"embed.weight": torch.arange(6.0).reshape(3, 2), "scale": torch.tensor(2.0, dtype=torch.bfloat16)}
SHAPES = {"embed.weight": torch.Size([3, 2]), "scale": torch.Size([])}


def safe(path):
    save_file(WEIGHTS, path)


def flat(path):
    torch.save({**WEIGHTS, "format": 3}, path)


def under_model(path):
    torch.save({"model": WEIGHTS, "step": 3}, path)


def under_state_dict(path):
    torch.save({"state_dict": WEIGHTS}, path)


def legacy(path):
    torch.save(WEIGHTS, path, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (safe, "w.safetensors"),
        (flat, "w.pt"),
        (under_model, "w.pth"),
        (under_state_dict, "w.ckpt"),
        (legacy, "w.bin"),
    ],
)
def test_shapes_and_tensors(tmp_path, write, name):
    write(tmp_path / name)
    file = read_weights(tmp_path / name)
    assert file.shapes == SHAPES
    assert all(
        torch.equal(file.get(key), value) and file.get(key).dtype == value.dtype for key, value in WEIGHTS.items()
    )
    check_weights(file, SHAPES)


def test_what_was_got_can_be_copied_and_the_file_stays(tmp_path):
    flat(tmp_path / "w.pt")
    before = (tmp_path / "w.pt").read_bytes()
    read_weights(tmp_path / "w.pt").get("embed.weight").clone().zero_()
    assert (tmp_path / "w.pt").read_bytes() == before


class Evil:
    def __reduce__(self):
        return (print, ("code ran",))


def evil(path):
    torch.save({"embed.weight": Evil()}, path)


def torn(path):
    safe(path)
    path.write_bytes(path.read_bytes()[:-3])


def text(path):
    path.write_text("weights\n")


def no_tensors(path):
    torch.save({"step": 3}, path)


def a_list(path):
    torch.save([torch.ones(2)], path)


@pytest.mark.parametrize(
    ("write", "name", "told"),
    [
        (lambda path: None, "w.safetensors", "does not exist"),
        (lambda path: None, "w.pt", "does not exist"),
        (lambda path: path.mkdir(), "run", "cannot be read: .*exported by"),
        (torn, "w.safetensors", "cannot be read: "),
        (text, "w.pt", "cannot be read: "),
        (evil, "w.pt", "cannot be read: "),
        (no_tensors, "w.pt", "holds no tensors"),
        (a_list, "w.pt", "holds no tensors"),
    ],
)
def test_a_bad_file_is_told_in_one_line(tmp_path, capsys, write, name, told):
    write(tmp_path / name)
    with pytest.raises(UserError, match=rf"^model.init_from: .*{name} {told}") as caught:
        read_weights(tmp_path / name)
    assert "\n" not in str(caught.value)
    assert "code ran" not in capsys.readouterr().out


def test_weights_of_another_model_are_told_in_one_line(tmp_path):
    safe(tmp_path / "w.safetensors")
    shapes = {"embed.weight": torch.Size([4, 2]), "head.weight": torch.Size([1])}
    with pytest.raises(UserError) as caught:
        check_weights(read_weights(tmp_path / "w.safetensors"), shapes, key="model.start")
    assert str(caught.value).startswith(
        f"model.start: {tmp_path}/w.safetensors is of another model: missing head.weight; not in this model: scale; "
        "other shapes: embed.weight is [3, 2] in it and [4, 2] here; "
    )


def test_a_tied_name_may_be_there_too(tmp_path):
    torch.save({**WEIGHTS, "head.weight": WEIGHTS["embed.weight"]}, tmp_path / "w.pt")
    file = read_weights(tmp_path / "w.pt")
    check_weights(file, SHAPES, aliases={"head.weight": "embed.weight"})
    with pytest.raises(UserError, match="not in this model: head.weight"):
        check_weights(file, SHAPES)
    with pytest.raises(UserError, match=r"head.weight is \[3, 2\] in it and \[\] here"):
        check_weights(file, SHAPES, aliases={"head.weight": "scale"})


def test_a_tied_name_may_be_missing(tmp_path):
    flat(tmp_path / "w.pt")
    check_weights(read_weights(tmp_path / "w.pt"), SHAPES, aliases={"head.weight": "embed.weight"})

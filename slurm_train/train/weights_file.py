"""Initial weights from a file: .safetensors, or what torch.save wrote; a tensor is read when it is asked for."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from slurm_train.errors import UserError
from slurm_train.train.state import differences

KEY = "model.init_from"
_INSIDE = ("model", "state_dict")


@dataclass(frozen=True)
class WeightsFile:
    """Named tensors in a file."""

    path: Path
    """The file."""

    shapes: Mapping[str, torch.Size]
    """Name -> shape of all that lie in it."""

    get: Callable[[str], Tensor]
    """Reads the whole tensor of a name, onto the CPU. It may be mapped from the file: copy it, do not change it."""


def read_weights(path: str | Path, key: str = KEY) -> WeightsFile:
    """Open a file of weights. Of its tensors only names and shapes are read; no code in it is run.

    Args:
        path: .safetensors, or else a state dict written by torch.save, which may lie under "model" or "state_dict".
        key: the config key that named it, for errors.

    Raises:
        UserError: the file is missing or cannot be read, or holds no tensors.
    """
    path = Path(path)
    read = _read_safetensors if path.suffix == ".safetensors" else _read_torch
    try:
        file = read(path)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist", key) from None
    except Exception as error:  # whatever a strange file makes of unpickling
        raise UserError(f"{path} cannot be read: {_first_line(error)}", key, _remedy(path)) from None
    if not file.shapes:
        raise UserError(f"{path} holds no tensors", key, _remedy(path))
    return file


def check_weights(
    file: WeightsFile,
    shapes: Mapping[str, torch.Size],
    key: str = KEY,
    aliases: Mapping[str, str] | None = None,
) -> None:
    """Refuse a file whose tensors are not those of the model; not collective.

    Args:
        file: the file.
        shapes: names and whole shapes of the parameters, and of the persistent buffers, of the whole model.
        key: the config key that named the file.
        aliases: further names of tied parameters -> the name in `shapes`; the file may have them too.

    Raises:
        UserError: what is missing, too much or of another shape, in one line.
    """
    wanted = dict(shapes)
    wanted.update({alias: shapes[name] for alias, name in (aliases or {}).items() if alias in file.shapes})
    if found := differences(file.shapes, wanted):
        raise UserError(f"{file.path} is of another model: {found}", key, "name the weights of this very model")


def _read_safetensors(path: Path) -> WeightsFile:
    file = safe_open(path, framework="pt")  # stays open as long as its tensors are wanted
    shapes = {name: torch.Size(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return WeightsFile(path, shapes, file.get_tensor)


def _read_torch(path: Path) -> WeightsFile:
    content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    for inside in _INSIDE:
        if isinstance(content, dict) and isinstance(content.get(inside), dict):
            content = content[inside]
    entries = content.items() if isinstance(content, dict) else ()
    tensors = {name: value for name, value in entries if isinstance(name, str) and isinstance(value, Tensor)}
    return WeightsFile(path, {name: tensor.shape for name, tensor in tensors.items()}, tensors.__getitem__)


def _remedy(path: Path) -> str:
    if path.is_dir():
        return "name a file; weights of a run are exported by: python -m slurm_train export RUN FILE"
    return "name a .safetensors file, or a state dict written by torch.save"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__

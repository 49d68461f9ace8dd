"""A user's working directory with files of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

MY_FILE = """
import torch
import no_such_module_at_all
from torch import nn


class MyNet(nn.Module):
    def __init__(self, width: int, depth: int = 2) -> None:
        super().__init__()
"""

FILES = {
    "my_file.py": MY_FILE,
    "broken.py": "def f(:\n",
    "mine/in_configs.py": "def make(size):\n    pass\n",
    "mine/model/mine.yaml": "_target_: my_file.MyNet\nwidth: 8\n",
    "mine/train/long.yaml": "epochs: 100\n",
    "mine/train/bad.yaml": "epochs: 9\nbatchsize: 3\n",
    "mine/ablation/small.yaml": "# @package _global_\ntrain:\n  batch_size: 8\n",
    "mine/experiment/mine.yaml": (
        "# @package _global_\ndefaults:\n  - override /model: mine\n  - override /optim: sgd\n"
        "  - override /data: fashion_mnist\n  - override /parallel: ddp\n  - override /train: long\n"
        "  - override /launcher: local\nrun: {experiment: mine}\n"
    ),
    "mine/experiment/inline.yaml": "# @package _global_\nmodel:\n  _target_: my_file.MyNet\n  width: 9\n",
    "mine/experiment/arguments.yaml": "# @package _global_\nmodel: {width: 9}\n",
    "mine/experiment/inherit.yaml": "# @package _global_\ndefaults:\n  - fmnist_cnn\n  - _self_\ntrain: {epochs: 7}\n",
}


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory; its config directory is `mine`."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path

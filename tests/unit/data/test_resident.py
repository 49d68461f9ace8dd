from __future__ import annotations

import pytest
import torch

from slurm_train.data.resident import TensorData
from slurm_train.errors import DataError


def test_items_are_floats_and_leave_the_data_alone() -> None:
    inputs = torch.arange(8.0).view(4, 2)
    data = TensorData(inputs, torch.arange(4), scale=2.0, shift=1.0)
    assert data[3][0].tolist() == [13.0, 15.0] and data[3][1] == 3
    assert data.to_float(inputs).sum() == 64 and inputs.sum() == 28
    assert len(list(data)) == len(data) == 4


def test_without_a_scale_inputs_keep_their_type() -> None:
    data = TensorData(torch.arange(4), torch.arange(4))
    assert data[2][0].dtype == torch.int64
    assert data.gather(torch.tensor([3, 1]))[0].tolist() == [3, 1]


def test_subset_of_a_subset_shares_the_memory() -> None:
    data = TensorData(torch.arange(10, dtype=torch.uint8).view(10, 1), torch.arange(10), scale=1.0, source="here")
    part = data.subset(torch.tensor([9, 7, 5])).subset(torch.tensor([2, 0]))
    assert [(float(x), int(y)) for x, y in part] == [(5.0, 5), (9.0, 9)]
    raw, targets = part.gather(torch.tensor([1, 0, 1]))
    assert raw.shape == (3, 1) and raw.dtype == torch.uint8
    assert raw.flatten().tolist() == targets.tolist() == [9, 5, 9]
    assert part.inputs.data_ptr() == data.inputs.data_ptr() and part.source == "here"


def test_counts_differ() -> None:
    with pytest.raises(DataError, match="there are 3 inputs but 2 targets"):
        TensorData(torch.zeros(3), torch.zeros(2))

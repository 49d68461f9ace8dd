"""How a data rank's share of the batch is cut for a pipeline."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_train.errors import UserError
from slurm_train.topology.microbatches import microbatches


@pytest.mark.parametrize(
    ("share", "pp", "asked", "micro_batch", "interleaved", "expected"),
    [
        (64, 4, None, None, False, 8),  # twice the ranks
        (12, 4, None, None, False, 6),  # the largest divisor of 12 up to 8
        (64, 3, None, None, False, 4),
        (6, 4, None, None, False, 6),
        (22, 3, None, None, False, 11),  # none up to 6
        (12, 4, None, None, True, 4),  # 6 is no multiple of 4
        (64, 4, 32, None, False, 32),
        (64, 4, None, 2, False, 32),
        (64, 4, 32, 2, False, 32),
        (12, 3, 6, None, True, 6),
    ],
)
def test_the_number(share, pp, asked, micro_batch, interleaved, expected):
    assert microbatches(share, pp, asked, micro_batch, interleaved) == expected


@pytest.mark.parametrize(
    ("share", "pp", "asked", "micro_batch", "interleaved", "told"),
    [
        (64, 4, 6, None, False, "parallel.microbatches=6: the 64 samples of a data rank take a number that divides"),
        (64, 4, 6, None, False, "use 4 or 8"),
        (64, 4, 2, None, False, "use 4"),
        (12, 4, 6, None, True, "at least 4 and a multiple of 4; use 4 or 12"),
        (64, 4, None, 5, False, "train.micro_batch=5: does not cut the 64 samples"),
        (64, 4, None, 5, False, "use 4 or 8"),
        (64, 4, None, 32, False, "use 16"),
        (64, 4, 8, 4, False, "parallel.microbatches=8: times train.micro_batch=4 is not the 64 samples"),
        (3, 4, None, None, False, "train.batch_size=3: the 3 samples of a data rank make no micro-batches"),
        (3, 4, None, None, False, "at least 4; use 4"),
        (10, 4, None, None, True, "and a multiple of 4; use 8 or 12"),
    ],
)
def test_what_does_not_fit(share, pp, asked, micro_batch, interleaved, told):
    with pytest.raises(UserError) as caught:
        microbatches(share, pp, asked, micro_batch, interleaved)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("share", "pp", "interleaved", "told"),
    [
        (1, 2, False, "train.batch_size=2: the 1 samples of a data rank"),
        (1, 2, False, "use 4"),
        (5, 2, True, "8 or 12"),
    ],
)
def test_a_fault_names_the_global_batch(share, pp, interleaved, told):
    with pytest.raises(UserError) as caught:
        microbatches(share, pp, None, None, interleaved, data_ranks=2)
    assert told in str(caught.value)


@given(st.integers(1, 200), st.integers(1, 8), st.booleans())
def test_the_default_fits_wherever_a_number_does(share, pp, interleaved):
    fits = share % pp == 0 if interleaved else share >= pp
    if not fits:
        with pytest.raises(UserError):
            microbatches(share, pp, None, None, interleaved)
        return
    count = microbatches(share, pp, None, None, interleaved)
    assert share % count == 0 and count >= pp and (not interleaved or count % pp == 0)

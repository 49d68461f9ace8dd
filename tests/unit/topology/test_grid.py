"""The arithmetic of the device mesh."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_train.errors import GridError
from slurm_train.topology.grid import AXES, Grid, required_ranks, solve


@pytest.mark.parametrize(
    ("world", "sizes", "expected"),
    [
        (1, {}, (1, 1, 1, 1)),
        (8, {"dp_replicate": -1}, (1, 8, 1, 1)),
        (8, {"tp": -1}, (1, 1, 1, 8)),
        (8, {"dp_replicate": -1, "tp": 2}, (1, 4, 1, 2)),
        (16, {"pp": 2, "dp_replicate": 2, "dp_shard": -1, "tp": 2}, (2, 2, 2, 2)),
        (2, {"dp_replicate": -1, "tp": 2}, (1, 1, 1, 2)),
    ],
)
def test_the_rest(world, sizes, expected):
    assert tuple(solve(world, **sizes).axes().values()) == expected


@pytest.mark.parametrize(
    ("world", "sizes", "told"),
    [
        (4, {"tp": 2}, "parallel.tp=2: needs 2 ranks, but there are 4 ranks; start 2 ranks"),
        (4, {"dp_replicate": 2, "tp": 4}, "dp_replicate=2 x tp=4 = 8, but there are 4 ranks"),
        (6, {"dp_replicate": -1, "tp": 4}, "the fixed axes take 4 ranks, which does not divide the world of 6"),
        (6, {"dp_replicate": -1, "tp": 4}, "start 4 or 8 ranks"),
        (3, {"dp_shard": -1, "pp": 2, "tp": 2}, "pp=2 x dp_shard=-1 x tp=2: the fixed axes take 4 ranks"),
        (3, {"dp_shard": -1, "pp": 2, "tp": 2}, "start 4 ranks"),
        (6, {"dp_replicate": -1, "tp": 4}, "launcher.tasks_per_node), or take divisors of 6"),
        (3, {"pp": 2}, "parallel.pp=2: needs 2 ranks, but there are 3 ranks"),
        (4, {"dp_replicate": -1, "tp": -1}, "dp_replicate and tp are both -1"),
        (4, {"tp": 0}, "parallel.tp: 0 is no size"),
        (4, {"pp": -2}, "parallel.pp: -2 is no size"),
        (2, {}, "needs 1 rank, but there are 2 ranks; start 1 rank"),
    ],
)
def test_what_does_not_fit(world, sizes, told):
    with pytest.raises(GridError) as caught:
        solve(world, **sizes)
    assert told in str(caught.value)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_too_few_ranks_have_no_divisors_to_take(world):
    with pytest.raises(GridError) as caught:
        solve(world, pp=2, dp_shard=-1, tp=2)
    assert str(caught.value).endswith("; start 4 ranks (launcher.nodes x launcher.tasks_per_node)")


SIZES = st.integers(1, 4)


@given(SIZES, SIZES, SIZES, SIZES)
def test_every_rank_has_a_place_of_its_own(pp, dp_replicate, dp_shard, tp):
    grid = Grid(pp, dp_replicate, dp_shard, tp)
    places = [tuple(grid.coordinates(rank).values()) for rank in range(grid.world_size)]
    assert places == sorted(set(places))
    assert {grid.data_rank(rank) for rank in range(grid.world_size)} == set(range(grid.data_ranks))
    for axis in AXES:
        assert solve(grid.world_size, **{**grid.axes(), axis: -1}) == grid


def test_tp_ranks_are_neighbours_and_see_the_same_samples():
    grid = Grid(dp_replicate=2, tp=2)
    assert [grid.data_rank(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert [grid.coordinates(rank)["tp"] for rank in range(4)] == [0, 1, 0, 1]


def test_required_ranks_counts_the_rest_as_one():
    assert required_ranks(dp_replicate=-1, tp=4) == 4

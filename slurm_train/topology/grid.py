"""The device mesh as arithmetic: sizes of the parallel axes, their product, and each rank's coordinates."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import prod

from slurm_train.errors import GridError

AXES = ("pp", "dp_replicate", "dp_shard", "tp")
REST = -1


@dataclass(frozen=True)
class Grid:
    """Sizes of the axes, outermost first; tp varies fastest, so that its ranks are neighbours on one host."""

    pp: int = 1
    """Pipeline stages."""

    dp_replicate: int = 1
    """Data-parallel replicas."""

    dp_shard: int = 1
    """Ranks over which one replica's parameters are sharded."""

    tp: int = 1
    """Tensor-parallel ranks."""

    def axes(self) -> dict[str, int]:
        """Axis -> size, outermost first."""
        return asdict(self)

    @property
    def world_size(self) -> int:
        """Number of ranks: the product of the axes."""
        return prod(self.axes().values())

    @property
    def data_ranks(self) -> int:
        """Number of ranks that see different samples."""
        return self.dp_replicate * self.dp_shard

    def coordinates(self, rank: int) -> dict[str, int]:
        """Axis -> this rank's place on it."""
        places = {}
        for axis, size in reversed(self.axes().items()):
            rank, places[axis] = divmod(rank, size)
        return {axis: places[axis] for axis in AXES}

    def data_rank(self, rank: int) -> int:
        """Which share of each global batch this rank sees."""
        places = self.coordinates(rank)
        return places["dp_replicate"] * self.dp_shard + places["dp_shard"]


def required_ranks(pp: int = 1, dp_replicate: int = 1, dp_shard: int = 1, tp: int = 1) -> int:
    """Ranks that the fixed axes need; an axis of -1 counts as 1."""
    return prod(size for size in (pp, dp_replicate, dp_shard, tp) if size != REST)


def solve(world_size: int, *, pp: int = 1, dp_replicate: int = 1, dp_shard: int = 1, tp: int = 1) -> Grid:
    """The grid that fills `world_size` ranks; one axis may be -1, which takes the rest.

    Raises:
        GridError: an axis is neither positive nor -1, two are -1, or the product is not the world size; the message
            shows the factors, the product and the world size.
    """
    sizes = dict(zip(AXES, (pp, dp_replicate, dp_shard, tp), strict=True))
    for axis, size in sizes.items():
        if size < 1 and size != REST:
            raise GridError(
                f"{size} is no size of an axis", f"parallel.{axis}", "give a positive number, or -1 for the rest"
            )
    open_axes = [axis for axis, size in sizes.items() if size == REST]
    if len(open_axes) > 1:
        raise GridError(f"{' and '.join(open_axes)} are both -1", "parallel", "only one axis can take the rest")
    fixed = required_ranks(**sizes)
    factors = [f"{axis}={size}" for axis, size in sizes.items() if size != 1]
    shown = " x ".join(factors) or "1"
    if open_axes:
        if world_size % fixed:
            below = world_size // fixed * fixed
            near = f"{below} or {below + fixed}" if below else f"{fixed}"
            smaller = f", or take divisors of {world_size}" if below else ""
            largest = _largest(sizes)
            raise GridError(
                f"{shown}: the fixed axes take {fixed} ranks, which does not divide the world of {world_size}",
                f"parallel.{largest}={sizes[largest]}",
                f"start {near} ranks (launcher.nodes x launcher.tasks_per_node){smaller}",
            )
        sizes[open_axes[0]] = world_size // fixed
    elif fixed != world_size:
        largest = _largest(sizes)
        needs = f"{shown} = {fixed}" if len(factors) > 1 else f"needs {_ranks(fixed)}"
        raise GridError(
            f"{needs}, but there {'is' if world_size == 1 else 'are'} {_ranks(world_size)}",
            f"parallel.{largest}={sizes[largest]}",
            f"start {_ranks(fixed)} (launcher.nodes x launcher.tasks_per_node), or set one axis to -1, the rest",
        )
    return Grid(**sizes)


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count != 1)}"


def _largest(sizes: dict[str, int]) -> str:
    """The axis to name in an error: the largest, which the user most likely set."""
    return max(sizes, key=lambda axis: sizes[axis]) if max(sizes.values()) > 1 else "dp_replicate"

"""The world helper itself: results, shared worlds, raising, dying and hanging ranks, no process left over."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.integration.worlds import World, WorldError, Worlds

ROOT = Path(__file__).parents[2]
WorldOf = Callable[[int], World]


def sum_over_ranks(offset: float) -> float:
    total = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(total)
    return total.item()


def pid() -> int:
    return os.getpid()


def a_tensor() -> torch.Tensor:
    return torch.full((2,), float(dist.get_rank()))


def variables() -> dict[str, str]:
    return dict(os.environ)


def raise_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the second rank does not like it")
    dist.barrier()


def die_on_rank_zero() -> None:
    if dist.get_rank() == 0:
        os._exit(7)


def hang_on_rank_one() -> None:
    if dist.get_rank() == 1:
        time.sleep(600)


def unpicklable() -> object:
    return lambda: None


def alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{process_id}/stat")
    return not (status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z")


def wait_for_death(process_ids: list[int]) -> bool:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if not any(map(alive, process_ids)):
            return True
        time.sleep(0.05)
    return False


def test_ranks_talk_to_each_other(world: WorldOf) -> None:
    assert world(2).run(sum_over_ranks, 0.5) == [2.0, 2.0]


def test_the_world_is_shared(world: WorldOf) -> None:
    first, second = world(2).run(pid), world(2).run(pid)
    assert first == second == world(2).pids
    assert len(set(first)) == 2


def test_tensors_come_back_by_value(world: WorldOf) -> None:
    results = world(2).run(a_tensor)
    assert [result.tolist() for result in results] == [[0.0, 0.0], [1.0, 1.0]]


def test_ranks_see_no_job(world: WorldOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_PROCID", "3")
    with Worlds() as worlds:
        (environment,) = worlds.get(1).run(variables)
    assert "SLURM_PROCID" not in environment


@pytest.mark.parametrize(
    ("function", "rank", "told"),
    [
        (raise_on_rank_one, 1, "the second rank does not like it"),
        (die_on_rank_zero, 0, "exit code 7"),
        (hang_on_rank_one, 1, "no answer within 3 s"),
        (unpicklable, 0, "pickle"),
    ],
)
def test_failure_is_told_and_the_next_call_gets_a_new_world(
    world: WorldOf, function: Callable[[], None], rank: int, told: str
) -> None:
    before = world(2).run(pid)
    with pytest.raises(WorldError) as caught:
        world(2).run(function, timeout=3 if function is hang_on_rank_one else 60)
    assert told in caught.value.failures[rank]
    assert f"rank {rank}: " in str(caught.value)
    assert wait_for_death(before)
    assert world(2).run(sum_over_ranks, 0.0) == [1.0, 1.0]


def test_no_rank_outlives_its_world() -> None:
    with Worlds() as worlds:
        ranks = worlds.get(2).run(pid)
    assert wait_for_death(ranks)


def test_no_rank_outlives_a_killed_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, signal, sys
            from tests.integration.test_worlds import pid
            from tests.integration.worlds import World

            if __name__ == "__main__":
                print(*World(2).run(pid), flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            """
        )
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script)]
    parent = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=120)
    assert wait_for_death([int(word) for word in parent.stdout.split()])
    assert len(parent.stdout.split()) == 2

"""How fast the pure functions are that every process of a large job calls at its start.

    python benchmarks/topology.py

Prints the best of many runs in milliseconds for a job of 10,000 nodes; a node list should expand in under 10 ms.
"""

from __future__ import annotations

from timeit import repeat

from slurm_train.topology.hostlist import compress, expand
from slurm_train.topology.ranks import ranks
from slurm_train.topology.rendezvous import rendezvous

NODES = 10_000
LISTS = {
    "one range": "n[00001-10000]",
    "two brackets in a name": "rack[01-10]n[0001-1000]",
    "1,000 ranges of ten": ",".join(f"rack{rack}n[01-10]" for rack in range(1000)),
    "every other number": f"n[{','.join(map(str, range(1, 2 * NODES, 2)))}]",
    "names without brackets": ",".join(f"n{number:05}" for number in range(NODES)),
}


def environment(nodes: str) -> dict[str, str]:
    """The environment of the last task of a Slurm step with eight tasks on each node."""
    return {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_NUM_TASKS": str(8 * NODES),
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_TASKS_PER_NODE": f"8(x{NODES})",
        "SLURM_PROCID": str(8 * NODES - 1),
        "SLURM_LOCALID": "7",
        "SLURM_NODEID": str(NODES - 1),
    }


def main() -> None:
    """Prints one line a list: expand, compress, and the whole way from environment to meeting point."""
    print(f"{'milliseconds':<24}{'expand':>8}{'compress':>10}{'ranks + rendezvous':>20}")
    for name, nodes in LISTS.items():
        names, env = expand(nodes), environment(nodes)
        steps = (lambda: expand(nodes), lambda: compress(names), lambda: rendezvous(env, ranks(env)))  # noqa: B023
        best = [1000 * min(repeat(step, number=1, repeat=30)) for step in steps]
        print(f"{name:<24}{best[0]:>8.1f}{best[1]:>10.1f}{best[2]:>20.1f}")


if __name__ == "__main__":
    main()

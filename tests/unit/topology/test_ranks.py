"""Rank mapping on environments recorded from a real Slurm, and on any mapping whatever."""

import json
import re
from contextlib import suppress
from inspect import getsource
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_train.errors import RankError
from slurm_train.topology import ranks as rank_rules
from slurm_train.topology import rendezvous as rendezvous_rules
from slurm_train.topology.hostlist import expand
from slurm_train.topology.ranks import SINGLE, ranks, require_world, started_as_rank
from slurm_train.topology.rendezvous import rendezvous

RECORDED = Path(__file__).parents[2] / "recorded"


def recorded(name):
    return json.loads((RECORDED / f"{name}.json").read_text())["environments"]


# name: launcher, hosts in node order, ranks per node
WORLDS = {
    "full_step": ("slurm", "n1 n2", [2, 2]),
    "smaller_step": ("slurm", "n2 n3", [1, 1]),
    "uneven_tasks": ("slurm", "n1 n2 n3 n4", [5, 1, 1, 1]),
    "cyclic_tasks": ("slurm", "n1 n2", [2, 2]),
    "arbitrary_tasks": ("slurm", "n1 n3", [1, 2]),
    "gpus_per_task": ("slurm", "n1 n2", [2, 2]),
    "gpus_per_node": ("slurm", "n1 n2", [2, 2]),
    "gpu_bind_closest": ("slurm", "n1", [2]),
    "gpu_bind_single": ("slurm", "n1", [2]),
    "salloc_step": ("slurm", "n1 n2", [2, 2]),
    "heterogeneous_job": ("slurm", "n1 n2 n3", [1, 1, 1]),
    "heterogeneous_uneven": ("slurm", "n1 n2 n3", [2, 2, 1]),
    "heterogeneous_batch": ("slurm", "n1 n2 n3", [1, 1, 1]),
    "requeued_job": ("slurm", "n1 n2", [3, 1]),
    "torchrun_in_slurm": ("torchrun", "", [2, 2]),
    "torchrun_alone": ("torchrun", "", [2]),
    "distributed_launch": ("torchrun", "", [2]),
    "local_in_step": ("local", "127.0.0.1", [2]),
}


@pytest.mark.parametrize("name", WORLDS)
def test_the_ranks_of_a_recorded_world(name):
    launcher, hosts, per_node = WORLDS[name]
    infos = [ranks(env) for env in recorded(name)]
    assert sorted(info.rank for info in infos) == list(range(sum(per_node)))
    places = {(info.node_rank, info.local_rank) for info in infos}
    assert places == {(node, local) for node, count in enumerate(per_node) for local in range(count)}
    for info in infos:
        assert info.launcher == launcher
        assert (info.world_size, info.nodes) == (sum(per_node), len(per_node))
        assert info.local_world_size == per_node[info.node_rank]
        assert info.hosts == tuple(hosts.split())
    for env, info in zip(recorded(name), infos, strict=True):
        assert started_as_rank(env)
        require_world(info, env)
        if launcher == "slurm":
            assert info.hosts[info.node_rank] == env["SLURMD_NODENAME"]


def test_array_tasks_are_worlds_of_their_own():
    infos = [ranks(env) for env in recorded("array_task")]
    assert sorted((info.hosts, info.rank) for info in infos) == sorted(
        [(("n1", "n2"), 0), (("n1", "n2"), 1), (("n3", "n4"), 0), (("n3", "n4"), 1)] * 2
    )


@pytest.mark.parametrize(
    "name",
    [
        "batch_shell_one_task",
        "batch_shell_exclusive",
        "salloc_shell",
        "salloc_one_task",
        "interactive_step",
        "srun_pty",
        "one_of_two_per_node",
    ],
)
def test_one_process_is_a_local_shell(name):
    (env,) = recorded(name)
    assert ranks(env).world_size == 1
    assert not started_as_rank(env)
    require_world(ranks(env), env)


@pytest.mark.parametrize(
    ("name", "tasks"),
    [("batch_shell", 4), ("batch_shell_per_node", 4), ("heterogeneous_batch_shell", 3), ("nested_batch_shell", 2)],
)
def test_the_batch_shell_of_several_tasks_is_no_rank(name, tasks):
    (env,) = recorded(name)
    with pytest.raises(RankError, match=rf"batch shell of a job of {tasks} tasks.*start it with srun"):
        ranks(env)


def test_nothing_set():
    info = ranks({})
    assert (info.rank, info.world_size, info.launcher) == (0, 1, "single")


def test_only_a_job_id_is_no_distribution():
    assert ranks({"SLURM_JOB_ID": "5", "SLURM_NNODES": "4", "SLURM_JOB_NODELIST": "n[1-4]"}).world_size == 1


def test_provenance_names_variable_and_value():
    info = ranks(recorded("uneven_tasks")[5])
    assert info.provenance["rank"] == "SLURM_PROCID=5"
    assert info.provenance["local_world_size"] == "SLURM_STEP_TASKS_PER_NODE=5,1(x3)"


TORCHRUN = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # fmt: skip


@pytest.mark.parametrize("missing", TORCHRUN)
def test_a_part_of_torchruns_variables_is_refused(missing):
    env = {name: value for name, value in TORCHRUN.items() if name != missing}
    with pytest.raises(RankError, match=rf"{missing}.*torchrun"):
        ranks(env)


def test_an_address_alone_is_the_users():
    assert ranks({"MASTER_ADDR": "n7", "MASTER_PORT": "29500"}).launcher == "single"
    env = recorded("full_step")[0] | {"MASTER_ADDR": "n7", "MASTER_PORT": "29500"}
    assert ranks(env).launcher == "slurm"


def test_a_pytorchjobs_pod():
    env = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    info = ranks(env)
    assert (info.launcher, info.rank, info.local_rank, info.node_rank, info.nodes) == ("pytorchjob", 1, 0, 1, 2)


def test_an_indexed_job():
    env = {"JOB_COMPLETION_INDEX": "2", "SLURM_TRAIN_WORLD_SIZE": "3", "SLURM_TRAIN_HOSTS": "a-0.a,a-1.a,a-2.a"}
    info = ranks(env)
    assert (info.launcher, info.rank, info.world_size, info.hosts[0]) == ("kubernetes", 2, 3, "a-0.a")
    assert started_as_rank(env)
    assert ranks(env | {"WORLD_SIZE": "3", "SLURM_TRAIN_HOSTS": "a-[0-2].a"}) == info
    with pytest.raises(RankError, match="SLURM_TRAIN_HOSTS: names 2 hosts, but SLURM_TRAIN_WORLD_SIZE=3"):
        ranks(env | {"SLURM_TRAIN_HOSTS": "a-0.a,a-1.a"})


def test_the_number_of_tasks_really_started_wins():
    env = recorded("one_of_two_per_node")[0]
    assert env["SLURM_NTASKS_PER_NODE"] == "2"
    assert ranks(env).world_size == 1


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"SLURM_PROCID": "4"}, "SLURM_PROCID: 4 is not below the world size of 4"),
        ({"SLURM_LOCALID": "2"}, "SLURM_LOCALID: 2 is not below the local world size of 2"),
        ({"SLURM_NODEID": "2"}, "SLURM_NODEID=2, but the step has 2 nodes"),
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID: 'x' is not a number"),
        ({"SLURM_PROCID": "-1"}, "SLURM_PROCID: '-1' is not a number"),
        ({"SLURM_STEP_NUM_TASKS": "5"}, "sum to 4, but SLURM_STEP_NUM_TASKS=5"),
        ({"SLURM_STEP_TASKS_PER_NODE": "4"}, "1 task counts for 2 nodes"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x"}, "SLURM_STEP_TASKS_PER_NODE: malformed"),
        ({"SLURM_STEP_NODELIST": "n[1-"}, "SLURM_STEP_NODELIST: malformed"),
    ],
)
def test_contradictions_are_refused(changes, told):
    with pytest.raises(RankError) as caught:
        ranks(recorded("full_step")[0] | changes)
    assert told in str(caught.value)


def test_several_worlds_of_one_are_refused():
    env = recorded("full_step")[1] | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
                                      "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # fmt: skip
    with pytest.raises(RankError, match=r"one of 4 tasks of a Slurm step.*WORLD_SIZE=1"):
        require_world(ranks(env), env)


def test_a_torchrun_of_one_in_every_task_is_refused_but_not_the_last_of_an_elastic_one():
    env = recorded("torchrun_in_slurm")[0] | {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "1"}
    with pytest.raises(RankError, match=r"one of 2 tasks.*--rdzv-endpoint"):
        require_world(ranks(env), env)
    restarted = env | {"TORCHELASTIC_RESTART_COUNT": "1"}
    require_world(ranks(restarted), restarted)


def test_a_world_forced_to_one_is_refused_in_a_step_of_several_and_nowhere_else():
    with pytest.raises(RankError, match="one of 8 tasks"):
        require_world(SINGLE, recorded("uneven_tasks")[3])
    for name in ("salloc_one_task", "interactive_step", "batch_shell_one_task", "torchrun_alone"):
        require_world(SINGLE, recorded(name)[0])


@pytest.mark.parametrize("nodes", ["n[3-4]", "n[2-3]"])
def test_a_job_of_one_task_submitted_from_a_step_is_a_shell_of_its_own(nodes):
    own = {"SLURM_NTASKS": "1", "SLURM_JOB_NODELIST": nodes, "SLURMD_NODENAME": expand(nodes)[0]}
    env = recorded("nested_batch_shell")[0] | own
    assert env["SLURM_STEP_NUM_TASKS"] == "2"
    assert not started_as_rank(env)
    require_world(ranks(env), env)


def test_tasks_per_node_count_where_the_number_of_tasks_is_not_said():
    env = recorded("batch_shell_per_node")[0]
    without = {name: value for name, value in env.items() if name not in ("SLURM_NTASKS", "SLURM_NPROCS")}
    with pytest.raises(RankError, match="a job of 4 tasks"):
        ranks(without)


# Every variable that the rules read, found in their source so that a new one is tried too.
KEYS = sorted(set(re.findall(r'"([A-Z]+_?[A-Z_]+)"', getsource(rank_rules) + getsource(rendezvous_rules))))
VALUES = st.one_of(
    st.integers(-2, 9).map(str),
    st.sampled_from(["", "local", "n[1-4]", "n1", "2(x2)", "1(x99999999)", "9" * 30, "True", "٣", "n[1-999999999]"]),
    st.sampled_from(["9" * 5000, "n" + "9" * 5000, "\udcff", "n[1,1,1]", "127.0.0.1", "arbitrary"]),
    st.text(max_size=8),
)


@given(
    st.just({}) | st.sampled_from([env for path in sorted(RECORDED.glob("*.json")) for env in recorded(path.stem)]),
    st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=6),
    st.sets(st.sampled_from(KEYS), max_size=6),
)
def test_no_mapping_raises_anything_but_a_rank_error(env, changes, removed):
    env = {key: value for key, value in {**env, **changes}.items() if key not in removed}
    for check in (started_as_rank, lambda env: require_world(SINGLE, env), lambda env: rendezvous(env, ranks(env))):
        with suppress(RankError):
            check(env)
    try:
        info = ranks(env)
    except RankError:
        return
    assert 0 <= info.rank < info.world_size
    assert 0 <= info.local_rank < info.local_world_size <= info.world_size
    assert 0 <= info.node_rank < info.nodes

"""Devices, threads, job identity and time limits: small rules, as tables."""

import json
from pathlib import Path

import pytest

from slurm_train.errors import DeviceError, UserError
from slurm_train.topology.cpus import threads_per_rank
from slurm_train.topology.device import backend, choose_device
from slurm_train.topology.jobs import requeue_count, restart_count, run_identity, scrub
from slurm_train.topology.limits import parse_time
from slurm_train.topology.ranks import ranks

RECORDED = Path(__file__).parents[2] / "recorded"


def recorded(name):
    return json.loads((RECORDED / f"{name}.json").read_text())["environments"]


def visible(env):
    return len(env["CUDA_VISIBLE_DEVICES"].split(","))


def device(requested, cuda=0, mps=False, local_rank=0, local_world=1):
    return choose_device(requested, cuda_devices=cuda, mps=mps, local_rank=local_rank, local_world_size=local_world)


@pytest.mark.parametrize(
    ("arguments", "chosen"),
    [
        (("auto",), "cpu"),
        (("auto", 4, False, 2, 4), "cuda:2"),
        (("auto", 0, True), "mps"),
        (("auto", 0, True, 1, 2), "cpu"),
        (("cpu", 4), "cpu"),
        (("cuda", 1, False, 3, 4), "cuda:0"),
        (("cuda", 8, False, 3, 4), "cuda:3"),
        (("cuda:1", 2), "cuda:1"),
        (("mps", 0, True), "mps"),
    ],
)
def test_device(arguments, chosen):
    assert device(*arguments) == chosen


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("cuda",), "no CUDA device is visible"),
        (("cuda", 2, False, 2, 3), "3 ranks on this host, but 2 CUDA devices visible"),
        (("auto", 2, False, 0, 3), "3 ranks on this host, but 2 CUDA devices"),
        (("cuda:2", 2), "cuda:2 is not visible"),
        (("cuda:0", 2, False, 0, 2), "cannot all use cuda:0"),
        (("mps",), "no MPS device"),
        (("mps", 0, True, 0, 2), "a single rank"),
        (("gpu",), "unknown device 'gpu'"),
        (("cuda:x", 2), "unknown device"),
    ],
)
def test_device_errors(arguments, told):
    with pytest.raises(DeviceError, match=told):
        device(*arguments)


def test_ranks_that_share_one_device_are_refused():
    with pytest.raises(DeviceError, match=r"2 ranks on this host, but 1 CUDA device visible.*train\.device=cpu"):
        choose_device("auto", cuda_devices=1, mps=False, local_rank=1, local_world_size=2, shared=True)
    assert choose_device("auto", cuda_devices=1, mps=False, local_rank=0, local_world_size=1, shared=True) == "cuda:0"


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        ("gpus_per_task", ["cuda:0"] * 4),
        ("gpus_per_node", ["cuda:0", "cuda:1"] * 2),
        ("gpu_bind_single", ["cuda:0"] * 2),
        ("gpu_bind_closest", ["cuda:0", "cuda:1"]),
    ],
)
def test_device_in_recorded_steps(name, chosen):
    found = []
    for env in sorted(recorded(name), key=lambda env: int(env["SLURM_PROCID"])):
        info = ranks(env)
        found.append(device("auto", visible(env), False, info.local_rank, info.local_world_size))
    assert found == chosen


@pytest.mark.parametrize(
    ("env", "affinity", "local_world", "threads"),
    [
        ({}, 8, 1, 8),
        ({}, 8, 3, 2),
        ({}, 2, 4, 1),
        ({"OMP_NUM_THREADS": "3"}, 8, 4, 3),
        ({"OMP_NUM_THREADS": "0"}, 8, 4, 2),
        ({"OMP_NUM_THREADS": "4,2"}, 8, 4, 2),
        ({"SLURM_CPUS_PER_TASK": "2", "SLURM_STEP_ID": "0"}, 8, 4, 2),
        ({"SLURM_CPUS_PER_TASK": "4", "SLURM_STEP_ID": "0"}, 2, 4, 2),
        ({"SLURM_CPUS_PER_TASK": "8", "SLURM_STEP_ID": "0", "LOCAL_RANK": "0"}, 8, 4, 2),
        ({"SLURM_CPUS_PER_TASK": "8", "SLURM_STEP_ID": "0", "SUBMITIT_EXECUTOR": "local"}, 8, 4, 2),
        ({"SLURM_CPUS_PER_TASK": "8"}, 8, 4, 2),
        ({"SLURM_CPUS_ON_NODE": "4", "SLURM_STEP_ID": "0"}, 8, 2, 2),
        ({"SLURM_CPUS_ON_NODE": "16", "SLURM_STEP_ID": "0"}, 8, 2, 4),
        ({"SLURM_CPUS_ON_NODE": "4"}, 8, 2, 4),
    ],
)
def test_threads(env, affinity, local_world, threads):
    assert threads_per_rank(env, affinity=affinity, local_world_size=local_world)[0] == threads


def test_threads_of_a_recorded_step():
    env = recorded("full_step")[0]
    assert threads_per_rank(env, affinity=8, local_world_size=2) == (2, "SLURM_CPUS_PER_TASK=2")


def test_gpus_are_joined_by_nccl_and_the_rest_by_gloo():
    assert [backend(kind) for kind in ("cuda", "cpu", "mps")] == ["cpu:gloo,cuda:nccl", "gloo", "gloo"]


def test_identity_of_recorded_jobs():
    assert {run_identity(env) for env in recorded("array_task")} == {f"job-41_{task}" for task in (3, 4, 5, 6)}
    assert run_identity(recorded("requeued_job")[0]) == f"job-{recorded('requeued_job')[0]['SLURM_JOB_ID']}"
    assert run_identity(recorded("torchrun_in_slurm")[0]) == "elastic-77"
    (shell,) = recorded("batch_shell_one_task")
    assert run_identity(shell) == f"job-{shell['SLURM_JOB_ID']}"
    assert run_identity(recorded("salloc_shell")[0]) is None


@pytest.mark.parametrize(
    ("env", "identity"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "5"}, None),
        ({"TORCHELASTIC_RUN_ID": "none"}, None),
        ({"TORCHELASTIC_RUN_ID": "../a b"}, "elastic-..-a-b"),
    ],
)
def test_identity(env, identity):
    assert run_identity(env) == identity


def test_restarts_are_counted_whoever_restarts():
    assert restart_count({}) == 0
    assert restart_count({"SLURM_RESTART_COUNT": "2", "TORCHELASTIC_RESTART_COUNT": "1"}) == 3
    assert restart_count({"SLURM_RESTART_COUNT": "x"}) == 0
    assert restart_count(recorded("requeued_job")[0]) == 1


def test_scrub_forgets_the_job_and_keeps_the_cluster():
    env = recorded("torchrun_in_slurm")[0] | {"SBATCH_PARTITION": "p", "SRUN_DEBUG": "1", "SUBMITIT_EXECUTOR": "local",
                                              "LOCALE": "C", "RANKING": "x", "PATH": "/bin"}  # fmt: skip
    left = scrub(env)
    assert left["SLURM_CONF"] == env["SLURM_CONF"]
    assert {"LOCALE", "RANKING", "PATH"} < set(left)
    assert not any(name.startswith(("SLURM_", "SBATCH_", "SRUN_", "SUBMITIT_", "TORCHELASTIC_", "GROUP_", "MASTER_"))
                   for name in left if name != "SLURM_CONF")  # fmt: skip
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"} & set(left)
    assert ranks(left).launcher == "single"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("1:30", 90),
        ("01:30:00", 5400),
        ("2-12", 216_000),
        ("2-12:30", 217_800),
        ("1-0:0:5", 86_405),
        ("infinite", None),
        ("UNLIMITED", None),
    ],
)
def test_time(text, seconds):
    assert parse_time(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "0:00", "1h", "1:2:3:4", "1-", "-5", "1.5", "2-12:30:00:00", "90 min"])
def test_what_is_no_time(text):
    with pytest.raises(UserError, match=r"time limit"):
        parse_time(text)


def test_how_often_slurm_has_requeued_a_job() -> None:
    assert [requeue_count({}), requeue_count({"SLURM_RESTART_COUNT": "3", "TORCHELASTIC_RESTART_COUNT": "2"})] == [0, 3]

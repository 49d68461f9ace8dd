"""Where ranks meet: the same for all ranks of one start, others for any other."""

import json
from pathlib import Path

import pytest

from slurm_train.errors import RankError
from slurm_train.topology.ranks import ranks
from slurm_train.topology.rendezvous import PORTS, rendezvous

RECORDED = Path(__file__).parents[2] / "recorded"


def recorded(name):
    return json.loads((RECORDED / f"{name}.json").read_text())["environments"]


def meeting(env):
    return rendezvous(env, ranks(env))


@pytest.mark.parametrize("name", ["full_step", "uneven_tasks", "smaller_step", "heterogeneous_job", "local_in_step"])
def test_all_ranks_agree(name):
    assert len({meeting(env) for env in recorded(name)}) == 1


def test_the_first_host_of_the_step_not_of_the_job():
    assert meeting(recorded("smaller_step")[0]).addresses == ("n2",)


def test_rank_0_is_looked_for_where_the_distribution_is_arbitrary():
    environments = recorded("arbitrary_tasks")
    first = next(env for env in environments if env["SLURM_PROCID"] == "0")
    assert meeting(first).addresses == ("n3",) == (first["SLURMD_NODENAME"],)
    assert {meeting(env).addresses for env in environments if env is not first} == {("n1", "n3")}


def test_array_tasks_and_restarts_have_ports_of_their_own():
    array = {meeting(env).ports for env in recorded("array_task")}
    assert len(array) == 4
    restarted = recorded("requeued_job")[0]
    assert restarted["SLURM_RESTART_COUNT"] == "1"
    before = {key: value for key, value in restarted.items() if key != "SLURM_RESTART_COUNT"}
    assert meeting(before).ports != meeting(restarted).ports
    assert meeting(before).token != meeting(restarted).token


def test_eight_ports_outside_the_ephemeral_range():
    for job in range(500):
        ports = meeting(recorded("full_step")[0] | {"SLURM_JOB_ID": str(job)}).ports
        assert len(set(ports)) == 8
        assert all(port in PORTS and 1024 < port < 32768 for port in ports)


def test_the_users_address_and_port_win():
    found = meeting(recorded("full_step")[0] | {"MASTER_ADDR": "n2-ib", "MASTER_PORT": "29500"})
    assert (found.addresses, found.ports) == (("n2-ib",), (29500,))


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1", "127.0.1.1", "::1", "LOCALHOST"])
def test_never_loopback_on_several_nodes(address):
    with pytest.raises(RankError, match=r"MASTER_ADDR.*another host on each of the 2 nodes"):
        meeting(recorded("full_step")[0] | {"MASTER_ADDR": address})


def test_loopback_on_one_node_is_fine():
    assert meeting(recorded("gpu_bind_closest")[0]).addresses == ("127.0.0.1",)


@pytest.mark.parametrize("port", ["0", "65536", "http", "-1", "29500x", "٣"])
def test_what_is_no_port(port):
    with pytest.raises(RankError, match=r"MASTER_PORT.*is not a port"):
        meeting(recorded("full_step")[0] | {"MASTER_PORT": port})


def test_torchruns_meeting_point_is_its_own():
    assert all(meeting(env).external for env in recorded("torchrun_in_slurm"))
    assert not any(meeting(env).external for env in recorded("full_step"))


def test_several_nodes_without_names_need_an_address():
    env = {"JOB_COMPLETION_INDEX": "0", "SLURM_TRAIN_WORLD_SIZE": "2"}
    with pytest.raises(RankError, match=r"MASTER_ADDR.*set it to the host of rank 0"):
        meeting(env)

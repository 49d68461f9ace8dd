"""Ranks find each other past busy ports and strangers, and say who is missing."""

import socket
import threading

import pytest
import torch.distributed as dist

from slurm_train.errors import StartError
from slurm_train.topology.ranks import RankInfo
from slurm_train.topology.rendezvous import Rendezvous
from slurm_train.train.meet import check_in, open_store


def info(rank, world):
    return RankInfo(rank, rank, world, world, 0, 1, ("127.0.0.1",), "local")


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("", 0))
    ports = tuple(each.getsockname()[1] for each in sockets)
    for each in sockets:
        each.close()
    return ports


def meet(meeting, world, timeout=20.0):
    """All ranks of a world as threads of this process; what each of them got or raised."""
    outcomes = {}

    def one(rank):
        try:
            store = open_store(meeting, info(rank, world), timeout)
            check_in(store, info(rank, world), timeout)
            outcomes[rank] = store
        except StartError as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def test_all_ranks_share_a_store():
    stores = meet(Rendezvous(("127.0.0.1",), free_ports(2), "mine", False), 3)
    stores[0].set("word", "heard")
    assert [stores[rank].get("word") for rank in range(3)] == [b"heard"] * 3


def test_a_busy_port_and_another_jobs_store_are_passed_by():
    busy, strange, free = free_ports(3)
    with socket.socket() as listener:
        listener.bind(("", busy))
        listener.listen()
        other = dist.TCPStore("127.0.0.1", strange, is_master=True, wait_for_workers=False)
        other.set("token", "another job")
        stores = meet(Rendezvous(("127.0.0.1",), (busy, strange, free), "mine", False), 2, timeout=40.0)
        stores[0].set("word", "heard")
        assert stores[1].get("word") == b"heard"
        assert not other.check(["word"])


def test_rank_0_is_found_on_any_of_several_hosts():
    meeting = Rendezvous(("127.0.0.1",), free_ports(1), "mine", False)
    store = open_store(meeting, info(0, 2), 10.0)
    elsewhere = Rendezvous(("127.0.0.9", "127.0.0.1"), meeting.ports, "mine", False)
    found = open_store(elsewhere, info(1, 2), 10.0)
    store.set("word", "heard")
    assert found.get("word") == b"heard"


def test_missing_ranks_are_named_with_likely_causes():
    store = open_store(Rendezvous(("127.0.0.1",), free_ports(1), "mine", False), info(0, 4), 10.0)
    store.set("here/2", "n2")
    store.add("arrived", 1)
    with pytest.raises(StartError, match=r"2 of 4 ranks did not come within 0.5 s: 1, 3; likely causes: a rank died"):
        check_in(store, info(0, 4), 0.5)


def test_a_missing_rank_0_is_told():
    port = free_ports(1)
    with pytest.raises(StartError, match=r"rank 1 did not find rank 0 at 127.0.0.1 \(ports \d+\) within 0.3 s"):
        open_store(Rendezvous(("127.0.0.1",), port, "mine", False), info(1, 2), 0.3)


def test_no_free_port_is_told():
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        ports = (listener.getsockname()[1],)
        with pytest.raises(StartError, match=r"could bind none of the ports \d+"):
            open_store(Rendezvous(("127.0.0.1",), ports, "mine", False), info(0, 2), 1.0)


def test_torchs_own_store_is_used_as_it_is(monkeypatch):
    (port,) = free_ports(1)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    store = open_store(Rendezvous(("127.0.0.1",), (port,), "", True), info(0, 1), 10.0)
    check_in(store, info(0, 1), 5.0)
    assert store.check(["complete", "here/0"])

"""What the tests' own cluster promises: four hosts, accounting, limits, refusals, repair, no trace after `down`."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.jobs import (
    AS_ROOT,
    SCRIPT,
    Cluster,
    call_script,
    marker,
    slurm,
    wait_for_accounting,
    wait_for_job,
    wait_until,
)

NODES = ["n1", "n2", "n3", "n4"]
SECOND = {"CLUSTER_NUMBER": "9", "CLUSTER_DIR": "/opt/slurm-train-cluster-test"}

pytestmark = pytest.mark.usefixtures("own_cluster")


def refusal(*words: str) -> str:
    """What sbatch says to a job that it must not take."""
    done = subprocess.run(["sbatch", "-o", "/dev/null", *words, "--wrap", "true"], capture_output=True, text=True)
    assert done.returncode == 1, done.stdout
    return done.stderr


def test_the_nodes_are_hosts_of_their_own() -> None:
    script = 'touch /tmp/$(hostname) /dev/shm/$(hostname); echo $(ls /tmp /dev/shm | grep "^n[1-4]$") $(hostname -i)'
    lines = sorted(slurm("srun", "-N4", "bash", "-c", script).splitlines())
    assert [line.split()[:2] for line in lines] == [[node, node] for node in NODES]
    assert len({line.split()[2] for line in lines}) == 4


def test_the_nodes_see_each_other_by_name_and_the_shared_directory(shared_tmp: Path) -> None:
    folder = shared_tmp / "with a space"
    folder.mkdir()
    (folder / "word").write_text("seen")
    assert slurm("srun", "-N4", "cat", str(folder / "word"), cwd=folder) == "seen" * 4
    names = slurm("srun", "-N1", "-w", "n1", "getent", "hosts", *NODES).split()
    assert names[1::2] == NODES


def test_accounting_knows_a_job_its_state_and_its_comment(shared_tmp: Path) -> None:
    job = slurm("sbatch", "--parsable", "--comment", "of a test", "--wrap", "exit 3", cwd=shared_tmp)
    assert wait_for_job(job) == "FAILED"
    ask = ["sacct", "-n", "-X", "-P", "-j", job, "-o", "State,ExitCode,Account,QOS,Comment"]
    wait_until(lambda: slurm(*ask) == "FAILED|3:0|research|normal|of a test", 10, "sacct tells all of the job")


def test_a_job_may_ask_accounting() -> None:
    assert slurm("srun", "-w", "n4", "sacctmgr", "-n", "show", "account", "research", "format=account") == "research"


def test_gpu_types_and_features() -> None:
    assert slurm("sinfo", "-h", "-p", "debug", "-N", "-o", "%N %G %f").splitlines() == [
        "n1 gpu:a100:2 fast",
        "n2 gpu:a100:2 fast",
        "n3 gpu:1g.10gb:2 slow",
        "n4 gpu:1g.10gb:2 slow",
    ]
    show = "echo $(hostname) $CUDA_VISIBLE_DEVICES"
    assert slurm("srun", "--gres=gpu:1g.10gb:2", "-w", "n3", "bash", "-c", show) == "n3 0,1"
    assert slurm("srun", "--gres=gpu:a100:1", "-w", "n1", "bash", "-c", show) == "n1 0"


def test_partitions_for_limits_and_preemption() -> None:
    partitions = {line.split()[0]: line for line in slurm("scontrol", "show", "partition", "-o").splitlines()}
    assert sorted(partitions) == [f"PartitionName={name}" for name in ("debug", "scavenge", "short", "spot")]
    assert "MaxTime=00:02:00" in partitions["PartitionName=short"]
    for name, mode in (("scavenge", "REQUEUE"), ("spot", "CANCEL")):
        assert f"PreemptMode={mode}" in partitions[f"PartitionName={name}"]
        assert "GraceTime=10" in partitions[f"PartitionName={name}"]


@pytest.mark.usefixtures("limits")
def test_a_task_over_its_memory_is_killed(shared_tmp: Path) -> None:
    grow = "python3 -c \"b = bytearray(300 << 20); b[::4096] = b'x' * len(b[::4096])\""
    job = slurm("sbatch", "--parsable", "--mem=100", "--wrap", f"srun {grow}", cwd=shared_tmp)
    assert wait_for_accounting(job) != "COMPLETED"
    assert slurm("sacct", "-n", "-P", "-j", f"{job}.0", "-o", "State") == "OUT_OF_MEMORY"


@pytest.mark.usefixtures("limits")
def test_a_task_opens_only_its_own_gpu(own_cluster: Cluster) -> None:
    # The stand-in devices have no driver: opening the task's own says "no such device", the other one "not permitted".
    script = f"for i in 0 1; do cat {own_cluster.directory}/dev/gpu$i; done 2>&1 | grep -c 'not permitted' || true"
    assert slurm("srun", "-w", "n1", "--gres=gpu:1", "bash", "-c", script) == "1"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["-A", "nobody"], "Invalid account or account/partition combination specified"),
        (["-q", "nothing"], "Invalid qos specification"),
        (["-p", "short", "-t", "3"], "Requested time limit is invalid"),
        (["-N", "5"], "Node count specification invalid"),
        (["-q", "small", "-N", "3"], "QOSMaxNodePerJobLimit"),
        (["-p", "nowhere"], "invalid partition specified: nowhere"),
        (["-C", "quick"], "Invalid feature specification"),
        (["--gres=gpu:h100:1"], "Requested node configuration is not available"),
    ],
)
def test_what_cannot_run_is_refused_at_submission(words: list[str], says: str) -> None:
    assert says in refusal(*words)


def test_up_again_changes_nothing(own_cluster: Cluster) -> None:
    before = own_cluster.call("status")
    again = own_cluster.call("up")
    assert again.returncode == 0, again.stderr
    assert again.stdout.splitlines()[-1] == f"export SLURM_CONF={os.environ['SLURM_CONF']}"
    assert own_cluster.call("status").stdout == before.stdout  # the same processes
    assert before.returncode == 0


def test_a_machine_of_another_cluster_is_refused(own_cluster: Cluster) -> None:
    if not Path("/etc/slurm").is_dir():
        pytest.skip("this machine has no /etc/slurm to hide a slurm.conf in")
    before = own_cluster.call("status").stdout
    hidden = 'mount -t tmpfs none /etc/slurm && touch /etc/slurm/slurm.conf && exec bash "$0" up'
    words = ["unshare", "--mount", "sh", "-c", hidden, str(SCRIPT)]
    done = subprocess.run([*AS_ROOT, *words], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == (
        "cluster.sh: this machine belongs to a Slurm cluster (/etc/slurm/slurm.conf): "
        "use that one, or another machine\n"
    )
    assert own_cluster.call("status").stdout == before


@pytest.mark.parametrize(
    ("words", "variables", "refused"),
    [
        ([], {}, True),
        ([], {"SLURM_CONF": "/etc/elsewhere/slurm.conf"}, True),
        ([], {"SLURM_CONF": "/opt/elsewhere/slurm.conf"}, False),
        (["-f", "/opt/elsewhere/slurm.conf"], {}, False),
    ],
)
def test_a_daemon_of_another_cluster_is_refused(
    own_cluster: Cluster, shared_tmp: Path, words: list[str], variables: dict[str, str], refused: bool
) -> None:
    stranger = shared_tmp / "slurmd"
    shutil.copy("/bin/bash", stranger)
    stand = [str(stranger), "-c", "read -r", "slurmd", *words]  # by its name and words it is a slurmd
    with subprocess.Popen(stand, env=variables, stdin=subprocess.PIPE) as process:
        done = own_cluster.call("up")
        assert process.poll() is None
        process.communicate()
    if refused:
        assert done.returncode == 2
        assert f"belongs to a Slurm cluster (slurmd, process {process.pid})" in done.stderr
    else:
        assert done.returncode == 0, done.stderr


def trace() -> list[str]:
    """What can be seen of a cluster: devices, namespaces, mounts, directories, cgroups, and its processes."""
    look = """
        ip -o link | cut -d: -f2; ip netns list; ls -d /opt/* /run/netns* /run/*; cut -d' ' -f2 /proc/mounts
        find /sys/fs/cgroup -type d -name 'slurm-train*'
        grep -lsz "SLURM_CONF=$1/" /proc/[0-9]*/environ"""
    done = subprocess.run([*AS_ROOT, "sh", "-c", look, "sh", SECOND["CLUSTER_DIR"]], capture_output=True, text=True)
    return sorted(line.split(" (id")[0] for line in done.stdout.splitlines())


class Second:
    """A second cluster beside the first, to be broken; and what could be seen before it."""

    def __init__(self) -> None:
        self.before = trace()
        self.config = Path(SECOND["CLUSTER_DIR"]) / "slurm.conf"
        self.up()

    def up(self) -> None:
        done = call_script("up", **SECOND)
        assert done.returncode == 0, done.stdout + done.stderr

    def pids(self, *names: str) -> dict[str, int]:
        """The processes of these names that belong to it, as `status` tells them."""
        lines = call_script("status", **SECOND).stdout.splitlines()
        found = {
            line.split(" runs ")[0]: int(line.split()[-1].rstrip(")")) for line in lines if " runs (process" in line
        }
        return {name: found[name] for name in names or found if name in found}

    def slurm(self, *words: str) -> str:
        return slurm("env", f"SLURM_CONF={self.config}", *words)


@pytest.fixture(scope="module")
def second(own_cluster: Cluster) -> Iterator[Second]:
    """It is gone after the tests of this file, whatever they did to it."""
    call_script("down", **SECOND)  # what an interrupted run left
    try:
        yield Second()
    finally:
        call_script("down", **SECOND)


def kill(*numbers: int) -> None:
    subprocess.run([*AS_ROOT, "kill", "-KILL", *map(str, numbers)], check=True)


def test_up_repairs_what_was_killed(second: Second) -> None:
    before = second.pids()
    assert len(before) == 8
    killed = ["slurmctld", "mariadbd", "slurmd of n2", "munged"]
    kill(*(before[name] for name in killed))
    assert call_script("status", **SECOND).returncode == 1
    second.up()
    after = second.pids()
    assert after.keys() == before.keys()
    assert {name for name in before if after[name] != before[name]} == set(killed)
    assert sorted(second.slurm("srun", "-N4", "hostname").split()) == NODES


def test_up_mends_the_network_and_minds_no_stale_pid_file(second: Second) -> None:
    bystander = subprocess.Popen(["sleep", "300"])
    try:
        kill(second.pids()["slurmd of n3"], second.pids()["slurmdbd"])
        break_it = """
            ip netns del stc9-n3; ip link del stc9-v1
            for name in slurmd-n3 slurmdbd slurmctld; do echo "$1" > "$2/run/$name.pid"; done"""
        words = ["sh", "-c", break_it, "sh", str(bystander.pid), SECOND["CLUSTER_DIR"]]
        subprocess.run([*AS_ROOT, *words], check=True)
        second.up()
        assert sorted(second.slurm("srun", "-N4", "hostname").split()) == NODES
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_a_cut_node_falls_silent_and_comes_back_mended(second: Second) -> None:
    reach = ["srun", "-w", "n1", "bash", "-c", "timeout 2 bash -c '</dev/tcp/n4/17092' 2>/dev/null; echo $?"]
    assert second.slurm(*reach) == "0"
    assert call_script("cut", "n4", **SECOND).returncode == 0
    assert second.slurm(*reach) != "0"
    assert call_script("mend", "n4", **SECOND).returncode == 0
    assert second.slurm("sinfo", "-h", "-p", "debug", "-n", "n4", "-o", "%T") == "idle"
    assert second.slurm(*reach) == "0"
    wrong = call_script("cut", "n7", **SECOND)
    assert (wrong.returncode, wrong.stderr) == (2, "cluster.sh: give a node: n1, n2, n3 or n4\n")


def test_down_leaves_no_trace(second: Second, own_cluster: Cluster) -> None:
    first = own_cluster.call("status").stdout
    job = second.slurm(
        "sbatch",
        "--parsable",
        "-N2",
        "-o",
        "/dev/null",
        "--wrap",
        "trap : TERM; setsid sleep 300 & srun sleep 300; wait",
    )
    assert job.startswith("9")
    second.slurm("srun", "-N2", "-w", "n3,n4", "true")
    assert call_script("down", **SECOND).returncode == 0
    assert trace() == second.before
    assert call_script("status", **SECOND).returncode == 3
    nothing = call_script("down", **SECOND)
    assert (nothing.returncode, nothing.stdout, nothing.stderr) == (0, "", "")
    assert own_cluster.call("status").stdout == first


def test_a_directory_of_someone_else_is_left_alone(shared_tmp: Path) -> None:
    (shared_tmp / "thesis").touch()
    for command in ("up", "down"):
        done = call_script(command, CLUSTER_NUMBER="9", CLUSTER_DIR=str(shared_tmp))
        assert done.returncode == 2
        assert "not a cluster of this script" in done.stderr
    assert [path.name for path in shared_tmp.iterdir()] == ["thesis"]
    assert not marker(shared_tmp).exists()

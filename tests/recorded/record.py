"""Record the environments that a real Slurm gives to its processes, one JSON file per scenario.

    SLURM_CONF=... python tests/recorded/record.py SCRATCH [SCENARIO ...]

Needs a running cluster of four nodes of 8 CPUs and 2 GPUs, torch and submitit, and a SCRATCH directory that the nodes
see too. Each file holds the exact command, the version of Slurm and the environment of every process that ran
`show-env` in it, in rank order. Only names that say something about ranks are kept, and no path, user or host name of
the recording machine.
"""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

KEPT = re.compile(
    r"SLURM|SUBMITIT_|TORCHELASTIC_|GROUP_|ROLE_|(LOCAL_)?(RANK|WORLD_SIZE)$|MASTER_|OMP_NUM_THREADS$"
    r"|(CUDA|ROCR|HIP|ZE)_VISIBLE_DEVICES$|GPU_DEVICE_ORDINAL$"
)
DROPPED = {"SUBMITIT_LOCAL_COMMAND", "TORCHELASTIC_ERROR_FILE"}  # nothing but paths
PERSONAL = {
    "SLURM_CONF": "/etc/slurm/slurm.conf",
    "SLURM_SUBMIT_HOST": "login",
    "SLURM_JOB_USER": "user",
    "SLURM_JOB_UID": "1000",
    "SLURM_JOB_GID": "1000",
    "SLURM_JOB_ACCOUNT": "research",
}
AGENT = (
    "python -m torch.distributed.run --nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d "
    "--rdzv-endpoint=$(srun -N1 -n1 hostname):29511 --rdzv-id=77 --no-python show-env"
)
LOCAL_EXECUTOR = (
    "from submitit import LocalExecutor, helpers; executor = LocalExecutor('logs'); "
    "executor.update_parameters(tasks_per_node=2); executor.submit(helpers.CommandFunction(['show-env'])).results()"
)
REQUEUE = """
job=$(sbatch --parsable --requeue -N2 -n4 --wrap '[ -z "$SLURM_RESTART_COUNT" ] && sleep 60; srun show-env')
until [ "$(squeue -h -j $job -o %T)" = RUNNING ]; do sleep 0.2; done
scontrol requeue $job
until scontrol update jobid=$job starttime=now; do sleep 0.2; done
while squeue -h -j $job | grep -q .; do sleep 0.2; done
"""
SCENARIOS = {
    "batch_shell": "sbatch --wait -N2 -n4 --wrap show-env",
    "batch_shell_one_task": "sbatch --wait -N1 -n1 --wrap show-env",
    "batch_shell_per_node": "sbatch --wait -N2 --ntasks-per-node=2 --wrap show-env",
    "batch_shell_exclusive": "sbatch --wait -N1 --exclusive --wrap show-env",
    "full_step": "sbatch --wait -N2 -n4 --ntasks-per-node=2 --cpus-per-task=2 --wrap 'srun --cpus-per-task=2 show-env'",
    "smaller_step": "sbatch --wait -N4 -n8 --wrap 'srun -N2 -n2 --relative=1 show-env'",
    "uneven_tasks": "srun -N4 -n8 show-env",
    "cyclic_tasks": "srun -N2 -n4 --ntasks-per-node=2 --distribution=cyclic show-env",
    "arbitrary_tasks": (
        "printf 'n3\\nn1\\nn3\\n' > hosts; SLURM_HOSTFILE=hosts srun -n3 --distribution=arbitrary show-env"
    ),
    "one_of_two_per_node": "sbatch --wait -N1 --ntasks-per-node=2 --wrap 'srun -n1 show-env'",
    "array_task": "sbatch --wait --array=3-6%2 -N2 -n2 --wrap 'srun show-env'",
    "gpus_per_task": "srun -N2 -n4 --ntasks-per-node=2 --gpus-per-task=1 show-env",
    "gpus_per_node": "srun -N2 -n4 --ntasks-per-node=2 --gres=gpu:2 show-env",
    "gpu_bind_closest": "srun -N1 -n2 --gres=gpu:2 --gpu-bind=closest show-env",
    "gpu_bind_single": "srun -N1 -n2 --gres=gpu:2 --gpu-bind=single:1 show-env",
    "salloc_shell": "salloc -N2 -n4 show-env",
    "salloc_step": "salloc -N2 -n4 --ntasks-per-node=2 srun -N2 -n4 show-env",
    "salloc_one_task": "salloc -N2 -n4 script -qec 'srun -N1 -n1 --pty show-env' /dev/null",
    "interactive_step": "salloc -N2 -n4 script -qec 'srun --interactive --preserve-env --pty show-env' /dev/null",
    "srun_pty": "script -qec 'srun -n1 --pty show-env' /dev/null",
    "nested_batch_shell": (
        "srun -N2 -n2 bash -c '[ $SLURM_PROCID = 1 ] && sbatch --wait -N2 -n2 --wrap show-env || true'"
    ),
    "torchrun_in_slurm": f"sbatch --wait -N2 -n2 --wrap 'srun {AGENT}'",
    "torchrun_alone": "python -m torch.distributed.run --standalone --nproc-per-node=2 --no-python show-env",
    "distributed_launch": "srun -N1 -n1 python -m torch.distributed.launch --nproc-per-node=2 $(which show-env)",
    "heterogeneous_job": "salloc -N1 -n1 : -N2 -n2 srun --het-group=0,1 show-env",
    "heterogeneous_batch": "sbatch --wait -N1 -n1 : -N2 -n2 --wrap 'srun --het-group=0,1 show-env'",
    "heterogeneous_batch_shell": "sbatch --wait -N1 -n1 : -N2 -n2 --wrap show-env",
    "heterogeneous_uneven": "salloc -N1 -n2 : -N2 -n3 srun --het-group=0,1 show-env",
    "local_in_step": f'srun -N1 -n1 python -c "{LOCAL_EXECUTOR}"',
    "requeued_job": REQUEUE.strip(),
}


def write_show_env(scratch: Path) -> Path:
    """A program `show-env` that writes its environment into scratch/seen; gives the directory it lies in."""
    program = scratch / "bin" / "show-env"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(
        f"#!{sys.executable} -IS\n"
        "import json, os, tempfile\n"
        f"handle, _ = tempfile.mkstemp(suffix='.json', dir={str(scratch / 'seen')!r})\n"
        "with os.fdopen(handle, 'w') as file:\n"
        "    json.dump(dict(os.environ), file)\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program.parent


def scrub(env: Mapping[str, str], scratch: Path) -> dict[str, str]:
    """The names that say something about ranks, without anything personal."""
    places = {str(scratch): "/cluster/home/user", socket.gethostname(): "login"}
    kept = {name: env[name] for name in sorted(env) if KEPT.match(name) and name not in DROPPED}
    kept = {name: PERSONAL.get(re.sub(r"_(HET|PACK)_GROUP_\d+$", "", name), value) for name, value in kept.items()}
    for place, neutral in places.items():
        kept = {name: value.replace(place, neutral) for name, value in kept.items()}
    return kept


def order(env: Mapping[str, str]) -> tuple[int, int]:
    """Sorts environments by job, then by rank."""
    rank = next((env[name] for name in ("RANK", "SUBMITIT_LOCAL_GLOBALID", "SLURM_PROCID") if name in env), "0")
    return int(env.get("SLURM_JOB_ID", "0")), int(rank)


def record(name: str, scratch: Path) -> dict[str, object]:
    """Runs one scenario and gives what its file holds."""
    seen = scratch / "seen"
    seen.mkdir(parents=True, exist_ok=True)
    for old in seen.iterdir():
        old.unlink()
    outside = {key: value for key, value in os.environ.items() if key in ("HOME", "LANG", "SLURM_CONF", "USER")}
    path = f"{write_show_env(scratch)}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["bash", "-c", SCENARIOS[name]]
    subprocess.run(command, cwd=scratch, env={**outside, "PATH": path}, stdin=subprocess.DEVNULL, timeout=300)
    environments = [json.loads(file.read_text()) for file in seen.iterdir()]
    if not environments:
        raise SystemExit(f"{name}: nothing recorded")
    version = subprocess.run(["srun", "--version"], capture_output=True, text=True, check=True).stdout.split()[1]
    scrubbed = [scrub(env, scratch) for env in sorted(environments, key=order)]
    return {"command": SCENARIOS[name], "slurm": version, "environments": scrubbed}


def main() -> None:
    """Records the scenarios named, or all of them."""
    scratch, *names = sys.argv[1:]
    for name in names or SCENARIOS:
        recording = record(name, Path(scratch).resolve())
        Path(__file__).with_name(f"{name}.json").write_text(json.dumps(recording, indent=1) + "\n")
        print(f"{name}: {len(recording['environments'])} environments", flush=True)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()

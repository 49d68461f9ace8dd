"""The sbatch scripts for use by hand, from the same source as the jobs of `launcher=slurm`.

`python -m slurm_train.launch.templates [DIR]` writes them to DIR, by default sbatch_templates.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from slurm_train.launch.script import ALWAYS, CPUS, STEP, Script, restarting

SIGNAL_SECONDS = 90
"""How long before the time limit the ranks are told to save; launcher.signal_seconds has the same default."""

OPTIONS = {"job-name": "slurm_train", "nodes": "2", "signal": f"USR2@{SIGNAL_SECONDS}", **ALWAYS}
"""No number of tasks: Slurm then starts one a node, and -n or --ntasks-per-node from the command line mean what they
say. A default of --ntasks-per-node would turn the 5,1,1,1 tasks of `-N4 -n8` into 2,2,2,2."""

ENDING = "--kill-on-bad-exit=0 --wait=30"
"""Tasks that are left 30 s after the first has ended are ended: they would wait for it. Ending them at once would hit
some that are about to end by themselves, before they can do anything about it, and make 143 of the job's exit code."""

SETUP = (
    "# module load cuda",
    "# source .venv/bin/activate",
    "PYTHON=${PYTHON:-python}",
    'command -v "$PYTHON" >/dev/null || {',
    '  echo "there is no $PYTHON on $SLURMD_NODENAME; submit with PYTHON=/path/to/python sbatch ..." >&2',
    "  exit 2",
    "}",
)

PYTHON, WORDS = '"$PYTHON"', '"$@"'

PORT = "$((10000 + (SLURM_JOB_ID + 1237 * ${SLURM_RESTART_COUNT:-0}) % 10000))"
"""Below 32768, where Linux's ephemeral ports begin, and below those of topology.rendezvous. Another one after a
requeue: an agent on a node that had dropped off the network may still look for its peers at the old one."""

TORCHRUN = f"""\
tasks=${{SLURM_NTASKS:-$((${{SLURM_NTASKS_PER_NODE:-1}} * SLURM_JOB_NUM_NODES))}}
ranks=$((tasks / SLURM_JOB_NUM_NODES))
cpus=${{SLURM_CPUS_PER_TASK:-1}}
if [[ $tasks -ne $((ranks * SLURM_JOB_NUM_NODES)) || (-n $SLURM_NTASKS && $SLURM_TASKS_PER_NODE == *,*) ]]; then
  echo "torchrun needs as many ranks on each node, not $SLURM_TASKS_PER_NODE; use --ntasks-per-node instead of -n" >&2
  exit 2
fi
port={PORT}
# All GPUs of a node are for its torchrun, whatever the tasks were to have.
unset SLURM_GPUS_PER_TASK SLURM_TRES_PER_TASK SLURM_NTASKS_PER_GPU SLURM_GPU_BIND
gpus=${{SLURM_GPUS_ON_NODE:+--gpus-per-node=$SLURM_GPUS_ON_NODE}}
export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-$cpus}}"
# The warning before the time limit goes on to the ranks, which get that time to save. A torch that does not know these
# variables ignores them; its torchrun ends at the warning.
export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR2 TORCH_ELASTIC_SHUTDOWN_TIMEOUT={SIGNAL_SECONDS - 10}
{STEP} {ENDING} $gpus \\
  --label --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpus-per-task="$((ranks * cpus))" \\
  "$PYTHON" -u -m torch.distributed.run --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="$ranks" \\
  --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$SLURMD_NODENAME:$port" \\
  -m slurm_train "$@\""""


def templates() -> Mapping[str, str]:
    """File name -> text of each template."""
    srun = Script(
        command=restarting(f'{STEP} {ENDING} {CPUS} \\\n  --label "$PYTHON" -u -m slurm_train "$@"', PYTHON, WORDS),
        options=OPTIONS,
        setup=SETUP,
        comments=_comments(
            "srun.sbatch", "Train on the nodes of a Slurm job: srun starts one task a rank.", "its task"
        ),
    )
    torchrun = Script(
        command=restarting(TORCHRUN, PYTHON, WORDS),
        options=OPTIONS,
        setup=SETUP,
        comments=_comments(
            "torchrun.sbatch", "Train on the nodes of a Slurm job: one torchrun a node starts its ranks.", "its node"
        ),
        why="one torchrun a node",
    )
    return {"srun.sbatch": srun.text, "torchrun.sbatch": torchrun.text}


def _comments(name: str, purpose: str, label: str) -> Sequence[str]:
    uneven = [f"  sbatch -N4 -n8 {name} +experiment=fmnist parallel=ddp   # 8 ranks, as Slurm spreads them"]
    return (
        purpose,
        "",
        f"  sbatch {name} +experiment=fmnist parallel=ddp",
        f"  sbatch -N4 --ntasks-per-node=8 --gpus-per-node=8 {name} +experiment=fmnist parallel=ddp",
        *(uneven if name == "srun.sbatch" else []),
        f"  sbatch {name} resume RUN",
        "",
        "Options of sbatch stand before the script and win over those below; what follows it goes to slurm_train.",
        f"Output: slurm-<job>.out where it was submitted, each line after the number of {label}. After a requeue",
        "the run goes on in its run directory, and the output in its file.",
        "",
        "To edit: take away one # from what you need, and see the setup lines below.",
        "##SBATCH --ntasks-per-node=8  # ranks on each node, one a GPU; 1 if left out",
        "##SBATCH --gpus-per-node=8",
        "##SBATCH --cpus-per-task=6  # of each rank",
        "##SBATCH --time=1-00:00:00",
        "##SBATCH --partition=gpu",
        "##SBATCH --account=project",
    )


def main(arguments: Sequence[str]) -> None:
    """Write the templates into the directory that the first argument names."""
    directory = Path(arguments[0] if arguments else "sbatch_templates")
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in templates().items():
        (directory / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

"""Bad input on the real command line: what is typed, and the exact lines that are printed; the exit code is 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import slurm_train.data
from slurm_train.cli import main

RECORDED = Path(__file__).parents[1] / "recorded"
SAMPLE = Path(slurm_train.data.__file__).parent / "sample"
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
TORCHRUN |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}

# "$": what is typed, after the environment (@); below it a line for each fault, and deeper what belongs to that line.
# F is +experiment=fmnist with the embedded sample, TRANSFORMER the class as the model with this file as its data, HERE
# the working directory; DIRECTORY and AGAIN are remedies.
KNOWN_BEFORE = """
$ F train.epoch=3
    train.epoch=3: unknown key; did you mean train.epochs?
$ F trian.epochs=3
    trian.epochs=3: unknown key; did you mean train.epochs?
$ F modle=mlp
    modle=mlp: unknown key; did you mean model?
$ F model=mpl
    model=mpl: model has no mpl; did you mean mlp?
        options of model: cnn, linear, lm_125m, lm_1b, lm_350m, lm_7b, lm_small, lm_tiny, mlp, transformer
$ F model.widht=3
    model.widht=3: slurm_train.models.mlp.MLP has no argument widht; did you mean width?
        it takes in_features, width, depth, classes, dropout
$ +experiment=fminst
    +experiment=fminst: experiment has no fminst; did you mean fmnist?
        options of experiment: fmnist, fmnist_cnn, linear_regression, lm
$ F train.epochs
    train.epochs: is not KEY=VALUE
$ F --verbose
    --verbose: unknown option; see --help
$ F --config-dir
    --config-dir: its value is missing
$ F --config-dir nowhere
    --config-dir nowhere: is not a directory
$ --cfg all
    --cfg: cannot print 'all'; type --cfg job

$ F train.epochs=three
    train.epochs=three: must be an integer
$ F optim.lr=fast
    optim.lr=fast: must be a number
$ F data.download=perhaps
    data.download=perhaps: must be true or false
$ F model.width=wide
    model.width=wide: must be a whole number of at least 1
$ F train.epochs=-1
    train.epochs=-1: must be at least 1
$ F train.batch_size=-4
    train.batch_size=-4: must be at least 1
$ F train.workers=-1
    train.workers=-1: must be at least 0
$ F launcher.tasks_per_node=-2
    launcher.tasks_per_node=-2: must be at least 1
$ F model.width=-5
    model.width=-5: must be a whole number of at least 1
$ F optim.lr=-1
    optim.lr=-1: must be at least 0
$ F seed=-1
    seed=-1: must be from 0 to 2^63 - 1
$ F train.validation=1.5
    train.validation=1.5: must be a fraction from 0 to below 1, or a whole number of samples
$ F train.validation=12000
    train.validation=12000: leaves none of the 12,000 samples to train on; take fewer
$ F train.early_stopping.patience=3 train.validation=0
    train.early_stopping.patience=3: there is no validation metric to watch; hold out samples: train.validation=0.1
$ F train.batch_size=100000
    train.batch_size=100000: there are only 10,800 samples to train on, fewer than one global batch; use at most 10800
$ F train.device=gpu
    train.device=gpu: must be auto, cpu, cuda, mps or cuda:N

$ F parallel=tp parallel.tp=3
    parallel.tp=3: does not divide the 512 out_features of hidden.0 (colwise) and the 512 in_features of head (rowwise);
        use a tp of 2 or 4, or sizes that 3 divides
$ F parallel=tp parallel.tp=3 launcher.tasks_per_node=4
    parallel.tp=3: needs 3 ranks, but there are 4 ranks;
        start 3 ranks (launcher.nodes x launcher.tasks_per_node), or set one axis to -1, the rest
$ F parallel=single launcher.tasks_per_node=2
    parallel=single: is for one rank, but there are 2 ranks; use parallel=ddp or parallel=tp
$ F parallel=ddp parallel.tp=2 parallel.dp_replicate=2
    parallel.tp=2: the layout ddp has no tensor parallelism; use parallel=ddp_tp
$ F parallel=ddp launcher.tasks_per_node=3
    train.batch_size=64: the global batch is not divisible by the 3 data ranks; use 63 or 66
$ F parallel.pp=2
    parallel.pp=2: the model has no blocks to cut between;
        name the modules that start the second stage, the third, ...: parallel.cuts=[NAME]
$ TRANSFORMER parallel=pp parallel.pp=8
    parallel.pp=8: 8 stages, but the model has 4 blocks;
        use parallel.pp=4 on 4 ranks, or parallel.pp=4 parallel.dp_replicate=-1, or model.depth=8
$ TRANSFORMER model.tied=true parallel=pp parallel.pp=2
    model.tied=true: a tied weight across pipeline stages; use model.tied=false
$ TRANSFORMER parallel=pp parallel.pp=4 parallel.microbatches=2
    parallel.microbatches=2: the 64 samples of a data rank take a number that divides them, at least 4; use 4
$ TRANSFORMER parallel=pp parallel.pp=4 train.batch_size=2
    train.batch_size=2: the 2 samples of a data rank make no micro-batches that are equal, at least 4; use 4
$ F train.precision=fp16 train.device=cpu
    train.precision=fp16: fp16 needs cuda, but train.device=cpu; use bf16 or fp32
$ F parallel.tp=0
    parallel.tp=0: must be at least 1, or -1 for the rest of the ranks
$ F parallel.dp_replicate=-1 parallel.tp=-1
    parallel.tp=-1: only one axis can be -1, here parallel.dp_replicate and parallel.tp are
$ F parallel=tp parallel.tp=2 parallel.plan.nope=colwise
    parallel.plan.nope=colwise: matches no linear layer of the model; they are hidden.0, head
$ TRANSFORMER parallel=tp parallel.tp=2 parallel.plan.nope=colwise
    parallel.plan.nope=colwise: matches no linear layer of the model;
        they are embed, layers.*.attention.q, layers.*.attention.k, layers.*.attention.v, layers.*.attention.o,
        layers.*.mlp.gate, layers.*.mlp.up, layers.*.mlp.down, head

$ F data.root=nowhere
    data.root: nowhere does not exist; DIRECTORY
$ F data.root=file
    data.root: file is a file, not a directory; DIRECTORY
$ F data.root=empty
    data.root: empty lacks train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte,
        t10k-labels-idx1-ubyte (.gz or not); DIRECTORY
$ F data.root=broken
    data.root: broken/t10k-labels-idx1-ubyte.gz is broken gzip data (Unknown compression method); AGAIN
$ F data.root=truncated
    data.root: truncated/t10k-labels-idx1-ubyte.gz is truncated: the gzip data ends early; AGAIN
$ F data.root=swapped
    data.root: swapped/t10k-labels-idx1-ubyte.gz holds images; labels are expected;
        are the files of images and labels swapped?
$ F data.root=page
    data.root: page/t10k-labels-idx1-ubyte.gz is not an idx file, nor one compressed with gzip; AGAIN

$ F model._target_=nofile.Net
    model._target_=nofile.Net: there is no module nofile
$ F model._target_=Net
    model._target_=Net: 'Net' names no module; type FILE.Net for Net in FILE.py
$ F model._target_=good.Nett
    model._target_=good.Nett: good.py has no Nett; did you mean Net?
$ F model._target_=good.Net model.hiden=3
    model.hiden=3: good.Net has no argument hiden; did you mean hidden? it takes hidden
$ F model._target_=syntax.Net
    model._target_=syntax.Net: syntax.py, line 2: '(' was never closed
$ F optim._target_=torch.optim.Adammm
    optim._target_=torch.optim.Adammm: torch.optim has no Adammm; did you mean Adam or AdamW or NAdam?

$ F run.dir=used
    run.dir=used: HERE/used is used already; choose another one
$ F run.dir=old
    run.dir=old: HERE/old is used already; choose another one, or go on with it by the verb resume
$ F run.dir=file/below
    run.dir=file/below: HERE/file/below cannot be made: HERE/file is not a directory; choose another one
$ F run.dir=locked/run
    run.dir=locked/run: HERE/locked/run cannot be made: HERE/locked is not writable; choose another one
$ F run.name=a/b
    run.name=a/b: must be the name of a directory: not empty, without /

$ @partial F
    LOCAL_RANK: RANK set, but LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT not;
        start with torchrun, which sets them all, or unset them
$ @contradicting F
    RANK: 5 is not below the world size of 1
$ @malformed F
    WORLD_SIZE: 'two' is not a number of at least 1
$ @batch_shell F
    SLURM_NTASKS: this is the batch shell of a job of 4 tasks, not one of its ranks;
        start it with srun: srun python -m slurm_train ...
$ @worlds_of_one F
    SLURM_STEP_NUM_TASKS: this is one of 4 tasks of a Slurm step, but would be a run of its own (WORLD_SIZE=1);
        give torchrun --nnodes and --rdzv-endpoint, or start a single task
$ @torchrun F launcher=local
    launcher=local: this process was started as rank 0 of 1 (RANK=0), each of which would start all ranks again;
        use launcher=inline, or leave it out
$ F launcher=local launcher.nodes=2
    launcher.nodes=2: the local launcher has one node;
        set launcher.tasks_per_node for more ranks, or launcher=slurm to submit a job
$ F launcher=local launcher.gpus_per_task=1
    launcher.gpus_per_task=1: local ranks all see the same GPUs; set launcher.gpus_per_node
$ F launcher=slrum
    launcher=slrum: launcher has no slrum; did you mean slurm? options of launcher: auto, inline, local, slurm
$ F launcher=slurm launcher.time=90m
    launcher.time=90m: '90m' is not a time limit; write minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS
$ F launcher=slurm launcher.time=0
    launcher.time=0: a time limit of zero; write minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS
$ F launcher=slurm launcher.mem=4X
    launcher.mem=4X: '4X' is not a memory size;
        write a number with K, M, G or T, such as 512M or 2.5GB; without a unit it is megabytes; 0 for all
$ F launcher=slurm launcher.mem=4G launcher.mem_per_cpu=1G
    launcher.mem_per_cpu=1G: launcher.mem is given too; give one of them
$ F launcher=slurm launcher.gpus_per_node=1 launcher.gpus_per_task=1
    launcher.gpus_per_task=1: launcher.gpus_per_node is given too; give one of them
$ F launcher=slurm launcher.gpu_type=a100
    launcher.gpu_type=a100: no GPU is asked for; set launcher.gpus_per_node too
$ F launcher=slurm launcher.gpus_per_node=2 launcher.tasks_per_node=4
    launcher.tasks_per_node=4: more ranks than the 2 GPUs of a node; use launcher.tasks_per_node=2, or train.device=cpu
$ F launcher=slurm launcher.exclude=n[3-
    launcher.exclude=n[3-: malformed node list 'n[3-'
$ F launcher=slurm launcher.signal_seconds=0
    launcher.signal_seconds=0: must be from 1 to 65535
$ F launcher=slurm launcher.sbatch.partition=debug
    launcher.sbatch.partition=debug: has a key of its own; type launcher.partition=VALUE
$ F launcher=slurm launcher.sbatch.output=x
    launcher.sbatch.output=x: cannot be set; the verb logs reads the files in the run directory
$ F launcher=slurm launcher.sbatch.signal=B:USR2@60
    launcher.sbatch.signal=B:USR2@60: B: sends the signal to the batch shell alone, and no rank would save;
        set how early it comes by launcher.signal_seconds=SECONDS
$ F launcher=slurm launcher.sbatch.p=debug
    launcher.sbatch.p=debug: is not the long name of an option of sbatch; such as launcher.sbatch.gpu-bind=closest
$ F launcher=slurm launcher.env.RANK=0
    launcher.env.RANK: the launcher sets it for each rank; leave it out
$ F launcher=slurm launcher.nodes=3 launcher.tasks=2
    launcher.tasks=2: 3 nodes cannot hold them, each with one at least; use at least 3
$ F launcher=slurm launcher.nodes=2 launcher.tasks=5 launcher.tasks_per_node=2
    launcher.tasks=5: 2 nodes with at most 2 ranks cannot hold them, each with one at least; use 2 to 4
$ F launcher=slurm launcher.nodes=2 parallel=tp parallel.tp=3
    parallel.tp=3: needs 3 ranks, but there are 4 ranks;
        start 3 ranks (launcher.nodes x launcher.tasks_per_node), or set one axis to -1, the rest
$ F launcher=slurm launcher.partition=nope launcher.time=x run.dir=used
    launcher.time=x: 'x' is not a time limit; write minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS
    run.dir=used: HERE/used is used already; choose another one
$ F launcher.time=soon
    launcher.time=soon: 'soon' is not a time limit; write minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS
$ @one_gpu F launcher.gpus_per_node=2
    launcher.gpus_per_node: 2 are more than the 1 of CUDA_VISIBLE_DEVICES=7

$ tarin F
    tarin is neither a verb nor KEY=VALUE; did you mean run?
$ resume
    resume: RUN is missing; name a run directory, a run id or a job id
$ resume nowhere
    there is no run directory or run id nowhere; there are no runs below runs/ here
$ evaluate empty
    empty is not a run directory; it has no config.yaml and plan.json
$ plan -m F
    -m: plan has no sweeps; leave it out
$ F train.epochs=1,2
    train.epochs=1,2: several values; a sweep needs -m;
        quote a comma inside the argument: train.epochs='1,2', or type a list: train.epochs=[1,2]
$ -m F optim.lr=interval(0,1)
    optim.lr=interval(0,1): has no list of points; list the values: a,b,c
$ -m F train.epochs=1,x
    train.epochs=x: must be an integer

$ F train.epoch=3 modle=mlp
    train.epoch=3: unknown key; did you mean train.epochs?
    modle=mlp: unknown key; did you mean model?
$ plan F parallel=tp parallel.tp=2 train.batch_size=20000 data.root=nowhere run.dir=used
    data.root: nowhere does not exist; DIRECTORY
    run.dir=used: HERE/used is used already; choose another one
"""

# What only a rank can find: it has a run directory by then.
KNOWN_LATE = """
$ F model._target_=imports.Net
    model._target_: imports.Net cannot be imported: ModuleNotFoundError: No module named 'no_such_module'
$ F model._target_=raises.Net
    model: raises.Net raised ValueError: two lines; look at its arguments
$ F data.root=damaged
    data.root: damaged/t10k-labels-idx1-ubyte.gz is broken gzip data (CRC check failed 0x0 != 0xc603ff93); AGAIN
$ F train.device=cuda:99
    train.device: no CUDA device is visible to this rank; ask the launcher for GPUs, or set train.device=cpu
"""

ENVIRONMENTS = {
    "": {},
    "partial": {"RANK": "0"},
    "torchrun": TORCHRUN,
    "contradicting": TORCHRUN | {"RANK": "5"},
    "malformed": TORCHRUN | {"WORLD_SIZE": "two"},
    "batch_shell": json.loads((RECORDED / "batch_shell.json").read_text())["environments"][0],
    "worlds_of_one": json.loads((RECORDED / "full_step.json").read_text())["environments"][0] | TORCHRUN,
    "one_gpu": {"CUDA_VISIBLE_DEVICES": "7"},
}

SOURCES = {
    "good": "class Net:\n    def __init__(self, hidden=3): ...\n",
    "syntax": "class Net:\n    def __init__(self\n        pass\n",
    "imports": "import no_such_module\n\n\nclass Net(no_such_module.Base): ...\n",
    "raises": "class Net:\n    def __init__(self):\n        raise ValueError('two\\nlines')\n",
}
LABELS = "t10k-labels-idx1-ubyte.gz"


def rows(table: str) -> list[tuple[str, list[str]]]:
    """What is typed, and the lines that are printed."""
    found = []
    for block in table.split("$ ")[1:]:
        typed, *lines = block.rstrip().split("\n    ")
        found.append((typed, "\n".join(lines).replace("\n    ", " ").splitlines()))
    return found


def words(typed: str) -> list[str]:
    given = f" {typed} ".replace(" F ", f" +experiment=fmnist data.root={SAMPLE} ")
    target = "slurm_train.models.transformer.Transformer"
    model = f" model._target_={target} data=bytes data.path={__file__} data.length=32 "
    given = given.replace(" TRANSFORMER ", model)
    return [word for word in given.split() if not word.startswith("@")]


def printed(lines: list[str], here: Path) -> list[str]:
    names = "name the directory that holds the four Fashion-MNIST idx files (.gz or not), or leave data.root out"
    again = "get the file again, or name another directory"
    texts = [line.replace("DIRECTORY", names).replace("AGAIN", again) for line in lines]
    return [f"error: {text.replace('HERE', str(here))}" for text in texts]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with everything in it that is wrong."""
    path = tmp_path_factory.mktemp("bad")
    labels, images = (SAMPLE / LABELS).read_bytes(), (SAMPLE / "t10k-images-idx3-ubyte.gz").read_bytes()
    broken = {
        "broken": labels[:2] + b"nothing that gzip knows",
        "truncated": labels[:500],
        "swapped": images,
        "page": b"<html>not found</html>",
        "damaged": labels[:-8] + bytes(4) + labels[-4:],  # the checksum; the size is right
    }
    for name, content in broken.items():
        (path / name).mkdir()
        for file in SAMPLE.glob("*.gz"):
            (path / name / file.name).symlink_to(file)
        (path / name / LABELS).unlink()
        (path / name / LABELS).write_bytes(content)
    for name in ("empty", "used", "old", "locked"):
        (path / name).mkdir()
    for name in ("file", "used/file", "old/config.yaml"):
        (path / name).write_text("")
    for name, text in SOURCES.items():
        (path / f"{name}.py").write_text(text)
    (path / "locked").chmod(0o555)
    return path


@pytest.mark.parametrize(("typed", "lines"), rows(KNOWN_BEFORE), ids=[typed for typed, _ in rows(KNOWN_BEFORE)])
def test_known_before_the_start(
    typed: str, lines: list[str], here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if "locked" in typed and os.access(here / "locked", os.W_OK):
        pytest.skip("nothing is closed to root")
    before = sorted(here.rglob("*"))
    monkeypatch.chdir(here)
    for name, value in ENVIRONMENTS[typed.split()[0][1:] if typed.startswith("@") else ""].items():
        monkeypatch.setenv(name, value)
    code = main(words(typed))
    output, errors = capsys.readouterr()
    assert errors.splitlines() == printed(lines, here)
    assert (code, output) == (2, "")
    assert sorted(here.rglob("*")) == before, "something was left behind"


def started(typed: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(SAMPLE.parents[2]), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "slurm_train", *typed]
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(("typed", "lines"), rows(KNOWN_LATE), ids=[typed for typed, _ in rows(KNOWN_LATE)])
def test_known_to_a_rank_alone(typed: str, lines: list[str], here: Path, tmp_path: Path) -> None:
    done = started([*words(typed), "launcher=local", f"run.dir={tmp_path / 'run'}"], here)
    assert done.stderr.splitlines() == printed(lines, here)
    assert done.returncode == 2
    events = [json.loads(line)["event"] for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert events[-1] == "failed"


def test_a_checkpoint_of_another_width(here: Path, tmp_path: Path) -> None:
    first = [*words(" F "), "model.width=8", "train.max_steps=1", "launcher=local", f"run.dir={tmp_path / 'run'}"]
    again = ["resume", str(tmp_path / "run"), "model.width=16", "train.max_steps=2"]
    runs = [started(typed, here) for typed in (first, again)]
    assert [run.returncode for run in runs] == [0, 2], runs[0].stderr
    shapes = "hidden.0.weight is [8, 784] in it and [16, 784] here, hidden.0.bias is [8] in it and [16] here, "
    shapes += "head.weight is [10, 8] in it and [10, 16] here"
    remedy = "set the model that the checkpoint was trained with, or start a new run"
    told = f"error: model: the checkpoint is of another model: other shapes: {shapes}; {remedy}"
    assert runs[1].stderr.splitlines() == [told]

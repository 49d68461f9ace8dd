"""The training of benchmarks/parallel.py written with other tools, one measurement a process group of torchrun.

Every peer trains the same transformer, spread over the ranks in the same way, on the same sequences with the same
global batch, fused AdamW and clipping; prints its loss every ten steps; and validates after each epoch on the same
sequences. What is written by hand is as the tutorials of PyTorch have it. A clock runs from the start of an epoch to
its last optimizer step; the median of the epochs but the first counts, as for this project's own runs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from slurm_train.data.batches import split_validation
from slurm_train.data.text import Bytes
from slurm_train.data.windows import TokenWindows
from slurm_train.models.token_loss import TokenCrossEntropy
from slurm_train.models.transformer import Transformer

LENGTH = 64  # tokens of a sequence
MODEL = {"width": 128, "depth": 4, "heads": 4, "length": LENGTH}
BATCH = 16  # sequences a step, over all ranks
STEPS = 20  # in an epoch
HELD_OUT = 32  # sequences for validation
EVAL_BATCH = 32  # sequences of one pass in validation
TEST = 1 / 400  # a sequence or so: this project tests when training is over
RATE, DECAY, CLIP = 1e-3, 0.1, 1.0
LOG_STEPS = 10  # how often a loop looks at its loss
Batches = DataLoader[tuple[Tensor, ...]]


@dataclass
class EpochClock:
    """Samples per second of each epoch."""

    rates: list[float] = field(default_factory=list)
    _since: float = field(default=0.0, repr=False)

    def start(self) -> None:
        """An epoch begins."""
        self._since = time.perf_counter()

    def stop(self, samples: int) -> None:
        """The epoch's last optimizer step is done."""
        self.rates.append(samples / (time.perf_counter() - self._since))


@dataclass(frozen=True)
class Job:
    """One measurement: ddp, fsdp or tp; the text to train on; how many epochs."""

    layout: str
    path: str
    epochs: int

    @property
    def data_ranks(self) -> int:
        """How many ranks share a global batch."""
        return 1 if self.layout == "tp" else int(os.environ["WORLD_SIZE"])

    def splits(self) -> tuple[TensorDataset, TensorDataset]:
        """Training and validation sequences: the very ones of this project."""
        text = Bytes("train", self.path, length=LENGTH, test=TEST)
        training, held_out = map(in_memory, split_validation(text, HELD_OUT, seed=0))
        return training, held_out

    def model(self) -> Transformer:
        """A fresh model, not yet spread over the ranks."""
        torch.manual_seed(0)
        return Transformer(**MODEL)


def in_memory(windows: TokenWindows) -> TensorDataset:
    """The sequences as two tensors, the fastest of the usual data sets."""
    return TensorDataset(*windows.gather(torch.arange(len(windows))))


def shard(model: Transformer, mesh: DeviceMesh) -> None:
    """FSDP2: each block, then the rest."""
    for block in model.layers.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def split(model: Transformer, mesh: DeviceMesh) -> None:
    """Tensor parallelism by the styles of the model's own plan."""
    gather = {"input_layouts": Replicate(), "desired_input_layouts": Replicate()}
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "layers.*.attention": PrepareModuleInput(**gather),
        "layers.*.attention.[qkv]": ColwiseParallel(),
        "layers.*.attention.o": RowwiseParallel(),
        "layers.*.mlp": PrepareModuleInput(**gather),
        "layers.*.mlp.gate": ColwiseParallel(),
        "layers.*.mlp.up": ColwiseParallel(),
        "layers.*.mlp.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Fused AdamW without decay of the norms; a fused step takes plain and sharded parameters only apart."""
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = defaultdict(list)
    for parameter in model.parameters():
        groups[parameter.ndim > 1, isinstance(parameter, DTensor)].append(parameter)
    decayed = [{"params": group, "weight_decay": DECAY if matrix else 0.0} for (matrix, _), group in groups.items()]
    return torch.optim.AdamW(decayed, lr=RATE, fused=True)


def clip_mixed(model: nn.Module) -> None:
    """clip_grad_norm_ for plain and sharded parameters together, which torch's own does not take."""
    parameters: dict[bool, list[nn.Parameter]] = defaultdict(list)
    for parameter in model.parameters():
        parameters[isinstance(parameter, DTensor)].append(parameter)
    norms = [nn.utils.get_total_norm([p.grad for p in group]) for group in parameters.values()]
    total = torch.stack([n.full_tensor() if isinstance(n, DTensor) else n for n in norms]).norm()
    for group in parameters.values():
        nn.utils.clip_grads_with_norm_(group, CLIP, total)


@torch.no_grad()
def validate(model: nn.Module, batches: Batches, loss_of: nn.Module) -> float:
    """Mean loss over all ranks."""
    model.eval()
    total = torch.stack([loss_of(model(inputs), targets) for inputs, targets in batches]).mean()
    dist.all_reduce(total)
    model.train()
    return total.item() / dist.get_world_size()


def by_hand(job: Job) -> EpochClock:
    """A loop as the tutorials of PyTorch have it."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model: nn.Module = job.model()
    if job.layout == "ddp":
        model = DistributedDataParallel(model)
    else:
        (shard if job.layout == "fsdp" else split)(model, init_device_mesh("cpu", (ranks,)))
    optimizer, loss_of, clock = adamw(model), TokenCrossEntropy(), EpochClock()
    training, held_out = job.splits()
    place = {"num_replicas": job.data_ranks, "rank": rank % job.data_ranks}
    sampler = DistributedSampler(training, **place)
    loader = DataLoader(training, batch_size=BATCH // job.data_ranks, sampler=sampler)
    validation = DataLoader(
        held_out, batch_size=EVAL_BATCH, sampler=DistributedSampler(held_out, shuffle=False, **place)
    )
    for epoch in range(job.epochs):
        sampler.set_epoch(epoch)
        clock.start()
        for step, (inputs, targets) in enumerate(loader):
            optimizer.zero_grad()
            loss = loss_of(model(inputs), targets)
            loss.backward()
            if job.layout == "tp":
                clip_mixed(model)
            else:
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            if step % LOG_STEPS == 0 and rank == 0:
                print(f"{step:5d} loss {loss.item():.4f}")
        clock.stop(len(training))
        print(f"validation loss {validate(model, validation, loss_of):.4f}")
    return clock


def lightning(job: Job) -> EpochClock:
    """Lightning's Trainer with its default logger and progress bar."""
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model: Transformer | None = None
            self.loss_of = TokenCrossEntropy()

        def configure_model(self) -> None:
            if self.model is None:
                self.model = job.model()
                if job.layout == "fsdp":
                    shard(self.model, self.device_mesh["data_parallel"])
                elif job.layout == "tp":
                    split(self.model, self.device_mesh["tensor_parallel"])

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            inputs, targets = batch
            loss = self.loss_of(self.model(inputs), targets)
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
            inputs, targets = batch
            self.log("val_loss", self.loss_of(self.model(inputs), targets), prog_bar=True, sync_dist=True)

        def configure_gradient_clipping(self, optimizer: object, gradient_clip_val: float, **how: str) -> None:
            if job.layout == "tp":
                clip_mixed(self.model)
            else:
                self.clip_gradients(optimizer, gradient_clip_val, **how)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(self.model)

    class Watch(Callback):
        def on_train_epoch_start(self, trainer: Trainer, module: LightningModule) -> None:
            clock.start()

        def on_train_batch_end(
            self, trainer: Trainer, module: LightningModule, outputs: object, batch: tuple[Tensor, Tensor], index: int
        ) -> None:
            if index + 1 == trainer.num_training_batches:
                clock.stop(len(training))

    clock, ranks = EpochClock(), int(os.environ["WORLD_SIZE"])
    sizes = {"data_parallel_size": job.data_ranks, "tensor_parallel_size": ranks // job.data_ranks}
    training, held_out = job.splits()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="cpu",
            devices=ranks,
            strategy=DDPStrategy() if job.layout == "ddp" else ModelParallelStrategy(**sizes),
            max_epochs=job.epochs,
            gradient_clip_val=CLIP,
            log_every_n_steps=LOG_STEPS,
            default_root_dir=folder,
            callbacks=[Watch()],
        )
        trainer.fit(
            Module(),
            DataLoader(training, batch_size=BATCH // job.data_ranks, shuffle=True),
            DataLoader(held_out, batch_size=EVAL_BATCH),
        )
    return clock


PEERS: dict[str, Callable[[Job], EpochClock]] = {"by_hand": by_hand, "lightning": lightning}


def main() -> None:
    """Measure one peer and write its samples per second, over all ranks, to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("layout", choices=("ddp", "fsdp", "tp"))
    parser.add_argument("path", help="the text to train on")
    parser.add_argument("epochs", type=int, help="epochs to run, the first one uncounted")
    parser.add_argument("out", type=Path, help="file for the result")
    options = parser.parse_args()
    torch.set_num_threads(1)
    clock = PEERS[options.peer](Job(options.layout, options.path, options.epochs))
    if int(os.environ["RANK"]) == 0:
        options.out.write_text(str(statistics.median(clock.rates[1:])))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

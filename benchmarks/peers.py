"""The same training written with other tools, one measurement a process; benchmarks/throughput.py starts it.

Every peer trains the same modules on the same images with the same optimizer (fused AdamW), shuffles each epoch,
validates after each epoch, and is set up as its documentation's examples are, with one thread per rank and no
loader workers. Lightning and accelerate are fed from a TensorDataset, the fastest of the usual datasets. The clock
runs from the start of an epoch to its last optimizer step; validation and the first epoch do not count.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from slurm_train.data.fashion_mnist import MEAN, STD, FashionMNIST
from slurm_train.models.cnn import CNN
from slurm_train.models.mlp import MLP

MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": MLP, "cnn": CNN}
VALIDATION = 0.1
LOG_STEPS = 100  # how often a hand-written loop looks at its loss
Split = Dataset[tuple[Tensor, Tensor]]


@dataclass
class Clock:
    """Counts this rank's training samples and the seconds spent on them; the first epoch only warms up."""

    enough: float
    samples: int = 0
    seconds: float = 0.0
    epochs: int = 0
    _since: float = field(default=0.0, repr=False)

    def start(self) -> None:
        """An epoch begins."""
        self._since = time.perf_counter()

    def stop(self, samples: int) -> None:
        """The epoch's last optimizer step is done."""
        self.epochs += 1
        if self.epochs > 1:
            self.samples += samples
            self.seconds += time.perf_counter() - self._since

    def done(self) -> bool:
        """Whether enough seconds have been measured; the ranks agree."""
        if not dist.is_initialized():
            return self.seconds >= self.enough
        agreed = torch.tensor(self.seconds)
        dist.all_reduce(agreed, dist.ReduceOp.MIN)
        return agreed.item() >= self.enough


@dataclass(frozen=True)
class Job:
    """One measurement: which model, samples per rank and step, where the images are, seconds to measure."""

    model: str
    batch: int
    root: str
    seconds: float

    def images(self) -> tuple[Tensor, Tensor, int]:
        """Shuffled uint8 images, their classes, and how many of them are for training."""
        data = FashionMNIST("train", root=self.root, download=False)
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
        return data.inputs[order], data.targets[order], round(len(data) * (1 - VALIDATION))

    def tensor_splits(self) -> tuple[Split, Split]:
        """Training and validation samples, converted to floats beforehand."""
        images, classes, count = self.images()
        floats = (images.float() / 255 - MEAN) / STD
        return TensorDataset(floats[:count], classes[:count]), TensorDataset(floats[count:], classes[count:])

    def item_splits(self) -> tuple[Split, Split]:
        """Training and validation samples, each converted when it is asked for."""
        images, classes, count = self.images()
        return PerItem(images[:count], classes[:count]), PerItem(images[count:], classes[count:])

    def start(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """A fresh model and its optimizer."""
        torch.manual_seed(0)
        model = MODELS[self.model]()
        return model, adamw(model)


class PerItem(Split):
    """Images in memory, each turned into normalised floats as torchvision's ToTensor and Normalize do."""

    def __init__(self, images: Tensor, classes: Tensor) -> None:
        self.images = images
        self.classes = classes.tolist()

    def __len__(self) -> int:
        return len(self.classes)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index].float().div(255).sub_(MEAN).div_(STD), self.classes[index]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of all measurements."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def validate(model: nn.Module, loader: DataLoader[tuple[Tensor, Tensor]]) -> float:
    """Mean accuracy over the batches of a loader."""
    model.eval()
    with torch.no_grad():
        accuracy = [(model(images).argmax(1) == classes).float().mean() for images, classes in loader]
    model.train()
    return torch.stack(accuracy).mean().item()


def hand_written(job: Job, train_set: Split, validation_set: Split) -> Clock:
    """The loop of PyTorch's tutorials, with DistributedDataParallel when started as one of several ranks."""
    model, optimizer = job.start()
    sampler = None
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
        sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=job.batch, shuffle=sampler is None, sampler=sampler)
    validation = DataLoader(validation_set, batch_size=1000)
    loss_of, clock = nn.CrossEntropyLoss(), Clock(job.seconds)
    while not clock.done():
        if sampler is not None:
            sampler.set_epoch(clock.epochs)
        samples = 0
        clock.start()
        for step, (images, classes) in enumerate(loader):
            optimizer.zero_grad()
            loss = loss_of(model(images), classes)
            loss.backward()
            optimizer.step()
            samples += len(classes)
            if step % LOG_STEPS == 0:
                print(f"{step:5d} loss {loss.item():.4f}")
        clock.stop(samples)
        print(f"validation accuracy {validate(model, validation):.4f}")
    return clock


def per_item(job: Job) -> Clock:
    """Hand-written, each sample transformed as it is loaded."""
    return hand_written(job, *job.item_splits())


def tensor_dataset(job: Job) -> Clock:
    """Hand-written, over a TensorDataset of floats."""
    return hand_written(job, *job.tensor_splits())


def limit(job: Job) -> Clock:
    """Nothing but compute: one fixed batch over and over."""
    images, classes, count = job.images()
    inputs, targets = (images[: job.batch].float() / 255 - MEAN) / STD, classes[: job.batch]
    model, optimizer = job.start()
    loss_of, clock = nn.CrossEntropyLoss(), Clock(job.seconds)
    steps = count // job.batch
    while not clock.done():
        clock.start()
        for _ in range(steps):
            optimizer.zero_grad()
            loss_of(model(inputs), targets).backward()
            optimizer.step()
        clock.stop(steps * job.batch)
    return clock


def accelerate(job: Job) -> Clock:
    """Hugging Face accelerate: prepare() and the loop of its documentation."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    train_set, validation_set = job.tensor_splits()
    model, optimizer = job.start()
    model, optimizer, loader, validation = accelerator.prepare(
        model,
        optimizer,
        DataLoader(train_set, batch_size=job.batch, shuffle=True),
        DataLoader(validation_set, batch_size=1000),
    )
    loss_of, clock = nn.CrossEntropyLoss(), Clock(job.seconds)
    while not clock.done():
        samples = 0
        clock.start()
        for step, (images, classes) in enumerate(loader):
            optimizer.zero_grad()
            loss = loss_of(model(images), classes)
            accelerator.backward(loss)
            optimizer.step()
            samples += len(classes)
            if step % LOG_STEPS == 0:
                accelerator.print(f"{step:5d} loss {loss.item():.4f}")
        clock.stop(samples)
        accelerator.print(f"validation accuracy {validate(model, validation):.4f}")
    return clock


def lightning(job: Job) -> Clock:
    """Lightning's Trainer with its default logger and progress bar."""
    from lightning.pytorch import Callback, LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = MODELS[job.model]()
            self.loss_of = nn.CrossEntropyLoss()

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            images, classes = batch
            loss = self.loss_of(self.model(images), classes)
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
            images, classes = batch
            accuracy = (self.model(images).argmax(1) == classes).float().mean()
            self.log("val_accuracy", accuracy, prog_bar=True, sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(self.model)

    class Watch(Callback):
        samples = 0

        def on_train_epoch_start(self, trainer: Trainer, module: LightningModule) -> None:
            self.samples = 0
            clock.start()

        def on_train_batch_end(
            self, trainer: Trainer, module: LightningModule, outputs: object, batch: tuple[Tensor, Tensor], index: int
        ) -> None:
            self.samples += len(batch[1])
            if index + 1 == trainer.num_training_batches:
                clock.stop(self.samples)

        def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
            trainer.should_stop = clock.done()

    clock = Clock(job.seconds)
    train_set, validation_set = job.tensor_splits()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        ranks = int(os.environ.get("WORLD_SIZE", 1))
        strategy = "ddp" if ranks > 1 else "auto"
        trainer = Trainer(
            accelerator="cpu",
            devices=ranks,
            strategy=strategy,
            max_epochs=-1,
            default_root_dir=folder,
            callbacks=[Watch()],
        )
        trainer.fit(
            Module(),
            DataLoader(train_set, batch_size=job.batch, shuffle=True),
            DataLoader(validation_set, batch_size=1000),
        )
    return clock


PEERS: dict[str, Callable[[Job], Clock]] = {
    "lightning": lightning,
    "accelerate": accelerate,
    "per_item": per_item,
    "tensor_dataset": tensor_dataset,
    "limit": limit,
}


def main() -> None:
    """Measure one peer and write its samples per second, over all ranks, to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("batch", type=int, help="samples per step and rank")
    parser.add_argument("root", help="directory of the idx files")
    parser.add_argument("seconds", type=float, help="seconds to measure")
    parser.add_argument("out", type=Path, help="file for the result")
    options = parser.parse_args()
    torch.set_num_threads(1)
    clock = PEERS[options.peer](Job(options.model, options.batch, options.root, options.seconds))
    if int(os.environ.get("RANK", 0)) == 0:
        ranks = int(os.environ.get("WORLD_SIZE", 1))
        options.out.write_text(str(ranks * clock.samples / clock.seconds))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

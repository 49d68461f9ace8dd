"""Checkpoints between layouts: what one wrote, any other goes on with, exactly; and no rank is left waiting."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from slurm_train.errors import CheckpointError, UserError
from slurm_train.train.checkpoint import CheckpointStore
from slurm_train.train.saver import Staging
from slurm_train.train.state import restore, tensors_of
from tests.integration.runs import this_world

LAYOUTS = ["ddp", "fsdp", "hsdp", "tp", "ddp_tp", "fsdp_tp", "pp", "pp_fsdp"]
RANKS = 4


class Net(nn.Module):
    """Two layers between others of odd sizes: shards of the head are uneven, and one of four is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 4)
        self.head = nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(2))


@functools.lru_cache
def mesh(*axes: int) -> DeviceMesh:
    return init_device_mesh("cpu", axes, mesh_dim_names=("outer", "inner")[: len(axes)])


class Layout:
    """This rank's part of a net in a layout, its weights all 0, and an optimizer."""

    def __init__(self, name: str, optimizer: str) -> None:
        net = Net()
        if name.endswith("tp"):
            tp = mesh(RANKS) if name == "tp" else mesh(2, 2)["inner"]
            parallelize_module(net, tp, {"up": ColwiseParallel(), "down": RowwiseParallel(), "head": RowwiseParallel()})
        if name == "fsdp":
            fully_shard(net, mesh=mesh(RANKS))
        elif name == "hsdp":
            fully_shard(net, mesh=mesh(2, 2))
        elif name == "fsdp_tp":
            fully_shard(net, mesh=mesh(2, 2)["outer"])
        held = {"up", "down", "head", "seen"}
        if name.startswith("pp"):
            held = {"up", "seen"} if dist.get_rank() < 2 else {"down", "head"}
        if name == "pp_fsdp":
            for layer in held - {"seen"}:
                fully_shard(net.get_submodule(layer), mesh=mesh(2, 2)["inner"])
        self.parameters = {key: p for key, p in net.named_parameters() if key.split(".")[0] in held}
        self.buffers = {key: b for key, b in net.named_buffers() if key in held}
        groups = [[p for p in self.parameters.values() if isinstance(p, DTensor) is kind] for kind in (True, False)]
        self.optimizer = make(optimizer, [{"params": group} for group in groups if group])
        self.ema = {key: p.detach().clone().zero_() for key, p in self.parameters.items()}
        with torch.no_grad():
            for tensor in self.parameters.values():
                tensor.zero_()

    @property
    def parts(self) -> tuple:
        return self.parameters, self.buffers, self.optimizer, self.ema

    def step(self) -> None:
        """A step that needs no forward pass: the gradient of a weight is itself."""
        for parameter in self.parameters.values():
            parameter.grad = parameter.detach().clone()
        self.optimizer.step()


def make(optimizer: str, parameters) -> torch.optim.Optimizer:
    if optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=0.1, fused=True)
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in tensors.items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], exactly: bool = True) -> None:
    assert found
    for key, tensor in found.items():
        same = torch.equal(tensor, expected[key]) if exactly else torch.allclose(tensor, expected[key], atol=1e-6)
        assert same, key


def single(optimizer: str) -> Layout:
    torch.manual_seed(0)
    weights = Net().state_dict()
    layout = Layout("single", optimizer)
    with torch.no_grad():
        for key, tensor in {**layout.parameters, **layout.buffers, **layout.ema}.items():
            tensor.copy_(weights[key] + 1)
    layout.step()
    layout.step()
    return layout


@pytest.mark.parametrize(("writer", "optimizer"), [*((name, "adamw") for name in LAYOUTS), ("fsdp_tp", "sgd")])
def test_any_layout_goes_on_with_what_another_wrote(world, tmp_path, writer, optimizer):
    layout = single(optimizer)
    store = CheckpointStore(tmp_path)
    states = [tensors_of(*layout.parts)]
    store.save(0, states[0], {"step": 0})
    states = [{key: tensor.clone() for key, tensor in states[0].items()}]
    for _ in range(2):
        layout.step()
        states.append({key: tensor.clone() for key, tensor in tensors_of(*layout.parts).items()})
    world(RANKS).run(write_and_read_everywhere, str(tmp_path), writer, optimizer, states)
    alone = Layout("single", optimizer)
    path, broken = store.newest()
    assert (path.name, broken) == ("step_000001", [])
    restore(store, path, *alone.parts)
    assert tensors_of(*alone.parts).keys() == states[1].keys() == store.sizes(path).keys()
    assert_same(tensors_of(*alone.parts), states[1], exactly=False)
    assert store.extra(path) == {"written by": [0, 1, 2, 3]}


def write_and_read_everywhere(directory: str, writer: str, optimizer: str, states: list[dict[str, Tensor]]) -> None:
    this = this_world("checkpoints")
    store = CheckpointStore(Path(directory), this)
    layout = Layout(writer, optimizer)
    restore(store, Path(directory) / "step_000000", *layout.parts)
    assert_same(whole(tensors_of(*layout.parts)), states[0])
    layout.step()
    written = {key: tensor.clone() for key, tensor in whole(tensors_of(*layout.parts)).items()}
    path = store.save(1, tensors_of(*layout.parts), {"written by": this.gather(this.info.rank)})
    everything: list[dict[str, Tensor]] = [{}] * RANKS
    dist.all_gather_object(everything, written)
    written = {key: tensor for part in everything for key, tensor in part.items()}
    for reader in LAYOUTS:
        layout = Layout(reader, optimizer)
        restore(store, path, *layout.parts)
        assert_same(whole(tensors_of(*layout.parts)), written)
        layout.step()
        assert_same(whole(tensors_of(*layout.parts)), states[2], exactly=False)


@pytest.mark.parametrize("layout", ["ddp", "hsdp"])
def test_each_part_is_written_once_and_by_many(world, tmp_path, layout):
    world(RANKS).run(save_large, str(tmp_path / "many"), layout)
    shards = [path.stat().st_size for path in (tmp_path / "many/step_000001").glob("*.distcp")]
    once = 4 * 4 * 250_000
    assert len(shards) == RANKS and once < sum(shards) < 1.05 * once
    assert max(shards) < 0.3 * once


def save_large(directory: str, layout: str) -> None:
    net = nn.ParameterDict({f"w{number}": torch.rand(250, 1000) for number in range(4)})
    if layout == "hsdp":
        fully_shard(net, mesh=mesh(2, 2))
    tensors = {f"model.{key}": tensor.detach() for key, tensor in net.items()}
    CheckpointStore(Path(directory), this_world("large")).save(1, tensors, {})


def test_the_background_writes_the_same_while_training_goes_on(world, tmp_path):
    world(RANKS).run(save_both_ways, str(tmp_path))
    for file in [*(tmp_path / "now/step_000001").glob("*.distcp"), tmp_path / "now/step_000001/trainer.pt"]:
        assert file.read_bytes() == (tmp_path / "later/step_000001" / file.name).read_bytes()
    assert len(list((tmp_path / "later/step_000001").iterdir())) == RANKS + 3
    assert not list((tmp_path / "later").glob(".*"))


def save_both_ways(directory: str) -> None:
    this = this_world("both")
    now = CheckpointStore(Path(directory) / "now", this)
    later = CheckpointStore(Path(directory) / "later", this, background=True)
    layout = Layout("fsdp", "adamw")
    restore_some(layout)
    now.save(1, tensors_of(*layout.parts), {"step": 1})
    later.save(1, tensors_of(*layout.parts), {"step": 1})
    for _ in range(20):  # on the group of training, while the thread uses its own
        layout.step()
        whole(tensors_of(*layout.parts))
    later.save(2, tensors_of(*layout.parts), {"step": 2})
    assert later.wait() == Path(directory) / "later/step_000002"
    again = Layout("ddp", "adamw")
    restore(later, Path(directory) / "later/step_000002", *again.parts)
    assert_same(whole(tensors_of(*again.parts)), whole(tensors_of(*layout.parts)))


def restore_some(layout: Layout) -> None:
    with torch.no_grad():
        for parameter in layout.parameters.values():
            parameter.fill_(1.5)
    layout.step()


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_of_one_rank_is_told_by_all_and_nothing_appears(world, tmp_path, background, failing):
    world(2).run(fail_then_save, str(tmp_path), failing, background)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000002"]


def fail_then_save(directory: str, failing: int, background: bool) -> None:
    this = this_world("failing")
    store = CheckpointStore(Path(directory), this, background=background)
    tensors = {"model.a": torch.ones(4), "model.b": torch.ones(4)}
    full = OSError(28, "No space left on device")
    patches = [(dcp.FileSystemWriter, "write_data", f"rank {failing}: .*No space left on device")]
    if background:
        patches.append((Staging, "copy", "No space left on device"))
    for owner, name, told in patches:
        with (
            raising(owner, name, full if this.info.rank == failing else None),
            pytest.raises(CheckpointError, match=f"step_000001 cannot be written: .*{told}"),
        ):
            store.save(1, tensors, {})
            store.wait()
    with pytest.raises(CheckpointError, match="step_000001 cannot be written: the state of the trainer"):
        store.save(1, tensors, {"callback": Path} if this.is_main else {})
        store.wait()
    store.save(1, tensors, {})
    store.wait()
    store = CheckpointStore(Path(directory), this, keep=1)
    store.save(2, tensors, {})


@contextmanager
def raising(owner: type, name: str, error: Exception | None) -> Iterator[None]:
    """Let a method raise, if there is an error."""
    before = getattr(owner, name)

    def fail(*args: object, **kwargs: object) -> None:
        raise error

    if error is not None:
        setattr(owner, name, fail)
    try:
        yield
    finally:
        setattr(owner, name, before)


def test_a_file_that_one_rank_cannot_read_is_told_by_all(world, tmp_path):
    store = CheckpointStore(tmp_path)
    path = store.save(1, {"model.a": torch.ones(2)}, {})
    world(2).run(load_what_is_missing, str(tmp_path), path.name)


def load_what_is_missing(directory: str, name: str) -> None:
    store = CheckpointStore(Path(directory), this_world("missing"))
    wanted = {"model.a": torch.empty(2), **({"model.b": torch.empty(2)} if dist.get_rank() else {})}
    with pytest.raises(CheckpointError, match=f"{name} cannot be loaded: rank 1: .*model.b"):
        store.load(Path(directory) / name, wanted)


def test_sharded_state_that_has_no_whole_is_refused(world, tmp_path):
    world(2).run(keep_odd_state, str(tmp_path))


def keep_odd_state(directory: str) -> None:
    net = nn.Linear(4, 4, bias=False)
    fully_shard(net, mesh=mesh(2))
    parts = dict(net.named_parameters()), {}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.state[net.weight] = {"local": torch.ones(2, 4)}
    with pytest.raises(UserError, match="optim: SGD keeps 'local', which is not sharded as its parameter is"):
        tensors_of(*parts, optimizer)
    optimizer.state[net.weight] = {"rows": DTensor.from_local(torch.ones(2), mesh(2), [Shard(0)])}
    store = CheckpointStore(Path(directory), this_world("odd"))
    path = store.save(1, tensors_of(*parts, optimizer), {})
    keeps = Rows(net.parameters(), {})
    with pytest.raises(UserError, match="optim: Rows keeps 'rows' in another size than its sharded parameter"):
        restore(store, path, *parts, keeps)


class Rows(torch.optim.Optimizer):
    """Keeps the sums of rows, and cannot show it."""

    def step(self) -> None:
        raise RuntimeError("not here")

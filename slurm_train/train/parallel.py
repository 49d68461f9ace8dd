"""A plain module made parallel: built, cut into stages, sharded by tensor, filled, sharded or replicated over data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig, ListConfig, OmegaConf
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from slurm_train.topology.grid import Grid
from slurm_train.train.batchnorm import sync_batchnorm
from slurm_train.train.blocks import block_names
from slurm_train.train.buckets import settle_buckets
from slurm_train.train.materialise import Weights, build_model, fill
from slurm_train.train.mesh import Mesh
from slurm_train.train.pipeline import PipelineModel
from slurm_train.train.precision import autocast, shard_policy
from slurm_train.train.recompute import recompute
from slurm_train.train.stages import check_stages, check_ties, check_trained, holds, keep_stage, stage_of, stage_starts
from slurm_train.train.tensor import declared_plan, resolve_plan, shard_layers, tied_names


def is_sharded(grid: Grid, train: DictConfig) -> bool:
    """Whether fully_shard wraps the model: where there are shards, where replicas are more than plain modules, and
    where weights are kept in another format or place than they are used in."""
    replicas_of_parts = grid.data_ranks > 1 and (grid.tp > 1 or grid.pp > 1)
    return grid.dp_shard > 1 or replicas_of_parts or train.precision == "bf16_pure" or train.offload


@dataclass(frozen=True)
class Whole:
    """What is known of the whole model on every rank, whatever part of it the rank holds."""

    shapes: Mapping[str, torch.Size]
    """Name -> shape of every parameter and persistent buffer; a tied parameter under its first name."""

    parameters: tuple[str, ...]
    """Names of the parameters among them."""

    aliases: Mapping[str, str]
    """Further name of a tied parameter -> its first name."""


@dataclass(frozen=True)
class ParallelModel:
    """A model as this rank holds it."""

    module: nn.Module
    """What a training function calls."""

    parts: Mapping[int, nn.Module]
    """The user's modules inside it: this rank's pipeline stages by number; one, number 0, without a pipeline."""

    stages: int
    """Number of pipeline stages over all ranks; 1 without a pipeline."""

    mesh: Mesh
    """The device mesh."""

    whole: Whole
    """The whole model."""

    owners: Mapping[str, int]
    """Name of each parameter -> place on the pp axis of the ranks that hold it; empty without a pipeline."""

    on_shards: bool
    """Whether its scores are left sharded over the classes, for the loss to be computed on the shards."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters by the whole model's names, as the optimizer updates them."""
        for part in self.parts.values():
            for module in part.modules():
                # After a forward pass alone the outermost module of fully_shard still shows its gathered parameters.
                if isinstance(module, FSDPModule):
                    module.reshard()
            yield from part.named_parameters()

    def parameters(self) -> list[nn.Parameter]:
        """This rank's parameters."""
        return [parameter for _, parameter in self.named_parameters()]

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's persistent buffers by the whole model's names."""
        for part in self.parts.values():
            yield from ((name, tensor) for name, tensor in part.named_buffers() if name in self.whole.shapes)

    def count(self) -> int:
        """Number of parameters of the whole model."""
        return sum(self.whole.shapes[name].numel() for name in self.whole.parameters)

    def agree_on_buffers(self) -> None:
        """Give all data ranks the buffers of the first, such as batch-norm statistics. Collective."""
        if self.mesh.data_group is not None:
            for part in self.parts.values():
                for buffer in part.buffers():
                    dist.broadcast(buffer, group=self.mesh.data_group, group_src=0)


def describe(model: nn.Module) -> Whole:
    """What is known of a whole model."""
    shapes = {name: tensor.shape for name, tensor in model.named_parameters()}
    parameters = tuple(shapes)
    persistent = model.state_dict().keys()
    shapes |= {name: tensor.shape for name, tensor in model.named_buffers() if name in persistent}
    return Whole(shapes, parameters, {name: first for first, *others in tied_names(model) for name in others})


def parallelize(
    config: DictConfig,
    whole: nn.Module,
    mesh: Mesh,
    device: torch.device,
    example: Tensor | None = None,
    weights: Weights | None = None,
) -> ParallelModel:
    """A model as this rank's part of a layout.

    Args:
        config: the whole configuration; `model`, `parallel`, `train` and `seed` count.
        whole: what build_model gave, the same on every rank.
        mesh: the device mesh.
        device: this rank's device.
        example: a few input samples, on which a model that is not built on the meta device is tried before it is cut.
        weights: a file of initial weights.

    Raises:
        ConfigError: the tensor-parallel plan or the blocks do not fit the model.
        UserError: the model cannot be cut or sharded as asked.
    """
    parallel, train, grid = config.parallel, config.train, mesh.grid
    known = describe(whole)
    blocks = block_names(whole, list(parallel.blocks))
    plan = resolve_plan(whole, dict(parallel.plan) or declared_plan(whole), grid.tp) if grid.tp > 1 else {}
    again = [] if train.recompute is None else _recomputed(whole, blocks, train.recompute)
    if grid.pp > 1:
        parts, starts = _stages(config, whole, mesh, blocks, example)
    else:
        parts, starts = {0: whole}, []
    for part in parts.values():
        mine = [name for name in blocks if holds(part, name)]
        if plan:
            here = {name: style for name, style in plan.items() if holds(part, name)}
            shard_layers(part, mesh.axis("tp"), here, parallel.sequence, parallel.loss_parallel)
        if parallel.sync_batchnorm and mesh.data_group is not None:
            sync_batchnorm(part, mesh.data_group)
        if part is not whole and (held := [name for name in again if holds(part, name)]):
            recompute({}, part, held)
        _fill_and_shard(config, part, mine, mesh, device, weights)
        if train.compile:
            for block in [part.get_submodule(name) for name in mine] or [part]:
                block.compile()
        autocast(part, train.precision, device)
    module = parts[0] if grid.pp == 1 else PipelineModel(parts)
    if grid.dp_replicate > 1 and not is_sharded(grid, train):
        module = _replicate(module, mesh, parallel.find_unused)
    on_shards = bool(parallel.loss_parallel) and "head" in plan.values()
    owners = {name: stage_of(whole, name, starts) % grid.pp for name in known.parameters} if starts else {}
    return ParallelModel(module, parts, len(starts) + 1, mesh, known, owners, on_shards)


def _recomputed(whole: nn.Module, blocks: list[str], what: Any) -> list[str]:
    """Names of the modules whose activations are computed again; done already in the whole model."""
    chosen = OmegaConf.to_container(what) if isinstance(what, ListConfig) else what
    return recompute({name: whole.get_submodule(name) for name in blocks}, whole, chosen)


def _stages(
    config: DictConfig, whole: nn.Module, mesh: Mesh, blocks: list[str], example: Tensor | None
) -> tuple[dict[int, nn.Module], list[str]]:
    """This rank's pipeline stages by number, and the modules that start the second stage, the third, and so on."""
    parallel, pp = config.parallel, mesh.grid.pp
    virtual = parallel.virtual if parallel.schedule == "interleaved" else 1
    count = pp * virtual
    starts = stage_starts(whole, blocks, list(parallel.cuts), count)
    check_ties(whole, starts)
    check_trained(whole, starts, pp)

    def stage(number: int) -> nn.Module:
        return keep_stage(build_model(config.model, config.seed), starts, number)

    on_meta = any(parameter.is_meta for parameter in whole.parameters())
    if not on_meta and example is not None:
        check_stages(whole, [stage(number) for number in range(count)], example)
    return {number: stage(number) for number in range(mesh.place["pp"], count, pp)}, starts


def _fill_and_shard(
    config: DictConfig,
    part: nn.Module,
    blocks: list[str],
    mesh: Mesh,
    device: torch.device,
    weights: Weights | None,
) -> None:
    """Fill one block after the other and keep only its shards, then the rest; so the peak is one block."""
    train = config.train
    sharded = is_sharded(mesh.grid, train)
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if train.offload else OffloadPolicy()
    alone = _self_contained(part, blocks)
    for name in [*alone, ""]:
        fill(part, name, config.seed, device, weights, done=alone if not name else ())
        if sharded:
            module = part.get_submodule(name)
            fully_shard(module, mesh=mesh.shards, mp_policy=shard_policy(train.precision), offload_policy=offload)


def _self_contained(part: nn.Module, blocks: list[str]) -> list[str]:
    """The blocks that share no parameter with what lies outside: fully_shard would give each side one of its own."""

    def divides(block: str, names: list[str]) -> bool:
        return len({name.startswith(f"{block}.") for name in names}) == 2

    tied = tied_names(part)
    return [block for block in blocks if not any(divides(block, names) for names in tied)]


def _replicate(model: nn.Module, mesh: Mesh, find_unused: bool) -> nn.Module:
    group = mesh.group("dp_replicate")
    on_cuda = mesh.devices is not None and mesh.devices.device_type == "cuda"
    replica = DistributedDataParallel(
        model,
        device_ids=[torch.cuda.current_device()] if on_cuda else None,
        process_group=group,
        find_unused_parameters=find_unused,
        gradient_as_bucket_view=True,
    )
    if not find_unused:
        settle_buckets(replica)
    return replica

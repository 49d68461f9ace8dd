"""From a configuration to a model whose weights depend on the seed alone, not on the layout or the world size.

A model with a method `init_weights(module)` is built on the meta device, without memory for its weights. After it has
been cut and sharded there, each of its modules is filled by itself: whole, under a seed made of the run's seed and the
module's name, and only this rank's shard of it is kept. So no rank ever holds more than one module beside its shards.
Any other model is built whole, under one seed, on every rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Protocol

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from slurm_train.errors import UserError
from slurm_train.train.targets import build, find


class Weights(Protocol):
    """A file of initial weights."""

    def get(self, name: str) -> Tensor:
        """The whole tensor of that name."""


def build_model(node: DictConfig, seed: int) -> nn.Module:
    """The model that a `model` config describes: on the meta device if it has init_weights, else with its weights.

    Raises:
        UserError: the target fails, or gives no nn.Module.
    """
    plain = OmegaConf.masked_copy(node, [key for key in node if key != "init_from"])
    torch.manual_seed(seed)
    with torch.device("meta") if _meta(node) else torch.device("cpu"):
        model = build(plain, "model")
    if not isinstance(model, nn.Module):
        raise UserError(f"{node._target_} gave a {type(model).__name__}, not a torch.nn.Module", "model")
    return model


def _meta(node: DictConfig) -> bool:
    return callable(getattr(find(node, "model"), "init_weights", None))


def fill(
    model: nn.Module,
    below: str,
    seed: int,
    device: torch.device,
    weights: Weights | None = None,
    done: Collection[str] = (),
) -> None:
    """Give real memory and initial values to what lies below a module and has none yet; move the rest to the device.

    Args:
        model: the whole model, or a stage of it; on the meta device where it has init_weights.
        below: name of the module to fill; "" for all of the model.
        seed: the run's seed.
        device: where the weights are needed.
        weights: a file to take them from instead.
        done: names of the modules below which all is filled already.
    """
    kept = model.state_dict().keys()
    tensors = [*model.named_parameters(), *model.named_buffers()]
    names: dict[Tensor, str] = {tensor: name for name, tensor in tensors if name in kept}
    for name, module in model.get_submodule(below).named_modules(prefix=below):
        if any(f"{name}.".startswith(f"{block}.") for block in done):
            continue
        if any(tensor.is_meta for _, tensor in _own(module)):
            _fill_module(model, module, name, seed, device, weights, names)
        else:
            _move_module(model, module, device, weights, names)


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def _fill_module(
    model: nn.Module,
    module: nn.Module,
    name: str,
    seed: int,
    device: torch.device,
    weights: Weights | None,
    names: Mapping[Tensor, str],
) -> None:
    """Fill one module's own parameters and buffers whole, then keep this rank's shards."""
    before = dict(_own(module))
    for key, tensor in before.items():
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        _put(module, key, nn.Parameter(whole, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else whole)
    initialise: Callable[[nn.Module], None] = model.init_weights  # type: ignore[assignment]
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed_of(seed, name))
        with torch.no_grad():
            initialise(module)
    for key, tensor in before.items():
        whole = getattr(module, key)
        if weights is not None and tensor in names:
            whole = weights.get(names[tensor]).to(device, whole.dtype, copy=True)
        kept = _shard(whole.detach(), tensor)
        new = nn.Parameter(kept, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else kept
        _replace(model, tensor, new)
        _put(module, key, new)


def _move_module(
    model: nn.Module, module: nn.Module, device: torch.device, weights: Weights | None, names: Mapping[Tensor, str]
) -> None:
    """Move one module's own parameters and buffers to the device, with the values of a file if there is one."""
    for key, tensor in list(_own(module)):
        if isinstance(tensor, nn.Parameter):
            with torch.no_grad():
                if not isinstance(tensor, DTensor):  # sharded ones are on the device already
                    tensor.data = tensor.data.to(device)
                if weights is not None and tensor in names:
                    tensor.copy_(_shard(weights.get(names[tensor]).to(device, tensor.dtype), tensor))
        elif weights is not None and tensor in names:
            _put(module, key, weights.get(names[tensor]).to(device, tensor.dtype, copy=True))
        else:
            _put(module, key, tensor.to(device))


def _shard(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's shard of a whole tensor, cut without communication."""
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def _put(module: nn.Module, key: str, tensor: Tensor) -> None:
    if key in module._parameters:
        module._parameters[key] = tensor  # type: ignore[assignment]
    else:
        module._buffers[key] = tensor


def _replace(model: nn.Module, old: Tensor, new: Tensor) -> None:
    """Let every module that shares a parameter share the new one."""
    if not isinstance(old, nn.Parameter):
        return
    for module in model.modules():
        for key, tensor in module._parameters.items():
            if tensor is old:
                module._parameters[key] = new  # type: ignore[assignment]


def seed_of(seed: int, name: str) -> int:
    """The seed of one module's initial values."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return int.from_bytes(digest[:7], "little")

"""Number formats of the passes: autocast around a model, or weights in bf16 with an fp32 master copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from slurm_train.errors import UserError

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def check_precision(precision: str, device: torch.device) -> None:
    """Refuse a format that the device does not have.

    Raises:
        UserError: names train.precision and what works there.
    """
    key = f"train.precision={precision}"
    if precision == "fp16" and device.type != "cuda":
        raise UserError(f"a {device.type} device has no fp16 training", key, "use bf16, or train.device=cuda")
    if precision == "bf16" and device.type == "mps":
        raise UserError("an mps device has no bf16 autocast", key, "use fp32")
    if precision.startswith("bf16") and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise UserError(f"{torch.cuda.get_device_name(device)} has no bf16", key, "use fp16 or fp32")


def autocast(module: nn.Module, precision: str, device: torch.device) -> None:
    """Run a module's forward under autocast, in place; nothing for fp32 and bf16_pure."""
    if precision in AUTOCAST:
        context = torch.autocast(device.type, AUTOCAST[precision])
        module.forward = context(module.forward)  # type: ignore[method-assign]


def shard_policy(precision: str) -> MixedPrecisionPolicy:
    """What fully_shard computes with: its shards stay fp32, which the optimizer updates."""
    if precision != "bf16_pure":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def plain_loss(loss: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Tensor]:
    """The loss function, computed in fp32 on outputs of any format, as a plain tensor also for sharded outputs.

    It raises a UserError where it cannot take the kind of object that the model gives.
    """

    def plain(outputs: Any, targets: Any) -> Tensor:
        low = isinstance(outputs, Tensor) and outputs.dtype in (torch.bfloat16, torch.float16)
        try:
            value = loss(outputs.float() if low else outputs, targets)
        except (AttributeError, TypeError) as error:
            if isinstance(outputs, Tensor):
                raise
            raise UserError(
                f"it cannot take what the model gives, an object of type {type(outputs).__name__} ({error})",
                "train.loss",
                "let the model's forward return a tensor, or name a loss that takes the object",
            ) from error
        return value.full_tensor() if isinstance(value, DTensor) else value

    return plain

"""Pipeline stages cut out of a plain module.

A stage is the whole model with the modules of the other stages replaced by ones that hand their input on, so that the
model's own forward runs unchanged and every name stays. That is right for a model whose forward does no more than call
its modules one after the other (or what changes nothing when it is done twice, such as flatten or relu): a model with
its weights at hand is tried before it is cut, and refused when its stages together do not give what it gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from slurm_train.data.batches import bounds
from slurm_train.errors import UserError
from slurm_train.train.tensor import tied_names

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class Skip(nn.Module):
    """Stands for a module of another stage: gives its first input on."""

    def forward(self, first: Any, *rest: Any, **named: Any) -> Any:
        """The first input."""
        return first


def stage_starts(model: nn.Module, blocks: Sequence[str], cuts: Sequence[str], stages: int) -> list[str]:
    """Names of the modules that start the second stage, the third, and so on.

    Args:
        model: the whole model.
        blocks: its blocks, cut into even runs where `cuts` is empty.
        cuts: parallel.cuts.
        stages: number of stages.

    Raises:
        UserError: a cut names no module, their number or order does not fit, or there are fewer blocks than stages.
    """
    if not cuts:
        if len(blocks) < stages:
            what = f"{len(blocks)} blocks ({', '.join(blocks)})" if blocks else "no blocks"
            remedy = "take fewer stages, or say where they begin: parallel.cuts"
            raise UserError(f"{type(model).__name__} has {what} for {stages} stages", "parallel.pp", remedy)
        return [blocks[bounds(len(blocks), stage, stages)[0]] for stage in range(1, stages)]
    names = [name for name, _ in model.named_modules() if name]
    for cut in cuts:
        if cut not in names:
            raise UserError("is no module of the model", f"parallel.cuts={cut}", f"it has {', '.join(names[:12])}")
    if len(cuts) != stages - 1:
        raise UserError(f"{stages} stages have {stages - 1} cuts", f"parallel.cuts=[{','.join(cuts)}]")
    if sorted(cuts, key=names.index) != list(cuts):
        raise UserError("must be in the order of the model", f"parallel.cuts=[{','.join(cuts)}]")
    return list(cuts)


def check_ties(model: nn.Module, starts: Sequence[str]) -> None:
    """Refuse a parameter that two stages would share.

    Raises:
        UserError: names it.
    """
    names = [name for name, _ in model.named_modules()]
    for group in tied_names(model):
        stages = {_stage_of(name.rpartition(".")[0], names, starts) for name in group}
        if len(stages) > 1:
            tied = " and ".join(group)
            remedy = "untie them (of this project's transformer: model.tied=false), or leave pipeline stages out"
            raise UserError(f"{tied} are one tied weight across pipeline stages", "parallel.pp", remedy)


def check_trained(model: nn.Module, starts: Sequence[str], pp: int) -> None:
    """Refuse pipeline ranks that have nothing to train.

    Raises:
        UserError: names them.
    """
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    idle = sorted({*range(pp)} - {stage_of(model, name, starts) % pp for name in names})
    if idle:
        which = f"pipeline rank{'s' * (len(idle) > 1)} {', '.join(map(str, idle))}"
        raise UserError(f"{which} would have no parameter to train", "parallel.pp", "cut elsewhere: parallel.cuts")


def keep_stage(model: nn.Module, starts: Sequence[str], stage: int) -> nn.Module:
    """Replace what other stages hold, in place; returns the model."""
    names = [name for name, _ in model.named_modules()]

    def cut(module: nn.Module, prefix: str) -> None:
        for key, child in list(module.named_children()):
            name = f"{prefix}{key}"
            divided = any(start.startswith(f"{name}.") for start in starts)
            if divided or isinstance(child, _LISTS):
                cut(child, f"{name}.")
            elif _stage_of(name, names, starts) != stage:
                module._modules[key] = Skip()

    cut(model, "")
    return model


def holds(part: nn.Module, name: str) -> bool:
    """Whether a stage holds the module of that name itself, and no stand-in."""
    module: Any = part
    for key in name.split("."):
        module = getattr(module, key, Skip())
    return not isinstance(module, Skip)


def stage_of(model: nn.Module, parameter: str, starts: Sequence[str]) -> int:
    """The stage that holds a parameter of the whole model."""
    return _stage_of(parameter.rpartition(".")[0], [name for name, _ in model.named_modules()], starts)


def _stage_of(name: str, names: Sequence[str], starts: Sequence[str]) -> int:
    """The stage of a module: the number of stages that begin at it, around it or before it."""
    place = names.index(name)
    return sum(names.index(start) <= place for start in starts)


@torch.no_grad()
def check_stages(model: nn.Module, stages: Sequence[nn.Module], inputs: Tensor) -> None:
    """Refuse a model whose stages, one after the other, do not give what the whole gives, in training too.

    Args:
        model: with its weights, on the CPU; to be used no more, for its buffers may change.
        stages: the same, cut; also to be used no more.
        inputs: a few samples.

    Raises:
        UserError: they differ.
    """
    try:
        same = all(_same(model, stages, inputs, training) for training in (False, True))
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
        same = False
    if not same:
        raise UserError(
            f"the stages of {type(model).__name__} together do not give what the whole gives: its forward does more "
            "between its modules than to call them one after the other",
            "parallel.cuts",
            "cut elsewhere, or write what it does there as a module",
        )


def _same(model: nn.Module, stages: Sequence[nn.Module], inputs: Tensor, training: bool) -> bool:
    """Whether both give the same from the same random state: a function that drops would do so in each stage."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        whole = model.train(training)(inputs)
        torch.manual_seed(0)
        hidden = inputs
        for stage in stages:
            hidden = stage.train(training)(hidden)
    return torch.equal(hidden, whole)

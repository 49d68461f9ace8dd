"""A closer look at a model: imported and built without memory for its weights, in a process of its own."""

from __future__ import annotations

from dataclasses import replace

from omegaconf import DictConfig, ListConfig, OmegaConf

from slurm_train.launch.children import ask
from slurm_train.launch.plan import NAMING_KEYS, LaunchPlan
from slurm_train.launch.stages import stage_count


def look(plan: LaunchPlan, config: DictConfig) -> LaunchPlan:
    """The plan with the model's real size and layers.

    Raises:
        ConfigError: the model does not import, cannot be built, or does not fit the layout; the real cause is told.
        SlurmTrainError: it could not be looked at.
    """
    recompute = config.train.recompute
    question = {
        "search": [plan.cwd, *plan.config_dirs],
        "model": OmegaConf.to_container(config.model, resolve=True),
        "plan": OmegaConf.to_container(config.parallel.plan),
        "tp": plan.grid["tp"],
        "blocks": list(config.parallel.blocks),
        "cuts": list(config.parallel.cuts),
        "recompute": list(recompute) if isinstance(recompute, ListConfig) else recompute,
        "stages": stage_count(config.parallel, plan.grid["pp"]),
    }
    answer = ask("slurm_train.train.inspect_model", question, "the model", plan.cwd)
    checked = tuple(note for note in plan.unchecked if not note.startswith(("model", *NAMING_KEYS)))
    return replace(plan, parameters=answer["parameters"], layers=tuple(answer["layers"]), unchecked=checked)

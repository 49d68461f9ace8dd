"""The verbs that have options or arguments of their own, as typer reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

import typer

Overrides = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Overrides.")]
Run = Annotated[str, typer.Argument(metavar="RUN", help="A run directory or a run id.")]


def bound(verb: str, config_dirs: Sequence[str]) -> Callable[..., None]:
    """The function of a verb, for typer; the config directories have been read from the command line before."""

    def plan(
        overrides: Overrides = None,
        deep: Annotated[bool, typer.Option("--deep", help="Import and count your own model.")] = False,
        config: Annotated[bool, typer.Option("--config", help="Add the whole configuration.")] = False,
        json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
    ) -> None:
        """Print what a run would be, with all that is wrong. Starts nothing."""
        from slurm_train.launch.start import planned

        if text := planned(overrides or [], config_dirs, deep=deep, config=config, as_json=json):
            print(text)

    def resume(run: Run, overrides: Overrides = None) -> None:
        """Go on with a run from its newest checkpoint, in the same run directory."""
        from slurm_train.launch import start

        start.resume(run, overrides or [], config_dirs)

    def evaluate(run: Run, overrides: Overrides = None) -> None:
        """Test loss and accuracy of a run's newest checkpoint."""
        from slurm_train.launch import start

        start.evaluate(run, overrides or [], config_dirs)

    functions: dict[str, Callable[..., None]] = {"plan": plan, "resume": resume, "evaluate": evaluate}
    return functions[verb]

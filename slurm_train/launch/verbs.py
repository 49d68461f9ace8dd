"""The verbs that have options or arguments of their own, as typer reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

import typer

Overrides = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Overrides.")]
Run = Annotated[str, typer.Argument(metavar="RUN", help="A run directory, a run id or a job id.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def bound(verb: str, config_dirs: Sequence[str]) -> Callable[..., int | None]:
    """The function of a verb, for typer; the config directories have been read from the command line before.

    It returns an exit code; None is 0.
    """

    def plan(
        overrides: Overrides = None,
        deep: Annotated[bool, typer.Option("--deep", help="Import and count your own model.")] = False,
        config: Annotated[bool, typer.Option("--config", help="Add the whole configuration.")] = False,
        json: Json = False,
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

    def generate(
        run: Run,
        overrides: Overrides = None,
        prompt: Annotated[str, typer.Option("--prompt", help="How the text begins.")] = "def ",
        tokens: Annotated[int, typer.Option("--tokens", min=1, help="How many tokens to add.")] = 200,
        temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0 takes the likeliest.")] = 1.0,
        top_k: Annotated[int | None, typer.Option("--top-k", min=1, help="Draw among so many likeliest.")] = None,
        seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the draws.")] = 0,
    ) -> None:
        """Let a run's language model go on with a text."""
        from slurm_train.launch import start

        options = {"prompt": prompt, "tokens": tokens, "temperature": temperature, "top_k": top_k, "seed": seed}
        start.generate(run, overrides or [], config_dirs, options)

    def verify(
        overrides: Overrides = None,
        steps: Annotated[int, typer.Option("--steps", min=1, help="Optimizer steps to compare.")] = 10,
    ) -> None:
        """Compare a layout with one process, in lock step on the same data."""
        from slurm_train.launch import start

        start.verify(overrides or [], config_dirs, steps)

    def export(
        run: Run,
        output: Annotated[str, typer.Argument(metavar="FILE", help="A new .safetensors, .pt or .pth file.")],
        ema: Annotated[bool, typer.Option("--ema", help="The averaged weights.")] = False,
        checkpoint: Annotated[str, typer.Option("--checkpoint", help="Another than the newest: step_000100.")] = "",
    ) -> None:
        """Write the weights of a run to one file, for use without this project."""
        from slurm_train.launch import start

        print(start.export(run, output, ema, checkpoint))

    def status(
        run: Annotated[str, typer.Argument(metavar="[RUN]", help="This run alone, in full.", show_default=False)] = "",
        everything: Annotated[bool, typer.Option("--all", help="Not only the newest 20 runs.")] = False,
        json: Json = False,
    ) -> None:
        """How the runs below runs/ stand, and those of your jobs in the queue."""
        from slurm_train.launch import status

        status.print_one(run, json) if run else status.print_all(everything, json)

    def logs(
        run: Run,
        follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run has ended.")] = False,
        rank: Annotated[int | None, typer.Option("--rank", min=0, help="This rank only, without its prefix.")] = None,
        lines: Annotated[int | None, typer.Option("--lines", "-n", min=0, help="The last lines of each file.")] = None,
        job: Annotated[str | None, typer.Option("--job", help="An earlier job of the run.")] = None,
    ) -> int:
        """What the ranks of a run print, each line with its rank in front.

        With --follow the exit code is that of the run; Ctrl-C leaves it running.
        """
        from slurm_train.launch import logs

        return logs.show(run, follow=follow, rank=rank, count=lines, job=job)

    def cancel(runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="What RUN means elsewhere.")]) -> None:
        """End the jobs of runs; their ranks save first."""
        from slurm_train.launch.cancel import cancel

        for line in cancel(runs):
            print(line)

    functions: dict[str, Callable[..., int | None]] = {
        "plan": plan,
        "resume": resume,
        "evaluate": evaluate,
        "generate": generate,
        "verify": verify,
        "export": export,
        "status": status,
        "logs": logs,
        "cancel": cancel,
    }
    return functions[verb]

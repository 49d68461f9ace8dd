"""The command line: words to verbs, and the one place where an error becomes lines on stderr and an exit code."""

from __future__ import annotations

import difflib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slurm_train.errors import (
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_USER,
    TRACEBACK,
    RankError,
    Saved,
    SlurmTrainError,
    UserError,
)

if TYPE_CHECKING:
    from slurm_train.topology.ranks import RankInfo

VERBS = ("run", "plan", "verify", "resume", "evaluate", "generate", "export", "status", "logs", "cancel")

TAKE_OVERRIDES = ("plan", "verify", "resume", "evaluate", "generate")
"""The verbs that typer parses and that take KEY=VALUE too."""

TELL_SECONDS = 10.0
"""How long a rank lets the first one of its host go first, when both may have the same fault to tell."""

HELP = """\
usage: python -m slurm_train [VERB] [OPTIONS] [KEY=VALUE ...]

verbs:
  run             train (the default)
  plan            print what a run would be, with all that is wrong; starts nothing
                  --deep  import and count your own model      --config  add the whole configuration
                  --json  for programs
  verify          compare a layout with one process: losses, gradients, weights; --steps N
  resume RUN      go on from the newest checkpoint; KEY=VALUE may follow, e.g. train.epochs=20
  evaluate RUN    test loss and accuracy of the newest checkpoint
  generate RUN    let its language model go on with --prompt TEXT; --tokens N, --temperature T, --top-k K
  export RUN FILE its weights as one .safetensors or .pt file; --ema
  status [RUN]    how your runs and jobs stand, or one run in full; --all, --json
  logs RUN        what its ranks print; -f follows it to its end, --rank N, -n LINES, --job ID
  cancel RUN...   end its job; the ranks save first
RUN is a run directory, a run id or a job id.

options:
  --config-dir DIR  a directory with config files of your own; may be repeated
  --cfg job         print the composed configuration and stop
  -m, --multirun    run each point of a sweep, e.g. -m optim.lr=1e-3,1e-2
  --version, -h, --help

examples:
  python -m slurm_train +experiment=fmnist
  python -m slurm_train +experiment=fmnist parallel=ddp launcher.tasks_per_node=2
  python -m slurm_train plan +experiment=fmnist parallel=tp parallel.tp=4
  torchrun --nproc-per-node=2 -m slurm_train +experiment=fmnist
  python -m slurm_train.config.reference           every key with its meaning and default

exit codes: 0 done, 1 failed, 2 your input, 75 saved on request (go on with resume), 130 interrupted
"""


@dataclass
class Command:
    """A command line, taken apart."""

    verb: str = "run"
    words: list[str] = field(default_factory=list)
    """Overrides, and the options of verbs that have their own."""

    config_dirs: list[str] = field(default_factory=list)
    print_config: bool = False
    sweep: bool = False
    help: bool = False
    version: bool = False


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the command line says.

    Args:
        argv: the words after the program's name; by default those of this process.

    Returns:
        the exit code.
    """
    try:
        code = _do(split(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Whoever read our output has gone; nothing may be printed any more, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE
    except (Exception, KeyboardInterrupt) as error:
        return _told(error)


def split(argv: Sequence[str]) -> Command:
    """Take a command line apart.

    Raises:
        UserError: an option lacks its value, or the first word is no verb.
    """
    command = Command()
    words = list(argv)
    if not words:
        command.help = True
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if name in ("--local-rank", "--local_rank"):  # torch.distributed.launch puts it in front of ours
            if not equals and words:
                words.pop(0)
        elif name in ("--config-dir", "-cd"):
            command.config_dirs.append(value if equals else _next(words, name))
        elif name in ("--cfg", "-c"):
            what = value if equals else _next(words, name)
            if what != "job":
                raise UserError(f"cannot print {what!r}", name, "type --cfg job")
            command.print_config = True
        elif word in ("-m", "--multirun"):
            command.sweep = True
        elif word in ("-h", "--help"):
            command.help = True
        elif word == "--version":
            command.version = True
        else:
            command.words.append(word)
    if command.words and _is_bare(command.words[0]):
        command.verb = _verb(command.words.pop(0))
    return command


def _next(words: list[str], name: str) -> str:
    if not words:
        raise UserError("its value is missing", name)
    return words.pop(0)


def _is_bare(word: str) -> bool:
    return "=" not in word and not word.startswith(("-", "+", "~"))


def _verb(word: str) -> str:
    if word in VERBS:
        return word
    near = difflib.get_close_matches(word, VERBS, n=2, cutoff=0.5)
    remedy = f"did you mean {' or '.join(near)}?" if near else f"the verbs are {', '.join(VERBS)}"
    raise UserError(f"{word} is neither a verb nor KEY=VALUE", remedy=remedy)


def _do(command: Command) -> int:
    """Do a command; everything that takes long to import is imported where it is needed."""
    if command.version:
        from slurm_train import __version__

        print(__version__)
    elif command.help and command.verb == "run":
        print(HELP, end="")
    elif command.help:
        return _parsed_by_typer(command, ["--help"])
    elif command.print_config:
        from slurm_train.launch.start import composed_text

        print(composed_text(command.words, command.config_dirs), end="")
    elif command.sweep:
        if command.verb != "run":
            raise UserError(f"{command.verb} has no sweeps", "-m", "leave it out")
        from slurm_train.launch.start import sweep

        return sweep(command.words, command.config_dirs)
    elif command.verb == "run":
        from slurm_train.launch.start import train

        train(command.words, command.config_dirs)
    else:
        return _parsed_by_typer(command, command.words)
    return EXIT_OK


def _parsed_by_typer(command: Command, words: Sequence[str]) -> int:
    """Do a verb that has options or arguments of its own."""
    import typer

    from slurm_train.launch import verbs

    if command.verb in ("resume", "evaluate", "generate", "export", "logs", "cancel") and not words:
        raise UserError("RUN is missing", command.verb, "name a run directory, a run id or a job id")
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    settings = {"ignore_unknown_options": command.verb in TAKE_OVERRIDES}
    app.command(command.verb, context_settings=settings)(verbs.bound(command.verb, command.config_dirs))
    try:
        code = app(list(words), prog_name=f"python -m slurm_train {command.verb}", standalone_mode=False)
    except typer.TyperException as error:
        raise UserError(str(error), command.verb, "see --help") from None
    return code or EXIT_OK


def _told(error: BaseException) -> int:
    """Tell of an error, a line for each fault; returns the exit code."""
    from slurm_train.report.progress import close_all

    close_all()
    if isinstance(error, KeyboardInterrupt):
        lines, code = ["interrupted"], EXIT_INTERRUPTED
    elif isinstance(error, SlurmTrainError):
        mark = "" if error.exit_code == EXIT_INTERRUPTED or isinstance(error, Saved) else "error: "
        lines, code = [mark + line for line in str(error).splitlines()], error.exit_code
    else:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        lines, code = [f"error: {text} ({TRACEBACK}=1 shows where)"], EXIT_FAILURE
    if _may_tell(code):
        if os.environ.get(TRACEBACK) == "1":
            traceback.print_exception(type(error), error, error.__traceback__)
        for line in lines:
            print(_prefix() + line, file=sys.stderr)
        sys.stderr.flush()
    return code


def _rank() -> RankInfo | None:
    """Which rank this process is; None if the environment does not say."""
    from slurm_train.topology.ranks import ranks

    try:
        return ranks(os.environ)
    except RankError:
        return None


def _prefix() -> str:
    """What stands before the lines of a process that is not rank 0."""
    rank = _rank()
    return f"rank {rank.rank} on {socket.gethostname()}: " if rank and rank.rank else ""


def _may_tell(code: int) -> bool:
    """Whether this process tells what it ended with; among several inline ranks rank 0 tells what all of them met.

    What may be one host's own, the user's faults, the first rank of each host tells too. Its other ranks let it go
    first, and tell only if nobody has ended them then: torchrun ends all ranks as soon as one has, also a slower one
    that has yet to tell.
    """
    rank = _rank()
    if rank is None or rank.rank == 0 or code == EXIT_FAILURE:
        return True
    if code == EXIT_USER and rank.local_rank:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_USER))
        time.sleep(TELL_SECONDS)
    return code == EXIT_USER

"""The error tree: every error a user can meet carries its exit code, the key it is about and the remedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_USER = 2
EXIT_SAVED = 75
EXIT_INTERRUPTED = 130
TRACEBACK = "SLURM_TRAIN_TRACEBACK"
"""Environment variable: 1 shows the traceback of an error that is otherwise told in one line."""


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong: `key` as the user typed it (may be empty), what is wrong, and what to do."""

    key: str
    message: str
    remedy: str = ""

    def __str__(self) -> str:
        head = f"{self.key}: {self.message}" if self.key else self.message
        return " ".join(f"{head}; {self.remedy}".split()) if self.remedy else " ".join(head.split())


class SlurmTrainError(Exception):
    """Base of all errors of this project: one or more faults, each told as one line; exit code 1.

    Args:
        message: what is wrong.
        key: the config key or environment variable it is about, as the user typed it.
        remedy: what to do about it.
    """

    exit_code = EXIT_FAILURE

    def __init__(self, message: str, key: str = "", remedy: str = "") -> None:
        super().__init__(message, key, remedy)
        self.faults: tuple[Fault, ...] = (Fault(key, message, remedy),)

    def __str__(self) -> str:
        return "\n".join(str(fault) for fault in self.faults)


class UserError(SlurmTrainError):
    """The user's fault: exit code 2, one line, no traceback."""

    exit_code = EXIT_USER


class ConfigError(UserError):
    """Everything that is wrong with a configuration, told at once.

    Args:
        faults: all faults found, in the order in which they are told; at least one.
    """

    def __init__(self, faults: Sequence[Fault]) -> None:
        first = faults[0]
        super().__init__(first.message, first.key, first.remedy)
        self.faults = tuple(faults)

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Fault, ...]]]:
        return type(self), (self.faults,)


class RankError(UserError):
    """The environment does not say which rank this process is, or says two things at once."""


class GridError(UserError):
    """The parallel layout does not fit the number of ranks."""


class DeviceError(UserError):
    """The device asked for is not to be had by this rank."""


class DataError(UserError):
    """A data file is missing, broken, or not what it should be."""


class RunDirectoryError(UserError):
    """The run directory cannot be made, is in use already, or is not a run directory."""


class CheckpointError(SlurmTrainError):
    """A checkpoint is broken or does not fit the model."""


class LayoutError(SlurmTrainError):
    """A parallel layout does not give what one process gives."""


class StartError(SlurmTrainError):
    """The ranks of a run did not meet."""


class RankFailed(SlurmTrainError):
    """A rank died or raised: says which one, where and why."""


class Superseded(SlurmTrainError):
    """A newer attempt has gone on with the run: this one must write no more."""


class Saved(SlurmTrainError):
    """The run was asked to stop and has saved its state: exit code 75, start it again to go on."""

    exit_code = EXIT_SAVED


class Interrupted(SlurmTrainError):
    """The user interrupted the run (Ctrl-C): exit code 130."""

    exit_code = EXIT_INTERRUPTED

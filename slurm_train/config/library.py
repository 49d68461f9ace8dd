"""The config directories: which groups there are and which files each holds."""

from __future__ import annotations

import filecmp
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from slurm_train.config.schema import Config
from slurm_train.errors import Fault, SlurmTrainError

GROUPS = ("model", "data", "optim", "parallel", "train", "launcher")
"""The groups of conf/config.yaml: each run has one choice of each."""

OPEN_GROUPS = ("model", "data", "optim")
"""The groups whose keys are the arguments of their `_target_`."""


def conf_directory() -> Path:
    """The built-in config files: inside the package when installed from a wheel, beside it in a clone.

    Raises:
        SlurmTrainError: there are none.
    """
    package = Path(__file__).resolve().parents[1]
    for place in (package / "conf", package.parent / "conf"):
        if (place / "config.yaml").is_file():
            return place
    raise SlurmTrainError(f"the config files of slurm_train are missing beside {package}", remedy="install it again")


def shown(path: str | Path) -> str:
    """A path as a user would type it: relative when it lies below the working directory."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


@dataclass(frozen=True)
class Library:
    """The built-in config directory and the user's, in the order in which Hydra looks into them."""

    directories: tuple[Path, ...]

    @classmethod
    def of(cls, config_dirs: Sequence[Path | str]) -> tuple[Library, list[Fault]]:
        """The library with those of the user's directories that exist, and the faults of the others."""
        users = [Path(directory).expanduser() for directory in config_dirs]
        faults = [
            Fault(f"--config-dir {directory}", "is not a directory") for directory in users if not directory.is_dir()
        ]
        library = cls((conf_directory(), *(directory.absolute() for directory in users if directory.is_dir())))
        return library, faults + library.hidden_files()

    @property
    def users(self) -> tuple[Path, ...]:
        """The user's directories."""
        return self.directories[1:]

    def is_group(self, key: str) -> bool:
        """Whether a key on the command line names a group: a directory of config files, not a key of the schema."""
        if not re.fullmatch(r"[\w-]+(/[\w-]+)*", key):
            return False
        typed_keys = {field.name for field in fields(Config)} - set(GROUPS)
        return key not in typed_keys and any((place / key).is_dir() for place in self.directories)

    def groups(self) -> list[str]:
        """The names of all groups, for messages."""
        return sorted(
            {
                folder.name
                for place in self.directories
                for folder in place.iterdir()
                if folder.is_dir() and any(folder.glob("*.yaml"))
            }
        )

    def options(self, group: str) -> list[str]:
        """The names of a group's files."""
        return sorted({file.stem for place in self.directories for file in (place / group).glob("*.yaml")})

    def file(self, group: str, option: str) -> Path | None:
        """The file of an option; None if there is none or the name leads out of the group."""
        if not re.fullmatch(r"[^/\\]+(/[^/\\]+)*", option) or ".." in option.split("/"):
            return None
        candidates = (place / group / f"{option}.yaml" for place in self.directories)
        return next((file for file in candidates if file.is_file()), None)

    def hidden_files(self) -> list[Fault]:
        """The user's files that a built-in one of the same name would hide; a mere copy is none."""
        faults = []
        for file in sorted(self.directories[0].glob("*/*.yaml")):
            for place in self.users:
                twin = place / file.parent.name / file.name
                if twin.is_file() and not filecmp.cmp(twin, file, shallow=False):
                    fault = Fault(shown(twin), "hidden by the built-in file of this name", "give it another name")
                    faults.append(fault)
        return faults

"""What a preflight finds of a job's nodes: told by the nodes a line each, kept in the run directory.

It lies here because both sides need it: the nodes, which know torch, and the batch shell, which judges them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from slurm_train.report.rundir import RunDirectory, parsed
from slurm_train.report.trust import opener

DONE = "done"
"""The check that is told last, by a node that has found nothing wrong with itself."""

MARK = "preflight: "
"""What the line of a finding begins with."""

LONGEST = 500
"""Letters of a text: srun passes lines of up to 1024 bytes in one piece, and mixes the parts of longer ones with those
of other nodes."""

NAMED = 12
"""The most nodes that one finding blames, for the same reason."""


@dataclass(frozen=True)
class Finding:
    """What one check has found on one node."""

    node: str
    check: str
    """Its name, such as memory."""

    figure: str = ""
    """What was measured, as text, such as "212 MB/s"."""

    value: float | None = None
    """The same as a number, in the figure's unit; None for what is no number."""

    fault: str = ""
    """What is wrong, with figure and limit; "" if nothing is."""

    blames: tuple[str, ...] = ()
    """The nodes of which one is at fault, as this one sees it; empty if it is this one."""

    def line(self) -> str:
        """The line that tells it."""
        fault = self.fault.encode("ascii", "replace").decode()[:LONGEST]
        fields = asdict(self) | {"fault": fault, "blames": self.blames[:NAMED]}
        return MARK + json.dumps({name: value for name, value in fields.items() if value or value == 0})


def finding(line: str) -> Finding | None:
    """The finding that a line tells; None for another line."""
    fields = parsed(line.removeprefix(MARK)) if line.startswith(MARK) else {}
    try:
        return Finding(**{**fields, "blames": tuple(fields.get("blames", ()))})
    except TypeError:
        return None


@dataclass(frozen=True)
class Report:
    """The preflight of one start of a job, as it is kept in preflight/<job>_<restart>.json."""

    job: str
    restart: int
    seconds: float
    """How long it took."""

    nodes: Mapping[str, Mapping[str, str]]
    """Node -> check -> figure."""

    fault: str = ""
    """What is wrong in one line, with the node's name; "" if nothing is."""

    failing: tuple[str, ...] = ()
    """The nodes that are at fault; empty too where it is not known which."""

    excluded: bool = False
    """Whether the job was requeued without them."""

    def save(self, run: RunDirectory) -> None:
        """Write it whole, as open as the run directory.

        Raises:
            OSError: it cannot be written.
        """
        path = report_file(run, self.job, self.restart)
        beside = path.with_name(f".{path.name}.tmp")
        with open(beside, "w", encoding="utf-8", opener=opener) as stream:
            stream.write(json.dumps(asdict(self), indent=2) + "\n")
        os.replace(beside, path)


def report_file(run: RunDirectory, job: str, restart: int) -> Path:
    """Where the report of one start of a job lies."""
    return run.preflight / f"{job}_{restart}.json"


def reports(run: RunDirectory, job: str) -> list[Report]:
    """The reports of a job's starts, oldest first; those that cannot be read are left out."""
    found = []
    for path in run.preflight.glob(f"{job}_*.json"):
        try:
            fields = parsed(path.read_text(encoding="utf-8"))
            found.append(Report(**{**fields, "failing": tuple(fields["failing"])}))
        except (OSError, TypeError, KeyError):
            continue
    return sorted((report for report in found if report.job == job), key=lambda report: report.restart)

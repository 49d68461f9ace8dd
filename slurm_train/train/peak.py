"""The most memory that this process has used."""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path

import torch


def peak_memory(device: torch.device) -> int:
    """Bytes at the peak: what torch allocated on this rank's GPU, else what the process held in memory.

    On a CPU that includes the interpreter and its libraries. Linux counts it from the start of the program (VmHWM in
    proc(5)); getrusage(2), asked elsewhere, also knows what the process was before.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        found = re.search(r"^VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        found = None
    if found:
        return 1024 * int(found[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

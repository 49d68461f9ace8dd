"""python -m slurm_train"""

from __future__ import annotations

import sys

from slurm_train.cli import main

if __name__ == "__main__":
    sys.exit(main())

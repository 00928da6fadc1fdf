"""Whether this machine can submit to Slurm; the cluster is not asked."""

from __future__ import annotations

import shutil
from collections.abc import Mapping


def found_here(environ: Mapping[str, str]) -> str:
    """Return that there is the command that submits; else empty."""
    return "sbatch" if shutil.which("sbatch", path=environ.get("PATH")) else ""

"""One job file and script for all backends: their tests change only the backend's name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

SCRIPT = """\
import json, os, sys
rank, size = (int(os.environ["OMPI_COMM_WORLD_" + name]) for name in ("RANK", "SIZE"))
node = int(os.environ["VC_TASK_INDEX"])
hosts = len(os.environ["VC_WORKER_HOSTS"].split(","))
# A single write, so that lines of different ranks do not mix.
print(json.dumps([rank, size, node, hosts, os.environ["RATE"], sys.argv[1:]]), flush=True)
with open(os.path.join(os.environ["model"], "part-%d" % rank), "w") as file:
    file.write(os.environ["RATE"])
"""
_RATE = "0.5 $(HOME) $HOME `id`"
_JOB = {
    "name": "same",
    "nodes": 2,
    "procs_per_node": 2,
    "launcher": "mpirun",
    "script": "train.py",
    "args": ["--epochs", "3", "$(A) *"],
    "env": {"RATE": _RATE},
    "outputs": {"model": ""},
}
# The expected output lines and files of the ranks, the same on every backend.
LINES = [
    f"[{rank}] {json.dumps([rank, 4, rank // 2, 2, _RATE, _JOB['args']])}" for rank in range(4)
]
FILES = {f"part-{rank}": _RATE for rank in range(4)}


def write(folder: Path, backend: str, more: Mapping[str, Any]) -> None:
    """Write the script, and the job file for a backend.

    Args:
        more: Settings for this machine, the same for all backends: image, store and sections.
    """
    (folder / "train.py").write_text(SCRIPT)
    (folder / "job.yaml").write_text(yaml.safe_dump({**more, **_JOB, "backend": backend}))


def files(folder: Path) -> dict[str, str]:
    """Return the contents of the job's output files below ``folder``, by name."""
    return {path.name: path.read_text() for path in folder.rglob("part-*")}

"""Build jobentry.pyz, the archive of the node half; hatchling calls this when it builds the wheel.

python scripts/build_zipapp.py cloudjob/jobentry.pyz
"""

from __future__ import annotations

import io
import sys
import zipfile
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run by hand, without hatchling
    BuildHookInterface = object  # type: ignore[assignment, misc]

ROOT = Path(__file__).resolve().parent.parent
TARGET = "cloudjob/jobentry.pyz"
# The module zipapp would store the files' times, and so never write the same bytes twice.
_DATE = (1980, 1, 1, 0, 0, 0)


def archive(sources: Path) -> bytes:
    """Return a zipapp of the Python files below ``sources``; equal sources give equal bytes."""
    data = io.BytesIO(b"#!/usr/bin/env -S python3 -I -S\n")
    data.seek(0, io.SEEK_END)
    with zipfile.ZipFile(data, "a", zipfile.ZIP_DEFLATED) as members:
        for path in sorted(sources.rglob("*.py")):
            member = zipfile.ZipInfo(path.relative_to(sources).as_posix(), _DATE)
            member.external_attr = 0o644 << 16
            members.writestr(member, path.read_bytes(), zipfile.ZIP_DEFLATED)
    return data.getvalue()


def build(target: Path) -> None:
    """Write the archive to ``target`` in one step, as a starting job may be reading the old one."""
    new = target.with_suffix(".new")
    new.write_bytes(archive(ROOT / "entrypoints"))
    new.chmod(0o755)
    new.replace(target)


class ZipappHook(BuildHookInterface):  # type: ignore[type-arg, misc, unused-ignore]
    """Puts the archive into the wheel, and beside the sources of an editable install."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the archive and add it to the wheel."""
        build(ROOT / TARGET)
        build_data["force_include"][str(ROOT / TARGET)] = TARGET
        build_data["artifacts"].append(TARGET)


if __name__ == "__main__":
    build(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / TARGET)

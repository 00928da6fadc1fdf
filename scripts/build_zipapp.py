"""Builds the zipapp of the container half; hatchling calls it when it builds the wheel.

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
# The earliest date that a zip file can name: the same bytes from the same sources.
_DATE = (1980, 1, 1, 0, 0, 0)


def zipapp(entrypoints: Path) -> bytes:
    """Return the zipapp of the sources under ``entrypoints``, the same bytes on any machine."""
    data = io.BytesIO()
    data.write(b"#!/usr/bin/env -S python3 -I -S\n")
    with zipfile.ZipFile(data, "a", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for path in sorted(entrypoints.rglob("*.py")):
            info = zipfile.ZipInfo(path.relative_to(entrypoints).as_posix(), _DATE)
            info.external_attr = 0o644 << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, path.read_bytes())
    return data.getvalue()


def build(target: Path) -> None:
    """Write the zipapp to ``target``."""
    new = target.with_suffix(".new")
    new.write_bytes(zipapp(ROOT / "entrypoints"))
    new.chmod(0o755)
    # A job that starts meanwhile finds the old one or the new one, never a half.
    new.replace(target)


class ZipappHook(BuildHookInterface):  # type: ignore[type-arg, misc, unused-ignore]
    """Puts the zipapp into the wheel, and beside the sources of an editable install."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the zipapp and name it as a part of the wheel."""
        build(ROOT / TARGET)
        build_data["force_include"][str(ROOT / TARGET)] = TARGET
        build_data["artifacts"].append(TARGET)


if __name__ == "__main__":
    build(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / TARGET)

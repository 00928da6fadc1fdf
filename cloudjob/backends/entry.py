"""What any platform has to bring to a node: the entry, and the script that starts it."""

from __future__ import annotations

from pathlib import Path

import cloudjob
from jobentry.contract.paths import ENTRY

BOOT = "boot.sh"


def files() -> dict[str, bytes]:
    """Return the entry of this cloudjob and what starts it, by name; they lie side by side."""
    package = Path(cloudjob.__file__).parent
    boot = package / BOOT
    if not boot.exists():
        boot = package.parent / "entrypoints" / BOOT
    return {ENTRY: (package / ENTRY).read_bytes(), BOOT: boot.read_bytes()}

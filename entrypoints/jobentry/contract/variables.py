"""A file of environment variables with any bytes, in the format of ``/proc/PID/environ``.

The laptop writes one for a node, with variables that must not be in a container's configuration
(secrets) or cannot be (not UTF-8). The entry of a node writes one for its ranks.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing costs each rank seven milliseconds
    from typing import Mapping


def dump(variables: Mapping[str, str]) -> bytes:
    """Serialise ``variables`` for ``load``."""
    return b"".join(
        os.fsencode(name) + b"=" + os.fsencode(value) + b"\0" for name, value in variables.items()
    )


def load(data: bytes) -> dict[str, str]:
    """Return the variables that ``dump`` wrote."""
    pairs = (os.fsdecode(item).partition("=") for item in data.split(b"\0") if item)
    return {name: value for name, _, value in pairs}

"""Variables in a file: ``dump`` on the laptop, ``load`` in the container, exact for any bytes.

For what must not stand in a container's configuration (secrets), or cannot (bytes that are no
UTF-8).
"""

from __future__ import annotations

import os
from typing import Mapping


def dump(variables: Mapping[str, str]) -> bytes:
    """Return the bytes from which ``load`` makes ``variables`` again."""
    return b"".join(
        os.fsencode(name) + b"=" + os.fsencode(value) + b"\0" for name, value in variables.items()
    )


def load(data: bytes) -> dict[str, str]:
    """Return the variables that ``dump`` wrote."""
    pairs = (os.fsdecode(item).partition("=") for item in data.split(b"\0") if item)
    return {name: value for name, _, value in pairs}

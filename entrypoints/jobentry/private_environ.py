"""Variables that this process needs and its children must not inherit: secrets, keys of stores."""

from __future__ import annotations

import os
from typing import Iterable

_values: dict[str, str] = {}


def hide(names: Iterable[str]) -> None:
    """Take these out of what every child of ours inherits."""
    for name in names:
        if name in os.environ:
            _values[name] = os.environ.pop(name)


def environ() -> dict[str, str]:
    """Return all variables of this process, those that are hidden, too."""
    return {**os.environ, **_values}

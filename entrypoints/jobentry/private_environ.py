"""Variables that child processes must not inherit: secrets and the store's credentials."""

from __future__ import annotations

import os
from typing import Iterable, Mapping

_values: dict[str, str] = {}


def hide(names: Iterable[str]) -> None:
    """Remove these variables from ``os.environ`` and remember their values."""
    for name in names:
        if name in os.environ:
            _values[name] = os.environ.pop(name)


def override(values: Mapping[str, str]) -> None:
    """Give variables other values in this process; child processes do not inherit them."""
    _values.update(values)


def environ() -> dict[str, str]:
    """Return all variables of this process, including the hidden ones."""
    return {**os.environ, **_values}

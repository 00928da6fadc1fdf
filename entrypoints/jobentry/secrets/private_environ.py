"""Variables that child processes must not inherit: secrets and the store's credentials."""

from __future__ import annotations

import os
from typing import Iterable, Mapping

from jobentry.contract import names as variable_names
from jobentry.contract import variables
from jobentry.secrets import masking

_values: dict[str, str] = {}
_keys_path = ""


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


def expect_keys(path: str) -> None:
    """Set the file in which fresh keys of the store may be delivered while the job runs."""
    global _keys_path
    _keys_path = path


def take_keys() -> bool:
    """Use the keys of the store that were delivered last; return whether they are new."""
    try:
        with open(_keys_path, "rb") as file:
            data = file.read()
    except OSError:
        return False
    # The file may be half written.
    values = variables.load(data) if data.endswith(b"\0") else {}
    if set(values) != set(variable_names.STORE_KEYS) or values.items() <= environ().items():
        return False
    _values.update(values)
    masking.mask_secrets_of(environ())
    return True

"""The platforms that run jobs: one folder each, imported on first use.

Start with ``base.Backend``, their interface; ``docker`` is the shortest of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cloudjob.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from cloudjob.backends.base import Backend


def found_here(name: str, environ: Mapping[str, str]) -> str:
    """Return what this machine has of a platform, in a few words; empty for nothing.

    No platform is called.
    """
    return str(import_module(f"{__name__}.{name}.detection").found_here(environ))


def open_backend(name: str, home: Path, options: dict[str, Any] | None = None) -> Backend[Any]:
    """Return the backend ``name``, which keeps its state below ``home``.

    Args:
        options: The backend's section of the job file.

    Raises:
        BackendError: There is no such backend, or a library that it needs is not installed.
    """
    # The controller of a job imports this package and needs none of it.
    from cloudjob.model.rules import BACKENDS

    if name not in BACKENDS:
        raise BackendError(
            f"opening the backend {name}: there is no such backend",
            hint=f"choose one of {', '.join(BACKENDS)}",
        )
    module, _, cls = BACKENDS[name].location.partition(":")
    try:
        backend_class = getattr(import_module(module), cls)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("cloudjob"):
            raise
        raise BackendError(
            f"opening the backend {name}: {error.name} is not installed",
            hint=f"pip install 'cloudjob[{name}]'",
        ) from error
    backend: Backend[Any] = backend_class(home, options or {})
    return backend

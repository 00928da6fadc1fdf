"""Whether this user has credentials for ModelArts; the service is not asked."""

from __future__ import annotations

from collections.abc import Mapping

from cloudjob import huawei


def found_here(environ: Mapping[str, str]) -> str:
    """Return the variable that has keys or names a file with them; else empty."""
    names = (huawei.Service.API.value[0], huawei.FILE_VARIABLE)
    return next((f"${name}" for name in names if environ.get(name)), "")

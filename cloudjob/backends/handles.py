"""Handles: ``backend://PLATFORM/…/ID`` names a job and says where it is, for people and records."""

from __future__ import annotations

from pathlib import Path

from cloudjob.errors import BackendError, JobNotFound


def write(scheme: str, *parts: str) -> str:
    """Return a handle; a part that may hold a slash has to be quoted."""
    return f"{scheme}://{'/'.join(parts)}"


def read(handle: str, scheme: str, count: int = 0) -> list[str]:
    """Return the parts of a handle.

    Args:
        count: The expected number of parts; 0 for any number.

    Raises:
        JobNotFound: The handle does not have this scheme.
    """
    handle_scheme, _, rest = handle.partition("://")
    parts = rest.split("/")
    if (
        handle_scheme != scheme
        or not parts[-1]
        or len(parts) < 2
        or (count and len(parts) != count)
    ):
        backend = scheme.partition("+")[0]
        raise JobNotFound(f"looking for {handle}: this is not a handle of the backend {backend}")
    return parts


def need_folder(folder: Path, job: str) -> None:
    """Check that a state folder has the folder of a job, so that the job was started with it.

    Raises:
        BackendError: It has not.
    """
    if not folder.is_dir():
        raise BackendError(
            f"looking for {job}: it was not started on this machine with this state folder",
            hint="where it was submitted, with the same $CLOUDJOB_HOME, every command finds it",
        )


def not_ours(doing: str, theirs: str, ours: str, hint: str) -> BackendError:
    """Return the error for a description that names another place than the reader's own."""
    return BackendError(
        f"{doing}: its description names {theirs}, but your configuration {ours or 'none'}",
        hint=f"if you trust its author, {hint}",
    )


def platform(handle: str) -> str:
    """Return the part of a handle that all jobs of one platform share."""
    scheme, mark, rest = handle.partition("://")
    return scheme + mark + rest.partition("/")[0]

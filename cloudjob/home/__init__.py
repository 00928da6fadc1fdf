"""Where cloudjob keeps its state on this machine.

``records`` is the database of submitted jobs; ``locks`` shows which processes still run.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cloudjob.errors import BackendError
from cloudjob.home import file_systems

_PRIVATE = 0o700
_OTHERS = 0o077
_OTHERS_WRITE = 0o022
_RECORDS = "records.db"
_ELSEWHERE = "or set {} to a folder elsewhere"
_HINT = "set {} to a folder that this user may write to"
_OWN_FOLDER = "set CLOUDJOB_HOME to a folder of your own"
_HINTS = {
    errno.ENOSPC: f"free some space, {_ELSEWHERE}",
    errno.EDQUOT: f"free some of your quota, {_ELSEWHERE}",
    errno.EROFS: f"make the file system writable, {_ELSEWHERE}",
    errno.EACCES: f"make the folder writable for this user, {_ELSEWHERE}",
    errno.EPERM: f"make the folder writable for this user, {_ELSEWHERE}",
}


def home() -> Path:
    """Return ``$CLOUDJOB_HOME``, by default the platform's data folder."""
    from_environment = os.environ.get("CLOUDJOB_HOME")
    if from_environment:
        return Path(from_environment).absolute()
    import platformdirs

    return Path(platformdirs.user_data_dir("cloudjob", appauthor=False))


@contextmanager
def writing(doing: str, path: Path, variable: str = "CLOUDJOB_HOME") -> Iterator[None]:
    """Turn an ``OSError`` while ``doing`` something in a folder of ours into a ``BackendError``.

    Args:
        variable: The variable that sets where ``path`` is.

    Raises:
        BackendError: The disk is full, or this user may not write there.
    """
    try:
        yield
    except OSError as error:
        if error.errno in file_systems.UNSUPPORTED:
            folder = next(each for each in (path, *path.parents) if each.is_dir())
            lacks = file_systems.missing_feature(folder)
            if lacks:
                raise BackendError(f"{doing}: {folder}: {lacks[0]}", hint=lacks[1]) from error
        raise BackendError(
            f"{doing}: {error.filename or path}: {error.strerror or error}",
            hint=_HINTS.get(error.errno or 0, _HINT).format(variable),
        ) from error


def make_home(folder: Path) -> None:
    """Create ``$CLOUDJOB_HOME`` with mode 0700, or check the existing folder.

    Raises:
        BackendError: See ``private_folder``.
    """
    with writing("creating the folder for jobs", folder):
        is_ours = is_own_file(folder / _RECORDS)
        private_folder(folder, is_ours=is_ours)
    lacks = None if is_ours else file_systems.missing_feature(folder)
    if lacks:
        raise BackendError(f"using the folder {folder}: {lacks[0]}", hint=lacks[1])


def is_own_file(path: Path) -> bool:
    """Whether a file exists and belongs to this user."""
    return os.path.lexists(path) and path.lstat().st_uid == os.geteuid()


def private_folder(path: Path, *, is_ours: bool = True) -> None:
    """Create a folder and its missing parents with mode 0700, or check the existing folder.

    ``Path.mkdir(mode, parents=True)`` would leave the mode of the parents to the umask.

    Args:
        is_ours: Whether cloudjob created the folder and may therefore change its mode to 0700. Any
            other folder is left as it is, and refused when other users may write to it. A folder
            with the sticky bit, such as /tmp, is never ours.

    Raises:
        OSError: The folder cannot be created.
        BackendError: Another user owns the folder or may write to it; cloudjob runs files below it.
    """
    missing = []
    folder = path
    while not os.path.lexists(folder):
        missing.append(folder)
        folder = folder.parent
    for parent in reversed(missing):
        with suppress(FileExistsError):  # by another process or another user: checked below
            parent.mkdir(mode=_PRIVATE)
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    user = os.geteuid()
    # A symbolic link may also belong to root, who could replace the folder anyway.
    if path.stat().st_uid != user or path.lstat().st_uid not in (user, 0):
        raise BackendError(f"using the folder {path}: it belongs to another user", hint=_OWN_FOLDER)
    mode = path.stat().st_mode
    is_shared = bool(mode & stat.S_ISVTX)
    if mode & _OTHERS and is_ours and not is_shared:
        path.chmod(_PRIVATE)
    elif mode & _OTHERS_WRITE:
        raise BackendError(
            f"using the folder {path}: other users may write to it",
            hint=_OWN_FOLDER if is_shared else f"chmod 700 {path}, or {_OWN_FOLDER}",
        )


def submits_folder(folder: Path) -> Path:
    """Return the folder in which each running submit has a locked folder named by its job's id."""
    return folder / "packing"


def sweeps_folder(folder: Path) -> Path:
    """Return the folder with a file for each sweep that was submitted from this machine."""
    return folder / "sweeps"


def records_path(folder: Path) -> Path:
    """Return the file of the job records."""
    return folder / _RECORDS


def store_uri(folder: Path) -> str:
    """Return the URI of the default store."""
    return (folder / "store").as_uri()

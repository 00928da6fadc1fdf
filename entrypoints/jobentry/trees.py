"""Remove a folder tree of any depth; both halves use it."""

from __future__ import annotations

import errno
import itertools
import os
from contextlib import contextmanager, suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator


def remove_tree(path: str | os.PathLike[str]) -> None:
    """Remove the folder ``path`` with everything in it; a missing folder is fine.

    ``shutil.rmtree`` calls itself for each level and keeps a descriptor open for each, so it fails
    on trees that are deeper than 1,000. Here each nested folder is first moved to the top, so that
    no path grows long. Folders without write permission are removed as well.

    Raises:
        OSError: The first error; raised after everything else has been removed.
    """
    top = os.fspath(path)
    if os.path.islink(top):
        raise NotADirectoryError(errno.ENOTDIR, "a symbolic link is not a folder", top)
    names = (f"{top}/{os.urandom(6).hex()}-{number}" for number in itertools.count())
    errors: list[OSError] = []
    folders = [top]
    for folder in folders:  # grows while it is read
        with _noted(errors):
            for entry in _entries(folder):
                with _noted(errors):
                    if not entry.is_dir(follow_symlinks=False):
                        os.unlink(entry.path)
                    elif folder == top:
                        folders.append(entry.path)
                    else:
                        folders.append(_moved(entry.path, next(names)))
    for folder in reversed(folders):
        with _noted(errors):
            os.rmdir(folder)
    if errors:
        raise errors[0]


@contextmanager
def _noted(errors: list[OSError]) -> Iterator[None]:
    """Add an ``OSError`` to ``errors``; ignore files that no longer exist."""
    try:
        yield
    except FileNotFoundError:
        pass
    except OSError as error:
        errors.append(error)


def _entries(folder: str) -> list[os.DirEntry[str]]:
    with suppress(PermissionError):  # owned by another user; it may be empty
        os.chmod(folder, 0o700)
    with os.scandir(folder) as entries:
        return list(entries)


def _moved(folder: str, target: str) -> str:
    with suppress(PermissionError):
        # Moving a folder changes its entry "..", which needs the right to write in it.
        os.chmod(folder, 0o700)
    os.rename(folder, target)
    return target

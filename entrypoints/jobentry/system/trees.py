"""Remove a folder tree of any depth; both halves use it."""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

# Python 3.9 of PyPy lacks the name.
_O_PATH = getattr(os, "O_PATH", 0o10000000)
# With such a descriptor, no other process can replace the folder by a link in the meantime.
_FOLDER = _O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_tree(path: str | os.PathLike[str]) -> None:
    """Remove the folder ``path`` with everything in it; a missing folder is fine.

    ``shutil.rmtree`` calls itself for each level and keeps a descriptor open for each, so it fails
    on trees that are deeper than 1,000. Here each nested folder is first moved to the top, so that
    no path grows long. Folders without write permission are removed as well. No symbolic link is
    followed, even if another process puts one in the place of a folder.

    Raises:
        OSError: The first error; raised after everything else has been removed.
    """
    name = os.fspath(path)
    errors: list[OSError] = []
    with _noted(errors):
        with _writable(name) as top:
            _empty(top, errors)
        os.rmdir(name)
    if errors:
        if errors[0].filename != name:
            errors[0].filename = "%s/%s" % (name, errors[0].filename)
        raise errors[0]


def _empty(top: int, errors: list[OSError]) -> None:
    """Remove everything in a folder."""
    folders = _emptied_of_files(top, errors)
    prefix = os.urandom(6).hex()
    for folder in folders:  # it grows while it is read
        with _noted(errors), _writable(folder, top) as above:
            for name in _emptied_of_files(above, errors):
                # Moving a folder changes its entry "..", which needs the right to write in it.
                with _noted(errors), _writable(name, above):
                    moved = "%s-%d" % (prefix, len(folders))
                    os.rename(name, moved, src_dir_fd=above, dst_dir_fd=top)
                    folders.append(moved)
    for folder in folders:
        with _noted(errors):
            os.rmdir(folder, dir_fd=top)


@contextmanager
def _noted(errors: list[OSError]) -> Iterator[None]:
    """Add an ``OSError`` to ``errors``; ignore files that no longer exist."""
    try:
        yield
    except FileNotFoundError:
        pass
    except OSError as error:
        errors.append(error)


@contextmanager
def _writable(name: str, above: int | None = None) -> Iterator[int]:
    """Yield a descriptor of a folder, which is made writable if this user owns it."""
    descriptor = os.open(name, _FOLDER, dir_fd=above)
    try:
        with suppress(OSError):  # owned by another user; it may be empty
            os.chmod("/proc/self/fd/%d" % descriptor, 0o700)
        yield descriptor
    finally:
        os.close(descriptor)


def _emptied_of_files(folder: int, errors: list[OSError]) -> list[str]:
    """Remove all but the folders from a folder, and return their names."""
    folders: list[str] = []
    descriptor = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
    try:
        with os.scandir(descriptor) as entries:
            for entry in list(entries):
                with _noted(errors):
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.name)
                    else:
                        os.unlink(entry.name, dir_fd=folder)
    finally:
        os.close(descriptor)
    return folders

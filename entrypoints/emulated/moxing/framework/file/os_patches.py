"""``moxing.file.shift``: makes Python's own file functions accept URLs in OBS, too."""

from __future__ import annotations

import builtins
import functools
import glob
import os
import shutil
import stat
from typing import Any, Callable

from moxing.framework.file import file_io
from moxing.framework.file.file_object import File
from moxing.framework.file.locations import is_remote

_shifted: list[str] = []


def shift(source: str, target: str) -> None:
    """Replace the 16 functions that the vendor's table lists, for the rest of the process.

    Calls that name only local files still go to Python's functions, with all their options.
    """
    if (source, target) != ("os", "mox"):
        raise ValueError(f"shift({source!r}, {target!r}): only shift('os', 'mox') is documented")
    if _shifted:
        return
    _shifted.append(target)
    for module, name, function in _TABLE:
        setattr(module, name, _either(getattr(module, name), function))


def _either(local: Callable[..., Any], remote: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(local)
    def call(*args: Any, **options: Any) -> Any:
        if any(map(is_remote, args[:2])) or any(map(is_remote, options.values())):
            return remote(*args, **options)
        return local(*args, **options)

    return call


def _makedirs(name: str, mode: int = 0o777, exist_ok: bool = False) -> None:
    if not exist_ok and file_io.exists(name):
        raise FileExistsError(name)
    file_io.make_dirs(name)


def _stat(path: str, **_: Any) -> os.stat_result:
    stats = file_io.stat(path)
    kind = stat.S_IFDIR | 0o755 if stats.is_directory else stat.S_IFREG | 0o644
    seconds = stats.mtime_nsec // 10**9
    return os.stat_result((kind, 0, 0, 1, 0, 0, stats.length, seconds, seconds, seconds))


def _rmtree(path: str, ignore_errors: bool = False, **_: Any) -> None:
    file_io.remove(path, recursive=True)


def _copyfile(src: str, dst: str, **_: Any) -> str:
    file_io.copy(src, dst)
    return dst


def _copytree(src: str, dst: str, *_: Any, **__: Any) -> str:
    file_io.copy_parallel(src, dst)
    return dst


_TABLE: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (builtins, "open", File),
    (glob, "glob", lambda pathname, **_: file_io.glob(pathname)),
    (os, "listdir", file_io.list_directory),
    (os, "makedirs", _makedirs),
    (os, "mkdir", lambda path, *_, **__: file_io.mk_dir(path)),
    (os.path, "exists", file_io.exists),
    (os.path, "getsize", file_io.get_size),
    (os.path, "isdir", file_io.is_directory),
    (os, "remove", lambda path, **_: file_io.remove(path)),
    (os, "rename", lambda src, dst, **_: file_io.rename(src, dst)),
    (os, "scandir", file_io.scan_dir),
    (os, "stat", _stat),
    (os, "walk", file_io.walk),
    (shutil, "copyfile", _copyfile),
    (shutil, "copytree", _copytree),
    (shutil, "rmtree", _rmtree),
)

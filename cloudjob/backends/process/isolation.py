"""A host name, a table of hosts and folders of its own for one emulated node, without root.

This uses Linux namespaces, as bubblewrap does: a new root shows this machine's files, except for
the folders that are private to a node. The root is not on disk and disappears with its processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypeAlias

from cloudjob.backends.process import ssh_config
from jobentry.system.trees import remove_tree

# What is private to a node: everything, its names only, or nothing.
Level: TypeAlias = Literal["files", "names", "none"]
# A folder or file of this machine, and its path on a node.
Mount: TypeAlias = tuple[str, str]

TMP, CACHE, HOME, WORK = "/tmp", "/cache", "/home/ma-user", "/home/work"
# Folders that are private to every node of the platform.
OWN = (TMP, CACHE, HOME, WORK)
# The path on a node of the folder in which the nodes of a job exchange files.
RUN_DIR = "/.cloudjob"

# A type check for macOS, where nodes cannot be processes, does not know O_PATH.
_PATH = getattr(os, "O_PATH", 0) | os.O_CLOEXEC
_CLONE_NEWNS = 0x00020000
_CLONE_NEWUTS = 0x04000000
_CLONE_NEWUSER = 0x10000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV = 1, 2, 4
_MS_REMOUNT, _MS_BIND, _MS_REC = 32, 4096, 16384
_MS_UNBINDABLE = 1 << 17
_MS_PRIVATE = 1 << 18
_MNT_DETACH = 2
# MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_NOATIME and MS_NODIRATIME
_MS_KEPT = 2 | 4 | 8 | 1024 | 2048


def isolate(
    host: str,
    hosts_file: str,
    mounts: Sequence[Mount] = (),
    protected: Sequence[tuple[str, str]] = (),
) -> None:
    """Give this process and its children a host name, an /etc/hosts and folders of their own.

    Args:
        mounts: Folders and files with their paths on the node; empty to share all files.
        protected: Folders of this machine, each with the folder that holds the node's changes.

    Raises:
        OSError: This machine does not allow it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(_CLONE_NEWUTS | _CLONE_NEWNS):
        # Not root: our own user namespace grants the right and keeps our user id.
        _check(libc.unshare(_CLONE_NEWUSER | _CLONE_NEWUTS | _CLONE_NEWNS), "unshare")
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{user} {user} 1")
        _write("/proc/self/gid_map", f"{group} {group} 1")
    socket.sethostname(host.partition(".")[0])
    _check(libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None), "mount /")
    _bind(libc, hosts_file, "/etc/hosts")
    own_config = os.path.join(os.path.dirname(hosts_file), ssh_config.NAME)
    if os.path.exists(own_config) and os.path.exists(ssh_config.PATH):
        _bind(libc, own_config, ssh_config.PATH)
    if mounts:
        _enter_new_root(libc, mounts, protected)


def possible_level() -> Level:
    """Return what this machine allows to be private; a child process tries it."""
    if _works(lambda: isolate("cloudjob-probe", "/etc/hosts", [("/etc", CACHE), ("/etc", TMP)])):
        return "files"
    return "names" if _works(lambda: isolate("cloudjob-probe", "/etc/hosts")) else "none"


def folders_named_in(texts: Iterable[str], folders: Sequence[str] = OWN) -> tuple[Mount, ...]:
    """Return what stays visible in private folders: the entries that any of ``texts`` names.

    A job that names ``/tmp/data/train.csv`` sees ``/tmp/data`` of this machine.
    """
    found: dict[str, None] = {}
    choice = "|".join(map(re.escape, folders))
    for text in texts:
        for folder, name in re.findall(rf"(?<![\w.-])({choice})/+([^/:;,\s'\"]+)", text):
            if name not in (".", "..", "modelarts", "user-job-dir"):
                found[f"{folder}/{name}"] = None
    return tuple((path, path) for path in found)


def _works(act: Callable[[], None]) -> bool:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            act()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# -- the new root ---------------------------------------------------------------------------------


def _enter_new_root(
    libc: ctypes.CDLL, mounts: Sequence[Mount], protected: Sequence[tuple[str, str]]
) -> None:
    """Make a root that shows this machine with ``mounts``, and switch to it.

    It is built on /tmp, which every machine has; a descriptor still reaches the folder below.
    """
    base = os.path.realpath(TMP)
    below = os.open(base, _PATH)
    # Resolve links through /tmp while it is still this machine's.
    paths = (*(source for source, _ in mounts), *(changes for _, changes in protected))
    real = {path: os.path.realpath(path) for path in paths}
    flags = _MS_NOSUID | _MS_NODEV
    _check(libc.mount(b"tmpfs", base.encode(), b"tmpfs", flags, b"mode=755"), "mount tmpfs")
    # Otherwise the mounts below would contain it again.
    _check(libc.mount(None, base.encode(), None, _MS_UNBINDABLE, None), "mount tmpfs")

    def source_of(path: str) -> str:
        found = real[path]
        is_below = found == base or found.startswith(base + "/")
        return f"/proc/self/fd/{below}{found[len(base) :]}" if is_below else found

    # The parent of a target may be a symbolic link, such as /home on some systems.
    placed = {_real(target): source_of(source) for source, target in mounts}
    _show(libc, "/", base, {*placed, base})
    for target, source in sorted(placed.items()):
        if os.path.exists(source):
            _bind(libc, source, base + target)
    # An overlay cannot keep its changes on an unbindable mount.
    _check(libc.mount(None, base.encode(), None, _MS_PRIVATE, None), "mount tmpfs")
    for number, (folder, changes) in enumerate(protected):
        in_memory = f"{base}/.changes/{number}"
        _protect(libc, base + folder, [source_of(changes), in_memory])
    os.close(below)
    os.chdir(base)
    _check(libc.pivot_root(b".", b"."), "pivot_root")
    _check(libc.umount2(b".", _MNT_DETACH), "umount")
    os.chdir("/")
    flags |= _MS_REMOUNT | _MS_BIND | _MS_RDONLY
    _check(libc.mount(None, b"/", None, flags, None), "remount /")


def _show(libc: ctypes.CDLL, folder: str, base: str, targets: set[str]) -> None:
    """Show what is in ``folder`` below ``base``, except for ``targets``."""
    with os.scandir(folder) as entries:
        for entry in entries:
            new = base + entry.path
            if entry.path in targets:
                continue
            if entry.is_symlink():
                os.symlink(os.readlink(entry.path), new)
            elif any(target.startswith(entry.path + "/") for target in targets):
                os.mkdir(new)
                _show(libc, entry.path, base, targets)
            else:
                # A job must not fail because of a file system that no longer answers.
                with contextlib.suppress(OSError):
                    _bind(libc, entry.path, new)


def _protect(libc: ctypes.CDLL, folder: str, places: Sequence[str]) -> None:
    """Keep a folder's changes in the first of ``places`` that can; if none can, make it read-only.

    A network file system, or that of a container, cannot hold the changes of an overlay.
    """
    for place in places:
        with contextlib.suppress(OSError):
            _overlay(libc, folder, place)
            return
    _bind(libc, folder, folder)
    # Only the machine's root may clear the other flags.
    flags = _MS_REMOUNT | _MS_BIND | _MS_RDONLY | (os.statvfs(folder).f_flag & _MS_KEPT)
    _check(libc.mount(None, os.fsencode(folder), None, flags, None), f"remount {folder}")


def _overlay(libc: ctypes.CDLL, folder: str, place: str) -> None:
    parts = {"lowerdir": folder, "upperdir": f"{place}/changes", "workdir": f"{place}/work"}
    # The kernel refuses a folder with files of an earlier attempt.
    remove_tree(parts["workdir"])
    options = []
    for name, path in parts.items():
        os.makedirs(path, exist_ok=True)
        # A path may contain the characters that separate options; a descriptor's number does not.
        options.append(f"{name}=/proc/self/fd/{os.open(path, _PATH)}")
    # No change needs to survive a crash of the machine; otherwise the unmount waits for the disk.
    options.append("volatile")
    target, data = os.fsencode(folder), ",".join(options).encode()
    _check(libc.mount(b"overlay", target, b"overlay", 0, data), f"overlay {folder}")


def _bind(libc: ctypes.CDLL, source: str, target: str) -> None:
    if not os.path.lexists(target):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.isdir(source):
            os.mkdir(target)
        else:
            os.close(os.open(target, os.O_WRONLY | os.O_CREAT, 0o600))
    flags = _MS_BIND | _MS_REC
    what = f"mount {target}"
    _check(libc.mount(os.fsencode(source), os.fsencode(target), None, flags, None), what)


def _real(path: str) -> str:
    return os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))


def _check(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)

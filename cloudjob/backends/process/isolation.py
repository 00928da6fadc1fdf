"""A host name, a table of hosts and folders of its own for one emulated node, without root.

This uses Linux namespaces, as bubblewrap does: a new root shows this machine's files, except for
the folders that are private to a node. The root is not on disk and disappears with its processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias

from cloudjob.backends.process import SSH_CONFIG, SSH_CONFIG_PATH
from jobentry.system.trees import remove_tree

# What is private to a node: everything, its names only, or nothing.
Level: TypeAlias = Literal["files", "names", "none"]
# A folder or file of this machine, and its path on a node.
Mount: TypeAlias = tuple[str, str]

TMP, CACHE, HOME, WORK = "/tmp", "/cache", "/home/ma-user", "/home/work"
# Temporary files that survive a restart of the machine.
VAR_TMP = "/var/tmp"
# Data that processes share, and lock files; in memory.
SHM, LOCK = "/dev/shm", "/run/lock"
# The folders of a machine in which every user may write: those of the standard for its file system.
OF_ALL_USERS = (TMP, VAR_TMP, SHM, LOCK)
# Folders that are private to every node of the platform.
OWN = (*OF_ALL_USERS, CACHE, HOME, WORK)
_BELOW_OWN = tuple(f"{folder}/" for folder in OWN)
# The folder on a node with those parts of this machine's private folders that the entry writes to.
# They are not in the folders themselves: a script may empty its folder for temporary files.
MACHINE = "/.machine"
# The path on a node of the folder in which the nodes of a job exchange files.
RUN_DIR = "/.cloudjob"

# Folders of the platform's layout, which every node has for itself.
_OF_NODES = ("modelarts", "user-job-dir")
# How many entries of a named folder are looked at.
_MAX_LINKS = 10_000
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
    visible: Sequence[Mount] = (),
) -> None:
    """Give this process and its children a host name, an /etc/hosts and folders of their own.

    Args:
        mounts: Folders and files with their paths on the node; empty to share all files.
        protected: Folders of this machine, each with the folder that holds the node's changes.
        visible: Folders and files that the node can only read, with their paths there.

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
    name = os.fsencode(host.partition(".")[0])
    _check(libc.sethostname(name, len(name)), "sethostname")
    _check(libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None), "mount /")
    _bind(libc, hosts_file, "/etc/hosts")
    own_config = os.path.join(os.path.dirname(hosts_file), SSH_CONFIG)
    if os.path.exists(own_config) and os.path.exists(SSH_CONFIG_PATH):
        _bind(libc, own_config, SSH_CONFIG_PATH)
    if mounts:
        private_mounts = [mount for mount in mounts if not is_on_machine(mount[1])]
        written = [mount for mount in mounts if is_on_machine(mount[1])]
        seen = [_Seen(target, source) for source, target in visible]
        seen += [_Seen(target, source, is_writable=True) for source, target in written]
        seen += [_Seen(path, path, changes) for path, changes in protected]
        _enter_new_root(libc, private_mounts, _in_order(seen))


@functools.cache
def possible_level() -> Level:
    """Return what this machine allows to be private; a child process tries it."""
    if _works(lambda: isolate("cloudjob-probe", "/etc/hosts", [("/etc", CACHE), ("/etc", TMP)])):
        return "files"
    return "names" if _works(lambda: isolate("cloudjob-probe", "/etc/hosts")) else "none"


def path_on_node(real_path: str) -> str:
    """Return where a node finds a file of this machine that the entry writes to."""
    return f"{MACHINE}{real_path}" if is_private(real_path) else real_path


def is_on_machine(path: str) -> bool:
    """Whether a path on a node is that of a folder of this machine that the entry writes to."""
    return path.startswith(f"{MACHINE}/")


def is_private(path: str) -> bool:
    """Whether a path is below a folder that is private to every node."""
    return path.startswith(_BELOW_OWN)


def paths_named_in(texts: Iterable[str], folders: Sequence[str] = OWN) -> tuple[str, ...]:
    """Return the files and folders of this machine below ``folders`` that any of ``texts`` names.

    A name that does not exist may be that of a new file, a pattern or the start of names; then it
    is the folder in which it would be. Where a named link leads to is named, too.
    """
    paths: dict[str, None] = {}
    choice = "|".join(map(re.escape, folders))
    for text in texts:
        for match in re.finditer(rf"(?<![\w.-])({choice})/+[^/:;,\s'\"][^:;,\s'\"]*", text):
            # A name may contain a blank; then it is the rest of the text.
            rest = os.path.normpath(text[match.start() :])
            named = rest if os.path.lexists(rest) else _existing(os.path.normpath(match[0]))
            folder = match[1]
            inside = named[len(folder) :].strip("/")
            if named.startswith(f"{folder}/") and inside.partition("/")[0] not in _OF_NODES:
                paths.update(dict.fromkeys((named, *_linked(named))))
    return tuple(paths)


def _linked(path: str) -> Iterator[str]:
    """Yield where a link leads to, and the folders to which links directly in a folder lead."""
    real = os.path.realpath(path)
    if real != path and is_private(real):
        yield real
    with contextlib.suppress(OSError), os.scandir(real) as entries:
        for entry in itertools.islice(entries, _MAX_LINKS):
            target = os.path.realpath(entry.path) if entry.is_symlink() else real
            parent = os.path.dirname(target)
            if not f"{target}/".startswith(f"{real}/") and is_private(target):
                yield parent if is_private(parent) else target


def _existing(path: str) -> str:
    """Return the path, or the lowest folder above it that exists."""
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return path


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


class _Seen(NamedTuple):
    """A folder or file of this machine that a node sees.

    Args:
        target: Its path on the node.
        changes: The folder for the node's changes of it; empty if the node cannot change it.
        is_writable: Whether the node writes to this machine's.
    """

    target: str
    source: str
    changes: str = ""
    is_writable: bool = False


def _in_order(seen: Iterable[_Seen]) -> list[_Seen]:
    """Return what a node sees, folders before their contents, without what is visible already."""
    kinds: dict[str, tuple[bool, bool]] = {}
    in_order = []
    for item in sorted(seen):
        kind = (bool(item.changes), item.is_writable)
        above = next((p for p in reversed(kinds) if item.target.startswith(f"{p}/")), "")
        if item.target not in kinds and kinds.get(above) != kind:
            kinds[item.target] = kind
            in_order.append(item)
    return in_order


def _enter_new_root(libc: ctypes.CDLL, mounts: Sequence[Mount], seen: Sequence[_Seen]) -> None:
    """Make a root that shows this machine with ``mounts`` and what is ``seen``; switch to it.

    It is built on /tmp, which every machine has; a descriptor still reaches the folder below.
    """
    base = os.path.realpath(TMP)
    below = os.open(base, _PATH)
    # Resolve links through /tmp while it is still this machine's.
    paths = [source for source, _ in mounts]
    paths += [path for item in seen for path in (item.source, item.changes)]
    real = {path: os.path.realpath(path) for path in paths}
    flags = _MS_NOSUID | _MS_NODEV
    _check(libc.mount(b"tmpfs", base.encode(), b"tmpfs", flags, b"mode=755"), "mount tmpfs")
    # Otherwise the mounts below would contain it again.
    _check(libc.mount(None, base.encode(), None, _MS_UNBINDABLE, None), "mount tmpfs")

    def source_of(path: str) -> str:
        source = real[path]
        is_below = source == base or source.startswith(base + "/")
        return f"/proc/self/fd/{below}{source[len(base) :]}" if is_below else source

    # The parent of a target may be a symbolic link, such as /home on some systems.
    placed = {_real(target): source_of(source) for source, target in mounts}
    _show(libc, "/", base, {*filter(_is_missing, placed), base})
    for target, source in sorted(placed.items()):
        if os.path.exists(source):
            _bind(libc, source, base + target)
    for folder in (SHM, LOCK):
        if not _is_missing(base + folder):
            place, options = f"{base}{folder}".encode(), b"mode=1777"
            _check(libc.mount(b"tmpfs", place, b"tmpfs", flags, options), folder)
    # An overlay cannot keep its changes on an unbindable mount.
    _check(libc.mount(None, base.encode(), None, _MS_PRIVATE, None), "mount tmpfs")
    for number, item in enumerate(seen):
        has_mounts = bool(_mounts_below(real[item.source]))
        places = [source_of(item.changes), f"{base}/.changes/{number}"] if item.changes else []
        _place(libc, item, source_of(item.source), base, [] if has_mounts else places)
    os.close(below)
    os.chdir(base)
    _check(libc.pivot_root(b".", b"."), "pivot_root")
    _check(libc.umount2(b".", _MNT_DETACH), "umount")
    os.chdir("/")
    flags |= _MS_REMOUNT | _MS_BIND | _MS_RDONLY
    _check(libc.mount(None, b"/", None, flags, None), "remount /")


def _is_missing(target: str) -> bool:
    """Whether nothing can be mounted on a path: it does not exist, or leads to another one."""
    return os.path.islink(target) or not os.path.isdir(target)


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


def _place(libc: ctypes.CDLL, item: _Seen, source: str, base: str, places: Sequence[str]) -> None:
    """Show a folder or file; the first of ``places`` that can keeps the node's changes."""
    if not os.path.exists(source):
        return
    if places and os.path.isdir(source):
        _protect(libc, source, base + item.target, places)
        return
    _bind(libc, source, base + item.target)
    if not item.is_writable:
        _make_read_only(libc, base + item.target)


def _protect(libc: ctypes.CDLL, source: str, target: str, places: Sequence[str]) -> None:
    """Show a folder, and keep its changes in the first of ``places`` that can; if none can, forbid.

    A network file system, or that of a container, cannot hold the changes of an overlay.
    """
    for place in places:
        with contextlib.suppress(OSError):
            _overlay(libc, source, target, place)
            return
    _bind(libc, source, target)
    _make_read_only(libc, target)


def _overlay(libc: ctypes.CDLL, source: str, target: str, place: str) -> None:
    parts = {"lowerdir": source, "upperdir": f"{place}/changes", "workdir": f"{place}/work"}
    # The kernel refuses a folder with files of an earlier attempt.
    remove_tree(parts["workdir"])
    options = []
    for name, path in parts.items():
        os.makedirs(path, exist_ok=True)
        # A path may contain the characters that separate options; a descriptor's number does not.
        options.append(f"{name}=/proc/self/fd/{os.open(path, _PATH)}")
    # The folder keeps its mode and owner.
    facts = os.stat(source)
    os.chmod(parts["upperdir"], stat.S_IMODE(facts.st_mode))
    with contextlib.suppress(OSError):
        os.chown(parts["upperdir"], facts.st_uid, facts.st_gid)
    # No change needs to survive a crash of the machine; otherwise the unmount waits for the disk.
    options.append("volatile")
    os.makedirs(target, exist_ok=True)
    data = ",".join(options).encode()
    # In a user namespace, only attributes of users can mark a folder that replaces another.
    for more in (b",userxattr", b"") if _is_in_user_namespace() else (b"",):
        if not libc.mount(b"overlay", os.fsencode(target), b"overlay", 0, data + more):
            return
    _check(-1, f"overlay {target}")


def _is_in_user_namespace() -> bool:
    with open("/proc/self/uid_map", encoding="ascii") as file:
        return file.read().split() != ["0", "0", "4294967295"]


def _make_read_only(libc: ctypes.CDLL, target: str) -> None:
    # Each mount below has flags of its own.
    for path in [target, *_mounts_below(target)]:
        # Only the machine's root may clear the other flags.
        flags = _MS_REMOUNT | _MS_BIND | _MS_RDONLY | (os.statvfs(path).f_flag & _MS_KEPT)
        _check(libc.mount(None, os.fsencode(path), None, flags, None), f"remount {path}")


def _mounts_below(folder: str) -> list[str]:
    """Return where other file systems are mounted below a folder; an overlay hides them."""
    start = os.fsencode(folder) + b"/"
    with open("/proc/self/mountinfo", "rb") as file:
        points = [_mount_point(line) for line in file]
    return [os.fsdecode(point) for point in points if point.startswith(start)]


def _mount_point(line: bytes) -> bytes:
    point = line.split(b" ", 5)[4]
    # A blank, a tab, a newline and a backslash are octal numbers.
    return (
        re.sub(rb"\\(\d{3})", lambda octal: bytes([int(octal[1], 8)]), point)
        if b"\\" in point
        else point
    )


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

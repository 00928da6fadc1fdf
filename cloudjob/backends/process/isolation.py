"""A host name and a table of hosts for one emulated node, by Linux namespaces, without root."""

from __future__ import annotations

import ctypes
import os
import socket

_CLONE_NEWNS = 0x00020000
_CLONE_NEWUTS = 0x04000000
_CLONE_NEWUSER = 0x10000000
_MS_BIND = 4096
_MS_REC = 16384
_MS_PRIVATE = 1 << 18


def isolate(host: str, hosts_file: str) -> None:
    """Give this process, and what it starts, the name ``host`` and ``hosts_file`` as /etc/hosts.

    Raises:
        OSError: This machine does not allow it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(_CLONE_NEWUTS | _CLONE_NEWNS):
        # Not root: a user namespace of our own gives the right, and keeps who we are.
        _check(libc.unshare(_CLONE_NEWUSER | _CLONE_NEWUTS | _CLONE_NEWNS), "unshare")
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{user} {user} 1")
        _write("/proc/self/gid_map", f"{group} {group} 1")
    socket.sethostname(host.partition(".")[0])
    _check(libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None), "mount /")
    source = os.fsencode(hosts_file)
    _check(libc.mount(source, b"/etc/hosts", None, _MS_BIND, None), "mount /etc/hosts")


def is_possible(hosts_file: str) -> bool:
    """Whether this machine allows it; tried in a child, so nothing changes here."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            isolate("cloudjob-probe", hosts_file)
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _check(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)

"""Guardians of pytest: when it ends, however it ends, they end all that its tests have started.

A subreaper adopts the processes whose parents have ended, so nothing that pytest starts can leave
its guardian. There are two, one the parent of the other: if one is killed, the other one acts.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_FORWARDED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
_SIGNALS = (signal.SIGCHLD, *_FORWARDED)
# A process that the kernel does not let go keeps nobody waiting for longer.
_LIMIT_S = 60.0


def guard() -> None:
    """Return in a grandchild of this process, which itself becomes the outer guardian.

    The outer guardian has the process id of the command, forwards signals to pytest and exits
    with its exit code. Workers of xdist are children of pytest, so they need no guardians.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    for _ in range(2):
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        guardian = os.getpid()
        child = os.fork()
        if child:
            os._exit(_exit_code_of(child))
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        if os.getppid() != guardian:
            # It was killed before the call of prctl.
            os._exit(1)


def _exit_code_of(child: int) -> int:
    """Wait for a child, end everything that it has left behind, and return its exit code."""
    while True:
        number, code = _next_signal()
        # The kernel sends the signals of a terminal to pytest, too; their code is positive.
        if number in _FORWARDED and code <= 0:
            os.kill(child, number)
        status = _reap().get(child)
        if status is not None:
            _end_rest()
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _next_signal() -> tuple[int, int]:
    """Wait for a signal, and return its number and its code: PyPy has no ``signal.sigwaitinfo``."""
    wanted, information = ctypes.create_string_buffer(128), (ctypes.c_int * 32)()
    _LIBC.sigemptyset(wanted)
    for number in _SIGNALS:
        _LIBC.sigaddset(wanted, int(number))
    _LIBC.sigwaitinfo(wanted, information)
    return information[0], information[2]


def _reap() -> dict[int, int]:
    """Return the status of each child that has ended."""
    ended: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            child, status = os.waitpid(-1, os.WNOHANG)
            if not child:
                break
            ended[child] = status
    return ended


def _end_rest() -> None:
    """Kill all children, then those that are adopted when these end, until there are none."""
    end = time.monotonic() + _LIMIT_S
    while (children := _children()) and time.monotonic() < end:
        for child in children:
            # Another user's process may have left root's rights to this one.
            with contextlib.suppress(OSError):
                os.kill(child, signal.SIGKILL)
        _reap()
        time.sleep(0.01)


def _children() -> list[int]:
    """Return the children of this process."""
    children = []
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            with contextlib.suppress(OSError):
                parent = int((path / "stat").read_bytes().rpartition(b")")[2].split()[1])
                if parent == os.getpid():
                    children.append(int(path.name))
    return children

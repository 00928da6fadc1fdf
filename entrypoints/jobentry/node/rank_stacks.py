"""The stacks of the ranks of this node, with the lines of their source."""

from __future__ import annotations

import contextlib
import linecache
import os
from typing import TYPE_CHECKING, Iterator, Sequence

from jobentry.contract.stacks import (
    MOST_FRAMES,
    MOST_PROCESSES,
    MOST_THREADS,
    Frame,
    NativeCall,
    ProcessStacks,
    ThreadStack,
)
from jobentry.contract.waits import of_script
from jobentry.node.rank_usage import RankProcesses, Ranks
from jobentry.secrets import masking
from jobentry.stacks.memory import UnreadableError
from jobentry.stacks.native_calls import NativeStacks
from jobentry.stacks.python_stacks import PythonThread, python_stacks
from jobentry.system import linux

if TYPE_CHECKING:
    from jobentry.contract.paths import NodePaths

_COMMAND_LIMIT, _SOURCE_LIMIT = 120, 200
# GPUs of NVIDIA, NPUs of Huawei, GPUs of AMD.
_DEVICES = ("/dev/nvidia", "/dev/davinci", "/dev/kfd")
# A larger file is hardly a program.
_SOURCE_LIMIT_BYTES = 4 << 20


def read_stacks(
    ranks: Ranks,
    paths: NodePaths,
    node: int,
    *,
    with_threads: bool,
    with_native: bool = False,
) -> list[ProcessStacks]:
    """Return what the running ranks of this node execute, and the processes that they started.

    Args:
        with_threads: Whether to return other threads than the main ones, too.
        with_native: Whether to return calls of C and C++ code, too; those of a process that runs
            no Python are always returned.
    """
    native = NativeStacks()
    programs = {state.program for state in ranks.states().values() if not state.end}
    processes = []
    for rank, members in sorted(RankProcesses(ranks, paths).members().items()):
        in_order = sorted(members, key=lambda number: (number not in programs, number))
        for process in in_order[:MOST_PROCESSES]:
            stacks = stacks_of(process, with_threads=with_threads)
            if stacks is not None:
                threads, problem = stacks
                if with_native or not any(thread.frames for thread in threads):
                    threads = tuple(_with_native(native, process, threads, with_threads))
                command, is_program = _command(process), process in programs
                processes.append(
                    ProcessStacks(rank, node, process, command, is_program, threads, problem)
                )
    linecache.clearcache()
    return processes


def stacks_of(process: int, *, with_threads: bool) -> tuple[tuple[ThreadStack, ...], str] | None:
    """Return the stacks of a process, and why they are missing; None if it has ended."""
    try:
        threads = python_stacks(process)
    except UnreadableError as error:
        state, waits_in = state_of(process, process)
        if not state:
            return None
        return (ThreadStack(process, state, waits_in, False, ()),), str(error)
    main = [thread for thread in threads if thread.thread_id == process]
    chosen: Sequence[PythonThread] = threads if with_threads else (main or threads[:1])
    return tuple(_thread(process, thread) for thread in chosen[:MOST_THREADS]), ""


def _with_native(
    native: NativeStacks, process: int, threads: Sequence[ThreadStack], with_threads: bool
) -> Iterator[ThreadStack]:
    """Add their native calls to the threads of a process, and threads that run no Python."""
    yield from (_natively(native, process, thread) for thread in threads)
    others = linux.threads(process) if with_threads else []
    with_python = {thread.thread for thread in threads}
    for number in [other for other in others if other not in with_python][
        : MOST_THREADS - len(threads)
    ]:
        state, waits_in = state_of(process, number)
        if state:
            yield _natively(native, process, ThreadStack(number, state, waits_in, False, ()))


def _natively(native: NativeStacks, process: int, thread: ThreadStack) -> ThreadStack:
    calls: tuple[NativeCall, ...] = ()
    with contextlib.suppress(UnreadableError):
        calls = native.calls(process, thread.thread or process, may_stop=True)
    return thread._replace(native=calls)


def _thread(process: int, thread: PythonThread) -> ThreadStack:
    folder = linux.working_folder(process)
    frames = of_script(thread.frames)
    state, waits_in = state_of(process, thread.thread_id)
    return ThreadStack(
        thread.thread_id,
        state,
        waits_in,
        thread.is_moving,
        tuple(
            Frame(
                masking.hide(relative(frame.file, folder)),
                frame.line,
                masking.hide(frame.function),
                source_line(frame.file, frame.line, folder),
            )
            for frame in frames[:MOST_FRAMES]
        ),
        uses_device(process),
    )


def relative(file: str, folder: str) -> str:
    """Return the path of a file, relative to ``folder`` if it is in it."""
    return file[len(folder) + 1 :] if folder and file.startswith(folder + "/") else file


def source_line(file: str, line: int, folder: str) -> str:
    """Return a line of a program, as this node's files have it now; empty if it is unreadable."""
    path = os.path.join(folder, file)
    try:
        if os.stat(path).st_size > _SOURCE_LIMIT_BYTES or not os.path.isfile(path):
            return ""
    except (OSError, ValueError):
        return ""
    return masking.hide(linecache.getline(path, line).strip())[:_SOURCE_LIMIT]


def state_of(process: int, thread: int) -> tuple[str, str]:
    """Return the state of a thread, and the function of the kernel in which it waits."""
    try:
        state = linux.stat(process, thread)[0].decode("ascii")
        waits_in = linux.read(process, "task/%d/wchan" % (thread or process)).decode("ascii")
    except (OSError, IndexError):
        return "", ""
    return state, "" if waits_in == "0" else waits_in


def uses_device(process: int) -> bool:
    """Whether a process has a GPU or NPU open."""
    return any(path.startswith(_DEVICES) for _, path in linux.open_files(process))


def _command(process: int) -> str:
    """Return the command line of a process, shortened, without secrets."""
    try:
        words = linux.read(process, "cmdline").decode("utf-8", "replace").split("\0")
    except OSError:
        return ""
    return masking.hide(" ".join(words).strip())[:_COMMAND_LIMIT]

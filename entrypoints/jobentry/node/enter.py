"""Runs a command on this node as a rank would run it: in its environment and its folder.

``cloudjob exec`` starts this process on the node, beside the entry: by nsenter, by ``docker exec``
or as a step of the Slurm job.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Mapping, NamedTuple, Sequence

from jobentry.contract import exits, names, paths
from jobentry.rank import wrapper
from jobentry.system import linux

USAGE = "usage: jobentry --enter [--rank R] -- COMMAND [ARGS]..."


class Surroundings(NamedTuple):
    """What a command gets from a rank: its environment, and its folder."""

    environment: Mapping[str, str]
    folder: str


def main(*argv: str) -> int:
    """Become a command; return an exit code only if that is impossible.

    Args:
        argv: ``[--rank R] -- COMMAND [ARGS]...``.
    """
    options, mark, command = _split(argv)
    if not mark or not command or options[:1] not in ([], ["--rank"]):
        return _fail(USAGE, exits.ENTRY_FAILED)
    rank = int(options[1]) if options else None
    node_dir = node_dir_of(os.environ)
    surroundings = of_rank(node_dir, rank)
    if surroundings is None and rank is not None:
        return _fail(f"looking for rank {rank}: it does not run on this node", exits.ENTRY_FAILED)
    surroundings = surroundings or of_entry(node_dir)
    if surroundings is None:
        return _fail("looking for the job: it has not started on this node", exits.ENTRY_FAILED)
    environment = dict(surroundings.environment)
    if os.isatty(0):
        environment.setdefault("TERM", os.environ.get("TERM") or "xterm")
    try:
        os.chdir(surroundings.folder)
        os.execvpe(command[0], command, environment)
    except FileNotFoundError:
        return _fail(f"starting {command[0]}: not found on PATH", exits.NOT_FOUND)
    except OSError as error:
        return _fail(f"starting {command[0]}: {error.strerror}", exits.CANNOT_EXECUTE)


def _split(argv: Sequence[str]) -> tuple[list[str], bool, list[str]]:
    at = argv.index("--") if "--" in argv else len(argv)
    return list(argv[:at]), at < len(argv), list(argv[at + 1 :])


def node_dir_of(environ: Mapping[str, str]) -> str:
    """Return the folder of this node's entry, for a process that was started beside it."""
    default = paths.node_dir(paths.home_of(environ), environ.get(names.CLOUDJOB_JOB, ""))
    return environ.get(names.CLOUDJOB_NODE_DIR) or default


def of_rank(node_dir: str, rank: int | None) -> Surroundings | None:
    """Return the surroundings of a rank's program; None if it does not run.

    Args:
        rank: None for the lowest one of this node.
    """
    programs: dict[int, tuple[int, Surroundings]] = {}
    # A node that shares the machine's processes with others has its own mount namespace.
    namespace = os.readlink("/proc/self/ns/mnt")
    for process in linux.processes():
        try:
            # Another user's variables, such as LD_PRELOAD, would choose what runs with our rights.
            if os.stat("/proc/%d" % process).st_uid != os.getuid():
                continue
            environment = _environment(process)
            # Only the program that a wrapper has started has the last one.
            if (
                environment.get(names.CLOUDJOB_NODE_DIR) != node_dir
                or names.CLOUDJOB_END_FD not in environment
                or os.readlink(f"/proc/{process}/ns/mnt") != namespace
            ):
                continue
            folder = _folder_of(process, environment)
            started = int(linux.start_ticks(process))
            number = wrapper.rank_of(environment)
        except (OSError, ValueError):
            continue
        del environment[names.CLOUDJOB_END_FD]
        # Its launcher may start a rank again.
        if started >= programs.get(number, (0,))[0]:
            programs[number] = started, Surroundings(environment, folder)
    number = min(programs, default=0) if rank is None else rank
    return programs[number][1] if number in programs else None


def of_entry(node_dir: str) -> Surroundings | None:
    """Return the surroundings that ranks of this node will have; None before the entry is ready."""
    environment = wrapper.read_node_env({names.CLOUDJOB_NODE_DIR: node_dir})
    folder = environment.get("PWD", "")
    return Surroundings(environment, folder) if os.path.isdir(folder) else None


def _folder_of(process: int, environment: Mapping[str, str]) -> str:
    """Return a process's working folder, by the name that the process knows if there are several.

    Raises:
        OSError: The process is gone.
    """
    link = f"/proc/{process}/cwd"
    named = environment.get("PWD", "")
    with contextlib.suppress(OSError):
        if os.path.samefile(named, link):
            return named
    return os.readlink(link)


def _environment(process: int) -> dict[str, str]:
    pairs = linux.read(process, "environ").split(b"\0")
    named = (os.fsdecode(pair).partition("=") for pair in pairs if b"=" in pair)
    return {name: value for name, _, value in named}


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"jobentry: {message}\n")
    return code

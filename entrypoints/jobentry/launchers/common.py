"""What launchers hand back, and what several of them need. No I/O."""

from __future__ import annotations

import posixpath
from typing import Mapping, NamedTuple, Sequence

from jobentry.contract import names
from jobentry.contract.env import NodeEnv
from jobentry.contract.paths import NodePaths

PRIVATE = 0o600


class ArgsError(Exception):
    """A variable that tells a launcher something cannot be used; ``problems`` lists every fault."""

    hint = "fix or unset it; without it the default of `cloudjob docs environment` applies"

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class File(NamedTuple):
    """A file to write before the start."""

    path: str
    mode: int
    text: str


class Process(NamedTuple):
    """A process that the entry of a node starts: it starts ranks, or is the door of one.

    Args:
        is_door: Whether it is a door, which says itself how its rank ended.
        is_server: Whether it serves the ranks: they need it to the end, and nobody needs it longer.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    is_door: bool = False
    is_server: bool = False


class Launch(NamedTuple):
    """What one node starts, and how many ranks the job has.

    Args:
        is_everywhere: Whether each node starts its own ranks; else the head starts all of them.
        notes: What was left out or changed, for people.
    """

    processes: tuple[Process, ...]
    ranks: int
    is_everywhere: bool = True
    files: tuple[File, ...] = ()
    notes: tuple[str, ...] = ()


class Site(NamedTuple):
    """Where a launch happens: the node, its variables, paths and interpreter, and our own entry.

    Args:
        rank_table: The text of the platform's own; empty for none.
    """

    node: NodeEnv
    environment: Mapping[str, str]
    paths: NodePaths
    interpreter: str
    entry: tuple[str, ...]
    rank_table: str = ""

    @property
    def under_interpreter(self) -> tuple[str, str]:
        """Our own entry under the interpreter of the script."""
        return self.interpreter, self.entry[-1]


def program(site: Site, words: Sequence[str]) -> tuple[str, ...]:
    """Return the command of one rank: by what the script's name says it is."""
    script = words[0]
    suffix = posixpath.splitext(script)[1]
    if suffix == ".py":
        return (*site.under_interpreter, "--script", *words)
    if suffix == ".sh":
        # A script from object storage has lost its x bit.
        return ("bash", *words)
    return (script if script.startswith("/") else "./" + script, *words[1:])


def door(
    site: Site,
    rank: int,
    words: Sequence[str],
    env: Mapping[str, str],
    options: Sequence[str] = (),
) -> Process:
    """Return the process that runs ``words`` as the rank ``rank``; ``options`` are the door's."""
    return Process(
        "rank %d" % rank,
        (*site.entry, "--rank", *options, "--", *words),
        {**site.environment, **env, names.CLOUDJOB_RANK: str(rank)},
        is_door=True,
    )


def port(site: Site, variable: str = "MASTER_PORT") -> int:
    """Return the port on which the ranks meet: the user's, else one that is the job's own.

    Every node must come to the same number without asking, and two jobs of one machine to two.
    """
    text = site.environment.get(variable, "")
    if text:
        if not (text.isdecimal() and text.isascii() and 0 < int(text[:9]) < 65536):
            raise ArgsError([f"{variable}={text[:80]!r} is not a port"])
        return int(text)
    import hashlib  # three milliseconds, and mpirun finds its ports by itself

    digest = hashlib.sha256(site.node.job.encode("utf-8", "surrogateescape")).digest()
    # Below the ports that Linux gives out by itself, and above those of well-known servers.
    return 20000 + int.from_bytes(digest[:4], "big") % 10000

"""The input and the result of all launchers, and functions that several of them use. No I/O."""

from __future__ import annotations

import posixpath
from typing import Mapping, NamedTuple, Sequence

from jobentry.contract import names
from jobentry.contract.env import EnvError, NodeEnv
from jobentry.contract.launchers import OPEN_MPI
from jobentry.contract.paths import NodePaths

PRIVATE = 0o600


class ArgsError(EnvError):
    """A variable that configures a launcher is invalid; ``problems`` lists every error."""

    hint = "fix or unset it; without it the default of `cloudjob docs environment` applies"


class File(NamedTuple):
    """A file to write before the processes start."""

    path: str
    mode: int
    text: str


class Process(NamedTuple):
    """A process that the entry of a node starts: a launcher, a rank wrapper or a server for ranks.

    Args:
        is_wrapper: Whether it is a rank wrapper, which itself reports how its rank ended.
        is_server: Whether it serves the ranks and is stopped once all of them have ended.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    is_wrapper: bool = False
    is_server: bool = False


class Launch(NamedTuple):
    """The processes and files of one node, and the number of ranks of the job.

    Args:
        processes: Those to start; none on a worker whose ranks the head starts.
        is_everywhere: Whether each node starts its own ranks; otherwise the head starts all.
        files: The files that the processes read.
        notes: Options that were left out or changed, for the log.
        cwd: The folder of the code, in which they start; the same for all launchers.
    """

    processes: tuple[Process, ...]
    ranks: int
    is_everywhere: bool = True
    files: tuple[File, ...] = ()
    notes: tuple[str, ...] = ()
    cwd: str = ""


class Mpi(NamedTuple):
    """The MPI of this node: the absolute path of its mpirun, its version and its family."""

    mpirun: str
    version: tuple[int, ...]
    family: str = OPEN_MPI

    @property
    def name(self) -> str:
        """The version, which must be the same on all nodes: ``4.1`` for Open MPI, ``MPICH 4.0``."""
        numbers = "%d.%d" % self.version[:2]
        return numbers if self.family == OPEN_MPI else f"{self.family} {numbers}"


class Site(NamedTuple):
    """The node that launches: its environment, paths and interpreter, and the entry's command.

    Args:
        environment: The result of ``plan.node_environment``.
        mpi: Its MPI; of no version if the launcher needs none.
        rank_table: The text of the platform's rank table; empty if there is none.
        address: The address of this node that the others see, empty if not known.
    """

    node: NodeEnv
    environment: Mapping[str, str]
    paths: NodePaths
    interpreter: str
    entry: tuple[str, ...]
    mpi: Mpi = Mpi("", ())
    rank_table: str = ""
    address: str = ""

    @property
    def own_address(self) -> str:
        """What other nodes reach this one by: its address, or its name if that is not known.

        On Debian and Ubuntu, its own name means the loopback to the node itself.
        """
        return self.address or self.node.host

    @property
    def under_interpreter(self) -> tuple[str, str]:
        """The command that runs the entry under the script's interpreter."""
        return self.interpreter, self.entry[-1]


def program(site: Site, script_argv: Sequence[str]) -> tuple[str, ...]:
    """Return the command of one rank, by the suffix of the script's name."""
    script = script_argv[0]
    suffix = posixpath.splitext(script)[1]
    if suffix == ".py":
        return (*site.under_interpreter, "--script", *script_argv)
    if suffix == ".sh":
        # Object storage does not keep the executable bit.
        options = ("-e", "-o", "pipefail") if site.environment.get(names.CLOUDJOB_STRICT) else ()
        return ("bash", *options, *script_argv)
    return (script if script.startswith("/") else "./" + script, *script_argv[1:])


def rank_wrapper(
    site: Site,
    rank: int,
    argv: Sequence[str],
    env: Mapping[str, str],
    options: Sequence[str] = (),
) -> Process:
    """Return the process that runs ``argv`` as rank ``rank``; ``options`` are for the wrapper."""
    return Process(
        "rank %d" % rank,
        (*site.entry, "--rank", *options, "--", *argv),
        {**site.environment, **env, names.CLOUDJOB_RANK: str(rank)},
        is_wrapper=True,
    )


# The first port and their number, below Linux's ephemeral ports and above those of well-known
# servers.
PORTS = (20000, 10000)
# For scripts that take the last four characters of an address for its port.
PORTS_OF_FOUR_DIGITS = (7100, 900)


def port(site: Site, variable: str = "MASTER_PORT", ports: tuple[int, int] = PORTS) -> int:
    """Return the port of the rendezvous: the user's, otherwise one derived from the job's id.

    All nodes must compute the same number, and two jobs on one machine different ones.
    """
    text = site.environment.get(variable, "")
    if text:
        if not (text.isdecimal() and text.isascii() and 0 < int(text[:9]) < 65536):
            raise ArgsError([f"{variable}={text[:80]!r} is not a port"])
        return int(text)
    import hashlib  # imported here as it takes 3 ms and mpirun needs no port

    digest = hashlib.sha256(site.node.job.encode("utf-8", "surrogateescape")).digest()
    return ports[0] + int.from_bytes(digest[:4], "big") % ports[1]

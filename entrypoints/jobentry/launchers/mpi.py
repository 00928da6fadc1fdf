"""What all mpirun launchers share: the options in ``OPENMPI_*`` and the variables for the ranks."""

from __future__ import annotations

import shlex
from functools import lru_cache
from typing import Mapping, NamedTuple, Sequence

from jobentry.contract import env, names
from jobentry.contract.env import NodeEnv
from jobentry.launchers import rsh_agent
from jobentry.launchers.common import PRIVATE, ArgsError, File, Site

DEFAULT_BIND_ARGS = "-bind-to none -map-by slot"
DEFAULT_X_ARGS = (
    "-x LD_LIBRARY_PATH -x HOROVOD_MPI_THREADS_DISABLE=1 -x NCCL_DEBUG=INFO "
    "-x NCCL_SOCKET_IFNAME=ib0,bond0,eth0 -x NCCL_SOCKET_FAMILY=AF_INET -x NCCL_IB_DISABLE=0"
)
DEFAULT_MCA_ARGS = "-mca pml ob1 -mca btl ^openib -mca plm_rsh_no_tree_spawn true"
DEFAULT_EXTRA_ARGS = ""

# Options with two arguments, and with one; an unknown option is passed on with all that follows it.
MCA_OPTIONS = ("mca", "gmca", "omca", "prtemca", "pmixmca")
_ONE_ARGUMENT = frozenset(
    [
        "x",
        "np",
        "n",
        "c",
        "hostfile",
        "machinefile",
        "default-hostfile",
        "host",
        "H",
        "tune",
        "am",
        "bind-to",
        "map-by",
        "rank-by",
        "prefix",
        "output-filename",
        "output",
        "wdir",
        "wd",
        "path",
        "timeout",
        "personality",
        "stdin",
        "cpu-list",
        "cpu-set",
    ]
)
_KNOWN = _ONE_ARGUMENT.union(MCA_OPTIONS)
_MPI_PREFIXES = ("OPENMPI_", "OMPI_MCA_", "PRTE_MCA_")
BINDING = ("bind-to", "map-by", "rank-by")


class RemoteShell(NamedTuple):
    """How mpirun starts its daemons on the workers.

    Args:
        ssh_config: ssh's configuration file for the workers; empty for the user's own.
        agent: The command that replaces ssh; empty to use ssh.
    """

    ssh_config: str = ""
    agent: tuple[str, ...] = ()


NO_REMOTE_SHELL = RemoteShell()


class Option(NamedTuple):
    """One option of mpirun, without its dashes, and its arguments."""

    name: str
    args: tuple[str, ...]


def remote_shell(site: Site) -> RemoteShell:
    """Return how mpirun starts its daemons on the workers of this job."""
    node, paths = site.node, site.paths
    if not node.ssh_key:
        return NO_REMOTE_SHELL
    if rsh_agent.is_used(node, site.environment, paths.agent):
        return RemoteShell(agent=rsh_agent.argv(paths.agent))
    return RemoteShell(ssh_config=paths.ssh_config)


def agent_file(site: Site, shell: RemoteShell) -> list[File]:
    """Return the file of the agent if it is used."""
    return [File(site.paths.agent, PRIVATE, rsh_agent.TEXT)] if shell.agent else []


def exported_values(node: NodeEnv) -> dict[str, str]:
    """Return the variables that ``OPENMPI_X_ARGS`` or its default sets, by name."""
    options = _readable_options(node)
    pairs = (option.args[0].partition("=") for option in options if option.name == "x")
    return {name: value for name, equals, value in pairs if equals}


def given_parameters(node: NodeEnv) -> frozenset[str]:
    """Return the names of the MCA parameters in the four variables or their defaults."""
    options = _readable_options(node)
    return frozenset(option.args[0] for option in options if option.name in MCA_OPTIONS)


def _readable_options(node: NodeEnv) -> list[Option]:
    """Return the options, or none if some are invalid; ``command`` reports those."""
    try:
        return user_options(node)
    except ArgsError:
        return []


def rank_program(
    entry: Sequence[str], program: Sequence[str], options: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return the command that runs ``program`` under the rank wrapper with these ``options``.

    mpirun treats an argument ``:`` as the start of another program. If there is one, all arguments
    are percent-encoded, and the wrapper decodes them.
    """
    if ":" not in program:
        return (*entry, "--rank", *options, "--", *program)
    encoded = (argument.replace("%", "%25").replace(":", "%3A") for argument in program)
    return (*entry, "--rank", *options, "--percent", "--", *encoded)


def ranks(node: NodeEnv) -> int:
    """Return the number of ranks of the job."""
    return node.open_mpi.np or node.slots * node.nodes


def user_options(node: NodeEnv) -> list[Option]:
    """Return the options in the four variables, in order, with defaults for those that are unset.

    Raises:
        ArgsError: An option is invalid.
    """
    open_mpi = node.open_mpi
    sources = (
        (names.OPENMPI_BIND_ARGS, open_mpi.bind_args, DEFAULT_BIND_ARGS),
        (names.OPENMPI_X_ARGS, open_mpi.x_args, DEFAULT_X_ARGS),
        (names.OPENMPI_MCA_ARGS, open_mpi.mca_args, DEFAULT_MCA_ARGS),
        (names.OPENMPI_EXTRA_ARGS, open_mpi.extra_args, DEFAULT_EXTRA_ARGS),
    )
    options: list[Option] = []
    problems: list[str] = []
    for variable, text, default in sources:
        try:
            options += _parse(_unquoted(default if text is None else text))
        except ValueError as error:
            problems.append(f"{variable}: {str(error).lower()}")
    if problems:
        raise ArgsError(problems)
    return options


@lru_cache(maxsize=None)
def _unquoted(text: str) -> Sequence[str]:
    """Return the words of a variable, also if its whole value is in quotes.

    In the platform's documents such quotes are those of a shell; a form keeps them in the value.
    """
    words = shlex.split(text)
    # Unlike str.strip, shlex takes only these characters for spaces.
    is_whole = len(words) == 1 and text.lstrip(" \t\r\n")[0] in "\"'"
    return shlex.split(words[0]) if is_whole else words


def _parse(arguments: Sequence[str]) -> list[Option]:
    """Parse mpirun's options: one dash or two, ``--name value`` or ``--name=value``."""
    options: list[Option] = []
    rest = list(arguments)
    # Even as an option's value: mpirun splits its arguments at ":" before it parses them.
    if ":" in arguments:
        raise ValueError("':' would start a second program")
    while rest:
        argument = rest.pop(0)
        name, equals, value = argument.lstrip("-").partition("=")
        count = 2 if name in MCA_OPTIONS else 1 if name in _ONE_ARGUMENT else 0
        if not argument.startswith("-") or not name:
            _check_positional(argument, options)
            options.append(Option("", (argument,)))
        elif equals and count == 1 and name != "x":
            options.append(Option(name, (value,)))
        elif len(rest) < count:
            raise ValueError("%s needs %d argument%s" % (argument, count, "s" * (count > 1)))
        elif count:
            options.append(Option(name, tuple(rest[:count])))
            del rest[:count]
        else:
            options.append(Option(argument.lstrip("-"), ()))
    return options


def _check_positional(argument: str, before: list[Option]) -> None:
    """Refuse an argument that is not an option, unless it follows an option that we do not know."""
    if argument.startswith("-"):
        raise ValueError(f"{argument[:80]!r} is not an option")
    if not before or before[-1].name in _KNOWN:
        # mpirun would treat it as the program to start.
        raise ValueError(f"{argument[:80]!r} is not an option or an option's argument")


def carried(
    node: NodeEnv, environ: Mapping[str, str], plain: list[Option]
) -> tuple[dict[str, str], list[str]]:
    """Return the variables that mpirun carries to all ranks, and notes for the log.

    Args:
        plain: The options of mpirun; each ``x`` adds a variable.
    """
    values = {
        name: value
        for name, value in environ.items()
        if env.is_carried(name, node) and env.is_name(name)
    }
    exported, notes = _exported(node, environ, plain)
    return _past_open_mpi({**values, **exported}), notes


def _exported(
    node: NodeEnv, environ: Mapping[str, str], plain: list[Option]
) -> tuple[dict[str, str], list[str]]:
    """Return the variables named by ``-x``.

    A value in the user's ``-x`` wins over the environment; one in the default does not.
    """
    exported: dict[str, str] = {}
    notes: list[str] = []
    for option in plain:
        if option.name != "x":
            continue
        name, equals, value = option.args[0].partition("=")
        if not env.is_name(name):
            raise ArgsError([f"{names.OPENMPI_X_ARGS}: cannot carry {option.args[0][:80]!r}"])
        is_default = node.open_mpi.x_args is None
        if name in node.secret_names:
            notes.append(f"-x {name}: left out, as secrets reach every rank without it")
        elif equals and not (is_default and name in environ):
            exported[name] = value
        elif name in environ:
            exported[name] = environ[name]
        elif not is_default:
            # 5.0.11 crashes (signal 11) on ``-x`` with a variable that is not set.
            notes.append(f"-x {name}: left out, as it is not set here")
    return exported, notes


def _past_open_mpi(carried: Mapping[str, str]) -> dict[str, str]:
    """Add copies of the variables that Open MPI changes; the rank wrapper restores them."""
    result = {name: value for name, value in carried.items() if name not in ("TMPDIR", "PWD")}
    for name in names.CHANGED_BY_OPEN_MPI:
        if name in carried:
            result[names.CLOUDJOB_EXACT_ + name] = carried[name]
    return result


def environment(
    node: NodeEnv, environ: Mapping[str, str], carried: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment of mpirun, from which it takes the carried values."""
    result = {
        name: value
        for name, value in environ.items()
        # If this variable is set, any -x is an error in 4.1.
        if name != "OMPI_MCA_mca_base_env_list" and name not in node.secret_names
    }
    for name, value in carried.items():
        if name not in names.CHANGED_BY_OPEN_MPI:
            result[name] = value
    return result


def without_devices(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which mpirun and its daemons look for no devices.

    Emulated nodes have the devices of one machine, so that ranks are not mapped by them.

    Args:
        environ: The variables of this node.
    """
    if not environ.get(names.CLOUDJOB_CONTROL_DIR):
        return {}
    settings = {name: value for name, value in environ.items() if name.startswith(_MPI_PREFIXES)}
    is_set = any(name.startswith("HWLOC_") for name in environ)
    # ``dist`` maps ranks by their distance from a device.
    return {} if is_set or "dist:" in str(settings) else names.WITHOUT_DEVICES


def check_slots(np: int, node: NodeEnv, plain: list[Option]) -> None:
    """Refuse more ranks than slots: Open MPI 5.0.11 starts fewer ranks and exits with 0."""
    room = node.slots * node.nodes
    may_oversubscribe = any(
        "oversubscribe" in " ".join((option.name, *option.args)).lower() for option in plain
    )
    if np > room and not may_oversubscribe and not node.open_mpi.host_file:
        raise ArgsError(
            [
                "%s=%d, but there is room for %d (nodes: %d, slots per node: %d)"
                % (names.OPENMPI_NP, np, room, node.nodes, node.slots)
            ]
        )

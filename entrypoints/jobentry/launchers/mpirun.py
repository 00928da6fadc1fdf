"""The mpirun command of ModelArts, rebuilt from its variables for Open MPI 4.1 and 5.0.

    mpirun -np $OPENMPI_NP -hostfile $OPENMPI_HOST_FILE_PATH -mca plm_rsh_args "-p $SSHD_PORT"
        -tune $TUNE_ENV_FILE $OPENMPI_BIND_ARGS $OPENMPI_X_ARGS $OPENMPI_MCA_ARGS
        $OPENMPI_EXTRA_ARGS python <script> <args>

The words are the documented ones; their form is the one that both versions take: two dashes, each
parameter once, under the name that this version knows, and ``-x NAME`` without a value.
"""

from __future__ import annotations

from typing import Iterable, Mapping, NamedTuple, Sequence

from jobentry.contract import names
from jobentry.contract.env import NodeEnv
from jobentry.contract.launchers import OPEN_MPI
from jobentry.launchers.common import PRIVATE, ArgsError, File, Launch, Process, Site, program
from jobentry.launchers.mpi import (
    BINDING,
    MCA_OPTIONS,
    NO_REACH,
    Mpi,
    Option,
    Reach,
    agent_file,
    carried,
    check_slots,
    environment,
    rank_program,
    ranks,
    reach,
    user_options,
)

# Open MPI 5.0 moved starting and stopping to PRRTE, which knows other names.
_RENAMED_IN_5 = {
    "orte_rsh_agent": "plm_ssh_agent",
    "orte_keep_fqdn_hostnames": "prte_keep_fqdn_hostnames",
    "oob_tcp_if_include": "prte_if_include",
    "oob_tcp_if_exclude": "prte_if_exclude",
}
_GONE_IN_5 = ("routed", "oob")
# How many remote shells mpirun opens at once, unless it is told another number.
_AT_ONCE = 128


class Command(NamedTuple):
    """How to start all ranks.

    Args:
        argv: mpirun and its words.
        env: The environment of mpirun: the carriers of every value.
        host_file: The text of the host file.
        tune_file: The text of the tune file.
        notes: What was left out or changed, for people.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    host_file: str
    tune_file: str
    notes: tuple[str, ...]


def launch(site: Site, mpi: Mpi, words: Sequence[str], options: Sequence[str] = ()) -> Launch:
    """Return mpirun on the head, which starts the ranks of all nodes.

    Args:
        options: Words for the door of each rank.

    Raises:
        ArgsError: A variable with options cannot be read, or asks for what cannot be had.
    """
    node = site.node
    if mpi.family != OPEN_MPI:
        from jobentry.launchers import hydra

        return hydra.launch(site, mpi, words, options)
    tune_path = node.open_mpi.tune_file or site.paths.tune_file
    count = ranks(node)
    if not node.is_head:
        # Refused on every node alike: a worker would wait for a head that has left.
        command(node, site.environment, mpi, ("", ""), ())
        # mpirun 4.1 names the file to its daemons, and each says so when it finds none.
        return Launch((), count, is_everywhere=False, files=(File(tune_path, PRIVATE, ""),))
    host_path = node.open_mpi.host_file or site.paths.host_file
    how = reach(site)
    made = command(
        node,
        site.environment,
        mpi,
        (host_path, tune_path),
        rank_program(site.entry, program(site, words), options),
        how,
    )
    files = [
        File(host_path, PRIVATE, made.host_file),
        File(tune_path, PRIVATE, made.tune_file),
    ]
    files += agent_file(site, how)
    return Launch(
        (Process("mpirun", made.argv, made.env),),
        count,
        is_everywhere=False,
        files=tuple(files),
        notes=made.notes,
    )


def host_file(hosts: Sequence[str], slots: int) -> str:
    """Return Open MPI's host file: one line a node."""
    return "".join("%s slots=%d\n" % (host, slots) for host in hosts)


def tune_file(variables: Iterable[str]) -> str:
    """Return the tune file that carries ``variables``, each by name only.

    A value in this file is cut at blanks by 4.1 and ends 5.0 with exit 243; a line without ``-x``
    carries nothing on either (tried on 4.1.4 and 5.0.11). The name alone carries the exact value.
    """
    return "".join(f"-x {name}\n" for name in variables)


def is_safe_in_tune_file(value: str) -> bool:
    """Whether the tune file carries this value of a variable that it names."""
    # Open MPI 4.1.4 loses a value with "=" when the tune file names its variable.
    return value != "" and "=" not in value


def command(
    node: NodeEnv,
    environ: Mapping[str, str],
    mpi: Mpi,
    files: tuple[str, str],
    program: Sequence[str],
    reach: Reach = NO_REACH,
) -> Command:
    """Return how to start ``program`` once a rank.

    Args:
        node: What this node, the head, knows.
        environ: The variables to carry, with their values.
        mpi: The Open MPI that will start them.
        files: The paths of the host file and of the tune file.
        program: The command of a rank. A word ``:`` would end it for mpirun: see ``rank_program``.
        reach: How the workers are reached.

    Raises:
        ArgsError: A variable with options cannot be read, or asks for what cannot be had.
    """
    mca, plain = _split(user_options(node))
    values, notes = carried(node, environ, plain)
    np = ranks(node)
    check_slots(np, node, plain)
    mca_words, mca_notes = _mca_words(node, mpi, mca, reach)
    notes += mca_notes

    in_tune_file = [
        name
        for name, value in values.items()
        if name.startswith(names.CARRIED_PREFIXES) and is_safe_in_tune_file(value)
    ]
    on_line = [name for name in values if name not in set(in_tune_file)]
    argv = [mpi.mpirun, "-np", str(np), "--hostfile", files[0]]
    argv += mca_words[0] + ["--tune", files[1]]
    argv += [word for option in plain if option.name in BINDING for word in _words(option)]
    argv += [word for name in on_line for word in ("-x", name)]
    argv += mca_words[1]
    argv += [
        word
        for option in plain
        if option.name not in BINDING and option.name != "x"
        for word in _words(option)
    ]
    return Command(
        argv=(*argv, *program),
        env=environment(node, environ, values),
        host_file=host_file(node.hosts, node.slots),
        tune_file=tune_file(in_tune_file),
        notes=tuple(notes),
    )


def _words(option: Option) -> list[str]:
    if not option.name:
        return list(option.words)
    # 5.0 takes a long option with one dash for the program to start (exit 66).
    dashes = "-" if len(option.name) == 1 or option.name == "np" else "--"
    return [dashes + option.name, *option.words]


def _split(options: list[Option]) -> tuple[dict[tuple[str, str], str], list[Option]]:
    """Part MCA parameters, the last of a name winning, from the other options."""
    mca: dict[tuple[str, str], str] = {}
    plain: list[Option] = []
    for option in options:
        if option.name in MCA_OPTIONS:
            mca[(option.name, option.words[0])] = option.words[1]
        elif option.name in ("np", "n", "c", "hostfile", "machinefile", "tune", "am"):
            raise ArgsError(
                ["--{} {}: the entry sets this itself".format(option.name, " ".join(option.words))]
            )
        elif option.name in BINDING:
            # Only one of each: 4.1 refuses two.
            plain = [other for other in plain if other.name != option.name] + [option]
        else:
            plain.append(option)
    return mca, plain


def _mca_words(
    node: NodeEnv, mpi: Mpi, given: Mapping[tuple[str, str], str], reach: Reach
) -> tuple[tuple[list[str], list[str]], list[str]]:
    """Return the words for the remote shell, those for all other parameters, and notes."""
    notes: list[str] = []
    values: dict[tuple[str, str], str] = {}
    for (option, name), value in given.items():
        known = _name_in(mpi.version, name)
        if known:
            values[(option, known)] = value
        else:
            notes.append(f"parameter {name} is not known to Open MPI 5.0: left out")
    if node.control_dir and node.nodes == 1 and node.open_mpi.mca_args is None:
        # Ranks of one node share memory; TCP would have each listen on every address.
        values[("mca", "btl")] = "^openib,tcp"
    prefix = "plm_ssh_" if mpi.version >= (5,) else "plm_rsh_"
    if reach.agent and ("mca", prefix + "args") in values:
        notes.append(f"parameter {prefix}args is left out: nodes of one machine have no ssh")
    shell = _shell(node, values, prefix, reach)
    shell.update({key: values.pop(key) for key in list(values) if key in shell})
    # A tree of daemons is for who asks for it: 5.0.11 hung with it in 4 of 6 starts.
    values.setdefault(("mca", prefix + "no_tree_spawn"), "true")
    if mpi.version >= (5,) and node.nodes - 1 > _AT_ONCE:
        # With fewer at once than there are nodes 5.0.11 hung in its start-up (2 of 2 tries).
        values.setdefault(("mca", prefix + "num_concurrent"), str(node.nodes - 1))
    return (_mca_list(shell), _mca_list(values)), notes


def _shell(
    node: NodeEnv, values: dict[tuple[str, str], str], prefix: str, reach: Reach
) -> dict[tuple[str, str], str]:
    """Return the parameters of the remote shell; its arguments are taken out of ``values``."""
    user_args = values.pop(("mca", prefix + "args"), "")
    if reach.agent:
        words = {"agent": " ".join(reach.agent)}
    elif reach.ssh_config:
        # It holds the port, too, and is one word: with tree spawn 4.1 loses values with a blank on
        # the second hop.
        words = {"args": f"-F{reach.ssh_config} {user_args}".strip()}
    elif not any(word.startswith("-p") for word in user_args.split()):
        words = {"args": ("-p %d %s" % (node.sshd_port, user_args)).strip()}
    else:
        words = {"args": user_args}
    return {("mca", prefix + name): value for name, value in words.items() if value}


def _mca_list(values: Mapping[tuple[str, str], str]) -> list[str]:
    return [
        word for (option, name), value in values.items() for word in ("--" + option, name, value)
    ]


def _name_in(version: tuple[int, ...], name: str) -> str:
    """Return the name of a parameter in this version; empty when it has none."""
    if version < (5,):
        return "plm_rsh_" + name[8:] if name.startswith("plm_ssh_") else name
    if name in _GONE_IN_5:
        return ""
    if name.startswith("plm_rsh_"):
        return "plm_ssh_" + name[8:]
    return _RENAMED_IN_5.get(name, name)

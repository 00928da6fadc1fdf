"""The mpirun command of ModelArts, rebuilt from its variables for Open MPI 4.1 and 5.0.

    mpirun -np $OPENMPI_NP -hostfile $OPENMPI_HOST_FILE_PATH -mca plm_rsh_args "-p $SSHD_PORT"
        -tune $TUNE_ENV_FILE $OPENMPI_BIND_ARGS $OPENMPI_X_ARGS $OPENMPI_MCA_ARGS
        $OPENMPI_EXTRA_ARGS python <script> <args>

The words are the documented ones; their form is the one that both versions take: two dashes, each
parameter once, under the name that this version knows, and ``-x NAME`` without a value.
"""

from __future__ import annotations

import shlex
from typing import Iterable, Mapping, NamedTuple, Sequence

from jobentry.contract import env, names
from jobentry.contract.env import NodeEnv
from jobentry.contract.launchers import OPEN_MPI
from jobentry.launchers.common import PRIVATE, ArgsError, File, Launch, Process, Site, program

DEFAULT_BIND_ARGS = "-bind-to none -map-by slot"
DEFAULT_X_ARGS = (
    "-x LD_LIBRARY_PATH -x HOROVOD_MPI_THREADS_DISABLE=1 -x NCCL_DEBUG=INFO "
    "-x NCCL_SOCKET_IFNAME=ib0,bond0,eth0 -x NCCL_SOCKET_FAMILY=AF_INET -x NCCL_IB_DISABLE=0"
)
DEFAULT_MCA_ARGS = "-mca pml ob1 -mca btl ^openib -mca plm_rsh_no_tree_spawn true"
DEFAULT_EXTRA_ARGS = ""

# How many words follow an option; an option that is not here is passed on with what follows it.
_MCA_OPTIONS = ("mca", "gmca", "omca", "prtemca", "pmixmca")
_ONE_WORD = frozenset(
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
_KNOWN = _ONE_WORD.union(_MCA_OPTIONS)
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


class Mpi(NamedTuple):
    """The MPI of this node: its mpirun (an absolute path), its version, and whose it is."""

    mpirun: str
    version: tuple[int, ...]
    family: str = OPEN_MPI

    @property
    def name(self) -> str:
        """What nodes must have in common: ``4.1`` of Open MPI, else ``MPICH 4.0``."""
        numbers = "%d.%d" % self.version[:2]
        return numbers if self.family == OPEN_MPI else f"{self.family} {numbers}"


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


class Option(NamedTuple):
    """One option of mpirun, without its dashes, and the words that follow it."""

    name: str
    words: tuple[str, ...]


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
        # mpirun 4.1 names the file to its daemons, and each says so when it finds none.
        return Launch((), count, is_everywhere=False, files=(File(tune_path, PRIVATE, ""),))
    host_path = node.open_mpi.host_file or site.paths.host_file
    made = command(
        node,
        site.environment,
        mpi,
        (host_path, tune_path),
        rank_program(site.entry, program(site, words), options),
        ssh_config=site.paths.ssh_config if node.ssh_key else "",
    )
    return Launch(
        (Process("mpirun", made.argv, made.env),),
        count,
        is_everywhere=False,
        files=(
            File(host_path, PRIVATE, made.host_file),
            File(tune_path, PRIVATE, made.tune_file),
        ),
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
    ssh_config: str = "",
) -> Command:
    """Return how to start ``program`` once a rank.

    Args:
        node: What this node, the head, knows.
        environ: The variables to carry, with their values.
        mpi: The Open MPI that will start them.
        files: The paths of the host file and of the tune file.
        program: The command of a rank. A word ``:`` would end it for mpirun: see ``rank_program``.
        ssh_config: The file that tells ssh how to reach the workers; empty for the user's own.

    Raises:
        ArgsError: A variable with options cannot be read, or asks for what cannot be had.
    """
    mca, plain = _split(user_options(node))
    values, notes = carried(node, environ, plain)
    np = ranks(node)
    check_slots(np, node, plain)
    mca_words, mca_notes = _mca_words(node, mpi, mca, ssh_config)
    notes += mca_notes

    in_tune_file = [
        name
        for name, value in values.items()
        if name.startswith(names.CARRIED_PREFIXES) and is_safe_in_tune_file(value)
    ]
    on_line = [name for name in values if name not in set(in_tune_file)]
    argv = [mpi.mpirun, "-np", str(np), "--hostfile", files[0]]
    argv += mca_words[0] + ["--tune", files[1]]
    argv += [word for option in plain if option.name in _BINDING for word in _words(option)]
    argv += [word for name in on_line for word in ("-x", name)]
    argv += mca_words[1]
    argv += [
        word
        for option in plain
        if option.name not in _BINDING and option.name != "x"
        for word in _words(option)
    ]
    return Command(
        argv=(*argv, *program),
        env=environment(node, environ, values),
        host_file=host_file(node.hosts, node.slots),
        tune_file=tune_file(in_tune_file),
        notes=tuple(notes),
    )


def exported_values(node: NodeEnv) -> dict[str, str]:
    """Return the values that stand in ``OPENMPI_X_ARGS`` or its default, by name."""
    options = _readable_options(node)
    pairs = (option.words[0].partition("=") for option in options if option.name == "x")
    return {name: value for name, equals, value in pairs if equals}


def asked_parameters(node: NodeEnv) -> frozenset[str]:
    """Return the MCA parameters that stand in the four variables or their defaults."""
    options = _readable_options(node)
    return frozenset(option.words[0] for option in options if option.name in _MCA_OPTIONS)


def _readable_options(node: NodeEnv) -> list[Option]:
    """Return no option where some cannot be read: ``command`` says what is wrong with them."""
    try:
        return user_options(node)
    except ArgsError:
        return []


def rank_program(
    entry: Sequence[str], program: Sequence[str], options: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return the command that runs ``program`` under our rank door, with ``options`` of the door.

    mpirun takes a word ``:`` anywhere for the start of another program, so then every word is
    written with percent signs, which the door takes away again.
    """
    if ":" not in program:
        return (*entry, "--rank", *options, "--", *program)
    words = (word.replace("%", "%25").replace(":", "%3A") for word in program)
    return (*entry, "--rank", *options, "--percent", "--", *words)


def ranks(node: NodeEnv) -> int:
    """Return how many ranks the job has."""
    return node.open_mpi.np or node.slots * node.nodes


_BINDING = ("bind-to", "map-by", "rank-by")


def user_options(node: NodeEnv) -> list[Option]:
    """Return every option of the four variables, in their order; a default where one is not set.

    Raises:
        ArgsError: They cannot be read.
    """
    given = node.open_mpi
    sources = (
        (names.OPENMPI_BIND_ARGS, given.bind_args, DEFAULT_BIND_ARGS),
        (names.OPENMPI_X_ARGS, given.x_args, DEFAULT_X_ARGS),
        (names.OPENMPI_MCA_ARGS, given.mca_args, DEFAULT_MCA_ARGS),
        (names.OPENMPI_EXTRA_ARGS, given.extra_args, DEFAULT_EXTRA_ARGS),
    )
    options: list[Option] = []
    problems: list[str] = []
    for variable, text, default in sources:
        try:
            options += _parse(shlex.split(default if text is None else text))
        except ValueError as error:
            problems.append(f"{variable}: {str(error).lower()}")
    if problems:
        raise ArgsError(problems)
    return options


def _parse(words: list[str]) -> list[Option]:
    """Read mpirun's options; one dash or two, ``--name value`` or ``--name=value``."""
    options: list[Option] = []
    rest = list(words)
    # Also as the value of an option: mpirun parts its words at ":" before it reads them.
    if ":" in words:
        raise ValueError("':' would start a second program")
    while rest:
        word = rest.pop(0)
        name, equals, value = word.lstrip("-").partition("=")
        count = 2 if name in _MCA_OPTIONS else 1 if name in _ONE_WORD else 0
        if not word.startswith("-") or not name:
            _check_loose(word, options)
            options.append(Option("", (word,)))
        elif equals and count == 1 and name != "x":
            options.append(Option(name, (value,)))
        elif len(rest) < count:
            raise ValueError("%s needs %d more word%s" % (word, count, "s" * (count > 1)))
        elif count:
            options.append(Option(name, tuple(rest[:count])))
            del rest[:count]
        else:
            options.append(Option(word.lstrip("-"), ()))
    return options


def _check_loose(word: str, before: list[Option]) -> None:
    """What follows an option that we do not know belongs to it; nothing else may stand alone."""
    if word.startswith("-"):
        raise ValueError(f"{word[:80]!r} is no option")
    if not before or before[-1].name in _KNOWN:
        # mpirun would take it for the program to start.
        raise ValueError(f"{word[:80]!r} is no option, and no option asks for it")


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
        if option.name in _MCA_OPTIONS:
            mca[(option.name, option.words[0])] = option.words[1]
        elif option.name in ("np", "n", "c", "hostfile", "machinefile", "tune", "am"):
            raise ArgsError(
                ["--{} {}: the entry sets this itself".format(option.name, " ".join(option.words))]
            )
        elif option.name in _BINDING:
            # Only one of each: 4.1 refuses two.
            plain = [other for other in plain if other.name != option.name] + [option]
        else:
            plain.append(option)
    return mca, plain


def _mca_words(
    node: NodeEnv, mpi: Mpi, given: Mapping[tuple[str, str], str], ssh_config: str
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
    prefix = "plm_ssh_" if mpi.version >= (5,) else "plm_rsh_"
    shell: dict[tuple[str, str], str] = {}
    user_args = values.pop(("mca", prefix + "args"), "")
    if node.remote_shell:
        shell[("mca", prefix + "agent")] = node.remote_shell
    elif not any(word.startswith("-p") for word in user_args.split()):
        user_args = ("-p %d %s" % (node.sshd_port, user_args)).strip()
    if ssh_config and not node.remote_shell:
        user_args = f"-F {ssh_config} {user_args}"
    if user_args:
        shell[("mca", prefix + "args")] = user_args
    shell.update({key: values.pop(key) for key in list(values) if key in shell})
    # With tree spawn 4.1 forgets the port on the second hop (it drops values with a blank).
    values.setdefault(("mca", prefix + "no_tree_spawn"), "true")
    if mpi.version >= (5,) and node.nodes - 1 > _AT_ONCE:
        # With fewer at once than there are nodes 5.0.11 hung in its start-up (2 of 2 tries).
        values.setdefault(("mca", prefix + "num_concurrent"), str(node.nodes - 1))
    return (_mca_list(shell), _mca_list(values)), notes


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


def carried(
    node: NodeEnv, environ: Mapping[str, str], plain: list[Option]
) -> tuple[dict[str, str], list[str]]:
    """Return the variables that go from the head to all ranks, and notes.

    Args:
        plain: The options of mpirun; those named ``x`` add to what is carried anyway.
    """
    found = {
        name: value
        for name, value in environ.items()
        if env.is_carried(name, node) and env.is_name(name)
    }
    exported, notes = _exported(node, environ, plain)
    return _past_open_mpi({**found, **exported}), notes


def _exported(
    node: NodeEnv, environ: Mapping[str, str], plain: list[Option]
) -> tuple[dict[str, str], list[str]]:
    """Return what ``-x`` names: the user's word first, but a default is only a default."""
    exported: dict[str, str] = {}
    notes: list[str] = []
    for option in plain:
        if option.name != "x":
            continue
        name, equals, value = option.words[0].partition("=")
        if not env.is_name(name):
            raise ArgsError([f"{names.OPENMPI_X_ARGS}: cannot carry {option.words[0][:80]!r}"])
        is_default = node.open_mpi.x_args is None
        if name in node.secret_names:
            notes.append(f"-x {name}: a secret, which reaches every rank without it")
        elif equals and not (is_default and name in environ):
            exported[name] = value
        elif name in environ:
            exported[name] = environ[name]
        elif not is_default:
            # 5.0.11 crashes (signal 11) when it is asked for a variable that is not set.
            notes.append(f"-x {name}: not set here, so not carried")
    return exported, notes


def _past_open_mpi(carried: Mapping[str, str]) -> dict[str, str]:
    """Give the exact value of what Open MPI changes a second name, which the rank's door undoes."""
    result = {name: value for name, value in carried.items() if name not in ("TMPDIR", "PWD")}
    for name in names.CHANGED_BY_OPEN_MPI:
        if name in carried:
            result[names.CLOUDJOB_EXACT_ + name] = carried[name]
    return result


def environment(
    node: NodeEnv, environ: Mapping[str, str], carried: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment of mpirun, which carries every value by its name."""
    result = {
        name: value
        for name, value in environ.items()
        # With this variable set, any -x is an error on 4.1.
        if name != "OMPI_MCA_mca_base_env_list" and name not in node.secret_names
    }
    for name, value in carried.items():
        if name not in names.CHANGED_BY_OPEN_MPI:
            result[name] = value
    return result


def check_slots(np: int, node: NodeEnv, plain: list[Option]) -> None:
    """Open MPI 5.0.11 started fewer ranks than asked and ended with 0, so count here."""
    room = node.slots * node.nodes
    wide = any(
        "oversubscribe" in " ".join((option.name, *option.words)).lower() for option in plain
    )
    if np > room and not wide and not node.open_mpi.host_file:
        raise ArgsError(
            [
                "%s=%d, but %d node(s) with %d slot(s) have room for %d"
                % (names.OPENMPI_NP, np, node.nodes, node.slots, room)
            ]
        )

"""The mpirun command of ModelArts, rebuilt from its variables for Open MPI 4.1 and 5.0.

    mpirun -np $OPENMPI_NP -hostfile $OPENMPI_HOST_FILE_PATH -mca plm_rsh_args "-p $SSHD_PORT"
        -tune $TUNE_ENV_FILE $OPENMPI_BIND_ARGS $OPENMPI_X_ARGS $OPENMPI_MCA_ARGS
        $OPENMPI_EXTRA_ARGS python <script> <args>

The options are the documented ones, in the form that both versions accept: two dashes, each
parameter once, under the name of this version, and ``-x NAME`` without a value.
"""

from __future__ import annotations

from typing import Iterable, Mapping, Sequence

from jobentry.contract import names
from jobentry.contract.env import NodeEnv
from jobentry.contract.launchers import OPEN_MPI
from jobentry.launchers.common import PRIVATE, ArgsError, File, Launch, Mpi, Process, Site, program
from jobentry.launchers.mpi import (
    BINDING,
    MCA_OPTIONS,
    NO_REMOTE_SHELL,
    Option,
    RemoteShell,
    agent_file,
    carried,
    check_slots,
    environment,
    rank_program,
    ranks,
    remote_shell,
    user_options,
    without_devices,
)

# Open MPI 5.0 starts and stops ranks with PRRTE, which has other parameter names.
_RENAMED_IN_5 = {
    "orte_rsh_agent": "plm_ssh_agent",
    "orte_keep_fqdn_hostnames": "prte_keep_fqdn_hostnames",
    "oob_tcp_if_include": "prte_if_include",
    "oob_tcp_if_exclude": "prte_if_exclude",
}
_GONE_IN_5 = ("routed", "oob")
# mpirun's default for the number of remote shells that it opens at once.
_CONCURRENT_SHELLS = 128


def launch(site: Site, script_argv: Sequence[str], options: Sequence[str] = ()) -> Launch:
    """Return mpirun on the head, which starts the ranks of all nodes.

    Args:
        options: Options for each rank wrapper.

    Raises:
        ArgsError: A variable has invalid or unsupported options.
    """
    node, mpi = site.node, site.mpi
    if mpi.family != OPEN_MPI:
        from jobentry.launchers import hydra

        return hydra.launch(site, script_argv, options)
    tune_path = node.open_mpi.tune_file or site.paths.tune_file
    count = ranks(node)
    if not node.is_head:
        # Check the options on every node: a worker would wait for a head that refuses to start.
        command(node, site.environment, mpi, ("", ""), ())
        # mpirun 4.1 passes the path to its daemons, and each complains if the file is missing.
        return Launch((), count, is_everywhere=False, files=(File(tune_path, PRIVATE, ""),))
    host_path = node.open_mpi.host_file or site.paths.host_file
    shell = remote_shell(site)
    program_of_rank = rank_program(site.entry, program(site, script_argv), options)
    launch_of_head = command(
        node, site.environment, mpi, (host_path, tune_path), program_of_rank, shell
    )
    return launch_of_head._replace(files=(*launch_of_head.files, *agent_file(site, shell)))


def host_file(hosts: Sequence[str], slots: int) -> str:
    """Return Open MPI's host file, with one line for each node."""
    return "".join("%s slots=%d\n" % (host, slots) for host in hosts)


def tune_file(variables: Iterable[str]) -> str:
    """Return the tune file that carries ``variables``, each by its name only.

    A value in this file is cut off at a space by 4.1 and makes 5.0 exit with 243; a line without
    ``-x`` carries nothing in either (tried on 4.1.4 and 5.0.11). A name carries the exact value.
    """
    return "".join(f"-x {name}\n" for name in variables)


def is_safe_in_tune_file(value: str) -> bool:
    """Whether the tune file carries a variable with this value."""
    # Open MPI 4.1.4 loses a value with "=" when the tune file names its variable.
    return value != "" and "=" not in value


def command(
    node: NodeEnv,
    environ: Mapping[str, str],
    mpi: Mpi,
    files: tuple[str, str],
    program: Sequence[str],
    remote_shell: RemoteShell = NO_REMOTE_SHELL,
) -> Launch:
    """Return mpirun, which starts ``program`` for every rank, with its host file and tune file.

    Args:
        node: The settings of this node, the head.
        environ: The environment with the variables to carry.
        mpi: The Open MPI to use.
        files: The paths of the host file and of the tune file.
        program: The command of a rank. No argument may be ``:``; see ``rank_program``.
        remote_shell: How mpirun starts its daemons on the workers.

    Raises:
        ArgsError: A variable has invalid or unsupported options.
    """
    mca, plain = _split(user_options(node))
    values, notes = carried(node, environ, plain)
    np = ranks(node)
    check_slots(np, node, plain)
    mca_argv, mca_notes = _mca_argv(node, mpi, mca, remote_shell)
    notes += mca_notes

    in_tune_file = [
        name
        for name, value in values.items()
        if name.startswith(names.CARRIED_PREFIXES) and is_safe_in_tune_file(value)
    ]
    on_command_line = [name for name in values if name not in set(in_tune_file)]
    argv = [mpi.mpirun, "-np", str(np), "--hostfile", files[0]]
    argv += mca_argv[0] + ["--tune", files[1]]
    argv += [
        argument for option in plain if option.name in BINDING for argument in _option_argv(option)
    ]
    argv += [argument for name in on_command_line for argument in ("-x", name)]
    argv += mca_argv[1]
    argv += [
        argument
        for option in plain
        if option.name not in BINDING and option.name != "x"
        for argument in _option_argv(option)
    ]
    hosts, tunes = host_file(node.hosts, node.slots), tune_file(in_tune_file)
    process_environ = {**without_devices(environ), **environment(node, environ, values)}
    return Launch(
        (Process("mpirun", (*argv, *program), process_environ),),
        np,
        is_everywhere=False,
        files=(File(files[0], PRIVATE, hosts), File(files[1], PRIVATE, tunes)),
        notes=tuple(notes),
    )


def _option_argv(option: Option) -> list[str]:
    if not option.name:
        return list(option.args)
    # 5.0 treats a long option with a single dash as the program to start (exit 66).
    dashes = "-" if len(option.name) == 1 or option.name == "np" else "--"
    return [dashes + option.name, *option.args]


def _split(options: list[Option]) -> tuple[dict[tuple[str, str], str], list[Option]]:
    """Separate MCA parameters, of which the last value wins, from the other options."""
    mca: dict[tuple[str, str], str] = {}
    plain: list[Option] = []
    for option in options:
        if option.name in MCA_OPTIONS:
            mca[(option.name, option.args[0])] = option.args[1]
        elif option.name in ("np", "n", "c", "hostfile", "machinefile", "tune", "am"):
            raise ArgsError(
                ["--{} {}: the entry sets this itself".format(option.name, " ".join(option.args))]
            )
        elif option.name in BINDING:
            # The last one only: 4.1 refuses two.
            plain = [other for other in plain if other.name != option.name] + [option]
        else:
            plain.append(option)
    return mca, plain


def _mca_argv(
    node: NodeEnv, mpi: Mpi, parameters: Mapping[tuple[str, str], str], remote_shell: RemoteShell
) -> tuple[tuple[list[str], list[str]], list[str]]:
    """Return the arguments for the remote shell, those for all other parameters, and notes."""
    notes: list[str] = []
    values: dict[tuple[str, str], str] = {}
    for (option, name), value in parameters.items():
        name_there = _name_in(mpi.version, name)
        if name_there:
            values[(option, name_there)] = value
        else:
            notes.append(f"parameter {name}: left out, as Open MPI 5.0 does not have it")
    if node.control_dir and node.nodes == 1 and node.open_mpi.mca_args is None:
        # Ranks of one node use shared memory; with TCP, each would listen on every address.
        values[("mca", "btl")] = "^openib,tcp"
    prefix = "plm_ssh_" if mpi.version >= (5,) else "plm_rsh_"
    if remote_shell.agent and ("mca", prefix + "args") in values:
        notes.append(f"parameter {prefix}args: left out, as nodes of one machine use no ssh")
    shell = _shell(node, values, prefix, remote_shell)
    shell.update({key: values.pop(key) for key in list(values) if key in shell})
    # Tree spawn only if the user enables it: 5.0.11 hung with it in 4 of 6 starts.
    values.setdefault(("mca", prefix + "no_tree_spawn"), "true")
    if node.nodes == 1 and mpi.version < (5,):
        # 4.1 does not start on a machine without ssh, although it needs none for one node.
        values.setdefault(("mca", "plm_rsh_agent"), "/bin/sh")
    if mpi.version >= (5,) and node.nodes - 1 > _CONCURRENT_SHELLS:
        # With fewer concurrent shells than nodes, 5.0.11 hung while starting (2 of 2 tries).
        values.setdefault(("mca", prefix + "num_concurrent"), str(node.nodes - 1))
    return (_mca_list(shell), _mca_list(values)), notes


def _shell(
    node: NodeEnv, values: dict[tuple[str, str], str], prefix: str, remote_shell: RemoteShell
) -> dict[tuple[str, str], str]:
    """Return the parameters of the remote shell, and remove its arguments from ``values``."""
    user_args = values.pop(("mca", prefix + "args"), "")
    if remote_shell.agent:
        parameters = {"agent": " ".join(remote_shell.agent)}
    elif remote_shell.ssh_config:
        # The file also contains the port. ``-F`` is one argument, as with tree spawn 4.1 loses
        # values with a space on the second hop.
        parameters = {"args": f"-F{remote_shell.ssh_config} {user_args}".strip()}
    elif not any(argument.startswith("-p") for argument in user_args.split()):
        parameters = {"args": ("-p %d %s" % (node.sshd_port, user_args)).strip()}
    else:
        parameters = {"args": user_args}
    return {("mca", prefix + name): value for name, value in parameters.items() if value}


def _mca_list(values: Mapping[tuple[str, str], str]) -> list[str]:
    return [
        argument
        for (option, name), value in values.items()
        for argument in ("--" + option, name, value)
    ]


def _name_in(version: tuple[int, ...], name: str) -> str:
    """Return the name of a parameter in this version; empty if it does not exist."""
    if version < (5,):
        return "plm_rsh_" + name[8:] if name.startswith("plm_ssh_") else name
    if name in _GONE_IN_5:
        return ""
    if name.startswith("plm_rsh_"):
        return "plm_ssh_" + name[8:]
    return _RENAMED_IN_5.get(name, name)

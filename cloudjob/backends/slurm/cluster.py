"""The cluster: a machine with Slurm's commands and the job folders, local or behind ssh."""

from __future__ import annotations

import io
import os
import shlex
import shutil
import sys
import tarfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from cloudjob import installation
from cloudjob.backends import interpreters
from cloudjob.backends.follow import END_BYTES, PIECE_BYTES, node_logs
from cloudjob.backends.slurm import shells
from cloudjob.backends.slurm.shells import CommandResult
from cloudjob.errors import BackendError

_DEFAULT_REMOTE = "~/.cloudjob/slurm"
_PASSED_VARIABLES = ("HOME", "USER", "LOGNAME", "LANG", "SLURM_CONF")


@dataclass(frozen=True, slots=True)
class SlurmHost:
    """The machine with Slurm's commands and the folders of jobs.

    Args:
        name: Its name in the user's ssh configuration; empty for this machine.
    """

    name: str = ""

    def run(
        self,
        folder: str,
        text: str,
        stdin: bytes = b"",
        *,
        is_reading: bool = False,
        limit_bytes: int = shells.ANSWER_BYTES,
    ) -> CommandResult:
        """Run a program of sh in a folder.

        Args:
            is_reading: Whether the command may be repeated even if it has run already.
            limit_bytes: The size of its longest output.

        Raises:
            BackendError: The machine cannot be reached, or gives no answer in time.
        """
        if not self.name:
            return shells.run_here(text, stdin, folder=folder, doing="asking Slurm")
        line = f"cd {quoted(folder)} && {{ {text}\n}}" if folder else text
        return shells.run_there(
            self.name, line, stdin, is_reading=is_reading, limit_bytes=limit_bytes
        )

    def command(self, folder: str, text: str, *, is_terminal: bool) -> list[str]:
        """Return the command of this machine that runs a program of sh in a folder there."""
        line = f"cd {quoted(folder)} && {{ {text}\n}}"
        if not self.name:
            return ["/bin/sh", "-c", line]
        return shells.command_there(self.name, line, is_terminal=is_terminal)

    def put(self, folder: str, files: Mapping[str, bytes]) -> str:
        """Write files, for their owner alone, to a new folder.

        Returns:
            The folder's absolute path.

        Raises:
            BackendError: The folder exists, or the disk is full.
        """
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w") as archive:
            for name, content in files.items():
                member = tarfile.TarInfo(name)
                member.mode = 0o700 if name.endswith(".sh") else 0o600
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
        path = quoted(folder)
        text = (
            f'umask 077; mkdir -p "$(dirname {path})" && mkdir {path} && cd {path}'
            " && tar --no-same-owner -xf - && pwd"
        )
        done = self.run("", text, data.getvalue())
        if done.code:
            on = f" on {self.name}" if self.name else ""
            raise BackendError(
                f"creating the job's folder {folder}{on}: {done.message}",
                hint="is there space, and may you write there? slurm.folder selects another folder",
            )
        place = os.fsdecode(done.out.removesuffix(b"\n"))
        if not place.startswith("/"):
            raise BackendError(f"creating the job's folder {folder}: no path in {done.message!r}")
        return place

    def remove(self, folder: str, names: Sequence[str]) -> None:
        """Delete files in a folder; missing files are ignored."""
        self.run(folder, f"rm -f {' '.join(names)}", is_reading=True)

    def ends(self, folder: str) -> dict[int, int]:
        """Return the offset of the last part of each node's log, which follows the first part."""
        if self.name:
            fields = self.run(folder, "wc -c node-*.log", is_reading=True).out.split()
            pairs = zip(fields[1::2], fields[::2], strict=False)
            named = [(os.fsdecode(name), int(size)) for name, size in pairs if size.isdigit()]
            # The last line is the total.
            sizes = {
                int(name[5:-4]): size
                for name, size in named
                if name.startswith("node-") and name[5:-4].isdecimal()
            }
        else:
            logs = node_logs(Path(folder)).items()
            sizes = {index: path.stat().st_size for index, path in logs}
        return {index: max(PIECE_BYTES, size - END_BYTES) for index, size in sizes.items()}

    def tails(self, folder: str, offsets: Mapping[int, int]) -> dict[int, bytes]:
        """Return the new part of each node's log, from its offset on, by default 0."""
        if self.name:
            return read_tails(self.run(folder, tails_text(offsets), is_reading=True).out)
        # A follower reads many times a second, and each shell command would start processes.
        data_of = {}
        for index, path in node_logs(Path(folder)).items():
            # Reopened each time: only then does NFS show what another node has written.
            with path.open("rb") as file:
                file.seek(offsets.get(index, 0))
                data = file.read(PIECE_BYTES)
            if data:
                data_of[index] = data
        return data_of


class SlurmCluster(NamedTuple):
    """The settings of the cluster that are known on this machine.

    Args:
        host: The login node.
        folder: The folder that holds the jobs' folders.
        paths: PATH and the like for the nodes, empty if they have their own.
        python: The interpreter of the script, empty for the one on PATH of a node.
        entry_python: The interpreter of the entry, empty to look for one on the node.
        entry: The file of the entry on this machine.
        editable_installs: What the interpreter's environment adds to its imports.
    """

    host: SlurmHost
    folder: str
    paths: Mapping[str, str]
    python: str
    entry_python: str
    entry: str
    editable_installs: tuple[interpreters.PathFile, ...] = ()


def find(options: Mapping[str, object], home: Path) -> SlurmCluster:
    """Return the settings from the section ``slurm`` of a job file and from this machine.

    Raises:
        BackendError: The job file names an interpreter that does not exist.
    """
    host, folder = str(options.get("host") or ""), str(options.get("folder") or "").rstrip("/")
    requested = str(options.get("python") or "")
    entry = str(installation.ENTRY)
    if host:
        return SlurmCluster(SlurmHost(host), folder or _DEFAULT_REMOTE, {}, requested, "", entry)
    python = interpreters.choose(requested, "slurm.python").path
    path = interpreters.path_with_mpirun()
    paths = {
        "PATH": path,
        "LANG": "C.UTF-8",
        "LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", ""),
        "MPI4PY_LIBMPI": interpreters.libmpi_of(shutil.which("mpirun", path=path) or "", python),
    }
    return SlurmCluster(
        host=SlurmHost(),
        folder=str(Path(folder).expanduser()) if folder else str(home / "slurm"),
        paths={name: value for name, value in paths.items() if value},
        python=python,
        entry_python=sys.executable,
        entry=entry,
        editable_installs=interpreters.editable_installs(python),
    )


def tails_text(offsets: Mapping[int, int]) -> str:
    """Return the shell script that prints the new part of each node's log."""
    read_offsets = " ".join(f"{index}:{offset}" for index, offset in offsets.items())
    return _TAILS.format(known=shlex.quote(f" {read_offsets} "), limit=PIECE_BYTES)


def read_tails(data: bytes) -> dict[int, bytes]:
    """Return the output of that script by node; an incomplete piece is read again next time."""
    data_of: dict[int, bytes] = {}
    with suppress(ValueError):
        while data:
            line, _, data = data.partition(b"\n")
            index, size = (int(item) for item in line.split())
            data_of[index], data = data[:size], data[size:]
    return data_of


# Prints for each log: its node, the number of new bytes, and these bytes.
_TAILS = """known={known}
for log in node-*.log; do
    [ -f "$log" ] || continue
    node=${{log#node-}} node=${{node%.log}} from=0
    case $node in "" | *[!0-9]*) continue ;; esac
    case $known in *" $node:"*) from=${{known#*" $node:"}} from=${{from%% *}} ;; esac
    new=$(($(wc -c <"$log") - from))
    [ "$new" -gt 0 ] || continue
    [ "$new" -lt {limit} ] || new={limit}
    echo "$node $new"
    tail -c "+$((from + 1))" "$log" | head -c "$new"
done"""


def quoted(path: str) -> str:
    """Return a path quoted for sh, except for a ``~`` at its start."""
    if path.startswith("~/"):
        return "~/" + shlex.quote(path[2:])
    return shlex.quote(path)


def with_clean_environment(text: str, more: Sequence[str] = ()) -> str:
    """Return a shell command that runs ``text`` with a minimal environment.

    Variables such as SLURM_CLUSTERS or SQUEUE_PARTITION would let Slurm's commands ask another
    cluster, or hide jobs. sbatch passes its own environment to the nodes unless an option forbids
    that, and with that option the node logs the user in, which takes time and may fail.

    Args:
        more: The names of variables that it keeps, if they are set.
    """
    names = " ".join(f'${{{name}+{name}="${name}"}}' for name in (*_PASSED_VARIABLES, *more))
    return f'env -i PATH="$PATH" {names} {text}'

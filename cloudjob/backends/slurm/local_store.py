"""A store in a folder of this machine, for jobs of a remote login node.

The nodes cannot reach such a store. So the package is copied to the job's folder on the cluster,
and when the job has ended, its record and its outputs are copied back to the store.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import tarfile
from pathlib import Path

from cloudjob.backends.slurm.cluster import SlurmHost
from cloudjob.errors import BackendError
from jobentry.contract import paths
from jobentry.contract.paths import JobPaths
from jobentry.system.trees import folder_below

_RESULT_FOLDERS = ("record", "outputs")
_RESULT_BYTES = 1 << 40


def package(store: str, job: str, layers: tuple[str, ...]) -> dict[str, bytes]:
    """Return the files of a package by the paths where the entry expects them."""
    root = Path(store)
    files = {paths.DELIVERED_CODE: (root / JobPaths(job).code).read_bytes()}
    for path in layers:
        files[Path(path).relative_to(root).as_posix()] = Path(path).read_bytes()
    return files


def remember(home: Path, job: str, store: str) -> None:
    """Record where the store of a job is."""
    path = _note(home, job)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.write_text(json.dumps({"store": store}), encoding="ascii")


def forget(home: Path, job: str) -> None:
    """Remove the record of the job's store."""
    _note(home, job).unlink(missing_ok=True)


def bring_home(host: SlurmHost, folder: str, home: Path, job: str) -> bool:
    """Copy the results of an ended job to its store, if that is a folder of this machine.

    Returns:
        Whether anything was copied.

    Raises:
        BackendError: They cannot be copied; the job is unchanged.
    """
    try:
        store = str(json.loads(_note(home, job).read_bytes())["store"])
    except FileNotFoundError:
        return False
    names = " ".join(_RESULT_FOLDERS)
    done = host.run(
        folder,
        f'for d in {names}; do [ ! -d "$d" ] || echo "$d"; done | tar -cf - -T -',
        limit_bytes=_RESULT_BYTES,
    )
    if done.code:
        raise BackendError(f"copying back the results of {job}: {done.message}")
    target = Path(store, job)
    try:
        with tarfile.open(fileobj=io.BytesIO(done.out)) as archive:
            for member in archive:
                _extract(archive, member, target)
    except (OSError, tarfile.TarError) as error:
        raise BackendError(f"copying back the results of {job}: {target}: {error}") from error
    return True


def _extract(archive: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    """Extract one file; anything in the archive that is not a file below the folder is ignored."""
    parts = Path(member.name).parts
    if not member.isfile() or not parts or parts[0] not in _RESULT_FOLDERS or ".." in parts:
        return
    source = archive.extractfile(member)
    assert source is not None
    above, new = "/".join((target.name, *parts[:-1])), f".{parts[-1]}.new"
    # Others may write to the store, too, and a link there may lead anywhere.
    with source, folder_below(str(target.parent), above, makes=True) as folder:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new, dir_fd=folder)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with os.fdopen(os.open(new, flags, 0o600, dir_fd=folder), "wb") as file:
            shutil.copyfileobj(source, file)
        os.replace(new, parts[-1], src_dir_fd=folder, dst_dir_fd=folder)


def _note(home: Path, job: str) -> Path:
    return home / "slurm-hosts" / f"{job}.json"

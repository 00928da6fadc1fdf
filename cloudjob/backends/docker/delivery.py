"""Files that are put into a container before it starts: folders, secrets, and the key for ssh."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from cloudjob.backends import delivery as deliveries
from cloudjob.backends.docker import request as requests
from cloudjob.backends.docker.request import GROUP_ID, USER_ID, ContainerRequest
from jobentry.contract import node_end, paths, variables

# The layout of ModelArts' containers, in any image.
_FOLDERS = (
    requests.HOME,
    f"{requests.HOME}/modelarts",
    f"{requests.HOME}/modelarts/inputs",
    f"{requests.HOME}/modelarts/outputs",
    f"{requests.HOME}/modelarts/log",
    f"{requests.HOME}/modelarts/user-job-dir",
    "/cache",
)
ENTRY = "/opt/cloudjob/jobentry.pyz"
# The label that names the version of an image's entry.
ENTRY_LABEL = "cloudjob.entry"


class Member(NamedTuple):
    """A file of an archive, or a folder, whose ``data`` is None.

    Args:
        is_users: Whether it belongs to the user of the containers; else to root.
    """

    path: str
    mode: int
    data: bytes | None
    is_users: bool = True


def archive(
    node: ContainerRequest, hosts: tuple[str, ...], key: bytes, *, with_entry: bool
) -> bytes:
    """Return the tar that is unpacked over the container's root.

    It is sent from this process to the engine and never stored on this machine's disk. The folder
    of the secrets belongs to the job's user, so that the entry can remove files that it has read.

    Args:
        key: The private key of the job for ssh, empty for none.
        with_entry: Whether to replace the image's entry, which has another version: both halves of
            a job must have the same version.
    """
    folders = [Member(path, 0o755, None) for path in _FOLDERS]
    if node.env or key:
        folders.append(Member(requests.DELIVERED, 0o700, None))
    return tar([*folders, *_files(node, hosts, key, with_entry=with_entry)])


def report(node: int, exit_code: int) -> bytes:
    """Return the tar that reports to the head that another node has ended."""
    return tar([Member(node_end.file_name(node), 0o600, node_end.dump(exit_code))])


def fresh_keys(keys: Mapping[str, str]) -> bytes:
    """Return the tar with fresh keys of the store."""
    return tar([Member(paths.DELIVERED_KEYS, 0o400, variables.dump(keys))])


def entry() -> bytes:
    """Return the entry of this cloudjob."""
    return deliveries.entry()


def entry_digest() -> str:
    """Return the hash that identifies the entry of an image."""
    return hashlib.sha256(entry()).hexdigest()


def _files(
    node: ContainerRequest, hosts: tuple[str, ...], key: bytes, *, with_entry: bool
) -> Iterator[Member]:
    # Volcano's list of hosts, which ModelArts' own checks read.
    listed = "".join(f"{host}\n" for host in hosts).encode("ascii")
    yield Member("/etc/volcano/worker.host", 0o644, listed, is_users=False)
    if key:
        yield Member(requests.SSH_KEY, 0o400, key)
    if node.env:
        yield Member(requests.ENV_FILE, 0o400, variables.dump(node.env))
    if with_entry:
        yield Member(ENTRY, 0o755, entry(), is_users=False)


def tar(members: Iterable[Member]) -> bytes:
    """Return an archive of files and folders, the same bytes for the same members."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as file:
        for member in members:
            info = tarfile.TarInfo(member.path.lstrip("/"))
            info.mode = member.mode
            if member.is_users:
                info.uid, info.gid = USER_ID, GROUP_ID
            if member.data is None:
                info.type = tarfile.DIRTYPE
            info.size = len(member.data or b"")
            file.addfile(info, io.BytesIO(member.data or b""))
    return data.getvalue()

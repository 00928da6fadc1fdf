"""What is put into a container before it starts: its folders, secrets, and the key for ssh."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from cloudjob.backends import delivery as deliveries
from cloudjob.backends.docker import request as requests
from cloudjob.backends.docker.request import GROUP_ID, USER_ID, NodeRequest
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


class _File(NamedTuple):
    path: str
    mode: int
    data: bytes
    is_users: bool = True


def archive(node: NodeRequest, hosts: tuple[str, ...], key: bytes, *, with_entry: bool) -> bytes:
    """Return the tar that is unpacked over the container's root.

    It goes from this process to the engine and never lies on this machine's own disk. The folder of
    the secrets is the job's user's, so that the entry can remove what it has read.

    Args:
        key: The private key of the job for ssh, empty for none.
        with_entry: Whether the image has an entry of another version: both halves of a job are of
            one, so ours goes over it.
    """
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as members:
        for path in _FOLDERS:
            _add_folder(members, path, 0o755)
        if node.env or key:
            _add_folder(members, requests.DELIVERED, 0o700)
        for file in _files(node, hosts, key, with_entry=with_entry):
            _add(members, file)
    return data.getvalue()


def report(node: int, exit_code: int) -> bytes:
    """Return the tar that reports to the head that another node has ended."""
    return _one(_File(node_end.file_name(node), 0o600, node_end.dump(exit_code)))


def fresh_keys(keys: Mapping[str, str]) -> bytes:
    """Return the tar with fresh keys of the store."""
    return _one(_File(paths.DELIVERED_KEYS, 0o400, variables.dump(keys)))


def _one(file: _File) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as members:
        _add(members, file)
    return data.getvalue()


def _add(members: tarfile.TarFile, file: _File) -> None:
    member = _member(file.path, file.mode, is_users=file.is_users)
    member.size = len(file.data)
    members.addfile(member, io.BytesIO(file.data))


def entry() -> bytes:
    """Return the entry of this cloudjob."""
    return deliveries.files()[paths.ENTRY]


def entry_digest() -> str:
    """Return the hash that identifies the entry of an image."""
    return hashlib.sha256(entry()).hexdigest()


def _files(
    node: NodeRequest, hosts: tuple[str, ...], key: bytes, *, with_entry: bool
) -> Iterator[_File]:
    # Volcano's list of hosts, which ModelArts' own checks read.
    listed = "".join(f"{host}\n" for host in hosts).encode("ascii")
    yield _File("/etc/volcano/worker.host", 0o644, listed, is_users=False)
    if key:
        yield _File(requests.SSH_KEY, 0o400, key)
    if node.env:
        yield _File(requests.ENV_FILE, 0o400, variables.dump(node.env))
    if with_entry:
        yield _File(ENTRY, 0o755, entry(), is_users=False)


def _add_folder(members: tarfile.TarFile, path: str, mode: int) -> None:
    member = _member(path, mode, is_users=True)
    member.type = tarfile.DIRTYPE
    members.addfile(member)


def _member(path: str, mode: int, *, is_users: bool) -> tarfile.TarInfo:
    member = tarfile.TarInfo(path.lstrip("/"))
    member.mode = mode
    if is_users:
        member.uid, member.gid = USER_ID, GROUP_ID
    return member

"""Folders of this machine to which containers write and from which we read.

Containers always run as uid 1000, gid 100, and see a mounted folder with its owners and modes on
this machine. Their files there (the record, outputs) are private to their writer, unless the folder
is open to all: the entry gives its files the same access as their folder.

- If we are uid 1000, as on most laptops, all files belong to us on both sides and stay private.
- If we are root, the folder is given to uid 1000 and stays private, as root can read everything.
- If we are another user, or the engine maps users (rootless, userns-remap), so that the owner of
  the files is unknown here: the folder is open to all (0777, its files 0666) below a guard folder
  that only we can enter; a folder without such a guard is refused. Files of the containers are open
  too, so we can read and remove them.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from cloudjob.backends.docker.request import GROUP_ID, USER_ID
from cloudjob.errors import BackendError


def open_to_containers(path: Path, *, maps_users: bool) -> None:
    """Let the containers' user read our file, or read and write our folder.

    Raises:
        BackendError: The path would be open to other users of this machine.
    """
    user = os.geteuid()
    if not maps_users and user == USER_ID:
        return
    everything = (path, *path.rglob("*")) if path.is_dir() else (path,)
    if not maps_users and user == 0:
        for item in everything:
            os.chown(item, USER_ID, GROUP_ID, follow_symlinks=False)
        return
    guard = path.parent
    if stat.S_IMODE(guard.stat().st_mode) & 0o077:
        raise BackendError(
            f"sharing {path} with containers: every user of this machine could enter {guard}",
            hint=f"chmod 700 {guard}, or use the default store",
        )
    for item in everything:
        if not item.is_symlink():
            # A single file is only read, and other jobs may share it.
            item.chmod(0o777 if item.is_dir() else 0o666 if path.is_dir() else 0o644)


def check_output(folder: Path, *, maps_users: bool) -> None:
    """Create a missing folder for outputs, and check that the containers can write to it.

    Raises:
        BackendError: They cannot; without this check, the job would fail only at its end.
    """
    if not folder.exists():
        folder.mkdir(mode=0o700, parents=True)
        if os.geteuid() == 0 and not maps_users:
            os.chown(folder, USER_ID, GROUP_ID)
    state = folder.stat()
    is_open = state.st_mode & 0o003 == 0o003
    is_theirs = state.st_uid == USER_ID and not maps_users
    if not (is_open or is_theirs):
        raise BackendError(
            f"sharing the output folder {folder}: containers run as uid {USER_ID} and cannot write",
            hint=f"chown {USER_ID}:{GROUP_ID} {folder}, or leave out the output's URI",
        )

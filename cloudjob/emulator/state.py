"""The files of the emulator besides its database: account and addresses."""

from __future__ import annotations

import json
import os
import secrets
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudjob.errors import BackendError
from cloudjob.home import locks
from jobentry.contract.sigv4 import Keys

if TYPE_CHECKING:
    from cloudjob.emulator.settings import Settings

ACCOUNT, ADDRESS, LOCK, LOG, SETTINGS = (
    "account.json",
    "address.json",
    "lock",
    "log",
    "settings.yaml",
)
DATABASE, OBS, JOBS, BACKENDS = "state.db", "obs", "jobs", "backends"
# The line that the process prints once it accepts requests.
READY = b"ready\n"
# The path and the header of control requests, which only the emulator's owner may send.
CONTROL_PREFIX, CONTROL_HEADER = "/emulator/", "X-Emulator-Control"


@dataclass(frozen=True, slots=True)
class User:
    """A user of the account.

    Args:
        actions: The allowed actions, as patterns such as ``modelarts:trainJob:*``; after an ``@``
            a pattern names its bucket, or the start of the bucket's name and ``*``.
    """

    name: str
    id: str
    keys: Keys
    password: str
    actions: tuple[str, ...] = ("*",)

    def may(self, action: str, bucket: str = "") -> bool:
        """Whether an action is allowed, in this bucket if it is one of OBS."""
        rules = (rule.partition("@") for rule in self.actions)
        return any(
            fnmatchcase(action, pattern) and fnmatchcase(bucket, buckets or "*")
            for pattern, _, buckets in rules
        )


@dataclass(frozen=True, slots=True)
class Account:
    """The one account of the emulator.

    Args:
        users: The first one owns the account and may do everything.
        projects: The id of each project by its name; the first one is that of the region.
    """

    users: tuple[User, ...]
    domain_id: str
    projects: Mapping[str, str]

    @property
    def owner(self) -> User:
        """The user who owns the account."""
        return self.users[0]

    @property
    def project_id(self) -> str:
        """The project of the region."""
        return next(iter(self.projects.values()))

    def user(self, name: str) -> User | None:
        """Return the user of this name, or None."""
        return next((user for user in self.users if user.name == name), None)

    def user_of_key(self, access_key: str) -> User | None:
        """Return the user with this access key, or None."""
        return next((user for user in self.users if user.keys.access_key == access_key), None)


@dataclass(frozen=True, slots=True)
class Address:
    """The addresses of an emulator, and the credentials of its clients.

    Args:
        control: The token for the owner's control requests.
        users: The keys and the password of each further user.
        projects: The id of each further project.
        engine: ``docker`` or ``process``.
    """

    pid: int
    endpoint: str
    iam_endpoint: str
    s3_endpoint: str
    access_key: str
    secret_key: str
    project_id: str
    region: str
    user: str
    domain: str
    password: str
    engine: str
    note: str
    control: str
    users: dict[str, dict[str, str]] = field(default_factory=dict)
    projects: dict[str, str] = field(default_factory=dict)

    def shown(self) -> dict[str, Any]:
        """Return the values that `cloudjob emulator up --json` prints."""
        values = asdict(self)
        del values["control"]
        return values


def account(folder: Path, settings: Settings) -> Account:
    """Return the account of this emulator; make keys and ids for new users and projects."""
    path = folder / ACCOUNT
    try:
        stored = json.loads(path.read_text(encoding="ascii")) if path.exists() else {}
    except ValueError as error:
        raise BackendError(f"reading {path}: {error}", hint="cloudjob emulator reset") from error
    owner = {**_new_user(), "domain_id": uuid.uuid4().hex, "project_id": uuid.uuid4().hex, **stored}
    others = {**{name: _new_user() for name in settings.users}, **owner.get("users", {})}
    projects = {**{n: uuid.uuid4().hex for n in settings.projects}, **owner.get("projects", {})}
    values = {**owner, "users": others, "projects": projects}
    if values != stored:
        write_private(path, json.dumps(values))
    if settings.password:
        owner["password"] = settings.password
    return Account(
        users=(
            _user(settings.user, owner, ("*",)),
            *(_user(name, others[name], actions) for name, actions in settings.users.items()),
        ),
        domain_id=owner["domain_id"],
        projects={
            settings.region: owner["project_id"],
            **{name: projects[name] for name in settings.projects},
        },
    )


def _new_user() -> dict[str, str]:
    return {
        "access_key": "EMU" + secrets.token_hex(9).upper()[:17],
        "secret_key": secrets.token_urlsafe(30),
        "password": secrets.token_urlsafe(12),
        "user_id": uuid.uuid4().hex,
    }


def _user(name: str, values: Mapping[str, str], actions: tuple[str, ...]) -> User:
    keys = Keys(values["access_key"], values["secret_key"])
    return User(name, values["user_id"], keys, values["password"], actions)


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner may read, atomically."""
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(text)
    new.replace(path)


def address(folder: Path) -> Address | None:
    """Return where the emulator listens or last listened; None if it never did."""
    try:
        return Address(**json.loads((folder / ADDRESS).read_text(encoding="ascii")))
    except (FileNotFoundError, TypeError, ValueError):
        return None


def last_line(log: Path) -> str:
    """Return the last line of a log; empty if there is none."""
    return next(iter(log.read_text(errors="replace").strip().splitlines()[-1:]), "")


def is_running(folder: Path) -> bool:
    """Whether an emulator uses this folder."""
    return locks.is_held(folder / LOCK)


def run_dir_of(key: str) -> str:
    """Return the folder of an attempt's sockets; its path is short because host names are long."""
    return f"/tmp/cj-{key.replace('-', '')[-14:]}"

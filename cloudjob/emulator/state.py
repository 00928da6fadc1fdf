"""What the emulator stores beside its database: its account and its addresses."""

from __future__ import annotations

import json
import os
import secrets
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudjob.errors import BackendError
from cloudjob.home import locks

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
# What the process prints once it serves.
READY = b"ready\n"
# Requests of its owner.
CONTROL_PREFIX, CONTROL_HEADER = "/emulator/", "X-Emulator-Control"


@dataclass(frozen=True, slots=True)
class Account:
    """The one account of the emulator."""

    access_key: str
    secret_key: str
    password: str
    project_id: str
    domain_id: str
    user_id: str


@dataclass(frozen=True, slots=True)
class Address:
    """Where an emulator listens, and what a client needs.

    Args:
        control: The token of its owner's requests.
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

    def shown(self) -> dict[str, Any]:
        """Return the values that `cloudjob emulator up --json` prints."""
        values = asdict(self)
        del values["control"]
        return values


def account(folder: Path, settings: Settings) -> Account:
    """Return the account of this emulator, which is created on first use."""
    path = folder / ACCOUNT
    try:
        values = json.loads(path.read_text(encoding="ascii"))
    except FileNotFoundError:
        values = {
            "access_key": "EMU" + secrets.token_hex(9).upper()[:17],
            "secret_key": secrets.token_urlsafe(30),
            "password": secrets.token_urlsafe(12),
            "project_id": uuid.uuid4().hex,
            "domain_id": uuid.uuid4().hex,
            "user_id": uuid.uuid4().hex,
        }
        write_private(path, values)
    except ValueError as error:
        raise BackendError(f"reading {path}: {error}", hint="cloudjob emulator reset") from error
    if settings.password:
        values["password"] = settings.password
    return Account(**values)


def write_private(path: Path, values: Any) -> None:
    """Write a JSON file that only its owner may read, atomically."""
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        json.dump(values, file)
    new.replace(path)


def address(folder: Path) -> Address | None:
    """Return where the emulator listens or last listened; None if it never did."""
    try:
        return Address(**json.loads((folder / ADDRESS).read_text(encoding="ascii")))
    except (FileNotFoundError, TypeError, ValueError):
        return None


def is_running(folder: Path) -> bool:
    """Whether an emulator uses this folder."""
    return locks.is_held(folder / LOCK)


def run_dir_of(key: str) -> str:
    """Return the folder of an attempt's sockets: a short path, as host names in it are long."""
    return f"/tmp/cj-{key.replace('-', '')[-14:]}"

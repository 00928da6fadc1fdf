"""The description of each job in its store, with which other machines find the job.

A description contains the job's record: its handle, its size, and the user's description of the job
with secrets as ``***``. Like the record, it is written before the job is sent.
"""

from __future__ import annotations

import getpass
import json
import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from cloudjob.errors import InvalidKey, JobNotFound, ObjectMissing, StoreError
from cloudjob.home.records import JobRecord
from cloudjob.model import times
from cloudjob.model.rules import BACKENDS, VARIABLE_RULE
from cloudjob.store.base import ObjectStore
from cloudjob.store.parallel import in_parallel
from jobentry.contract.paths import JobPaths

FOLDER = "jobs/"
_VERSION = 1
# Someone else may have written the description, and its id becomes part of paths and keys.
_ID = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
# The largest number that the records can store.
_LARGEST = 2**63 - 1
_NUMBERS = ("nodes", "procs_per_node", "code_size_bytes", "code_files")
# The largest numbers that a job can have, and that pages and lists can show.
_MOST = {"nodes": 10_000, "procs_per_node": 1024}
# State and end are requested when needed, the store is where the description was found, and
# ``submission`` holds the contents of ``spec_json``.
_LEFT_OUT = ("state", "final_json", "spec_json", "store")
# Keys of a job that refer to the machine that submitted it.
_SUBMITTER_KEYS = ("notify", "source")


def key(job: str) -> str:
    """Return the key of a job's description in its store."""
    return f"{FOLDER}{job}.json"


def delete_objects(store: ObjectStore, job: str) -> None:
    """Delete every object of a job, and nothing else.

    Raises:
        StoreError: An object cannot be deleted. Others may have written objects whose names we
            refuse; they are reported when the rest is deleted.
    """
    refused: list[InvalidKey] = []

    def delete(name: str) -> None:
        try:
            store.delete(name)
        except InvalidKey as error:
            refused.append(error)

    keys = dict.fromkeys((*store.list(f"{job}/", with_unfinished=True), JobPaths(job).code))
    in_parallel(delete, [*keys, key(job)], abort=store.abort)
    if refused:
        raise refused[0]


def submitter() -> str:
    """Return ``user@machine`` of this process."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # A container may run as a user without a name.
        user = ""
    return f"{user}@{socket.gethostname()}"


def dump(record: JobRecord, home: Path) -> bytes:
    """Return the description of a job that is submitted with the state folder ``home``."""
    values = {name: v for name, v in record._asdict().items() if name not in _LEFT_OUT}
    submission = json.loads(record.spec_json)
    shown = {"version": _VERSION, **values, "home": str(home), "submission": submission}
    return json.dumps(shown, indent=1, sort_keys=True).encode("ascii")


def load(data: bytes, store: str, job: str) -> JobRecord:
    """Return the record of a job by its description in ``store``.

    Raises:
        ValueError: It is not a description.
    """
    try:
        values = json.loads(data)
        texts = [n for n in JobRecord._fields if n not in (*_NUMBERS, *_LEFT_OUT)]
        record = JobRecord(
            **{name: _checked(values[name], str) for name in texts},
            **{name: _checked(values[name], int) for name in _NUMBERS},
            state="PENDING",
            store=store,
            spec_json=json.dumps(_submission(values["submission"])),
        )
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"it is not a description of a job: {error}") from error
    scheme, _, rest = record.handle.partition("://")
    is_of_job = _ID.fullmatch(job) and job == record.job == rest.rpartition("/")[2]
    is_of_backend = scheme.partition("+")[0] == record.backend and record.backend in BACKENDS
    if not (is_of_job and is_of_backend):
        raise ValueError(f"its handle {record.handle!r} does not match")
    if not times.seconds_of(record.created_at):
        raise ValueError(f"{record.created_at!r} is not a time")
    if not all(0 <= getattr(record, name) <= most for name, most in _MOST.items()):
        raise ValueError("its number of ranks is too large")
    return record


def _submission(value: Any) -> Any:
    """Return a submission whose outputs have names that can be part of a path.

    Keys that refer to the submitting machine are removed: otherwise the author of a description
    could make a copy of the job run a command here, or pack any folder.
    """
    outputs, spec = _checked(value["outputs"], dict), _checked(value["spec"], dict)
    for name, uri in outputs.items():
        if not re.fullmatch(VARIABLE_RULE, name, re.ASCII):
            raise TypeError(f"{name!r} is not the name of an output")
        _checked(uri, str)
    _checked(spec.get("env", {}), dict)
    for pattern in _checked(spec.get("metrics", {}), dict).values():
        _checked(pattern, str)
    for name in _SUBMITTER_KEYS:
        spec.pop(name, None)
    return value


def _checked(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r} is not of type {kind.__name__}")
    if isinstance(value, str) and "\0" in value:
        raise TypeError(f"{value!r} contains NUL, which is not allowed in a path")
    if isinstance(value, int) and abs(value) > _LARGEST:
        raise TypeError(f"{value} is too large")
    return value


def read(store: ObjectStore, uri: str, job: str) -> JobRecord | None:
    """Return the record of a job by its description in the store; None if it has none there.

    Raises:
        StoreError: The store cannot be read, or the description is damaged.
    """
    if not _ID.fullmatch(job):
        return None
    try:
        return load(store.get_bytes(key(job)), uri, job)
    except ObjectMissing:
        return None
    except ValueError as error:
        raise StoreError(
            f"reading the description of {job}: {store.uri(key(job))}: {error}",
            hint="was it written by a newer version of cloudjob?",
        ) from error


def read_all(store: ObjectStore, uri: str) -> Iterator[JobRecord]:
    """Yield the record of every job in the store; invalid descriptions are skipped."""
    keys = [name for name in store.list(FOLDER) if name.endswith(".json")]
    for name, data in store.get_each(keys):
        with suppress(ValueError):
            yield load(data, uri, name[len(FOLDER) : -len(".json")])


def not_found(job: str, places: list[str]) -> JobNotFound:
    """Return the error for a job that is neither in the records nor in these stores."""
    found = f"neither in the records of this machine nor in {', '.join(places)}"
    return JobNotFound(
        f"finding {job}: {found if places else 'not in the records of this machine'}",
        hint="cloudjob attach STORE/JOB, where STORE is the URI of the store it was submitted with",
    )

"""The description of each job in its store, with which other machines find the job.

A description contains the job's record: its handle, its size, and the user's description of the job
with secrets as ``***``. Like the record, it is written before the job is sent.
"""

from __future__ import annotations

import getpass
import json
import os
import re
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cloudjob.errors import InvalidKey, JobNotFound, ObjectMissing, StoreError
from cloudjob.home.records import JobRecord
from cloudjob.model import times
from cloudjob.model.rules import BACKENDS, NAME_RULE, VARIABLE_RULE
from cloudjob.model.text import one_line
from cloudjob.package.claims import CLAIMS, DELETIONS
from cloudjob.store.base import SMALL_LIMIT_BYTES, ObjectStore
from cloudjob.store.files import is_temporary, report_refused
from cloudjob.store.parallel import call_each_in_time, call_with_timeout, in_parallel
from jobentry.contract.packages import DAMAGED, LAYERS
from jobentry.contract.paths import JobPaths

if TYPE_CHECKING:
    from concurrent.futures import Future

FOLDER = "jobs/"
_VERSION = 1
# Someone else may have written the description, and its id becomes part of paths and keys. It is
# not that of a folder that all jobs of a store share.
_SHARED = "|".join(name.rstrip("/") for name in (FOLDER, LAYERS, DAMAGED, CLAIMS, DELETIONS))
_ID = rf"(?!({_SHARED})\Z)[a-z0-9]([a-z0-9-]{{0,61}}[a-z0-9])?"
# The largest number that the records can store.
_LARGEST = 2**63 - 1
_NUMBERS = ("nodes", "procs_per_node", "code_size_bytes", "code_files")
# The largest numbers that a job can have, and that pages and lists can show.
_MOST = {"nodes": 10_000, "procs_per_node": 1024}
# State and end are requested when needed, the store is where the description was found, and
# ``submission`` holds the contents of ``spec_json``.
_LEFT_OUT = ("state", "final_json", "spec_json", "store")
# The longest text beside the submission, such as a handle; paths have at most 4096 bytes.
_TEXT_LIMIT = 8192
# Limits of a list: its descriptions, the seconds to find and to read them, requests at a time, and
# the characters of a submission that it keeps; a longer one is read again when it is needed.
_MOST_LISTED = 20_000
_LIST_S, _READ_S = 60.0, 60.0
_AT_ONCE = 16
_KEPT_CHARS = 16 * 1024
# Characters of a reason why a description cannot be read.
_REASON_CHARS = 200


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
    report_refused(refused)


def submitter() -> str:
    """Return ``user@machine`` of this process."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # A container may run as a user without a name.
        user = ""
    return f"{user}@{os.uname().nodename}"


def dump(record: JobRecord, home: Path) -> bytes:
    """Return the description of a job that is submitted with the state folder ``home``."""
    values = {name: v for name, v in record._asdict().items() if name not in _LEFT_OUT}
    submission = json.loads(record.spec_json)
    described = {"version": _VERSION, **values, "home": str(home), "submission": submission}
    return json.dumps(described, indent=1, sort_keys=True).encode("ascii")


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
    is_of_job = re.fullmatch(_ID, job) and job == record.job == rest.rpartition("/")[2]
    is_of_backend = scheme.partition("+")[0] == record.backend and record.backend in BACKENDS
    if not (is_of_job and is_of_backend):
        raise ValueError(f"its handle {record.handle!r} does not match")
    if not times.seconds_of(record.created_at):
        raise ValueError(f"{record.created_at!r} is not a time")
    if not re.fullmatch(NAME_RULE, record.name):
        raise ValueError(f"{record.name!r} is not the name of a job")
    if not record.home.startswith("/"):
        # Only our own records name no state folder.
        raise ValueError(f"{record.home!r} is not the path of a state folder")
    if not all(0 <= getattr(record, name) <= most for name, most in _MOST.items()):
        raise ValueError("its number of ranks is too large")
    return record


def _submission(value: Any) -> Any:
    """Return a submission whose outputs have names that can be part of a path."""
    outputs, spec = _checked(value["outputs"], dict), _checked(value["spec"], dict)
    for name, uri in outputs.items():
        if not re.fullmatch(VARIABLE_RULE, name, re.ASCII):
            raise TypeError(f"{name!r} is not the name of an output")
        _checked(uri, str)
    _checked(spec.get("env", {}), dict)
    for pattern in _checked(spec.get("metrics", {}), dict).values():
        _checked(pattern, str)
    return value


def _checked(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r} is not of type {kind.__name__}")
    if isinstance(value, str) and "\0" in value:
        raise TypeError(f"{value!r} contains NUL, which is not allowed in a path")
    if isinstance(value, str) and len(value) > _TEXT_LIMIT:
        raise TypeError(f"a text of {len(value)} characters is too long")
    if isinstance(value, int) and abs(value) > _LARGEST:
        raise TypeError(f"{value} is too large")
    return value


def read(store: ObjectStore, uri: str, job: str) -> JobRecord | None:
    """Return the record of a job by its description in the store; None if it has none there.

    Raises:
        StoreError: The store cannot be read, or the description is damaged.
    """
    if not re.fullmatch(_ID, job):
        return None
    try:
        return load(store.get_bytes(key(job), limit_bytes=SMALL_LIMIT_BYTES), uri, job)
    except ObjectMissing:
        return None
    except ValueError as error:
        raise StoreError(
            f"reading the description of {job}: {store.uri(key(job))}: {_reason(error)}",
            hint="was it written by a newer version of cloudjob?",
        ) from error


class Listed(NamedTuple):
    """The jobs in a store, and why other descriptions in it cannot be read, each in one line."""

    records: list[JobRecord]
    problems: list[str]


def read_all(store: ObjectStore, uri: str) -> Listed:
    """Return the record of every job in the store; a bad description does not hide the others.

    Raises:
        StoreError: The store cannot be listed.
    """
    where = uri.partition("?")[0]

    def names() -> list[str]:
        # With what is no object, so that a pipe in the place of a description is reported.
        keys = store.list(FOLDER, with_unfinished=True)
        names = (n for n in keys if n.endswith(".json") and n.count("/") == 1)
        named = (n for n in names if not is_temporary(n))
        return list(islice(named, _MOST_LISTED + 1))

    def read_one(name: str) -> JobRecord:
        data = store.get_bytes(name, limit_bytes=SMALL_LIMIT_BYTES)
        record = load(data, uri, name[len(FOLDER) : -len(".json")])
        is_long = len(record.spec_json) > _KEPT_CHARS
        return record._replace(spec_json="") if is_long else record

    try:
        keys = call_with_timeout(_LIST_S, names)
    except TimeoutError as error:
        raise StoreError(f"listing the jobs in {where}: {error}") from error
    read = keys[:_MOST_LISTED]
    results = call_each_in_time(read_one, read, limit_s=_READ_S, at_once=_AT_ONCE)
    listed = Listed([], [])
    for name, result in zip(read, results, strict=True):
        _add(listed, f"reading {name} in {where}", result)
    if len(keys) > _MOST_LISTED:
        listed.problems.append(f"listing {where}: only the first {_MOST_LISTED} jobs are shown")
    return listed


def _add(listed: Listed, doing: str, result: Future[JobRecord]) -> None:
    """Add the record of one description, or why it cannot be read."""
    if not result.done():
        listed.problems.append(f"{doing}: not complete within {_READ_S:g} s")
        return
    try:
        listed.records.append(result.result())
    except ObjectMissing:
        pass  # its job was removed in the meantime
    except StoreError as error:
        listed.problems.append(one_line(error.message))
    except ValueError as error:
        listed.problems.append(f"{doing}: {_reason(error)}")


def _reason(error: ValueError) -> str:
    """Return the text of an error, which may quote a megabyte."""
    text = one_line(str(error)[: _REASON_CHARS + 1])
    return text if len(text) <= _REASON_CHARS else f"{text[:_REASON_CHARS]}…"


def not_found(job: str, places: list[str]) -> JobNotFound:
    """Return the error for a job that is neither in the records nor in these stores."""
    where = f"neither in the records of this machine nor in {', '.join(places)}"
    return JobNotFound(
        f"finding {job}: {where if places else 'not in the records of this machine'}",
        hint="cloudjob attach STORE/JOB, where STORE is the URI of the store it was submitted with",
    )

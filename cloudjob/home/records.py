"""The jobs this machine has submitted: one SQLite file below ``$CLOUDJOB_HOME``."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from cloudjob.errors import JobNotFound, RecordsError
from cloudjob.home import file_systems, is_own_file, private_folder
from cloudjob.retries import FIRST_S, WaitNotices

VERSION = 2
# The state of a job until its platform accepts it; a killed submit leaves it in this state.
SUBMITTING = "SUBMITTING"
# Seconds to wait for other processes' locks: enough for hundreds of submits to take turns.
_BUSY_S = 60.0

_SCHEMA = """
CREATE TABLE jobs (
    job TEXT PRIMARY KEY, name TEXT NOT NULL, backend TEXT NOT NULL, handle TEXT NOT NULL,
    state TEXT NOT NULL, nodes INTEGER NOT NULL, procs_per_node INTEGER NOT NULL,
    created_at TEXT NOT NULL, code_uri TEXT NOT NULL, code_digest TEXT NOT NULL,
    code_size_bytes INTEGER NOT NULL, code_files INTEGER NOT NULL, store TEXT NOT NULL,
    final_json TEXT NOT NULL, home TEXT NOT NULL DEFAULT '',
    submitted_by TEXT NOT NULL DEFAULT '', spec_json TEXT NOT NULL
);
CREATE INDEX jobs_by_creation ON jobs (created_at);
CREATE INDEX jobs_by_name ON jobs (name, created_at);
"""

# Upgrades a file of version 1 to version 2.
_MIGRATION = """
ALTER TABLE jobs ADD COLUMN home TEXT NOT NULL DEFAULT '';
ALTER TABLE jobs ADD COLUMN submitted_by TEXT NOT NULL DEFAULT ''
"""

# Part of an error message -> hint. Python 3.10 does not expose SQLite's error codes.
_HINTS = (
    ("locked", "another cloudjob process is writing; try again in a moment"),
    (
        "not a database",
        "move the file away; cloudjob creates a new one, and your jobs keep running",
    ),
    ("malformed", "move the file away; cloudjob creates a new one, and your jobs keep running"),
    ("readonly", "make the file and its folder writable, or set CLOUDJOB_HOME to a folder that is"),
    ("Read-only", "set CLOUDJOB_HOME to a folder on a file system that is not read-only"),
    ("denied", "make the folder writable for this user, or set CLOUDJOB_HOME to another one"),
    ("No space", "free some space, or set CLOUDJOB_HOME to a folder on another disk"),
    ("full", "free some space, or set CLOUDJOB_HOME to a folder on another disk"),
    ("disk I/O", "free some space and check the disk, or set CLOUDJOB_HOME to another folder"),
    (
        "unable to open",
        "free some inodes (`df -i`), or set CLOUDJOB_HOME to a folder that you may write to",
    ),
    ("UNIQUE constraint", "every job needs a unique id"),
)
_DEFAULT_HINT = "set CLOUDJOB_HOME to a folder that this user may write to"
_ALL_JOBS = (
    "`cloudjob list` shows the jobs submitted here, `cloudjob list --store URI` those of a store"
)

# Finding similar names is slow, and a mistyped name most likely means one of the newest jobs.
_SUGGEST_AMONG = 1000


class JobRecord(NamedTuple):
    """One submitted job.

    A tuple rather than a dataclass, as one ``list`` creates up to ten thousand of them.

    Args:
        state: The last state that was seen; the backend knows the current one.
        created_at: RFC 3339 UTC with milliseconds, so that sorting as text sorts by time.
        final_json: The complete status of a job that has ended; empty until then.
        home: The state folder of the submit, if the job was found in a store; empty for jobs that
            were submitted with this one.
        submitted_by: ``user@machine``; empty if unknown.
        spec_json: The job's description, secrets masked; ``list`` leaves it empty.
    """

    job: str
    name: str
    backend: str
    handle: str
    state: str
    nodes: int
    procs_per_node: int
    created_at: str
    code_uri: str
    code_digest: str
    code_size_bytes: int
    code_files: int
    store: str
    final_json: str = ""
    home: str = ""
    submitted_by: str = ""
    spec_json: str = ""

    @property
    def is_ours(self) -> bool:
        """Whether this state folder has submitted the job.

        Any other record comes from a description in a store, which others may have written: its
        handle, texts and URIs are theirs.
        """
        return not self.home


_Jobs = list[JobRecord]  # inside the class below, ``list`` is a method

_COLUMNS = ", ".join(JobRecord._fields)
# SQLite stores any type in any column, so a damaged value may have the wrong type.
_NUMBERS = ("nodes", "procs_per_node", "code_size_bytes", "code_files")
_READ = [
    f"CAST({name} AS {'INTEGER' if name in _NUMBERS else 'TEXT'})" for name in JobRecord._fields
]
_READ_ALL = ", ".join(_READ)
_READ_SHORT = ", ".join(_READ[:-1])  # all but spec_json, which can be megabytes
_PLACES = ", ".join("?" for _ in JobRecord._fields)
_NEWEST_FIRST = "ORDER BY created_at DESC, rowid DESC"


class Records:
    """The job records in one database file; use it as a context manager.

    Any number of processes may use the file at once; a writer waits up to ``busy_timeout_s``.

    Raises:
        RecordsError: The file cannot be used; every method can raise it.
    """

    def __init__(self, path: Path, *, busy_timeout_s: float = _BUSY_S) -> None:
        self._path = path
        self._busy_timeout_s = busy_timeout_s
        self._notices = WaitNotices()
        with self._translate_errors("opening"):
            is_new = not path.exists()
            # SQLite would make a new file readable for everybody.
            private_folder(path.parent, is_ours=is_own_file(path))
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            lacks = file_systems.missing_feature(path.parent) if is_new else None
            if lacks:
                path.unlink()
                raise self._unusable(lacks)
            # SQLite waits within a statement; ``_execute`` repeats it and reports the wait.
            self._database = sqlite3.connect(
                path, timeout=min(FIRST_S, busy_timeout_s), isolation_level=None
            )
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Records:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def add(self, record: JobRecord) -> None:
        """Add a new job."""
        with self._translate_errors(f"adding {record.job} to"):
            self._execute(f"INSERT INTO jobs ({_COLUMNS}) VALUES ({_PLACES})", record)

    def update(self, job: str, **columns: object) -> None:
        """Change columns of the job with exactly this id.

        Raises:
            JobNotFound: No job has this id.
        """
        unknown = set(columns) - set(JobRecord._fields)
        if unknown or not columns:
            raise TypeError(f"not columns of a job record: {sorted(unknown)}")
        assignments = ", ".join(f"{column} = ?" for column in columns)
        with self._translate_errors(f"updating {job} in"):
            changed = self._execute(
                f"UPDATE jobs SET {assignments} WHERE job = ?", (*columns.values(), job)
            )
        if not changed.rowcount:
            raise self._not_found(job)

    def get(self, job: str) -> JobRecord:
        """Return the job with this id, else the newest with this name, else by id prefix.

        Jobs that were submitted here come first: others choose the names and times of theirs.

        Raises:
            JobNotFound: No job matches, or several ids start with the prefix.
        """
        if not job or not job.isprintable():  # SQLite cannot encode a lone surrogate
            raise self._not_found(job)
        exact = self._select(
            "WHERE job = ? OR name = ? "
            "ORDER BY home = '' DESC, job = ? DESC, created_at DESC, rowid DESC LIMIT 1",
            (job, job, job),
        )
        if exact:
            return exact[0]
        matching = self._select(
            f"WHERE substr(job, 1, length(?)) = ? {_NEWEST_FIRST} LIMIT 6", (job, job)
        )
        if len(matching) == 1:
            return matching[0]
        if matching:
            candidates = ", ".join(record.job for record in matching[:5])
            raise JobNotFound(
                f"finding {job!r}: several jobs start with this prefix",
                hint=f"one of {candidates}?",
            )
        raise self._not_found(job)

    def list(self, *, limit: int = -1) -> _Jobs:
        """Return the newest ``limit`` jobs, by default all, newest first, without ``spec_json``."""
        with self._translate_errors("reading"):
            rows = self._execute(
                f"SELECT {_READ_SHORT} FROM jobs {_NEWEST_FIRST} LIMIT ?", (limit,)
            )
            return [JobRecord._make((*row, "")) for row in rows]

    def remove(self, job: str) -> None:
        """Delete the record of the job with exactly this id.

        Raises:
            JobNotFound: No job has this id.
        """
        with self._translate_errors(f"removing {job} from"):
            removed = self._execute("DELETE FROM jobs WHERE job = ?", (job,))
        if not removed.rowcount:
            raise self._not_found(job)

    def _prepare(self) -> None:
        with self._translate_errors("opening"):
            version = self._version()
            if version < VERSION:
                # Two processes may create the schema at once: lock, then read the version again.
                self._execute("BEGIN IMMEDIATE")
                version = self._version()
                if version < VERSION:
                    for statement in (_MIGRATION if version else _SCHEMA).split(";"):
                        self._execute(statement)
                    self._execute(f"PRAGMA user_version = {VERSION}")
                    version = VERSION
                self._execute("COMMIT")
        if version > VERSION:
            raise RecordsError(
                f"opening the job records: {self._path}: written by a newer version of cloudjob "
                f"(file version {version}; this one reads {VERSION})",
                hint="upgrade cloudjob, or set CLOUDJOB_HOME to another folder",
            )

    def _execute(self, statement: str, values: tuple[object, ...] = ()) -> sqlite3.Cursor:
        """Run a statement; while another process locks the file, retry and report the wait."""
        began_s = time.monotonic()
        while True:
            try:
                return self._database.execute(statement, values)
            except sqlite3.OperationalError as error:
                waited_s = time.monotonic() - began_s
                lacks = file_systems.missing_feature(self._path.parent)
                if lacks:
                    raise self._unusable(lacks) from error
                if "locked" not in str(error) or waited_s >= self._busy_timeout_s:
                    raise
            self._notices.report(began_s, f"the job records are locked: {self._path}")

    def _unusable(self, lacks: tuple[str, str]) -> RecordsError:
        what, hint = lacks
        return RecordsError(f"opening the job records: {self._path}: {what}", hint=hint)

    def _version(self) -> int:
        return int(self._execute("PRAGMA user_version").fetchone()[0])

    def _select(self, where: str, values: tuple[str, ...]) -> _Jobs:
        with self._translate_errors("reading"):
            rows = self._execute(f"SELECT {_READ_ALL} FROM jobs {where}", values)
            return [JobRecord._make(row) for row in rows]

    def _not_found(self, job: str) -> JobNotFound:
        import difflib

        recent = self.list(limit=_SUGGEST_AMONG)
        names = dict.fromkeys([r.job for r in recent] + [r.name for r in recent])
        close = difflib.get_close_matches(job, names, n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else _ALL_JOBS
        return JobNotFound(f"finding {job!r}: no such job", hint=hint)

    @contextmanager
    def _translate_errors(self, doing: str) -> Iterator[None]:
        """Turn every error of SQLite and the system into a ``RecordsError``."""
        try:
            yield
        except (sqlite3.Error, OSError, UnicodeError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            message = f"{doing} the job records: {self._path}: {reason}"
            raise RecordsError(message, hint=hint_for(reason)) from error


def hint_for(message: str) -> str:
    """Return the hint for an error message of SQLite or the system."""
    return next((hint for part, hint in _HINTS if part in message), _DEFAULT_HINT)

"""The jobs this machine has submitted: one SQLite file below ``$CLOUDJOB_HOME``."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from cloudjob.errors import JobNotFound, RecordsError
from cloudjob.home import private_folder
from cloudjob.waits import FIRST_S, Waits

VERSION = 1
# The state of a job until its platform has taken it; a submit that was killed leaves it so.
SUBMITTING = "SUBMITTING"
# How long other processes may keep the file locked: hundreds of submits take turns within it.
_BUSY_S = 60.0

_SCHEMA = """
CREATE TABLE jobs (
    job TEXT PRIMARY KEY, name TEXT NOT NULL, backend TEXT NOT NULL, handle TEXT NOT NULL,
    state TEXT NOT NULL, nodes INTEGER NOT NULL, procs_per_node INTEGER NOT NULL,
    created_at TEXT NOT NULL, code_uri TEXT NOT NULL, code_digest TEXT NOT NULL,
    code_size_bytes INTEGER NOT NULL, code_files INTEGER NOT NULL, store TEXT NOT NULL,
    final_json TEXT NOT NULL, spec_json TEXT NOT NULL
);
CREATE INDEX jobs_by_creation ON jobs (created_at);
CREATE INDEX jobs_by_name ON jobs (name, created_at);
"""

# What SQLite says -> what to try. By text, as Python 3.10 does not hand out SQLite's error codes.
_HINTS = (
    ("locked", "another cloudjob is writing; try again in a moment"),
    ("not a database", "move the file away; cloudjob makes a new one and your jobs keep running"),
    ("malformed", "move the file away; cloudjob makes a new one and your jobs keep running"),
    ("readonly", "make the file and its folder writable, or set CLOUDJOB_HOME to a folder that is"),
    ("Read-only", "set CLOUDJOB_HOME to a folder on a file system that is not read-only"),
    ("denied", "make the folder writable for this user, or set CLOUDJOB_HOME to another one"),
    ("No space", "free some space, or set CLOUDJOB_HOME to a folder on another disk"),
    ("full", "free some space, or set CLOUDJOB_HOME to a folder on another disk"),
    ("disk I/O", "free some space and check the disk, or set CLOUDJOB_HOME to another folder"),
    ("UNIQUE constraint", "every job needs an id of its own"),
)
_DEFAULT_HINT = "set CLOUDJOB_HOME to a folder that this user may write to"

# Suggesting compares letter by letter; the newest jobs are what a mistyped word means.
_SUGGEST_AMONG = 1000


class JobRecord(NamedTuple):
    """One submitted job.

    A tuple and not a dataclass: ten thousand of them are made for one ``list``.

    Args:
        state: The last state anyone saw; the backend knows better.
        created_at: RFC 3339 UTC with milliseconds, so that text order is time order.
        final_json: The whole status of a job that has ended, empty until then.
        spec_json: The job's description with secrets masked; empty in what ``list`` returns.
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
    spec_json: str = ""


_Jobs = list[JobRecord]  # inside the class below, ``list`` is its method

_COLUMNS = ", ".join(JobRecord._fields)
_SHORT_COLUMNS = ", ".join(JobRecord._fields[:-1])  # all but spec_json, which can be megabytes
_PLACES = ", ".join("?" for _ in JobRecord._fields)
_NEWEST_FIRST = "ORDER BY created_at DESC, rowid DESC"


class Records:
    """The job records in one file; use it as a context manager.

    Any number of processes may use a file at once; writers wait ``busy_timeout_s`` for their turn.

    Raises:
        RecordsError: from every member, when the file cannot be used.
    """

    def __init__(self, path: Path, *, busy_timeout_s: float = _BUSY_S) -> None:
        self._path = path
        self._busy_timeout_s = busy_timeout_s
        self._waits = Waits()
        with self._translated("opening"):
            _make_private(path)
            # SQLite itself waits between two notices.
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file."""
        self._database.close()

    def add(self, record: JobRecord) -> None:
        """Keep a new job."""
        with self._translated(f"adding {record.job} to"):
            self._execute(f"INSERT INTO jobs ({_COLUMNS}) VALUES ({_PLACES})", record)

    def update(self, job: str, **columns: object) -> None:
        """Change columns of the job with exactly this id.

        Raises:
            JobNotFound: no job has this id.
        """
        unknown = set(columns) - set(JobRecord._fields)
        if unknown or not columns:
            raise TypeError(f"not columns of a job record: {sorted(unknown)}")
        assignments = ", ".join(f"{column} = ?" for column in columns)
        with self._translated(f"updating {job} in"):
            changed = self._execute(
                f"UPDATE jobs SET {assignments} WHERE job = ?", (*columns.values(), job)
            )
        if not changed.rowcount:
            raise self._not_found(job)

    def get(self, job: str) -> JobRecord:
        """Return the job of this id, else the newest of this name, else the one whose id begins so.

        Raises:
            JobNotFound: nothing fits, or the beginning fits several.
        """
        if not job or not job.isprintable():  # half a character is nothing SQLite can look for
            raise self._not_found(job)
        exact = self._select(
            "WHERE job = ? OR name = ? ORDER BY job = ? DESC, created_at DESC, rowid DESC LIMIT 1",
            (job, job, job),
        )
        if exact:
            return exact[0]
        begun = self._select(
            f"WHERE substr(job, 1, length(?)) = ? {_NEWEST_FIRST} LIMIT 6", (job, job)
        )
        if len(begun) == 1:
            return begun[0]
        if begun:
            candidates = ", ".join(record.job for record in begun[:5])
            raise JobNotFound(
                f"finding {job!r}: several jobs start with this prefix",
                hint=f"one of {candidates}?",
            )
        raise self._not_found(job)

    def list(self, *, limit: int = -1) -> _Jobs:
        """Return the jobs, newest first, without their ``spec_json``; all unless limited."""
        with self._translated("reading"):
            rows = self._execute(
                f"SELECT {_SHORT_COLUMNS} FROM jobs {_NEWEST_FIRST} LIMIT ?", (limit,)
            )
            return [JobRecord._make((*row, "")) for row in rows]

    def remove(self, job: str) -> None:
        """Forget the job with exactly this id.

        Raises:
            JobNotFound: no job has this id.
        """
        with self._translated(f"removing {job} from"):
            removed = self._execute("DELETE FROM jobs WHERE job = ?", (job,))
        if not removed.rowcount:
            raise self._not_found(job)

    def _prepare(self) -> None:
        with self._translated("opening"):
            version = self._version()
            if version == 0:
                # IMMEDIATE, and the version once more inside: two processes may both be the first.
                self._execute("BEGIN IMMEDIATE")
                version = self._version()
                if version == 0:
                    for statement in _SCHEMA.split(";"):
                        self._execute(statement)
                    self._execute(f"PRAGMA user_version = {VERSION}")
                    version = VERSION
                self._execute("COMMIT")
        if version > VERSION:
            raise RecordsError(
                f"opening the job records: {self._path}: written by a newer cloudjob "
                f"(version {version}; this one knows {VERSION})",
                hint="upgrade cloudjob, or set CLOUDJOB_HOME to another folder",
            )

    def _execute(self, statement: str, values: tuple[object, ...] = ()) -> sqlite3.Cursor:
        """Run a statement; while other processes keep the file locked, wait and report that."""
        begun_s = time.monotonic()
        while True:
            try:
                return self._database.execute(statement, values)
            except sqlite3.OperationalError as error:
                waited_s = time.monotonic() - begun_s
                if "locked" not in str(error) or waited_s >= self._busy_timeout_s:
                    raise
            self._waits.tell(begun_s, f"the job records are locked: {self._path}")

    def _version(self) -> int:
        return int(self._execute("PRAGMA user_version").fetchone()[0])

    def _select(self, where: str, values: tuple[str, ...]) -> _Jobs:
        with self._translated("reading"):
            rows = self._execute(f"SELECT {_COLUMNS} FROM jobs {where}", values)
            return [JobRecord._make(row) for row in rows]

    def _not_found(self, job: str) -> JobNotFound:
        import difflib

        recent = self.list(limit=_SUGGEST_AMONG)
        words = dict.fromkeys([r.job for r in recent] + [r.name for r in recent])
        close = difflib.get_close_matches(job, words, n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else "`cloudjob list` shows them"
        return JobNotFound(f"finding {job!r}: no such job", hint=hint)

    @contextmanager
    def _translated(self, doing: str) -> Iterator[None]:
        """Turn whatever SQLite and the system raise into ``RecordsError``."""
        try:
            yield
        except (sqlite3.Error, OSError, UnicodeError, OverflowError) as error:
            said = getattr(error, "strerror", None) or str(error)
            message = f"{doing} the job records: {self._path}: {said}"
            raise RecordsError(message, hint=hint_for(said)) from error


def hint_for(said: str) -> str:
    """Return what to try after SQLite or the system has said this."""
    return next((hint for part, hint in _HINTS if part in said), _DEFAULT_HINT)


def _make_private(path: Path) -> None:
    """Make the file for its owner only where there is none; SQLite would let everybody read it."""
    private_folder(path.parent, is_ours=path.exists())
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))

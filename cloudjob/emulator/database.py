"""The state of the service in one SQLite file, in which acknowledged changes survive a crash."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from enum import IntEnum
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from cloudjob.emulator.models import JobRequest, Run, StoredResource, now_ms

_TABLES = """
CREATE TABLE IF NOT EXISTS jobs (
    id TEXT PRIMARY KEY, name TEXT NOT NULL, workspace TEXT NOT NULL, kind TEXT NOT NULL,
    phase TEXT NOT NULL, secondary TEXT NOT NULL, priority INTEGER NOT NULL,
    algorithm_name TEXT NOT NULL, user_name TEXT NOT NULL, create_ms INTEGER NOT NULL,
    start_ms INTEGER NOT NULL, end_ms INTEGER NOT NULL, nodes INTEGER NOT NULL,
    pool TEXT NOT NULL, stop_request INTEGER NOT NULL, body TEXT NOT NULL, run TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS jobs_by_time ON jobs (workspace, create_ms);
CREATE INDEX IF NOT EXISTS jobs_by_name ON jobs (name);
CREATE INDEX IF NOT EXISTS jobs_by_phase ON jobs (phase, priority, create_ms);
CREATE TABLE IF NOT EXISTS outputs (url TEXT NOT NULL, job TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS outputs_by_job ON outputs (job);
CREATE TABLE IF NOT EXISTS events (
    id INTEGER PRIMARY KEY, job TEXT NOT NULL, time_ms INTEGER NOT NULL, level TEXT NOT NULL,
    source TEXT NOT NULL, message TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS events_by_job ON events (job, id);
CREATE TABLE IF NOT EXISTS metrics (
    job TEXT NOT NULL, task TEXT NOT NULL, time_ms INTEGER NOT NULL, cpu REAL NOT NULL,
    memory REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS metrics_by_task ON metrics (job, task, time_ms);
CREATE TABLE IF NOT EXISTS tags (
    job TEXT NOT NULL, key TEXT NOT NULL, value TEXT NOT NULL, PRIMARY KEY (job, key)
);
CREATE TABLE IF NOT EXISTS tokens_of_users (
    hash TEXT PRIMARY KEY, user TEXT NOT NULL, project TEXT NOT NULL, expires_s REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS keys_of_users (
    access TEXT PRIMARY KEY, secret TEXT NOT NULL, token TEXT NOT NULL, user TEXT NOT NULL,
    expires_s REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS resources (
    kind TEXT NOT NULL, id TEXT NOT NULL, name TEXT NOT NULL, create_ms INTEGER NOT NULL,
    body TEXT NOT NULL, PRIMARY KEY (kind, id)
);
"""
Phase = Literal[
    "Creating",
    "Pending",
    "Running",
    "Terminating",
    "Completed",
    "Failed",
    "Terminated",
    "Abnormal",
]
FINAL: tuple[Phase, ...] = ("Completed", "Failed", "Terminated", "Abnormal")


class StopRequest(IntEnum):
    """A request to end a job; only NONE is false."""

    NONE = 0
    STOP = 1
    DELETE = 2


@dataclass(slots=True)
class JobRow:
    """One job; the fields are the columns of its table, in order.

    Args:
        body: The request that created it, with all defaults.
        stop_request: The last request to end it.
        pool: The dedicated pool it runs in; empty for the public one.
    """

    id: str
    name: str
    workspace: str
    kind: str
    phase: Phase
    secondary: str
    priority: int
    algorithm_name: str
    user_name: str
    create_ms: int
    start_ms: int
    end_ms: int
    nodes: int
    pool: str
    stop_request: StopRequest
    body: JobRequest
    run: Run

    @property
    def is_final(self) -> bool:
        """Whether the job has ended."""
        return self.phase in FINAL


class StoredToken(NamedTuple):
    """The user and the project of a token; the project is empty if it covers the account."""

    user: str
    project: str
    expires_s: float


class TemporaryKey(NamedTuple):
    """A key that expires, with its security token."""

    access: str
    secret: str
    token: str
    user: str
    expires_s: float


# JSON columns are models in Python.
sqlite3.register_converter("job", JobRequest.model_validate_json)
sqlite3.register_converter("run", Run.model_validate_json)
sqlite3.register_converter("stop", lambda data: StopRequest(int(data)))
_BODY, _RUN = 'body AS "body [job]"', 'run AS "run [run]"'
_STOP = 'stop_request AS "stop_request [stop]"'
_COLUMNS = ", ".join([*(field.name for field in fields(JobRow)[:-3]), _STOP, _BODY, _RUN])
# An SQL expression, and the values of its placeholders.
Condition = tuple[str, Sequence[Any]]
R = TypeVar("R", bound=StoredResource)
UNFINISHED: Condition = (f"phase NOT IN ({', '.join('?' * len(FINAL))})", FINAL)


class Database:
    """One connection for all threads, one statement or transaction at a time."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.RLock()
        self._connection = sqlite3.connect(
            path,
            check_same_thread=False,
            isolation_level=None,
            detect_types=sqlite3.PARSE_COLNAMES,
        )
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.execute("PRAGMA synchronous=NORMAL")
        self._connection.executescript(_TABLES)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit the body as one transaction; an inner transaction is part of the outer one."""
        with self._lock:
            if self._connection.in_transaction:
                yield
                return
            with self._connection:
                self._connection.execute("BEGIN IMMEDIATE")
                yield

    def _rows(self, sql: str, values: Iterable[Any] = ()) -> list[Any]:
        with self._lock:
            return self._connection.execute(sql, tuple(values)).fetchall()

    def _execute(self, sql: str, values: Iterable[Any] = ()) -> int:
        with self._lock:
            return self._connection.execute(sql, tuple(values)).rowcount

    # -- jobs ---------------------------------------------------------------------------------

    def add_job(self, row: JobRow, outputs: Iterable[str], tags: Mapping[str, str]) -> None:
        """Add a job."""
        values = [getattr(row, field.name) for field in fields(row)]
        with self.transaction():
            self._execute(f"INSERT INTO jobs VALUES ({', '.join('?' * len(values))})", values)
            for url in outputs:
                self._execute("INSERT INTO outputs VALUES (?, ?)", (url, row.id))
            self.add_tags(row.id, tags)

    def job(self, job: str) -> JobRow | None:
        """Return the job with this id, or None."""
        rows = self._rows(f"SELECT {_COLUMNS} FROM jobs WHERE id = ?", (job,))
        return JobRow(*rows[0]) if rows else None

    def update_job(self, job: str, **values: Any) -> None:
        """Change columns of a job."""
        names = ", ".join(f"{name} = ?" for name in values)
        self._execute(f"UPDATE jobs SET {names} WHERE id = ?", (*values.values(), job))

    def change_phase(self, job: str, of: Iterable[Phase], phase: Phase, **values: Any) -> bool:
        """Change the phase of a job if it is in one of the phases ``of``; return whether it was."""
        allowed = tuple(of)
        names = "".join(f", {name} = ?" for name in values)
        marks = ", ".join("?" * len(allowed))
        return bool(
            self._execute(
                f"UPDATE jobs SET phase = ?, secondary = ?{names} "
                f"WHERE id = ? AND phase IN ({marks})",
                (phase, phase, *values.values(), job, *allowed),
            )
        )

    def remove_job(self, job: str) -> None:
        """Remove a job with its outputs, events, metrics and tags."""
        with self.transaction():
            self._execute("DELETE FROM jobs WHERE id = ?", (job,))
            for table in ("outputs", "events", "metrics", "tags"):
                self._execute(f"DELETE FROM {table} WHERE job = ?", (job,))

    def find_jobs(
        self, conditions: Iterable[Condition], *, order: str, limit: int, skip: int
    ) -> tuple[int, list[JobRow]]:
        """Return the number of jobs that match all conditions, and a page of them."""
        where, values = _where(conditions)
        with self._lock:
            total = self.count_jobs((where, values))
            # Rows are large, so skipped ones are not read.
            rows = self._rows(
                f"SELECT {_COLUMNS} FROM jobs WHERE rowid IN (SELECT rowid FROM jobs "
                f"WHERE {where} ORDER BY {order} LIMIT ? OFFSET ?) ORDER BY {order}",
                (*values, limit, skip),
            )
        return total, [JobRow(*row) for row in rows]

    def count_jobs(self, *conditions: Condition) -> int:
        """Return the number of jobs that match all conditions."""
        where, values = _where(conditions)
        return int(self._rows(f"SELECT count(*) FROM jobs WHERE {where}", values)[0][0])

    def has_name(self, name: str, workspace: str) -> bool:
        """Whether a job of this name exists."""
        return self.count_jobs(("name = ?", [name]), ("workspace = ?", [workspace])) > 0

    def unfinished(self) -> list[tuple[str, Phase, str, int]]:
        """Return id, phase, pool and nodes of each unfinished job, by priority."""
        where, values = UNFINISHED
        return self._rows(
            f"SELECT id, phase, pool, nodes FROM jobs WHERE {where} "
            "ORDER BY priority DESC, create_ms, rowid",
            values,
        )

    def output_in_use(self, urls: Iterable[str]) -> str:
        """Return the first of these outputs that an unfinished job also writes; empty for none."""
        for url in urls:
            writes = ("id IN (SELECT job FROM outputs WHERE url = ?)", [url])
            if self.count_jobs(UNFINISHED, writes):
                return url
        return ""

    # -- events, metrics and tags of jobs -----------------------------------------------------

    def add_event(self, job: str, message: str, level: str = "Info", source: str = "Job") -> None:
        """Add an event of a job."""
        self._execute(
            "INSERT INTO events (job, time_ms, level, source, message) VALUES (?, ?, ?, ?, ?)",
            (job, now_ms(), level, source, message),
        )

    def events(
        self, conditions: Iterable[Condition], *, order: str, limit: int, skip: int
    ) -> tuple[int, list[tuple[int, str, str, str]]]:
        """Return the number of matching events, and a page: time, level, source and message."""
        where, values = _where(conditions)
        total = self._rows(f"SELECT count(*) FROM events WHERE {where}", values)[0][0]
        return total, self._rows(
            f"SELECT time_ms, level, source, message FROM events WHERE {where} "
            f"ORDER BY id {order} LIMIT ? OFFSET ?",
            (*values, limit, skip),
        )

    def add_metric(self, job: str, task: str, cpu: float, memory: float) -> None:
        """Add the usage of a node in percent; -1 for unknown."""
        row = (job, task, now_ms(), cpu, memory)
        self._execute("INSERT INTO metrics VALUES (?, ?, ?, ?, ?)", row)

    def metrics(self, job: str, task: str) -> list[tuple[float, float]]:
        """Return processor and memory of a node, one pair for each period."""
        sql = "SELECT cpu, memory FROM metrics WHERE job = ? AND task = ? ORDER BY time_ms"
        return self._rows(sql, (job, task))

    def add_tags(self, job: str, tags: Mapping[str, str]) -> None:
        """Put tags on a job."""
        for key, value in tags.items():
            self._execute("INSERT OR REPLACE INTO tags VALUES (?, ?, ?)", (job, key, value))

    def remove_tags(self, job: str, keys: Iterable[str]) -> None:
        """Remove tags from a job."""
        for key in keys:
            self._execute("DELETE FROM tags WHERE job = ? AND key = ?", (job, key))

    def tags(self, job: str = "") -> list[tuple[str, str]]:
        """Return the tags of a job, or of all jobs."""
        if job:
            return self._rows("SELECT key, value FROM tags WHERE job = ? ORDER BY key", (job,))
        return self._rows("SELECT DISTINCT key, value FROM tags ORDER BY key, value")

    # -- tokens and temporary keys ------------------------------------------------------------

    def add_token(self, hashed: str, token: StoredToken) -> None:
        """Add a token by its hash, and remove those that expired a week ago."""
        self._add_credential("tokens_of_users", (hashed, *token))

    def token(self, hashed: str) -> StoredToken | None:
        """Return a token by its hash."""
        sql = "SELECT user, project, expires_s FROM tokens_of_users WHERE hash = ?"
        return next((StoredToken(*row) for row in self._rows(sql, (hashed,))), None)

    def add_key(self, key: TemporaryKey) -> None:
        """Add a temporary key, and remove those that expired a week ago."""
        self._add_credential("keys_of_users", key)

    def key(self, access: str) -> TemporaryKey | None:
        """Return a temporary key."""
        sql = "SELECT * FROM keys_of_users WHERE access = ?"
        return next((TemporaryKey(*row) for row in self._rows(sql, (access,))), None)

    def _add_credential(self, table: str, values: Sequence[Any]) -> None:
        marks = ", ".join("?" * len(values))
        with self.transaction():
            self._execute(f"DELETE FROM {table} WHERE expires_s < ?", (time.time() - 7 * 86400,))
            self._execute(f"INSERT INTO {table} VALUES ({marks})", values)

    def expire_all(self, now_s: float) -> None:
        """Expire every token and temporary key."""
        with self.transaction():
            for table in ("tokens_of_users", "keys_of_users"):
                self._execute(f"UPDATE {table} SET expires_s = min(expires_s, ?)", (now_s - 1,))

    # -- algorithms, experiments, images -----------------------------------------------------------

    def put_resource(self, resource_id: str, name: str, body: StoredResource) -> None:
        """Add or replace an algorithm, an experiment or an image."""
        self._execute(
            "INSERT INTO resources VALUES (?, ?, ?, ?, ?) "
            "ON CONFLICT (kind, id) DO UPDATE SET name = excluded.name, body = excluded.body",
            (body.kind, resource_id, name, now_ms(), body),
        )

    def resource(self, model: type[R], resource_id: str) -> R | None:
        """Return an algorithm, an experiment or an image."""
        sql = "SELECT body FROM resources WHERE kind = ? AND id = ?"
        rows = self._rows(sql, (model.kind, resource_id))
        return next((model.model_validate_json(body) for (body,) in rows), None)

    def resources(self, model: type[R]) -> list[R]:
        """Return all resources of a kind, newest first."""
        sql = "SELECT body FROM resources WHERE kind = ? ORDER BY create_ms DESC, rowid DESC"
        return [model.model_validate_json(body) for (body,) in self._rows(sql, (model.kind,))]

    def remove_resource(self, model: type[StoredResource], resource_id: str) -> None:
        """Remove a resource."""
        sql = "DELETE FROM resources WHERE kind = ? AND id = ?"
        self._execute(sql, (model.kind, resource_id))


def _where(conditions: Iterable[Condition]) -> tuple[str, list[Any]]:
    """Return one SQL expression for all conditions, and its values."""
    pairs = list(conditions)
    sql = " AND ".join(text for text, _ in pairs) or "1"
    return sql, [value for _, values in pairs for value in values]

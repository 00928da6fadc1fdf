"""The way back: a job that was submitted, from any shell, at any time."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from cloudjob import outputs as kept
from cloudjob import status as statuses
from cloudjob.backends import open_backend
from cloudjob.backends.base import Backend, NativeStatus
from cloudjob.errors import CloudJobError, JobNotFound, StoreError
from cloudjob.home import records_path
from cloudjob.records import JobRecord, Records
from cloudjob.status import Code, Failure, JobState, JobStatus, Phase
from cloudjob.store import open_store
from cloudjob.store.base import ObjectStore
from jobentry.contract import exits, lines
from jobentry.contract.paths import DELIVERED_ENV, DELIVERED_SSH_KEY, JobPaths

# What an UNKNOWN job says that will never say anything else.
_GONE = ("the submit was interrupted", "the backend knows nothing of it")


class LogLine(NamedTuple):
    """One line of a job's log.

    Args:
        rank: Whose it is, None for the entry's own words.
        data: The bytes, with their newline if they have one.
    """

    node: int
    rank: int | None
    data: bytes


class LogPiece(NamedTuple):
    """Whole lines that came together from one node, marked as the entry wrote them."""

    node: int
    data: bytes


class Job:
    """A job that was submitted."""

    def __init__(
        self,
        record: JobRecord,
        backend: Backend[Any],
        home: Path,
        store: ObjectStore | None = None,
    ) -> None:
        self._record = record
        self._backend = backend
        self._home = home
        self._opened = store

    @property
    def id(self) -> str:
        """The job's id."""
        return self._record.job

    @property
    def handle(self) -> str:
        """``backend://…/id``."""
        return self._record.handle

    @property
    def nodes(self) -> int:
        """How many nodes it has."""
        return self._record.nodes

    @property
    def ranks(self) -> int:
        """How many ranks it has."""
        return self._record.nodes * self._record.procs_per_node

    def status(self) -> JobStatus:
        """Return where the job stands."""
        if self._record.final_json:
            return statuses.from_json(json.loads(self._record.final_json))
        status = self._status_now()
        if status.state.is_final:
            self._forget_secrets()
            text = json.dumps(statuses.to_json(status))
            with Records(records_path(self._home)) as db:
                db.update(self.id, state=status.state.value, final_json=text)
            self._record = self._record._replace(final_json=text)
        return status

    def wait(self) -> JobStatus:
        """Return the status when the job has ended."""
        while True:
            status = self.status()
            if status.state.is_final:
                return status
            if status.native_state in _GONE:
                raise JobNotFound(
                    f"waiting for {self.id}: {status.native_state}", hint="cloudjob rm forgets it"
                )
            time.sleep(self._backend.poll_s)

    def pieces(self, node: int | None = None, *, follow: bool) -> Iterator[LogPiece]:
        """Yield the log as it comes; an empty piece means that nothing is new."""
        if not self.handle:
            return
        for index, data in self._backend.logs(self.handle, node, follow=follow):
            yield LogPiece(index, data)

    def lines(
        self, node: int | None = None, rank: int | None = None, *, follow: bool
    ) -> Iterator[LogLine]:
        """Yield the log line by line, of one node or rank if asked."""
        for piece in self.pieces(node, follow=follow):
            for text in piece.data.split(b"\n")[:-1]:
                line = lines.read(text + b"\n")
                if rank is None or line.rank == rank:
                    yield LogLine(piece.node, line.rank, line.data)

    def cancel(self, *, is_urgent: bool = False) -> None:
        """Ask the job to end; a job that has ended stays as it is."""
        if self.handle:
            self._backend.cancel(self.handle, is_urgent=is_urgent)

    def outputs(self) -> list[str]:
        """Return the names of the files that were kept, each behind the name of its output."""
        return [file.name for place in self._places() for file in kept.find(place)]

    def fetch_outputs(self, folder: Path) -> list[Path]:
        """Copy every output below ``folder`` and return the files."""
        return [path for place in self._places() for path in kept.fetch(place, folder)]

    def _places(self) -> list[kept.Place]:
        """Return where the outputs are: in the job's own store, or where the user said."""
        below = self._store.uri(JobPaths(self.id).outputs) + "/"
        uris: dict[str, str] = json.loads(self._record.spec_json)["outputs"]
        return [
            kept.Place(name, self._store, f"{JobPaths(self.id).outputs}/{name}/")
            if uri == below + name
            else kept.Place(name, open_store(uri), "")
            for name, uri in sorted(uris.items())
        ]

    def remove(self) -> None:
        """Leave nothing of this job: on its platform, in the store, and here."""
        if self.handle:
            self._backend.remove(self.handle)
        for key in list(self._store.list(f"{self.id}/")):
            self._store.delete(key)
        with Records(records_path(self._home)) as db:
            db.remove(self.id)

    @property
    def _store(self) -> ObjectStore:
        """The store of the job, opened when it is needed: a list of jobs needs none."""
        if self._opened is None:
            environ = {**self._backend.store()[1], **os.environ}
            self._opened = open_store(self._record.store, environ)
        return self._opened

    def _forget_secrets(self) -> None:
        """Delete what lay beside the code for the nodes to read, and nobody else."""
        if not self._backend.brings_code:
            return
        folder = JobPaths(self.id).node
        with contextlib.suppress(CloudJobError):
            for name in (DELIVERED_ENV, DELIVERED_SSH_KEY):
                self._store.delete(f"{folder}/{name}")

    def _status_now(self) -> JobStatus:
        record = self._record
        native = self._native()
        status = JobStatus(
            job=record.job,
            name=record.name,
            backend=record.backend,
            state=native.state,
            native_state=native.native,
            nodes=record.nodes,
            procs_per_node=record.procs_per_node,
            created_at=record.created_at,
            started_at=native.started_at,
            ended_at=native.ended_at,
            exit_code=native.exit_code,
            code=Code(
                uri=record.code_uri,
                digest=record.code_digest,
                size_bytes=record.code_size_bytes,
                files=record.code_files,
            ),
        )
        return self._with_record(status, native) if status.state.is_final else status

    def _native(self) -> NativeStatus:
        if not self.handle:
            return NativeStatus(JobState.UNKNOWN, _GONE[0])
        try:
            return self._backend.status(self.handle)
        except JobNotFound:
            return NativeStatus(JobState.UNKNOWN, _GONE[1])

    def _with_record(self, status: JobStatus, native: NativeStatus) -> JobStatus:
        """Add what the head's record says; it knows more than the platform."""
        cancelled = status.state is JobState.CANCELLED
        try:
            record = exits.load(self._store.get_bytes(JobPaths(self.id).record))
        except (StoreError, exits.RecordError):
            record = None
        if record is not None and record.cause == "cancelled" and not cancelled:
            # Nobody has cancelled it: the platform asked the head to end when a node was lost.
            record = None
        if record is None or record.job != self.id or record.ended_at < native.attempt_at:
            if status.state is JobState.SUCCEEDED:
                return status
            message = ": ".join(text for text in (native.message, native.reason) if text)
            failure = Failure(node=native.node, exit_code=native.exit_code, message=message)
            return replace(status, cause="cancelled" if cancelled else "platform", failure=failure)
        failed = record.failure
        if failed is not None and native.reason:
            # The entry saw a rank killed; only the platform knows why.
            failed = failed._replace(message=f"{failed.message} ({native.reason})")
        return replace(
            status,
            exit_code=record.exit_code,
            cause="cancelled" if cancelled else record.cause or None,
            failure=None if failed is None else Failure(**failed._asdict()),
            phases=tuple(
                Phase(node=node, name=name, started_at=start, ended_at=end)
                for node, name, start, end in record.phases
            ),
        )


def find(home: Path, job: str) -> Job:
    """Return the job of this id, name or handle.

    Raises:
        JobNotFound: Nothing fits.
    """
    with Records(records_path(home)) as db:
        return attach(db.get(job.rpartition("/")[2]), home)


def find_all(home: Path) -> list[Job]:
    """Return every job that was submitted from here, newest first."""
    with Records(records_path(home)) as db:
        return [attach(record, home) for record in db.list()]


def attach(record: JobRecord, home: Path) -> Job:
    """Return the job of a record."""
    return Job(record, open_backend(record.backend, home), home)


def sweep(home: Path) -> list[str]:
    """Remove what submits that broke off have left in the container engine, and name their jobs."""
    from cloudjob.backends.docker.backend import DockerBackend

    with Records(records_path(home)) as db:
        known = {record.job for record in db.list() if record.handle}
    return DockerBackend(home, {}).sweep(known)

"""One submitted job: its status, log, outputs and removal."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from cloudjob import times
from cloudjob.backends import handles
from cloudjob.backends.base import Backend, Event, Metric, NativeStatus
from cloudjob.backends.follow import Piece
from cloudjob.errors import (
    BackendError,
    CloudJobError,
    JobFailed,
    JobNotFound,
    ObjectMissing,
    RecordsError,
    StoreError,
    Unreachable,
    UsageError,
)
from cloudjob.home import locks, records_path, submits_folder, writing
from cloudjob.home.records import SUBMITTING, JobRecord, Records
from cloudjob.model import grid, html
from cloudjob.model import status as statuses
from cloudjob.model.status import JobState, JobStatus, Phase
from cloudjob.package import claims, contents
from cloudjob.store import open_store, with_store_options
from cloudjob.store.base import PATIENCE_S, Expiring, ObjectStore
from cloudjob.store.parallel import call_with_timeout, in_parallel
from cloudjob.tracking import (
    descriptions,
    event_files,
    journals,
    notifications,
    stored_logs,
    verdict,
    waiting,
)
from cloudjob.tracking.journals import Journals
from cloudjob.tracking.metrics import MetricPoint, MetricReader
from cloudjob.tracking.outputs import OutputLocation, Outputs
from cloudjob.tracking.outputs import find as find_outputs
from cloudjob.tracking.platforms import ELSEWHERE, GONE
from jobentry.contract import exits, journal, lines, masks
from jobentry.contract.names import CLOUDJOB_S3_SESSION_TOKEN, STORE_KEYS
from jobentry.contract.packages import Entry
from jobentry.contract.paths import DELIVERED_ENV, DELIVERED_SSH_KEY, JobPaths
from jobentry.contract.stored_log import Chunk

# The polling interval while a job is being submitted.
_SENT_POLL_S = 0.1
# Last log lines of the entry to show in the status of a job without a record.
_LAST_LINES = 5
# Seconds that a status query waits for the store.
_STORE_S = 5.0
# Seconds by which a record that the platform uploads may arrive late.
_LATE_S = 120.0
_FROM_STORE = b"cloudjob: the platform has no log of this node; this one is from the job's store\n"
_UNREAD = (
    b"cloudjob: the platform does not answer for the rest of this node's log; what follows is from"
    b" the job's store\n"
)
# What tells the lines of a node's log apart: the rank, or the whole line of the entry.
_LINE_KEY = re.compile(rb"^(?:\[\d+\]\+? |jobentry.*\n)", re.MULTILINE)

# Called with the number of a node and lines of its journal.
OnJournal = Callable[[int, list[bytes]], object]


class LogLine(NamedTuple):
    """One line of a job's log; ``str`` returns it as ``cloudjob logs`` shows it.

    Args:
        rank: The rank that wrote it, None for a line of the entry.
        data: The bytes, with their newline if they have one.
    """

    node: int
    rank: int | None
    data: bytes

    @property
    def text(self) -> str:
        """The line without its newline; bytes that are not UTF-8 are escaped."""
        return self.data.decode("utf-8", "backslashreplace").rstrip("\n")

    def __str__(self) -> str:
        return self.text if self.rank is None else f"[{self.rank}] {self.text}"


class LogPiece(NamedTuple):
    """Whole lines of one node, with the prefixes that the entry wrote.

    Args:
        at: When the node wrote them, to within seconds and by its clock, in seconds since 1970;
            None if that is not known.
    """

    node: int
    data: bytes
    at: float | None = None


class Job:
    """A job that was submitted.

    Any number of threads may use a job at the same time.
    """

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
        # Why the record of the ended job could not be read; empty if it was read.
        self._record_error = ""
        self._last: JobStatus | None = None
        # One request at a time, because ``_record_error`` belongs to the status being built.
        self._asking = threading.Lock()

    def __repr__(self) -> str:
        state = f" {self._last.state}" if self._last else ""
        return f"<Job {self.handle or self.id}{state}>"

    def _repr_html_(self) -> str:
        """Return a table for a notebook, of what is known without asking the platform."""
        if self._last is not None:
            return html.status_table(self._last, self.handle)
        return html.table([("job", self.id), ("handle", self.handle), ("nodes", self.nodes)])

    @property
    def last_status(self) -> JobStatus | None:
        """The status that was returned last, None before the first; nothing is requested."""
        return self._last

    @property
    def id(self) -> str:
        """The job's id."""
        return self._record.job

    @property
    def handle(self) -> str:
        """``backend://…/id``."""
        return self._record.handle

    @property
    def backend_name(self) -> str:
        """The name of its backend."""
        return self._record.backend

    @property
    def submitted_by(self) -> str:
        """``user@machine``; empty for a job of an older cloudjob."""
        return self._record.submitted_by

    @property
    def sweep(self) -> str:
        """The id of the sweep that it belongs to; empty if it belongs to none."""
        return grid.sweep_of(self.id)

    def sweep_values(self) -> dict[str, str]:
        """Return the values that the job has in its sweep, by name; none without a sweep."""
        try:
            values = json.loads(self._submission_json())["sweep"]["values"]
            return {str(name): str(value) for name, value in values.items()}
        except (ValueError, LookupError, TypeError, AttributeError):
            return {}

    @property
    def platform(self) -> str:
        """The same for all jobs whose statuses one request can return."""
        return f"{handles.platform(self.handle)} {self._record.home}"

    def statuses(self, handles: Sequence[str]) -> Mapping[str, NativeStatus | None]:
        """Return the statuses of several jobs on the platform of this one."""
        return self._backend.statuses(handles)

    @property
    def has_final_status(self) -> bool:
        """Whether its final status is in the local records, so that the platform is not needed."""
        return bool(self._record.final_json)

    @property
    def is_over(self) -> bool:
        """Whether the last status will never change: the job has ended, or nobody knows it."""
        last = self._last
        return last is not None and (last.state.is_final or last.native_state in GONE)

    @property
    def code_digest(self) -> str:
        """The digest of its package."""
        return self._record.code_digest

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return self._record.nodes

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self._record.nodes * self._record.procs_per_node

    def status(self) -> JobStatus:
        """Return the status of the job; a store that does not answer delays it by seconds only."""
        with self._asking:
            self._last = verdict.recorded_status(self._record) or self._asked_status()
            return self._last

    def _asked_status(self) -> JobStatus:
        status = self._status_now()
        if status.state.is_final:
            self._forget_secrets()
        if status.state.is_final and self._is_settled(status):
            text = json.dumps(statuses.to_json(status))
            # A job of a list of another store is not in the records; and how a job ended is known
            # even if a full disk or a damaged file cannot keep it.
            unkept = (JobNotFound, RecordsError)
            with contextlib.suppress(*unkept), Records(records_path(self._home)) as db:
                db.update(self.id, state=status.state.value, final_json=text)
            self._record = self._record._replace(final_json=text)
        return status

    def waits_for(self) -> str:
        """Return why the job is not running yet; empty if unknown."""
        try:
            return self._backend.waits_for(self.handle) if self.handle else ""
        except BackendError:
            # Following the log reports the error if it lasts.
            return ""

    def wait(
        self,
        *,
        timeout_s: float | None = None,
        check: bool = False,
        on_status: Callable[[JobStatus], None] | None = None,
        record_s: float = PATIENCE_S,
    ) -> JobStatus:
        """Wait for the job to end and return its status.

        Ctrl-C raises ``KeyboardInterrupt`` here, and the job continues.

        Args:
            timeout_s: Seconds to wait, by default without limit.
            check: Raise ``JobFailed`` if the job does not succeed, like ``subprocess.run``.
            on_status: Called with the first status and with each one that differs from the last.
            record_s: Seconds to retry reading its record while the store does not answer.

        Raises:
            JobFailed: ``check`` is set and the job did not succeed.
            JobNotFound: The platform no longer has the job.
            WaitTimeout: The job did not end in time.
        """
        end_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        limits = waiting.Limits(self._backend.poll_s, end_s, record_s)
        status = waiting.wait(self, limits, lambda: self._record_error, on_status)
        if check and status.state is not JobState.SUCCEEDED:
            why = status.failure.message if status.failure else status.native_state
            raise JobFailed(
                f"job {self.id}: {status.state}: {why}", status, statuses.exit_code(status)
            )
        return status

    def pieces(
        self,
        node: int | None = None,
        *,
        follow: bool,
        is_exact: bool = False,
        is_stored: bool = False,
        is_timed: bool = False,
        on_journal: OnJournal | None = None,
    ) -> Iterator[LogPiece]:
        """Yield the log as it arrives; an empty piece means that there is nothing new.

        The logs of nodes of which the platform has none come from the job's store.

        Args:
            is_exact: Show secrets; else they are ``***``.
            is_stored: Read the logs in the store, not those of the platform.
            is_timed: Give the pieces their times, which makes them smaller.
            on_journal: Called with the lines of the journals of nodes, which the log leaves out.
        """
        splitters: defaultdict[int, masks.Splitter] = defaultdict(masks.Splitter)
        found = self._stored_log(node) if is_stored else self._log(node, follow=follow)
        written_at: dict[int, float] = {}
        for index, data in found:
            split = journal.split if is_exact else splitters[index].split
            for at, part in journal.by_time(data) if is_timed else ((0.0, data),):
                text, recorded = split(part)
                if recorded and on_journal is not None:
                    on_journal(index, recorded)
                written_at[index] = at or written_at.get(index, 0.0)
                yield LogPiece(index, text, written_at[index] or None)

    def _log(self, node: int | None, *, follow: bool) -> Iterator[Piece]:
        """Yield the platform's log, and from the store what the platform has not or cannot give.

        Raises:
            BackendError: The platform does not answer, so that the end of the log may be missing.
        """
        if not self.handle:
            return
        wanted = {*range(self.nodes)} if node is None else {node}
        shown: defaultdict[int, Counter[bytes]] = defaultdict(Counter)
        # Logs of this machine's files can always be read, and counting their lines takes time.
        is_counted = self.backend_name != "process"
        failure: BackendError | None = None
        try:
            for index, data in self._backend.logs(self.handle, node, follow=follow):
                if data:
                    shown[index].update(_LINE_KEY.findall(data) if is_counted else ())
                yield index, data
        except BackendError as error:
            failure = error
        is_unread = isinstance(failure, Unreachable)
        unread = wanted if is_unread else wanted - shown.keys()
        chunks = self._stored_chunks(unread) if unread else []
        for index, pieces in groupby(chunks, lambda chunk: chunk.node):
            found = stored_logs.read(self._store, self.id, tuple(pieces))
            rest = (text for _, data in found if (text := _without(data, shown[index])))
            notice = _UNREAD if is_unread else _FROM_STORE
            yield from ((index, text) for text in _after(notice, rest))
        if failure is not None and (is_unread or not chunks):
            raise failure

    def _stored_chunks(self, nodes: set[int]) -> list[Chunk]:
        """Return what nodes have stored of their logs; nothing if the store does not answer."""
        with contextlib.suppress(StoreError, TimeoutError):
            return call_with_timeout(
                _STORE_S, lambda: stored_logs.find(self._store, self.id, nodes)
            )
        return []

    def _stored_log(self, node: int | None) -> Iterator[Piece]:
        chunks = stored_logs.find(
            self._store, self.id, range(self.nodes) if node is None else (node,)
        )
        if not chunks:
            raise UsageError(
                f"reading the stored log of {self.id}: its nodes have stored none",
                hint="leave out --stored; the log may still be on the platform",
            )
        yield from stored_logs.read(self._store, self.id, chunks)

    def journals(self) -> Journals:
        """Return what the nodes have recorded so far: phases, ranks and resources.

        The log of a job that runs holds this; of one that has ended, each node has stored it.

        Raises:
            CloudJobError: Neither can be read.
        """
        found = Journals()
        if self.status().state.is_final:
            self._add_stored(found)
        if len(found.nodes) < self.nodes:
            rest = Journals()
            try:
                for _ in self.pieces(follow=False, on_journal=rest.add):
                    pass
            except BackendError:
                # The log may be gone when the stored journals are still there.
                if not found.nodes:
                    raise
            found.add_missing(rest)
        return found

    def training_metrics(self, patterns: Mapping[str, str] | None = None) -> list[MetricPoint]:
        """Return the metrics that ranks have printed and those in event files of the outputs.

        Args:
            patterns: Regular expressions by metric, besides those of the job.

        Raises:
            CloudJobError: The log or the outputs cannot be read.
        """
        reader = self.metric_reader(patterns)
        found: list[MetricPoint] = []
        if self.handle:
            # Asked before: what a running job writes meanwhile may end within a number.
            is_over = self.status().state.is_final
            for node, data in self._log(None, follow=False):
                found += reader.add(node, data)
            if is_over:
                found += reader.finish()
        return found + self.event_metrics()

    def metric_reader(self, patterns: Mapping[str, str] | None = None) -> MetricReader:
        """Return what finds the metrics of this job in its log.

        Raises:
            CloudJobError: A pattern cannot be used, or the records cannot be read.
        """
        known: dict[str, str] = {}
        with contextlib.suppress(UsageError):
            known = dict(self.spec().get("metrics") or {})
        return MetricReader({**known, **(patterns or {})})

    def event_metrics(self) -> list[MetricPoint]:
        """Return the metrics in the event files of the outputs.

        Raises:
            CloudJobError: The outputs cannot be read.
        """
        found: list[MetricPoint] = []
        for place in self._places():
            for file in find_outputs(place):
                if event_files.is_event_file(file.name):
                    found += event_files.read(place.store.get_bytes(file.key), file.name)
        return found

    def _add_stored(self, found: Journals) -> None:
        """Add the journals in the store; a node that was killed has not stored its own."""

        def load(node: int) -> None:
            with contextlib.suppress(StoreError):
                data = self._store.get_bytes(JobPaths(self.id).journal(node))
                found.add(node, journal.unpack(data))

        in_parallel(load, range(self.nodes), abort=self._store.abort)

    def phases(self) -> tuple[Phase, ...]:
        """Return the phases of its nodes so far, as far as they stand at the ends of their logs.

        After some seconds, those found until then.
        """
        status = self.status()
        if status.phases or status.state.is_final or not self.handle:
            return status.phases
        found = Journals()

        def read() -> None:
            for node, data in self._backend.log_ends(self.handle):
                found.add(node, journal.split(data)[1])

        with contextlib.suppress(BackendError, TimeoutError):
            call_with_timeout(_STORE_S, read)
        return found.phases

    def logs(
        self,
        node: int | None = None,
        rank: int | None = None,
        *,
        follow: bool = False,
        is_exact: bool = False,
        is_stored: bool = False,
    ) -> Iterator[LogLine]:
        """Yield the log line by line, of one node or rank if given.

        Lines of one node are in order.

        Args:
            follow: Wait for new lines until the job has ended.
            is_exact: Yield what the ranks wrote; else secrets are ``***``.
            is_stored: Read the logs in the job's store, not those of its platform.
        """
        found = self.pieces(node, follow=follow, is_exact=is_exact, is_stored=is_stored)
        for piece in found:
            for text in piece.data.split(b"\n")[:-1]:
                line = lines.read(text + b"\n")
                if rank is None or line.rank == rank:
                    yield LogLine(piece.node, line.rank, line.data)

    def cancel(self, *, is_urgent: bool = False) -> None:
        """Cancel the job; nothing happens if it has ended.

        If the job is still being submitted, wait until that is done, then cancel it.
        """
        while self._is_being_sent():
            time.sleep(_SENT_POLL_S)
        if self.handle:
            self._backend.cancel(self.handle, is_urgent=is_urgent)

    def refresh_keys(self) -> float:
        """Give the nodes the present keys of the job's store, in place of those of the submit.

        A node uses them once the store has refused the old ones.

        Returns:
            When the new ones expire, in seconds since 1970; 0 for never or unknown.

        Raises:
            UsageError: The job has ended, or its nodes have no keys, or cannot be given others.
        """
        doing = f"refreshing the keys of {self.id}"
        if self.status().state.is_final:
            raise UsageError(f"{doing}: it has ended")
        store = self._open(self._record.store)
        given: Any = {}
        with contextlib.suppress(ValueError, AttributeError):
            given = json.loads(self._submission_json()).get("access") or {}
        if not isinstance(store, Expiring) or CLOUDJOB_S3_SESSION_TOKEN not in given:
            raise UsageError(f"{doing}: its nodes have no temporary keys of the store")
        access = store.access()
        self._backend.refresh(self.handle, {name: access.get(name, "") for name in STORE_KEYS})
        return store.keys_end_at()

    def outputs(self, name: str = "", *, is_own: bool = False) -> Outputs:
        """Return the output files stored so far; each name starts with the name of its output.

        Args:
            name: Only those of this output.
            is_own: Only those in the job's own store, which ``remove`` deletes.

        Raises:
            UsageError: The job has no output of this name.
        """
        places = self._places()
        known = [place.name for place in places]
        if name and name not in known:
            allowed = f"it has {', '.join(known)}" if known else "it has none"
            raise UsageError(f"reading the outputs of {self.id}: no output {name!r}", hint=allowed)
        return Outputs([p for p in places if (p.prefix or not is_own) and name in ("", p.name)])

    def _places(self) -> list[OutputLocation]:
        """Return where the outputs are: in the job's own store, or at URIs that the user chose."""
        below = self._store.uri(JobPaths(self.id).outputs) + "/"
        try:
            uris: dict[str, str] = dict(json.loads(self._submission_json())["outputs"])
        except (ValueError, LookupError, TypeError):
            # The record is damaged, but the outputs in the job's own store can be listed.
            return [OutputLocation("outputs", self._store, f"{JobPaths(self.id).outputs}/", True)]
        is_listed = self._backend.copies_files
        return [
            OutputLocation(name, self._store, f"{JobPaths(self.id).outputs}/{name}/", is_listed)
            if uri == below + name
            else OutputLocation(
                name, self._open(with_store_options(uri, self._record.store)), "", is_listed
            )
            for name, uri in sorted(uris.items())
        ]

    def events(self) -> list[Event]:
        """Return the platform's events for the job, oldest first.

        Raises:
            UsageError: The platform records no events.
        """
        return self._backend.events(self._platform_handle)

    def platform_resources(self) -> list[Metric]:
        """Return what each node has used, as its platform has measured it.

        Raises:
            UsageError: The platform measures nothing.
        """
        return self._backend.metrics(self._platform_handle)

    def resources(self) -> list[Metric]:
        """Return what each node has used: as its platform has measured it, or else the node."""
        try:
            return self.platform_resources()
        except UsageError:
            return [
                Metric(node, name, values)
                for node, samples in self.journals().resources.items()
                for name, values in journals.series(samples)
            ]

    @property
    def _platform_handle(self) -> str:
        """Its handle, or one that matches no job while this one is still being submitted."""
        return self.handle or f"{self._record.backend}://{self.id}"

    def spec(self) -> dict[str, Any]:
        """Return the user's description of the job, with secrets as ``***``.

        Raises:
            UsageError: It was submitted by a cloudjob version that did not record descriptions.
        """
        found: dict[str, Any] | None = None
        with contextlib.suppress(ValueError, AttributeError):
            found = json.loads(self._submission_json()).get("spec")
        if not isinstance(found, dict):
            raise UsageError(f"reading the description of {self.id}: it was not recorded")
        return found

    def _submission_json(self) -> str:
        """Return the submission in the record, which is read now if the job is from a list."""
        if self._record.spec_json:
            return self._record.spec_json
        with contextlib.suppress(JobNotFound), Records(records_path(self._home)) as db:
            record = db.get(self.id)
            # A job that was removed meanwhile may have given its id to another one as its name.
            return record.spec_json if record.job == self.id else ""
        return ""

    def code_files(self) -> list[Entry]:
        """Return the files, folders and links of its package, by name.

        Raises:
            StoreError: The package is no longer in the store, or cannot be read.
        """
        return contents.read(self._store, JobPaths(self.id).code)

    def differences(self, other: Job) -> list[tuple[str, Any, Any]]:
        """Return each key whose value differs in the description of another job, with both values.

        Raises:
            UsageError: A description was not recorded.
        """
        left, right = _flat(self), _flat(other)
        return [
            (key, left.get(key), right.get(key))
            for key in sorted({*left, *right})
            if left.get(key) != right.get(key)
        ]

    def settle_notifications(self) -> str:
        """See to the notifications of the job, which has ended; return what went wrong, or "".

        Its notifier sends them; this waits for it some seconds, and sends if it was killed.
        """
        status = self._last
        if status is None or not (status.state.is_final or status.native_state in GONE):
            return ""
        described: dict[str, Any] = {}
        with contextlib.suppress(UsageError):
            described = self.spec()
        return notifications.settle(self._home, status, described)

    @property
    def notification_failure(self) -> str:
        """Why notifications of the job were not sent; empty if they were, or may yet be."""
        return notifications.failure(self._home, self.id)

    def remove(self) -> None:
        """Remove the job from its platform, its store and the local records."""
        notifications.forget(self._home, self.id)
        if self.handle:
            self._backend.remove(self.handle)
        keys = [*self._store.list(f"{self.id}/"), descriptions.key(self.id)]
        in_parallel(self._store.delete, keys, abort=self._store.abort)
        with contextlib.suppress(JobNotFound), Records(records_path(self._home)) as db:
            db.remove(self.id)

    @property
    def _store(self) -> ObjectStore:
        """The store of the job, opened on first use; a list of jobs needs none."""
        if self._opened is None:
            self._opened = self._open(self._record.store)
        return self._opened

    def _open(self, uri: str, *, patience_s: float = PATIENCE_S) -> ObjectStore:
        environ = {**self._backend.store()[1], **os.environ}
        return open_store(uri, environ, patience_s=patience_s)

    def _is_settled(self, status: JobStatus) -> bool:
        """Whether the status is final: where the platform uploads the record, it may arrive late.

        Until then the status shows what is known, and the next call asks again.
        """
        if self._record_error:
            return False
        has_record = bool(status.phases) or status.cause not in (None, "platform")
        if has_record or not self._backend.copies_files or status.ended_at is None:
            return True
        return time.time() - times.seconds_of(status.ended_at) > _LATE_S

    def _forget_secrets(self) -> None:
        """Delete the secrets that were stored next to the code for the nodes."""
        if not self._backend.copies_files or self._record_error:
            return
        folder = JobPaths(self.id).node
        store = self._open(self._record.store, patience_s=_STORE_S)

        def forget() -> None:
            for name in (DELIVERED_ENV, DELIVERED_SSH_KEY):
                store.delete(f"{folder}/{name}")

        with contextlib.suppress(CloudJobError, TimeoutError):
            call_with_timeout(_STORE_S, forget)

    def _status_now(self) -> JobStatus:
        native = self._native()
        if native.native == ELSEWHERE:
            native = verdict.ended_elsewhere(native, self._record_of(native), self.spec)
        status = verdict.as_status(self._record, native)
        if not status.state.is_final:
            return status
        record = self._record_of(native)
        ended = verdict.Ended(record, self._record_error)
        return verdict.with_record(status, native, ended, self._entry_lines)

    def status_in_list(self, native: NativeStatus | None) -> JobStatus:
        """Return the status of a job from a list of its platform's jobs.

        Args:
            native: Its status in the list; None if the job is not in it.
        """
        if native is None and self._record.state != SUBMITTING:
            native = NativeStatus(JobState.UNKNOWN, GONE[1])
        if native is None or native.state.is_final:
            return self.status()
        self._last = verdict.as_status(self._record, native)
        return self._last

    def unknown(self, why: str) -> JobStatus:
        """Return the status of a job whose platform cannot be asked."""
        self._last = verdict.as_status(self._record, NativeStatus(JobState.UNKNOWN, why))
        return self._last

    def _native(self) -> NativeStatus:
        # Before the status: a submit that ends between the two queries has left its job there.
        is_being_sent = self._is_being_sent()
        with contextlib.suppress(JobNotFound):
            if self.handle:
                return self._backend.status(self.handle)
        return self._absent(is_being_sent=is_being_sent)

    def _absent(self, *, is_being_sent: bool) -> NativeStatus:
        if is_being_sent:
            return NativeStatus(JobState.PENDING, "being submitted")
        was_sent = self.handle and self._record.state != SUBMITTING
        return NativeStatus(JobState.UNKNOWN, GONE[1] if was_sent else GONE[0])

    def _is_being_sent(self) -> bool:
        """Whether the submit of this job is running on this machine."""
        is_new = self._record.state == SUBMITTING
        with writing("checking whether a submit is running", submits_folder(self._home)):
            return is_new and locks.is_in_use(submits_folder(self._home), self.id)

    def _record_of(self, native: NativeStatus) -> exits.ExitRecord | None:
        """Return the head's record of how the job ended, if it left one."""
        try:
            record = call_with_timeout(_STORE_S, self._read_record)
            self._record_error = ""
        except (StoreError, TimeoutError) as error:
            place = self._record.store.partition("?")[0]
            found = f"{place}: {error}" if isinstance(error, TimeoutError) else error
            self._record_error = f"reading how the job ended: {found}"
            return None
        if record is None:
            return None
        if record.job != self.id or record.ended_at < native.attempt_at:
            return None
        if record.cause == "cancelled" and native.has_asked:
            # Not cancelled by a user: the platform stopped the head when a node was lost.
            return None
        return record

    def _read_record(self) -> exits.ExitRecord | None:
        key = JobPaths(self.id).record
        store = self._opened or self._open(self._record.store, patience_s=_STORE_S)
        try:
            record = exits.load(store.get_bytes(key))
        except (exits.RecordError, ObjectMissing):
            return None
        if record.damaged_layers:
            # Nodes cannot mark a damaged package themselves where the platform delivers it to them.
            with contextlib.suppress(StoreError):
                claims.mark_damaged(store, record.damaged_layers)
        return record

    def _entry_lines(self, node: int | None) -> tuple[str, ...]:
        """Return the last log lines of a node's entry."""
        if node is None:
            return ()
        last: deque[bytes] = deque(maxlen=_LAST_LINES)
        with contextlib.suppress(BackendError):
            last.extend(line.data for line in self.logs(node) if line.rank is None)
        return tuple(line.decode("utf-8", "replace").rstrip() for line in last)


def _flat(job: Job) -> dict[str, Any]:
    found = {"code.digest": job.code_digest}
    for key, value in job.spec().items():
        if isinstance(value, dict):
            found.update({f"{key}.{name}": item for name, item in value.items()})
        else:
            found[key] = value
    return found


def _after(notice: bytes, pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yield a notice and then the pieces; nothing if there are no pieces."""
    for piece in pieces:
        yield notice + piece
        notice = b""


def _without(data: bytes, shown: Counter[bytes]) -> bytes:
    """Return whole lines without those already shown, and reduce the number of lines to skip."""
    if not +shown:
        return data
    kept = []
    for line in (text + b"\n" for text in data.split(b"\n")[:-1]):
        match = _LINE_KEY.match(line)
        key = match[0] if match else b""
        if shown[key] > 0:
            shown[key] -= 1
        else:
            kept.append(line)
    return b"".join(kept)

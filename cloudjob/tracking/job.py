"""One submitted job: its status, log, outputs and removal."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudjob.backends import handles
from cloudjob.backends.base import Backend
from cloudjob.errors import JobNotFound, UsageError
from cloudjob.home import records_path
from cloudjob.home.records import JobRecord, Records
from cloudjob.model import grid
from cloudjob.model.rules import is_remote
from cloudjob.model.text import counted, one_line
from cloudjob.notify import start
from cloudjob.package import contents
from cloudjob.package.revision import Revision
from cloudjob.store.base import RETRY_S, Expiring, ObjectStore
from cloudjob.tracking import descriptions
from cloudjob.tracking.access import JobAccess
from jobentry.contract.names import CLOUDJOB_S3_SESSION_TOKEN, STORE_KEYS
from jobentry.contract.packages import Entry
from jobentry.contract.paths import JobPaths

# What only some commands use is imported where it is used: every submit imports this module.
if TYPE_CHECKING:
    from cloudjob.backends.native import Event, Metric, NativeStatus
    from cloudjob.model import attached
    from cloudjob.model.status import JobStatus, Phase
    from cloudjob.tracking.forwarding import Forwarding
    from cloudjob.tracking.journals import Journals
    from cloudjob.tracking.log import LogLine, LogPiece, OnJournal
    from cloudjob.tracking.metrics import Column, MetricPoint, MetricReader, Metrics
    from cloudjob.tracking.outputs import Outputs
    from cloudjob.tracking.profile import JobProfile
    from cloudjob.tracking.stacks import JobStacks
    from cloudjob.tracking.status_reader import StatusReader
    from jobentry.contract.preflight import Report

# The polling interval while a job is being submitted.
_SENT_POLL_S = 0.1
# The longest profile of a rank, in seconds.
_MOST_PROFILE_S = 600.0


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
        self._access = JobAccess(record, backend, home, store)
        self._backend = backend

    @property
    def _reader(self) -> StatusReader:
        """The reader of its status, which a submit that does not follow the job does not need."""
        reader: StatusReader | None = vars(self).get("_status_reader")
        if reader is None:
            from cloudjob.tracking.status_reader import StatusReader

            # All threads get the one that is set first.
            reader = vars(self).setdefault("_status_reader", StatusReader(self._access))
        return reader

    def __repr__(self) -> str:
        state = f" {self.last_status.state}" if self.last_status else ""
        return f"<Job {self.handle or self.id}{state}>"

    def _repr_html_(self) -> str:
        """Return a table for a notebook; the platform is not queried."""
        from cloudjob.model import html

        if self.last_status is not None:
            return html.table(self.last_status.facts(self.handle))
        return html.table([("job", self.id), ("handle", self.handle), ("nodes", self.nodes)])

    # -- identity ---------------------------------------------------------------------------------

    @property
    def id(self) -> str:
        """The job's id."""
        return self._access.record.job

    @property
    def handle(self) -> str:
        """``backend://…/id``."""
        return self._access.record.handle

    @property
    def backend_name(self) -> str:
        """The name of its backend."""
        return self._access.record.backend

    @property
    def submitted_by(self) -> str:
        """``user@machine``; empty for a job of an older version of cloudjob."""
        return self._access.record.submitted_by

    @property
    def sweep(self) -> str:
        """The id of the sweep that it belongs to; empty if it belongs to none."""
        return grid.sweep_of(self.id)

    def sweep_values(self) -> dict[str, str]:
        """Return the values that the job has in its sweep, by name; none without a sweep."""
        sweep = self._access.submission().get("sweep")
        values = sweep.get("values") if isinstance(sweep, dict) else None
        return {str(k): str(v) for k, v in values.items()} if isinstance(values, dict) else {}

    @property
    def platform(self) -> str:
        """The id of the platform: equal for all jobs whose statuses one request can return."""
        return f"{handles.platform(self.handle)} {self._access.record.home}"

    @property
    def code_digest(self) -> str:
        """The digest of its package."""
        return self._access.record.code_digest

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return self._access.record.nodes

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self._access.record.nodes * self._access.record.procs_per_node

    @property
    def git_commit(self) -> str:
        """The git commit of its source, and whether there were uncommitted changes; else ""."""
        revision = self._access.submission().get("git")
        if not isinstance(revision, dict) or not isinstance(revision.get("commit"), str):
            return ""
        return str(
            Revision(one_line(revision["commit"]), revision.get("is_changed") is True or None)
        )

    def spec(self) -> dict[str, Any]:
        """Return the submitter's description of the job, with secrets as ``***``, for people.

        Others may have written it (``is_ours``); ``copied_spec`` returns what a copy takes of it.

        Raises:
            UsageError: It was submitted by a cloudjob version that did not record descriptions.
        """
        values = self._access.described()
        if not values:
            raise UsageError(f"reading the description of {self.id}: it was not recorded")
        return values

    @property
    def is_ours(self) -> bool:
        """Whether it was submitted with this state folder; else it was attached from a store."""
        return self._access.record.is_ours

    def copied_spec(self) -> attached.Described:
        """Return what of the description a copy takes, and what it leaves out.

        Everything is taken of a job that was submitted here, and of any other what can do no harm.
        """
        from cloudjob.model import attached

        return attached.Described(self.spec(), {}) if self.is_ours else attached.split(self.spec())

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

    def code_files(self) -> list[Entry]:
        """Return the files, folders and links of its package, by name.

        Raises:
            StoreError: The package is no longer in the store, or cannot be read.
        """
        return contents.read(self._access.store, JobPaths(self.id).code)

    def code_contents(self, digests: Collection[str], *, limit_bytes: int) -> dict[str, bytes]:
        """Return the contents of files of its package by digest, without those that are larger.

        Raises:
            StoreError: The package is no longer in the store, or cannot be read.
        """
        key = JobPaths(self.id).code
        return contents.read_files(self._access.store, key, digests, limit_bytes=limit_bytes)

    # -- status -----------------------------------------------------------------------------------

    def need_ended(self, doing: str) -> None:
        """Check that the job has ended.

        Raises:
            UsageError: It waits or runs, so that ``doing`` is not possible.
        """
        self._reader.need_ended(doing)

    def status(self) -> JobStatus:
        """Return the status of the job; if the store does not answer, this takes a few seconds."""
        return self._reader.status()

    @property
    def last_status(self) -> JobStatus | None:
        """The last known status, None if there is none yet; no request is sent."""
        return self._reader.last

    @property
    def has_final_status(self) -> bool:
        """Whether its final status is in the local records, so that the platform is not needed."""
        return bool(self._access.record.final_json)

    def status_json(self) -> str:
        """Return the JSON of ``last_status``, or of ``status`` if there is none yet."""
        return self._reader.json()

    def need_here(self, doing: str) -> None:
        """Check that the last status is not one that only another machine knows.

        Raises:
            RunsElsewhere: It is, so this machine cannot do what ``doing`` says.
        """
        self._reader.need_here(doing)

    @property
    def is_over(self) -> bool:
        """Whether the last status is final: the job has ended, or its platform does not know it."""
        return self.last_status is not None and self.last_status.is_over

    def statuses(self, handles: Sequence[str]) -> Mapping[str, NativeStatus | None]:
        """Return the statuses of several jobs on the platform of this one."""
        return self._backend.statuses(handles)

    def status_in_list(self, native: NativeStatus | None) -> JobStatus:
        """Return the status of a job from a list of its platform's jobs.

        Args:
            native: Its status in the list; None if the job is not in it.
        """
        return self._reader.from_list(native)

    def unknown(self, why: str) -> JobStatus:
        """Return the status of a job whose platform cannot be queried."""
        return self._reader.unknown(why)

    def wait(
        self,
        *,
        timeout_s: float | None = None,
        check: bool = False,
        on_status: Callable[[JobStatus], None] | None = None,
        record_s: float = RETRY_S,
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
        status = self._reader.wait(end_s, record_s, on_status or (lambda _: None))
        if check:
            self._reader.need_success(status)
        return status

    def cancel(self, *, is_urgent: bool = False) -> None:
        """Cancel the job, unless it has ended.

        If the job is still being submitted, wait for the submit to complete, then cancel the job.
        """
        while self._access.is_being_sent():
            time.sleep(_SENT_POLL_S)
        if self.handle:
            self._backend.cancel(self.handle, is_urgent=is_urgent)

    def settle_notifications(self) -> str:
        """Send the notifications due after the end of a job; return why that failed, else "".

        This waits a few seconds for the job's notifier, and sends them itself if it was killed.
        """
        if self.last_status is None or not self.is_over:
            return ""
        from cloudjob.notify import message

        return start.settle(
            self._access.home, message.of_end(self.last_status), self._access.spec()
        )

    @property
    def notification_failure(self) -> str:
        """Why notifications of the job were not sent; empty if they were or may still be."""
        return start.failure(self._access.home, self.id)

    # -- log --------------------------------------------------------------------------------------

    def pieces(  # noqa: PLR0913 (each is a choice of a reader)
        self,
        node: int | None = None,
        *,
        follow: bool,
        is_exact: bool = False,
        is_stored: bool = False,
        attempt: int | None = None,
        is_timed: bool = False,
        on_journal: OnJournal | None = None,
    ) -> Iterator[LogPiece]:
        """Yield the log as it arrives; an empty piece means that there is nothing new.

        If the platform has no log of a node, it is read from the job's store.

        Args:
            is_exact: Show secrets; else they are ``***``.
            is_stored: Read the logs in the store, not those of the platform.
            attempt: Only that of one attempt, from 1 on, which is read from the store.
            is_timed: Add times to the pieces, which makes them smaller.
            on_journal: Called with the journal lines of each node, which the log leaves out.
        """
        from cloudjob.tracking import log

        if is_stored or attempt is not None:
            pieces = log.read_stored(self._access, node, attempt)
        else:
            pieces = log.read(self._access, node, follow=follow)
        return log.pieces(pieces, is_exact=is_exact, is_timed=is_timed, on_journal=on_journal)

    def logs(
        self,
        node: int | None = None,
        rank: int | None = None,
        *,
        follow: bool = False,
        is_exact: bool = False,
        is_stored: bool = False,
        attempt: int | None = None,
    ) -> Iterator[LogLine]:
        """Yield the log line by line, of one node or rank if given.

        Lines of one node are in order.

        Args:
            follow: Wait for new lines until the job has ended.
            is_exact: Yield the exact output of the ranks; else secrets are ``***``.
            is_stored: Read the logs in the job's store, not those of its platform.
            attempt: Only that of one attempt of a job with retries, from 1 on.

        Raises:
            UsageError: The job had no such attempt.
        """
        from cloudjob.tracking import log

        pieces = self.pieces(
            node, follow=follow, is_exact=is_exact, is_stored=is_stored, attempt=attempt
        )
        return (line for line in log.lines_of(pieces) if rank is None or line.rank == rank)

    # -- journals, metrics and resources ----------------------------------------------------------

    def journals(self) -> Journals:
        """Return the journals of the nodes so far: phases, ranks and resources.

        The journals of a running job are in its log; after its end, each node has stored its own.

        Raises:
            CloudJobError: Neither can be read.
        """
        from cloudjob.tracking import journals

        return journals.read(self._access, has_ended=self.status().state.is_final)

    def latest(self) -> Journals:
        """Return the phases, ranks and resources that are found at the ends of the nodes' logs.

        After a few seconds, this returns what was found until then.
        """
        from cloudjob.tracking import journals

        return journals.at_log_ends(self._access) if self.handle else journals.Journals()

    def phases(self) -> tuple[Phase, ...]:
        """Return the phases of the nodes so far that are found at the ends of their logs."""
        status = self.status()
        if status.phases or status.state.is_final:
            return status.phases
        return self.latest().phases

    def metrics(self, patterns: Mapping[str, str] | None = None) -> Metrics:
        """Return what ``training_metrics`` returns, which ``to_pandas()`` makes a table.

        Raises:
            CloudJobError: The log or the outputs cannot be read.
        """
        from cloudjob.tracking.metrics import Metrics

        return Metrics(self.metric_points(patterns))

    def training_metrics(self, patterns: Mapping[str, str] | None = None) -> list[MetricPoint]:
        """Return the metrics that ranks have printed and those in the outputs' event files.

        Args:
            patterns: Regular expressions by metric, besides those of the job.

        Raises:
            CloudJobError: The log or the outputs cannot be read.
        """
        return list(self.metric_points(patterns))

    def metric_points(self, patterns: Mapping[str, str] | None = None) -> Iterator[MetricPoint]:
        """Yield what ``training_metrics`` returns, without keeping it: there may be millions.

        Raises:
            CloudJobError: The log or the outputs cannot be read.
        """
        from cloudjob.tracking.metrics import points_of

        for columns in self.metric_columns(patterns):
            yield from points_of(columns)

    def metric_columns(self, patterns: Mapping[str, str] | None = None) -> Iterator[list[Column]]:
        """Yield what ``metric_points`` yields without an object for each value, in parts.

        Raises:
            CloudJobError: The log or the outputs cannot be read.
        """
        from cloudjob.tracking import log
        from cloudjob.tracking.metrics import Column

        reader = self.metric_reader(patterns)
        if self.handle:
            # Checked before reading: the last line of a running job may end within a number.
            is_over = self.status().state.is_final
            for node, data in log.read(self._access, None, follow=False):
                yield from reader.columns(node, data)
            if is_over:
                yield from reader.last_columns()
        yield [Column(point, [0], [point.step], [point.value]) for point in self.event_metrics()]

    def thinned_metrics(self) -> list[MetricPoint]:
        """Return what charts show of ``training_metrics``.

        Raises:
            CloudJobError: The log or the outputs cannot be read.
        """
        from cloudjob.tracking.metrics import thinned

        return thinned(chain.from_iterable(self.metric_columns()))

    def metric_reader(self, patterns: Mapping[str, str] | None = None) -> MetricReader:
        """Return a reader that finds the metrics of this job in its log.

        Raises:
            CloudJobError: A pattern cannot be used, or the records cannot be read.
        """
        from cloudjob.tracking.metrics import MetricReader

        spec = self._access.spec()
        own_patterns = spec.get("metrics") or {}
        detects = spec.get("detect_metrics") != "off"
        return MetricReader({**own_patterns, **(patterns or {})}, detects=detects)

    def event_metrics(self) -> list[MetricPoint]:
        """Return the metrics in the event files of the outputs.

        Raises:
            CloudJobError: The outputs cannot be read.
        """
        from cloudjob.tracking import event_files, outputs

        return event_files.read_all(outputs.locations_of(self._access).found)

    def events(self) -> list[Event]:
        """Return the platform's events for the job, oldest first.

        Raises:
            UsageError: The platform records no events.
        """
        return self._backend.events(self._platform_handle)

    def platform_resources(self) -> list[Metric]:
        """Return the resources that each node has used, as measured by its platform.

        Raises:
            UsageError: The platform does not measure resources.
        """
        return self._backend.metrics(self._platform_handle)

    def resources(self) -> list[Metric]:
        """Return the resources that each node has used, by its platform or else by the node."""
        from cloudjob.backends.native import Metric
        from cloudjob.tracking import journals

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
        """The handle, or one that matches no job while this one is still being submitted."""
        return self.handle or f"{self._access.record.backend}://{self.id}"

    def stacks(
        self, rank: int | None = None, *, with_threads: bool = False, with_native: bool = False
    ) -> JobStacks:
        """Return what the ranks execute right now: file, line and function of each call.

        Python programs are neither stopped nor signalled, unless their native calls are asked for.

        Args:
            rank: Only this rank and the processes that it has started.
            with_threads: Also other threads than the main one of each process.
            with_native: Also calls of C and C++ code, approximately. A thread that runs is stopped
                for less than a millisecond. Those of programs without Python are always returned.

        Raises:
            UsageError: The job does not run, or its backend cannot reach its nodes.
            BackendError: The job does not answer.
        """
        from cloudjob.tracking import stacks

        self._need_running_rank(f"reading the stacks of {self.id}", rank)
        return stacks.read(
            self._ask, self.handle, rank, with_threads=with_threads, with_native=with_native
        )

    @property
    def is_asked_through_store(self) -> bool:
        """Whether a question to its nodes travels through its store, which takes half a minute."""
        return self._backend.copies_files

    def _ask(self, question: bytes) -> bytes:
        if not self.is_asked_through_store:
            return self._backend.ask(self.handle, question)
        from cloudjob.tracking import store_requests

        store_requests.need_access(self._access)
        return store_requests.ask(self._access.store, self.id, question)

    def profile(self, rank: int = 0, *, seconds: float = 30.0) -> JobProfile:
        """Look at the main thread of a rank 50 times a second, and return where it spends its time.

        The rank is neither stopped nor signalled. A rank that ends meanwhile has a shorter profile.

        Args:
            seconds: For how long to look at it: up to 600.

        Raises:
            UsageError: The job does not run, has no such rank, or its backend cannot reach its
                nodes.
            BackendError: The job does not answer, or the rank cannot be read.
        """
        from cloudjob.tracking import profile

        doing = f"profiling rank {rank} of {self.id}"
        if not 0 < seconds <= _MOST_PROFILE_S:
            raise UsageError(f"{doing}: for {seconds:g} s", hint="seconds: 1 to 600")
        self._need_running_rank(doing, rank)
        return profile.take(self._backend, self.handle, self.id, rank, seconds)

    def _need_running_rank(self, doing: str, rank: int | None) -> None:
        """Refuse a job that does not run or does not have this rank."""
        self._reader.need_running(doing)
        if rank is not None and self.ranks and rank >= self.ranks:
            raise UsageError(
                f"{doing}: it has {counted(self.ranks, 'rank')}",
                hint=f"rank: 0 to {self.ranks - 1}",
            )

    def command_on(
        self,
        command: Sequence[str],
        *,
        node: int = 0,
        rank: int | None = None,
        is_terminal: bool = False,
    ) -> list[str]:
        """Return the command of this machine that runs a command on a node, as a rank would.

        The command gets the environment and the folder of the rank; its input, output and exit code
        are those of the returned command.

        Args:
            node: The node; its lowest rank is the model, or its entry if no rank runs.
            rank: This rank instead, on its node.
            is_terminal: Whether the input is a terminal, and the command needs one.

        Raises:
            UsageError: The job does not run, has no such node or rank, or its backend cannot
                start a command on its nodes.
            BackendError: The node does not run.
        """
        if rank is not None:
            node = rank // max(1, self.ranks // self.nodes)
        model = [] if rank is None else ["--rank", str(rank)]
        arguments = ["--enter", *model, "--", *command]
        return self._node_half(node, arguments, is_terminal=is_terminal)

    def forwarding(
        self,
        remote: int,
        *,
        node: int = 0,
        port: int = 0,
        on_refusal: Callable[[int | None], None] = lambda _: None,
    ) -> Forwarding:
        """Listen on a port of this machine; ``serve()`` passes its connections on to a node.

        Args:
            remote: The port of the node.
            port: The port of this machine; 0 for any free one.
            on_refusal: Called with the id of another user whose program was refused; None for a
                program that has left already.

        Raises:
            OSError: The port is taken.
            UsageError: As for ``command_on``.
            BackendError: As for ``command_on``.
        """
        from cloudjob.tracking.forwarding import Forwarding

        argv = self._node_half(node, ["--connect", str(remote)], is_terminal=False)
        return Forwarding(port, argv, on_refusal)

    def _node_half(self, node: int, arguments: Sequence[str], *, is_terminal: bool) -> list[str]:
        """Return the command of this machine that starts the node half on a node."""
        doing = f"entering a node of {self.id}"
        self._reader.need_running(doing)
        if not 0 <= node < self.nodes:
            size = f"{counted(self.nodes, 'node')} and {counted(self.ranks, 'rank')}"
            raise UsageError(f"{doing}: it has {size}", hint="they are numbered from 0")
        return self._backend.command_on(self.handle, node, arguments, is_terminal=is_terminal)

    # -- store ------------------------------------------------------------------------------------

    def outputs(self, name: str = "", *, is_own: bool = False) -> Outputs:
        """Return the output files stored so far; each name starts with the name of its output.

        Args:
            name: Only the files of this output.
            is_own: Only the files in the job's own store, which ``remove`` deletes.

        Raises:
            UsageError: The job has no output of this name.
        """
        from cloudjob.tracking import outputs

        locations, refused = outputs.locations_of(self._access)
        names = [*(location.name for location in locations), *refused]
        if name and name not in names:
            allowed = f"it has {', '.join(names)}" if names else "it has none"
            raise UsageError(f"reading the outputs of {self.id}: no output {name!r}", hint=allowed)
        return outputs.Outputs(
            [p for p in locations if (p.prefix or not is_own) and name in ("", p.name)],
            {} if is_own else {key: uri for key, uri in refused.items() if name in ("", key)},
        )

    def preflight_report(self) -> Report | None:
        """Return what the job found out about its nodes before the ranks started.

        Only a job with ``preflight: full`` stores that; None for any other.

        Raises:
            StoreError: The store cannot be read, or what is there is no report.
        """
        from cloudjob.tracking import preflight

        return preflight.read(self._access)

    def refresh_keys(self) -> float:
        """Replace the store keys that the nodes got from the submit with the current ones.

        A node uses the new keys once the store has refused the old ones.

        Returns:
            When the new keys expire, in seconds since 1970; 0 for never or unknown.

        Raises:
            UsageError: The job has ended, or its nodes have no keys or cannot be given new ones.
        """
        doing = f"refreshing the keys of {self.id}"
        if not self.is_ours:
            raise UsageError(
                f"{doing}: {self.submitted_by} submitted it, and its nodes would get your keys",
                hint="where it was submitted, `cloudjob refresh` works",
            )
        if self.status().state.is_final:
            raise UsageError(f"{doing}: it has ended")
        store = self._access.open_store(self._access.record.store)
        keys_sent = self._access.submission().get("access") or {}
        if not isinstance(store, Expiring) or CLOUDJOB_S3_SESSION_TOKEN not in keys_sent:
            raise UsageError(f"{doing}: its nodes have no temporary keys of the store")
        access = store.access()
        self._backend.refresh(self.handle, {name: access.get(name, "") for name in STORE_KEYS})
        return store.keys_end_at()

    def remove(self, *, is_forced: bool = False) -> None:
        """Remove the job from its platform, its store and the local records.

        Args:
            is_forced: Remove it even if it may still run on another machine.

        Raises:
            RunsElsewhere: Only another machine can tell whether the job still runs.
        """
        if not (is_forced or is_remote(self.backend_name)):
            self.status()
            self.need_here("removing")
        start.forget(self._access.home, self.id)
        if self.handle and (self.is_ours or self._is_on_platform()):
            self._backend.remove(self.handle)
        store = self._access.store
        descriptions.delete_objects(store, self.id)
        with contextlib.suppress(JobNotFound), Records(records_path(self._access.home)) as db:
            db.remove(self.id)

    def _is_on_platform(self) -> bool:
        """Whether the platform has the job; what else has its name there is not the job's."""
        try:
            self._backend.status(self.handle)
        except JobNotFound:
            return False
        return True


def _flat(job: Job) -> dict[str, Any]:
    texts = {"code.digest": job.code_digest}
    if job.git_commit:
        texts["code.git_commit"] = job.git_commit
    for key, value in job.spec().items():
        if isinstance(value, dict):
            texts.update({f"{key}.{name}": item for name, item in value.items()})
        else:
            texts[key] = value
    return texts

"""One attempt at a job, from the start of its nodes until all of them have ended."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass, field

from cloudjob.backends import supervision
from cloudjob.backends.supervision import Deed, Lead, Past, Policy
from cloudjob.emulator import models
from cloudjob.emulator.database import JobRow, StopRequest
from cloudjob.emulator.job_context import JobContext
from cloudjob.emulator.node_logs import Writer
from cloudjob.emulator.nodes import NodeState
from cloudjob.emulator.staging import Uploader
from cloudjob.errors import CloudJobError, JobNotFound

_IDLE_PERCENT = 0.5
_ENGINE_S = 60.0


@dataclass(slots=True)
class AttemptEnd:
    """The end of an attempt."""

    states: list[NodeState]
    is_stopped: bool = False
    lost: frozenset[int] = frozenset()
    is_hung: bool = False

    @property
    def is_good(self) -> bool:
        """Whether every node succeeded."""
        return all(state.exit_code == 0 for state in self.states)

    @property
    def first(self) -> int:
        """The node that failed first."""
        if self.lost:
            return min(self.lost)
        nodes = [supervision.Node(False, state.exit_code, state.ended_at) for state in self.states]
        return supervision.first_failed(nodes) or 0


@dataclass(slots=True)
class AttemptWatch:
    """Watches the nodes of one attempt.

    Args:
        lost: The nodes that an injected fault has ended.
    """

    job: JobContext
    uploader: Uploader
    lost: set[int]
    _last_upload: float = field(default_factory=time.monotonic)
    _last_metric: float = field(default_factory=time.monotonic)
    # What was done to the nodes, and when each was first seen to have ended, by our own clock.
    _past: Past = field(default_factory=Past)
    _ended: dict[int, float] = field(default_factory=dict)
    _is_hung: bool = False
    # When the job was last active, and the size of its logs then.
    _busy: tuple[float, int] = field(default_factory=lambda: (time.monotonic(), 0))

    def watch(self, row: JobRow) -> AttemptEnd:
        """Wait until all nodes have ended; also upload, measure, and stop the job on request."""
        service = self.job.service
        handle, key = row.run.handle, row.run.log_key
        pump = threading.Thread(target=self._store_logs, args=(row,), daemon=True)
        pump.start()
        poll_s = service.settings.poll_s * (5 if service.runtime.kind == "docker" else 1)
        while True:
            states = self._states(row)
            if all(state.exit_code is not None for state in states):
                break
            row = self.job.existing_row()
            self._heed_stop(row)
            self._supervise(handle, states)
            self._do_periodic(row, handle)
            time.sleep(poll_s)
        pump.join(60)
        row = self.job.existing_row()
        for index, state in enumerate(states):
            self.job.task_event(index, f"Training finished. Exit code {state.exit_code}.")
            message = f"Training end with return code: {state.exit_code}"
            self.job.log(index).add_line(key, message, is_after=True)
        return AttemptEnd(states, bool(row.stop_request), frozenset(self.lost), self._is_hung)

    def _states(self, row: JobRow) -> list[NodeState]:
        """Return the state of each node; retry for a minute if the engine does not answer."""
        end = time.monotonic() + _ENGINE_S
        while True:
            try:
                return self.job.service.runtime.states(row.run.handle, row.nodes)
            except JobNotFound:
                raise
            except CloudJobError:
                if time.monotonic() > end:
                    raise
                time.sleep(1)

    def _heed_stop(self, row: JobRow) -> None:
        """Have the nodes ended if the job was stopped, or has run as long as it may."""
        if not row.stop_request and self._is_overdue(row):
            self.job.event("Training job has run as long as auto_stop allows.", "Warning")
            self.job.service.database.change_phase(
                row.id, ("Running", "Pending"), "Terminating", stop_request=StopRequest.STOP
            )
            row = self.job.existing_row()
        if not row.stop_request:
            return
        if self._past.cancelled_at is None:
            self._past = self._past._replace(cancelled_at=time.monotonic())
        self._hurry(is_urgent=row.stop_request is StopRequest.DELETE)

    def _hurry(self, *, is_urgent: bool) -> None:
        """Have the nodes killed without a grace period, if it is urgent."""
        if is_urgent and not self._past.is_urgent:
            self._past = self._past._replace(is_urgent=True, killed_at=None)

    def _is_overdue(self, row: JobRow) -> bool:
        stop = row.body.spec.auto_stop
        if not stop or not row.start_ms:
            return False
        limit_s = stop.duration * self.job.service.settings.hour_s
        return time.time() - row.start_ms / 1000 > limit_s

    def _supervise(self, handle: str, states: list[NodeState]) -> None:
        """End the nodes when one has failed or the job was stopped, as the platform does."""
        now = time.monotonic()
        nodes = []
        for index, state in enumerate(states):
            is_running = state.exit_code is None
            ended = math.inf if is_running else self._ended.setdefault(index, now)
            nodes.append(supervision.Node(is_running, state.exit_code, ended))
        # SIGTERM first, and SIGKILL after the grace period, whatever the reason.
        grace_s = self.job.service.settings.grace_s
        policy = Policy(Lead.ALL, leave_s=grace_s, cancel_s=grace_s)
        for action in supervision.decide(nodes, policy, self._past, now):
            is_kill = action.deed is Deed.KILL
            self._past = (
                self._past._replace(killed_at=now)
                if is_kill
                else self._past._replace(is_cancel_told=True, is_end_told=True)
            )
            self.job.service.runtime.stop(handle, is_urgent=is_kill)

    def _do_periodic(self, row: JobRow, handle: str) -> None:
        settings = self.job.service.settings
        now = time.monotonic()
        if now - self._last_upload >= settings.upload_period_s:
            self._last_upload = now
            self.uploader.upload(row)
            self.uploader.export_logs(row)
        if now - self._last_metric >= settings.metric_period_s:
            self._last_metric = now
            used = self.job.service.runtime.usage(handle, row.nodes)
            for index, (cpu, memory) in enumerate(used):
                self.job.service.database.add_metric(row.id, models.task_of(index), cpu, memory)
            self._look_for_hang(row, max(cpu for cpu, _ in used))

    def _look_for_hang(self, row: JobRow, cpu: float) -> None:
        """Stop a job with hang detection that has neither computed nor written for ``hang_s``."""
        if not row.body.metadata.has(models.RETRY_HANG):
            return
        now = time.monotonic()
        size = sum(self.job.log(index).size_bytes for index in range(row.nodes))
        if cpu >= _IDLE_PERCENT or size != self._busy[1]:
            self._busy = (now, size)
        elif not self._is_hung and now - self._busy[0] > self.job.service.settings.hang_s:
            self._is_hung = True
            self.job.event("Training job hangs: no node computes or writes.", "Warning")
            self._hurry(is_urgent=True)

    def _store_logs(self, row: JobRow) -> None:
        """Store the logs of all nodes until their end."""
        limit = self.job.service.settings.log_limit_bytes
        writers = []
        for index in range(row.nodes):
            log = self.job.log(index)
            # Restarted machines yield their complete log again, from the start.
            earlier = [key_of(row, attempt) for attempt in _attempts_before(row)]
            size = sum(path.stat().st_size for path in map(log.run_path, earlier) if path.exists())
            writers.append(Writer(log.run_path(row.run.log_key), limit, size))
        try:
            for index, data in self.job.service.runtime.logs(row.run.handle):
                if 0 <= index < row.nodes and data:
                    writers[index].write(data)
        except CloudJobError as error:
            self.job.event(f"Collecting logs failed: {error.message}", "Warning")
        except OSError:
            pass  # the job has been deleted


def key_of(row: JobRow, attempt: int) -> str:
    """Return a short name of an attempt, unique among all jobs."""
    return f"{row.id[:8]}{row.id[-6:]}-{attempt}"


def _attempts_before(row: JobRow) -> range:
    """Return the earlier attempts that ran on the machines of this one."""
    first = int(row.run.key.rpartition("-")[2])
    return range(first, row.run.attempt)

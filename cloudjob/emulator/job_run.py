"""One job, from its place in the queue to its end, restarts included."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from cloudjob.emulator import models
from cloudjob.emulator.database import JobRow
from cloudjob.emulator.job_context import JobContext
from cloudjob.emulator.node_logs import Writer
from cloudjob.emulator.nodes import NodeState
from cloudjob.emulator.staging import Failed, Uploader, check_nodes, image_of, prepare
from cloudjob.errors import CloudJobError, JobNotFound
from cloudjob.times import now_ms
from jobentry.trees import remove_tree

_IDLE_PERCENT = 0.5
_ENGINE_S = 60.0
DELETED = 2


@dataclass(slots=True)
class _End:
    """The end of an attempt."""

    states: list[NodeState]
    is_stopped: bool = False
    lost: frozenset[int] = frozenset()
    is_hung: bool = False

    @property
    def is_good(self) -> bool:
        return all(state.exit_code == 0 for state in self.states)

    @property
    def first(self) -> int:
        """The node that failed first."""
        if self.lost:
            return min(self.lost)
        bad = [
            (state.ended_at, index) for index, state in enumerate(self.states) if state.exit_code
        ]
        return min(bad)[1] if bad else 0


@dataclass(slots=True)
class JobRun:
    """Runs one job in a thread of its own."""

    job: JobContext
    lost: set[int] = field(default_factory=set)
    _uploader: Uploader = field(init=False)
    _last_upload: float = 0.0
    _last_metric: float = 0.0
    _stop_at: float = 0.0
    _is_killed: bool = False
    _is_hung: bool = False
    _has_started: bool = False
    # When the job was last active, and the size of its logs then.
    _busy: tuple[float, int] = (0.0, 0)

    def __post_init__(self) -> None:
        self._uploader = Uploader(self.job)

    # -- from start to end ----------------------------------------------------------------------

    def run(self) -> None:
        """Run the job until it ends, fails or is deleted."""
        try:
            self._run_attempts()
        except sqlite3.Error:
            raise  # the queue resumes the job when the database can be written again
        except Exception as error:  # noqa: BLE001 (whatever it is, the job must not hang for ever)
            self.job.event(f"The platform failed: {error!r}", "Error")
            self._end_all()
            self._finish("Abnormal", secondary="Unknown")
        row = self.job.row()
        if row and row.is_stopping == DELETED:
            self.forget()

    def _run_attempts(self) -> None:
        row = self.job.existing_row()
        while True:
            if row.is_stopping and not self._has_nodes(row):
                self._finish("Terminated")
                return
            try:
                self._ensure_nodes(row)
            except Failed as error:
                self.job.event(str(error), "Error")
                self._end_all()
                self._finish("Failed")
                return
            row = self.job.existing_row()
            try:
                end = self._watch(row)
            except JobNotFound:
                if not self.job.existing_row().is_stopping:
                    raise
                # It was stopped before any of its nodes had started.
                self._finish("Terminated")
                return
            row = self.job.existing_row()
            self._close_record(row, end)
            if not self._prepare_retry(row, end):
                self._complete(row, end)
                return
            row = self.job.existing_row()

    def _has_nodes(self, row: JobRow) -> bool:
        """Whether an attempt has nodes: a crash may have prevented their start."""
        if not row.run.get("handle"):
            return False
        try:
            self.job.service.machines.states(row.run["handle"], row.nodes)
        except JobNotFound:
            return False
        return True

    def _ensure_nodes(self, row: JobRow) -> None:
        """Start the nodes of an attempt, or those that a crash left unstarted."""
        if not row.run.get("handle"):
            self._begin(row)
        elif not self._has_started and not row.is_stopping:
            self._start(row, row.run["key"], row.run["image"])
        self._has_started = True

    def forget(self) -> None:
        """Remove everything of the job."""
        self._end_all()
        self.job.service.database.remove_job(self.job.id)
        with contextlib.suppress(OSError):
            remove_tree(self.job.folder)

    # -- begin --------------------------------------------------------------------------------

    def _begin(self, row: JobRow) -> None:
        """Prepare the nodes and start them."""
        service = self.job.service
        run = row.run
        key = _key(row, int(run.get("attempt", 0)))
        is_in_place = bool(run.get("is_in_place"))
        check_nodes(self.job, row)
        image = image_of(self.job, row)
        if not is_in_place:
            self._uploader.forget()
            prepare(self.job, row, key)
        handle = service.machines.handle(key)
        # Stored before the start: after a crash in between, the handle finds no nodes.
        run.update(key=key, log_key=key, handle=handle, image=image, is_in_place=False)
        _open_record(run, is_in_place=is_in_place)
        service.database.update_job(row.id, run=run)
        self._start(row, key, image)

    def _start(self, row: JobRow, key: str, image: str) -> None:
        service = self.job.service
        try:
            service.machines.start(row, key, self.job.nodes, image)
        except CloudJobError as error:
            raise Failed(f"Starting the nodes failed: {error.message}") from error
        values = {} if row.start_ms else {"start_ms": now_ms()}
        if not service.database.change_phase(row.id, ("Pending", "Creating"), "Running", **values):
            return
        self.job.event("Training job is running.")
        for index in range(row.nodes):
            self.job.event(f"[worker-{index}] training started.", source="Task")

    # -- while it runs ------------------------------------------------------------------------

    def _watch(self, row: JobRow) -> _End:
        """Wait until all nodes have ended; meanwhile upload, measure, and stop the job if asked."""
        service = self.job.service
        handle, key = row.run["handle"], row.run["log_key"]
        pump = threading.Thread(target=self._store_logs, args=(row,), daemon=True)
        pump.start()
        is_stopped = False
        self._last_upload = self._last_metric = time.monotonic()
        self._busy = (time.monotonic(), 0)
        poll_s = service.settings.poll_s * (5 if service.machines.kind == "docker" else 1)
        while True:
            states = self._states(row)
            if all(state.exit_code is not None for state in states):
                break
            row = self.job.existing_row()
            is_stopped = self._stop_if_asked(row, handle) or is_stopped
            self._follow_failure(row, handle, states)
            self._do_periodic(row, handle)
            time.sleep(poll_s)
        pump.join(60)
        row = self.job.existing_row()
        is_stopped = is_stopped or bool(row.is_stopping)
        for index, state in enumerate(states):
            words = f"Training finished. Exit code {state.exit_code}."
            self.job.event(f"[worker-{index}] {words}", source="Task")
            words = f"Training end with return code: {state.exit_code}"
            self.job.log(index).add_line(key, words, is_after=True)
        return _End(states, is_stopped=is_stopped, lost=frozenset(self.lost), is_hung=self._is_hung)

    def _states(self, row: JobRow) -> list[NodeState]:
        """Return the state of each node; retry for a minute if the engine does not answer."""
        end = time.monotonic() + _ENGINE_S
        while True:
            try:
                return self.job.service.machines.states(row.run["handle"], row.nodes)
            except JobNotFound:
                raise
            except CloudJobError:
                if time.monotonic() > end:
                    raise
                time.sleep(1)

    def _stop_if_asked(self, row: JobRow, handle: str) -> bool:
        """End the job if it was stopped or its time is over; return whether that is so."""
        if not row.is_stopping and self._is_overdue(row):
            self.job.event("Training job has run as long as auto_stop allows.", "Warning")
            self.job.service.database.change_phase(
                row.id, ("Running", "Pending"), "Terminating", is_stopping=1
            )
            row = self.job.existing_row()
        if not row.is_stopping:
            return False
        self._stop_nodes(handle, is_urgent=row.is_stopping == DELETED)
        return True

    def _is_overdue(self, row: JobRow) -> bool:
        stop = row.body["spec"].get("auto_stop")
        if not stop or not row.start_ms:
            return False
        limit_s = float(stop["duration"]) * self.job.service.settings.hour_s
        return time.time() - row.start_ms / 1000 > limit_s

    def _follow_failure(self, row: JobRow, handle: str, states: list[NodeState]) -> None:
        """End the other nodes when one has failed, as the platform does."""
        if any(state.exit_code for state in states) and not row.is_stopping:
            self._stop_nodes(handle, is_urgent=False)

    def _stop_nodes(self, handle: str, *, is_urgent: bool) -> None:
        """Ask the nodes to end, and kill them after the grace period."""
        now = time.monotonic()
        is_first = not self._stop_at
        if is_first:
            self._stop_at = now
        is_late = now - self._stop_at > self.job.service.settings.grace_s
        if is_first or (is_late and not self._is_killed):
            self._is_killed = is_urgent or is_late
            self.job.service.machines.stop(handle, is_urgent=self._is_killed)

    def _do_periodic(self, row: JobRow, handle: str) -> None:
        settings = self.job.service.settings
        now = time.monotonic()
        if now - self._last_upload >= settings.upload_period_s:
            self._last_upload = now
            self._uploader.upload(row)
            self._uploader.export_logs(row)
        if now - self._last_metric >= settings.metric_period_s:
            self._last_metric = now
            used = self.job.service.machines.usage(handle, row.nodes)
            for index, (cpu, memory) in enumerate(used):
                self.job.service.database.add_metric(row.id, f"worker-{index}", cpu, memory)
            self._look_for_hang(row, handle, max(cpu for cpu, _ in used))

    def _look_for_hang(self, row: JobRow, handle: str, cpu: float) -> None:
        """Stop a job with hang detection that has neither computed nor written for ``hang_s``."""
        if row.body["metadata"]["annotations"].get(models.RETRY_HANG) != "true":
            return
        now = time.monotonic()
        size = sum(self.job.log(index).size_bytes for index in range(row.nodes))
        if cpu >= _IDLE_PERCENT or size != self._busy[1]:
            self._busy = (now, size)
        elif not self._is_hung and now - self._busy[0] > self.job.service.settings.hang_s:
            self._is_hung = True
            self.job.event("Training job hangs: no node computes or writes.", "Warning")
            self.job.service.machines.stop(handle, is_urgent=True)

    def _store_logs(self, row: JobRow) -> None:
        """Store the logs of all nodes until they end."""
        limit = self.job.service.settings.log_limit_bytes
        writers = []
        for index in range(row.nodes):
            log = self.job.log(index)
            # Restarted machines yield their whole log again, from the beginning.
            earlier = [_key(row, attempt) for attempt in _attempts_before(row)]
            size = sum(path.stat().st_size for path in map(log.run_path, earlier) if path.exists())
            writers.append(Writer(log.run_path(row.run["log_key"]), limit, size))
        try:
            for index, data in self.job.service.machines.logs(row.run["handle"]):
                if 0 <= index < row.nodes and data:
                    writers[index].write(data)
        except CloudJobError as error:
            self.job.event(f"Collecting logs failed: {error.message}", "Warning")
        except OSError:
            pass  # the job was deleted meanwhile

    # -- end ----------------------------------------------------------------------------------

    def _close_record(self, row: JobRow, end: _End) -> None:
        run = row.run
        statuses = []
        for index, state in enumerate(end.states):
            message = "the node was lost" if index in end.lost else state.note
            statuses.append(
                {"task": f"worker-{index}", "exit_code": state.exit_code, "message": message}
            )
        run["task_statuses"] = statuses
        if run.get("running_records"):
            record = run["running_records"][-1]
            record["end_at"] = int(time.time())
            if not end.is_good and not end.is_stopped:
                record["end_reason"] = _reason(end)
                record["end_related_task"] = f"worker-{end.first}"
        self.job.service.database.update_job(row.id, run=run)

    def _prepare_retry(self, row: JobRow, end: _End) -> bool:
        """Prepare the job for another attempt if it may have one; return whether it may."""
        if end.is_good or end.is_stopped:
            return False
        run = row.run
        restarts = int(run.get("restarts", 0))
        notes = row.body["metadata"]["annotations"]
        is_always = notes.get(models.RETRY_ALWAYS) == "true"
        wants = end.lost or is_always or end.is_hung
        if restarts >= models.retries(row.body) or not wants:
            return False
        self._uploader.upload(row)
        recover = "pod_reschedule" if end.lost else "proc_restart"
        if run.get("running_records"):
            run["running_records"][-1]["end_recover"] = recover
        attempt = int(run.get("attempt", 0)) + 1
        run.update(restarts=restarts + 1, attempt=attempt)
        if not end.lost and self._restart(run["handle"]):
            run.update(log_key=_key(row, attempt))
            _open_record(run, is_in_place=True)
        else:
            self._end_all()
            run.update(handle="", is_in_place=not end.lost)
        self.lost.clear()
        self._stop_at, self._is_killed, self._is_hung = 0.0, False, False
        self.job.service.database.update_job(row.id, run=run)
        self.job.event(
            f"Training job is restarted ({recover}), {restarts + 1} of {models.retries(row.body)}.",
            "Warning",
        )
        if end.lost:
            self.job.service.database.change_phase(row.id, ("Running",), "Pending")
        return True

    def _restart(self, handle: str) -> bool:
        try:
            return self.job.service.machines.restart(handle)
        except CloudJobError as error:
            self.job.event(f"Restarting in place failed: {error.message}", "Warning")
            return False

    def _complete(self, row: JobRow, end: _End) -> None:
        """Upload what is left, and store how the job ended."""
        problem = "" if row.is_stopping == DELETED else self._uploader.upload_the_rest(row)
        self._end_all()
        for index in range(row.nodes):
            words = "output-handler failed" if problem else "output-handler finalized"
            self.job.log(index).add_line(row.run["log_key"], words, is_after=True)
        if row.is_stopping != DELETED:
            self._uploader.export_logs(row)
        with contextlib.suppress(OSError):
            remove_tree(self.job.nodes)
        if end.is_stopped:
            self.job.event("Training job terminated.", "Warning")
            self._finish("Terminated")
        elif end.is_good and not problem:
            self.job.event("Training job completed.")
            self._finish("Completed")
        else:
            self.job.event("Training job failed.", "Error")
            self._finish("Failed")

    def _finish(self, phase: str, secondary: str = "") -> None:
        row = self.job.row()
        if row is None:
            return
        self.job.service.database.update_job(
            self.job.id, phase=phase, secondary=secondary or phase, end_ms=now_ms()
        )

    def _end_all(self) -> None:
        """Remove this attempt from the machines."""
        row = self.job.row()
        if row and row.run.get("handle"):
            with contextlib.suppress(CloudJobError):
                self.job.service.machines.remove(row.run["handle"])


def _key(row: JobRow, attempt: int) -> str:
    """Return a short name of an attempt, unique among all jobs."""
    return f"{row.id[:8]}{row.id[-6:]}-{attempt}"


def _attempts_before(row: JobRow) -> range:
    """Return the earlier attempts on the machines of this one."""
    first = int(row.run["key"].rpartition("-")[2])
    return range(first, int(row.run.get("attempt", 0)))


def _open_record(run: dict[str, Any], *, is_in_place: bool) -> None:
    kind = "restarted" if is_in_place else "init_or_rescheduled"
    record = {"start_at": int(time.time()), "start_type": kind}
    run.setdefault("running_records", []).append(record)


def _reason(end: _End) -> str:
    if end.is_hung:
        return "the job hung"
    if end.lost:
        return f"node of worker-{end.first} lost"
    state = end.states[end.first]
    return f"worker-{end.first} exited with code {state.exit_code}" + (
        f": {state.note}" if state.note else ""
    )

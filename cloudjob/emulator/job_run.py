"""Runs one job from the queue to its end, with all its attempts."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from dataclasses import dataclass, field

from cloudjob.emulator import models
from cloudjob.emulator.attempt import AttemptEnd, AttemptWatch, key_of
from cloudjob.emulator.database import JobRow, Phase, StopRequest
from cloudjob.emulator.job_context import JobContext
from cloudjob.emulator.models import Run, RunRecord, TaskAddress, TaskStatus, now_ms, task_of
from cloudjob.emulator.staging import (
    StagingFailed,
    Uploader,
    check_nodes,
    image_of,
    prepare,
    write_rank_table,
)
from cloudjob.errors import CloudJobError, JobNotFound
from jobentry.system.trees import remove_tree


@dataclass(slots=True)
class JobRun:
    """Runs one job in a thread of its own."""

    job: JobContext
    lost: set[int] = field(default_factory=set)
    _uploader: Uploader = field(init=False)
    _has_started: bool = False

    def __post_init__(self) -> None:
        self._uploader = Uploader(self.job)

    # -- from start to end ----------------------------------------------------------------------

    def run(self) -> None:
        """Run the job until it ends or fails."""
        try:
            self._run_attempts()
        except sqlite3.Error:
            raise  # the queue resumes the job when the database can be written again
        except Exception as error:  # noqa: BLE001 (whatever it is, the job must not hang for ever)
            self.job.event(f"The platform failed: {error!r}", "Error")
            self._end_all()
            self._finish("Abnormal", secondary="Unknown")

    def _run_attempts(self) -> None:
        while True:
            row = self.job.existing_row()
            if row.stop_request and not self._has_nodes(row):
                self._finish("Terminated")
                return
            try:
                self._ensure_nodes(row)
            except StagingFailed as error:
                self.job.event(str(error), "Error")
                self._end_all()
                self._finish("Failed")
                return
            row = self.job.existing_row()
            try:
                end = AttemptWatch(self.job, self._uploader, self.lost).watch(row)
            except JobNotFound:
                if not self.job.existing_row().stop_request:
                    raise
                # The job was stopped before any of its nodes had started.
                self._finish("Terminated")
                return
            row = self.job.existing_row()
            self._close_record(row, end)
            if not self._prepare_retry(row, end):
                self._complete(row, end)
                return

    def _has_nodes(self, row: JobRow) -> bool:
        """Whether the nodes of an attempt exist; a crash may have prevented their start."""
        if not row.run.handle:
            return False
        try:
            self.job.service.runtime.states(row.run.handle, row.nodes)
        except JobNotFound:
            return False
        return True

    def _ensure_nodes(self, row: JobRow) -> None:
        """Start the nodes of an attempt unless they are started; resume a start after a crash."""
        if not row.run.handle:
            self._begin(row)
        elif not self._has_started and not row.stop_request:
            self._start(row)
        self._has_started = True

    def forget(self) -> None:
        """Remove the job with its nodes and files."""
        self._end_all()
        self.job.service.database.remove_job(self.job.id)
        with contextlib.suppress(OSError):
            remove_tree(self.job.folder)

    # -- begin --------------------------------------------------------------------------------

    def _begin(self, row: JobRow) -> None:
        """Prepare the nodes and start them."""
        service = self.job.service
        run = row.run
        key = key_of(row, run.attempt)
        check_nodes(self.job, row)
        image = image_of(self.job, row)
        if not run.is_in_place:
            self._uploader.forget()
            prepare(self.job, row, key)
        # Stored before the start: after a crash in between, the stored handle has no nodes.
        run.handle = service.runtime.handle(key)
        run.key = run.log_key = key
        run.image = image
        _open_record(run, is_in_place=run.is_in_place)
        run.is_in_place = False
        self.job.store(run)
        self._start(row)

    def _start(self, row: JobRow) -> None:
        service = self.job.service
        try:
            handle = service.runtime.start(row, row.run.key, self.job.nodes, row.run.image)
            addresses = service.runtime.addresses(handle, row.nodes)
            write_rank_table(self.job, row, addresses)
        except CloudJobError as error:
            raise StagingFailed(f"Starting the nodes failed: {error.message}") from error
        row.run.task_ips = [
            TaskAddress(task=task_of(index), ip=address, host_ip=address)
            for index, address in enumerate(addresses)
        ]
        self.job.store(row.run)
        values = {} if row.start_ms else {"start_ms": now_ms()}
        if not service.database.change_phase(row.id, ("Pending", "Creating"), "Running", **values):
            return
        self.job.event("Training job is running.")
        for index in range(row.nodes):
            self.job.task_event(index, "training started.")

    # -- end ----------------------------------------------------------------------------------

    def _close_record(self, row: JobRow, end: AttemptEnd) -> None:
        run = row.run
        run.task_statuses = [
            TaskStatus(
                task=task_of(index),
                exit_code=state.exit_code,
                message="the node was lost" if index in end.lost else state.note,
            )
            for index, state in enumerate(end.states)
        ]
        for record in run.running_records[-1:]:
            record.end_at = int(time.time())
            if not end.is_good and not end.is_stopped:
                record.end_reason = _reason(end)
                record.end_related_task = task_of(end.first)
        self.job.store(run)

    def _prepare_retry(self, row: JobRow, end: AttemptEnd) -> bool:
        """Prepare the job for another attempt if it may have one; return whether it may."""
        if end.is_good or end.is_stopped:
            return False
        run, metadata = row.run, row.body.metadata
        wants = end.lost or metadata.has(models.RETRY_ALWAYS) or end.is_hung
        if run.restarts >= metadata.retries or not wants:
            return False
        self._uploader.upload(row)
        recover = "pod_reschedule" if end.lost else "proc_restart"
        for record in run.running_records[-1:]:
            record.end_recover = recover
        run.restarts += 1
        run.attempt += 1
        if not end.lost and self._restart(run.handle):
            run.log_key = key_of(row, run.attempt)
            _open_record(run, is_in_place=True)
        else:
            self._end_all()
            run.handle, run.is_in_place = "", not end.lost
        self.lost.clear()
        self.job.store(run)
        self.job.event(
            f"Training job is restarted ({recover}), {run.restarts} of {metadata.retries}.",
            "Warning",
        )
        if end.lost:
            self.job.service.database.change_phase(row.id, ("Running",), "Pending")
        return True

    def _restart(self, handle: str) -> bool:
        try:
            return self.job.service.runtime.restart(handle)
        except CloudJobError as error:
            self.job.event(f"Restarting in place failed: {error.message}", "Warning")
            return False

    def _complete(self, row: JobRow, end: AttemptEnd) -> None:
        """Upload the remaining changes, and store how the job ended."""
        problem = (
            "" if row.stop_request is StopRequest.DELETE else self._uploader.upload_the_rest(row)
        )
        self._end_all()
        for index in range(row.nodes):
            message = "output-handler failed" if problem else "output-handler finalized"
            self.job.log(index).add_line(row.run.log_key, message, is_after=True)
        if row.stop_request is not StopRequest.DELETE:
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

    def _finish(self, phase: Phase, secondary: str = "") -> None:
        row = self.job.row()
        if row is None:
            return
        self.job.service.database.update_job(
            self.job.id, phase=phase, secondary=secondary or phase, end_ms=now_ms()
        )

    def _end_all(self) -> None:
        """Remove this attempt from the runtime."""
        row = self.job.row()
        if row and row.run.handle:
            with contextlib.suppress(CloudJobError):
                self.job.service.runtime.remove(row.run.handle)


def _open_record(run: Run, *, is_in_place: bool) -> None:
    kind = "restarted" if is_in_place else "init_or_rescheduled"
    run.running_records.append(RunRecord(start_at=int(time.time()), start_type=kind))


def _reason(end: AttemptEnd) -> str:
    if end.is_hung:
        return "the job hung"
    if end.lost:
        return f"node of {task_of(end.first)} lost"
    state = end.states[end.first]
    return f"{task_of(end.first)} exited with code {state.exit_code}" + (
        f": {state.note}" if state.note else ""
    )

"""The queue: starts jobs by priority and age when their pool has room."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from typing import TYPE_CHECKING

from cloudjob.emulator.database import StopRequest
from cloudjob.emulator.errors import ServiceRefusal
from cloudjob.emulator.job_context import JobContext
from cloudjob.emulator.job_run import JobRun
from cloudjob.errors import CloudJobError

if TYPE_CHECKING:
    from cloudjob.emulator.database import JobRow
    from cloudjob.emulator.service import EmulatedService

_TICK_S = 0.5


class Scheduler:
    """Starts the jobs in the queue, and resumes those of an earlier process."""

    def __init__(self, service: EmulatedService) -> None:
        self._service = service
        self._lock = threading.RLock()
        self._active: dict[str, tuple[JobRun, str, int]] = {}
        self._wake = threading.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._loop, name="queue", daemon=True)

    def start(self) -> None:
        """Start the thread that checks the queue."""
        self._thread.start()

    def close(self) -> None:
        """Start no more jobs; running ones continue."""
        self._is_closed = True
        self._wake.set()

    def wake(self) -> None:
        """Check the queue now."""
        self._wake.set()

    def remove(self, job: str) -> None:
        """Remove a job; a running job is ended first."""
        with self._lock:
            is_active = job in self._active
            self._service.database.update_job(job, stop_request=StopRequest.DELETE)
            if is_active:
                self._service.database.change_phase(
                    job, ("Creating", "Pending", "Running"), "Terminating"
                )
        if is_active:
            self.wake()
        else:
            JobRun(JobContext(job, self._service)).forget()

    def lose_node(self, row: JobRow, node: int) -> None:
        """End a node of a running job as if its machine had failed.

        Raises:
            ServiceRefusal: The job is not running, or has no such node.
        """
        with self._lock:
            active = self._active.get(row.id)
        handle = row.run.handle
        if active is None or row.phase != "Running" or not handle or not 0 <= node < row.nodes:
            raise ServiceRefusal("ModelArts.2788", f"node {node} of job {row.id}: it does not run")
        active[0].lost.add(node)
        try:
            self._service.runtime.end_node(handle, node)
        except CloudJobError as error:
            raise ServiceRefusal("ModelArts.0010") from error

    # -- the queue ----------------------------------------------------------------------------

    def _loop(self) -> None:
        while not self._is_closed:
            self._wake.wait(_TICK_S)
            self._wake.clear()
            if self._is_closed:
                return
            try:
                self._check_queue()
            except Exception as error:  # noqa: BLE001 (the queue must not stop for one fault)
                sys.stderr.write(f"queue: {error!r}\n")
                time.sleep(_TICK_S)

    def _check_queue(self) -> None:
        database = self._service.database
        full: set[str] = set()
        for job, phase, pool, nodes in database.unfinished():
            with self._lock:
                if job in self._active:
                    continue
            if phase == "Creating":
                if database.change_phase(job, ("Creating",), "Pending"):
                    database.update_job(job, secondary="Queuing")
                    database.add_event(job, "Training job is queuing.")
                phase = "Pending"
            if phase != "Pending":
                # The job was running or ending when the emulator was killed.
                self._begin(job, pool, nodes)
            elif pool not in full and not self._service.faults.find("hang-pending", job=job):
                if self._has_room(pool, nodes):
                    self._begin(job, pool, nodes)
                else:
                    full.add(pool)

    def _has_room(self, pool: str, nodes: int) -> bool:
        settings = self._service.settings
        with self._lock:
            used = sum(count for _, where, count in self._active.values() if where == pool)
        capacity = settings.pools.get(pool, 0) if pool else settings.public_nodes
        return used + nodes <= capacity or (used == 0 and nodes > capacity)

    def _begin(self, job: str, pool: str, nodes: int) -> None:
        run = JobRun(JobContext(job, self._service))
        with self._lock:
            self._active[job] = (run, pool, nodes)
        threading.Thread(target=self._run, args=(run,), name=job, daemon=True).start()

    def _run(self, run: JobRun) -> None:
        try:
            run.run()
        except Exception as error:  # noqa: BLE001 (a thread's end must be seen)
            sys.stderr.write(f"job {run.job.id}: {error!r}\n")
            time.sleep(_TICK_S)
        finally:
            with self._lock:
                self._active.pop(run.job.id, None)
            with contextlib.suppress(Exception):
                row = run.job.row()
                # Only now, because a request may also delete the job after its end.
                if row and row.stop_request is StopRequest.DELETE and row.is_final:
                    run.forget()
            self.wake()

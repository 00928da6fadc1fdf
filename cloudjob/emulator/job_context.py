"""Gives access to one job's folders, its row in the database, and its events."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cloudjob.emulator import models
from cloudjob.emulator.database import JobRow
from cloudjob.emulator.models import ObsPlace, Run, task_of
from cloudjob.emulator.node_logs import NodeLog
from cloudjob.emulator.nodes import folder
from cloudjob.emulator.obs.client import LOG_BUCKET

if TYPE_CHECKING:
    from cloudjob.emulator.service import EmulatedService


@dataclass(frozen=True, slots=True)
class JobContext:
    """One job, and the service that it belongs to."""

    id: str
    service: EmulatedService

    @property
    def folder(self) -> Path:
        """The folder of the job."""
        return self.service.folder / self.id

    @property
    def nodes(self) -> Path:
        """The folder with the files of its nodes."""
        return self.folder / "nodes"

    def log(self, index: int) -> NodeLog:
        """Return the log of a node."""
        return NodeLog(logs_of(self.service.folder, self.id) / str(index))

    def local(self, index: int, path: str) -> Path:
        """Return the path on this machine for a path of a node."""
        return folder(self.nodes, index, path)

    def row(self) -> JobRow | None:
        """Return its current row; None if it was deleted."""
        return self.service.database.job(self.id)

    def existing_row(self) -> JobRow:
        """Return its current row, which must exist."""
        row = self.row()
        assert row is not None, "only this thread removes the job while it runs"
        return row

    def event(self, message: str, level: str = "Info", source: str = "Job") -> None:
        """Add an event."""
        self.service.database.add_event(self.id, message, level, source)

    def task_event(self, index: int, message: str, level: str = "Info") -> None:
        """Add an event of one task."""
        self.event(f"[{task_of(index)}] {message}", level, "Task")

    def store(self, run: Run) -> None:
        """Store with what the run of the job resumes after a crash."""
        self.service.database.update_job(self.id, run=run)

    def export_log(self, row: JobRow, index: int) -> ObsPlace | None:
        """Copy the log of a node to OBS; return its place, or None if the log is empty.

        Raises:
            ObsError: OBS refused.
        """
        log, obs = self.log(index), self.service.obs
        if not log.size_bytes:
            return None
        url = row.body.spec.log_export_path.obs_url
        if not url:
            obs.make_bucket(LOG_BUCKET)
        folder = models.place(url or f"/{LOG_BUCKET}/{row.id}")
        place = ObsPlace(
            folder.bucket, f"{folder.prefix}modelarts-job-{row.id}-{task_of(index)}.log"
        )
        with tempfile.TemporaryDirectory(dir=self.service.folder) as scratch:
            path = Path(scratch, "log")
            log.write_to(path)
            obs.put(path, place)
        return place


def logs_of(folder: Path, job: str) -> Path:
    """Return the folder of a job's logs."""
    return folder / job / "logs"

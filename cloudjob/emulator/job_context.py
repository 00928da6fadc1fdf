"""What belongs to one job: its folders, its row in the database, its events."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from cloudjob.emulator import models
from cloudjob.emulator.database import Database, JobRow
from cloudjob.emulator.fault_injection import Faults
from cloudjob.emulator.models import Place
from cloudjob.emulator.node_logs import NodeLog
from cloudjob.emulator.nodes import Machines, folder
from cloudjob.emulator.obs import LOG_BUCKET, Obs
from cloudjob.emulator.settings import Settings


@dataclass(slots=True)
class Context:
    """What every run of a job uses.

    Args:
        folder: The folder of all jobs.
    """

    settings: Settings
    database: Database
    faults: Faults
    obs: Obs
    machines: Machines
    folder: Path


@dataclass(frozen=True, slots=True)
class JobContext:
    """Where the files of one job are."""

    id: str
    context: Context

    @property
    def folder(self) -> Path:
        """The folder of the job."""
        return self.context.folder / self.id

    @property
    def nodes(self) -> Path:
        """The disks of its nodes."""
        return self.folder / "nodes"

    @property
    def logs(self) -> Path:
        """Its logs, one folder for each node."""
        return logs_of(self.context.folder, self.id)

    def local(self, index: int, path: str) -> Path:
        """Return where a node's path is on this machine."""
        return folder(self.nodes, index, path)

    def row(self) -> JobRow | None:
        """Return its current row; None if it was deleted."""
        return self.context.database.job(self.id)

    def need(self) -> JobRow:
        """Return its current row, which must exist."""
        row = self.row()
        assert row is not None, "only we remove the job while we run it"
        return row

    def event(self, message: str, level: str = "Info", source: str = "Job") -> None:
        """Add an event."""
        self.context.database.add_event(self.id, message, level, source)


def logs_of(folder: Path, job: str) -> Path:
    """Return the folder of a job's logs."""
    return folder / job / "logs"


def export_log(context: Context, row: JobRow, index: int) -> Place | None:
    """Copy the log of a node to OBS; return its place, or None if the log is empty.

    Raises:
        ObsError: OBS refused.
    """
    log = NodeLog(logs_of(context.folder, row.id) / str(index))
    if not log.size_bytes:
        return None
    asked = row.body["spec"]["log_export_path"].get("obs_url")
    if not asked:
        context.obs.make_bucket(LOG_BUCKET)
    folder = models.place(asked or f"/{LOG_BUCKET}/{row.id}")
    place = Place(folder.bucket, f"{folder.prefix}modelarts-job-{row.id}-worker-{index}.log")
    with tempfile.TemporaryDirectory(dir=context.folder) as scratch:
        path = Path(scratch, "log")
        log.write_to(path)
        context.obs.put(path, place)
    return place

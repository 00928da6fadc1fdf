"""Uploads the outputs and logs of a job, while it runs and at its end."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from cloudjob.emulator import models, node_plan
from cloudjob.emulator.database import JobRow
from cloudjob.emulator.job_context import JobContext, export_log
from cloudjob.emulator.obs import ObsError

_UPLOAD_TRIES = 3


@dataclass(slots=True)
class Uploader:
    """Uploads each change once."""

    job: JobContext
    _known: dict[str, tuple[int, int]] = field(default_factory=dict)

    def forget(self) -> None:
        """Upload everything again, because the folders start empty."""
        self._known.clear()

    def upload(self, row: JobRow) -> str:
        """Upload new and changed outputs; return the error, if any."""
        for item in node_plan.folders(row):
            if item.kind != "output":
                continue
            for index in range(row.nodes):
                local = self.job.local(index, item.path)
                begun = time.monotonic()
                try:
                    files, _ = self.job.context.obs.upload(
                        self.job.nodes, local, models.place(item.url), self._known
                    )
                except ObsError as error:
                    words = f"Upload training output(parameter name: {item.name}) failed: {error}"
                    self.job.event(f"[worker-{index}] {words}", "Error", "Task")
                    return words
                if files:
                    took = f"[worker-{index}][time used: {time.monotonic() - begun:.3f}s]"
                    words = f"{took} Upload training output(parameter name: {item.name}) finished."
                    self.job.event(words, source="Task")
        return ""

    def export_logs(self, row: JobRow) -> None:
        """Copy the logs of all nodes to OBS."""
        for index in range(row.nodes):
            try:
                export_log(self.job.context, row, index)
            except ObsError as error:
                self.job.event(f"[worker-{index}] Exporting the log failed: {error}", "Warning")

    def upload_the_rest(self, row: JobRow) -> str:
        """Upload what is left, with retries; return the error, if any."""
        problem = ""
        for attempt in range(_UPLOAD_TRIES):
            problem = self.upload(row)
            if not problem:
                break
            time.sleep(attempt + 1)
        return problem

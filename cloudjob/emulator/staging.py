"""Transfers code and inputs from OBS to a job's nodes, and outputs and logs to OBS."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cloudjob.emulator import models, node_plan
from cloudjob.emulator.database import JobRow
from cloudjob.emulator.errors import ServiceRefusal
from cloudjob.emulator.job_context import JobContext
from cloudjob.emulator.node_plan import Folder
from cloudjob.emulator.nodes import ImageMissing
from cloudjob.emulator.obs.client import Object, ObsError
from cloudjob.emulator.settings import Settings
from cloudjob.errors import CloudJobError
from jobentry.system.trees import remove_tree

_UPLOAD_TRIES = 3


class StagingFailed(Exception):
    """The job cannot start, for a reason that its events show."""


def check_nodes(job: JobContext, row: JobRow) -> None:
    """Check the nodes, as the platform does for jobs with fault tolerance."""
    if not row.body.metadata.retries:
        return
    for _ in range(row.body.metadata.retries + 1):
        bad = job.service.faults.take("bad-node", job=row.id)
        if bad is None:
            job.event("Node check passed on all nodes.", source="Task")
            return
        message = "Node check failed; the node is isolated and replaced."
        job.task_event(bad.node, message, "Warning")
    raise StagingFailed("Node check failed too often.")


def image_of(job: JobContext, row: JobRow) -> str:
    """Return the image of the job.

    Raises:
        StagingFailed: The image is not available.
    """
    settings = job.service.settings
    image = node_plan.image(row, settings)
    name = node_plan.names(row)[0].partition(".")[0]
    try:
        if job.service.faults.take("image-pull", job=row.id):
            raise ImageMissing(image)
        job.service.runtime.check_image(image)
    except ImageMissing as error:
        raise StagingFailed(f'[Pod: {name}] Failed to pull image "{image}": not found') from error
    except CloudJobError as error:
        raise StagingFailed(f"Looking for the image failed: {error.message}") from error
    job.event(f'[Pod: {name}] Pulled: Successfully pulled image "{image}"', source="K8S")
    return image


def prepare(job: JobContext, row: JobRow, key: str) -> None:
    """Empty the folders of the nodes and fill each with its own copy.

    Raises:
        StagingFailed: They cannot be filled, or the files of an earlier attempt cannot be removed.
    """
    _clear(job.nodes)
    mounts = node_plan.mounts(row)
    for path in (*node_plan.FOLDERS, *mounts, *mounts.values()):
        for index in range(row.nodes):
            job.local(index, path).mkdir(parents=True, exist_ok=True)
    write_rank_table(job, row, ())
    for item in node_plan.folders(row):
        if item.kind == "output":
            for index in range(row.nodes):
                job.local(index, item.path).mkdir(parents=True, exist_ok=True)
        else:
            _fetch(job, row, key, item)


def write_rank_table(job: JobContext, row: JobRow, addresses: Sequence[str]) -> None:
    """Write the rank table of each node that has one, complete once the addresses are known."""
    settings = job.service.settings
    if not node_plan.has_rank_table(row, settings):
        return
    text = node_plan.rank_table(row, addresses, settings)
    for index in range(row.nodes):
        folder = job.local(index, node_plan.CONFIG)
        folder.mkdir(parents=True, exist_ok=True)
        new = folder / f"{node_plan.RANK_TABLE}.new"
        new.write_text(text, encoding="ascii")
        # The user of a container is another one.
        new.chmod(0o644)
        new.replace(folder / node_plan.RANK_TABLE)


def _clear(nodes: Path) -> None:
    with contextlib.suppress(OSError):
        remove_tree(nodes)
    if nodes.exists():
        # A symbolic link that a job has left there would redirect the download.
        raise StagingFailed(f"Removing the files of an earlier attempt failed: {nodes}")


def _fetch(job: JobContext, row: JobRow, key: str, item: Folder) -> None:
    place = models.place(item.url)
    what = "code" if item.kind == "code" else f"input(parameter name: {item.name})"
    first = job.local(0, item.path)
    start_s = time.monotonic()
    try:
        if item.kind == "code":
            objects = job.service.obs.list(place.bucket, place.prefix)
            check_code_limits(objects, job.service.settings)
        files, size = job.service.obs.download(place, first)
    except (ServiceRefusal, ObsError) as error:
        message = f"[worker-0] Download training {what} failed: {error}"
        job.log(0).add_line(key, message)
        raise StagingFailed(message) from error
    for index in range(1, row.nodes):
        other = job.local(index, item.path)
        shutil.copytree(first, other, dirs_exist_ok=True)
    elapsed_s = time.monotonic() - start_s
    for index in range(row.nodes):
        message = f"Download training {what} finished: {files} files, {size} bytes"
        job.log(index).add_line(key, f"{message}.")
        job.event(f"[worker-{index}][time used: {elapsed_s:.3f}s] {message}.", source="Task")


def check_code_limits(objects: list[Object], settings: Settings) -> None:
    """Refuse a code directory that is too large or too deep, or has too many files.

    Raises:
        ServiceRefusal: The code directory exceeds a limit.
    """
    files = [item for item in objects if item.path and not item.path.endswith("/")]
    if len(files) > settings.code_limit_files:
        raise ServiceRefusal("ModelArts.2759", settings.code_limit_files)
    if max((item.path.count("/") for item in files), default=0) > settings.code_limit_depth:
        raise ServiceRefusal("ModelArts.2760", settings.code_limit_depth)
    if sum(item.size_bytes for item in files) > settings.code_limit_bytes:
        raise ServiceRefusal("ModelArts.2761", f"{settings.code_limit_bytes / (1 << 30):g}")


# -- after and during the attempt -----------------------------------------------------------------


@dataclass(slots=True)
class Uploader:
    """Uploads outputs and logs, each change only once."""

    job: JobContext
    _known: dict[str, tuple[int, int]] = field(default_factory=dict)

    def forget(self) -> None:
        """Forget what was uploaded, because the folders of a new attempt start empty."""
        self._known.clear()

    def upload(self, row: JobRow) -> str:
        """Upload new and changed outputs; return the error, if any."""
        for item in node_plan.folders(row):
            if item.kind != "output":
                continue
            for index in range(row.nodes):
                local = self.job.local(index, item.path)
                start_s = time.monotonic()
                try:
                    files, _ = self.job.service.obs.upload(
                        self.job.nodes, local, models.place(item.url), self._known
                    )
                except ObsError as error:
                    message = f"Upload training output(parameter name: {item.name}) failed: {error}"
                    self.job.task_event(index, message, "Error")
                    return message
                if files:
                    prefix = f"[worker-{index}][time used: {time.monotonic() - start_s:.3f}s]"
                    message = (
                        f"{prefix} Upload training output(parameter name: {item.name}) finished."
                    )
                    self.job.event(message, source="Task")
        return ""

    def export_logs(self, row: JobRow) -> None:
        """Copy the logs of all nodes to OBS."""
        for index in range(row.nodes):
            try:
                self.job.export_log(row, index)
            except ObsError as error:
                self.job.event(f"[worker-{index}] Exporting the log failed: {error}", "Warning")

    def upload_the_rest(self, row: JobRow) -> str:
        """Upload the remaining changes, with retries; return the error, if any."""
        problem = ""
        for attempt in range(_UPLOAD_TRIES):
            problem = self.upload(row)
            if not problem:
                break
            time.sleep(attempt + 1)
        return problem

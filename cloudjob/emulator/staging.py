"""What comes before an attempt at a job: the check of its nodes, the image, code and inputs."""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path

from cloudjob.emulator import plan, wanted
from cloudjob.emulator.answers import ApiError
from cloudjob.emulator.database import JobRow
from cloudjob.emulator.ground import Ground
from cloudjob.emulator.limits import check_code_limits
from cloudjob.emulator.logs import NodeLog
from cloudjob.emulator.nodes import ImageMissing
from cloudjob.emulator.obs import ObsError
from cloudjob.emulator.plan import Folder
from cloudjob.errors import CloudJobError
from jobentry.trees import remove_tree


class Failed(Exception):
    """The job cannot start, for a reason that its user must hear."""


def check_nodes(ground: Ground, row: JobRow) -> None:
    """The check of the nodes that the platform makes for jobs with fault tolerance."""
    if not wanted.retries(row.body):
        return
    for _ in range(wanted.retries(row.body) + 1):
        bad = ground.context.database.take_fault("bad-node", job=row.id)
        if bad is None:
            ground.event("Node check passed on all nodes.", source="Task")
            return
        ground.event(
            f"[worker-{bad.node}] Node check failed; the node is isolated and replaced.",
            "Warning",
            "Task",
        )
    raise Failed("Node check failed too often.")


def image_of(ground: Ground, row: JobRow) -> str:
    """Return the image of the job, which is there.

    Raises:
        Failed: It cannot be had.
    """
    settings = ground.context.settings
    asked = row.body["algorithm"]["engine"]
    image = plan.image(row, wanted.engine_of(asked, settings), settings)
    name = plan.names(row)[0].partition(".")[0]
    try:
        if ground.context.database.take_fault("image-pull", job=row.id):
            raise ImageMissing(image)
        ground.context.machines.check_image(image)
    except ImageMissing as error:
        raise Failed(f'[Pod: {name}] Failed to pull image "{image}": not found') from error
    except CloudJobError as error:
        raise Failed(f"Looking for the image failed: {error.message}") from error
    ground.event(f'[Pod: {name}] Pulled: Successfully pulled image "{image}"', source="K8S")
    return image


def prepare(ground: Ground, row: JobRow, key: str) -> None:
    """Fill the folders of the nodes anew; each has its own copy.

    Raises:
        Failed: They cannot be filled, or what an earlier attempt left there cannot be removed.
    """
    _clear(ground.nodes)
    for path in ("modelarts/inputs", "modelarts/outputs", "modelarts/log"):
        for index in range(row.nodes):
            ground.local(index, f"{wanted.HOME}/{path}").mkdir(parents=True, exist_ok=True)
    for item in plan.folders(row):
        if item.kind == "output":
            for index in range(row.nodes):
                ground.local(index, item.path).mkdir(parents=True, exist_ok=True)
        else:
            _fetch(ground, row, key, item)
    if ground.context.machines.kind == "process":
        for index in range(row.nodes):
            ground.local(index, plan.CACHE).mkdir(parents=True, exist_ok=True)


def _clear(nodes: Path) -> None:
    with contextlib.suppress(OSError):
        remove_tree(nodes)
    if nodes.exists():
        # A symbolic link that a job has left there would lead the download out of it.
        raise Failed(f"Removing the files of an earlier attempt failed: {nodes}")


def _fetch(ground: Ground, row: JobRow, key: str, item: Folder) -> None:
    place = wanted.place(item.url)
    what = "code" if item.kind == "code" else f"input(parameter name: {item.name})"
    first = ground.local(0, item.path)
    begun = time.monotonic()
    try:
        if item.kind == "code":
            found = ground.context.obs.list(place.bucket, place.prefix)
            check_code_limits(found, ground.context.settings)
        files, size = ground.context.obs.download(place, first)
    except (ApiError, ObsError) as error:
        words = f"[worker-0] Download training {what} failed: {error}"
        NodeLog(ground.logs / "0").say(key, words)
        raise Failed(words) from error
    for index in range(1, row.nodes):
        other = ground.local(index, item.path)
        shutil.copytree(first, other, dirs_exist_ok=True)
    took = time.monotonic() - begun
    for index in range(row.nodes):
        words = f"Download training {what} finished: {files} files, {size} bytes"
        NodeLog(ground.logs / str(index)).say(key, f"{words}.")
        ground.event(f"[worker-{index}][time used: {took:.3f}s] {words}.", source="Task")

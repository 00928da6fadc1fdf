"""The state that the API's operations and the jobs of one project share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from cloudjob.emulator import views
from cloudjob.emulator.auth import Gateway
from cloudjob.emulator.database import Database, JobRow
from cloudjob.emulator.errors import ServiceRefusal
from cloudjob.emulator.fault_injection import Faults
from cloudjob.emulator.models import Order, PageQuery
from cloudjob.emulator.obs.client import Obs
from cloudjob.emulator.settings import Settings
from cloudjob.emulator.state import Account, User

if TYPE_CHECKING:
    from cloudjob.emulator.docker_nodes import DockerRuntime
    from cloudjob.emulator.process_nodes import ProcessRuntime
    from cloudjob.emulator.request import Request

Runtime: TypeAlias = "ProcessRuntime | DockerRuntime"
# The start of the service's routes.
PROJECT = "/v2/{project_id}"
JOBS = PROJECT + "/training-jobs"
JOB = JOBS + "/{job_id}"


class Queue(Protocol):
    """The queue of the service's jobs; ``Scheduler`` is one, and in turn reads the service."""

    def start(self) -> None:
        """Start the jobs that wait, from now on."""

    def close(self) -> None:
        """Start no more jobs."""

    def wake(self) -> None:
        """Check the queue now."""

    def remove(self, job: str) -> None:
        """Remove a job."""

    def lose_node(self, row: JobRow, node: int) -> None:
        """End a node of a running job as if its machine had failed."""


@dataclass(slots=True)
class EmulatedService:
    """The emulated service of one project.

    Args:
        folder: The folder with the files of all jobs.
        projects: The service of each project by its id.
    """

    account: Account
    settings: Settings
    database: Database
    faults: Faults
    obs: Obs
    access: Gateway
    runtime: Runtime
    folder: Path
    projects: dict[str, EmulatedService] = field(repr=False)
    scheduler: Queue = field(init=False, repr=False)

    def user(self, request: Request) -> User:
        """Return the user of a request."""
        return request.user or self.account.owner

    def job(self, request: Request) -> JobRow:
        """Return the job that a path names.

        Raises:
            ServiceRefusal: There is none.
        """
        return self.job_of(request.path_params["job_id"])

    def job_of(self, job: str) -> JobRow:
        """Return the job of this id.

        Raises:
            ServiceRefusal: There is none.
        """
        row = self.database.job(job)
        if row is None:
            raise ServiceRefusal("ModelArts.2775", job)
        return row

    def node(self, request: Request, row: JobRow) -> int:
        """Return the index of the node that a path names as a task.

        Raises:
            ServiceRefusal: The job has no such task.
        """
        task, tasks = request.path_params["task_id"], views.tasks(row)
        if task not in tasks:
            raise ServiceRefusal("ModelArts.2788", f"task_id: {task}")
        return tasks.index(task)


class _Page(PageQuery):
    order: Order = "desc"
    sort_by: Literal["create_time", "update_time", "name"] = "create_time"
    group_by: str = ""


def page_of(
    request: Request, models: list[Any], show: Callable[[Any], dict[str, Any]]
) -> dict[str, Any]:
    """Return the requested page of a list, sorted by a key of the metadata of its items."""
    query = request.parsed_query(_Page)
    is_descending = query.order == "desc"
    # The list is newest first, and sorting keeps the order of equal items.
    models = models if is_descending else models[::-1]
    models = sorted(
        models, key=lambda item: getattr(item.metadata, query.sort_by), reverse=is_descending
    )
    items = list(map(show, query.of(models)))
    return {"total": len(models), "count": len(items), **query.model_dump(), "items": items}

"""What every part of the API works with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cloudjob.emulator.answers import ApiError
from cloudjob.emulator.app import Request
from cloudjob.emulator.database import Database, JobRow
from cloudjob.emulator.obs import Obs
from cloudjob.emulator.settings import Settings
from cloudjob.emulator.state import Account

if TYPE_CHECKING:
    from cloudjob.emulator.runner import Runner

# Where the routes of the service begin.
PROJECT = "/v2/{project_id}"
JOBS = PROJECT + "/training-jobs"
JOB = JOBS + "/{job_id}"


@dataclass(frozen=True, slots=True)
class Service:
    """The emulated service."""

    account: Account
    settings: Settings
    database: Database
    obs: Obs
    runner: Runner

    def job(self, request: Request) -> JobRow:
        """Return the job that a path names.

        Raises:
            ApiError: There is none.
        """
        return self.job_of(request.words["job_id"])

    def job_of(self, job: str) -> JobRow:
        """Return the job of this id.

        Raises:
            ApiError: There is none.
        """
        found = self.database.job(job)
        if found is None:
            raise ApiError("ModelArts.2775", job)
        return found

    def node(self, request: Request, row: JobRow) -> int:
        """Return the index of the node that a path names as a task.

        Raises:
            ApiError: The job has no such task.
        """
        name, _, index = request.words["task_id"].rpartition("-")
        if name != "worker" or not index.isdecimal() or int(index) >= row.nodes:
            raise ApiError("ModelArts.2788", f"task_id: {request.words['task_id']}")
        return int(index)


def number(text: str | None, default: int, least: int, most: int, name: str) -> int:
    """Return a number of a query.

    Raises:
        ApiError: It is none, or out of range.
    """
    if text is None or text == "":
        return default
    try:
        found = int(text)
    except (TypeError, ValueError) as error:
        raise ApiError("ModelArts.2764", f"{name}: {text}") from error
    if not least <= found <= most:
        raise ApiError("ModelArts.2764", f"{name}: {text}")
    return found

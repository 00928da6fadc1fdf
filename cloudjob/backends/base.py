"""What every backend promises."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from cloudjob.status import JobState
from cloudjob.submission import Submission

Request = TypeVar("Request")


@dataclass(frozen=True, slots=True)
class NativeStatus:
    """A job as its platform sees it.

    Args:
        native: The platform's own word for the state.
        message: Why it failed, as far as the platform knows; the head's record knows better.
        attempt_at: When the last attempt began: an earlier record is not of this one.
        has_asked: Whether the platform itself asked the head to end, so that a record which says
            ``cancelled`` is only the answer to that.
        reason: What only the platform can know of a failure: a node ran out of memory.
    """

    state: JobState
    native: str
    started_at: str | None = None
    ended_at: str | None = None
    exit_code: int | None = None
    message: str = ""
    node: int | None = None
    reason: str = ""
    attempt_at: str = ""
    has_asked: bool = False


class Backend(Protocol[Request]):
    """A platform that runs jobs, with six promises.

    1. ``build`` turns a submission into the platform's own request; it does no I/O, so a dry run
       and a test see exactly what would be sent.
    2. ``send`` starts the job and returns its handle, ``backend://…/id``. When it raises, nothing
       was started. A job outlives the process that sent it.
    3. ``status`` says where a job stands, from any process, at any time. A state that the platform
       has not named before is UNKNOWN; an unknown id is ``JobNotFound``.
    4. ``logs`` yields what a node's entry wrote, in order, whole lines, nothing lost and nothing
       twice, also after the job was killed; with ``follow`` until the job has ended.
    5. ``cancel`` asks the job to end, with its grace period, and returns at once; ``is_urgent``
       leaves out the grace. A job that has ended stays as it is.
    6. ``remove`` leaves nothing of a job on the platform, whatever state it is in.

    Each raises ``BackendError`` when the platform refuses or cannot be reached.
    """

    def build(self, submission: Submission) -> Request:
        """Return the request for ``submission``."""

    def show(self, request: Request) -> dict[str, Any]:
        """Return ``request`` as plain JSON values, secrets as ``***``."""

    def environments(self, request: Request) -> tuple[Mapping[str, str], ...]:
        """Return the variables that the entry of each node would be given."""

    def send(self, request: Request) -> str:
        """Start the job and return its handle."""

    def status(self, handle: str) -> NativeStatus:
        """Say where the job stands."""

    def logs(self, handle: str, node: int | None, *, follow: bool) -> Iterator[tuple[int, bytes]]:
        """Yield pieces ``(node, whole lines)``; an empty piece means that nothing is new."""

    def cancel(self, handle: str, *, is_urgent: bool = False) -> None:
        """Ask the job to end."""

    def remove(self, handle: str) -> None:
        """Leave nothing of the job."""

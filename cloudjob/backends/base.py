"""What every backend promises."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from cloudjob.spec import JobSpec
from cloudjob.status import JobState
from cloudjob.submission import Submission

Request = TypeVar("Request")
Told = TypeVar("Told", contravariant=True)


@dataclass(frozen=True, slots=True)
class NativeStatus:
    """A job as its platform sees it.

    Args:
        native: The platform's own word for the state.
        message: Why it failed, as far as the platform knows; the head's record knows better.
        attempt_at: When the last attempt began: an earlier record is not of this one.
        has_asked: Whether the platform itself asked the head to end, so that a record which says
            ``cancelled`` is only the answer to that.
        knows_cancels: Whether every cancel is known here, so that a record which says ``cancelled``
            names a node that was stopped by something else.
        reason: What only the platform can know of a failure: a node ran out of memory.
        is_unwatched: Whether only what watched the job has failed, so that a record of success is
            the truth.
        cause: Whose doing a failure without a record is; the platform's when it does not say.
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
    knows_cancels: bool = False
    is_unwatched: bool = False
    cause: str = ""


class Check(NamedTuple):
    """One thing that was looked for.

    Args:
        found: What is there, in few words.
        hint: What to do when it is not as it should be.
        is_needed: Whether nothing works without it.
    """

    name: str
    is_ok: bool
    found: str
    hint: str = ""
    is_needed: bool = True


class Event(NamedTuple):
    """Something that happened to a job on its platform.

    Args:
        at: When, as the platform writes it.
        level: ``Info``, ``Warning`` or ``Error``.
    """

    at: str
    level: str
    source: str
    message: str


class Metric(NamedTuple):
    """What a node used, minute by minute.

    Args:
        name: The platform's own, ``cpuUsage`` for example.
        values: None for a minute that nobody has measured.
    """

    node: int
    name: str
    values: tuple[float | None, ...]


class Backend(Protocol[Request]):
    """A platform that runs jobs, with six promises.

    1. ``build`` turns a submission into the platform's own request; it does no I/O, so a dry run
       and a test see exactly what would be sent.
    2. ``send`` starts the job and returns its handle, ``backend://…/id``. When it raises, nothing
       was started, unless it is ``Unanswered``. A job outlives the process that sent it.
       ``handle`` gives a handle before that, by which a job is found whose submit was killed.
    3. ``status`` says where a job stands, from any process, at any time. A state that the platform
       has not named before is UNKNOWN; an unknown id is ``JobNotFound``.
    4. ``logs`` yields what a node's entry wrote, in order, whole lines, nothing lost and nothing
       twice, also after the job was killed; with ``follow`` until the job has ended.
    5. ``cancel`` asks the job to end, with its grace period, and returns at once; ``is_urgent``
       leaves out the grace. A job that has ended stays as it is.
    6. ``remove`` leaves nothing of a job on the platform, whatever state it is in.

    Each raises ``BackendError`` when the platform refuses or cannot be reached.
    """

    @property
    def poll_s(self) -> float:
        """How long to wait between two looks at a job."""

    def build(self, submission: Submission) -> Request:
        """Return the request for ``submission``."""

    def show(self, request: Request) -> dict[str, Any]:
        """Return ``request`` as plain JSON values, secrets as ``***``."""

    def environments(self, request: Request) -> tuple[Mapping[str, str], ...]:
        """Return the variables that the entry of each node would be given."""

    def handle(self, request: Request) -> str:
        """Return a handle of the job that ``send`` starts; nothing is there yet."""

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


@runtime_checkable
class Supplier(Protocol):
    """A platform with a store of its own, for jobs that name none; else that is a folder here."""

    def store(self) -> tuple[str, Mapping[str, str]]:
        """Return the URI of that store, empty for a folder of this machine.

        With it come variables that hold its keys, for what the environment does not say.
        """


@runtime_checkable
class Checker(Protocol):
    """A platform that is looked at before anything is packed or sent."""

    def checks(self, spec: JobSpec | None, store: str) -> list[Check]:
        """Look for what a job needs.

        Args:
            spec: None to look at what any job needs.
            store: The URI of its store.
        """


@runtime_checkable
class Bringer(Protocol[Told]):
    """A platform that itself brings the job's folder ``node`` to each node."""

    def companions(self, request: Told) -> Mapping[str, bytes]:
        """Return what lies beside the code in that folder, by name.

        Secrets are among it, so what is secret is deleted when the job has ended.
        """


def store_of(backend: Backend[Any]) -> tuple[str, Mapping[str, str]]:
    """Return what ``Supplier.store`` does, and nothing for a platform that has none."""
    return backend.store() if isinstance(backend, Supplier) else ("", {})


def checks_of(backend: Backend[Any], spec: JobSpec | None, store: str) -> list[Check]:
    """Return what ``Checker.checks`` does, and nothing for a platform that has none."""
    return backend.checks(spec, store) if isinstance(backend, Checker) else []


@runtime_checkable
class Lister(Protocol):
    """A platform that can be asked for all its jobs at once."""

    def known(self, handles: Sequence[str]) -> set[str]:
        """Return those of the handles whose job has a status; one question for all of them."""


@runtime_checkable
class Observer(Protocol):
    """A platform that keeps what happened to its jobs, and what they used."""

    def events(self, handle: str) -> list[Event]:
        """Return what happened to the job, the first first."""

    def metrics(self, handle: str) -> list[Metric]:
        """Return what each node of the job used."""


@runtime_checkable
class Writer(Protocol):
    """A platform with a tool of its own that takes a request as text."""

    def text(self, request: Any) -> str:
        """Return ``request`` as that tool takes it, secrets as ``***``."""


@runtime_checkable
class Waiter(Protocol):
    """A platform on which a job may wait long, and that knows for what."""

    def waits_for(self, handle: str) -> str:
        """Return what keeps the job from running; empty when nothing is known to."""

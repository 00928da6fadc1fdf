"""The interface of all backends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from cloudjob.errors import UsageError
from cloudjob.model.submission import Submission

if TYPE_CHECKING:
    from cloudjob.backends.native import Event, Metric, NativeStatus
    from cloudjob.model.job import JobSpec

Request = TypeVar("Request")

# Seconds that a node may outlive its grace period after it was asked to end. If the store does not
# answer, the entry gives up after 10 s for outputs, 5 s for the record and 1 s for journal and log.
RETRY_S = 20


class Check(NamedTuple):
    """The result of one check.

    Args:
        found: What was found, in a few words.
        hint: What to do if the check fails.
        is_needed: Whether jobs need this check to pass.
    """

    name: str
    is_ok: bool
    found: str
    hint: str = ""
    is_needed: bool = True


class Devices(NamedTuple):
    """The accelerators of each node.

    Args:
        source: The source of this information, in a few words.
    """

    per_node: int
    source: str


class Backend(ABC, Generic[Request]):
    """A platform that runs jobs.

    Every backend keeps six promises:

    1. ``build`` turns a submission into the platform's own request. It does no I/O, so a dry run
       and a test see exactly what would be sent.
    2. ``send`` starts the job and returns its handle, ``backend://…/id``. When it raises, nothing
       was started, unless the error is ``Unanswered``. A job outlives the process that sent it.
       ``handle`` returns a handle before ``send``, to find a job whose submit was killed.
    3. ``status`` returns the status of a job, in any process, at any time. A state that cloudjob
       does not know is UNKNOWN; an unknown id is ``JobNotFound``.
    4. ``logs`` yields what a node's entry wrote: in order, in whole lines, each line once, even
       after the job was killed; with ``follow``, until the job has ended.
    5. ``cancel`` asks the job to end, with its grace period, and returns at once; ``is_urgent``
       leaves out the grace period. A job that has ended stays as it is.
    6. ``remove`` removes everything of a job from the platform, whatever its state.

    Each raises ``BackendError`` when the platform refuses or cannot be reached. The methods below
    ``remove`` have defaults for a platform that offers nothing of the kind.
    """

    # Whether the platform copies the job's folder ``node`` from the store to each node, and the
    # outputs and the record back: they may arrive after the job has ended.
    copies_files = False

    @property
    @abstractmethod
    def poll_s(self) -> float:
        """Seconds to wait between two status requests."""

    def starting(self, job: str) -> AbstractContextManager[object]:
        """Start what ``send`` will need while a job is prepared; end it if nothing is sent."""
        return nullcontext()

    @abstractmethod
    def build(self, submission: Submission) -> Request:
        """Return the request for ``submission``."""

    @abstractmethod
    def show(self, request: Request) -> dict[str, Any]:
        """Return ``request`` as plain JSON values, secrets as ``***``."""

    @abstractmethod
    def environments(self, request: Request) -> Iterable[Mapping[str, str]]:
        """Return the variables that the entry of each node would be given."""

    @abstractmethod
    def handle(self, request: Request) -> str:
        """Return a handle of the job that ``send`` will start; the job does not exist yet."""

    @abstractmethod
    def own_handle(self, handle: str, job: str) -> str:
        """Return a handle of ``job`` that is made from the reader's own configuration.

        ``handle`` is from a description that others may have written. It chooses nothing: neither
        a host or a cluster, nor credentials, a program, a folder or the id of another job. It is
        only compared, because the job is elsewhere if it differs. No request is sent.

        Raises:
            BackendError: The job is not where the reader's configuration leads.
        """

    @abstractmethod
    def send(self, request: Request) -> str:
        """Start the job and return its handle."""

    @abstractmethod
    def status(self, handle: str) -> NativeStatus:
        """Return the job's status."""

    @abstractmethod
    def logs(self, handle: str, node: int | None, *, follow: bool) -> Iterator[tuple[int, bytes]]:
        """Yield pieces ``(node, whole lines)``; an empty piece means that nothing is new."""

    def log_ends(self, handle: str) -> Iterator[tuple[int, bytes]]:
        """Yield the beginning and the end of each node's log: they hold the phases of a node.

        By default all of it; a platform that can read less should.
        """
        return self.logs(handle, None, follow=False)

    @abstractmethod
    def cancel(self, handle: str, *, is_urgent: bool = False) -> None:
        """Ask the job to end."""

    @abstractmethod
    def remove(self, handle: str) -> None:
        """Remove everything of the job from its platform."""

    # -- what only some platforms offer -------------------------------------------------------

    def store(self) -> tuple[str, Mapping[str, str]]:
        """Return the platform's own store, for jobs that name none: its URI, and its credentials.

        An empty URI means a folder of this machine. The credentials are environment variables;
        variables that are already set take precedence.
        """
        return "", {}

    def devices(self, spec: JobSpec, *, may_query: bool) -> Devices | None:
        """Return the GPUs or NPUs that each node has; None if only the nodes know.

        Args:
            may_query: Whether the platform may be queried.
        """
        return Devices(0, "")

    def checks(self, spec: JobSpec | None, store: str) -> list[Check]:
        """Check what a job needs, before anything is packed or sent.

        Args:
            spec: None to check what every job needs.
            store: The URI of its store.
        """
        return []

    def companions(self, request: Request) -> Mapping[str, bytes]:
        """Return the files beside the code in the folder ``node``, if ``copies_files``.

        Files that hold secrets are deleted when the job has ended.
        """
        return {}

    def refresh(self, handle: str, keys: Mapping[str, str]) -> None:
        """Give the nodes of a running job fresh keys of its store.

        Args:
            keys: The variables ``names.STORE_KEYS``.

        Raises:
            UsageError: Its nodes cannot receive fresh keys.
        """
        raise UsageError(
            f"refreshing the keys of {handle}: its backend cannot replace keys",
            hint="this works on docker, kubernetes and slurm",
        )

    def ask(self, handle: str, request: bytes) -> bytes:
        """Send a request to the head of a running job, and return its answer.

        Args:
            request: See ``jobentry.system.requests``.

        Raises:
            UsageError: This backend cannot reach the nodes of its jobs.
            BackendError: The head does not answer.
        """
        raise UsageError(
            f"asking the nodes of {handle}: its backend cannot reach them",
            hint="this works on process, docker, kubernetes and slurm",
        )

    def command_on(
        self, handle: str, node: int, arguments: Sequence[str], *, is_terminal: bool
    ) -> list[str]:
        """Return the command of this machine that starts the node half on a node of a running job.

        Args:
            arguments: Those of the node half; see ``jobentry.node.enter``.
            is_terminal: Whether the command runs in a terminal, and needs one on the node.

        Raises:
            UsageError: This backend cannot start anything on the nodes of its jobs.
            BackendError: The node does not run, or a program is missing here.
        """
        raise UsageError(
            f"entering node {node} of {handle}: its backend cannot start a command there",
            hint="this works on process, docker, kubernetes and slurm",
        )

    def text(self, request: Request) -> str:
        """Return ``request`` in the format of the platform's own tool, secrets as ``***``."""
        return ""

    def statuses(self, handles: Sequence[str]) -> Mapping[str, NativeStatus | None]:
        """Return the status of many jobs of one platform, in as few requests as it allows.

        None means that the platform does not have the job. A job without an entry needs a call of
        ``status``: every job if the platform cannot list its jobs, and jobs that have ended, about
        which ``status`` knows more.
        """
        return {}

    def events(self, handle: str) -> list[Event]:
        """Return the events of the job, oldest first.

        Raises:
            UsageError: The platform records no events.
        """
        raise _not_recorded("events", handle)

    def metrics(self, handle: str) -> list[Metric]:
        """Return what each node of the job used.

        Raises:
            UsageError: The platform records no metrics.
        """
        raise _not_recorded("metrics", handle)


def _not_recorded(what: str, handle: str) -> UsageError:
    scheme, _, rest = handle.partition("://")
    job = rest.rpartition("/")[2]
    return UsageError(
        f"reading {what} of {job}: the backend {scheme} keeps none", hint=f"cloudjob logs {job}"
    )

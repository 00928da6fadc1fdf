"""The errors of cloudjob: each is one line with what was attempted, on what, and what happened.

CloudJobError            exit code 1
+- UsageError            2   flags or files cannot be read
|  +- SpecError          2   .problems: every error in the job description
+- PackageError          3   the source cannot be packed
+- StoreError            4   the object store refused or cannot be reached
|  +- ObjectMissing      4   there is no such object
|  +- UnreadableObject   4   an object is too large, or not a file
+- BackendError          5   the platform refused or cannot be reached
|  +- NotAuthorised      5   it rejected the credentials or denied access
|  +- Unreachable        5   it does not answer at the moment; running jobs continue
|  +- RunsElsewhere      5   only another machine can tell whether the job still runs
|  +- Unanswered         5   no answer came, so the request may or may not have been carried out
|  +- NotReady           5   .problems: every failed check before the job was sent
|  +- JobNotFound        6
+- RecordsError          1   the job records of this machine cannot be used
+- WaitTimeout           1   a job did not end within the time that `Job.wait` was given
+- JobFailed             the job's own exit code   in model/status.py; .status: how the job ended
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

# What came back, and what to try: neither boto3 nor requests can use such a proxy.
SOCKS = (
    "HTTPS_PROXY or ALL_PROXY names a SOCKS proxy, which cloudjob cannot use",
    "name an HTTP proxy, or list the host in NO_PROXY if no proxy is needed",
)


class CloudJobError(Exception):
    """Anything cloudjob reports to its user in one line.

    Args:
        message: *doing what: to which thing: what came back*.
        hint: What to try next; may be empty.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        message = complete(message)
        super().__init__(message)
        self.message = message
        self.hint = hint


def complete(message: str) -> str:
    """Return a message that ends with what happened, even if the cause has no text."""
    text = message.rstrip()
    return f"{text} no reason was given" if text.endswith(":") else message


class UsageError(CloudJobError):
    """Flags or files cannot be read."""

    exit_code = 2


class SpecError(UsageError):
    """A job description has errors; ``problems`` lists all of them."""

    def __init__(self, problems: Sequence[str], *, hint: str = "") -> None:
        self.problems = tuple(map(complete, problems))
        super().__init__("; ".join(self.problems), hint=hint)


class PackageError(CloudJobError):
    """The source cannot be packed."""

    exit_code = 3


class StoreError(CloudJobError):
    """The object store refused or cannot be reached."""

    exit_code = 4


class InvalidKey(StoreError):
    """A key that no object of ours has, such as one that leaves its folder."""


class ObjectMissing(StoreError):
    """There is no such object in the store."""


class UnreadableObject(StoreError):
    """An object cannot be what cloudjob would have written there: too large, or not a file."""


class BackendError(CloudJobError):
    """The platform refused or cannot be reached."""

    exit_code = 5


class NotAuthorised(BackendError):
    """The platform rejected the credentials or denied access."""


class Unreachable(BackendError):
    """The platform does not answer at the moment; a command that waits for a job tries again."""


class RunsElsewhere(BackendError):
    """A job runs, or ran, on another machine, which alone can tell whether it still does.

    Args:
        host: The name of that machine.
    """

    def __init__(self, doing: str, job: str, host: str) -> None:
        super().__init__(
            f"{doing} {job}: it runs on {host}, whose processes this machine cannot see",
            hint=f"run the command on {host}; if that machine no longer exists, "
            f"`cloudjob rm --force {job}` removes the job",
        )
        self.host = host


class Unanswered(BackendError):
    """A request was sent but not answered, so it may or may not have been carried out."""


class NotReady(BackendError):
    """A job would fail; ``problems`` lists each reason with a hint."""

    def __init__(self, problems: Sequence[tuple[str, str]]) -> None:
        super().__init__("; ".join(what for what, _ in problems))
        self.problems = tuple(problems)


class JobNotFound(BackendError):
    """No job has this name."""

    exit_code = 6


class RecordsError(CloudJobError):
    """The job records of this machine cannot be used."""


class WaitTimeout(CloudJobError, TimeoutError):
    """A job did not end within the time that ``Job.wait`` was given; the job continues."""

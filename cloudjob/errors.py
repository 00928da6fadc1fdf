"""The tree of errors: each one a line that says what was being done, to what, and what came back.

CloudJobError            exit code 1
+- UsageError            2   flags or files cannot be read
|  +- SpecError          2   .problems: every fault at once
+- PackageError          3   the source cannot be packed
+- StoreError            4   the object store refused or cannot be reached
+- BackendError          5   the platform refused or cannot be reached
|  +- NotAuthorised      5   it does not know who we are, or does not let us
|  +- Unreachable       5   it does not answer now; what runs there goes on
|  +- Unanswered         5   nobody knows whether what was sent was done
|  +- NotReady           5   .problems: everything that was found before the job was sent
|  +- JobNotFound        6
+- RecordsError          1   the job records of this machine cannot be used
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


class CloudJobError(Exception):
    """Anything cloudjob reports to its user in one line.

    Args:
        message: *doing what: to which thing: what came back*.
        hint: What to try next; empty when there is nothing to say.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(CloudJobError):
    """Flags or files cannot be read."""

    exit_code = 2


class SpecError(UsageError):
    """A job description has faults; ``problems`` lists every one of them."""

    def __init__(self, problems: Sequence[str], *, hint: str = "") -> None:
        super().__init__("; ".join(problems), hint=hint)
        self.problems = tuple(problems)


class PackageError(CloudJobError):
    """The source cannot be packed."""

    exit_code = 3


class StoreError(CloudJobError):
    """The object store refused or cannot be reached."""

    exit_code = 4


class BackendError(CloudJobError):
    """The platform refused or cannot be reached."""

    exit_code = 5


class NotAuthorised(BackendError):
    """The platform does not know who we are, or does not let us."""


class Unreachable(BackendError):
    """The platform does not answer now: a command that waits for a job asks again for a while."""


class Unanswered(BackendError):
    """A request was sent, and nobody knows whether it was done."""


class NotReady(BackendError):
    """A job would fail; ``problems`` lists why, each as what was found and what to do."""

    def __init__(self, problems: Sequence[tuple[str, str]]) -> None:
        super().__init__("; ".join(found for found, _ in problems))
        self.problems = tuple(problems)


class JobNotFound(BackendError):
    """No job has this name."""

    exit_code = 6


class RecordsError(CloudJobError):
    """The job records of this machine cannot be used."""

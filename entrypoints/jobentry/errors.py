"""The error that ends the entry of a node."""

from __future__ import annotations

from jobentry.contract import exits
from jobentry.contract.exits import Failure


class EntryError(Exception):
    """The entry cannot run the job."""

    def __init__(
        self,
        message: str,
        code: int = exits.ENTRY_FAILED,
        hint: str = "",
        cause: str = "entry",
        damaged_layers: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.code = code
        self.hint = hint
        self.cause = cause
        self.damaged_layers = damaged_layers
        self.failure: Failure | None = None

    @classmethod
    def from_failure(cls, failure: Failure, cause: str) -> EntryError:
        """Return the error that ends the job with ``failure``."""
        error = cls(failure.message, failure.exit_code or exits.ENTRY_FAILED, cause=cause)
        error.failure = failure
        return error

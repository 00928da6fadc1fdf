"""The error that ends the entry of a node."""

from __future__ import annotations

from jobentry.contract import exits
from jobentry.contract.exits import Cause, Failure, Outcome


class EntryError(Exception):
    """The entry cannot run the job."""

    def __init__(
        self,
        message: str,
        code: int = exits.ENTRY_FAILED,
        hint: str = "",
        cause: Cause = Cause.ENTRY,
        damaged_layers: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.code = code
        self.hint = hint
        self.cause = cause
        self.damaged_layers = damaged_layers
        self._failure: Failure | None = None

    @classmethod
    def from_outcome(cls, outcome: Outcome) -> EntryError:
        """Return the error that ends the job with an outcome that has a failure."""
        assert outcome.failure is not None
        error = cls(outcome.failure.message, outcome.exit_code, cause=outcome.cause)
        error._failure = outcome.failure
        return error

    def outcome(self, node: int, host: str) -> Outcome:
        """Return how the job ends by this error on a node; ``host`` is the node's name."""
        failure = Failure(node, host, exit_code=self.code, message=str(self))
        return Outcome(self.code, self.cause, self._failure or failure)

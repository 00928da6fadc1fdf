"""What ends the entry of a node before, or instead of, its ranks."""

from __future__ import annotations

from jobentry.contract import exits


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

"""The library's log: warnings of the logger ``cloudjob``, such as the service it is waiting for."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import logging
    from collections.abc import Callable

# Returns a handler for a program without one; a library does not print, so the default has none.
new_handler: Callable[[], logging.Handler] | None = None


def warn(message: str) -> None:
    """Log a warning; a program that wants to show it configures logging."""
    # The import takes milliseconds, so only a command that warns does it.
    import logging

    logger = logging.getLogger("cloudjob")
    if all(isinstance(handler, logging.NullHandler) for handler in logger.handlers):
        logger.addHandler(new_handler() if new_handler else logging.NullHandler())
    logger.warning("%s", message)

"""Undoes a submit that fails, so that it leaves either a job or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from cloudjob.errors import CloudJobError, Unanswered
from cloudjob.home.records import Records
from cloudjob.store.base import ObjectStore
from cloudjob.store.parallel import call_with_timeout
from cloudjob.tracking import descriptions

# The time limit in which a failed or cancelled submit deletes the objects it has stored.
_UNDO_S = 3.0


@dataclass(slots=True)
class Undo:
    """The steps to undo if a submit fails.

    Args:
        on_platform: Removes the job from its platform; set when sending begins.
        is_over: Whether the job was sent, after which nothing is undone.
    """

    on_platform: Callable[[], None] | None = None
    is_over: bool = False


@contextmanager
def undo_on_failure(store: ObjectStore, db: Records, job: str) -> Iterator[Undo]:
    """Undo what the body did if it fails."""
    undo = Undo()
    try:
        yield undo
    except BaseException as error:
        if undo.is_over or not _is_unsent(undo, error):
            raise
        with suppress(CloudJobError, TimeoutError):
            call_with_timeout(_UNDO_S, lambda: descriptions.delete_objects(store, job))
        with suppress(CloudJobError):
            db.remove(job)
        raise


def _is_unsent(undo: Undo, error: BaseException) -> bool:
    """Whether the platform does not have the job; if that is uncertain, try to remove the job."""
    is_refused = isinstance(error, CloudJobError) and not isinstance(error, Unanswered)
    if undo.on_platform is None or is_refused:
        return True
    try:
        undo.on_platform()
    except CloudJobError:
        # The job may be running: its record stays, so that `cancel` and `rm` find it.
        return False
    return True

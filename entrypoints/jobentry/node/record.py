"""Write the exit record, and store the journal and the log of a node beside it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from types import FrameType
from typing import Iterator, Sequence

from jobentry.contract import exits, messages, names, paths
from jobentry.contract.env import NodeEnv
from jobentry.contract.exits import ExitRecord, Failure
from jobentry.contract.journal import Phase
from jobentry.errors import EntryError
from jobentry.log import log_message
from jobentry.node.journal import STORE_LIMIT_S, Journal
from jobentry.secrets import masking

# The signals that cancel a job.
CANCEL_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Seconds that the end of a cancelled job waits for its journal to be stored.
_CANCELLED_JOURNAL_S = 1.0
# Seconds to retry writing the record of a cancelled job.
_CANCELLED_RECORD_S = 5


def folder(node: NodeEnv) -> str:
    """Return the URI of the folder of the record."""
    return node.record_uri.rpartition("/")[0]


def from_error(
    node: NodeEnv, error: EntryError, journal: Journal, started_at: float
) -> exits.ExitRecord:
    """Return the record of a job that the head could not run."""
    return ExitRecord(
        job=node.job,
        outcome=error.outcome(node.node, node.host),
        started_at=rfc3339(started_at),
        ended_at=rfc3339(time.time()),
        phases=phases(journal),
        damaged_layers=error.damaged_layers,
    )


def write_failure(job: str, failure: Failure, cause: exits.Cause, uri: str) -> None:
    """Write the record of a job that failed before this node knew more about it."""
    outcome = exits.Outcome(failure.exit_code or exits.ENTRY_FAILED, cause, failure)
    write(ExitRecord(job, outcome, ended_at=rfc3339(time.time())), uri)


def phases(
    journal: Journal, others: Sequence[tuple[int, Phase]] = ()
) -> tuple[tuple[int, str, str, str], ...]:
    """Return the phases of all nodes for the record; one that has not ended ends now."""
    now = time.time()
    return tuple(
        (index, phase.name, rfc3339(phase.started_at), rfc3339(phase.ended_at or now))
        for index, phase in [*((0, phase) for phase in journal.phases), *others]
    )


def close_journal(node: NodeEnv, journal: Journal, *, is_cancelled: bool) -> None:
    """End the journal and the log of this node, and store both beside the record."""
    journal.finish()
    if node.record_uri:
        limit_s = _CANCELLED_JOURNAL_S if is_cancelled else STORE_LIMIT_S
        uri = f"{folder(node)}/{paths.journal_name(node.node)}"
        journal.store((uri, *_of_attempt(uri)), limit_s)


def _of_attempt(uri: str) -> tuple[str, ...]:
    """Return where an object of the record is kept if there is another attempt; none without."""
    attempt = os.environ.get(names.CLOUDJOB_ATTEMPT, "")
    if not attempt.isdecimal():
        return ()
    parent, _, name = uri.rpartition("/")
    return (f"{parent}/{paths.attempt_name(int(attempt))}/{name}",)


def write(record: ExitRecord, uri: str, *, is_cancelled: bool = False) -> None:
    """Write the record, with secrets masked, if the job has a place for it.

    Where the nodes are processes of one machine, their controller finds it there, too, even if the
    store does not answer.
    """
    if not uri:
        return
    from jobentry import objects

    failure = record.outcome.failure
    if failure is not None:
        masked = record.outcome._replace(failure=_masked(failure))
        record = record._replace(outcome=masked)
    data = exits.dump(record)
    _keep_on_machine(data)
    try:
        with _limited(is_cancelled=is_cancelled):
            for place in (uri, *_of_attempt(uri)):
                objects.write(data, place)
    except (objects.ObjectError, OSError, EntryError) as error:
        log_message(messages.unwritten_record(error))


def _keep_on_machine(data: bytes) -> None:
    folder = os.environ.get(names.CLOUDJOB_CONTROL_DIR, "")
    if folder:
        path = os.path.join(folder, paths.RECORD)
        with contextlib.suppress(OSError):  # no room: the controller decides without it
            with open(path + ".new", "wb") as file:
                file.write(data)
            os.replace(path + ".new", path)


def exists(uri: str) -> bool:
    """Whether a record was written."""
    if not uri:
        return False
    from jobentry import objects

    try:
        return bool(objects.read(uri))
    except (objects.ObjectError, OSError):
        return False


def rfc3339(seconds: float) -> str:
    """Return a time since 1970 as text."""
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return "%s.%03dZ" % (whole, int(seconds % 1 * 1000))


def _masked(failure: Failure) -> Failure:
    return failure._replace(
        message=masking.hide(failure.message),
        last_lines=tuple(masking.hide(line) for line in failure.last_lines),
    )


@contextlib.contextmanager
def _limited(*, is_cancelled: bool) -> Iterator[None]:
    """Limit the wait for the store to a few seconds once the job is cancelled."""

    def hurry(*_: object) -> None:
        signal.signal(signal.SIGALRM, _give_up)
        signal.alarm(_CANCELLED_RECORD_S)

    before = {number: signal.signal(number, hurry) for number in CANCEL_SIGNALS}
    if is_cancelled:
        hurry()
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.alarm(0)
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)


def _give_up(_number: int, _frame: FrameType | None) -> None:
    raise EntryError(f"the store has not answered for {_CANCELLED_RECORD_S} s")

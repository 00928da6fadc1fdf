"""Requests to the head of a job through its store, where no command reaches the nodes.

One request is there at a time, so several readers take turns: each waits until the request of
another is answered or gone.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Callable

from cloudjob.errors import BackendError, CloudJobError, ObjectMissing, UnreadableObject, UsageError
from cloudjob.model.times import seconds_of
from cloudjob.store.base import ObjectStore
from cloudjob.tracking.access import JobAccess
from jobentry.contract.names import CLOUDJOB_SIGNED_URIS
from jobentry.contract.paths import SIGNED_S, JobPaths
from jobentry.system.requests import (
    ANSWER_LIMIT_BYTES,
    ANSWER_S,
    LOOK_S,
    REQUEST_LIMIT_BYTES,
    answer_to,
)

_POLL_S = 1.0
# A head needs at most the first for an answer; then its reader has given up or was killed.
_TURN_S = LOOK_S + 2 * ANSWER_S
_PATIENCE_S = 3 * _TURN_S


def need_access(access: JobAccess) -> None:
    """Check that the head of a job may look for requests in its store.

    Raises:
        UsageError: It has no signed URLs, or they have expired.
    """
    job = access.record.job
    problem = ""
    sent = access.submission().get("access")
    if not isinstance(sent, dict) or CLOUDJOB_SIGNED_URIS not in sent:
        problem = "an older version of cloudjob submitted it, so it does not look for requests"
    elif time.time() > seconds_of(access.record.created_at) + SIGNED_S:
        problem = "it looks for requests only in the first 7 days after its submit"
    if problem:
        hint = f"`cloudjob top {job}` shows where each rank is; its log has reports of hangs"
        raise UsageError(f"asking the nodes of {job}: {problem}", hint=hint)


def ask(
    store: ObjectStore,
    job: str,
    question: bytes,
    *,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> bytes:
    """Return the answer of a job's head to a question.

    Raises:
        BackendError: It does not answer in time.
    """
    paths = JobPaths(job)
    begin = clock()
    ours = b""
    try:
        while clock() < begin + _PATIENCE_S:
            answer = _read(store, paths.answer, ANSWER_LIMIT_BYTES)
            if ours and answer_to(ours, answer):
                return answer_to(ours, answer)
            pending = _read(store, paths.request, REQUEST_LIMIT_BYTES)
            is_left = not ours and clock() > begin + _TURN_S
            if not pending or is_left or answer_to(pending, answer):
                # A head answers each request once.
                ours = _unique(question)
                store.put_bytes(ours, paths.request)
            pause(_POLL_S)
    finally:
        # An answer counts more than what is left; the next reader waits a little longer.
        with contextlib.suppress(CloudJobError):
            for key in (paths.request, paths.answer):
                store.delete(key)
    raise BackendError(
        f"asking the head of {job} through its store: no answer within {_PATIENCE_S:g} s",
        hint="a head looks for requests once its ranks are about to start, if it reaches the store",
    )


def _unique(question: bytes) -> bytes:
    return json.dumps({**json.loads(question), "nonce": secrets.token_hex(8)}).encode("ascii")


def _read(store: ObjectStore, key: str, limit_bytes: int) -> bytes:
    """Return an object's bytes; none if it is missing, or not one of ours."""
    try:
        return store.get_bytes(key, limit_bytes=limit_bytes)
    except (ObjectMissing, UnreadableObject):
        return b""

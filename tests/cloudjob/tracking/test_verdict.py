"""The status of an ended job joins what its head recorded and what its platform knows."""

from __future__ import annotations

import pytest

from cloudjob.backends.base import NativeStatus
from cloudjob.model.status import JobState, JobStatus
from cloudjob.tracking.verdict import with_record
from jobentry.contract.exits import (
    MEMORY_GUESS,
    NOT_FOR_MEMORY,
    OUT_OF_MEMORY,
    ExitRecord,
    Failure,
)

REASON = "out of memory: node 1 (worker-1), limited to 4 GiB"


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        (MEMORY_GUESS, f"killed by SIGKILL ({REASON})"),
        (NOT_FOR_MEMORY, f"killed by SIGKILL ({REASON})"),
        (
            f"{OUT_OF_MEMORY} (limit 4.0 GiB; rank 1: 3.9 GiB)",
            "killed by SIGKILL: out of memory (limit 4.0 GiB; rank 1: 3.9 GiB)"
            " (node 1 (worker-1), limited to 4 GiB)",
        ),
    ],
)
def test_the_reason_of_the_platform_completes_that_of_the_entry(reason: str, message: str):
    status = JobStatus(
        job="j",
        name="j",
        backend="docker",
        state=JobState.FAILED,
        native_state="exited",
        nodes=2,
        procs_per_node=1,
        created_at="2026-01-01T00:00:00.000Z",
    )
    failure = Failure(1, "worker-1", 1, 9, 137, "killed by SIGKILL" + reason)
    native = NativeStatus(JobState.FAILED, "exited", reason=REASON)
    joined = with_record(status, native, ExitRecord("j", 137, "user", failure), "", lambda node: ())

    assert joined.failure is not None
    assert joined.failure.message == message

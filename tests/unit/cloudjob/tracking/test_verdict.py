"""How a job ended, from what its platform reports and what its head has recorded."""

from __future__ import annotations

import pytest

from cloudjob.backends.native import Ended, OutOfMemory, Stop
from cloudjob.model.status import Cause, Failure, JobState, JobStatus, state_of
from cloudjob.tracking import verdict
from jobentry.contract import exits, node_end
from jobentry.contract.exits import ExitRecord, Outcome
from tests.support.statuses import status_of

AT = "2026-01-01T00:00:10.000Z"
RANK_FAILED = Failure(1, "w-1", 2, exit_code=3, message="ValueError")
SIGNALLED = Failure(1, "w-1", signal=15, exit_code=143, message="cancelled: the job was sent")
KILLED = Failure(1, exit_code=137, message="node 1 was killed")

SUCCESS = Outcome(0)
FAILED = Outcome(3, Cause.USER, RANK_FAILED)
STOPPED = Outcome(143, Cause.CANCELLED, SIGNALLED)

SUCCEEDED = Ended("native", Cause.NONE)
LOST = Ended("native", failure=KILLED, is_unwatched=True)
BROKEN = Ended("native", failure=KILLED)
CANCELLED = Ended("native", Cause.CANCELLED, Failure(exit_code=143))


def ended(native: Ended, outcome: Outcome | None, lines: tuple[str, ...] = ()) -> JobStatus:
    """Return the status of a job with this report of its platform and this record."""
    record = None if outcome is None else ExitRecord("train-1", outcome, ended_at=AT)
    status = status_of(state=native.state, exit_code=native.exit_code)
    return verdict.with_record(status, native, record, "", lambda _: lines)


@pytest.mark.parametrize(
    ("native", "outcome", "state", "code", "cause"),
    [
        (SUCCEEDED, SUCCESS, JobState.SUCCEEDED, 0, None),
        (SUCCEEDED, FAILED, JobState.FAILED, 3, Cause.USER),
        (SUCCEEDED, STOPPED, JobState.CANCELLED, 143, Cause.CANCELLED),
        (SUCCEEDED, None, JobState.SUCCEEDED, 0, None),
        (BROKEN, SUCCESS, JobState.FAILED, 137, Cause.PLATFORM),
        (BROKEN, FAILED, JobState.FAILED, 3, Cause.USER),
        (BROKEN, STOPPED, JobState.CANCELLED, 143, Cause.CANCELLED),
        (BROKEN, None, JobState.FAILED, 137, Cause.PLATFORM),
        (LOST, SUCCESS, JobState.SUCCEEDED, 0, None),
        (CANCELLED, SUCCESS, JobState.SUCCEEDED, 0, None),
        (CANCELLED, FAILED, JobState.CANCELLED, 3, Cause.CANCELLED),
        (CANCELLED, STOPPED, JobState.CANCELLED, 143, Cause.CANCELLED),
        (CANCELLED, None, JobState.CANCELLED, 143, Cause.CANCELLED),
        (BROKEN._replace(stop=Stop.OUTSIDE), STOPPED, JobState.FAILED, 143, Cause.PLATFORM),
        (BROKEN._replace(stop=Stop.PLATFORM), STOPPED, JobState.FAILED, 137, Cause.PLATFORM),
        (BROKEN._replace(stop=Stop.PLATFORM), FAILED, JobState.FAILED, 3, Cause.USER),
        (BROKEN._replace(cause=Cause.TIMEOUT), None, JobState.FAILED, 137, Cause.TIMEOUT),
        (BROKEN, Outcome(1), JobState.FAILED, 1, Cause.PLATFORM),
        (SUCCEEDED, Outcome(0, Cause.USER), JobState.SUCCEEDED, 0, None),
    ],
)
def test_record_and_platform_decide_together_how_a_job_ended(
    native: Ended, outcome: Outcome | None, state: JobState, code: int, cause: Cause | None
):
    status = ended(native, outcome)

    assert (status.state, status.exit_code, status.cause) == (state, code, cause)
    assert (status.failure is None) == (status.state is JobState.SUCCEEDED or outcome == Outcome(1))


def test_a_recorded_failure_is_carried_unchanged():
    assert ended(BROKEN, FAILED).failure == RANK_FAILED


def test_a_cancelled_job_blames_no_node():
    assert ended(BROKEN, STOPPED).failure == SIGNALLED._replace(node=None, host="")


def test_a_stop_that_is_no_cancel_is_explained():
    status = ended(BROKEN._replace(stop=Stop.OUTSIDE), STOPPED)

    message = "stopped from outside with SIGTERM, but the job was not cancelled"
    assert status.failure == SIGNALLED._replace(message=message)


def test_a_record_of_an_earlier_attempt_does_not_count():
    native = BROKEN._replace(attempt_at="2026-01-01T00:00:11.000Z")

    assert ended(native, FAILED).failure == KILLED


def test_the_platforms_reason_replaces_the_guess():
    failure = Failure(1, message=f"killed by SIGKILL{exits.MEMORY_GUESS}")
    status = ended(BROKEN._replace(reason="out of memory"), Outcome(137, Cause.USER, failure))

    assert status.failure == failure._replace(message="killed by SIGKILL (out of memory)")


def test_a_node_that_never_joined_is_explained_by_its_own_log():
    failure = node_end.failure(1, "w-1", 125)
    status = ended(BROKEN, Outcome(125, Cause.ENTRY, failure), ("no space left",))

    assert status.failure == failure._replace(last_lines=("no space left",))


def test_a_cancelled_job_whose_frozen_head_was_killed_has_the_code_of_a_cancel():
    native = CANCELLED._replace(failure=Failure(exit_code=137))

    assert ended(native, None).exit_code == 143


@pytest.mark.parametrize(
    ("outcome", "retries", "expected"),
    [
        (Outcome(0), 2, Cause.NONE),
        (Outcome(0, Cause.USER), 0, Cause.NONE),
        (FAILED, 0, Cause.PLATFORM),
        (FAILED, 1, None),
        (STOPPED, 0, Cause.CANCELLED),
    ],
)
def test_the_record_decides_alone_if_the_platform_cannot_be_queried(
    outcome: Outcome, retries: int, expected: Cause | None
):
    status = verdict.ended_elsewhere(ExitRecord("train-1", outcome), {"retries": retries})

    assert (status and status.cause) == expected


@pytest.mark.parametrize("cause", Cause)
def test_what_has_ended_is_final(cause: Cause):
    assert state_of(cause).is_final


REASON = OutOfMemory("node 1 (worker-1)", "limited to 4 GiB", "; go")


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        (exits.MEMORY_GUESS, f"killed by SIGKILL ({REASON})"),
        (exits.NOT_FOR_MEMORY, f"killed by SIGKILL ({REASON})"),
        (
            f"{exits.OUT_OF_MEMORY} (limit 4 GiB; rank 1: 4 GiB)",
            "killed by SIGKILL: out of memory (limit 4 GiB; rank 1: 4 GiB) (node 1 (worker-1); go)",
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
    native = Ended("exited", reason=REASON)
    record = ExitRecord("j", Outcome(137, Cause.USER, failure))
    joined = verdict.with_record(status, native, record, "", lambda node: ())

    assert joined.failure is not None
    assert joined.failure.message == message

"""Whether a failed job is tried again: tables of values."""

from __future__ import annotations

import pytest

from cloudjob.backends.attempts import (
    MOST_ATTEMPTS,
    AttemptProgress,
    FailedAttempt,
    Reason,
    RetryDecision,
    Rules,
    decide,
    explain,
    kind_of,
    progress_of,
)
from jobentry.contract.exits import Cause, Failure, Outcome
from jobentry.contract.retry_kinds import DEFAULT, WORDS, Kind

THREE = Rules(3)


def failed(
    kind: Kind, message: str = "", step: int = -1, lines: int = 0, **values
) -> FailedAttempt:
    return FailedAttempt(kind, Failure(message=message, **values), AttemptProgress(step, lines))


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (None, Kind.PLATFORM),
        (Outcome(137, Cause.PLATFORM), Kind.PLATFORM),
        (Outcome(124, Cause.HANG), Kind.HANG),
        (Outcome(124, Cause.TIMEOUT), Kind.TIMEOUT),
        (Outcome(143, Cause.CANCELLED), Kind.PREEMPTED),
        (Outcome(1, Cause.USER, Failure(message="ValueError: x")), Kind.USER),
        (Outcome(2, Cause.USER), Kind.USER),
        (Outcome(9, Cause.USER), Kind.EXIT),
        (Outcome(139, Cause.USER, Failure(signal=11)), Kind.CRASH),
        (Outcome(127, Cause.ENTRY, Failure(message="train: not found")), Kind.ENTRY),
        (Outcome(125, Cause.ENTRY, Failure(message="503; gave up after 180 s")), Kind.NETWORK),
        # Words of a script are not those of the entry.
        (Outcome(1, Cause.USER, Failure(message="Error: no answer")), Kind.USER),
        (
            Outcome(1, Cause.USER, Failure(last_lines=("ncclRemoteError: a remote error",))),
            Kind.NETWORK,
        ),
        (
            Outcome(1, Cause.USER, Failure(message="OSError: [Errno 28] No space left on device")),
            Kind.DISK,
        ),
        (Outcome(125, Cause.ENTRY, Failure(message="x: Disk quota exceeded")), Kind.DISK),
    ],
)
def test_the_kind_of_a_failure(outcome: Outcome | None, expected: Kind):
    assert kind_of(outcome) is expected
    assert kind_of(outcome, is_cancelled=True) is Kind.CANCELLED


@pytest.mark.parametrize("kind", Kind)
def test_a_number_of_retries_repeats_all_but_exceptions_and_what_cannot_change(kind: Kind):
    assert decide([failed(kind)], THREE).is_again is (kind.value in DEFAULT)
    assert decide([failed(kind)], THREE._replace(on=WORDS)).is_again is (kind.value in WORDS)
    assert not decide([failed(kind)], Rules(0, WORDS)).is_again


CASES = {
    "three retries": ([Kind.EXIT] * 3, Reason.AGAIN),
    "four attempts": ([Kind.EXIT] * 4, Reason.NO_RETRIES),
    "preemptions do not count": ([Kind.PREEMPTED] * 9 + [Kind.EXIT] * 3, Reason.AGAIN),
    "not even the last one": ([Kind.EXIT] * 3 + [Kind.PREEMPTED], Reason.AGAIN),
    "but they have a limit": ([Kind.PREEMPTED] * MOST_ATTEMPTS, Reason.NO_RETRIES),
    "a full disk": ([Kind.DISK], Reason.NEVER),
    "a cancel after a failure": ([Kind.EXIT, Kind.CANCELLED], Reason.NEVER),
    "an exception": ([Kind.USER], Reason.NOT_CHOSEN),
}


@pytest.mark.parametrize("case", CASES)
def test_how_many_attempts_there_are(case: str):
    kinds, reason = CASES[case]
    attempts = [failed(kind, step=step) for step, kind in enumerate(kinds)]

    assert decide(attempts, THREE).reason is reason


@pytest.mark.parametrize("kind", [Kind.USER, Kind.CRASH, Kind.ENTRY])
def test_the_same_failure_at_the_same_place_ends_the_attempts(kind: Kind):
    rules = Rules(3, WORDS)
    lines = ('  File "train.py", line 3, in <module>', "ValueError: x")
    one = failed(kind, "ValueError: x", exit_code=1, rank=0, step=1, last_lines=lines)
    elsewhere = one._replace(
        failure=one.failure._replace(last_lines=('  File "train.py", line 4, in <module>',))
    )
    on_another_rank = one._replace(failure=one.failure._replace(rank=3, host="other"))

    assert decide([one, on_another_rank], rules).reason is Reason.SAME
    assert decide([one, elsewhere], rules).is_again
    assert decide([one, one._replace(failure=Failure(signal=11))], rules).is_again


def test_attempts_that_come_no_further_end():
    rules = Rules(10)
    first = failed(Kind.HANG, step=5)
    stuck = failed(Kind.HANG, step=4)

    assert decide([first, stuck, stuck], rules).is_again
    assert decide([first, stuck, stuck, stuck], rules).reason is Reason.NO_PROGRESS
    assert decide([first, stuck, stuck, failed(Kind.HANG, step=6), stuck], rules).is_again
    assert decide([first, *[failed(Kind.PREEMPTED, step=4)] * 5], rules).is_again


def test_attempts_that_print_nothing_end():
    assert decide([failed(Kind.PLATFORM)] * 3, Rules(10)).reason is Reason.NO_PROGRESS
    assert decide([failed(Kind.PLATFORM, lines=n) for n in (1, 2, 3)], Rules(10)).is_again


def test_pauses_double_and_the_time_limit_is_that_of_the_job():
    rules = Rules(10, backoff_s=10)
    attempts = [failed(Kind.EXIT, step=step) for step in range(3)]

    assert [decide(attempts[:count], rules).pause_s for count in (1, 2, 3)] == [10, 20, 40]
    assert decide(attempts, rules, left_s=41) == RetryDecision(Reason.AGAIN, 40)
    assert decide(attempts, rules, left_s=40).reason is Reason.NO_TIME


def test_the_log_says_why():
    rules = Rules(3, backoff_s=10)
    hung, raised = failed(Kind.HANG, step=1), failed(Kind.USER, step=2)

    assert explain([hung], rules, decide([hung], rules)) == (
        "attempt 1 of 4 failed (cause: hang); attempt 2 of 4 begins in 10 s"
    )
    assert explain([hung, raised], rules, decide([hung, raised], rules)) == (
        "attempt 2 of 4 failed (cause: user); the job is not tried again: "
        "`retries: {on: …}` does not name that"
    )


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], AttemptProgress()),
        ([b"jobentry: step 9\n", b"[0] hello\n"], AttemptProgress(-1, 1)),
        (
            [b"[0] step 3 loss 0.5\n", b"[1] step=12\n", b"[0] Epoch [2/9]\n"],
            AttemptProgress(12, 3),
        ),
        ([b"[0] " + b"x" * 600 + b" step 7\n"], AttemptProgress(-1, 1)),
    ],
)
def test_progress_is_the_highest_step_of_any_rank(lines: list[bytes], expected: AttemptProgress):
    assert progress_of(lines) == expected

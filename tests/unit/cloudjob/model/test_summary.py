"""Short descriptions of a job."""

from __future__ import annotations

import time
from typing import Any

import pytest

from cloudjob.cli.endings import report
from cloudjob.model import summary, times
from cloudjob.model.status import (
    Attempt,
    Failure,
    JobState,
    JobStatus,
    from_json,
    to_json,
)
from cloudjob.model.text import size_text
from tests.support.statuses import status_of


def ended(**more: Any) -> JobStatus:
    values: dict[str, Any] = {
        "state": JobState.SUCCEEDED,
        "started_at": "2026-01-01T00:00:01.000Z",
        "ended_at": "2026-01-01T01:05:01.000Z",
        "procs_per_node": 4,
    }
    return status_of(**{**values, **more})


@pytest.mark.parametrize(
    ("attempt", "expected"),
    [
        (None, ""),
        (Attempt(number=1, most=4), "1 of 4"),
        (
            Attempt(number=2, most=4, previous_cause="hang"),
            "2 of 4; the one before failed (cause: hang)",
        ),
    ],
)
def test_an_attempt_names_the_cause_before(attempt: Attempt | None, expected: str):
    status = ended(attempt=attempt)

    assert summary.attempt(status) == expected
    assert from_json(to_json(status)) == status


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1.0, "0.0 s"),
        (4.25, "4.2 s"),
        (4, "4 s"),
        (9.99, "9.9 s"),
        (59.9, "59 s"),
        (61, "1 min 01 s"),
        (3900, "1 h 05 min"),
        (200_000, "2 d 07 h"),
    ],
)
def test_a_duration_is_shown_in_its_two_largest_units(seconds: float, text: str):
    assert summary.span(seconds) == text


def test_the_age_has_one_unit():
    created = times.rfc3339(time.time() - 2 * 3600 - 600)

    assert summary.age(ended(created_at=created)) == "2 h"


def test_the_duration_is_empty_when_start_or_end_are_unknown():
    assert summary.duration(ended()) == "1 h 05 min"
    assert summary.duration(ended(started_at=None)) == ""
    assert summary.duration(ended(ended_at=None)) == ""


def test_the_reason_names_node_and_rank_once():
    failed = {"state": JobState.FAILED}
    rank = Failure(node=1, rank=5, message="ended by SIGKILL")
    node = Failure(node=1, message="node 1 was lost")

    assert summary.reason(ended(failure=rank, **failed)) == "ended by SIGKILL (node 1 rank 5)"
    assert summary.reason(ended(failure=node, **failed)) == "node 1 was lost"
    full = rank._replace(message="out of memory (node 1 (w-1))")
    assert summary.reason(ended(failure=full, **failed)) == f"{full.message} (rank 5)"
    assert summary.reason(ended()) == ""
    assert summary.reason(ended(state=JobState.UNKNOWN, native_state="gone")) == "gone"


def test_a_duration_is_unknown_after_the_clock_was_set_back(capsys: pytest.CaptureFixture[str]):
    status = ended(ended_at="2025-12-31T00:00:10.000Z")

    report(status)

    assert summary.duration(status) == ""
    assert capsys.readouterr().err == f"job {status.job}: SUCCEEDED\n"


def test_a_size_has_its_noun_in_the_right_number():
    assert [size_text(size) for size in (0, 1, 999, 1500)] == [
        "0 bytes", "1 byte", "999 bytes", "1.5 kB",
    ]  # fmt: skip

"""The states of a job, and the object that ``status --json`` prints."""

import json

import pytest

from cloudjob.model.status import (
    Code,
    CutLog,
    Failure,
    Hang,
    JobFailed,
    JobState,
    Phase,
    SlowRanks,
    Wait,
    WaitPhase,
    from_json,
    is_current,
    to_json,
)
from cloudjob.model.times import local
from tests.support.statuses import status_of

RUNNING = status_of()
FAILED = status_of(
    state=JobState.FAILED,
    cause="user",
    exit_code=3,
    failure=Failure(
        node=1,
        host="node-1",
        rank=1,
        exit_code=3,
        last_lines=("a", "b\udcff"),
        stack_lines=("f() at x.py:1",),
    ),
    code=Code(uri="file:///code", digest="sha256:0", size_bytes=10, files=2),
    phases=(Phase(node=0, name="run", started_at="2026-01-01T00:00:01.000Z"),),
    slow=SlowRanks(
        ranks=(1,),
        nodes=(0,),
        cost_percent=31,
        reason="uneven",
        place="augment() at data.py:30",
        message="rank 1 on node 0",
    ),
    hang=Hang(
        rule="one-idle",
        confidence="high",
        ranks=(1,),
        since="2026-01-01T00:00:01.000Z",
        message="rank 1 is stuck",
        details=("ranks 0,2 wait for that",),
    ),
    wait=Wait(phase=WaitPhase.PULLING, since="2026-01-01T00:00:01.000Z", message="the image"),
    cut_logs=(CutLog(1, 9, "File too large"),),
)


def test_only_three_states_are_final():
    """A job that succeeded, failed or was cancelled has ended; an unknown one may still run."""
    final = {state for state in JobState if state.is_final}

    assert final == {JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED}


@pytest.mark.parametrize("state", JobState)
def test_a_state_prints_as_its_name(state):
    assert (str(state), f"{state}", json.dumps(state)) == (
        state.value,
        state.value,
        f'"{state.value}"',
    )
    assert state == state.value


def test_a_running_job_as_json():
    assert to_json(RUNNING) == {
        "job": "train-1",
        "name": "train",
        "backend": "process",
        "state": "RUNNING",
        "native_state": "running",
        "nodes": 2,
        "procs_per_node": 1,
        "created_at": "2026-01-01T00:00:00.000Z",
        "started_at": None,
        "ended_at": None,
        "exit_code": None,
        "cause": None,
        "failure": None,
        "code": None,
        "phases": [],
        "hang": None,
        "attempt": None,
        "slow": None,
        "wait": None,
        "cut_logs": [],
    }


def test_a_failed_job_as_json():
    """Failure, code and phases do not change when they are written as JSON and read back."""
    values = to_json(FAILED)

    assert json.loads(json.dumps(values)) == values
    assert (from_json(values).slow, from_json(values).wait) == (FAILED.slow, FAILED.wait)
    assert from_json(values).cut_logs == FAILED.cut_logs
    assert values["failure"] == {
        "node": 1,
        "host": "node-1",
        "rank": 1,
        "signal": None,
        "exit_code": 3,
        "message": "",
        "last_lines": ["a", "b\udcff"],
        "stack_lines": ["f() at x.py:1"],
    }
    assert values["code"] == {
        "uri": "file:///code",
        "digest": "sha256:0",
        "size_bytes": 10,
        "files": 2,
    }
    assert values["phases"] == [
        {
            "node": 0,
            "name": "run",
            "started_at": "2026-01-01T00:00:01.000Z",
            "ended_at": None,
            "done_bytes": 0,
            "total_bytes": 0,
        }
    ]


@pytest.mark.parametrize("status", [RUNNING, FAILED])
def test_what_is_written_by_this_version_is_current(status):
    assert is_current(json.loads(json.dumps(to_json(status))))


@pytest.mark.parametrize(
    "part", ["", "failure", "code", "hang", "slow", "wait", "phases", "cut_logs"]
)
def test_what_other_versions_have_written_is_not_current(part):
    """A list prints current values as they are, so every part must have exactly today's keys."""
    for change in ({"new": 1}, None):
        values = to_json(FAILED)
        written = values[part] if part else values
        fields = written[0] if isinstance(written, list) else written
        if change is None:
            fields.pop(list(fields)[-1])
        else:
            fields.update(change)

        assert not is_current(values)


@pytest.mark.parametrize("values", [{"state": "NEW"}, {"cause": "new"}])
def test_a_word_that_this_version_does_not_know_is_not_current(values):
    assert not is_current({**to_json(FAILED), **values})


def test_the_error_of_a_failed_job_has_its_node_its_rank_and_its_last_lines():
    failure = Failure(node=1, rank=5, message="killed", last_lines=("a", "b"))
    error = JobFailed("failed", status_of(failure=failure), 1)

    assert (error.node, error.rank, error.last_lines) == (1, 5, ("a", "b"))
    assert error.hint == "job.logs() yields the lines of its log"


def test_the_error_of_a_job_that_nobody_made_fail_has_none():
    error = JobFailed("cancelled", status_of(), 1)

    assert (error.node, error.rank, error.last_lines) == (None, None, ())


def test_a_notebook_shows_times_as_all_other_views_do():
    table = status_of(created_at="2026-01-31T10:00:00.000Z")._repr_html_()

    assert f">{local('2026-01-31T10:00:00.000Z')}<" in table
    assert "T10:00" not in table

"""How an attempt ends its nodes: what it asks of the runtime, by the rules of supervision."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cloudjob.emulator.attempt import AttemptWatch
from cloudjob.emulator.database import StopRequest
from cloudjob.emulator.nodes import NodeState

RUNS = NodeState()
FAILED = NodeState(ended_at=1.0, exit_code=7)


class Runtime:
    """Notes which stops were urgent."""

    def __init__(self) -> None:
        self.stops: list[bool] = []

    def stop(self, _handle: str, *, is_urgent: bool) -> None:
        self.stops.append(is_urgent)


@pytest.fixture
def runtime() -> Runtime:
    return Runtime()


@pytest.fixture
def attempt(runtime: Runtime) -> AttemptWatch:
    """An attempt whose nodes have a grace period that no test outlives."""
    service: Any = SimpleNamespace(settings=SimpleNamespace(grace_s=3600.0), runtime=runtime)
    return AttemptWatch(SimpleNamespace(service=service), None, set())  # type: ignore[arg-type]


def row(request: StopRequest) -> Any:
    body = SimpleNamespace(spec=SimpleNamespace(auto_stop=None))
    return SimpleNamespace(stop_request=request, start_ms=0, body=body)


def test_a_failed_node_ends_the_others_once(attempt: AttemptWatch, runtime: Runtime):
    for _ in range(3):
        attempt._supervise("handle", [RUNS, FAILED])

    assert runtime.stops == [False]


@pytest.mark.parametrize("states", [[RUNS, RUNS], [RUNS, FAILED]])
def test_a_job_that_is_deleted_is_killed_at_once(
    attempt: AttemptWatch, runtime: Runtime, states: list[NodeState]
):
    """Also while its nodes have their grace period, because one of them has failed."""
    attempt._supervise("handle", states)
    attempt._heed_stop(row(StopRequest.DELETE))
    attempt._supervise("handle", states)

    assert runtime.stops[-1:] == [True]


def test_a_stopped_job_has_its_grace_period(attempt: AttemptWatch, runtime: Runtime):
    for _ in range(3):
        attempt._heed_stop(row(StopRequest.STOP))
        attempt._supervise("handle", [RUNS, RUNS])
    # A node that fails because of that is no reason to tell the others again.
    attempt._supervise("handle", [RUNS, FAILED])

    assert runtime.stops == [False]

"""Tests of the activity that `submit` shows while it follows a job."""

from __future__ import annotations

import time
from typing import Any

import pytest

from cloudjob.cli import activity as activities
from cloudjob.cli.activity import Activity, activity
from cloudjob.model.status import JobState, JobStatus, Wait, WaitPhase
from cloudjob.model.times import rfc3339
from jobentry.contract import journal
from jobentry.contract.journal import Phase, Sample
from tests.support.statuses import status_of


def phase(name: str, done_bytes: int = 0, total_bytes: int = 0) -> Phase:
    """Return a phase that began 4 s ago."""
    return Phase(name, 100.0, None, 104.0, done_bytes, total_bytes)


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ({}, ""),
        ({0: phase("package")}, "fetching the package on node 0"),
        (
            {0: phase("bring-up"), 1: phase("input DATA", 8_000_000, 20_000_000)},
            "fetching the input DATA on node 1: 8.0 MB of 20.0 MB, 2.0 MB/s, 6.0 s left",
        ),
        (
            {node: phase("package", 1_000_000, 4_000_000) for node in range(3)},
            "fetching the package: 3.0 MB of 12.0 MB, 750.0 kB/s, 12 s left",
        ),
        ({0: phase("bring-up")}, "waiting for nodes 1, 2"),
        ({node: phase("bring-up") for node in range(3)}, "connecting the nodes"),
        ({node: phase("run") for node in range(3)}, ""),
        ({0: phase("first output"), 1: phase("run")}, "waiting for the first output on node 0"),
        (
            {0: phase("run"), 2: phase("outputs", 500, 500)},
            "saving the outputs on node 2: 500 bytes, 125 bytes/s",
        ),
        ({0: phase("a phase of a newer version")}, ""),
    ],
)
def test_the_phase_of_the_slowest_nodes_is_shown(nodes: dict[int, Phase], expected: str):
    assert activity(nodes, 3, has_output=False) == expected


def test_a_node_that_writes_nothing_does_not_hide_that_others_do():
    assert activity({1: phase("first output")}, 2, has_output=True) == ""


def test_only_some_of_many_waiting_nodes_are_named():
    text = activity({0: phase("bring-up")}, 1000, has_output=False)

    assert text == "waiting for nodes 1, 2, 3, 4 and 995 more"


class Waiting:
    """A job for which only the platform's reason for waiting is known."""

    id = "train-1"
    nodes = 1
    reason = "no \x1b room"
    since_s = 0.0
    asked = 0

    def status(self) -> JobStatus:
        self.asked += 1
        since = rfc3339(time.time() - self.since_s)
        wait = Wait(phase=WaitPhase.SCHEDULING, since=since, message=self.reason)
        return status_of(state=JobState.PENDING, wait=wait)


def test_a_long_phase_is_reported_once_with_the_platforms_reason(
    monkeypatch: pytest.MonkeyPatch,
):
    job: Any = Waiting()
    short = Activity(job)
    assert (short.line(), short.news(), job.asked) == ("", "", 0)

    monkeypatch.setattr(activities, "_QUIET_S", 0.0)
    current = Activity(job)
    waiting_for = "waits: no \\x1b room"
    assert (current.line(), current.news()) == (
        f"{waiting_for} (0 s)",
        f"job train-1 {waiting_for}",
    )
    assert (current.line(), current.news()) == (f"{waiting_for} (0 s)", "")
    monkeypatch.setattr(activities, "_STATUS_S", 0.0)
    current._next_status_s = 0.0
    job.reason, job.since_s = "no quota: 9 MB/s", 90.5
    waiting_for = "waits: no quota: 9 MB/s"
    assert (current.line(), current.news()) == (
        f"{waiting_for} (1 min 30 s)",
        f"job train-1 {waiting_for}",
    )
    assert (current.line(), current.news()) == (f"{waiting_for} (1 min 30 s)", "")

    current.add(0, [journal.dump(entry) for entry in (phase("package"), Sample(at=1.0))])
    fetching = "fetching the package"
    assert (current.line(), current.news()) == (
        f"{fetching} (0 s)",
        f"job train-1, {fetching}",
    )
    current.add(0, [journal.dump(phase("package", 4_000_000, 8_000_000))])
    half = f"{fetching}: 4.0 MB of 8.0 MB, 1.0 MB/s, 4.0 s left"
    assert (current.line(), current.news()) == (f"{half} (0 s)", "")
    current._printed_s -= 2 * activities._LINE_S
    assert (current.line(), current.news()) == (f"{half} (0 s)", f"job train-1, {half}")
    current.add(0, [journal.dump(phase("package")._replace(ended_at=105.0))])
    assert (current.line(), current.news()) == ("", "")


def test_what_a_missing_node_waits_for_is_shown_while_the_head_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(activities, "_QUIET_S", 0.0)
    job: Any = Waiting()
    job.nodes = 2
    current = Activity(job)
    current.add(0, [journal.dump(phase("bring-up"))])

    assert current.line() == "waiting for node 1: no \\x1b room (0 s)"
    assert current.news()
    current._printed_s -= 100.0
    assert current.line()
    assert current.news() == ""

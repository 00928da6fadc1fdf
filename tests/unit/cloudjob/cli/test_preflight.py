"""``doctor --nodes``: its exit code, from the job and the report that it has stored."""

from __future__ import annotations

import argparse
from types import SimpleNamespace

import pytest

import cloudjob
from cloudjob.cli.preflight import check_nodes
from cloudjob.model.status import JobState
from jobentry.contract.preflight import Finding, Report, Subject, Weight
from tests.support.statuses import status_of

TABLE = (("node", ""), ("0", "ok"))
FAULT = Finding(Weight.FAULT, Subject.NETWORK, (0,), "no answer on eth0")
OPTIONS = argparse.Namespace(
    nodes="2", backend="", store=None, image="", flavor="", config=None, json=False
)


@pytest.mark.parametrize(
    ("exit_code", "report", "code", "text"),
    [
        (0, Report((), TABLE), 0, ""),
        (125, Report((FAULT,), TABLE), 1, "fault: node 0: no answer on eth0"),
        (137, Report((), TABLE), 1, "error: checking the nodes: "),
        (137, None, 1, "error: checking the nodes: "),
    ],
    ids=["healthy", "a fault", "a job that failed after the check", "no report"],
)
def test_nodes_are_only_called_healthy_if_the_job_has_succeeded(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    exit_code: int,
    report: Report | None,
    code: int,
    text: str,
):
    state = JobState.FAILED if exit_code else JobState.SUCCEEDED
    status = status_of("doctor-x", state=state, exit_code=exit_code)
    job = SimpleNamespace(
        id="doctor-x", handle="h", wait=lambda: status, preflight_report=lambda: report
    )
    monkeypatch.setattr(cloudjob, "submit", lambda spec: job)

    assert check_nodes(OPTIONS) == code

    printed = capfd.readouterr()
    assert text in printed.out + printed.err

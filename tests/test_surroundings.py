"""The table of surroundings: which row a test gets."""

from __future__ import annotations

import datetime

import pytest

from tests.support import surroundings
from tests.support.surroundings import TABLE, VARIABLE


def test_every_test_gets_every_row_in_the_course_of_time(monkeypatch: pytest.MonkeyPatch):
    rows = [row.name for row in TABLE if not row.missing()]
    start = datetime.date(2026, 11, 26)

    names = []
    for number in range(len(rows)):
        day = start + datetime.timedelta(days=number)
        monkeypatch.setenv(VARIABLE, day.isoformat())
        row = surroundings.choose("a test")
        assert row is not None
        names.append(row.name)

    assert sorted(names) == sorted(rows)


def test_a_variable_repeats_a_row_or_switches_them_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, "umask-077")
    row = surroundings.choose("a test")
    assert row is not None
    assert row.name == "umask-077"
    assert surroundings.header()[0] == f"surroundings: umask-077 ({VARIABLE})"

    monkeypatch.setenv(VARIABLE, "none")
    assert surroundings.choose("a test") is None


def test_a_row_that_does_not_exist_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, "umask-7777")

    with pytest.raises(pytest.UsageError, match="umask-7777"):
        surroundings.choose("a test")


def test_a_failed_test_names_its_surroundings(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(VARIABLE, "umask-077")
    request.applymarker(pytest.mark.surroundings)
    request.getfixturevalue("surround")
    call = pytest.CallInfo.from_call(lambda: pytest.fail("as planned"), "call")
    report = request.node.ihook.pytest_runtest_makereport(item=request.node, call=call)

    repeat = f"umask-077; to repeat: {VARIABLE}=umask-077 scripts/test '{request.node.nodeid}'"
    assert ("surroundings", repeat) in report.sections


def test_a_row_that_means_nothing_to_a_test_says_why(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, "nodes-python-3.8")
    with pytest.raises(pytest.skip.Exception, match="the one of their image"):
        surroundings.choose("tests/e2e_docker/test_jobs.py::test_x")
    with pytest.raises(pytest.skip.Exception, match="the one that has the framework"):
        surroundings.choose("tests/jobs/test_torchrun.py::test_x")

    monkeypatch.setenv(VARIABLE, "umask-077")
    row = surroundings.choose("tests/e2e_docker/test_jobs.py::test_x")
    assert row is not None
    assert row.name == "umask-077"

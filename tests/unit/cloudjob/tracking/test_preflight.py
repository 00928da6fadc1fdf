"""The report of a check of the nodes: read from the store, which others can write, and printed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from cloudjob.cli import preflight as command
from cloudjob.errors import StoreError
from cloudjob.store import open_store
from cloudjob.tracking import preflight as reports
from jobentry.contract import preflight
from jobentry.contract.preflight import Finding, Report, Subject, Weight

REPORT = Report(
    (
        Finding(Weight.FAULT, Subject.NETWORK, (1,), "no answer on eth0", "a firewall?"),
        Finding(Weight.NOTE, Subject.NAMES, (0, 1), "its own name means 127.0.1.1"),
    ),
    (("node", "host", ""), ("0", "w0", "ok"), ("1", "w1", "FAULT")),
)


@pytest.fixture
def access(tmp_path: Path) -> SimpleNamespace:
    """A job in a store of its own."""
    store = open_store(f"file://{tmp_path}")
    return SimpleNamespace(record=SimpleNamespace(job="j-1"), store=store)


def put(access: SimpleNamespace, data: bytes) -> None:
    access.store.put_bytes(data, "j-1/record/preflight.json")


def test_a_job_that_has_stored_no_report_has_none(access: SimpleNamespace):
    assert reports.read(access) is None


def test_the_report_in_the_store_is_read(access: SimpleNamespace):
    put(access, preflight.dump(REPORT))

    assert reports.read(access) == REPORT


@pytest.mark.parametrize("data", [b"", b"{}", b"[" * 100_000, b"\xff\xfe"])
def test_what_is_no_report_is_an_error_of_the_store(access: SimpleNamespace, data: bytes):
    put(access, data)

    with pytest.raises(StoreError, match="reading the check of the nodes"):
        reports.read(access)


def test_a_report_that_is_too_large_is_not_read(
    access: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(preflight, "MAX_REPORT_BYTES", 10)
    put(access, preflight.dump(REPORT))

    with pytest.raises(StoreError, match="larger than 10 bytes"):
        reports.read(access)


def test_the_table_and_the_findings_are_printed(capsys: pytest.CaptureFixture[str]):
    command.show(REPORT, is_json=False)

    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading.split() == ["node", "host"]
    assert [line.split() for line in lines[:2]] == [["0", "w0", "ok"], ["1", "w1", "FAULT"]]
    assert lines[2:] == [
        "fault: node 1: no answer on eth0",
        "  -> a firewall?",
        "note: node 0, 1: its own name means 127.0.1.1",
    ]


def test_the_report_is_one_json_object(capsys: pytest.CaptureFixture[str]):
    command.show(REPORT, is_json=True)

    values = json.loads(capsys.readouterr().out)
    assert values["nodes"][1] == {"node": "1", "host": "w1", "result": "FAULT"}
    assert values["findings"][0] == {
        **{"weight": "fault", "subject": "network", "nodes": [1]},
        **{"text": "no answer on eth0", "hint": "a firewall?"},
    }


@pytest.mark.parametrize("data", [{"rows": []}, {"rows": [[]]}])
def test_a_report_without_rows_is_refused(access: SimpleNamespace, data: dict[str, object]):
    put(access, json.dumps({"findings": [], **data}).encode())

    with pytest.raises(StoreError):
        reports.read(access)

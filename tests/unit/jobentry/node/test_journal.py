"""The journal of a node: its phases, how often it samples, and its cost."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jobentry.contract import journal as contract
from jobentry.contract.journal import Phase, Sample
from jobentry.node import journal
from jobentry.node.journal import Journal

HOUR_S, WEEK_S = 3600.0, 7 * 86400.0


def entries(lines: list[bytes]) -> list[contract.Entry | None]:
    return [contract.load(line[len(contract.MARK) : -1]) for line in lines]


def test_a_phase_is_written_when_it_begins_and_when_it_ends():
    lines: list[bytes] = []
    node_journal = Journal(lines.append)

    with node_journal.during("input DATA") as transfer:
        transfer.total_bytes = 10
        transfer.add(4)
        transfer.add(5)

    begun, ended = entries(lines)
    assert isinstance(begun, Phase)
    assert isinstance(ended, Phase)
    assert (begun.name, begun.ended_at, begun.done_bytes) == ("input DATA", None, 0)
    assert ended.ended_at is not None
    assert ended.started_at == begun.started_at
    assert (ended.done_bytes, ended.total_bytes) == (9, 10)
    assert [phase.name for phase in node_journal.phases] == ["input DATA"]


def test_the_record_has_the_last_phase_of_each_name():
    """A job that runs for a week stores thousands of checkpoints."""
    node_journal = Journal()
    for size in (1, 2, 3):
        transfer = journal.Transfer("checkpoint")
        transfer.add(size)
        node_journal.add_transfer(transfer)

    assert [(phase.name, phase.done_bytes) for phase in node_journal.phases] == [("checkpoint", 3)]


def test_a_transfer_that_goes_on_is_written_with_each_sample(until: Callable[..., None]):
    lines: list[bytes] = []
    node_journal = Journal(lines.append)
    with node_journal.during("package") as transfer:
        node_journal.start()
        transfer.add(7)
        until(
            lambda: any(
                isinstance(entry, Phase) and entry.done_bytes == 7 and entry.ended_at is None
                for entry in entries(list(lines))
            )
        )
    node_journal.finish()


def test_the_last_sample_is_taken_at_the_end():
    lines: list[bytes] = []
    node_journal = Journal(lines.append)
    node_journal.begin("run")
    node_journal.start()
    node_journal.finish()

    all_entries = entries(lines)
    assert isinstance(all_entries[-2], Sample)
    assert isinstance(all_entries[-1], Phase)
    assert all_entries[-1].ended_at is not None


def test_the_journal_is_stored(tmp_path: Path):
    node_journal = Journal()
    with node_journal.during("stage"):
        pass
    node_journal.store((f"file://{tmp_path}/journal-0.jsonl.gz",), 30.0)

    stored = contract.unpack((tmp_path / "journal-0.jsonl.gz").read_bytes())
    assert [contract.load(line).name for line in stored] == ["stage", "stage"]  # type: ignore[union-attr]


def test_a_store_that_fails_is_not_a_failure_of_the_job(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"")
    Journal().store((f"file://{tmp_path}/file/journal-0.jsonl.gz",), 30.0)


@pytest.mark.parametrize("line_bytes", [200, 350, 2500])
def test_an_hour_costs_at_most_200_kb_and_a_week_is_thinned(line_bytes: int):
    """The samples are as long as with few, 8 and 128 ranks; the clock is simulated."""
    time_bytes = len(contract.time_mark(time.time()))
    spent = {HOUR_S: 0.0, WEEK_S: 0.0}
    count = {HOUR_S: 0, WEEK_S: 0}
    for limit_s in spent:
        age_s = written = time_due_s = 0.0
        while age_s < limit_s:
            written += line_bytes
            count[limit_s] += 1
            next_s = age_s + journal.pause_s(age_s, written, cost_s=0.0)
            # The ranks write all the time, so the log has time marks between the samples.
            time_due_s = age_s + journal.TIME_PERIOD_S
            while time_due_s < next_s:
                written += time_bytes
                time_due_s += journal.time_period_s(time_due_s, time_bytes)
            age_s = next_s
        spent[limit_s] = written

    assert spent[HOUR_S] <= 200_000
    assert spent[WEEK_S] <= 4_000_000
    assert count[HOUR_S] >= 50
    assert count[WEEK_S] >= 1000


def test_a_log_has_the_time_once_in_two_seconds_at_most():
    lines: list[bytes] = []
    node_journal = Journal(lines.append)
    for _ in range(3):
        node_journal.mark_time()
    assert len(lines) == 1
    assert abs(contract.time_of(lines[0][len(contract.MARK) :]) - time.time()) < 600

    node_journal._time_due_s = 0.0
    node_journal.mark_time()
    # A phase contains the time and replaces a time mark; time marks are not stored.
    node_journal._time_due_s = 0.0
    node_journal.begin("stage")
    node_journal.mark_time()
    assert [contract.load(line[len(contract.MARK) :]) is None for line in lines] == [
        True, True, False,
    ]  # fmt: skip
    assert len(node_journal._lines) == 1


def test_sampling_takes_less_than_half_a_percent_of_a_cpu():
    """The slower a sample is, the longer the pause after it."""
    for cost_s in (0.001, 0.02, 1.0):
        assert cost_s / journal.pause_s(1e6, 0.0, cost_s=cost_s) < 0.005


def test_a_node_that_cannot_start_a_thread_continues(monkeypatch: pytest.MonkeyPatch):
    node_journal = Journal()

    def refuse() -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(node_journal._thread, "start", refuse)
    node_journal.start()
    with node_journal.during("stage"):
        pass
    node_journal.finish()
    assert [phase.name for phase in node_journal.phases] == ["stage"]
    assert node_journal.phases[0].started_at <= time.time()

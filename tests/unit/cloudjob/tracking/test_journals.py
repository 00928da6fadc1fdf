"""How a running job hangs, from the journals of its nodes."""

from __future__ import annotations

import json

import pytest

from cloudjob.tracking import journals as module
from cloudjob.tracking.journals import Journals
from jobentry.contract import journal
from jobentry.contract.hangs import Confidence, Hang, Rule
from jobentry.contract.slow import Reason, Slow
from jobentry.contract.stacks import Frame

HANG = Hang(Rule.ALL_WAIT, Confidence.MEDIUM, 1000.0, 130.0, ())


def journals_with(hang: Hang) -> Journals:
    journals = Journals()
    journals.add(0, [journal.dump(hang)])
    return journals


@pytest.mark.parametrize(
    ("now_s", "lasted"),
    [(1000.0, "2 min"), (1300.0, "7 min"), (900.0, "2 min")],
    ids=["now", "later", "another clock"],
)
def test_a_hang_lasts_until_now_although_its_head_repeats_the_report_seldom(now_s, lasted):
    hang = journals_with(HANG).hang_at(now_s)

    assert hang is not None
    assert f", for {lasted};" in hang.message
    assert hang.since == "1970-01-01T00:14:30.000Z"


def test_a_job_that_moves_again_does_not_hang():
    assert journals_with(HANG._replace(is_over=True)).hang_at(2000.0) is None
    assert Journals().hang_at(2000.0) is None


def test_ranks_that_are_slow_are_known_while_the_head_repeats_it():
    place = Frame("data.py", 30, "augment")
    slow_ranks = Slow((1,), (0,), 1000.0, 31, Reason.UNEVEN, "uneven\x1b work", place, 72)
    journals = Journals()
    journals.add(0, [journal.dump(slow_ranks)])

    slow = journals.slow_at(1060.0)
    assert slow is not None
    assert (slow.ranks, slow.cost_percent, slow.reason) == ((1,), 31, "uneven")
    assert slow.place == "augment() at data.py:30"
    assert "\x1b" not in slow.message
    assert journals.slow_at(5000.0) is None

    journals.add(0, [journal.dump(slow_ranks._replace(at=1060.0, is_over=True))])
    assert journals.slow_at(1061.0) is None


def test_lines_of_others_do_not_stand_for_any_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """A line of 60 bytes may name a rank for each of 100,000 numbers, and a journal has many."""
    rest = {"c": 0, "m": 0, "q": 0, "s": "R", "t": 1, "k": 0}
    values = ({"at": 1.0, "ranks": {"r": f"0-{last}", **rest}} for last in (99_999, 1023))
    excessive, allowed = (json.dumps(each).encode() for each in values)
    assert journal.load(excessive) is None

    monkeypatch.setattr(module, "_MOST_VALUES", 10_000)
    journals = Journals()
    hang = Hang(Rule.ALL_WAIT, Confidence.MEDIUM, 2.0, 150.0, ())
    journals.add(0, [*[allowed] * 1000, journal.dump(hang)])
    assert len(journals.resources[0]) == 10
    assert journals.last_hang == hang
    assert [each.message for each in caplog.records] == [
        "the journals of the nodes are long: only their last samples are kept"
    ]

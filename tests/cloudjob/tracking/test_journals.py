"""How a running job hangs, from the journals of its nodes."""

from __future__ import annotations

import pytest

from cloudjob.tracking.journals import Journals
from jobentry.contract import journal
from jobentry.contract.hangs import Confidence, Hang, Rule

HANG = Hang(Rule.ALL_WAIT, Confidence.MEDIUM, 1000.0, 130.0, ())


def journals_with(hang: Hang) -> Journals:
    found = Journals()
    found.add(0, [journal.dump(hang)])
    return found


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

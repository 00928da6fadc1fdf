"""Tests of the card that a notebook shows while a job runs."""

from __future__ import annotations

from collections.abc import Iterator

from cloudjob.console.now import Now
from cloudjob.model.status import Failure, JobState, JobStatus
from cloudjob.notebook import card, cards
from cloudjob.tracking.log import LogPiece
from cloudjob.tracking.metrics import MetricReader
from tests.support.statuses import status_of

FAILED = status_of(state=JobState.FAILED, failure=Failure(message="<img src=x> differ"))


class Job:
    """A job with these statuses, the last of which is final, and this log."""

    id = "train-1"

    def __init__(self, *statuses: JobStatus) -> None:
        self._statuses = list(statuses)
        self.has_final_status = False

    def status(self) -> JobStatus:
        status = self._statuses.pop(0)
        self.has_final_status = status.is_over
        return status

    def metric_reader(self) -> MetricReader:
        return MetricReader({}, detects=True)

    def pieces(self, **choice: object) -> Iterator[LogPiece]:
        yield LogPiece(0, b"[0] step 1/4 loss 0.5 <b>\n")


def test_the_card_of_a_running_job_shows_progress_loss_and_lines_as_text():
    now = Now(0.25, [("Progress", "step 1 of 4"), ("<i>loss", "0.5")], "M0,1 L2,3", ["[0] <b>"])
    html = card(status_of(), now)

    assert 'progress value="0.250"' in html
    assert "step 1 of 4" in html
    assert 'path d="M0,1 L2,3"' in html
    assert "[0] &lt;b&gt;" in html
    assert "&lt;i&gt;loss" in html


def test_the_card_of_an_ended_job_says_why_it_failed_and_nothing_about_its_progress():
    html = card(FAILED, Now(0.25, [("Speed", "3 steps/s")], "", []))

    assert "&lt;img src=x&gt; differ" in html
    assert "FAILED" in html
    assert [part for part in ("<img", "<progress", "3 steps/s") if part in html] == []


def test_cards_follow_a_job_until_it_has_ended():
    shown_cards = list(cards(Job(status_of(), status_of(), FAILED), 0.01))  # type: ignore[arg-type]

    assert [("RUNNING" in each, "FAILED" in each) for each in shown_cards] == [
        (True, False),
        (True, False),
        (False, True),
    ]

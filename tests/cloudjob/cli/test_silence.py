"""Tests of what a follower reports about a job that prints nothing for a long time."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from cloudjob import Journals
from cloudjob.cli import activity, follow
from cloudjob.tracking.log import LogPiece
from jobentry.contract import journal
from jobentry.contract.journal import Phase, RankSample, Sample


def ranks(*rank_states: tuple[int, int, str]) -> list[bytes]:
    """Return a journal line with the CPU percentage and the state of some ranks."""
    samples = (RankSample(rank, cpu, 100, 700, state, 9, 0) for rank, cpu, state in rank_states)
    return [journal.dump(Sample(at=1.0, ranks=tuple(samples)))]


class Follower:
    """A ``Silence`` whose clock the test sets, in minutes."""

    def __init__(self) -> None:
        self.minutes = 0.0
        job: Any = SimpleNamespace(id="train-1")
        self.silence = activity.Silence(job, clock=lambda: 60 * self.minutes)

    def at(self, minutes: float) -> str:
        self.minutes = minutes
        return self.silence.report()


def test_a_job_that_waits_in_the_queue_is_not_silent():
    assert not Follower().at(1000)


def test_a_silent_job_is_reported_with_its_idle_rank_and_ever_more_rarely():
    follower = Follower()
    follower.silence.end()
    follower.silence.add(0, ranks((0, 99, "R"), (1, 100, "R")))
    follower.silence.add(1, ranks((2, 0, "S"), (3, 0, "E")))

    reported = {minute: follower.at(minute) for minute in range(1, 100)}
    assert [minute for minute, text in reported.items() if text] == [10, 20, 40, 80]
    assert reported[10] == (
        "job train-1 has printed nothing for 10 min; rank 2 on node 1 uses 0% of a CPU "
        "(waits), the busiest of 3 ranks 100%; `cloudjob top train-1` shows more"
    )
    follower.silence.end()
    assert not follower.at(200)
    assert follower.at(260).startswith("job train-1 has printed nothing for 2 h 41 min; ")


def quiet(*ranks: tuple[int, int]) -> str:
    """Return the text about ranks with these numbers and seconds without output."""
    found = Journals()
    samples = (RankSample(rank, rank, 100, seconds, "S", 9, 0) for rank, seconds in ranks)
    found.add(0, [journal.dump(Sample(at=1.0, ranks=tuple(samples)))])
    return activity.silence_text(found)


def test_a_status_names_the_rank_that_has_been_silent_the_longest():
    assert quiet((0, 45), (1, 130)) == (
        "all 2 ranks for 45 s; rank 1 on node 0 the longest, 2 min 10 s (1% of a CPU, waits)"
    )
    assert quiet((0, 45)) == "rank 0 on node 0 for 45 s (0% of a CPU, waits)"
    # In most jobs, only one rank prints.
    assert quiet((0, 3), (1, 130)) == ""
    assert activity.silence_text(Journals()) == ""


def test_before_the_ranks_start_the_phase_is_reported():
    follower = Follower()
    lines = [journal.dump(Phase("inputs", 1.0)), b"damaged"]
    follower.silence.add(0, lines)

    assert follower.at(11) == "job train-1 has printed nothing for 11 min; phase: inputs"


class SilentJob:
    """A job whose only rank prints one line, and then nothing."""

    id, nodes = "train-1", 1

    def waits_for(self) -> str:
        return ""

    def pieces(self, _node: Any, *, on_journal: Any, **_options: Any) -> Iterator[LogPiece]:
        # Before the first piece, since the first report may be made with it.
        on_journal(0, ranks((0, 0, "D")))
        yield LogPiece(0, b"[0] begins\n")
        for _ in range(5):
            yield LogPiece(-1, b"")


def test_a_follower_prints_it_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(activity, "FIRST_S", 1e-9)
    job: Any = SilentJob()

    follow.stream(job, 1, follow=True)

    shown = capfd.readouterr()
    assert shown.out == "[0] begins\n"
    assert "rank 0 on node 0 uses 0% of a CPU (disk); `cloudjob top" in shown.err

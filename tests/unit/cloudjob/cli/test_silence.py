"""Tests of what `status` says about a job that prints nothing for a long time."""

from __future__ import annotations

from cloudjob import Journals
from cloudjob.cli import activity
from jobentry.contract import journal
from jobentry.contract.journal import RankSample, Sample


def quiet(*ranks: tuple[int, int]) -> str:
    """Return the text about ranks with these numbers and seconds without output."""
    journals = Journals()
    samples = (RankSample(rank, rank, 100, seconds, "S", 9, 0) for rank, seconds in ranks)
    journals.add(0, [journal.dump(Sample(at=1.0, ranks=tuple(samples)))])
    return activity.silence_text(journals)


def test_a_status_names_the_rank_that_has_been_silent_the_longest():
    assert quiet((0, 45), (1, 130)) == (
        "all 2 ranks for 45 s; rank 1 on node 0 the longest, 2 min 10 s (1% of a CPU, waits)"
    )
    assert quiet((0, 45)) == "rank 0 on node 0 for 45 s (0% of a CPU, waits)"
    # In most jobs, only one rank prints.
    assert quiet((0, 3), (1, 130)) == ""
    assert activity.silence_text(Journals()) == ""

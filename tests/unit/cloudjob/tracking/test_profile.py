"""A profile is taken in pieces, and what arrived is kept if the job ends."""

from __future__ import annotations

import json

import pytest

from cloudjob.backends.base import Backend
from cloudjob.errors import BackendError, UsageError
from cloudjob.tracking import profile
from jobentry.contract import profiles
from jobentry.contract.profiles import CountedStack, Profile
from jobentry.contract.stacks import Frame
from jobentry.contract.waits import Wait

AUGMENT, STEP = Frame("data.py", 30, "augment"), Frame("train.py", 41, "step")
STACKS = (CountedStack((0, 1), Wait.NOTHING, 40), CountedStack((1,), Wait.RANKS, 10))
PIECE = Profile(1, 2, 5.0, 0.05, 2, (AUGMENT, STEP), STACKS)
GONE = PIECE._replace(problem="it does not run", stacks=())


class Head:
    """A head that answers with these pieces, and then no more."""

    def __init__(self, *pieces: Profile) -> None:
        self.pieces = list(pieces)
        self.asked: list[dict[str, object]] = []

    def ask(self, handle: str, request: bytes) -> bytes:
        self.asked.append(json.loads(request))
        if not self.pieces:
            raise BackendError(f"asking the nodes of {handle}: its head ended while it answered")
        return profiles.dump(self.pieces.pop(0))


def take(head: Head, seconds: float) -> profile.JobProfile:
    return profile.take(head, "process://local/train", "train", 1, seconds)  # type: ignore[arg-type]


def test_the_pieces_of_a_profile_are_merged():
    merged = take(head := Head(PIECE, PIECE, PIECE._replace(seconds=2.0)), 12.0)

    assert [each["seconds"] for each in head.asked] == [5.0, 5.0, 2.0]
    assert (merged.rank, merged.node, merged.seconds, merged.looks, merged.missed) == (
        1,
        2,
        12.0,
        150,
        6,
    )
    assert merged.waits == {"computes": 0.8, "waits for other ranks": 0.2}
    assert [(call.function, share) for call, share in merged.functions] == [
        ("augment", 0.8),
        ("step", 0.2),
    ]
    assert merged.cpu_percent == pytest.approx(100 * 0.15 / 12)
    assert not merged.has_ended


@pytest.mark.parametrize(
    "last",
    [
        (),
        (PIECE._replace(problem="it does not run", stacks=()),),
        (PIECE._replace(has_ended=True),),
    ],
    ids=["the head is gone", "the rank is gone", "the rank ended"],
)
def test_what_was_seen_before_the_end_is_kept(last):
    merged = take(Head(PIECE, *last), 600.0)

    assert merged.has_ended
    assert merged.looks >= 50
    assert "The rank ended meanwhile" in merged.html()


@pytest.mark.parametrize("pieces", [(), (PIECE._replace(problem="it runs no CPython"),)])
def test_a_rank_that_cannot_be_read_is_an_error(pieces):
    with pytest.raises(BackendError):
        take(Head(*pieces), 5.0)


def test_damaged_answers_are_an_error():
    head = Head()
    head.ask = lambda handle, request: b"[]"  # type: ignore[method-assign]

    with pytest.raises(BackendError, match="profiling rank 1"):
        take(head, 5.0)


def test_a_platform_whose_nodes_cannot_be_reached_is_refused_with_what_is_possible():
    class Unreachable(Head):
        ask = Backend.ask

    with pytest.raises(UsageError, match="its backend cannot reach them") as refused:
        take(Unreachable(), 5.0)

    assert refused.value.hint is not None
    assert "`cloudjob top` shows on every platform" in refused.value.hint

"""Hangs are dumped and loaded, and said in words."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobentry.contract import hangs
from jobentry.contract.hangs import (
    Activity,
    Confidence,
    Group,
    Hang,
    Late,
    Progress,
    Rule,
    Standing,
)
from jobentry.contract.stacks import Frame
from jobentry.contract.waits import Wait

TEXT = st.text(max_size=20)
WHOLE = st.integers(0, 99_999)
SECONDS = st.floats(0, 1e9).map(lambda seconds: round(seconds, 1))
FRAMES = st.builds(Frame, TEXT, WHOLE, TEXT, TEXT)
NUMBERS = st.sets(WHOLE, min_size=1, max_size=6).map(lambda numbers: tuple(sorted(numbers)))
GROUPS = st.builds(
    Group, NUMBERS, NUMBERS, st.sampled_from(Activity), st.sampled_from(Wait), TEXT, FRAMES, TEXT,
    WHOLE,
)  # fmt: skip
HANGS = st.builds(
    Hang, st.sampled_from(Rule), st.sampled_from(Confidence), SECONDS, SECONDS,
    st.lists(GROUPS, min_size=2, max_size=4).map(tuple), st.integers(0, 2), st.booleans(),
)  # fmt: skip
STANDING = st.builds(
    Standing, WHOLE, WHOLE, st.sampled_from(Activity), st.sampled_from(Wait), TEXT, FRAMES, TEXT,
    SECONDS, SECONDS, WHOLE, SECONDS, SECONDS, SECONDS, st.none() | st.booleans(),
    st.sampled_from(Progress), TEXT,
    st.lists(st.builds(Late, WHOLE, st.lists(TEXT, max_size=3).map(tuple)), max_size=3).map(tuple),
)  # fmt: skip


@given(HANGS)
def test_a_hang_that_was_dumped_is_loaded(hang: Hang):
    values = json.loads(json.dumps(hangs.to_values(hang)))

    assert hangs.from_values(values) == hang
    assert hangs.headline(hang)
    assert hangs.details(hang) is not None


@given(STANDING)
def test_a_standing_rank_that_was_dumped_is_loaded(standing: Standing):
    assert hangs.from_row(json.loads(json.dumps(hangs.to_row(standing)))) == standing


@pytest.mark.parametrize(
    "change",
    [{"rule": "x"}, {"lasted_s": float("nan")}, {"groups": 3}, {"groups": [{}]}, {"groups": {}},
     {"named": "x"}, {"at": None}, {"groups": [[1]]}],
)  # fmt: skip
def test_other_values_are_refused(change: dict[str, object]):
    hang = Hang(Rule.ALL_WAIT, Confidence.MEDIUM, 1.0, 2.0, ())

    with pytest.raises((LookupError, TypeError, ValueError)):
        hangs.from_values({**hangs.to_values(hang), **change})


def test_more_groups_are_named_than_there_are():
    hang = Hang(Rule.ALL_WAIT, Confidence.MEDIUM, 1.0, 2.0, ())

    assert hangs.from_values({**hangs.to_values(hang), "named": 9}).culprits == ()


@pytest.mark.parametrize("row", [[], 3, [1] * 12, ["x"] * 12, None])
def test_other_rows_are_refused(row: object):
    with pytest.raises((TypeError, ValueError)):
        hangs.from_row(row)


# ---- in words ------------------------------------------------------------------------------------


def group(
    ranks: tuple[int, ...],
    activity: Activity,
    does: str,
    place: Frame,
    operation: str = "",
    nodes: tuple[int, ...] = (0, 1),
) -> Group:
    return Group(ranks, nodes, activity, Wait.OTHER, does, place, operation, 99)


LOAD = Frame("data.py", 17, "load")
REDUCE = group((0, 1, 3), Activity.WAITING, "", Frame("train.py", 41, "step"), "allreduce")
BARRIER = group((2,), Activity.WAITING, "", Frame("train.py", 44, "step"), "barrier", (1,))
IDLE = group((2,), Activity.IDLE, "reading from a pipe", LOAD, nodes=(1,))
BUSY = group((2,), Activity.BUSY, "running", LOAD, nodes=(1,))
STOPPED = group((2,), Activity.GONE, "stopped by a signal", LOAD, nodes=(1,))
WAIT = ["ranks 0-1,3 wait for that in allreduce at train.py:41"]


@pytest.mark.parametrize(
    ("rule", "groups", "named", "headline", "details"),
    [
        (Rule.ONE_IDLE, (IDLE, REDUCE), 1,
         "rank 2 on node 1 is stuck in load() at data.py:17 (reading from a pipe), for 2 min",
         WAIT),
        (Rule.STOPPED, (STOPPED, REDUCE), 1,
         "rank 2 on node 1 is stopped by a signal in load() at data.py:17, for 2 min", WAIT),
        (Rule.STOPPED, (STOPPED._replace(does="stopped by a signal; process 7"),), 1,
         "rank 2 on node 1 is stopped by a signal in load() at data.py:17 (process 7), for 2 min",
         []),
        (Rule.ONE_BUSY, (BUSY, REDUCE), 1,
         "rank 2 on node 1 is busy in load() at data.py:17 (99 % CPU), perhaps only slow, "
         "for 2 min",
         WAIT),
        (Rule.DEADLOCK, (BARRIER, REDUCE), 0,
         "deadlock: rank 2 on node 1 in barrier at train.py:44, ranks 0-1,3 in allreduce at "
         "train.py:41, for 2 min; they wait for each other", []),
        (Rule.ALL_WAIT, (REDUCE,), 0,
         "all ranks wait for each other, for 2 min; no rank stands out",
         ["ranks 0-1,3: in allreduce at train.py:41"]),
        (Rule.NOTHING_MOVES, (IDLE,), 0, "nothing moves, for 2 min; no rank stands out",
         ["rank 2 on node 1: in load() at data.py:17, reading from a pipe"]),
        (Rule.NOTHING_MOVES, (IDLE._replace(place=Frame("", 0, "")),), 1,
         "rank 2 on node 1 is stuck in C code after its script (reading from a pipe), for 2 min",
         []),
        (Rule.ONE_IDLE, (IDLE._replace(place=Frame("job.py", 9, "<module>")), BARRIER, REDUCE), 1,
         "rank 2 on node 1 is stuck at job.py:9 (reading from a pipe), for 2 min",
         ["rank 2 on node 1 waits for that in barrier at train.py:44", *WAIT]),
    ],
)  # fmt: skip
def test_a_hang_in_words(
    rule: Rule, groups: tuple[Group, ...], named: int, headline: str, details: list[str]
):
    hang = Hang(rule, Confidence.HIGH, 0.0, 130.0, groups, named)

    assert hangs.headline(hang) == headline
    assert hangs.details(hang) == details


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.9, "59 s"), (61, "1 min"), (3600, "1 h"), (3900, "1 h 05 min")],
)
def test_spans(seconds: float, text: str):
    assert hangs.span(seconds) == text

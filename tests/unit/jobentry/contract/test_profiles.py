"""A profile is read as it was written, and anything else is refused."""

from __future__ import annotations

import json

import pytest

from jobentry.contract import profiles
from jobentry.contract.profiles import CountedStack, Profile, ProfileError
from jobentry.contract.stacks import Frame
from jobentry.contract.waits import Wait

FRAMES = (Frame("data.py", 30, "augment"), Frame("train.py", 41, "step"))
STACKS = (CountedStack((0, 1), Wait.NOTHING, 40), CountedStack((1,), Wait.RANKS, 10))
PROFILE = Profile(3, 1, 5.0, 0.05, 2, FRAMES, STACKS)


def test_a_profile_that_was_dumped_is_loaded():
    assert profiles.load(profiles.dump(PROFILE)) == PROFILE
    ended = PROFILE._replace(has_ended=True, problem="it runs no CPython")
    assert profiles.load(profiles.dump(ended)) == ended


@pytest.mark.parametrize(
    "change",
    [
        {"stacks": [[[7], "ranks", 1]]},
        {"stacks": [[[-1], "ranks", 1]]},
        {"stacks": [[[0], "unheard", 1]]},
        {"stacks": [[[0], "ranks", -1]]},
        {"stacks": 3},
        {"frames": [["a.py"]]},
        {"seconds": float("nan")},
        {"rank": None},
    ],
    ids=str,
)
def test_a_damaged_profile_is_refused(change):
    values = {**profiles.to_values(PROFILE), **change}

    with pytest.raises(ProfileError):
        profiles.load(json.dumps(values).encode())


@pytest.mark.parametrize("data", [b"", b"{}", b"[" * 100_000, b"\xff", b"3"])
def test_other_bytes_are_refused(data):
    with pytest.raises(ProfileError):
        profiles.load(data)

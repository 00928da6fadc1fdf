"""Where a rank spends its time: stacks that were read many times a second, each with a count.

A profile is taken in pieces of a few seconds, so that no request waits for long.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from jobentry.contract.malformed import MALFORMED, finite, whole
from jobentry.contract.stacks import MOST_FRAMES, Frame
from jobentry.contract.waits import Wait

# Seconds of one piece, and looks in a second.
MOST_PIECE_S, RATE_HZ = 5.0, 50
# Limits of one piece; a rank that has more stacks loses the rare ones.
MOST_STACKS, MOST_NAMES = 2000, 5000
_TEXT_LIMIT = 300


class ProfileError(Exception):
    """The bytes are not an answer with a profile."""


class CountedStack(NamedTuple):
    """A stack, and how often it was seen.

    Args:
        frames: Indices into the frames of the profile, the innermost call first.
    """

    frames: tuple[int, ...]
    wait: Wait
    looks: int


class Profile(NamedTuple):
    """One piece of a profile.

    Args:
        node: The node of the rank; -1 if no node has it.
        seconds: For how long the rank was looked at.
        cpu_s: The CPU time that the node took for it.
        missed: Looks that showed no stack, as it changed meanwhile.
        has_ended: Whether the rank ended meanwhile.
        problem: Why it cannot be read; empty if it can.
    """

    rank: int
    node: int
    seconds: float
    cpu_s: float
    missed: int
    frames: tuple[Frame, ...]
    stacks: tuple[CountedStack, ...]
    has_ended: bool = False
    problem: str = ""


def to_values(profile: Profile) -> dict[str, Any]:
    """Return plain values for ``from_values``."""
    values = profile._asdict()
    values["frames"] = [list(each[:3]) for each in profile.frames]
    values["stacks"] = [[list(each.frames), each.wait.value, each.looks] for each in profile.stacks]
    return values


def from_values(values: Any) -> Profile:
    """Return what ``to_values`` was called with.

    Raises:
        ProfileError: The values have another form.
    """
    try:
        return _profile(values)
    except MALFORMED as error:
        raise ProfileError(f"it is not valid: {error}") from error


def dump(profile: Profile) -> bytes:
    """Serialise a profile as one line of JSON for ``load``."""
    return json.dumps(to_values(profile), separators=(",", ":")).encode("ascii")


def load(data: bytes) -> Profile:
    """Return what ``dump`` serialised.

    Raises:
        ProfileError: It is no such answer.
    """
    try:
        values = json.loads(data)
    except MALFORMED as error:
        raise ProfileError(f"it is not valid: {error}") from error
    return from_values(values)


def _profile(values: Any) -> Profile:
    frames = tuple(
        Frame(_text(file), whole(line), _text(function))
        for file, line, function in values["frames"][:MOST_NAMES]
    )
    stacks = tuple(
        CountedStack(tuple(map(whole, indices[:MOST_FRAMES])), Wait(wait), whole(count))
        for indices, wait, count in values["stacks"][:MOST_STACKS]
    )
    for each in stacks:
        if each.looks < 0 or not all(0 <= index < len(frames) for index in each.frames):
            raise ValueError("a stack of no such calls")
    return Profile(
        whole(values["rank"]),
        whole(values["node"]),
        finite(values["seconds"]),
        finite(values["cpu_s"]),
        whole(values["missed"]),
        frames,
        stacks,
        values["has_ended"] is True,
        _text(values["problem"]),
    )


def _text(value: object) -> str:
    return str(value)[:_TEXT_LIMIT]

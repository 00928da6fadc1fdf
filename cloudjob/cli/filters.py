"""Which jobs a command on several jobs means."""

from __future__ import annotations

import argparse

from cloudjob.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from cloudjob.jobs import Filter


def filter_flags(parser: Any) -> None:
    """Add what says which jobs are meant."""
    for flag, metavar, text in (
        ("--backend", "NAME", "only jobs of this backend"),
        ("--name", "PATTERN", "only jobs whose name or id matches, such as train-*"),
        ("--state", "STATE", "only jobs in this state, such as RUNNING"),
    ):
        parser.add_argument(flag, action="append", metavar=metavar, default=[], help=text)
    parser.add_argument(
        "--since",
        metavar="TIME",
        default="",
        help="only jobs submitted since then: 2h, 3d, or a date",
    )


def filter_of(options: argparse.Namespace) -> Filter:
    """Return which jobs are meant."""
    from cloudjob.jobs import Filter
    from cloudjob.model.rules import BACKENDS
    from cloudjob.model.status import JobState
    from cloudjob.model.text import nearest

    states = tuple(state.upper() for state in options.state)
    for flag, words, allowed in (
        ("--backend", options.backend, BACKENDS),
        ("--state", states, tuple(state.value for state in JobState)),
    ):
        for word in words:
            if word not in allowed:
                raise UsageError(
                    f"reading {flag} {word}: there is no such one{nearest(word, allowed)}",
                    hint=f"one of {', '.join(allowed)}",
                )
    return Filter(
        backends=tuple(options.backend),
        names=tuple(options.name),
        states=states,
        since=_since(options.since) if options.since else "",
    )


def _since(text: str) -> str:
    """Return a time as records have it: so long ago, or a date, or a date and a time."""
    import re
    from datetime import datetime, timedelta, timezone

    ago = re.fullmatch(r"([0-9]{1,6})([smhdw])", text)
    if ago:
        units = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
        moment = datetime.now(timezone.utc) - timedelta(**{units[ago[2]]: int(ago[1])})
    else:
        try:
            moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
        except ValueError as error:
            raise UsageError(
                f"reading --since {text}: this is no time", hint="2h, 3d, or 2026-01-31"
            ) from error
    return moment.astimezone(timezone.utc).isoformat(timespec="milliseconds")[:23] + "Z"

"""Points in time: RFC 3339 in UTC with milliseconds as text, seconds since the epoch as numbers."""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone

from cloudjob.errors import UsageError

_RFC3339 = r"(?a)(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:\d\d)"
# The first second of the year 10000.
_TOO_LATE_S = 253_402_300_800


def rfc3339(seconds: float) -> str:
    """Return a point in time as text; empty for 0, which means never."""
    if not 0 < seconds < _TOO_LATE_S:
        return ""
    moment = datetime.fromtimestamp(seconds, tz=timezone.utc)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def local(text: str) -> str:
    """Return an RFC 3339 time as all views show it, to the second; other text unchanged.

    It is in the local time zone, and names it: ``2026-11-27 14:05:09 +08:00``.
    """
    seconds = seconds_of(text)
    if not seconds:
        return text
    moment = datetime.fromtimestamp(seconds, tz=timezone.utc).astimezone()
    zone = moment.isoformat(timespec="seconds")[19:] if moment.utcoffset() else "UTC"
    return f"{moment:%Y-%m-%d %H:%M:%S} {zone}"


def seconds_of(text: str) -> float:
    """Return an RFC 3339 time in seconds since the epoch; 0 for any other text."""
    match = re.fullmatch(_RFC3339, text)
    if match is None:
        return 0.0
    date, clock, fraction, zone = match.groups()
    try:
        moment = datetime.fromisoformat(f"{date}T{clock}{zone.replace('Z', '+00:00')}")
    except ValueError:  # such as the 30th of February
        return 0.0
    return moment.timestamp() + float(fraction or 0)


def normalised(text: str) -> str:
    """Return a time of any zone and precision in the format of ``rfc3339``.

    Empty for other texts, and for the year 1, which means never in Docker's output.
    """
    return rfc3339(seconds_of(text))


def parse(text: str) -> str:
    """Return a time in the format of the records, from an age, a date, or a date and a time.

    Raises:
        UsageError: It is none of these.
    """
    age = re.fullmatch(r"([0-9]{1,6})([smhdw])", text)
    try:
        if age:
            units = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
            moment = datetime.now(timezone.utc) - timedelta(**{units[age[2]]: int(age[1])})
        else:
            moment = datetime.fromisoformat(text.replace("Z", "+00:00")).astimezone(timezone.utc)
    except (ValueError, OverflowError) as error:
        raise UsageError(
            f"reading the filter since {text}: not a time", hint="2h, 3d, or 2026-01-31"
        ) from error
    return moment.isoformat(timespec="milliseconds")[:23] + "Z"

"""The time formats of platforms and of cloudjob."""

from __future__ import annotations

import time

import pytest

from cloudjob.model import times


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-11-21T10:00:01Z", "2026-11-21T10:00:01.000Z"),
        ("2026-11-21T10:00:01.123456789Z", "2026-11-21T10:00:01.123Z"),
        ("2026-11-21T11:00:01.5+01:00", "2026-11-21T10:00:01.500Z"),
        ("0001-01-01T00:00:00Z", ""),
        ("", ""),
        ("soon", ""),
        ("2026-02-30T10:00:01Z", ""),
        ("2026-11-21T99:00:01Z", ""),
    ],
)
def test_a_time_of_a_platform_becomes_utc_with_milliseconds(text: str, expected: str):
    assert times.normalised(text) == expected


def test_a_time_survives_its_text():
    texts = [f"2026-11-21T10:00:01.{milliseconds:03}Z" for milliseconds in range(1000)]

    assert [times.rfc3339(times.seconds_of(text)) for text in texts] == texts


@pytest.mark.parametrize("seconds", [0, -1, 1e12, float("nan")])
def test_an_invalid_time_becomes_an_empty_string(seconds: float):
    assert times.rfc3339(seconds) == ""


def test_times_are_shown_in_the_local_time_zone_and_name_it(monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "XYZ-03:30")
        time.tzset()
        assert times.local("2026-11-21T22:00:01.999Z") == "2026-11-22 01:30:01 +03:30"
        patch.setenv("TZ", "UTC")
        time.tzset()
        assert times.local("2026-11-21T22:00:01.999Z") == "2026-11-21 22:00:01 UTC"
        assert [times.local(text) for text in ("", "-", "soon")] == ["", "-", "soon"]
    time.tzset()

"""Tests of the logs of containers that are removed while their logs are read."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cloudjob.backends.docker import logs
from cloudjob.backends.docker.request import LOG_DRIVER


class Engine:
    """An engine whose log stream ends after the given lines, as if the log were complete."""

    base_url = "http+docker://localhost"
    api_version = "1.41"

    def __init__(self, *lines: bytes) -> None:
        self._frames = b"".join(struct.pack(">BxxxL", 1, len(line)) + line for line in lines)

    def get(self, url: str, **_: Any) -> contextlib.nullcontext[Any]:
        """Return the response to a request for a log."""
        response = contextlib.nullcontext(self)
        response.raw = self  # type: ignore[attr-defined]
        return response

    def stream(self, _size: int, **_: Any) -> Iterator[bytes]:
        """Yield the body of the response."""
        yield self._frames

    def _raise_for_status(self, _response: object) -> None:
        """Accept the response."""


def test_a_log_that_another_cloudjob_saves_while_it_is_read_is_complete(tmp_path: Path):
    saved = tmp_path / "node-0.log"
    saved.write_bytes(b"one\ntwo\nthree\n")
    source = logs.LogSource(0, "c0ffee", LOG_DRIVER, saved)

    pieces = logs.read_all(Engine(b"one\n", b"two\n"), [source], follow=False)

    assert b"".join(data for _, data in pieces) == b"one\ntwo\nthree\n"


def test_an_unsaved_log_is_read_from_the_engine(tmp_path: Path):
    source = logs.LogSource(0, "c0ffee", LOG_DRIVER, tmp_path / "node-0.log")

    pieces = logs.read_all(Engine(b"one\n", b"two\n"), [source], follow=False)

    assert b"".join(data for _, data in pieces) == b"one\ntwo\n"

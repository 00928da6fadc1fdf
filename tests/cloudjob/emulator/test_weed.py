"""How the emulator finds a place for its SeaweedFS."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from cloudjob.emulator import weed
from cloudjob.emulator.access import Account


def account(name: str) -> Account:
    """Return an account that no other emulator has."""
    return Account(f"ak-{name}", f"sk-{name}", "pw", "p", "d", "u")


def test_ports_that_somebody_takes_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It listens at others, and does not take the server that it finds there for its own."""
    free_ports = weed._free_ports
    with ExitStack() as stack:
        first = weed.Weed(tmp_path / "first", account("first"), "bucket")
        stack.callback(first.stop)
        first.start()
        drawn: Iterator[int] = iter([first.port])
        monkeypatch.setattr(weed, "_free_ports", lambda: next(drawn, 0) or free_ports())
        second = weed.Weed(tmp_path / "second", account("second"), "bucket")
        stack.callback(second.stop)
        second.start()

        assert next(drawn, None) is None
        assert second.port != first.port
        assert first.is_alive()
        assert second.is_alive()

"""Fixtures that commands in processes of their own share with the other tests of commands."""

from __future__ import annotations

from tests.unit.cloudjob.cli.conftest import add_ended, home

__all__ = ["add_ended", "home"]

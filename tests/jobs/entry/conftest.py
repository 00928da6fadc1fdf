"""Fixtures that the whole entries share with the other tests of the node half."""

from __future__ import annotations

from tests.unit.jobentry.conftest import until, zipapp

__all__ = ["until", "zipapp"]

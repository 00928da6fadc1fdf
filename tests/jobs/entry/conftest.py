"""Fixtures that the whole entries share with the other tests of the node half."""

from __future__ import annotations

import sys

from tests.unit.jobentry.conftest import until, zipapp

__all__ = ["until", "zipapp"]

# Stacks are those of CPython.
collect_ignore = ["stacks"] if sys.implementation.name != "cpython" else []

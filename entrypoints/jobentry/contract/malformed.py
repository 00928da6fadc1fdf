"""Exceptions of JSON that has another form than its format."""

from __future__ import annotations

# OverflowError: a number is Infinity. RecursionError: lists are nested too deeply.
MALFORMED = (
    AttributeError,
    LookupError,
    OverflowError,
    RecursionError,
    TypeError,
    ValueError,
)

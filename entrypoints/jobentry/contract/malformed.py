"""JSON that has another form than its format: the exceptions of its readers, and its numbers."""

from __future__ import annotations

from math import isfinite
from typing import Any

# Sums of larger numbers, and quotients, are no floats.
_LARGEST = 1 << 63

# OverflowError: a number is Infinity. RecursionError: lists are nested too deeply.
MALFORMED = (
    AttributeError,
    LookupError,
    OverflowError,
    RecursionError,
    TypeError,
    ValueError,
)


def finite(value: Any) -> float:
    """Return a value of others as a finite number.

    Raises:
        ValueError: It is none, or is too large.
        TypeError: It is none.
        OverflowError: It is too large.
    """
    number = float(value)
    if not isfinite(number) or abs(number) > _LARGEST:
        raise ValueError("not a finite number")
    return number


def whole(value: Any) -> int:
    """Return a value of others as a whole number.

    Raises:
        ValueError: It is none, or is too large.
        TypeError: It is none.
        OverflowError: It is infinite.
    """
    number = int(value)
    if abs(number) > _LARGEST:
        raise ValueError("the number is too large")
    return number

"""Cases of a parametrised test that only combine values which its other cases use already."""

from __future__ import annotations

from collections.abc import Mapping

import pytest


def mark_combinations(cases: list[tuple[pytest.Item, set[str]]]) -> None:
    """Choose cases greedily until each value occurs, and mark the remaining ones as lengthy."""
    rest, missing = list(cases), set[str]().union(*(values for _, values in cases))
    while missing:
        best = max(rest, key=lambda case: len(case[1] & missing))
        missing -= best[1]
        rest.remove(best)
    for item, _ in rest:
        item.add_marker(pytest.mark.lengthy)


def values_of(params: Mapping[str, object]) -> set[str]:
    """Return the values of a case's parameters, each with its name."""
    return {f"{name}={value!r}" for name, value in params.items()}

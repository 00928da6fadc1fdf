"""Calls of a function for many items in parallel."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from cloudjob.store.parallel import call_with_timeout, consume_in_parallel, iterate_in_parallel

DEADLINE_S = 180.0


def test_a_call_has_a_time_limit():
    for_ever = threading.Event()
    try:
        with pytest.raises(TimeoutError, match=r"no answer within 0.1 s"):
            call_with_timeout(0.1, for_ever.wait)
        assert call_with_timeout(DEADLINE_S, lambda: 1) == 1
        with pytest.raises(ZeroDivisionError):
            call_with_timeout(DEADLINE_S, lambda: 1 // 0)
    finally:
        for_ever.set()


def test_each_item_is_yielded_with_its_result():
    assert list(iterate_in_parallel(str, range(1000))) == [(n, str(n)) for n in range(1000)]


def test_a_slow_call_does_not_delay_later_items():
    """Four calls wait for each other, so all four must run at the same time."""
    barrier = threading.Barrier(4)
    done = set[int]()

    def call(number: int) -> None:
        if number % 64 == 0:
            barrier.wait(DEADLINE_S)
        done.add(number)

    consume_in_parallel(call, iter(range(4 * 64)), at_once=4)

    assert done == set(range(4 * 64))


def test_few_results_are_kept_for_a_slow_reader():
    """Only the items of the running calls, and one more batch of 64, are read in advance."""
    processed, highest = list[int](), 0
    go_on = threading.Event()

    def items() -> Iterator[int]:
        nonlocal highest
        for number in range(10_000):
            highest = number if not go_on.is_set() else highest
            if number == 3 * 64 - 1:
                threading.Timer(0.2, go_on.set).start()
            yield number

    def call(number: int) -> None:
        assert go_on.wait(DEADLINE_S)
        processed.append(number)

    consume_in_parallel(call, items(), at_once=2)

    assert len(processed) == 10_000
    assert highest == 3 * 64 - 1


@pytest.mark.parametrize("failing", [0, 999])
def test_the_first_failure_is_raised(failing: int):
    """It is raised once the running calls have ended."""

    def call(number: int) -> None:
        if number == failing:
            raise ValueError(number)

    with pytest.raises(ValueError, match=str(failing)):
        consume_in_parallel(call, iter(range(1000)))

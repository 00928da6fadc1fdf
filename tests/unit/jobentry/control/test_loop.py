"""The loop that head and worker share: signals are handled at once, and suspensions noticed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobentry.contract.env import NodeEnv
from jobentry.control.loop import NodeEvents, NodeLoop
from jobentry.system.awake import AwakeClock
from tests.support.loops import Clock, make_loop, paths_in, signals_restored


@pytest.fixture
def received() -> list[int]:
    """The signals that the loop has reported."""
    return []


@pytest.fixture
def loop(tmp_path: Path, received: list[int]) -> Iterator[NodeLoop]:
    """An idle loop."""
    with signals_restored():
        loop = make_loop(NodeEnv(), paths_in(tmp_path), NodeEvents(signalled=received.append))
        yield loop
    loop.relay.finish()


def send(number: int) -> None:
    """Send a signal to this thread; it has been delivered when this returns."""
    signal.pthread_kill(threading.get_ident(), number)


def test_a_signal_is_handled_although_its_python_handler_is_late(
    loop: NodeLoop, received: list[int]
):
    """An interpreter may call the handler some time after the byte has woken the loop (PyPy does).

    The byte is the number of the signal, so the loop does not depend on the handler.
    """
    # The extreme case: the loop's handler is never called.
    signal.signal(signal.SIGUSR1, lambda number, frame: None)

    send(signal.SIGUSR1)
    loop.step()

    assert received == [signal.SIGUSR1]


def test_each_signal_is_handled_in_the_step_that_it_interrupts(loop: NodeLoop, received: list[int]):
    for count in range(1, 301):
        send(signal.SIGUSR2)
        loop.step()

        assert received == [signal.SIGUSR2] * count


def test_simultaneous_signals_are_all_handled(loop: NodeLoop, received: list[int]):
    """Each is handled once and in order, even if a child exits between them."""
    for number in (signal.SIGUSR1, signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
        send(number)
    loop.step()

    assert received == [signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP]


def test_the_time_in_which_the_loop_was_blocked_does_not_count_for_the_other_side(loop: NodeLoop):
    """Nobody reads what it sends then. Another thread goes on to read the clock."""
    clock = Clock()
    ticks: list[float] = []
    loop.now_s = clock.now_s
    loop.awake, loop.turns = AwakeClock(clock.now_s), AwakeClock(clock.now_s)
    loop.start_clock(ticks.append)
    clock.advance(loop, 0)

    for _ in range(600):
        clock.ahead_s += 1
        loop.awake.now_s()
    clock.advance(loop, 1)
    clock.advance(loop, 1)

    assert ticks == [3, 1]
    # A worker may have given us up meanwhile, and is not to blame for that.
    assert (loop.awake.suspended_s(), loop.turns.suspended_s()) == (0, 601)

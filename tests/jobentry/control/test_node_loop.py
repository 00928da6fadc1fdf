"""The loop that head and worker share: signals are handled at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobentry.contract.env import NodeEnv
from jobentry.contract.paths import NodePaths
from jobentry.control.event_loop import FORWARDED_SIGNALS, STOP_SIGNALS, NodeLoop


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[NodeLoop]:
    """An idle loop; the signal handlers of the test process are restored at the end."""
    folder = str(tmp_path)
    os.mkfifo(tmp_path / "events")
    before = {number: signal.getsignal(number) for number in NUMBERS}
    loop = NodeLoop(NodeEnv(), NodePaths(folder, folder, folder, folder, folder))
    yield loop
    signal.set_wakeup_fd(-1)
    for number, action in before.items():
        signal.signal(number, action)
    loop.relay.finish()


NUMBERS = (*STOP_SIGNALS, *FORWARDED_SIGNALS, signal.SIGCHLD)


def send(number: int) -> None:
    """Send a signal to this thread; it has been delivered when this returns."""
    signal.pthread_kill(threading.get_ident(), number)


def test_a_signal_is_handled_although_its_python_handler_is_late(loop: NodeLoop):
    """An interpreter may call the handler some time after the byte has woken the loop (PyPy does).

    The byte is the number of the signal, so the loop does not depend on the handler.
    """
    received: list[int] = []
    loop.on_signal = received.append
    # The extreme case: the loop's handler is never called.
    signal.signal(signal.SIGUSR1, lambda number, frame: None)

    send(signal.SIGUSR1)
    loop.step()

    assert received == [signal.SIGUSR1]


def test_each_signal_is_handled_in_the_step_that_it_interrupts(loop: NodeLoop):
    received: list[int] = []
    loop.on_signal = received.append
    for count in range(1, 301):
        send(signal.SIGUSR2)
        loop.step()

        assert received == [signal.SIGUSR2] * count


def test_simultaneous_signals_are_all_handled(loop: NodeLoop):
    """Each is handled once and in order, even if a child exits between them."""
    received: list[int] = []
    loop.on_signal = received.append

    for number in (signal.SIGUSR1, signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
        send(number)
    loop.step()

    assert received == [signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP]

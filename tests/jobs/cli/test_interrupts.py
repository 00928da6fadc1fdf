"""Tests of Ctrl-C, SIGTERM and a closing terminal while a submit is attached to its job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

ATTACHED = """
import sys, time
from cloudjob.cli.interrupts import Interrupts

class Job:
    id = "train-1"
    def cancel(self, *, is_urgent):
        print("CANCELLED at once" if is_urgent else "CANCELLED", flush=True)

interrupts = Interrupts(sys.argv[1])
interrupts.hold()
if sys.argv[2] == "sending":
    print("READY", flush=True)
    while not interrupts.was_interrupted and not interrupts._is_closed:
        time.sleep(0.01)
interrupts.set_job(Job())
print("READY", flush=True)
while True:
    time.sleep(0.01)
"""
DETACHED = "detached; train-1 continues: cloudjob logs train-1 -f, cloudjob cancel train-1"


class Attached:
    """A submit that is attached to a job."""

    def __init__(self, process: subprocess.Popen[bytes], output: int) -> None:
        self._process = process
        self._output = output
        self.shown = ""

    def until(self, text: str) -> None:
        """Read the output up to and including this text."""
        while text not in self.shown:
            piece = os.read(self._output, 4096)
            assert piece, self.shown
            self.shown += piece.decode()
        self.shown = self.shown.partition(text)[2]

    def type(self, text: str) -> None:
        os.write(self._output, text.encode())

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def exit_code(self) -> int:
        return self._process.wait(60)


@contextmanager
def attached(on_interrupt: str, when: str = "running", *, terminal: bool) -> Iterator[Attached]:
    parent_fd, child_fd = os.openpty() if terminal else os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", ATTACHED, on_interrupt, when],
        stdin=child_fd if terminal else subprocess.DEVNULL,
        stdout=child_fd,
        stderr=child_fd,
        # The caller of the tests may ignore SIGHUP, as `nohup` does; a shell does not.
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL) and None,
    )
    os.close(child_fd)
    try:
        submit = Attached(process, parent_fd)
        submit.until("READY")
        yield submit
    finally:
        process.kill()
        process.wait()
        with suppress(OSError):
            os.close(parent_fd)


@pytest.mark.parametrize("answer", ["\n", "d\n", "\x04"], ids=["Enter", "d", "Ctrl-D"])
def test_ctrl_c_on_a_terminal_asks_and_detaches_by_default(answer: str):
    with attached("ask", terminal=True) as submit:
        submit.send(signal.SIGINT)
        submit.until("detach from train-1 (Enter), or cancel it (c, or Ctrl-C again)? ")
        submit.type(answer)
        submit.until(DETACHED)

        assert submit.exit_code() == 130


@pytest.mark.parametrize("answer", ["c\n", "Cancel\n", ""], ids=["c", "word", "Ctrl-C"])
def test_ctrl_c_on_a_terminal_cancels_on_demand(answer: str):
    with attached("ask", terminal=True) as submit:
        submit.send(signal.SIGINT)
        submit.until("again)? ")
        if answer:
            submit.type(answer)
        else:
            submit.send(signal.SIGINT)
        submit.until("cancelling train-1; press Ctrl-C again to end it at once")
        submit.until("CANCELLED")
        submit.send(signal.SIGINT)
        submit.until("ending train-1 at once, without its grace period")
        submit.until("CANCELLED at once")


@pytest.mark.parametrize("on_interrupt", ["ask", "cancel"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_without_a_terminal_an_interrupt_cancels(on_interrupt: str, number: signal.Signals):
    with attached(on_interrupt, terminal=False) as submit:
        submit.send(number)
        submit.until("cancelling train-1")
        submit.until("CANCELLED")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_detach_option_detaches_on_ctrl_c(number: signal.Signals):
    with attached("detach", terminal=False) as submit:
        submit.send(number)
        submit.until(DETACHED)

        assert submit.exit_code() == 130


@pytest.mark.parametrize(
    ("on_interrupt", "expected"),
    [("detach", "detaching from the job once it is sent"), ("ask", "cancelling the job once it")],
)
def test_an_interrupt_while_the_job_is_sent_waits_for_it(on_interrupt: str, expected: str):
    with attached(on_interrupt, "sending", terminal=False) as submit:
        submit.send(signal.SIGINT)
        submit.until(expected)
        submit.until(DETACHED if on_interrupt == "detach" else "CANCELLED")


@pytest.mark.parametrize("when", ["running", "sending"])
def test_a_terminal_that_closes_detaches(when: str):
    with attached("cancel", when, terminal=False) as submit:
        submit.send(signal.SIGHUP)

        assert submit.exit_code() == 129
        assert "CANCELLED" not in submit.shown

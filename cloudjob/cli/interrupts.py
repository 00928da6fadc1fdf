"""Handles Ctrl-C, SIGTERM and a closed terminal during a submit."""

from __future__ import annotations

import os
import sys

from cloudjob.cli.messages import print_error, print_message, write_stderr
from cloudjob.errors import CloudJobError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import NoReturn

    from cloudjob import Job, JobSpec, Sweep

# The effects of Ctrl-C; the user is asked only about jobs that run on other machines.
ASK, CANCEL, DETACH = "ask", "cancel", "detach"
# Exit codes of a submit that leaves its job running: after Ctrl-C, and when the terminal closes.
_DETACHED, _CLOSED = 130, 129


class Interrupts:
    """Handles Ctrl-C, SIGTERM and a closed terminal during a submit, from ``hold`` on.

    While a job is being sent, signals wait for the platform's answer: the request cannot be taken
    back, and without the answer the job would run unnoticed.

    Args:
        on_interrupt: ``cancel`` the job, ``detach`` from it so that it continues, or ``ask``.
    """

    def __init__(self, on_interrupt: str = CANCEL) -> None:
        self._on_interrupt = on_interrupt
        self._interrupts = 0
        self._is_closed = False
        self._job: Job | Sweep | None = None

    @property
    def was_interrupted(self) -> bool:
        """Whether a signal has arrived."""
        return self._interrupts > 0

    def hold(self) -> None:
        """Handle signals from now on."""
        import signal

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        # Under nohup, SIGHUP stays ignored.
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signal.signal(signal.SIGHUP, self._on_hangup)

    def release(self) -> None:
        """Let signals end the program from now on, as before ``hold``."""
        import signal

        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def set_job(self, job: Job | Sweep) -> None:
        """Set the job that the signals apply to."""
        self._job = job
        if self._is_closed:
            raise SystemExit(_CLOSED)
        if self.was_interrupted and self._on_interrupt == DETACH:
            _detach(job)
        elif self.was_interrupted:
            self._cancel(job)

    def _on_signal(self, number: int, _frame: object) -> None:
        self._interrupts += 1
        if self._job is not None:
            if self._wants_to_detach(self._job, number):
                _detach(self._job)
            self._cancel(self._job)
        elif self._interrupts == 1:
            action = "detaching from" if self._on_interrupt == DETACH else "cancelling"
            print_message(
                f"{action} the job once it is sent; press Ctrl-C again to stop without waiting"
            )
        else:
            raise KeyboardInterrupt

    def _on_hangup(self, _number: int, _frame: object) -> None:
        self._is_closed = True
        if self._job is not None:
            raise SystemExit(_CLOSED)

    def _wants_to_detach(self, job: Job | Sweep, number: int) -> bool:
        """Whether to detach from the job; on a terminal, ask the user once."""
        import signal

        is_first = self._on_interrupt == ASK and self._interrupts == 1
        if not (is_first and number == signal.SIGINT and os.isatty(0) and os.isatty(2)):
            return self._on_interrupt == DETACH
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            write_stderr(f"\ndetach from {job.id} (Enter), or cancel it (c, or Ctrl-C again)? ")
            return not sys.stdin.readline().strip().lower().startswith("c")
        except KeyboardInterrupt:
            write_stderr("\n")
            return False
        finally:
            signal.signal(signal.SIGINT, self._on_signal)

    def _cancel(self, job: Job | Sweep) -> None:
        import threading

        if self._interrupts == 1:
            print_message(f"cancelling {job.id}; press Ctrl-C again to end it at once")
        elif self._interrupts == 2:
            print_message(f"ending {job.id} at once, without its grace period")
        # Not in the signal handler: the interrupted code may hold a lock that this needs.
        threading.Thread(
            target=_cancel_job, args=(job,), kwargs={"is_urgent": self._interrupts > 1}
        ).start()


def interrupts_of(spec: JobSpec, options: argparse.Namespace) -> Interrupts:
    """Return the signal handling of a submit."""
    from cloudjob.model.rules import is_remote

    # A job on this machine should rarely continue; for a remote job, the user has to decide.
    default = ASK if is_remote(spec.backend) else CANCEL
    return Interrupts(options.on_interrupt or default)


def print_detached(job: Job | Sweep) -> None:
    """Print that the job continues, and which commands follow or cancel it."""
    from cloudjob import Sweep

    if isinstance(job, Sweep):
        more = f"cloudjob list --sweep {job.id}, cloudjob wait {job.id}, cloudjob cancel {job.id}"
        print_message(f"detached; the jobs of {job.id} that were submitted continue: {more}")
        return
    more = f"cloudjob logs {job.id} -f, cloudjob cancel {job.id}"
    print_message(f"detached; {job.id} continues: {more}")


def _detach(job: Job | Sweep) -> NoReturn:
    print_detached(job)
    raise SystemExit(_DETACHED)


def _cancel_job(job: Job | Sweep, *, is_urgent: bool) -> None:
    try:
        job.cancel(is_urgent=is_urgent)
    except CloudJobError as error:
        print_error(error)

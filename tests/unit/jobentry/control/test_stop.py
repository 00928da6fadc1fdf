"""How a job is stopped, and in which order: a real loop, and a clock that the test moves."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobentry.contract.env import NodeEnv
from jobentry.contract.exits import Cause, Failure, Outcome
from jobentry.control.stop import Stop
from tests.support.loops import Clock, make_loop, paths_in, signals_restored

GRACE_S = 30.0


class Sent:
    """Stands in for the workers and the launcher, and records what they are told."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, dict[str, Any]]] = []

    def send(self, kind: str, **values: Any) -> None:
        self.messages.append((kind, values))

    def kill(self) -> None:
        self.messages.append(("kill the launcher", {}))


class Job:
    """The end of a job on two nodes."""

    def __init__(self, folder: Path) -> None:
        node = NodeEnv(hosts=("a", "b"), grace_s=GRACE_S, timeout_s=600.0)
        self.clock = Clock()
        self.loop = make_loop(node, paths_in(folder), now_s=self.clock.now_s)
        self.sent: Any = Sent()
        self.stop = Stop(node, self.loop, self.sent, self.sent, None)

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.sent.messages]

    def advance(self, seconds: float) -> None:
        self.clock.advance(self.loop, seconds)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """A running job."""
    with signals_restored():
        job = Job(tmp_path)
        yield job
    job.loop.relay.finish()


KILLED = ["kill", "kill the launcher"]


def test_a_stop_signal_kills_only_after_the_grace_period(
    job: Job, capfd: pytest.CaptureFixture[str]
):
    job.stop.handle_worker_signal(signal.SIGTERM, 1)
    job.advance(GRACE_S - 1)
    assert job.kinds == ["stop"]

    job.advance(2)

    assert job.kinds == ["stop", *KILLED]
    assert job.stop.outcome == Outcome(
        143,
        Cause.CANCELLED,
        Failure(1, "b", signal=15, exit_code=143, message="cancelled: the job was sent SIGTERM"),
    )
    assert "30 s are over: ending the remaining ranks" in capfd.readouterr().err


def test_a_repeated_sigterm_changes_nothing_and_a_sigint_kills_at_once(
    job: Job, capfd: pytest.CaptureFixture[str]
):
    job.stop.handle_signal(signal.SIGTERM)
    job.stop.handle_signal(signal.SIGTERM)
    job.stop.handle_worker_signal(signal.SIGINT, 1)
    assert job.kinds == ["stop"]

    job.stop.handle_signal(signal.SIGINT)

    assert job.kinds == ["stop", *KILLED]
    assert job.stop.outcome is not None
    assert job.stop.outcome.exit_code == 143
    assert "SIGINT while the job ends: ending all ranks now" in capfd.readouterr().err


def test_a_user_signal_is_passed_on_and_stops_nothing(job: Job):
    job.stop.handle_worker_signal(signal.SIGUSR1, 1)
    job.advance(10 * GRACE_S)

    assert job.sent.messages == [("signal", {"number": signal.SIGUSR1})]
    assert not job.stop.has_begun


def test_the_time_limit_and_a_hang_give_a_grace_period(job: Job):
    job.stop.handle_timeout()
    job.stop.handle_hang(Failure(message="it hangs"))
    job.advance(GRACE_S + 1)

    assert job.kinds == ["stop", *KILLED]
    assert job.stop.outcome is not None
    assert (job.stop.outcome.exit_code, job.stop.outcome.cause) == (124, Cause.TIMEOUT)
    assert job.stop.outcome.failure is not None
    assert job.stop.outcome.failure.message == "time limit reached: the job ran for 600 s"


def test_the_failure_of_a_rank_ends_the_others_soon(job: Job):
    job.stop.rank_failed(0.2, is_leaving=False)
    job.advance(0.1)
    assert job.kinds == []
    job.advance(0.2)
    assert job.sent.messages == [("end-ranks", {"are_held": False})]

    job.advance(1.1)

    assert job.kinds == ["end-ranks", *KILLED]


def test_a_failed_rank_that_still_exits_has_the_grace_period_and_the_others_do_not(job: Job):
    job.stop.rank_failed(0.0, is_leaving=True)
    job.advance(0.1)
    job.advance(1.1)
    assert job.sent.messages == [("end-ranks", {"are_held": True}), ("kill-others", {})]

    job.advance(GRACE_S - 2)
    assert job.kinds == ["end-ranks", "kill-others"]
    job.advance(2)

    assert job.kinds == ["end-ranks", "kill-others", *KILLED]


def test_the_first_reason_counts(job: Job):
    first = Outcome(3, Cause.USER, Failure(message="first"))
    job.stop.fail(first)
    job.stop.fail(Outcome(4, Cause.USER, Failure(message="second")))
    job.stop.handle_hang(Failure(message="it hangs"))

    assert job.stop.outcome == first
    assert job.kinds == ["end-ranks"]


def test_the_head_does_not_wait_long_for_launchers_that_were_killed(job: Job):
    job.stop.give_up(Failure(message="it did not start"))
    job.advance(1.0)
    assert not job.stop.is_kill_overdue

    job.advance(1.5)

    assert job.stop.is_kill_overdue
    assert job.kinds == KILLED

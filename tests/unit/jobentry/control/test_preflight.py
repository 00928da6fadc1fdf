"""The head's part, with nodes whose answers are written here and a loop without time."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from jobentry.contract import preflight, preflight_levels
from jobentry.contract.env import NodeEnv
from jobentry.contract.exits import ENTRY_FAILED, Cause
from jobentry.contract.preflight import (
    Disk,
    Endpoint,
    Library,
    Link,
    NodeFacts,
    Reach,
    Speeds,
)
from jobentry.control.preflight import Check, close_ports

Answer = Callable[[dict[str, Any]], Any]
GOOD = "good"


class Loop:
    """A loop in which a timer is over once all that was posted is done."""

    def __init__(self) -> None:
        self.posted: list[Callable[[], None]] = []
        self.timers: set[str] = set()

    def post(self, action: Callable[[], None]) -> None:
        self.posted.append(action)

    def schedule(self, name: str, delay_s: float, action: Callable[[], None]) -> None:
        self.timers.add(name)

    def cancel(self, name: str) -> None:
        self.timers.discard(name)

    def is_scheduled(self, name: str) -> bool:
        return name in self.timers

    def step(self) -> None:
        if self.posted:
            self.posted.pop(0)()
        else:
            self.timers.clear()


class Nodes:
    """The nodes of a job, each with a function from a question to its answer, None for none."""

    def __init__(
        self, *answers: Answer, level: str = preflight_levels.QUICK, has_probe: bool = True
    ):
        self.answers = answers
        self.loop = Loop()
        self.asked: list[tuple[int, str]] = []
        self.closed: list[int] = []
        hosts = tuple(f"w{node}" for node in range(len(answers)))
        self.workers = [self._worker(node, has_probe) for node in range(1, len(answers))]
        self.check = Check(
            SimpleNamespace(  # type: ignore[arg-type]
                setup=SimpleNamespace(node=NodeEnv(hosts=hosts, preflight=level)),
                loop=self.loop,
                pool=SimpleNamespace(workers=self.workers),
                stop=SimpleNamespace(has_begun=False, requested_at=None),
            ),
            SimpleNamespace(  # type: ignore[arg-type]
                endpoints=(endpoint(0),),
                start=self._start,
                close=lambda: self.closed.append(0),
            ),
        )

    def _worker(self, node: int, has_probe: bool) -> Any:
        def send(kind: str, **values: Any) -> None:
            assert kind == "preflight"
            if values["step"] == "close":
                self.closed.append(node)
                return
            self._ask(node, values, lambda result: self.check.take(node, result))

        probe = {"probe": [endpoint(node)]} if has_probe else {}
        return SimpleNamespace(
            index=node, facts=probe, clock_ahead_s=0.0, is_gone=False, is_absent=False, send=send
        )

    def _start(self, values: dict[str, Any], on_done: Callable[[dict[str, Any]], None]) -> None:
        self._ask(0, values, on_done)

    def _ask(
        self, node: int, values: dict[str, Any], take: Callable[[dict[str, Any]], None]
    ) -> None:
        self.asked.append((node, values["step"]))
        facts = self.answers[node](values)
        if facts is not None:
            answer = {"number": values["number"], "found": facts}
            self.loop.post(lambda: take(answer))


def endpoint(node: int) -> Endpoint:
    return Endpoint("eth0", f"10.0.0.{node + 1}", 4000, 1500, tuple(Library))


def good(node: int, **changes: Any) -> Answer:
    """Return the answers of a healthy node."""

    def answer(values: dict[str, Any]) -> Any:
        if values["step"] == "transfer":
            return 1000.0
        if values["step"] == "speeds":
            return Speeds(400.0, 10.0)
        links = tuple(Link(peer, 0, Reach.WORKS, 100) for peer, _ in values["endpoints"])
        facts = NodeFacts(node, endpoints=(endpoint(node),), links=links)
        return preflight.to_values(facts._replace(**changes))

    return answer


def silent(values: dict[str, Any]) -> None:
    return None


def test_healthy_nodes_are_asked_once_and_nothing_is_logged(capfd: pytest.CaptureFixture[str]):
    nodes = Nodes(good(0), good(1), good(2))

    assert nodes.check.run() is None

    assert nodes.asked == [(0, "facts"), (1, "facts"), (2, "facts")]
    assert nodes.closed == [0, 1, 2]
    assert capfd.readouterr().err == ""


def test_a_fault_ends_the_job_before_its_ranks_start_and_names_the_node(
    capfd: pytest.CaptureFixture[str],
):
    full = good(2, disks=(Disk("/log", 0, 9, is_needed=True),))
    nodes = Nodes(good(0), good(1), full)

    outcome = nodes.check.run()

    message = "checking the nodes: node 2 (w2): /log has 0.0 MiB free"
    assert outcome is not None
    assert (outcome.exit_code, outcome.cause) == (ENTRY_FAILED, Cause.PLATFORM)
    assert outcome.failure is not None
    assert (outcome.failure.node, outcome.failure.host) == (2, "w2")
    assert outcome.failure.message == message
    assert message in capfd.readouterr().err


@pytest.mark.parametrize("second", [Reach.WORKS, Reach.SLOW, Reach.SILENT, None])
def test_a_connection_that_fails_once_is_tried_again(
    second: Reach | None, capfd: pytest.CaptureFixture[str]
):
    """Of thousands of pairs, a network that loses each hundredth packet loses two in a row."""
    tries = iter([Reach.SILENT, second])

    def unlucky(values: dict[str, Any]) -> Any:
        reach = next(tries)
        return good(1, links=(Link(0, 0, reach),))(values) if reach else None

    outcome = Nodes(good(0), unlucky).check.run()

    assert (outcome is not None) == (second is Reach.SILENT)
    assert ("no answer on eth0" in capfd.readouterr().err) == (second is Reach.SILENT)
    assert next(tries, None) is None


def test_a_doubt_is_a_warning(capfd: pytest.CaptureFixture[str]):
    nodes = Nodes(good(0), good(1))
    nodes.workers[0].clock_ahead_s = 3600.0

    assert nodes.check.run() is None

    warning = "checking the nodes: node 1 (w1): its clock is +3600 s from the head's"
    assert warning in capfd.readouterr().err


@pytest.mark.parametrize(
    "answer", [silent, lambda values: {"problem": "x"}, lambda values: [], lambda values: {"a": 1}]
)
def test_a_node_without_a_usable_answer_does_not_stop_the_job(
    answer: Answer, capfd: pytest.CaptureFixture[str]
):
    assert Nodes(good(0), answer).check.run() is None
    assert capfd.readouterr().err == ""


def test_what_a_node_says_of_nodes_that_do_not_exist_is_left_out():
    links = (
        Link(99, 0, Reach.SILENT),
        Link(-1, 0, Reach.WORKS, 9_000_000),
        Link(0, 7, Reach.SILENT),
    )

    assert Nodes(good(0), good(1, links=links), good(2)).check.run() is None


def test_a_worker_without_a_probe_is_not_asked():
    nodes = Nodes(good(0), good(1), has_probe=False)

    assert nodes.check.run() is None
    assert nodes.asked == [(0, "facts")]


def test_a_late_answer_counts_for_its_own_step_only():
    nodes = Nodes(good(0), silent)
    nodes.check.run()

    nodes.check.take(1, {"number": 1, "found": {}})
    nodes.check.take(1, {"number": 7, "found": {}})

    assert nodes.check._answers.keys() == {0}


def test_a_stopped_job_is_not_judged():
    nodes = Nodes(good(0, disks=(Disk("/log", 0, 9, is_needed=True),)))
    nodes.check._stop.has_begun = True  # type: ignore[misc]

    assert nodes.check.run() is None


def test_a_full_check_measures_each_node_and_shows_a_table(capfd: pytest.CaptureFixture[str]):
    def slow(values: dict[str, Any]) -> Any:
        if values["step"] == "speeds":
            return Speeds(400.0, 1.0)
        return 10.0 if values["step"] == "transfer" else good(1)(values)

    def to_slow(node: int) -> Answer:
        def answer(values: dict[str, Any]) -> Any:
            return 10.0 if values.get("to") == 1 else good(node)(values)

        return answer

    nodes = Nodes(to_slow(0), slow, to_slow(2), to_slow(3), level=preflight_levels.FULL)

    assert nodes.check.run() is None

    log = capfd.readouterr().err
    assert "node 1 (w1): transfers with any other node: 10 MB/s, and usually 1e+03 MB/s" in log
    assert "node 1 (w1): memory: 1 GB/s, and usually 10 GB/s here" in log
    rows = [line for line in log.splitlines() if "eth0" in line]
    assert [row.split()[-1] for row in rows] == ["ok", "doubt", "ok", "ok"]


@pytest.mark.parametrize("answer", [[1], [1, "x"], {"a": 1}, "text", [1, 2, 3], [1, 2, {}]])
def test_measurements_of_another_form_are_left_out(answer: Any):
    def odd(values: dict[str, Any]) -> Any:
        return good(1)(values) if values["step"] == "facts" else answer

    assert Nodes(good(0), odd, level=preflight_levels.FULL).check.run() is None


def test_ports_are_closed_even_if_the_head_takes_no_part():
    nodes = Nodes(good(0), good(1), good(2))

    close_ports(SimpleNamespace(workers=nodes.workers))  # type: ignore[arg-type]

    assert nodes.closed == [1, 2]
    assert nodes.asked == []

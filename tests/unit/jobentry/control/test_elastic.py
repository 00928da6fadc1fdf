"""The nodes that currently take part in an elastic job."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobentry.contract.env import NodeEnv
from jobentry.contract.exits import Failure
from jobentry.contract.paths import NodePaths
from jobentry.control.elastic import ElasticHosts, FixedHosts, Members
from jobentry.control.node_table import Row
from tests.support.loops import Clock, make_loop, paths_in, signals_restored

HOSTS = ("a", "b", "c")


@pytest.fixture
def members(tmp_path):
    """A job that needs two of three nodes."""
    paths = NodePaths("/h", "/j", "/m", "/l", str(tmp_path))
    return Members(NodeEnv(hosts=HOSTS, min_nodes=2), paths)


@pytest.fixture
def read_members(tmp_path):
    """A function that returns the content of the file that the driver reads."""
    return lambda: json.loads(Path(tmp_path, "members").read_bytes())


def test_the_driver_gets_the_available_nodes(members, read_members):
    members.add(0)
    few = members.are_enough
    members.add(2)

    assert (few, members.are_enough) == (False, True)
    assert read_members() == {"a": [0, "a"], "c": [2, "c"]}


def test_a_returning_node_gets_a_new_name(members, read_members):
    """The driver never reuses a name that it has removed."""
    for index in range(3):
        members.add(index)
    members.remove(1)
    without = read_members()
    members.add(1)
    members.remove(1)
    members.add(1)

    assert without == {"a": [0, "a"], "c": [2, "c"]}
    assert read_members() == {"a": [0, "a"], "b~3": [1, "b"], "c": [2, "c"]}


def test_a_node_with_a_failed_rank_is_left_out_until_it_returns(members, read_members):
    for index in range(3):
        members.add(index)
    before = read_members()
    members.exclude(1)
    members.exclude(1)
    two = members.count
    members.exclude(2)
    few = members.are_enough
    members.remove(2)
    members.add(2)

    assert (two, few, members.are_enough) == (2, False, True)
    assert before == {"a": [0, "a"], "b": [1, "b"], "c": [2, "c"]}


# -- an elastic job and one that needs all nodes ------------------------------------------------


class Worker:
    """Stands in for a worker of the head."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.reconnects = 0

    def reconnect(self) -> None:
        self.reconnects += 1


class Pool:
    """Stands in for the head's connections: two workers, which are absent at first."""

    def __init__(self) -> None:
        self.absent: list[Any] = [Worker(1), Worker(2)]
        self.rows: list[Row] = []
        self.stopped_for_good: list[bool] = []

    def unfit(self) -> list[Row]:
        return self.rows

    def stop_waiting(self, *, for_good: bool = True) -> None:
        self.stopped_for_good.append(for_good)


class Stop:
    """Stands in for the end of the job."""

    def __init__(self) -> None:
        self.lost: list[Failure] = []

    def fail_for_lost_node(self, failure: Failure) -> None:
        self.lost.append(failure)


class Job:
    """An elastic job that needs two of three nodes, with a clock that the test moves."""

    def __init__(self, folder: Path) -> None:
        node = NodeEnv(hosts=HOSTS, min_nodes=2, start_timeout_s=600.0)
        self.pool: Any = Pool()
        self.stop: Any = Stop()
        self.clock = Clock()
        paths = paths_in(folder)
        self.loop = make_loop(node, paths, now_s=self.clock.now_s)
        self.hosts = ElasticHosts(node, paths, self.loop, self.pool, self.stop)

    def join(self, index: int) -> None:
        self.pool.absent = [each for each in self.pool.absent if each.index != index]
        self.hosts.worker_joined(index)

    def lose(self, index: int) -> Any:
        worker: Any = Worker(index)
        self.hosts.worker_lost(worker, Failure(index, HOSTS[index], message="it is gone"))
        return worker

    def advance(self, seconds: float) -> None:
        self.clock.advance(self.loop, seconds)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """An elastic job before its bring-up."""
    with signals_restored():
        job = Job(tmp_path)
        yield job
    job.loop.relay.finish()


def test_an_elastic_job_with_enough_nodes_waits_a_while_for_the_others(job: Job):
    job.advance(600.0)
    assert not job.hosts.may_begin

    job.join(1)
    job.advance(9.0)
    assert not job.hosts.may_begin
    job.advance(2.0)

    assert job.hosts.may_begin
    job.hosts.begin()
    assert job.pool.stopped_for_good == [False]


def test_an_elastic_job_with_all_nodes_begins_at_once(job: Job):
    job.join(1)
    job.join(2)

    assert job.hosts.may_begin


def test_an_elastic_job_with_too_few_nodes_ends_after_the_start_timeout(job: Job):
    job.join(1)
    job.hosts.begin()
    worker = job.lose(1)
    job.advance(599.0)
    assert (job.stop.lost, worker.reconnects) == ([], 1)

    job.advance(2.0)

    (failure,) = job.stop.lost
    assert failure.node == 1
    assert failure.message == (
        "waiting for nodes: after 600 s 1 of 3 are there, and the job needs 2 (min_nodes)"
        "; it is gone"
    )


def test_an_elastic_job_continues_if_a_node_joins_in_time(job: Job):
    job.join(1)
    job.hosts.begin()
    job.lose(1)
    job.advance(599.0)
    job.join(2)

    job.advance(600.0)

    assert job.stop.lost == []


def test_an_elastic_job_does_not_take_a_node_that_does_not_match(job: Job):
    job.join(1)
    job.hosts.begin()
    job.lose(1)
    job.pool.rows = [Row(2, "c", facts={"code": "x"}, problem="other code")]
    job.join(2)

    job.advance(601.0)

    assert len(job.stop.lost) == 1


def test_an_elastic_job_begins_without_absent_nodes_and_not_with_unfit_ones(job: Job):
    unfit = Row(1, "b", facts={"code": "x"}, problem="other code")
    job.pool.rows = [unfit, Row(2, "c", problem="its name does not resolve")]

    assert job.hosts.unfit() == [unfit]


def test_a_job_that_is_not_elastic_needs_every_node():
    pool: Any = Pool()
    stop: Any = Stop()
    worker: Any = pool.absent[0]
    hosts = FixedHosts(pool, stop)
    pool.rows = [Row(2, "c", problem="its name does not resolve")]

    assert not hosts.may_begin
    assert hosts.unfit() == pool.rows
    assert not hosts.can_go_on_without(1)
    pool.absent = []
    assert hosts.may_begin
    failure = Failure(1, "b", message="it is gone")
    hosts.worker_lost(worker, failure)
    assert (stop.lost, worker.reconnects) == ([failure], 0)

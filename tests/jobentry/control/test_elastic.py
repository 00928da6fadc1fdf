"""The nodes that currently take part in an elastic job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jobentry.contract.env import NodeEnv
from jobentry.contract.paths import NodePaths
from jobentry.control.elastic import Members

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

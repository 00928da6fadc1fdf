"""The table of all nodes: their problems, and hints for them."""

from __future__ import annotations

import pytest

from jobentry.control import node_table
from jobentry.control.node_table import Row

FACTS = {
    "module": "0.28.1",
    "code": "sha256:1",
    "mpi": "4.1",
    "python": "3.11.2",
    "entry": "/opt/cloudjob/jobentry",
}
HEAD = Row(0, "a", "10.0.0.1", True, facts=FACTS)


def test_the_table_has_a_line_for_each_node():
    """The head is first, then nodes with problems; unknown values are dashes."""
    rows = [
        HEAD,
        Row(1, "b", "10.0.0.2", True, True, FACTS, 0.04),
        Row(2, "c.long", problem="no such name", hint="start it"),
        Row(3, "d", "10.0.0.4", True, False, problem="it has another key"),
    ]

    assert node_table.lines(rows) == [
        "node  host    address   port  control  code  Open MPI  Python  clock",
        "0     a       10.0.0.1  open  -        same  4.1       3.11.2  -       the head",
        "2     c.long  -         -     -        -     -         -       -       no such name",
        "3     d       10.0.0.4  open  no       -     -         -       -       it has another key",
        "1     b       10.0.0.2  open  yes      same  4.1       3.11.2  +0.0 s  ready",
    ]


def test_a_large_table_shows_those_that_lack_something():
    """Of a thousand nodes only some are listed, including the one with a problem."""
    rows = [HEAD, *(Row(node, "h", facts=FACTS) for node in range(1, 1000))]
    rows[900] = Row(900, "h", problem="no such name")

    lines = node_table.lines(rows)

    assert len(lines) == 1 + node_table.MAX_SHOWN_NODES + 1
    assert lines[2].startswith("900 ")
    assert lines[-1] == "... and 968 more"


@pytest.mark.parametrize(
    ("facts", "problem"),
    [
        ({}, ""),
        ({"python": "3.11.9"}, ""),
        ({"code": "sha256:2"}, "other code: sha256:2, and the head has sha256:1"),
        ({"mpi": "5.0"}, "another MPI: 5.0, and the head has 4.1"),
        ({"mpi": "MPICH 4.0"}, "another MPI: MPICH 4.0, and the head has 4.1"),
        (
            {"module": "none"},
            "another version of the launcher's framework: none, and the head has 0.28.1",
        ),
        ({"python": "3.1.2"}, "another Python: 3.1.2, and the head has 3.11.2"),
        (
            {"entry": "/home/a/entry"},
            "its entry elsewhere: /home/a/entry, and the head has /opt/cloudjob/jobentry",
        ),
    ],
)
def test_nodes_with_different_versions_are_refused(facts, problem):
    """The message has both versions and a hint; only Python's patch version may differ."""
    row = node_table.compare(Row(1, "b", facts={**FACTS, **facts}), HEAD)

    assert row.problem == problem
    assert bool(row.hint) == bool(problem)


def test_a_node_without_an_answer_is_not_compared():
    row = Row(1, "b", problem="no such name")

    assert node_table.compare(row, HEAD) == row


def test_nodes_with_the_same_problem_share_one_hint():
    rows = [HEAD, *(Row(node, "h", hint="start it") for node in range(1, 12))]
    rows.append(Row(12, "h", hint="stop it"))

    assert node_table.hints(rows) == [
        "hint: nodes 1, 2, 3, 4, 5, 6, 7, 8 and 3 more: start it",
        "hint: node 12: stop it",
    ]

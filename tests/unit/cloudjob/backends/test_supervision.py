"""When a job is over, who is to blame, and what is done to nodes: tables of values."""

from __future__ import annotations

import re
import subprocess
from math import inf
from pathlib import Path

import pytest

from cloudjob.backends.slurm import script
from cloudjob.backends.supervision import (
    Action,
    Deed,
    Lead,
    Node,
    Past,
    Policy,
    decide,
    ended_at,
    exit_code,
    first_failed,
    kill_at,
)

LED = Policy(Lead.HEAD, leave_s=5, cancel_s=25, lost_s=60)
EQUAL = Policy(Lead.ALL, leave_s=30, cancel_s=30)

RUNS = Node()
DONE = Node(False, 0, 100)
FAILED = Node(False, 7, 100)
REPORTED = FAILED._replace(is_reported=True)
# Its platform does not say when it ended, or how.
LOST = Node(False, None, inf)

CANCELLED = Past(cancelled_at=100)
TOLD = CANCELLED._replace(is_cancel_told=True)
OVER = Past(is_end_told=True)


def do(deed: Deed, *nodes: int) -> Action:
    return Action(deed, nodes)


TABLE = {
    "all nodes run": ((RUNS, RUNS), LED, Past(), 100, ()),
    "all nodes have ended": ((FAILED, FAILED), LED, Past(), 100, ()),
    "the head has ended": ((DONE, RUNS), LED, Past(), 101, (do(Deed.END, 1),)),
    "the head has failed": ((FAILED, RUNS), LED, Past(), 101, (do(Deed.END, 1),)),
    "the head was lost at an unknown time": ((LOST, RUNS), LED, Past(), 1e9, (do(Deed.END, 1),)),
    "the workers know that it has ended": ((DONE, RUNS), LED, OVER, 104, ()),
    "a worker stays": ((DONE, DONE, RUNS), LED, OVER, 105, (do(Deed.KILL, 2),)),
    "a worker was just killed": ((DONE, RUNS), LED, OVER._replace(killed_at=105), 109, ()),
    "a worker outlives that": (
        (DONE, RUNS),
        LED,
        OVER._replace(killed_at=105),
        110,
        (do(Deed.KILL, 1),),
    ),
    "a worker has succeeded": ((RUNS, DONE), LED, Past(), 1e9, ()),
    "a worker has failed": ((RUNS, FAILED, RUNS), LED, Past(), 101, (do(Deed.REPORT, 1),)),
    "the head knows of it": ((RUNS, REPORTED), LED, Past(), 160, ()),
    "the head continues regardless": ((RUNS, REPORTED), LED, Past(), 161, (do(Deed.ASK_HEAD, 0),)),
    "the report has failed, too": (
        (RUNS, FAILED),
        LED,
        Past(),
        161,
        (do(Deed.REPORT, 1), do(Deed.ASK_HEAD, 0)),
    ),
    "the head was asked": ((RUNS, REPORTED), LED, Past(head_asked_at=161), 185, ()),
    "the head hangs": ((RUNS, REPORTED), LED, Past(head_asked_at=161), 186, (do(Deed.KILL, 0),)),
    "a cancel": ((RUNS, RUNS), LED, CANCELLED, 100, (do(Deed.CANCEL, 0, 1),)),
    "a cancel is told once": ((RUNS, RUNS), LED, TOLD, 124, ()),
    "a cancelled job is no lost worker": ((RUNS, FAILED), LED, TOLD, 101, ()),
    "not even after long": (
        (RUNS, FAILED._replace(ended_at=0)),
        LED,
        TOLD,
        124,
        (),
    ),
    "the head of a cancelled job has ended": ((DONE, RUNS), LED, TOLD, 101, (do(Deed.END, 1),)),
    "a frozen node outlives a cancel": ((RUNS, RUNS), LED, TOLD, 125, (do(Deed.KILL, 0, 1),)),
    "somebody does not wait": (
        (RUNS, RUNS),
        LED,
        TOLD._replace(is_urgent=True),
        100,
        (do(Deed.KILL, 0, 1),),
    ),
    "equal nodes: one has succeeded": ((DONE, RUNS), EQUAL, Past(), 1e9, ()),
    "equal nodes: one has failed": ((RUNS, FAILED), EQUAL, Past(), 101, (do(Deed.END, 0),)),
    "equal nodes have their grace period": ((RUNS, FAILED), EQUAL, OVER, 129, ()),
    "equal nodes outlive it": ((RUNS, FAILED), EQUAL, OVER, 130, (do(Deed.KILL, 0),)),
    "equal nodes: a cancel is told once": ((RUNS, FAILED), EQUAL, TOLD, 101, ()),
    "equal nodes: somebody does not wait after a failure": (
        (RUNS, FAILED),
        EQUAL,
        OVER._replace(cancelled_at=101, is_urgent=True),
        102,
        (do(Deed.KILL, 0),),
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_what_is_done_to_nodes(case: str):
    nodes, policy, past, now, expected = TABLE[case]

    assert decide(nodes, policy, past, now) == expected


@pytest.mark.parametrize(
    ("nodes", "policy", "expected"),
    [
        ((RUNS, FAILED), LED, None),
        ((DONE, RUNS), LED, 100),
        ((LOST, RUNS), LED, inf),
        ((RUNS, DONE), EQUAL, None),
        ((RUNS, FAILED), EQUAL, 100),
        ((DONE, DONE._replace(ended_at=102)), EQUAL, 102),
    ],
)
def test_when_a_job_is_over(nodes: tuple[Node, ...], policy: Policy, expected: float | None):
    assert ended_at(nodes, policy) == expected


def test_the_earlier_limit_counts():
    """A cancel does not prolong the life of workers whose head has ended, and the reverse."""
    assert kill_at((DONE, RUNS), LED, CANCELLED) == 105
    assert kill_at((DONE._replace(ended_at=124), RUNS), LED, CANCELLED) == 125
    assert kill_at((RUNS, FAILED), LED, CANCELLED._replace(head_asked_at=101)) == 125
    assert kill_at((RUNS, RUNS), LED, Past()) == inf


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ((DONE, DONE), None),
        ((FAILED, FAILED._replace(ended_at=99)), 1),
        ((FAILED, FAILED), 0),
        ((RUNS, FAILED), 1),
        ((LOST, FAILED), 1),
    ],
)
def test_the_first_failure_is_to_blame(nodes: tuple[Node, ...], expected: int | None):
    assert first_failed(nodes) == expected


@pytest.mark.parametrize(
    ("nodes", "lead", "is_head_asked", "expected"),
    [
        ((DONE, FAILED), Lead.HEAD, False, 0),
        ((DONE, FAILED), Lead.ALL, False, 7),
        ((DONE, DONE), Lead.ALL, False, 0),
        ((LOST, DONE), Lead.HEAD, False, 1),
        ((Node(False, 143, 101), FAILED), Lead.HEAD, True, 7),
        ((Node(False, 143, 101), DONE), Lead.HEAD, True, 143),
    ],
)
def test_the_exit_code_of_a_job(
    nodes: tuple[Node, ...], lead: Lead, is_head_asked: bool, expected: int
):
    assert exit_code(nodes, lead, is_head_asked=is_head_asked) == expected


# -- the same rules in the script of a job on Slurm -----------------------------------------------

JOB_SCRIPT = Path(script.__file__).with_name(script.JOB_SCRIPT)
# Around the functions of the script that decide about failed workers. Pauses take no time; while
# the script waits for the end of a head that it has asked, or that notices by itself, it ends.
SURROUNDINGS = """
head_ends_after=$1
note() { echo "note $*"; }
mark() { echo >"$1"; }
signal_head() { echo "signal $1"; }
sleep() { [ "$1" = "$head_ends_after" ] || [ "$1" = 1 ] && echo 0 >end-0; }
"""


def functions(*names: str) -> str:
    """Return functions of the script."""
    text = JOB_SCRIPT.read_text()
    functions_there = [
        re.search(rf"^{name}\(\) {{$.*?^}}$", text, re.MULTILINE | re.DOTALL) for name in names
    ]
    return "\n".join(match[0] for match in functions_there if match)


# The exit codes of the workers that have ended, whether the head ends by itself meanwhile, and
# whether the job was cancelled.
WORKERS = {
    "none has ended": ({}, False, False),
    "one has succeeded": ({1: 0}, False, False),
    "one has failed": ({1: 0, 2: 7}, False, False),
    "the head notices by itself": ({2: 7}, True, False),
    "the job was cancelled": ({2: 143}, False, True),
}


@pytest.mark.parametrize("case", WORKERS)
def test_the_script_of_slurm_follows_the_same_rules_for_failed_workers(case: str, tmp_path: Path):
    """Its pauses are those of ``lost_s``: 10 s."""
    ended, notices, is_cancelled = WORKERS[case]
    for node, code in ended.items():
        (tmp_path / f"end-{node}").write_text(f"{code}\n")
    if is_cancelled:
        (tmp_path / "asked").touch()
    text = SURROUNDINGS + functions("head_has_ended", "fail_head", "check_ends") + "\ncheck_ends\n"
    argv = ["sh", "-c", text, "sh", "10" if notices else "never"]
    done = subprocess.run(
        argv, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )

    nodes = [Node(not notices, 0 if notices else None, 108 if notices else inf)]
    nodes += [
        Node(node not in ended, ended.get(node), 100 if node in ended else inf)
        for node in (1, 2, 3)
    ]
    past = Past(100 if is_cancelled else None, is_cancel_told=True, is_end_told=True)
    actions = decide(nodes, LED._replace(lost_s=10), past, 111)
    is_asked = any(action.deed is Deed.ASK_HEAD for action in actions)
    blamed = first_failed(nodes)
    expected = f"note lost {blamed} {ended[blamed]}\nsignal TERM\n" if is_asked and blamed else ""
    assert done.stdout == expected

"""Tests of the keeper of an emulated node: no process on the node outlives it."""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from cloudjob.backends.process.keeper import Keeper, NodeRequest, execute

# Kills its programs on SIGTERM, as the entry does; each program leads a session, as ranks do.
ENTRY = """
import os, signal, subprocess, sys, time
programs = [
    subprocess.Popen(["sleep", sys.argv[1]], start_new_session=True) for _ in range(40)
]
def end(number, frame):
    for program in programs:
        program.kill()
    os._exit(0)
signal.signal(signal.SIGTERM, end)
open("up", "w").close()
while True:
    time.sleep(60)
"""


@pytest.fixture
def start(tmp_path):
    """A function that starts a keeper whose entry runs 40 programs, and returns its process id."""
    # The sleep time in the arguments identifies the programs of this test.
    mark = f"{3000 + os.getpid()}.{time.time_ns()}"

    def keeper(parent: int = os.getpid()) -> int:
        home = tmp_path / "home"
        home.mkdir(exist_ok=True)
        (home / "up").unlink(missing_ok=True)
        request = NodeRequest(
            host="worker-0",
            env={"PATH": os.environ["PATH"], "CLOUDJOB_NODE_DIR": str(home)},
            home=str(home),
            tmp=str(tmp_path / "tmp"),
            log=str(tmp_path / "log"),
        )
        child = os.fork()
        if not child:
            argv = [sys.executable, "-c", ENTRY, mark]
            try:
                os._exit(Keeper(request, partial(execute, argv), "", parent).run())
            finally:
                os._exit(1)
        if parent == os.getpid():
            poll_for((home / "up").exists)
        return child

    keeper.leftover_processes = lambda: find(mark)
    yield keeper
    for process in find(mark):
        os.kill(process, signal.SIGKILL)


@pytest.mark.parametrize("after_ms", range(0, 20, 2))
def test_a_node_ends_even_if_its_keeper_is_killed_while_ending_it(start, after_ms):
    keeper = start()
    os.kill(keeper, signal.SIGHUP)
    time.sleep(after_ms / 1000)

    os.kill(keeper, signal.SIGKILL)
    os.waitpid(keeper, 0)

    poll_for(lambda: not start.leftover_processes())


def test_a_node_that_gets_sighup_leaves_no_process(start):
    keeper = start()

    os.kill(keeper, signal.SIGHUP)
    os.waitpid(keeper, 0)

    assert not start.leftover_processes()


def test_a_keeper_whose_controller_died_early_starts_nothing(start):
    keeper = start(parent=os.getppid())

    _, status = os.waitpid(keeper, 0)

    assert os.waitstatus_to_exitcode(status) == 137
    assert not start.leftover_processes()


def find(mark: str) -> list[int]:
    """Return the processes that have ``mark`` among their arguments."""
    pids = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                cmdline = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if mark.encode() in cmdline.split(b"\0"):
                pids.append(int(folder.name))
    return pids


def poll_for(condition, limit_s=180):
    """Wait until a condition holds."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)

"""The controller of a job of the process backend: what it is told reaches its nodes, whenever."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cloudjob.backends.process.controller import STATE

CONTROLLER = "from cloudjob.backends.process.controller import main; main()"


@pytest.fixture
def start(tmp_path):
    """Start a controller of four nodes, each of which sleeps; give it when it says ready.

    Its state comes with it.
    """
    started = []

    def controller(*argv: str) -> tuple[subprocess.Popen[bytes], Path]:
        folder = tmp_path / str(len(started))
        run_dir = folder / "run"
        run_dir.mkdir(parents=True)
        request = {
            "folder": str(folder),
            "run_dir": str(run_dir),
            "hosts": "",
            "argv": argv or ["/bin/sleep", "1000"],
            "retries": 0,
            "grace_s": 1.0,
            "is_led": True,
            "keeps_homes": False,
            "is_elastic": False,
            "nodes": [
                {
                    "host": f"worker-{node}",
                    "env": {"CLOUDJOB_NODE_DIR": str(folder), "NODE": str(node)},
                    "home": str(folder / f"home-{node}"),
                    "tmp": str(folder / f"tmp-{node}"),
                    "log": str(folder / f"log-{node}"),
                }
                for node in range(4)
            ],
        }
        process = subprocess.Popen(
            [sys.executable, "-c", CONTROLLER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        started.append(process)
        process.stdin.write(json.dumps(request).encode())
        process.stdin.close()
        assert process.stdout.read(6) == b"ready\n"
        return process, folder / STATE

    yield controller
    for process in started:
        process.stdout.close()
        if process.poll() is None:
            process.send_signal(signal.SIGUSR1)
            process.wait(30)


@pytest.mark.parametrize("after_ms", [step * 0.8 for step in range(24)])
def test_a_cancel_while_the_nodes_start(start, after_ms):
    """It reaches every node, also one that has just been forked, and is what the job ended by."""
    controller, path = start()
    time.sleep(after_ms / 1000)

    os.kill(controller.pid, signal.SIGTERM)

    assert controller.wait(20) == 0
    state = json.loads(path.read_bytes())
    assert state["is_cancelled"]
    assert state["ended_at"] is not None


# The first node ends when the second one's keeper is gone; there each process has the next one as
# its child, in a session of its own.
CHAIN = """\
import os, sys, time
folder, depth = os.environ["CLOUDJOB_NODE_DIR"], int(sys.argv[1])
if os.environ["NODE"] == "0":
    while not os.path.exists(folder + "/keeper"):
        time.sleep(0.001)
    keeper = int(open(folder + "/keeper").read())
    while os.path.exists(f"/proc/{keeper}/exe"):
        time.sleep(0.001)
elif os.environ["NODE"] == "1":
    while depth and not os.fork():
        os.setsid()
        depth -= 1
    if not depth:
        with open(folder + "/last.new", "w") as file:
            file.write(str(os.getpid()))
        os.rename(folder + "/last.new", folder + "/last")
    time.sleep(1000)
"""


def test_a_job_that_ends_before_what_a_killed_keeper_left(start):
    """All of it is ended all the same, however deep it lies."""
    controller, path = start(sys.executable, "-c", CHAIN, "40")
    last = read_when_there(path.with_name("last"))
    keeper = json.loads(path.read_bytes())["nodes"][1]["process"]

    os.kill(keeper, signal.SIGKILL)
    path.with_name("keeper.new").write_text(str(keeper))
    path.with_name("keeper.new").rename(path.with_name("keeper"))

    assert controller.wait(20) == 0
    assert not Path(f"/proc/{last}").exists()


def read_when_there(path: Path) -> str:
    """Return what stands in a file that somebody is about to make."""
    end = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < end, path
        time.sleep(0.01)
    return path.read_text()

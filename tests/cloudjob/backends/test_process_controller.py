"""Tests of the controller of a process-backend job: cancels, lost keepers and full disks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cloudjob.backends.process import STATE

CONTROLLER = "from cloudjob.backends.process.controller import main; main()"


@pytest.fixture
def start(tmp_path):
    """A function that starts a controller of four nodes and returns its process and state file."""
    started = []

    def controller(
        *argv: str, folder: Path | None = None, **changes: object
    ) -> tuple[subprocess.Popen[bytes], Path]:
        folder = folder or tmp_path / str(len(started))
        run_dir = folder / "run"
        run_dir.mkdir(parents=True, exist_ok=True)
        request = {
            "folder": str(folder),
            "run_dir": str(run_dir),
            "running": str(folder / "running"),
            "hosts": "",
            "argv": argv or ["/bin/sleep", "1000"],
            "retries": 0,
            "retry_on": [],
            "backoff_s": 0.0,
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
            **changes,
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
def test_a_cancel_reaches_nodes_that_are_just_starting(start, after_ms):
    """SIGTERM reaches every node, even one that was just forked, and the job ends as cancelled."""
    controller, path = start()
    time.sleep(after_ms / 1000)

    os.kill(controller.pid, signal.SIGTERM)

    assert controller.wait(20) == 0
    state = json.loads(path.read_bytes())
    assert state["is_cancelled"]
    assert state["ended_at"] is not None


# Node 0 exits when the keeper of node 1 is gone. On node 1, each process of a chain forks the next
# one, which starts a new session.
FORK_CHAIN = """\
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


def test_processes_orphaned_by_a_killed_keeper_end_with_the_job(start):
    """Every such process is killed, however deep it is in the process tree."""
    controller, path = start(sys.executable, "-c", FORK_CHAIN, "40")
    last = read_when_there(path.with_name("last"))
    keeper = json.loads(path.read_bytes())["nodes"][1]["process"]

    os.kill(keeper, signal.SIGKILL)
    path.with_name("keeper.new").write_text(str(keeper))
    path.with_name("keeper.new").rename(path.with_name("keeper"))

    assert controller.wait(20) == 0
    assert not Path(f"/proc/{last}").exists()


def read_when_there(path: Path) -> str:
    """Wait for a file to appear, and return its text."""
    end = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < end, path
        time.sleep(0.01)
    return path.read_text()


@pytest.fixture
def small_disk(tmp_path):
    """A separate file system of 512 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    argv = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", folder]
    if os.geteuid() != 0 or subprocess.run(argv, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


FILL_DISK = """\
import os, sys
if os.environ["NODE"] == "0":
    with open(os.environ["CLOUDJOB_NODE_DIR"] + "/filler", "wb", buffering=0) as file:
        for size in (4096, 1):
            try:
                while file.write(b"x" * size): pass
            except OSError: pass
    sys.exit(3)
"""


def test_the_end_of_a_job_is_written_to_a_disk_that_is_full(start, small_disk):
    controller, path = start(sys.executable, "-c", FILL_DISK, folder=small_disk / "job")

    assert controller.wait(60) == 0

    assert path.with_name("filler").stat().st_size > 400 << 10
    state = json.loads(path.read_bytes())
    assert (state["exit_code"], state["nodes"][0]["exit_code"]) == (3, 3)
    assert state["ended_at"] is not None


def test_a_controller_that_cannot_continue_reports_it(start, tmp_path):
    """The nodes cannot be started, because a file has the path of a home folder."""
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "home-2").write_bytes(b"")

    controller, path = start()

    assert controller.wait(30) == 0
    state = json.loads(path.read_bytes())
    assert (state["exit_code"], state["ended_at"] is None) == (125, False)
    assert "home-2" in state["message"]


LEAVE_LATE = """\
import os, signal, time
folder, node = os.environ["CLOUDJOB_NODE_DIR"], os.environ["NODE"]
def leave(*_):
    time.sleep(6)
    open(folder + "/left-" + node, "w").close()
    os._exit(0)
if node != "0":
    signal.signal(signal.SIGTERM, leave)
    open(folder + "/ready-" + node, "w").close()
    time.sleep(1000)
while not all(os.path.exists(folder + "/ready-%d" % other) for other in (1, 2, 3)):
    time.sleep(0.01)
os._exit(3)
"""


def test_nodes_without_a_head_have_the_grace_period_when_one_has_failed(start):
    """Six seconds are longer than the workers of a head get, which have nothing left to do."""
    controller, path = start(sys.executable, "-c", LEAVE_LATE, is_led=False, grace_s=300.0)

    assert controller.wait(60) == 0

    state = json.loads(path.read_bytes())
    assert (state["exit_code"], [node["exit_code"] for node in state["nodes"]]) == (3, [3, 0, 0, 0])

"""Tests of the controller of a process-backend job: cancels, lost keepers and full disks."""

from __future__ import annotations

import json
import os
import signal
import socket
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
        *argv: str, folder: Path | None = None, is_ready: bool = True, **changes: object
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
            "entry": "",
            "retries": 0,
            "retry_on": [],
            "backoff_s": 0.0,
            "grace_s": 1.0,
            "is_led": True,
            "keeps_homes": False,
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
        ours, theirs = socket.socketpair()
        with ours, theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", CONTROLLER], stdin=theirs, stdout=subprocess.PIPE
            )
            started.append(process)
            ours.sendall(b"\n" + json.dumps(request).encode())
        assert process.stdout.read(6) == (b"ready\n" if is_ready else b"")
        return process, folder / STATE

    yield controller
    for process in started:
        process.stdout.close()
        if process.poll() is None:
            process.send_signal(signal.SIGUSR1)
            process.wait(180)


def test_a_controller_whose_lock_was_lost_on_the_way_starts_nothing():
    """The kernel drops descriptors for which there is no room; here, the second of two."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", CONTROLLER],
            stdin=theirs,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        socket.send_fds(ours, [b"\n"], [ours.fileno()] * 2)
        ours.sendall(b"{}")
    out, err = process.communicate(timeout=180)

    assert (process.returncode, out) == (1, b"")
    assert err.endswith(b"Too many open files\n"), err


@pytest.mark.parametrize("after_ms", [step * 0.8 for step in range(24)])
def test_a_cancel_reaches_nodes_that_are_just_starting(start, after_ms):
    """SIGTERM reaches every node, even one that was just forked, and the job ends as cancelled."""
    controller, path = start()
    time.sleep(after_ms / 1000)

    os.kill(controller.pid, signal.SIGTERM)

    assert controller.wait(180) == 0
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

    assert controller.wait(180) == 0
    assert not Path(f"/proc/{last}").exists()


def read_when_there(path: Path) -> str:
    """Wait for a file to appear, and return its text."""
    end = time.monotonic() + 180
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

    assert controller.wait(180) == 0
    state = json.loads(path.read_bytes())
    assert (state["exit_code"], state["ended_at"] is None) == (125, False)
    assert "home-2" in state["message"]


@pytest.mark.parametrize("log", ["controller.log", "log-2"])
def test_a_job_without_its_logs_does_not_start(start, tmp_path, log):
    """A disk may have no inodes left: without a log, nothing could say so later."""
    (tmp_path / "0" / log).mkdir(parents=True)

    controller, _ = start(is_ready=False)

    assert controller.wait(180) == 1


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


# -- retries --------------------------------------------------------------------------------------

# Node 0 notes its attempt and ends with code 9, after a record with the cause and the exit code
# that the file ``causes`` has for this attempt.
FAIL = """\
import json, os, sys
folder, node = os.environ["CLOUDJOB_NODE_DIR"], os.environ["NODE"]
if node != "0":
    sys.exit(0)
names = ("ATTEMPT", "PREVIOUS_CAUSE", "PREVIOUS_DIR", "TIMEOUT_S")
attempt = {name: os.environ.get("CLOUDJOB_" + name) for name in names}
before = attempt["PREVIOUS_DIR"]
attempt["files"] = sorted(os.listdir(before)) if before and os.path.isdir(before) else []
with open(folder + "/attempts", "a") as file:
    file.write(json.dumps(attempt) + "\\n")
causes = open(folder + "/causes").read().split()
cause = causes[int(attempt["ATTEMPT"]) - 1] if attempt["ATTEMPT"] else "none"
path = folder + "/run/exit.json"
if cause == "fifo":
    os.mkfifo(path)
elif cause == "link":
    os.symlink("/dev/zero", path)
elif cause == "done":
    sys.exit(0)
elif cause != "none":
    print(f"[0] step {attempt['ATTEMPT']}", flush=True)
    with open(path, "w") as file:
        code = 1 if cause == "user" else 9
        json.dump({"job": "j", "exit_code": code, "cause": cause.partition("-")[0]}, file)
sys.exit(9)
"""


@pytest.fixture
def retried(start, tmp_path):
    """A function that runs a job whose attempts end in these ways; returns what each attempt saw.

    It also returns the last state of the job and the log of its first node.
    """

    def run(*causes: str, **changes: object) -> tuple[list[dict], dict, str]:
        folder = tmp_path / "retried"
        folder.mkdir()
        (folder / "causes").write_text(" ".join(causes))
        controller, path = start(sys.executable, "-c", FAIL, folder=folder, **changes)
        assert controller.wait(60) == 0
        lines = (folder / "attempts").read_text().splitlines()
        log = (folder / "log-0").read_text()
        return [json.loads(line) for line in lines], json.loads(path.read_bytes()), log

    return run


def test_a_job_is_tried_again_after_the_kinds_of_failures_that_are_named(retried):
    seen, state, log = retried("hang", "platform", "user", retries=5, retry_on=["hang", "platform"])

    assert [attempt["ATTEMPT"] for attempt in seen] == ["1", "2", "3"]
    assert [attempt["PREVIOUS_CAUSE"] for attempt in seen] == [None, "hang", "platform"]
    assert [attempt["files"] for attempt in seen] == [[], ["exit.json"], ["exit.json"]]
    assert state["attempts"] == {"number": 3, "most": 6, "previous_cause": "platform"}
    assert state["exit_code"] == 9
    assert "attempt 1 of 6 failed (cause: hang); attempt 2 of 6 begins\n" in log
    assert "attempt 3 of 6 failed (cause: user); the job is not tried again" in log


def test_a_job_without_retries_has_no_attempts(retried):
    seen, state, log = retried("hang")

    assert [attempt["ATTEMPT"] for attempt in seen] == [None]
    assert state["attempts"] is None
    assert "attempt" not in log


def test_an_attempt_that_succeeds_is_the_last(retried):
    seen, state, _ = retried("hang", "done", retries=3, retry_on=["hang"])

    assert (len(seen), state["exit_code"]) == (2, 0)
    assert state["attempts"]["number"] == 2


def test_preemptions_do_not_count_as_retries(retried):
    words = ["preempted", "hang"]
    seen, state, log = retried("cancelled", "cancelled", "hang", "hang", retries=1, retry_on=words)

    assert len(seen) == 4
    assert state["attempts"] == {"number": 4, "most": 4, "previous_cause": "hang"}
    assert "it has no retries left" in log


@pytest.mark.parametrize("record", ["none", "fifo", "link"])
def test_a_record_that_is_none_counts_as_a_loss_of_the_node(retried, record):
    """Ranks can write where the record is, so what is no file of ours is not read."""
    seen, _, _ = retried(record, "user", retries=3, retry_on=["platform"])

    assert [attempt["PREVIOUS_CAUSE"] for attempt in seen] == [None, "platform"]


def test_a_cancel_between_two_attempts_ends_the_job(start, tmp_path):
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "causes").write_text("hang hang")
    changes = {"retries": 3, "retry_on": ["hang"], "backoff_s": 300.0}
    controller, path = start(sys.executable, "-c", FAIL, folder=folder, **changes)
    end = time.monotonic() + 180
    log = folder / "log-0"
    while not log.exists() or "attempt 2 of 4 begins in 300 s" not in log.read_text():
        assert time.monotonic() < end
        time.sleep(0.01)
    assert json.loads(path.read_bytes())["attempts"]["number"] == 1

    os.kill(controller.pid, signal.SIGTERM)

    assert controller.wait(180) == 0
    state = json.loads(path.read_bytes())
    assert (state["is_cancelled"], state["exit_code"]) == (True, 9)
    assert len((folder / "attempts").read_text().splitlines()) == 1


def node_with_limit(folder: Path, limit_s: str) -> dict[str, object]:
    """Return the only node of a job with a time limit."""
    env = {"CLOUDJOB_NODE_DIR": str(folder), "NODE": "0", "CLOUDJOB_TIMEOUT_S": limit_s}
    places = {name: str(folder / f"{name}-0") for name in ("home", "tmp", "log")}
    return {"host": "worker-0", "env": env, **places}


def test_the_time_limit_is_that_of_all_attempts(retried, tmp_path):
    nodes = [node_with_limit(tmp_path / "retried", "300.0")]
    changes = {"retries": 5, "retry_on": ["hang"], "nodes": nodes}
    seen, _, _ = retried("hang", "hang", "timeout", **changes)

    limits = [float(attempt["TIMEOUT_S"]) for attempt in seen]
    assert limits[0] == 300
    assert 300 > limits[1] > limits[2] > 0


def test_a_pause_longer_than_the_time_limit_is_not_waited_for(retried, tmp_path):
    nodes = [node_with_limit(tmp_path / "retried", "100.0")]
    changes = {"retries": 5, "retry_on": ["hang"], "backoff_s": 200.0, "nodes": nodes}
    seen, _, log = retried("hang", **changes)

    assert len(seen) == 1
    assert "its time limit is over" in log

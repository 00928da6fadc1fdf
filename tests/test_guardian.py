"""Nothing that a test has started is left when pytest ends, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.polling import poll

ROOT = Path(__file__).resolve().parent.parent
# The daemon has a session and an environment of its own, and its parent has ended.
LEAVE_A_DAEMON = "setsid sleep 1000 & echo $! >daemon.new; mv daemon.new daemon"
CONFTEST = "from tests.support import guardian\nguardian.guard()\n"
TEST = f"""\
import os, pathlib, subprocess, time

def test_it():
    pathlib.Path("test").write_text(f"{{os.getpid()}} {{os.getppid()}}")
    subprocess.run(["sh", "-c", {LEAVE_A_DAEMON!r}], env={{"PATH": os.environ["PATH"]}}, check=True)
    time.sleep(0 if os.path.exists("passes") else 1000)
"""


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("killed", "number", "code"),
    [
        ("command", signal.SIGTERM, 128 + signal.SIGTERM),
        ("command", signal.SIGINT, 2),
        ("command", signal.SIGKILL, -signal.SIGKILL),
        ("inner guardian", signal.SIGKILL, 128 + signal.SIGKILL),
        ("pytest", signal.SIGKILL, 128 + signal.SIGKILL),
        ("worker", signal.SIGKILL, 1),
        ("", 0, 0),
    ],
)
def test_nothing_is_left_of_a_test(killed: str, number: int, code: int, tmp_path: Path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TEST)
    if not killed:
        (tmp_path / "passes").touch()
    environ = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    words = ("-n", "1", "--max-worker-restart=0") if killed == "worker" else ("-p", "no:xdist")
    command = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-c", os.devnull, *words, "test_it.py"],
        cwd=tmp_path,
        env={**environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
    )
    poll((tmp_path / "daemon").exists, "daemon of the test")
    test, parent = map(int, (tmp_path / "test").read_text().split())
    pids = {"command": command.pid, "inner guardian": parent, "pytest": test, "worker": test}
    if killed:
        os.kill(pids[killed], number)

    assert command.wait(180) == code
    daemon = int((tmp_path / "daemon").read_text())
    poll(lambda: not any(map(is_alive, (daemon, test, parent))), "end of the daemon and of pytest")


def test_these_tests_have_a_guardian(tmp_path: Path):
    subprocess.run(["sh", "-c", LEAVE_A_DAEMON], cwd=tmp_path, check=True)
    daemon = int((tmp_path / "daemon").read_text())
    parent = int(Path(f"/proc/{daemon}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(daemon, signal.SIGKILL)

    assert b"pytest" in Path(f"/proc/{parent}/cmdline").read_bytes()

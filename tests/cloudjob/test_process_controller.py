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

    def controller() -> tuple[subprocess.Popen[bytes], Path]:
        folder = tmp_path / str(len(started))
        run_dir = folder / "run"
        run_dir.mkdir(parents=True)
        request = {
            "folder": str(folder),
            "run_dir": str(run_dir),
            "hosts": "",
            "argv": ["/bin/sleep", "1000"],
            "retries": 0,
            "grace_s": 1.0,
            "is_led": True,
            "keeps_homes": False,
            "is_elastic": False,
            "nodes": [
                {
                    "host": f"worker-{node}",
                    "env": {"CLOUDJOB_NODE_DIR": str(folder)},
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

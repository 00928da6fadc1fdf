"""Daemons of a killed mpirun are ended: those of this node, and of no other job."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from jobentry.control.mpirun_cleanup import end_daemons

# The same path is on every emulated node, whose folders are its own.
NODE_DIR = "/.cloudjob-of-a-test/1/node"
ELSEWHERE = ("unshare", "--user", "--map-root-user", "--mount")


@pytest.fixture
def daemon(tmp_path: Path) -> str:
    """A program with the name of a daemon, which waits."""
    path = tmp_path / "prted"
    shutil.copy(shutil.which("sleep") or "", path)
    return str(path)


def test_only_the_daemons_of_this_node_are_ended(daemon: str, until: Callable[..., None]) -> None:
    def start(*prefix: str, node_dir: str = NODE_DIR) -> subprocess.Popen[bytes]:
        environ = {**os.environ, "CLOUDJOB_NODE_DIR": node_dir}
        process = subprocess.Popen([*prefix, daemon, "600"], env=environ)
        exe = Path(f"/proc/{process.pid}/exe")
        until(lambda: str(exe.readlink()) == daemon)
        return process

    own, other_node = start(), start(node_dir=f"{NODE_DIR}-2")
    other_job = start(*ELSEWHERE)
    try:
        assert end_daemons(NODE_DIR) == [own.pid]
        assert own.wait(30) == -9
        assert (other_node.poll(), other_job.poll()) == (None, None)
    finally:
        for process in (own, other_node, other_job):
            process.kill()
            process.wait()

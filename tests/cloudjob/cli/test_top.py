"""What `top` shows of a job that runs on this machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import cloudjob
from cloudjob.cli import main

SCRIPT = """
import os, time
rank = os.environ["OMPI_COMM_WORLD_RANK"]
print("begins", flush=True)
deadline = time.monotonic() + 6
while time.monotonic() < deadline:
    if rank == "1":
        print("works", flush=True)
    time.sleep(0.2)
"""


def test_top_shows_each_rank_until_the_job_ends(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setenv("CLOUDJOB_HOME", str(tmp_path / "home"))
    (tmp_path / "train.py").write_text(SCRIPT)
    job = cloudjob.submit("train.py", source=tmp_path, procs_per_node=2)
    command = f"{sys.executable} -m cloudjob top {job.id}"
    # On a terminal it follows the job.
    followed = subprocess.run(
        ["script", "-qec", command, str(tmp_path / "typescript")],
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        timeout=120,
        check=True,
    ).stdout.decode()

    assert job.is_over or job.status().state == "SUCCEEDED"
    assert job.id in followed
    assert "RUNNING" in followed
    assert "SUCCEEDED" in followed

    assert main(["top", job.id]) == 0
    shown = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in shown if line.split()[2:3] == ["ended"]]
    assert [row[:2] for row in rows] == [["0", "0"], ["1", "0"]]
    silent = {row[0]: int(row[3]) for row in rows}
    assert silent["0"] > silent["1"]

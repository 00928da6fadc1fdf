"""Tests of what `top` shows about a job on this machine."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console

import cloudjob
from cloudjob.cli import main
from cloudjob.cli.commands import top
from jobentry.contract import journal
from jobentry.contract.journal import RankSample, Sample

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


def test_top_marks_a_node_short_of_memory_or_space_and_a_rank_that_has_failed():
    rank = RankSample(0, cpu_percent=3, rss_mib=100, quiet_s=75, state="F", threads=1, children=0)
    low_resources = Sample(
        at=1.0, memory=(990.0, 1000.0), oom_kills=2, space=(2000.0, 2000.0),
        pressure=(0.0, 60.0, 0.0, 0.0, 0.0), network=(1.0, 2.0), ranks=(rank,),
    )  # fmt: skip
    journals = cloudjob.Journals()
    journals.add(0, [journal.dump(low_resources)])
    journals.add(1, [journal.dump(Sample(at=1.0, memory=(10.0, 1000.0), space=(1.0, 2000.0)))])

    def lines(columns: int) -> list[str]:
        console = Console(width=columns, force_terminal=True, color_system="standard")
        with console.capture() as capture:
            console.print(top._nodes(journals), *top._ranks(journals))
        return re.sub("\x1b\\[1;31m *", "!", capture.get()).replace("\x1b[0m", "").splitlines()

    _, _, first, second, _, ranks = [" ".join(line.split()) for line in ["", *lines(100)]]
    assert first == "0 !1.0 GB of 1.0 GB, 2 killed !100% !60% 3.1 kB/s"
    assert second == "1 10.5 MB of 1.0 GB 0%"
    assert ranks == "0 0 !failed 1 min 15 s 3% 104.9 MB 1 0"
    assert all(len(re.sub(r"\x1b\[[0-9;]*m|!", "", line)) <= 80 for line in lines(80))


def test_top_shows_for_how_much_of_the_last_minute_a_rank_waited_and_where_it_was():
    rank = RankSample(0, 3, 100, 1, "S", 1, 0, waits_percent=40, place="barrier at \x1b[2J.py:3")
    samples = [
        Sample(at=10.0, ranks=(rank._replace(waits_percent=0),)),
        Sample(at=100.0, ranks=(rank,)),
        Sample(at=110.0, ranks=(rank._replace(waits_percent=60),)),
    ]
    journals = cloudjob.Journals()
    journals.add(0, map(journal.dump, samples))
    console = Console(width=120)

    with console.capture() as capture:
        console.print(*top._ranks(journals, "waits"))

    cells = " ".join(capture.get().split())
    assert cells.endswith(r"3% 50% 104.9 MB 1 0 barrier at \x1b[2J.py:3")


def test_top_shows_each_rank_until_the_job_ends(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setenv("CLOUDJOB_HOME", str(tmp_path / "home"))
    (tmp_path / "train.py").write_text(SCRIPT)
    job = cloudjob.submit("train.py", source=tmp_path, procs_per_node=2)
    command = f"{sys.executable} -m cloudjob top {job.id}"
    # On a terminal, `top` follows the job.
    output = subprocess.run(
        ["script", "-qec", command, str(tmp_path / "typescript")],
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        timeout=120,
        check=True,
    ).stdout.decode()

    assert job.is_over or job.status().state == "SUCCEEDED"
    assert job.id in output
    assert "RUNNING" in output
    assert "SUCCEEDED" in output

    assert main(["top", job.id]) == 0
    lines = capsys.readouterr().out.splitlines()
    # In a pipe, no cell is folded.
    assert [line for line in lines if re.search(r"\d%.* of \d+\.\d [GM]B ", line)]
    rows = [line.split() for line in lines if line.split()[2:3] == ["ended"]]
    assert [row[:2] for row in rows] == [["0", "0"], ["1", "0"]]
    silent = {row[0]: int(row[3]) for row in rows}
    assert silent["0"] > silent["1"]

"""The report on a job, without a browser."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import cloudjob
from cloudjob.console.report import render

HOSTILE = "</pre></script><script>window.hacked=1</script>{{ 7 * 7 }}"


def test_what_a_job_prints_cannot_become_part_of_the_page(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("CLOUDJOB_HOME", str(tmp_path / "home"))
    (tmp_path / "train.py").write_text(f"print({HOSTILE!r})\nraise SystemExit({HOSTILE!r})\n")
    job = cloudjob.submit("train.py", source=tmp_path, env={"NAME": HOSTILE})
    job.wait()
    page = render(job)

    assert "<script>window" not in page
    assert "&lt;script&gt;window.hacked=1&lt;/script&gt;{{ 7 * 7 }}" in page
    assert page.count("</script>") == 2
    assert not re.search(r"(src|href)=", page.partition("<script")[0])


def test_a_report_does_not_import_nicegui():
    """It would take a second."""
    code = "import sys, cloudjob.console.report; sys.exit('nicegui' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)

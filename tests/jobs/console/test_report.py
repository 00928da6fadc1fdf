"""Tests of the report on a job, without a browser."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import cloudjob
from cloudjob.console import screenshot
from cloudjob.console.report import draw, render
from cloudjob.errors import UsageError
from tests.support.homes import make_used_home
from tests.support.polling import poll

# A browser whose image is the page.
BROWSER = """#!/bin/sh
for word; do case $word in
  --screenshot=*) image=${word#*=} ;;
  file://*) page=${word#file://} ;;
esac; done
cp "$page" "$image"
"""
HOSTILE = "</pre></script><script>window.hacked=1</script>{{ 7 * 7 }}"


def test_output_of_a_job_is_text_in_the_report_and_a_progress_bar_is_one_line(
    tmp_path: Path, monkeypatch
):
    make_used_home(tmp_path / "home")
    monkeypatch.setenv("CLOUDJOB_HOME", str(tmp_path / "home"))
    (tmp_path / "train.py").write_text(f"print({HOSTILE!r})\nraise SystemExit({HOSTILE!r})\n")
    job = cloudjob.submit("train.py", source=tmp_path, env={"NAME": HOSTILE})
    job.wait()
    with (tmp_path / "home" / "process" / job.id / "node-0.log").open("ab") as log:
        log.write(b"[0]+ \r1 of 3\n[0]+ \r2 of 3\n[0] \r3 of 3\n[0]+ \r4 of\n[0]+  5\n")
    page = render(job)

    assert re.findall(r">rank 0</span>  (.* of .*)\n", page) == ["3 of 3", "4 of 5"]
    assert "<script>window" not in page
    assert "&lt;script&gt;window.hacked=1&lt;/script&gt;{{ 7 * 7 }}" in page
    assert page.count("</script>") == 2
    assert not re.search(r"(src|href)=", page.partition("<script")[0])


def test_the_report_has_the_stacks_of_a_crash_and_the_hint_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    make_used_home(tmp_path / "home")
    monkeypatch.setenv("CLOUDJOB_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DATA_DIR", "/the/value")
    source = tmp_path / "source"
    source.mkdir()
    (source / "crash.py").write_text("import os\nos.abort()\n")
    (source / "train.py").write_text("import os\nos.environ['DATA_DIR']\n")
    pages = []
    for script in ("crash.py", "train.py"):
        job = cloudjob.submit(script, source=source)
        job.wait()
        pages.append(render(job))
    (tmp_path / "chromium").write_text(BROWSER)
    (tmp_path / "chromium").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    assert b"KeyError: &#39;DATA_DIR&#39; (node 0 rank 0)" in draw(job)
    assert "  &lt;module&gt; at crash.py:2: os.abort()" in pages[0]
    assert "Hint: DATA_DIR is set in this shell" in pages[1]
    assert "/the/value" not in pages[1]


def test_a_report_does_not_import_nicegui():
    """Importing it would take a second."""
    code = "import sys, cloudjob.console.report; sys.exit('nicegui' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_a_browser_there_is_no_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="neither Chromium, Chrome nor Edge"):
        screenshot.take("<p>", 100, 100)

    (tmp_path / "chromium").write_text("#!/bin/sh\necho no sandbox >&2\nexit 1\n")
    (tmp_path / "chromium").chmod(0o755)
    with pytest.raises(UsageError, match="chromium: no sandbox"):
        screenshot.take("<p>", 100, 100)


def test_a_browser_that_hangs_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(screenshot, "_LIMIT_S", 0.5)
    pid_file = tmp_path / "left"
    (tmp_path / "chromium").write_text(f"#!/bin/sh\nsleep 1000 &\necho $! > {pid_file}\nwait\n")
    (tmp_path / "chromium").chmod(0o755)
    with pytest.raises(UsageError, match=r"drew nothing in 0\.5 s"):
        screenshot.take("<p>", 100, 100)

    child = int(pid_file.read_text())
    poll(lambda: _has_ended(child), "the end of the browser's processes")


def _has_ended(process: int) -> bool:
    """Whether a process has ended, or is a zombie."""
    with contextlib.suppress(OSError):
        return ") Z " in Path(f"/proc/{process}/stat").read_text()
    return True

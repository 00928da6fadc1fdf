"""The report on a job: one file that a real browser shows without loading any other."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from selenium import webdriver

from tests.e2e_console.test_console import TRAIN
from tests.support.browser import run
from tests.support.polling import poll

pytestmark = pytest.mark.browser
_LIMIT_BYTES = 6_000_000


def test_a_report_is_one_file_that_shows_why_the_job_failed(
    home: Path, tmp_path: Path, driver: webdriver.Chrome, monkeypatch: pytest.MonkeyPatch
):
    source = tmp_path / "source"
    source.mkdir()
    (source / "train.py").write_text(TRAIN)
    metric = r"step=step (\d+)"
    arguments = (
        "--nodes",
        "2",
        "--name",
        "reported",
        "--metric",
        metric,
        "train.py",
        "3",
        "--fail",
    )
    assert run(home, "submit", *arguments, cwd=source).returncode == 1
    done = run(home, "report", "reported", "--to", tmp_path / "report.html")
    assert done.returncode == 0, done.stderr
    path = Path(done.stdout.strip())
    assert path.stat().st_size < _LIMIT_BYTES

    driver.get(path.as_uri())
    poll(lambda: driver.execute_script("return document.body.dataset.drawn"), "charts")
    text = str(driver.execute_script("return document.body.innerText"))
    drawn = driver.execute_script("return document.querySelectorAll('.chart svg').length")
    problems = [each["message"] for each in driver.get_log("browser")]
    prepared = driver.execute_script("return console_ui.prepared([1, Infinity, NaN])")
    entries = "performance.getEntriesByType('resource')"
    loaded = driver.execute_script(f"return {entries}.map(entry => entry.name)")

    assert "RuntimeError: the loss is NaN <b>&amp;</b>" in text
    assert "step 2 of rank 0" in text
    for title in ("Timeline", "Ranks: silent for (s)", "step", "Memory of each rank (MB)"):
        assert title in text
    assert drawn == int(driver.execute_script("return document.body.dataset.drawn")) > 6
    assert problems == []
    assert prepared == [1, None, None]
    assert [url for url in loaded if not url.startswith(("blob:", "data:"))] == []

    # Too long for the path of a socket.
    temporary = tmp_path / ("t" * 120)
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    done = run(home, "report", "reported", "--png", "--to", tmp_path / "report.png")
    assert done.returncode == 0, done.stderr
    data = (tmp_path / "report.png").read_bytes()
    width, height = struct.unpack(">8x4x4xII", data[:24])
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert (width, height > 1000) == (1200, True)
    # An empty image of this size has 10 kB.
    assert len(data) > 40_000

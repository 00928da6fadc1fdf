"""Measure the console with 10,000 jobs and a log of 500,000 lines: speed and memory.

``python -m benchmarks.console`` uses a headless Chromium and prints one JSON object, including the
load of the machine. It exits with 1 if a limit does not hold.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

from cloudjob.home import records_path
from cloudjob.home.records import JobRecord, Records
from cloudjob.model.status import JobState, JobStatus, to_json

JOBS, LINES = 10_000, 500_000
LIMITS = {"jobs_s": 0.8, "job_s": 0.8, "scroll_s": 0.2, "search_s": 0.2, "console_mib": 300.0}
_CLOUDJOB = Path(sys.executable).parent / "cloudjob"
_LINK = re.compile(r"http://127\.0\.0\.1:\d+/login\?token=\S+")
_LIMIT_S = 60.0
_PRINT = "for n in range({}): print(f'step {{n}} of the training: loss {{1 / (1 + n):.6f}}')\n"
# Record when an element first has a text, in seconds since the navigation began.
_WATCH = """
const watch = () => {
  const found = document.querySelector(%s);
  if (found && found.innerText) window.shownAt = performance.now() / 1000;
  else requestAnimationFrame(watch);
};
watch();
"""


def main() -> int:
    """Measure, print, and return the exit code."""
    with tempfile.TemporaryDirectory(prefix="cloudjob-console-") as name:
        home = Path(name, "home")
        home.mkdir(mode=0o700)
        job = _submit(home, Path(name))
        _record(home)
        figures = _measure(home, job)
    figures["load"] = os.getloadavg()[0]
    print(json.dumps({key: round(value, 3) for key, value in figures.items()}))
    return int(any(figures[key] > limit for key, limit in LIMITS.items()))


def _submit(home: Path, folder: Path) -> str:
    (folder / "source").mkdir()
    (folder / "source" / "train.py").write_text(_PRINT.format(LINES // 2))
    args = ("submit", "--json", "--nodes", "2", "--name", "log", "train.py")
    done = subprocess.run(
        [_CLOUDJOB, *args],
        cwd=folder / "source",
        env={**os.environ, "CLOUDJOB_HOME": str(home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=True,
    )
    return str(json.loads(done.stdout)["job"])


def _record(home: Path) -> None:
    with Records(records_path(home)) as db:
        for number in range(JOBS):
            status = JobStatus(
                job=f"job-{number:05d}",
                name="job",
                backend="docker",
                state=JobState.SUCCEEDED,
                native_state="ended",
                nodes=2,
                procs_per_node=8,
                created_at=f"2026-01-01T{number // 3600:02d}:{number // 60 % 60:02d}:00.000Z",
                exit_code=0,
            )
            values = dict.fromkeys(JobRecord._fields, "")
            numbers = {"code_size_bytes": 0, "code_files": 0, "nodes": 2, "procs_per_node": 8}
            texts = {"job": status.job, "name": "job", "backend": "docker", "state": "SUCCEEDED"}
            final = {"final_json": json.dumps(to_json(status)), "created_at": status.created_at}
            record: dict[str, Any] = {**values, **numbers, **texts, **final, "spec_json": "{}"}
            db.add(JobRecord(**{**record, "handle": f"docker://x/{status.job}"}))


def _measure(home: Path, job: str) -> dict[str, float]:
    log = home / "console.log"
    with log.open("wb") as out:
        console = subprocess.Popen(
            [_CLOUDJOB, "console", "--no-open"],
            env={**os.environ, "CLOUDJOB_HOME": str(home)},
            stderr=out,
        )
    driver = webdriver.Chrome(options=_options(), service=Service(shutil.which("chromedriver")))
    try:
        link = _await(lambda: _LINK.search(log.read_text())).group()
        base = link.partition("/login")[0]
        driver.get(link)
        # The first visit fills the browser's cache.
        _shown(driver, base, ".jobs-grid .ag-center-cols-container .ag-row")
        figures = {
            "jobs_s": _shown(driver, base, ".jobs-grid .ag-center-cols-container .ag-row"),
            "job_s": _shown(driver, f"{base}/job/{job}", ".facts"),
        }
        driver.get(f"{base}/job/{job}/log")
        state = "return document.getElementById('log-state')?.innerText || ''"
        _await(lambda: re.fullmatch(r"[0-9,]{7} lines", driver.execute_script(state)))
        url = f"{base}/api/jobs/{job}/log"
        figures["scroll_s"] = _fetch(driver, f"{url}?start={LINES // 2}&end={LINES // 2 + 200}")
        figures["search_s"] = max(
            _fetch(driver, f"{url}?start=0&end=200&text={text}")
            for text in ("loss", "step%20249999")
        )
        status = Path(f"/proc/{console.pid}/status").read_text()
        figures["console_mib"] = int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) / 1024
    finally:
        driver.quit()
        console.send_signal(signal.SIGTERM)
        console.wait(60)
    return figures


def _options() -> Options:
    options = Options()
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1400,1000"):
        options.add_argument(argument)
    options.binary_location = shutil.which("chromium") or ""
    return options


def _shown(driver: webdriver.Chrome, url: str, selector: str) -> float:
    """Return how long a page takes until it shows an element."""
    source = {"source": _WATCH % json.dumps(selector)}
    script = driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", source)
    driver.get(url)
    moment = _await(lambda: driver.execute_script("return window.shownAt"))
    driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", script)
    return float(moment)


def _fetch(driver: webdriver.Chrome, url: str) -> float:
    """Return how long the console takes to answer the page, the first time."""
    script = """
    const [url, done] = arguments, begun = performance.now();
    fetch(url).then((answer) => answer.json()).then(() => done((performance.now() - begun) / 1000));
    """
    return float(driver.execute_async_script(script, url))


def _await(look: Any) -> Any:
    end_s = time.monotonic() + _LIMIT_S
    while time.monotonic() < end_s:
        if answer := look():
            return answer
        time.sleep(0.1)
    raise TimeoutError("the console does not show what is measured")


if __name__ == "__main__":
    sys.exit(main())

"""The console in a real browser, with real jobs on this host.

Screenshots of the views are saved in $CLOUDJOB_TEST_SCREENSHOTS, if it is set.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from selenium import webdriver

from cloudjob.console.server import opening_page
from cloudjob.emulator import daemon
from cloudjob.home import records_path
from cloudjob.home.records import JobRecord, Records
from cloudjob.model.status import CutLog, Failure, JobState, JobStatus, to_json
from cloudjob.model.text import size_text
from tests.support.browser import Laptop, Page, run
from tests.support.emulator import running
from tests.support.polling import poll

pytestmark = pytest.mark.browser

ROWS = "document.querySelectorAll('.jobs-grid .ag-center-cols-container .ag-row').length"
TRAIN = """
import os, sys, time
rank = os.environ["OMPI_COMM_WORLD_RANK"]
for step in range(int(sys.argv[1])):
    print(f"step {step} of rank {rank}", flush=True)
    time.sleep(0.05)
if "--fail" in sys.argv:
    # Long enough for a sample of what the ranks use.
    time.sleep(4)
if "--fail" in sys.argv and rank == "1":
    raise RuntimeError("the loss is NaN <b>&amp;</b>")
"""
OpenPage = Callable[[Path], Page]
VIEWS = ("overview", "metrics", "ranks", "resources", "log", "outputs", "submitted")
# Calls the driver with a line for each violation.
AXE = """
const done = arguments[arguments.length - 1];
const texts = ({ id, nodes }) => nodes.map(({ html }) => `${id}: ${html.slice(0, 200)}`);
axe.run(document, { resultTypes: ["violations"] })
  .then(({ violations }) => done(violations.flatMap(texts)));
"""
# The contrast of the texts of the first chart with the panel behind them.
CONTRAST = """
const { chart } = getElement(+document.querySelector("[_echarts_instance_]").id.slice(1));
const linear = (part) => (part > 0.04045 ? ((part + 0.055) / 1.055) ** 2.4 : part / 12.92);
const light = (colour) => {
  const parts = colour.match(/[0-9a-f]{2}/g).map((part) => parseInt(part, 16) / 255);
  const [r, g, b] = parts.map(linear);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
};
const long = (colour) => (colour.length === 4 ? colour.replace(/[0-9a-f]/g, "$&$&") : colour);
const colours = [chart.getOption().xAxis[0].axisLabel.color, console_ui.colour("panel")];
const pair = colours.map(long).map(light);
return Math.max(...pair) / Math.min(...pair);
"""


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    (folder / "train.py").write_text(TRAIN)
    return folder


@pytest.fixture(scope="session")
def failed(home: Path, source: Path) -> str:
    """Run a job of two nodes whose rank 1 fails; return its id."""
    done = run(
        home,
        "submit",
        "--json",
        "--nodes",
        "2",
        "--name",
        "failing",
        "-e",
        "LR=0.1",
        "--secret",
        f"TOKEN=@{_secret(source)}",
        "train.py",
        "3",
        "--fail",
        cwd=source,
    )
    assert done.returncode == 1, done.stderr
    return str(json.loads(done.stdout)["job"])


def _secret(source: Path) -> Path:
    path = source.parent / "token"
    path.write_text("s3cr3t-value")
    return path


def save_screenshot(page: Page, name: str) -> None:
    folder = os.environ.get("CLOUDJOB_TEST_SCREENSHOTS")
    if folder:
        page.driver.save_screenshot(str(Path(folder) / f"{name}.png"))


def test_a_failed_job_shows_which_rank_failed_and_why(home: Path, failed: str, open_page: OpenPage):
    page = open_page(home)
    page.shows(failed, "FAILED", "the loss is NaN")
    page.click(".jobs-grid .ag-cell[col-id=job]", failed)
    page.shows("node 0", "rank 1", "exit code 1", "RuntimeError: the loss is NaN <b>&amp;</b>")
    page.shows("step 2 of rank 1", "Timeline", "node 0", "bring-up")
    save_screenshot(page, "job")

    page.click("a", "Show it in the log")
    marked = "document.querySelector('.failure-line [col-id=text]')?.innerText"
    page.await_true(f"{marked} === 'RuntimeError: the loss is NaN <b>&amp;</b>'")
    page.click("button[aria-label='First line']")
    page.click("button[aria-label='Jump to the failure']")
    page.await_true(f"{marked} === 'RuntimeError: the loss is NaN <b>&amp;</b>'")

    page.open(f"/job/{failed}")
    page.click("a", "Log of rank 1")
    page.shows("step 0 of rank 1", "RuntimeError")
    assert "of rank 0" not in page.text
    save_screenshot(page, "log")
    page.open(f"/job/{failed}/ranks")
    page.shows("silent for (s)", "memory (MB)", "Rank 1 made the job fail")
    page.shows("Last line", "failed first", "RuntimeError: the loss is NaN <b>&amp;</b>")
    page.await_true("document.querySelectorAll('canvas').length >= 1")
    save_screenshot(page, "ranks")
    page.click("button", "over time")
    titles = "[...document.querySelectorAll('.panel-title')].map(each => each.innerText)"
    page.await_true(f"{titles}.includes('over time')")
    page.await_true("document.querySelectorAll('canvas').length >= 1")
    page.open(f"/job/{failed}/resources")
    page.shows("CPU of each rank", "Memory of each rank")
    page.await_true("document.querySelectorAll('canvas').length >= 4")
    save_screenshot(page, "resources")
    page.open(f"/job/{failed}/submitted")
    page.shows("LR", "0.1", "Package", "1 file", "train.py", "0644")
    assert page.problems() == []


def test_no_view_shows_a_secret_or_loads_from_elsewhere(
    home: Path, failed: str, open_page: OpenPage
):
    page = open_page(home)
    for path in (
        "/",
        f"/job/{failed}",
        *(f"/job/{failed}/{v}" for v in ("log", "ranks", "resources", "submitted")),
    ):
        page.open(path)
        page.shows(failed)
        poll(lambda: page.script("return document.readyState") == "complete", "loaded page")
        assert "s3cr3t-value" not in page.driver.page_source
        loaded = page.script("return performance.getEntriesByType('resource').map(e => e.name)")
        assert isinstance(loaded, list)
        hosts = {urlsplit(url).netloc for url in loaded if not url.startswith("data:")}
        assert hosts == {urlsplit(page.base).netloc}
        assert "token" not in str(page.driver.current_url)


SLOW_LINES = """
const quick = window.fetch;
window.fetch = async (url, ...rest) => {
  if (/[?&]end=[1-9]/.test(url)) await new Promise(resolve => setTimeout(resolve, 3000));
  return quick(url, ...rest);
};
"""


def test_a_running_job_is_followed_and_cancelled(home: Path, source: Path, open_page: OpenPage):
    page = open_page(home)
    page.await_true(f"{ROWS} >= 0")
    done = run(home, "submit", "--detach", "--name", "endless", "train.py", "100000", cwd=source)
    job = done.stdout.strip().rpartition("/")[2]
    page.shows(job, "RUNNING")
    page.open(f"/job/{job}/log")
    page.shows(" of rank 0", "live")
    # The page arrives before its backend has answered.
    first = page.script("return fetch(location.href).then(answer => answer.text())")
    assert "UNKNOWN" not in str(first)
    # The log has grown again before the answer with its lines arrives.
    add, remove = (f"Page.{verb}ScriptToEvaluateOnNewDocument" for verb in ("add", "remove"))
    slow = page.driver.execute_cdp_cmd(add, {"source": SLOW_LINES})
    page.open(f"/job/{job}/log")
    page.shows(" of rank 0", "live")
    page.driver.execute_cdp_cmd(remove, slow)
    page.open(f"/job/{job}/log")
    page.enter(".search input", "step 5 of")
    page.shows("1 of ", "step 5 of rank 0")
    page.open(f"/job/{job}/stacks")
    page.shows("<module>()", "train.py:6", "time.sleep(0.05)", "UTC")
    before = page.text
    page.click("button", "Read again")
    poll(lambda: page.text != before and "<module>()" in page.text, "stacks that were read again")
    save_screenshot(page, "stacks")

    page.click("button", "Cancel")
    page.shows(f"Cancel {job}?")
    # The dialog stays open while the page updates the duration of the job.
    duration = page.text.partition(" s · submitted")[0]
    poll(lambda: page.text.partition(" s · submitted")[0] != duration, "a fresh duration")
    page.click(".q-dialog button", "Cancel")
    page.shows("CANCELLED")


CHARTS = (
    "[...document.querySelectorAll('.nicegui-echart')].map(e => getElement(+e.id.slice(1)).chart)"
)


def test_charts_zoom_together_and_the_zoom_stays_while_the_job_runs(
    home: Path, source: Path, open_page: OpenPage
):
    done = run(home, "submit", "--detach", "--name", "zoomed", "train.py", "100000", cwd=source)
    job = done.stdout.strip().rpartition("/")[2]
    page = open_page(home)
    page.open(f"/job/{job}/resources")
    page.await_true(f"{CHARTS}.length >= 4 && {CHARTS}.every(c => c?.group === 'together')")
    longest = "Math.max(...c.getOption().series.map(s => s.data.length))"
    page.await_true(f"{CHARTS}.every(c => {longest} > 3)")
    zoom = "[c.getOption().dataZoom[0].startValue, c.getOption().dataZoom[0].endValue]"
    page.script(f"{CHARTS}[0].dispatchAction({{type: 'dataZoom', start: 20, end: 60}})")
    zooms = f"new Set({CHARTS}.map(c => String({zoom})))"
    page.await_true(f"{zooms}.size === 1")
    window = page.script(f"return [...{zooms}][0]")
    points = page.script(f"return {CHARTS}.map(c => {longest})[0]")

    page.await_true(f"{CHARTS}.map(c => {longest})[0] > {points}")
    assert page.script(f"return [...{zooms}]") == [window]
    page.click("button", "Show all")
    page.await_true(f"{CHARTS}.every(c => c.getOption().dataZoom[0].end === 100)")
    assert run(home, "cancel", job).returncode == 0
    assert page.problems() == []


WRITE = """
import os
from pathlib import Path
folder = Path(os.environ["MODEL"], "checkpoints")
folder.mkdir()
(folder / "big").write_bytes(b"01234567" * 700_000)
(folder / os.fsdecode(b'<b>&"\\xff.html')).write_text("<script>window.hacked = 1</script>")
dot = "47494638396101000100800000000000ffffff2c00000000010001000002024401003b"
(folder.parent / ("w" * 200 + ".png")).write_bytes(bytes.fromhex(dot))
(folder.parent / "broken.png").write_bytes(b"\\x89PNG\\r\\n\\x1a\\n")
"""


@pytest.mark.surroundings
def test_outputs_are_browsed_and_downloaded_whatever_their_names(
    home: Path, tmp_path: Path, laptop: Laptop, open_page: OpenPage
):
    source = tmp_path / "source"
    source.mkdir()
    (source / "write.py").write_text(WRITE)
    options = ("--name", "written", "--output", "MODEL=", "write.py")
    done = run(home, "submit", "--json", *options, cwd=source, laptop=laptop)
    assert done.returncode == 0, done.stderr
    job = str(json.loads(done.stdout)["job"])
    page = open_page(home)
    zone = {"timezoneId": "Asia/Kathmandu"}
    page.driver.execute_cdp_cmd("Emulation.setTimezoneOverride", zone)
    page.open(f"/job/{job}/outputs")
    time_with_zone = r"/\b\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \+05:45\b/"
    page.await_true(f"{time_with_zone}.test(document.body.innerText)")
    page.click(".outputs-grid a", "MODEL/")
    page.click("[aria-label^='Preview www']")
    page.await_true("!!document.querySelector('.preview img')?.naturalWidth")
    page.await_true(
        "(e => e.scrollWidth <= e.clientWidth)(document.querySelector('.table-dialog'))"
    )
    page.click("[aria-label='Preview broken.png']")
    page.shows("The image is damaged.")
    page.click(".outputs-grid a", "checkpoints/")
    page.shows("Outputs", "MODEL", "2 entries", "5.6 MB", '<b>&"')
    save_screenshot(page, "outputs")

    fetched = page.driver.execute_async_script(
        """
        const done = arguments[arguments.length - 1];
        const links = [...document.querySelectorAll(".outputs-grid a")].map((link) => link.href);
        Promise.all(links.map(async (link) => {
          const answer = await fetch(link);
          return [answer.status, Object.fromEntries(answer.headers), await answer.text()];
        })).then(done);
        """
    )
    for status, headers, _ in fetched:
        assert status == 200
        assert headers["content-disposition"].startswith("attachment;")
        assert headers["content-type"] == "application/octet-stream"
    texts = {
        headers["content-disposition"].rpartition("''")[2]: text for *_, headers, text in fetched
    }
    assert texts == {
        "big": "01234567" * 700_000,
        "%3Cb%3E%26%22%FF.html": "<script>window.hacked = 1</script>",
    }
    page.open(f"/api/jobs/{job}/output?name=MODEL/checkpoints/../../../code.json")
    page.shows("the job has stored no such file")


COUNT = """
import json, os, sys, time
from pathlib import Path
rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
for step in range(123_450, 123_457 + rank):
    print(json.dumps({"step": step, "loss": 2500.75 / (step - 123_449) + rank}), flush=True)
weights, done = (Path(os.environ["MODEL"], name) for name in ("weights", "done"))
if rank == 0:
    weights.write_bytes(bytes(1_234_567))
    done.write_text("yes")
while not (done.exists() and done.stat().st_size):
    time.sleep(0.1)
if rank == 1:
    sys.exit(7)
time.sleep(600)
"""
# The texts of the cells of a row, by column.
CELLS = """
const cells = [...document.querySelectorAll(`${arguments[0]} .ag-row .ag-cell`)];
const rows = {};
for (const cell of cells) {
  const row = cell.closest(".ag-row").getAttribute("row-id");
  (rows[row] ??= {})[cell.getAttribute("col-id")] = cell.innerText.trim();
}
return rows;
"""


# The last losses of the jobs, from top to bottom.
SORTED = """
[...document.querySelectorAll(".jobs-grid .ag-row [col-id='metric loss']")]
  .map((cell) => [+cell.closest(".ag-row").getAttribute("row-index"), cell.innerText.trim()])
  .sort((first, second) => first[0] - second[0])
  .map(([, text]) => text)
"""


def shows_cells(page: Page, grid: str, rows: dict[str, dict[str, str]]) -> None:
    """Wait until a table has these rows, with these texts in these columns."""

    def current() -> dict[str, dict[str, str | None]]:
        cells = page.driver.execute_script(CELLS, grid)  # type: ignore[no-untyped-call]
        return {
            row: {name: cells.get(row, {}).get(name) for name in columns}
            for row, columns in rows.items()
        }

    try:
        poll(lambda: current() == rows, f"{rows} in {grid}")
    except AssertionError as error:
        raise AssertionError(f"{error}: {current()}") from error


def test_the_numbers_of_all_pages_are_those_of_the_log_and_the_record(
    home: Path, tmp_path: Path, open_page: OpenPage
):
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "count.py").write_text(COUNT)
    options = ("--json", "--procs-per-node", "2", "--output", "MODEL=", "count.py")
    job = str(json.loads(run(home, "submit", *options, cwd=tmp_path / "source").stdout)["job"])
    log = run(home, "logs", job)
    lines = [*log.stdout.splitlines(), *log.stderr.splitlines()]
    last_line = dict(line[1:].split("] ", 1) for line in log.stdout.splitlines())
    points = json.loads(run(home, "metrics", "--json", job).stdout)
    last = {str(point["rank"]): (point["step"], point["value"]) for point in points}
    duration = run(home, "status", job).stdout.partition("FAILED in ")[2].partition("\n")[0]
    assert [step for step, _ in (last["0"], last["1"])] == [123_456, 123_457]
    run(home, "outputs", "--to", tmp_path / "fetched", job)
    files = sorted((tmp_path / "fetched" / "MODEL").iterdir())
    page = open_page(home)

    page.shows(job)
    download = f"return fetch('/api/jobs/{job}/log.txt').then(answer => answer.text())"
    assert sorted(str(page.script(download)).splitlines()) == sorted(lines)
    numbers = {"nodes": "1", "ranks": "2", "started": duration, "exit_code": "7"}
    shows_cells(page, ".jobs-grid", {job: {"state": "FAILED", **numbers}})
    page.open(f"/job/{job}")
    page.shows(f"{duration} · submitted", "rank 1 · exit code 7", "Ranks\n2\n")
    page.open(f"/job/{job}/ranks")
    page.shows("Rank 1 made the job fail")
    ranks = {rank: {"step": str(last[rank][0]), "line": last_line[rank]} for rank in "01"}
    shows_cells(page, ".outputs-grid", ranks)
    page.open(f"/job/{job}/metrics")
    page.await_true(f"{CHARTS}.length === 1 && !!{CHARTS}[0]?.getOption()")
    ends = f"{CHARTS}[0].getOption().series.map(s => [s.name, s.data.at(-1)])"
    assert page.script(f"return {ends}") == [[f"rank {rank}", [*last[rank]]] for rank in "01"]
    tip = f"{CHARTS}[0].dispatchAction({{type: 'showTip', seriesIndex: 1, dataIndex: 7}})"
    page.await_true(f"({tip}, document.body.innerText.includes('123,457'))")
    page.shows(f"rank 1: {last['1'][1]:.2f}")
    page.open(f"/job/{job}/log")
    page.shows(f"{len(lines)} lines")
    page.open(f"/job/{job}/log?rank=1")
    page.shows(f"{log.stdout.count('[1] ')} of {len(lines)} lines")
    page.open(f"/job/{job}/outputs?path=MODEL/")
    sizes = [{"name": file.name, "bytes": size_text(file.stat().st_size)} for file in files]
    shows_cells(page, ".outputs-grid", {str(row): each for row, each in enumerate(sizes)})
    assert page.problems() == []


def test_jobs_are_compared_in_results_description_variables_code_and_curves(
    home: Path, failed: str, source: Path, tmp_path: Path, open_page: OpenPage
):
    other_source = tmp_path / "changed"
    other_source.mkdir()
    (other_source / "train.py").write_text(TRAIN + "# changed\n")
    options = ("--name", "whole", "-e", "LR=0.2", "--metric", r"step=step (\d+)", "train.py", "1")
    done = run(home, "submit", "--json", *options, cwd=other_source)
    other = str(json.loads(done.stdout)["job"])
    page = open_page(home)
    page.open(f"/compare?jobs={failed},{other}")

    page.shows(failed, other, "SUCCEEDED", "FAILED", "Arguments", "--fail", "Last metrics")
    page.shows("Variables", "LR", "0.1", "0.2", "Code", "train.py")
    page.await_true(f"{CHARTS}.length === 1")
    page.await_true("!!document.querySelector('.added')?.textContent.includes('+# changed')")
    assert "start_timeout_min" not in page.text
    page.click(".q-toggle")
    page.shows("start_timeout_min")
    save_screenshot(page, "compare")
    page.open(f"/compare?jobs={failed},{failed}")
    page.shows("The packages are equal.")


def test_a_sweep_shows_values_beside_metrics_and_the_list_has_columns_for_both(
    home: Path, tmp_path: Path, open_page: OpenPage
):
    folder = tmp_path / "swept"
    folder.mkdir()
    (folder / "train.py").write_text("import sys\nprint('loss', sys.argv[1])\n")
    options = ("--sweep", "lr=0.5,12,nan", "--launcher", "python", "train.py", "{lr}")
    done = run(home, "submit", "--json", *options, cwd=folder)
    assert done.returncode == 0, done.stderr
    page = open_page(home)
    page.open("/?columns=values,metrics,user&group=sweep&q=train-")
    heads = "[...document.querySelectorAll('.jobs-grid .ag-header-cell-text')]"
    page.await_true(f"{heads}.some(e => e.textContent === 'loss')")
    page.shows("lr=0.5", "lr=12", "@")
    page.await_true("!!document.querySelector('.states [data-count]')")
    # What is no number stays last.
    for ordered in ("0.5,12,nan", "12,0.5,nan"):
        page.click(".jobs-grid .ag-header-cell-label", "loss")
        page.await_true(f"({SORTED}).join() === '{ordered}'")

    page.click(".jobs-grid .nicegui-link", "train-")
    page.await_true("location.pathname.startsWith('/sweep/train-')")
    page.shows("3 SUCCEEDED", "lr", "loss ↓", "0.5 (best)")
    page.await_true(f"{CHARTS}.length === 1")
    save_screenshot(page, "sweep")


def test_jobs_of_the_emulator_are_listed_with_their_logs_whichever_client_created_them(
    open_page: OpenPage,
):
    with running("engine: process\n") as api:
        job = api.create("echo '<b>hello</b> from another client'")
        api.await_phase(job)
        name = api.show(job)["metadata"]["name"]
        page = open_page(api.home)
        page.click("a", "Emulator")
        page.shows("1 job in the emulator", name, "Completed")
        save_screenshot(page, "emulator")
        page.click(".outputs-grid a", name)
        page.shows("<b>hello</b> from another client", "Training end with return code: 0")
        page.open("/emulator/nothing-here")
        page.shows("nothing-here: there is none")
        page.open("/emulator")
        page.shows("1 job in the emulator")
        daemon.down(api.home)
        page.shows("the emulator: it is not running")


def test_ten_thousand_jobs_are_searched_and_filtered(tmp_path: Path, open_page: OpenPage):
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    _record(home, 10_000)
    page = open_page(home)
    page.await_true(f"{ROWS} > 10")
    page.shows("job-09999")
    # The newest come first, and all others follow.
    page.await_true("document.querySelector('.states [data-count]')?.dataset.count === '10,000'")
    page.enter(".search input", "job-00042")
    page.await_true(f"{ROWS} === 1")
    page.shows("job-00042")
    assert "q=job-00042" in str(page.driver.current_url)
    page.click(".jobs-grid .ag-cell[col-id=job]", "job-00042")
    page.shows("The log is incomplete", "the log of node 1 ends too early", "<File too large>")

    page.open("/?state=%27)%2Bhacked()//&q=</script><script>window.hacked=1</script>'\"")
    page.await_true("document.querySelector('.search input')?.value.includes('script')")
    assert page.script("return window.hacked") is None
    page.open("/?state=FAILED")
    page.await_true(f"{ROWS} > 10")
    page.shows("CUDA out of memory (node 1 rank 9)")
    assert "SUCCEEDED\n" not in page.text.partition("Reason")[2]
    save_screenshot(page, "jobs")


def _record(home: Path, count: int) -> None:
    with Records(records_path(home)) as db:
        for number in range(count):
            has_failed = number % 7 == 0
            state = JobState.FAILED if has_failed else JobState.SUCCEEDED
            failure = Failure(node=1, rank=9, exit_code=1, message="CUDA out of memory")
            hour, second = divmod(number, 3600)
            status = JobStatus(
                job=f"job-{number:05d}",
                name="job",
                backend="docker",
                state=state,
                native_state="ended",
                nodes=2,
                procs_per_node=8,
                created_at=f"2026-01-01T{hour:02d}:{second // 60:02d}:{second % 60:02d}.000Z",
                exit_code=int(has_failed),
                failure=failure if has_failed else None,
                cut_logs=(CutLog(1, 9, "<File too large>"),) if number == 42 else (),
            )
            final = json.dumps(to_json(status))
            db.add(
                JobRecord(
                    status.job,
                    "job",
                    "docker",
                    f"docker://x/{status.job}",
                    state.value,
                    2,
                    8,
                    status.created_at,
                    "",
                    "",
                    0,
                    0,
                    "",
                    final,
                    "{}",
                )
            )


# Keeps what the page shows as notifications.
NOTIFICATIONS = """
window.notes = [];
window.Notification = class extends Notification {
  constructor(title, options) { super(title, options); window.notes.push([title, options.body]); }
};
"""


def test_the_browser_notifies_the_user_on_request_when_a_job_has_ended(
    home: Path, tmp_path: Path, open_page: OpenPage
):
    source = tmp_path / "source"
    source.mkdir()
    (source / "train.py").write_text(
        "import pathlib, sys, time\n"
        f"while not pathlib.Path({str(tmp_path / 'ends')!r}).exists(): time.sleep(0.1)\n"
        "sys.exit('no more <b>data</b>')\n"
    )
    submitted = run(home, "submit", "--detach", "--json", "train.py", cwd=source)
    job = json.loads(submitted.stdout)["job"]
    page = open_page(home)
    browser = page.driver.execute_cdp_cmd
    browser("Page.addScriptToEvaluateOnNewDocument", {"source": NOTIFICATIONS})
    permission = {"permission": {"name": "notifications"}, "origin": page.base}
    browser("Browser.setPermission", {**permission, "setting": "denied"})
    page.open(f"/job/{job}")
    page.click("button", "Notify me")
    page.shows("Notifications are blocked")

    browser("Browser.setPermission", {**permission, "setting": "granted"})
    page.click("button", "Notifications are blocked")
    page.shows("Will notify you")
    assert page.script("return window.notes") == []
    (tmp_path / "ends").touch()
    page.await_true("window.notes.length")
    name = job.rpartition("-")[0]
    [[title, text]] = page.script("return window.notes")  # type: ignore[misc]
    assert title == f"{name}: FAILED"
    assert "no more <b>data</b>" in text
    assert page.problems() == []


@pytest.mark.parametrize("view", ["", "/ranks", "/resources", "/log", "/outputs", "/submitted"])
def test_a_job_fits_a_narrow_screen(home: Path, failed: str, open_page: OpenPage, view: str):
    page = open_page(home)
    page.resize(400, 850)
    page.open(f"/job/{failed}{view}")
    page.shows("failing")

    page.await_true("document.scrollingElement.scrollWidth <= 400")
    save_screenshot(page, f"narrow{view.replace('/', '-')}")


def test_dark_mode_stays_from_page_to_page(home: Path, failed: str, open_page: OpenPage):
    page = open_page(home)
    page.shows(failed)
    is_dark = page.script("return document.body.classList.contains('body--dark')")
    page.click("button[aria-label='Dark or light']")
    page.await_true(f"document.body.classList.contains('body--dark') !== {json.dumps(is_dark)}")
    page.open(f"/job/{failed}")
    page.shows("failing")

    page.await_true(f"document.body.classList.contains('body--dark') !== {json.dumps(is_dark)}")


def test_a_job_is_submitted_again_and_removed(
    home: Path, failed: str, source: Path, open_page: OpenPage
):
    done = run(home, "submit", "--json", "--name", "once", "train.py", "1", cwd=source)
    job = str(json.loads(done.stdout)["job"])
    page = open_page(home)
    page.open(f"/job/{job}")
    page.click("button", "Submit again")
    page.click(".q-dialog button", "Submit")
    page.await_true(f"!location.pathname.endsWith({json.dumps(job)})")
    page.await_true("/^\\/job\\/once-/.test(location.pathname)")
    again = urlsplit(page.driver.current_url).path.rpartition("/")[2]
    assert run(home, "wait", again).returncode == 0

    page.shows("SUCCEEDED")
    page.click("button", "Remove")
    page.shows(f"Remove {again}?")
    page.click(".q-dialog button", "Remove")
    page.await_true("location.pathname === '/'")
    assert run(home, "status", again).returncode == 6

    page.open(f"/job/{failed}")
    page.click("button", "Remove")
    page.shows(f"Remove {failed}?")
    page.click(".q-dialog button", "Keep it")
    assert run(home, "status", failed).returncode == 0


def test_axe_finds_nothing_in_any_view_in_either_scheme(
    home: Path, failed: str, open_page: OpenPage, axe: str
):
    page = open_page(home)
    page.driver.set_script_timeout(120)
    paths = [
        "/",
        f"/compare?jobs={failed},{failed}",
        "/emulator",
        "/no-such-page",
        "/job/no-such-job",
    ]
    violations_of = {}
    for is_dark in (False, True):
        page.script(f"document.cookie = 'cloudjob-console-dark={is_dark:d}; path=/'")
        for path in [*paths, *(f"/job/{failed}/{view}" for view in VIEWS)]:
            page.open(path)
            page.await_true("!document.querySelector('.q-spinner') && document.body.innerText")
            is_drawn_dark = "document.body.classList.contains('body--dark')"
            page.await_true(f"{is_drawn_dark} === {json.dumps(is_dark)}")
            page.script(axe)
            if violations := page.driver.execute_async_script(AXE):  # type: ignore[no-untyped-call]
                violations_of[path, is_dark] = violations

    assert violations_of == {}


def test_the_texts_of_charts_have_contrast_in_both_schemes(
    home: Path, failed: str, open_page: OpenPage
):
    page = open_page(home)
    page.script("document.cookie = 'cloudjob-console-dark=0; path=/'")
    page.open(f"/job/{failed}/resources")
    page.await_true("!!document.querySelector('[_echarts_instance_]')")
    assert page.script(CONTRAST) >= 4.5

    # Charts that have been drawn follow the scheme.
    before = page.script("return console_ui.colour('quiet')")
    page.click("button[aria-label='Dark or light']")
    page.await_true(f"console_ui.colour('quiet') !== {json.dumps(before)}")
    poll(lambda: page.script(CONTRAST) >= 4.5, "the contrast of the chart")


def test_a_job_that_does_not_exist_is_reported(home: Path, open_page: OpenPage):
    page = open_page(home)
    page.open("/job/nothing-here")

    page.shows("nothing-here", "All jobs")


def test_a_page_comes_back_if_one_of_its_files_did_not_arrive(
    home: Path, failed: str, open_page: OpenPage
):
    page = open_page(home)

    def block(*urls: str) -> None:
        page.driver.execute_cdp_cmd("Network.setBlockedURLs", {"urls": urls})

    page.driver.execute_cdp_cmd("Network.enable", {})
    page.driver.execute_cdp_cmd("Network.setCacheDisabled", {"cacheDisabled": True})
    # A module that is imported at once, one that is imported later, a style.
    for missing in ("*vue*", "*aggrid*", "*quasar*css*"):
        block(missing)
        page.open(f"/job/{failed}/log")
        page.await_true("!!sessionStorage.again")
        block()
        page.shows("step 0 of rank 0")
        page.await_true(
            "getComputedStyle(document.querySelector('.q-header')).position === 'fixed'"
        )
        page.script("delete sessionStorage.again")

    # Lines that did not arrive are asked for again.
    block("*/log?*")
    page.open(f"/job/{failed}/log")
    page.await_true("!!document.querySelector('.log-grid')")
    block()
    page.shows("step 0 of rank 0")


def test_the_file_that_opens_the_link_logs_the_browser_in(
    tmp_path: Path, driver: webdriver.Chrome, start_console: Callable[[Path], str]
):
    driver.get(opening_page(start_console(tmp_path / "home"), tmp_path).as_uri())

    poll(lambda: "No jobs yet" in driver.page_source, "the list of jobs")


def test_a_browser_that_did_not_open_the_link_is_refused(
    home: Path, failed: str, start_console: Callable[[Path], str]
):
    link = start_console(home)
    base = link.partition("/login")[0]
    for path in (
        "/",
        "/api/jobs",
        f"/api/jobs/{failed}/log",
        f"/api/jobs/{failed}/output?name=MODEL/x",
        f"/job/{failed}",
        "/static/console.js",
    ):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(base + path, timeout=60)
        assert refused.value.code == 401
        assert failed not in refused.value.read().decode()


def test_matches_in_a_log_are_marked_among_the_others_and_the_address_keeps_them(
    home: Path, failed: str, open_page: OpenPage
):
    page = open_page(home)
    page.open(f"/job/{failed}/log?q=STEP%20%5B12%5D%20&expression=1&rank=0")
    page.shows("2 of ", "step 1 of rank 0", "step 2 of rank 0")
    marks = "[...document.querySelectorAll('.log-grid .match')].map(e => e.textContent).join()"
    page.await_true(f"{marks} === 'step 1 ,step 2 '")
    assert "step 0 of rank 0" not in page.text

    # A click on the number of a match shows its neighbours.
    page.click(".log-grid .ag-cell.line")
    page.shows("step 0 of rank 0")
    page.await_true("location.search.includes('others=1') && /line=[1-9]/.test(location.search)")
    page.shows("2 matches in ")
    page.click('[aria-label="Next match"]')
    page.shows("match 2 of 2")
    page.await_true("!!document.querySelector('.log-grid .chosen-line .match')")
    assert page.problems() == []


def test_the_page_of_a_running_job_shows_what_it_does(
    home: Path, tmp_path: Path, open_page: OpenPage
):
    # The browser's profile is in the folder itself.
    source = tmp_path / "source"
    source.mkdir()
    (source / "train.py").write_text(
        "import time\n"
        "for step in range(1, 100_000):\n"
        "    print(f'step {step}/100000 loss {1 / step} <b>', flush=True)\n"
        "    time.sleep(0.2)\n"
    )
    submitted = run(home, "submit", "--detach", "--json", "train.py", cwd=source)
    assert submitted.returncode == 0, submitted.stderr
    job = json.loads(submitted.stdout)["job"]
    try:
        page = open_page(home)
        page.open(f"/job/{job}")
        page.shows("Now", "of 100,000", "loss (detected)", "<b>")
        page.await_true("!!document.querySelector('.spark path')")
    finally:
        run(home, "cancel", "--now", job)
    page.await_true("!document.querySelector('.last-lines')")
    assert page.problems() == []

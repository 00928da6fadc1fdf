"""The jobs of sweeps, and their submission to emulated nodes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cloudjob
from cloudjob.home import sweeps_folder
from cloudjob.home.records import Records
from cloudjob.model import grid
from cloudjob.submission import sweep as sweeps
from tests.support.polling import poll
from tests.support.projects import enter_project

LIMIT_S = 180.0
TRAIN = """
import json, os, sys, time
value = float(sys.argv[1])
print(json.dumps({"loss": value}), flush=True)
while not os.path.exists(os.environ.get("GO", "/")):
    time.sleep(0.02)
sys.exit(7 if "--fail-at" in sys.argv and sys.argv[-1] == sys.argv[1] else 0)
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a script and a separate CLOUDJOB_HOME."""
    return enter_project(tmp_path, monkeypatch, TRAIN)


def spec(*args: str, **options: Any) -> cloudjob.JobSpec:
    return cloudjob.job_spec("train.py", args, launcher="python", **options)


# ---- values --------------------------------------------------------------------------------------


def test_each_combination_is_a_job_and_other_braces_stay_byte_for_byte():
    args = ["--lr={lr}", "{seed}{seed}", '{"a": 1}', "{}", "${HOME}", "{{lr}}", "{\udcff}"]
    described = spec(*args, sweep={"lr": [0.1, "{seed}"], "seed": "1..3"}, env={"S": "s{seed}"})

    jobs = sweeps.expand(described)

    assert [grid.text_of(values) for values, _ in jobs] == [
        f"lr={lr} seed={seed}" for lr in ("0.1", "{seed}") for seed in "123"
    ]
    last = jobs[-1][1]
    assert last.args == (
        "--lr={seed}", "33", '{"a": 1}', "{}", "${HOME}", "{{seed}}", "{\udcff}",
    )  # fmt: skip
    assert last.env == {"S": "s3"}
    assert not last.sweep


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("0.1,0.01", ("0.1", "0.01")),
        ("1..3", ("1", "2", "3")),
        ("-1..1, 10", ("-1", "0", "1", "10")),
        ("1..9..4", ("1", "5", "9")),
        ("../a,../b", ("../a", "../b")),
        (range(2), ("0", "1")),
        (["1..3", "a,b"], ("1..3", "a,b")),
    ],
)
def test_values_are_lists_and_ranges(text: object, values: tuple[str, ...]):
    assert spec("{x}", sweep={"x": text}).sweep == {"x": values}


@pytest.mark.parametrize(
    ("args", "options", "problem"),
    [
        (["{lrr}"], {"sweep": {"lr": "1,2"}}, r"sweep: has no lrr, .* did you mean 'lr'\?"),
        (["{lr}{lrr}"], {"sweep": {"lr": "1,2"}}, r"sweep: has no lrr, .* did you mean 'lr'\?"),
        (["x"], {"sweep": {"lr": "1,2"}}, r"sweep\.lr: is not used \(allowed {lr} in an arg"),
        (["{lr}"], {"sweep": {"lr": ""}}, r"sweep\.lr: has no values"),
        (["{lr}"], {"sweep": {"lr": []}}, r"sweep\.lr: has no values"),
        (["{lr}"], {"sweep": {"lr": "1,,2"}}, r"sweep\.lr: has an empty value"),
        (["{lr}"], {"sweep": {"lr": "1,1"}}, r"sweep\.lr: has a value twice \(given '1'"),
        (["{lr}"], {"sweep": {"lr": "1.."}}, r"sweep\.lr: has a range without two ends"),
        (["{lr}"], {"sweep": {"lr": "0.1..0.5"}}, r"sweep\.lr: has a range without two ends"),
        (["{lr}"], {"sweep": {"lr": "3..1"}}, r"sweep\.lr: has an empty range"),
        (["{lr}"], {"sweep": {"lr": "1..9..0"}}, r"sweep\.lr: has an empty range"),
        (
            ["{lr}"],
            {"sweep": {"lr": "0..999999999999"}},
            r"sweep\.lr: has a range of 1000000000000",
        ),
        (["{l r}"], {"sweep": {"l r": "1"}}, r"sweep\.l r: is not a name for a sweep"),
        (
            ["{a}{b}"],
            {"sweep": {"a": "1..100", "b": "1..100"}},
            r"sweep: makes too many jobs \(given 10000; allowed 100; max_jobs allows more",
        ),
        (
            ["{a}"],
            {"sweep": {"a": "1,2"}, "outputs": {"M": "file:///m"}},
            r"outputs\.M: is the same for several jobs .* with {a}, or an empty one",
        ),
    ],
)
def test_an_invalid_sweep_is_refused_in_one_line(
    args: list[str], options: dict[str, Any], problem: str
):
    with pytest.raises(cloudjob.SpecError) as caught:
        spec(*args, **options)

    [text] = caught.value.problems
    assert re.match(problem, text), text
    assert "\n" not in text


def test_a_job_that_its_values_make_invalid_is_refused_before_anything_is_sent():
    described = spec(env={"A": "{d}{d}"}, sweep={"d": ["x", 70_000 * "y"]})

    with pytest.raises(cloudjob.SpecError, match=r"env\.A: is too long .* \(d=yyy"):
        sweeps.expand(described)


def test_ten_thousand_jobs_are_possible_when_they_are_confirmed():
    described = spec("{a}{b}", sweep={"a": range(100), "b": range(100)}, max_jobs=10_000)

    assert len(list(grid.combinations(described.sweep))) == 10_000


def test_the_id_of_a_job_names_its_sweep():
    assert grid.sweep_of(grid.job_id("train-5w94xpwk", 9999)) == "train-5w94xpwk"
    # Platforms use this part in the names of folders.
    assert grid.unique_part("train-1-5w94xpwk-12") == "5w94xpwk-12"
    assert grid.unique_part("train-1-5w94xpwk") == "5w94xpwk"
    assert grid.unique_part("train") == "train"
    assert grid.sweep_of("train-5w94xpwk") == grid.sweep_of("train-12-5w94xpwk") == ""


def test_submit_and_preview_refuse_a_sweep_and_sweep_a_single_job():
    described = spec("{a}", sweep={"a": "1,2"})

    for call in (cloudjob.submit, cloudjob.preview):
        with pytest.raises(cloudjob.UsageError, match="is a sweep"):
            call(described)
    with pytest.raises(cloudjob.SpecError, match="sweep: has no values"):
        cloudjob.sweep(spec("1"))


# ---- jobs ----------------------------------------------------------------------------------------


class Command:
    """A running cloudjob command and its output."""

    def __init__(self, folder: Path, *args: str) -> None:
        self.path = folder / f"{len(list(folder.iterdir()))}.out"
        with self.path.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "cloudjob", *args], stdout=file, stderr=subprocess.STDOUT
            )

    @property
    def printed(self) -> str:
        return self.path.read_text()

    def exit_code(self) -> int:
        return self.process.wait(LIMIT_S)

    def until(self, text: str, times: int = 1) -> Command:
        def is_printed() -> bool:
            # Asked first: the command may print the text and end between the two questions.
            is_running = self.process.poll() is None
            has_printed = self.printed.count(text) >= times
            assert has_printed or is_running, self.printed
            return has_printed

        poll(is_printed, text, LIMIT_S)
        return self


@pytest.fixture
def start(tmp_path: Path, project: Path) -> Callable[..., Command]:
    """Return a function that starts a command in the background."""
    (tmp_path / "commands").mkdir()
    started: list[Command] = []

    def run(*args: str) -> Command:
        started.append(Command(tmp_path / "commands", *args))
        return started[-1]

    yield run
    (project.parent / "go").touch()
    for command in started:
        command.process.kill()
        command.process.wait()
    for job in cloudjob.jobs():
        job.cancel(is_urgent=True)


def states(sweep: str) -> list[str]:
    return [
        each.native_state if each.state == "UNKNOWN" else each.state.value
        for each in cloudjob.attach_sweep(sweep).statuses()
    ]


def sweep_id(command: Command) -> str:
    command.until("sweep train-")
    return command.printed.partition("sweep ")[2].partition(":")[0]


SUBMIT_SWEEP = ("submit", "--launcher", "python", "--sweep", "x=1..4")


def test_a_sweep_runs_each_job_once_and_ranks_them_by_a_metric(capfd: Any):
    seen: list[tuple[str, str]] = []
    sweep = cloudjob.sweep(
        "train.py", ["{x}", "--fail-at", 2], launcher="python", sweep={"x": [3, 1, 2]},
        max_parallel=3, on_status=lambda status, values: seen.append((status.job, values["x"])),
    )  # fmt: skip
    statuses = sweep.wait()

    assert [status.job for status in statuses] == [f"{sweep.id}-{n}" for n in range(3)]
    assert [status.exit_code for status in statuses] == [0, 0, 7]
    assert len({status.code.digest for status in statuses if status.code}) == 1
    assert [(job.sweep, values["x"], value) for job, values, value in sweep.ranking("loss")] == [
        (sweep.id, 1, 1.0), (sweep.id, 2, 2.0), (sweep.id, 3, 3.0),
    ]  # fmt: skip
    assert sweep.ranking("loss", maximize=True)[0].values == {"x": 3}
    with pytest.raises(cloudjob.UsageError, match="none has printed the metric 'los'") as caught:
        sweep.ranking("los")
    assert "loss" in caught.value.hint
    assert [job.id for job in cloudjob.jobs(sweep=sweep.id)][::-1] == [s.job for s in statuses]
    # The values are also known from the job alone.
    assert cloudjob.attach(f"{sweep.id}-1").sweep_values() == {"x": "1"}
    assert cloudjob.attach(f"{sweep.id}-1").spec()["sweep"] == {}
    assert capfd.readouterr() == ("", "")


def test_at_most_k_jobs_run_with_the_code_of_the_start_and_the_first_failure_is_the_exit_code(
    project: Path, start: Callable[..., Command]
):
    go = f"GO={project.parent / 'go'}"
    submit = start(
        *SUBMIT_SWEEP, "--max-parallel", "2", "-e", go, "train.py", "{x}", "--fail-at", "3"
    )
    sweep = sweep_id(submit.until(" started: ", 2))
    listed = start("list", "--sweep", sweep)
    assert listed.exit_code() == 0

    # Later jobs run the code of the first ones, not the changed script.
    (project / "train.py").write_text("raise SystemExit(9)")
    (project.parent / "go").touch()
    assert submit.exit_code() == 7, submit.printed

    rows = [line.split() for line in listed.printed.splitlines()]
    assert [row[1] for row in rows[1:]].count("PENDING") >= 2
    assert rows[-1][0] == f"{sweep}-3"
    assert rows[-1][-1] == "x=4"
    assert states(sweep) == ["SUCCEEDED", "SUCCEEDED", "FAILED", "SUCCEEDED"]
    assert f"sweep {sweep}: 3 SUCCEEDED, 1 FAILED" in submit.printed
    assert submit.printed.count("new: 1 file") == 1
    assert start("wait", sweep).exit_code() == 7


def test_a_killed_submit_shows_what_it_did_not_submit_and_resumes_without_submitting_twice(
    project: Path, start: Callable[..., Command]
):
    options = (*SUBMIT_SWEEP, "--max-parallel", "2", "-e", f"GO={project.parent / 'go'}")
    submit = start(*options, "train.py", "{x}")
    sweep = sweep_id(submit.until(" started: ", 2))
    refused = start(*options, "train.py", "{x}")
    assert refused.exit_code() == 2
    assert f"another process is submitting the same jobs as {sweep}" in refused.printed
    submit.process.kill()
    submit.process.wait()

    assert states(sweep)[2:] == ["never submitted", "never submitted"]
    again = start(*options, "train.py", "{x}")
    assert again.exit_code() == 2
    assert f"{sweep} has the same jobs, and its submit was interrupted" in again.printed
    assert "hint: --resume submits the others" in again.printed
    # A different --max-parallel changes neither the jobs nor the package.
    other = start(
        *options[:-4], "--max-parallel", "4", *options[-2:], "--resume", "train.py", "{x}"
    )
    other.until(" started: ", 4)
    (project.parent / "go").touch()
    assert other.exit_code() == 0, other.printed
    assert states(sweep) == ["SUCCEEDED"] * 4
    assert len(cloudjob.jobs()) == 4
    with pytest.raises(cloudjob.UsageError, match="no interrupted one has the same jobs"):
        cloudjob.sweep(spec("{x}", sweep={"x": "1..4"}), resume=True)


def test_a_job_whose_submit_was_killed_half_way_is_submitted_again(
    tmp_path: Path, project: Path, start: Callable[..., Command]
):
    submit = start(*SUBMIT_SWEEP, "-e", f"GO={project.parent / 'go'}", "train.py", "{x}")
    sweep = sweep_id(submit.until(" started: "))
    submit.process.kill()
    submit.process.wait()
    with Records(tmp_path / "home" / "records.db") as db:
        first = db.get(f"{sweep}-0")
        handle = first.handle.replace(f"{sweep}-0", f"{sweep}-1")
        db.add(first._replace(job=f"{sweep}-1", handle=handle, state="SUBMITTING"))

    assert states(sweep) == ["RUNNING", "the submit was interrupted", *["never submitted"] * 2]
    (project.parent / "go").touch()
    resumed = start(
        *SUBMIT_SWEEP, "-e", f"GO={project.parent / 'go'}", "--resume", "train.py", "{x}"
    )
    assert resumed.exit_code() == 0, resumed.printed
    assert states(sweep) == ["SUCCEEDED"] * 4


def test_a_sweep_is_not_resumed_with_other_code(project: Path, start: Callable[..., Command]):
    submit = start(*SUBMIT_SWEEP, "-e", f"GO={project.parent / 'go'}", "train.py", "{x}")
    sweep_id(submit.until(" started: "))
    submit.process.kill()
    submit.process.wait()
    (project / "train.py").write_text("pass")

    resumed = start(
        *SUBMIT_SWEEP, "-e", f"GO={project.parent / 'go'}", "--resume", "train.py", "{x}"
    )
    assert resumed.exit_code() == 2
    assert "the source has changed since it began" in resumed.printed


@pytest.mark.parametrize("method", ["ctrl-c", "command", "all"])
def test_a_cancelled_sweep_cancels_its_jobs_and_starts_no_more(
    method: str, project: Path, start: Callable[..., Command]
):
    go = f"GO={project.parent / 'go'}"
    submit = start(*SUBMIT_SWEEP, "--max-parallel", "2", "-e", go, "train.py", "{x}")
    sweep = sweep_id(submit.until(" started: ", 2))
    if method == "ctrl-c":
        submit.process.send_signal(signal.SIGINT)
    elif method == "all":
        assert start("cancel", "--now", "--all").exit_code() == 0
    else:
        cancel = start("cancel", "--now", sweep)
        assert cancel.exit_code() == 0
        assert f"sweep {sweep}: 2 CANCELLED, 2 never submitted" in cancel.printed

    assert submit.exit_code() not in (0, 130), submit.printed
    assert states(sweep) == ["CANCELLED"] * 4
    assert [job.id for job in cloudjob.jobs()] == [f"{sweep}-1", f"{sweep}-0"]
    # A cancelled sweep does not prevent a new submit of the same jobs.
    (project.parent / "go").touch()
    assert start(*SUBMIT_SWEEP, "-e", go, "train.py", "{x}").exit_code() == 0


def test_the_jobs_of_a_sweep_are_cancelled_even_if_its_mark_cannot_be_written(
    project: Path, start: Callable[..., Command]
):
    submit = start(*SUBMIT_SWEEP, "-e", f"GO={project.parent / 'go'}", "train.py", "{x}")
    sweep = cloudjob.attach_sweep(sweep_id(submit.until(" started: ")))
    submit.process.kill()
    submit.process.wait()
    mark = sweeps_folder(Path(os.environ["CLOUDJOB_HOME"])) / f"{sweep.id}.cancelled"
    mark.symlink_to("/proc/nowhere/x")

    with pytest.raises(cloudjob.CloudJobError, match="cancelling the sweep"):
        sweep.cancel(is_urgent=True)
    assert sweep.jobs()[0].wait(timeout_s=120).state.value == "CANCELLED"


def test_ctrl_c_with_detach_leaves_the_jobs_running_and_the_others_unsubmitted(
    project: Path, start: Callable[..., Command]
):
    options = ("--on-interrupt", "detach", "-e", f"GO={project.parent / 'go'}")
    submit = start(*SUBMIT_SWEEP, *options, "train.py", "{x}")
    sweep = sweep_id(submit.until(" started: "))
    submit.process.send_signal(signal.SIGINT)

    assert submit.exit_code() == 130
    assert f"detached; the jobs of {sweep} that were submitted continue" in submit.printed
    assert states(sweep) == ["RUNNING", *["never submitted"] * 3]
    (project.parent / "go").touch()
    wait = start("wait", "--json", sweep)
    assert wait.exit_code() == 1
    assert '"native_state": "never submitted"' in wait.printed


def test_with_fail_fast_a_failure_cancels_the_others(project: Path, start: Callable[..., Command]):
    (project / "train.py").write_text(
        "import os, sys, time\nwhile sys.argv[1] != '2': time.sleep(0.02)\nsys.exit(7)\n"
    )
    submit = start(*SUBMIT_SWEEP, "--max-parallel", "2", "--fail-fast", "train.py", "{x}")
    submit.exit_code()

    assert states(sweep_id(submit)) == ["CANCELLED", "FAILED", "CANCELLED", "CANCELLED"]


def test_a_job_that_cannot_be_submitted_ends_the_submit_and_the_others_continue(
    project: Path, start: Callable[..., Command]
):
    submit = start(*SUBMIT_SWEEP, "-e", f"GO={project.parent / 'go'}", "train.py", "{x}")
    sweep = sweep_id(submit.until(" started: "))
    (Path(os.environ["CLOUDJOB_HOME"]) / "store").rename(project.parent / "gone")
    (Path(os.environ["CLOUDJOB_HOME"]) / "store").write_text("")
    (project.parent / "go").touch()

    assert submit.exit_code() == 4, submit.printed
    assert "Traceback" not in submit.printed
    assert f"the jobs of {sweep} that were submitted continue" in submit.printed


def test_detached_jobs_are_all_submitted_at_once_or_refused(
    project: Path, start: Callable[..., Command]
):
    refused = start(*SUBMIT_SWEEP, "--detach", "train.py", "{x}")
    assert refused.exit_code() == 2
    assert "hint: --max-parallel 4 submits all at once" in refused.printed

    submit = start("submit", "--launcher", "python", "--sweep", "x=1,2", "--max-parallel", "2",
                   "--detach", "train.py", "{x}")  # fmt: skip
    assert submit.exit_code() == 0
    sweep = submit.printed.split()[-1]
    assert cloudjob.attach_sweep(sweep).wait()[1].state == "SUCCEEDED"


def test_a_dry_run_shows_how_many_jobs_and_the_first_and_the_last(start: Callable[..., Command]):
    dry_run = start(*SUBMIT_SWEEP, "--dry-run", "train.py", "{x}", '{"a": 1}')

    assert dry_run.exit_code() == 0
    lines = [line.split(maxsplit=1)[-1] for line in dry_run.printed.splitlines()[:3]]
    assert lines == [
        "4 jobs, at most 1 at the same time",
        "job  train.py 1 '{\"a\": 1}'",
        "job   train.py 4 '{\"a\": 1}'",
    ]
    assert cloudjob.jobs() == []


def test_a_name_is_given_once_on_the_command_line(start: Callable[..., Command]):
    refused = start(*SUBMIT_SWEEP, "--sweep", "x=5", "train.py", "{x}")

    assert refused.exit_code() == 2
    assert "error: reading --sweep x=5: x was given before\n" in refused.printed
    assert "hint: --sweep x=1..4,5\n" in refused.printed


def test_a_job_file_holds_a_sweep(project: Path):
    (project / "job.yaml").write_text(
        "script: train.py\nargs: ['{lr}', '{seed}']\nsweep: {lr: [0.10, 1e-3], seed: 1..2}\n"
    )
    described = cloudjob.job_spec(job_file="job.yaml", sweep={"seed": [7]})

    assert described.sweep == {"lr": ("0.10", "1e-3"), "seed": ("7",)}


def test_a_sweep_is_waited_for_by_its_id_while_another_thread_submits_it(project: Path):
    started = threading.Event()
    submitted: list[cloudjob.Sweep] = []

    def record_start(sweep: cloudjob.Sweep) -> None:
        submitted.append(sweep)
        started.set()

    described = spec("{x}", sweep={"x": "1,2"})
    thread = threading.Thread(target=lambda: cloudjob.sweep(described, on_start=record_start))
    thread.start()
    assert started.wait(LIMIT_S)
    statuses = cloudjob.attach_sweep(submitted[0].id).wait()
    thread.join(LIMIT_S)

    assert [status.state for status in statuses] == ["SUCCEEDED"] * 2
    with pytest.raises(cloudjob.JobNotFound):
        cloudjob.attach_sweep("train-5w94xpwk")


def test_the_file_of_a_sweep_is_private_and_a_damaged_one_is_an_error(
    tmp_path: Path, project: Path
):
    sweep = cloudjob.sweep(spec("{x}", sweep={"x": "1"}))
    sweep.wait()
    [path] = (tmp_path / "home" / "sweeps").iterdir()
    assert path.stat().st_mode & 0o077 == 0
    assert json.loads(path.read_text())["submitted"] == 1

    path.write_text("{")
    with pytest.raises(cloudjob.UsageError, match="is damaged"):
        cloudjob.attach_sweep(sweep.id).statuses()

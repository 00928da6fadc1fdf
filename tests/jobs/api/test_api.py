"""The public Python API, with real jobs on emulated nodes."""

from __future__ import annotations

import asyncio
import html
import inspect
import os
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import cloudjob
from cloudjob.model.sections import Process
from tests.support.projects import enter_project
from tests.support.statuses import status_of

LIMIT_S = 180.0
TRAIN = """
import os, sys, time
print("arguments", sys.argv[1:], flush=True)
if "MODEL" in os.environ:
    open(os.path.join(os.environ["MODEL"], "weights"), "w").write("trained")
while "--wait-for" in sys.argv and not os.path.exists(sys.argv[-1]):
    time.sleep(0.02)
sys.exit(7 if "--fail" in sys.argv else 0)
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a script and a separate CLOUDJOB_HOME."""
    return enter_project(tmp_path, monkeypatch, TRAIN)


def submit(*args: str, **options: Any) -> cloudjob.Job:
    return cloudjob.submit("train.py", args, launcher="python", **options)


def test_a_job_is_submitted_followed_and_downloaded(project: Path, capfd: Any):
    reports: list[cloudjob.Progress] = []
    job = submit("--epochs", "3", outputs={"MODEL": ""}, on_progress=reports.append)
    seen: list[cloudjob.JobState] = []

    status = job.wait(
        timeout_s=LIMIT_S, check=True, on_status=lambda status: seen.append(status.state)
    )
    lines = [str(line) for line in job.logs(follow=True) if line.rank == 0]
    outputs = job.outputs("MODEL")
    files = outputs.download("results")

    assert status.state == "SUCCEEDED" == seen[-1]
    assert lines == ["[0] arguments ['--epochs', '3']"]
    assert [file.name for file in outputs] == [file.name for file in files] == ["MODEL/weights"]
    assert Path("results", files[0].name).read_text() == "trained"
    assert [report.kind for report in reports if report.message] == ["sent"]
    sending = [report for report in reports if report.kind == "sending"]
    assert sending[0].done_bytes == 0
    assert sending[-1].done_bytes == sending[-1].total_bytes > 0
    assert capfd.readouterr() == ("", "")


def test_a_failed_job_is_a_status_or_an_error_with_its_exit_code():
    job = submit("--fail")

    assert job.wait(timeout_s=LIMIT_S).exit_code == 7
    with pytest.raises(cloudjob.JobFailed, match=rf"^job {job.id}: FAILED: ") as caught:
        job.wait(timeout_s=LIMIT_S, check=True)
    assert caught.value.exit_code == 7
    assert caught.value.status.failure is not None


def test_a_job_is_found_from_another_process_and_cancelled(project: Path):
    job = submit("--wait-for", "nothing")
    attached = cloudjob.attach(job.handle)

    with pytest.raises(cloudjob.WaitTimeout, match="the job continues") as caught:
        attached.wait(timeout_s=0)
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.hint == f"cloudjob.attach({job.id!r}).wait() waits for its end"
    assert [each.id for each in cloudjob.jobs(name="train*")] == [job.id]
    assert not cloudjob.jobs(name="other")[:1]
    attached.cancel(is_urgent=True)
    assert job.wait(timeout_s=LIMIT_S).state is cloudjob.JobState.CANCELLED
    [listed] = cloudjob.jobs(backend="process", state=["CANCELLED"], since="1h", limit=1)
    assert listed.is_over


def test_ctrl_c_while_waiting_leaves_the_job_running(project: Path):
    code = (
        "import cloudjob\n"
        f"job = cloudjob.submit('train.py', ['--wait-for', '{project}/go'], launcher='python')\n"
        "try:\n"
        "    job.wait(on_status=lambda status: print(job.handle, flush=True))\n"
        "except KeyboardInterrupt:\n"
        "    print('detached', job.status().state)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    handle = process.stdout.readline().strip()
    os.killpg(process.pid, signal.SIGINT)
    rest, _ = process.communicate(timeout=LIMIT_S)
    (project / "go").touch()

    assert rest.splitlines()[-1].startswith("detached ")
    assert cloudjob.attach(handle).wait(timeout_s=LIMIT_S).state == "SUCCEEDED"


def test_jobs_are_submitted_and_waited_for_from_asyncio():
    async def train(seed: int) -> cloudjob.JobStatus:
        job = await asyncio.to_thread(submit, "--seed", str(seed), name=f"seed-{seed}")
        return await asyncio.to_thread(job.wait, timeout_s=LIMIT_S, check=True)

    async def sweep() -> list[cloudjob.JobStatus]:
        return await asyncio.gather(*(train(seed) for seed in range(3)))

    assert [status.name for status in asyncio.run(sweep())] == ["seed-0", "seed-1", "seed-2"]


def test_one_job_is_used_by_several_threads_at_once():
    job = submit()
    statuses: list[cloudjob.JobStatus] = []
    threads = [
        threading.Thread(target=lambda: statuses.append(job.wait(timeout_s=LIMIT_S)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)

    assert [status.state for status in statuses] == ["SUCCEEDED"] * 4


def test_a_notebook_shows_a_job_as_a_table_without_asking_the_platform():
    job = submit(name="a-b")
    assert job.last_status is None
    assert job.handle in job._repr_html_()
    job.wait(timeout_s=LIMIT_S)

    assert "<th style='text-align:left'>state</th>" in job._repr_html_()
    assert repr(job) == f"<Job {job.handle} SUCCEEDED>"


def test_a_job_is_pickled_by_its_handle():
    job = submit(name="a-b")
    there = pickle.loads(pickle.dumps({"job": job}))["job"]

    assert (there.id, there.handle) == (job.id, job.handle)
    assert there is not job
    assert there.wait(timeout_s=LIMIT_S).state == "SUCCEEDED"


def test_a_message_cannot_put_html_into_a_notebook():
    failure = cloudjob.Failure(message="<script>alert(1)</script>", rank=0)
    status = status_of(state=cloudjob.JobState.FAILED, failure=failure)

    assert html.escape(failure.message) in status._repr_html_()
    assert "<script>" not in status._repr_html_()
    assert ">failed rank</th><td style='text-align:left'>0<" in status._repr_html_()


def test_errors_name_every_problem_and_nothing_is_started():
    with pytest.raises(cloudjob.SpecError) as caught:
        cloudjob.submit("train.py", nodes=0, env={"A=B": "1"})

    assert len(caught.value.problems) == 2
    assert caught.value.exit_code == 2
    assert cloudjob.jobs() == []
    with pytest.raises(cloudjob.JobNotFound):
        cloudjob.attach("train")
    with pytest.raises(cloudjob.UsageError, match="no such state"):
        cloudjob.jobs(state="RUNING")
    for since in ("yesterday", "999999w", "9999-12-31T23:59:59-12:00"):
        with pytest.raises(cloudjob.UsageError, match="not a time"):
            cloudjob.jobs(since=since)
    with pytest.raises(TypeError):
        cloudjob.submit(cloudjob.job_spec("train.py"), nodes=2)


def test_secrets_are_named_and_their_values_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("TOKEN", "hunter2")
    spec = cloudjob.job_spec(
        "train.py", secrets=["TOKEN"], process={"isolation": "none"}, strict=True
    )

    assert spec.secrets == {"TOKEN": "hunter2"}
    assert spec.process == Process(isolation="none")
    assert spec.strict is True
    assert "hunter2" not in repr(spec)
    assert cloudjob.preview("train.py", launcher="python").plans[0]["role"] == "head"


def test_a_preview_for_slurm_asks_an_mpirun_that_needs_a_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The mpirun of Open MPI's wheel prints its version only if HOME is set."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "mpirun").write_text('#!/bin/sh\n: "${HOME:?}"\necho "mpirun (Open MPI) 5.0.11"\n')
    (tools / "mpirun").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")

    preview = cloudjob.preview("train.py", launcher="mpirun", backend="slurm", nodes=2)

    assert preview.plans[0]["argv"][0] == str(tools / "mpirun")


def test_numbers_are_converted_to_text_and_a_string_is_refused_as_args():
    spec = cloudjob.job_spec("train.py", ["--seed", 3, "--rate", 0.1], env={"LR": 0.5, "ON": True})

    assert spec.args == ("--seed", "3", "--rate", "0.1")
    assert spec.env == {"LR": "0.5", "ON": "true"}
    pod = {"spec": {"hostNetwork": True, "priority": 3}}
    described = cloudjob.job_spec(
        "train.py", ["--save", True], kubernetes={"pod": pod, "gpus": 2}, sweep={"x": [1, True]},
        env={"X": "{x}"},
    )  # fmt: skip
    assert described.kubernetes.pod == pod, "what is for the platform keeps its types"
    assert described.kubernetes.gpus == 2
    listed = cloudjob.job_spec("train.py", modelarts={"volumes": [{"size": 3, "is_fast": True}, 4]})
    assert listed.modelarts.volumes == [{"size": 3, "is_fast": True}, 4]
    assert described.sweep == {"x": ("1", "true")}
    with pytest.raises(TypeError, match="args is a list"):
        cloudjob.submit("train.py", "--seed 3")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"nodes": 2.5}, "nodes: is not a whole number (given 2.5; allowed 1 to 10000)"),
        ({"nodes": True}, "nodes: is not a whole number (given True; allowed 1 to 10000)"),
        ({"timeout_min": True}, "timeout_min: is not a number (given True; allowed 0 to 525600)"),
        ({"strict": 1}, "strict: is not known (given 1; allowed false, true)"),
        ({"strict": "yes"}, "strict: is not known (given 'yes'; allowed false, true)"),
        ({"slurm": {"requeue": 0}}, "slurm.requeue: is not known (given 0; allowed false, true)"),
        ({"nodes": [2]}, "nodes: must be one text or number"),
        ({"strict": [True]}, "strict: must be one text or number"),
        (
            {"secrets": {"PIN": 1234}},
            "secrets.PIN: a secret's value must not be written down where others can read it (given"
            " ***; allowed the name alone, taken from your environment, or @FILE)",
        ),
    ],
)
def test_a_python_value_of_another_type_is_refused(options: Any, problem: str):
    with pytest.raises(cloudjob.SpecError) as caught:
        cloudjob.job_spec("train.py", **options)

    assert list(caught.value.problems) == [problem]


@pytest.mark.parametrize("value", [True, "true"])
def test_a_flag_is_a_boolean_or_its_word(value: Any):
    spec = cloudjob.job_spec("train.py", fail_fast=value, modelarts={"preemptible": value})

    assert (spec.fail_fast, spec.modelarts.preemptible, spec.strict) == (True, True, False)


def test_submit_reports_which_source_folder_it_chose(project: Path, tmp_path: Path):
    (project / ".git").mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    os.chdir(elsewhere)
    reports: list[cloudjob.Progress] = []
    job = cloudjob.submit(project / "train.py", launcher="python", on_progress=reports.append)
    job.wait(timeout_s=LIMIT_S)

    assert str(project) in next(each.message for each in reports if each.kind == "note")


@pytest.mark.parametrize("since", ["999999w", "0001-01-01", "2026-13-01", "soon"])
def test_an_invalid_time_is_refused(since: str):
    with pytest.raises(cloudjob.UsageError, match="not a time"):
        cloudjob.jobs(since=since)


def test_a_handle_of_an_unknown_backend_is_not_found():
    with pytest.raises(cloudjob.JobNotFound):
        cloudjob.attach("nowhere://x/job-1")


def test_an_unknown_output_is_refused_by_name():
    job = submit(outputs={"MODEL": ""})
    with pytest.raises(cloudjob.UsageError, match="no output 'MODLE'") as caught:
        job.outputs("MODLE")

    assert caught.value.hint == "it has MODEL"
    job.wait(timeout_s=LIMIT_S)


def test_the_public_names_can_be_imported_and_have_docstrings():
    for name in cloudjob.__all__:
        public = getattr(cloudjob, name)
        assert inspect.getdoc(public), name
    with pytest.raises(AttributeError):
        _ = cloudjob.nothing  # type: ignore[attr-defined]


def test_importing_cloudjob_imports_nothing_else():
    code = (
        "import sys; before = set(sys.modules); import cloudjob;"
        "print(sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert set(eval(done.stdout)) <= {"__future__", "cloudjob"}


def test_python_m_cloudjob_is_the_command_line():
    done = subprocess.run(
        [sys.executable, "-m", "cloudjob", "--version"], capture_output=True, text=True, check=True
    )

    assert done.stdout == f"cloudjob {cloudjob.__version__}\n"


def test_every_public_name_and_every_error_with_its_exit_code_is_documented():
    page = (Path(cloudjob.__file__).parents[1] / "docs" / "reference" / "python.md").read_text()
    for name in cloudjob.__all__:
        public = getattr(cloudjob, name)
        if inspect.isclass(public) and issubclass(public, cloudjob.CloudJobError):
            code = "the job's own" if name == "JobFailed" else public.exit_code
            assert name == "CloudJobError" or f"| `{name}` | {code} |" in page
        assert f"`{name}" in page or f".{name}`" in page, name
    internal = {"code_digest", "has_final_status", "platform", "status_in_list", "statuses"}
    internal |= {"metric_columns", "need_here", "status_json", "thinned_metrics", "unknown"}
    members = {name for name in dir(cloudjob.Job) if not name.startswith("_")}
    assert {name for name in members - internal if f"`{name}" not in page} == set()

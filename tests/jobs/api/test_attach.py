"""Jobs that were submitted with another state folder or from another host."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cloudjob
from cloudjob.cli import main
from cloudjob.home.records import Records
from cloudjob.store import open_store
from cloudjob.tracking import descriptions
from tests.support.homes import make_used_home
from tests.support.servers import Server, client_environ

LIMIT_S = 180.0
TRAIN = """
import os, sys, time
print("token", len(os.environ["TOKEN"]), flush=True)
open(os.path.join(os.environ["MODEL"], "weights"), "w").write("trained")
while len(sys.argv) > 1 and not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
"""

Submit = Callable[..., cloudjob.Job]


@pytest.fixture
def go(tmp_path: Path) -> Path:
    """A file whose creation ends a job."""
    return tmp_path / "go"


@pytest.fixture
def submit(tmp_path: Path, go: Path, monkeypatch: pytest.MonkeyPatch) -> Submit:
    """Return a function that submits a job with one state folder and then switches to another.

    This stands for another machine or another user: only the store is common.
    """
    source = tmp_path / "project"
    source.mkdir()
    (source / "train.py").write_text(TRAIN)
    monkeypatch.chdir(source)
    monkeypatch.setenv("TOKEN", "hunter2")

    make_used_home(tmp_path / "ci")

    def run(store: str, **options: Any) -> cloudjob.Job:
        monkeypatch.setenv("CLOUDJOB_HOME", str(tmp_path / "ci"))
        job = cloudjob.submit(
            "train.py", [str(go)], launcher="python", store=store, outputs={"MODEL": ""},
            secrets=["TOKEN"], **options,
        )  # fmt: skip
        monkeypatch.setenv("CLOUDJOB_HOME", str(tmp_path / "laptop"))
        return job

    return run


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return (tmp_path / "store").as_uri()


def change_description(store: str, job: cloudjob.Job, values: dict[str, Any]) -> None:
    """Change values in the stored description of a job."""
    opened_store = open_store(store)
    described = json.loads(opened_store.get_bytes(descriptions.key(job.id)))
    opened_store.put_bytes(json.dumps({**described, **values}).encode(), descriptions.key(job.id))


def test_a_job_is_listed_by_all_and_controlled_with_the_state_folder_of_its_submit(
    submit: Submit,
    folder: str,
    go: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
):
    """A description must not choose a state folder: its files say what to kill and remove."""
    job = submit(folder)

    with pytest.raises(cloudjob.JobNotFound):
        cloudjob.attach(job.id)
    [listed] = cloudjob.jobs(store=folder)
    assert (listed.id, listed.submitted_by) == (job.id, descriptions.submitter())
    attached = cloudjob.attach(f"{folder}/{job.id}")
    assert main(["status", job.handle]) == 0
    with pytest.raises(cloudjob.BackendError, match="not started on this machine with this state"):
        attached.cancel(is_urgent=True)
    assert main(["list", "--store", folder]) == 0
    monkeypatch.setenv("CLOUDJOB_HOME", str(tmp_path / "ci"))
    ours = cloudjob.attach(f"{folder}/{job.id}")
    assert str(next(ours.logs(0, 0, follow=True))) == "[0] token 7"
    ours.cancel()
    assert ours.wait(timeout_s=LIMIT_S).state == "CANCELLED"
    monkeypatch.setenv("CLOUDJOB_HOME", str(tmp_path / "laptop"))
    assert cloudjob.attach(job.id).wait(timeout_s=LIMIT_S).state == "CANCELLED"
    assert descriptions.submitter() in capfd.readouterr().out


def test_attach_follows_a_job_of_another_state_folder_to_its_end(
    submit: Submit, folder: str, go: Path, capfd: pytest.CaptureFixture[str]
):
    job = submit(folder)
    go.touch()

    assert main(["attach", job.handle, "--store", folder]) == 0
    assert "[0] token 7\n" in capfd.readouterr().out
    assert main(["outputs", job.id, "--to", "results"]) == 0
    assert Path("results/MODEL/weights").read_text() == "trained"
    # The next package leaves the folder out.
    assert Path("results/.gitignore").read_text() == "*\n"
    assert main(["rm", "--force", job.id]) == 0
    assert not list(open_store(folder).list("jobs/"))
    assert cloudjob.jobs(store=folder) == []


def test_a_handle_is_looked_up_in_the_store_of_the_configuration(
    submit: Submit, folder: str, go: Path
):
    go.touch()
    job = submit(folder)
    with pytest.raises(cloudjob.JobNotFound, match="neither in the records") as caught:
        cloudjob.attach(job.handle)
    Path("cloudjob.yaml").write_text(f"store: {folder}\n")

    assert caught.value.hint.startswith("cloudjob attach STORE/JOB")
    assert cloudjob.attach(job.handle).wait(timeout_s=LIMIT_S).state == "SUCCEEDED"


@pytest.mark.parametrize("job", ["sky://local/train-2k83", "nodes://train-2k83", "https://h/x"])
def test_a_handle_of_an_unknown_backend_is_not_found(
    job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CLOUDJOB_HOME", str(tmp_path / "home"))

    with pytest.raises(cloudjob.JobNotFound):
        cloudjob.attach(job)


def test_a_job_in_a_bucket_is_found_by_its_uri(
    submit: Submit,
    go: Path,
    seaweedfs: Server,
    new_bucket: Callable[[Server], str],
    monkeypatch: pytest.MonkeyPatch,
):
    for name, value in client_environ(seaweedfs.endpoint).items():
        monkeypatch.setenv(name, value)
    bucket, options = new_bucket(seaweedfs), f"?endpoint={seaweedfs.endpoint}&addressing=path"
    go.touch()
    job = submit(f"s3://{bucket}/jobs{options}")
    attached = cloudjob.attach(f"s3://{bucket}/jobs/{job.id}{options}")

    assert attached.wait(timeout_s=LIMIT_S).state == "SUCCEEDED"
    assert [file.name for file in attached.outputs().download("results")] == ["MODEL/weights"]
    assert [each.id for each in cloudjob.jobs(store=f"s3://{bucket}/jobs{options}")] == [job.id]


def test_the_status_of_a_job_of_another_host_comes_from_its_record_in_the_store(
    submit: Submit, folder: str, go: Path
):
    job = submit(folder)
    change_description(folder, job, {"submitted_by": "ci@runner-7"})
    attached = cloudjob.attach(f"{folder}/{job.id}")

    assert attached.status().state == "UNKNOWN"
    with pytest.raises(cloudjob.BackendError, match="which ci@runner-7 submitted"):
        next(attached.logs())
    go.touch()
    assert attached.wait(timeout_s=LIMIT_S).state == "SUCCEEDED"
    assert [file.name for file in attached.outputs("MODEL")] == ["MODEL/weights"]


def test_a_description_contains_no_secret(submit: Submit, folder: str, go: Path):
    go.touch()
    job = submit(folder)
    data = open_store(folder).get_bytes(descriptions.key(job.id))
    job.wait(timeout_s=LIMIT_S)

    assert b"hunter2" not in data
    assert json.loads(data)["submission"]["spec"]["secrets"] == {"TOKEN": "***"}


def test_a_damaged_or_hostile_description_is_refused(submit: Submit, folder: str, go: Path):
    go.touch()
    job = submit(folder)
    original = open_store(folder).get_bytes(descriptions.key(job.id))
    for changed in (
        {"job": "../../home"},
        {"job": "other-2k83", "handle": "process://local/other-2k83"},
        {"handle": "process://local/other-2k83"},
        {"backend": "docker"},
        {"nodes": "2"},
        {"home": None},
        {"nodes": 1_000_000_000},
        {"home": "/home\0"},
        {"home": ""},
        {"home": "relative"},
        {"name": "$(touch owned)"},
        {"code_uri": "x" * 10_000},
        {"code_size_bytes": 2**63},
        {"created_at": "2026-13-45T99:99:99.000Z"},
        {"submission": {"outputs": {"../../.ssh": "file:///x"}, "spec": {}}},
        {"submission": {"outputs": {}, "spec": "text"}},
    ):
        open_store(folder).put_bytes(original, descriptions.key(job.id))
        change_description(folder, job, changed)
        with pytest.raises(cloudjob.StoreError, match=f"reading the description of {job.id}"):
            cloudjob.attach(f"{folder}/{job.id}")
        assert cloudjob.jobs(store=folder) == []
    job.wait(timeout_s=LIMIT_S)


def test_a_copy_of_a_job_of_others_runs_no_command_of_theirs_and_packs_no_folder_of_their_choice(
    submit: Submit, folder: str, go: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    go.touch()
    job = submit(folder)
    job.wait(timeout_s=LIMIT_S)
    written = json.loads(open_store(folder).get_bytes(descriptions.key(job.id)))["submission"]
    written["spec"].update(notify={"command": ["touch", "owned"]}, source="/etc")
    change_description(folder, job, {"submission": written})
    project = tmp_path / "mine"
    project.mkdir()
    (project / "train.py").touch()
    monkeypatch.chdir(project)
    monkeypatch.setenv("TOKEN", "hunter2")

    copy = cloudjob.job_spec(copy_of=cloudjob.attach(f"{folder}/{job.id}"), script="train.py")

    assert copy.notify.command == ()
    assert copy.source == str(project)


def test_a_job_of_this_state_folder_is_found_again_when_the_records_are_lost(
    submit: Submit, folder: str, go: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    job = submit(folder)
    monkeypatch.setenv("CLOUDJOB_HOME", str(tmp_path / "ci"))
    (tmp_path / "ci" / "records.db").unlink()

    attached = cloudjob.attach(f"{folder}/{job.id}")
    attached.cancel(is_urgent=True)

    assert attached.wait(timeout_s=LIMIT_S).state == "CANCELLED"
    attached.remove()
    assert not (tmp_path / "ci" / "process" / job.id).exists()


def test_records_of_an_older_version_are_read_and_extended(tmp_path: Path):
    path = tmp_path / "records.db"
    columns = (
        "job TEXT PRIMARY KEY, name TEXT, backend TEXT, handle TEXT, state TEXT, nodes INTEGER, "
        "procs_per_node INTEGER, created_at TEXT, code_uri TEXT, code_digest TEXT, "
        "code_size_bytes INTEGER, code_files INTEGER, store TEXT, final_json TEXT, spec_json TEXT"
    )
    with sqlite3.connect(path) as old:
        old.execute(f"CREATE TABLE jobs ({columns})")
        old.execute(
            "INSERT INTO jobs VALUES ('a-1', 'a', 'process', 'h', '', 1, 1, '', '', '', 0, 0, "
            "'file:///s', '', '{}')"
        )
        old.execute("PRAGMA user_version = 1")
    old.close()

    for _ in range(2):
        with Records(path) as records:
            assert (records.get("a-1").home, records.get("a-1").spec_json) == ("", "{}")

"""A store that a stranger writes to, too: what may be in it, and what no command does for it.

``docs/explanation/security.md`` names these tests beside the promises that they stand behind.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import struct
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

import cloudjob
from cloudjob.backends.modelarts.backend import ModelArtsBackend
from cloudjob.backends.slurm.backend import SlurmBackend
from cloudjob.cli import main
from cloudjob.errors import BackendError, UnreadableObject
from cloudjob.home import records_path
from cloudjob.home.records import JobRecord, Records
from cloudjob.model import attached
from cloudjob.model.job import SECTIONS, JobSpec, masked
from cloudjob.package import claims
from cloudjob.store import open_store
from cloudjob.tracking import descriptions
from jobentry.contract import exits, journal, manifest, packages
from jobentry.contract.paths import JobPaths
from jobentry.contract.stored_log import Chunk
from tests.support.fake_kube_api import NAMESPACE, FakeApi
from tests.support.homes import make_used_home
from tests.support.servers import Server, client_environ

JOB = "docs"
AT = "2026-11-21T10:00:00.000Z"
# The last record of a zip file whose numbers are in the record before it.
_ZIP64 = (0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The project of the reader, who has keys of ModelArts and OBS and a login of Kubernetes."""
    with serving([]) as address:
        yield configure(tmp_path, monkeypatch, f"http://{address}")


def configure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, service: str) -> Path:
    """Make the reader's project, and the configuration of the reader's own services."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text("print(1)\n")
    monkeypatch.chdir(project)
    monkeypatch.setenv("HOME", str(tmp_path / "reader"))
    (tmp_path / "reader").mkdir(exist_ok=True)
    make_used_home(tmp_path / "reader" / "cloudjob")
    monkeypatch.setenv("CLOUDJOB_HOME", str(tmp_path / "reader" / "cloudjob"))
    for name, value in {
        "HUAWEICLOUD_SDK_AK": "reader-access-key",
        "HUAWEICLOUD_SDK_SK": "reader-secret-key",
        "HUAWEICLOUD_SDK_PROJECT_ID": "reader-project",
        "CLOUDJOB_MODELARTS_ENDPOINT": service,
        "HUAWEICLOUD_SDK_IAM_ENDPOINT": service,
        "AWS_ACCESS_KEY_ID": "reader-access-key",
        "AWS_SECRET_ACCESS_KEY": "reader-secret-key",
    }.items():
        monkeypatch.setenv(name, value)
    config = tmp_path / "reader-kubeconfig"
    config.write_text(kubeconfig("reader", service, {"token": "reader-token"}))
    monkeypatch.setenv("KUBECONFIG", str(config))
    return project


def kubeconfig(name: str, server: str, user: dict[str, Any]) -> str:
    """Return a kubeconfig with one context; YAML contains JSON."""
    return json.dumps(
        {
            "current-context": name,
            "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
            "clusters": [{"name": name, "cluster": {"server": server}}],
            "users": [{"name": name, "user": user}],
        }
    )


@pytest.fixture
def evil() -> Iterator[tuple[str, list[str]]]:
    """The address of a stranger's server, and the requests that it has received."""
    seen: list[str] = []
    with serving(seen) as address:
        yield address, seen


@contextmanager
def serving(seen: list[str]) -> Iterator[str]:
    """Serve requests on loopback: record each, and answer that there is nothing."""

    class Handler(BaseHTTPRequestHandler):
        def do_any(self) -> None:
            seen.append(f"{self.command} {self.path} {dict(self.headers)}")
            body = b'{"kind": "Status", "message": "nothing here", "error_code": "x"}'
            self.send_response(404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = do_any  # noqa: N815 (of http.server)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def described(job: str = JOB, **values: Any) -> dict[str, Any]:
    """Return the description of a job as a stranger may write it."""
    backend = values.get("backend", "process")
    return {
        **dict.fromkeys(("code_uri", "code_digest"), ""),
        **dict.fromkeys(("code_size_bytes", "code_files"), 0),
        **dict.fromkeys(("nodes", "procs_per_node"), 1),
        "job": job,
        "name": "train",
        "backend": backend,
        "handle": f"{backend}://local/{job}",
        "created_at": AT,
        "home": "/home/stranger/.local/share/cloudjob",
        "submitted_by": "stranger@elsewhere",
        "submission": {"outputs": {}, "spec": {"script": "train.py"}},
        "version": 1,
        **values,
    }


def put_job(store: Path, job: str = JOB, *, code: int | None = 0, **values: Any) -> None:
    """Write the description of a job and, unless ``code`` is None, the record of its end."""
    (store / "jobs").mkdir(parents=True, exist_ok=True)
    (store / "jobs" / f"{job}.json").write_text(json.dumps(described(job, **values)))
    if code is not None:
        record = store / JobPaths(job).record
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_bytes(
            exits.dump(exits.ExitRecord(job, exits.Outcome(code), started_at=AT, ended_at=AT))
        )


def run_every_command(uri: str) -> None:
    """Run each command that reads a description, whether or not it succeeds."""
    for argv in (
        ["list", "--store", uri],
        ["attach", f"{uri}/{JOB}"],
        ["status", JOB],
        ["wait", JOB],
        ["list"],
        ["logs", JOB],
        ["logs", "--stored", JOB],
        ["events", JOB],
        ["metrics", JOB],
        ["metrics", "--resources", JOB],
        ["outputs", JOB],
        ["outputs", "--to", "results", JOB],
        ["report", JOB, "--to", "report.html"],
        ["diff", JOB, JOB],
        ["refresh", JOB],
        ["cp", "--dry-run", JOB],
        ["cancel", JOB],
        ["cancel", "--all"],
        ["rm", "--orphans"],
        ["store", "gc", "--store", uri],
        ["rm", "--force", JOB],
        ["attach", f"{uri}/{JOB}"],
    ):
        main(argv)


@pytest.mark.parametrize("code", [0, 3])
@pytest.mark.parametrize("where", ["kubeconfig", "in the reader's own files"])
def test_a_description_runs_no_command(
    where: str, code: int, reader: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    """A kubeconfig may name a program that logs in: only the reader's own is used."""
    owned = tmp_path / "owned"
    run = {
        "exec": {
            "apiVersion": "client.authentication.k8s.io/v1",
            "command": "/usr/bin/touch",
            "args": [str(owned)],
            "interactiveMode": "Never",
        }
    }
    theirs = tmp_path / "shared" / "kubeconfig"
    theirs.parent.mkdir()
    theirs.write_text(kubeconfig("c", "https://127.0.0.1:1", run))
    file = quote(str(theirs), safe="") if where == "kubeconfig" else ""
    handle = f"kubernetes://c{'+' if file else ''}{file}/default/volcano/{JOB}"
    store = tmp_path / "store"
    put_job(store, backend="kubernetes", handle=handle, code=code)

    run_every_command(store.as_uri())

    assert not owned.exists()
    put_job(store, backend="slurm", handle=f"slurm://-oProxyCommand=touch%20{owned}/x/{JOB}")
    run_every_command(store.as_uri())
    assert not owned.exists()


def test_credentials_go_to_no_host_that_a_description_names(
    reader: Path, tmp_path: Path, evil: tuple[str, list[str]]
):
    host, seen = evil
    store = tmp_path / "store"
    uris = {
        "A": f"s3://bucket/x?endpoint=http://{host}&addressing=path",
        "B": f"obs://bucket/x?endpoint=http://{host}&addressing=path",
        "C": f"https://{host}/x",
    }
    submission = {"outputs": uris, "spec": {"script": "train.py", "inputs": {"D": uris["A"]}}}
    for handle in (f"modelarts+http://{host}/p/1/{JOB}", f"modelarts://{host}/p/-/{JOB}"):
        put_job(store, backend="modelarts", handle=handle, submission=submission, code=None)
        (job,) = cloudjob.jobs(store=store.as_uri())
        assert job.last_status is not None
        assert job.last_status.state == "UNKNOWN"
        put_job(store, backend="modelarts", handle=handle, submission=submission)
        run_every_command(store.as_uri())

    assert seen == []


@pytest.mark.parametrize("name", ["slurm", "slurm, its folder configured", "docker", "process"])
def test_rm_removes_nothing_that_a_description_names(
    name: str,
    reader: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
):
    bob = tmp_path / "bob"
    folders = [bob / "docs", bob / "docker" / JOB, bob / "process" / JOB, bob / "running"]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "thesis").write_text("ten years")
    (bob / "running" / JOB).write_text(str(bob))
    backend = name.partition(",")[0]
    handle = f"slurm://{bob}/{JOB}" if backend == "slurm" else f"{backend}://local/{JOB}"
    store = tmp_path / "store"
    put_job(store, backend=backend, handle=handle, home=str(bob))
    if name != backend:
        # Even a user who has confirmed the folder loses no folder that is not a job's.
        (reader / "cloudjob.yaml").write_text(f"slurm: {{folder: {bob}}}\n")
        for command in ("squeue", "sacct", "scancel"):
            program = tmp_path / "bin" / command
            program.parent.mkdir(exist_ok=True)
            program.write_text("#!/bin/sh\n")
            program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")

    run_every_command(store.as_uri())

    assert all((folder / "thesis").read_text() == "ten years" for folder in folders)
    assert (bob / "running" / JOB).exists()
    assert (store / JOB).exists() == (name != backend)
    assert ("it is not the folder of a job" in capfd.readouterr().err) == (name != backend)
    # A description cannot pass for a record of the reader's own.
    for home in ("", os.environ["CLOUDJOB_HOME"]):
        put_job(store, backend="process", home=home)
        run_every_command(store.as_uri())
        assert all((folder / "thesis").exists() for folder in folders)


@pytest.mark.parametrize(
    "folder",
    [descriptions.FOLDER, packages.LAYERS, packages.DAMAGED, claims.CLAIMS, claims.DELETIONS],
)
def test_a_job_named_like_a_folder_of_the_store_is_no_job(
    folder: str, reader: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    """Else its removal would delete what all jobs share, such as their packages."""
    store, name = tmp_path / "store", folder.rstrip("/")
    put_job(store, name)
    (store / folder / "shared").write_text("of all jobs")

    assert main(["attach", f"{store.as_uri()}/{name}"]) == 6
    assert main(["rm", "--force", name]) == 6
    assert main(["list", "--store", store.as_uri()]) == 0
    assert f"jobs/{name}.json in file:" in capfd.readouterr().err
    assert (store / folder / "shared").read_text() == "of all jobs"


def test_an_output_of_a_stranger_is_not_read_from_this_machine(
    reader: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    secrets = tmp_path / "reader" / ".ssh"
    secrets.mkdir(parents=True)
    (secrets / "id_rsa").write_text("key")
    store = tmp_path / "store"
    outputs = {"KEYS": secrets.as_uri(), "MODEL": "pvc://results/x"}
    submission = {"outputs": outputs, "spec": {"script": "train.py"}}
    put_job(store, backend="modelarts", handle=f"modelarts://h/p/1/{JOB}", submission=submission)
    job = cloudjob.attach(f"{store.as_uri()}/{JOB}")

    assert list(job.outputs()) == []
    assert dict(job.outputs().refused) == outputs
    assert [*job.outputs("KEYS").refused] == ["KEYS"]
    assert main(["outputs", "--to", "results", JOB]) == 0
    printed = capfd.readouterr().err
    assert "warning: the output KEYS is not read: stranger@elsewhere chose" in printed
    assert "warning: the output MODEL is not read: only pods reach pvc://results/x" in printed
    assert not Path("results").exists()


@pytest.mark.parametrize("args", [["--epochs"], 1e308])
def test_a_description_chooses_no_folder_that_is_searched_for_a_hint(
    args: Any, reader: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    """A hint about a file or a module that a job did not find looks into the job's source."""
    store, private = tmp_path / "store", tmp_path / "private"
    private.mkdir()
    (private / ".cloudjobignore").write_text("plans.py\n")
    (private / "plans.py").touch()
    spec = {"script": "train.py", "args": args, "source": str(private)}
    put_job(store, submission={"outputs": {}, "spec": spec})
    failure = exits.Failure(message="ModuleNotFoundError: No module named 'plans'")
    record = exits.ExitRecord(JOB, exits.Outcome(1, exits.Cause.USER, failure), AT, AT)
    (store / JobPaths(JOB).record).write_bytes(exits.dump(record))

    run_every_command(store.as_uri())
    out, err = capfd.readouterr()
    assert "ModuleNotFoundError" in out
    assert "left out by" not in out + err


def test_an_output_in_the_job_s_own_store_is_read_where_the_reader_has_mounted_it(
    reader: Path, tmp_path: Path
):
    store = tmp_path / "store"
    data, folder = b"weights", store / JobPaths(JOB).outputs / "MODEL"
    uris = {
        "MODEL": f"file:///mnt/theirs/store/{JobPaths(JOB).outputs}/MODEL",
        "BAD": "s3://a@b/x",
        "WORSE": "\ud800://",
    }
    put_job(store, submission={"outputs": uris, "spec": {"script": "train.py"}})
    folder.mkdir(parents=True)
    (folder / "w").write_bytes(data)
    listed = manifest.StoredFile("w", "w", len(data), hashlib.sha256(data).hexdigest(), 0)
    (folder / manifest.FOLDER).mkdir()
    (folder / manifest.key(0)).write_bytes(manifest.dump(manifest.Manifest(JOB, 0, (listed,))))

    outputs = cloudjob.attach(f"{store.as_uri()}/{JOB}").outputs()

    assert [file.name for file in outputs.download("results")] == ["MODEL/w"]
    assert Path("results/MODEL/w").read_bytes() == data
    assert sorted(outputs.refused) == ["BAD", "WORSE"]


def test_the_reader_s_own_jobs_come_before_those_of_strangers(reader: Path, tmp_path: Path):
    """A stranger may choose any name, and any time of submit."""
    store = tmp_path / "store"
    put_job(store, "train-22222222", name="train", created_at="9999-01-01T00:00:00.000Z")
    put_job(store, "train", name="other")
    cloudjob.attach(f"{store.as_uri()}/train-22222222")
    cloudjob.attach(f"{store.as_uri()}/train")
    with Records(records_path(Path(os.environ["CLOUDJOB_HOME"]))) as db:
        record_values = {name: value for name, value in described("train-33333333").items()
               if name in JobRecord._fields}  # fmt: skip
        db.add(JobRecord(**{**record_values, "home": "", "state": "", "store": store.as_uri()}))

        assert db.get("train").job == "train-33333333"
        assert db.get("train-22222222").job == "train-22222222"


def test_a_stranger_s_nodes_get_no_keys_of_the_reader(reader: Path, tmp_path: Path):
    store = tmp_path / "store"
    put_job(store, code=None)

    with pytest.raises(cloudjob.UsageError, match="its nodes would get your keys"):
        cloudjob.attach(f"{store.as_uri()}/{JOB}").refresh_keys()


# -- the reader's own configuration ----------------------------------------------------------------


@pytest.fixture
def kube(tmp_path: Path) -> Iterator[FakeApi]:
    api = FakeApi()
    yield api
    api.close()


def test_a_colleague_s_job_is_found_with_the_reader_s_own_login(
    reader: Path, tmp_path: Path, kube: FakeApi, monkeypatch: pytest.MonkeyPatch
):
    """The colleague's name of the cluster, and the path of the colleague's file, do not matter."""
    monkeypatch.setenv("KUBECONFIG", str(kube.kubeconfig(tmp_path, {"token": "reader"})))
    path = f"/apis/batch.volcano.sh/v1alpha1/namespaces/{NAMESPACE}/jobs/{JOB}"
    labels = {"cloudjob.job": JOB, "app.kubernetes.io/managed-by": "cloudjob"}
    kube.objects[path] = {
        "metadata": {"name": JOB, "namespace": NAMESPACE, "uid": "1", "labels": labels},
        "spec": {"tasks": []},
        "status": {"state": {"phase": "Running"}},
    }
    store = tmp_path / "store"
    handle = f"kubernetes://alice@prod+%2Fhome%2Falice%2Fconfig/{NAMESPACE}/volcano/{JOB}"
    put_job(store, backend="kubernetes", handle=handle, code=None)

    (listed,) = cloudjob.jobs(store=store.as_uri())

    assert listed.last_status is not None
    assert listed.last_status.state == "RUNNING"
    job = cloudjob.attach(f"{store.as_uri()}/{JOB}")
    assert "alice" not in job.handle
    # A job of this name that cloudjob has not created is not touched.
    kube.objects[path]["metadata"]["labels"] = {}
    for act in (job.cancel, job.remove):
        with pytest.raises(BackendError, match="it is no job of cloudjob"):
            act()
    assert path in kube.objects


def test_a_handle_that_names_another_place_than_the_configuration_is_refused(
    reader: Path, tmp_path: Path
):
    """The hint names the key with which the user confirms the place."""
    home = tmp_path / "home"
    slurm = SlurmBackend(home, {"host": "login1", "folder": "/shared/jobs"})
    arts = ModelArtsBackend(home, {"endpoint": "https://modelarts.example"}, user_home=tmp_path)

    assert slurm.own_handle(f"slurm://login1/shared/jobs/{JOB}", JOB) == (
        f"slurm://login1/shared/jobs/{JOB}"
    )
    # The id could be that of another job, so the job is found by its name.
    assert arts.own_handle(f"modelarts://modelarts.example/reader-project/77/{JOB}", JOB) == (
        f"modelarts://modelarts.example/reader-project/-/{JOB}"
    )
    for backend, handle, key in (
        (slurm, f"slurm://evil/shared/jobs/{JOB}", "slurm.host"),
        (slurm, f"slurm:///shared/jobs/{JOB}", "slurm.host"),
        (slurm, f"slurm://login1/home/bob/{JOB}", "slurm.folder"),
        (slurm, f"slurm://login1/shared/jobs/../../etc/{JOB}", "slurm.folder"),
        (arts, f"modelarts+http://modelarts.example/reader-project/1/{JOB}", "modelarts.endpoint"),
        (arts, f"modelarts://modelarts.example/p/1/{JOB}", "modelarts.project_id"),
    ):
        with pytest.raises(BackendError, match="its description names") as caught:
            backend.own_handle(handle, JOB)
        assert key in caught.value.hint


# -- what a copy takes -----------------------------------------------------------------------------


HARMLESS = {
    "": {"script", "args", "name", "nodes", "procs_per_node", "backend", "launcher", "outputs",
         "output_sync_s", "metrics", "detect_metrics", "flavor", "timeout_min",
         "start_timeout_min", "retries", "grace_s", "hardware_check", "strict",
         "preflight"},
    "process": {"gpus"},
    "docker": {"cpus", "memory_gib", "shm_gib", "gpus"},
    "kubernetes": {"cpus", "memory_gib", "shm_gib", "gpus"},
    "slurm": {"time_min", "cpus_per_rank", "memory_gib", "gpus", "exclusive", "warn_s"},
    "mindspore": {"device_target", "parallel_mode", "search_mode"},
    "network": {"stall_min"},
    "hang": {"action", "after_min", "scale"},
    "retry": {"on", "backoff_s"},
}  # fmt: skip


def full_description() -> dict[str, Any]:
    """Return a description in which a stranger has set every key that has a text or a mapping."""
    spec = masked(
        JobSpec(script="train.py", args=("--lr", "0.1"), nodes=3, outputs={"M": "s3://e/x"})
    )
    for name, model in SECTIONS.items():
        items = model().items()
        spec[name] = {k: dict(v) if isinstance(v, Mapping) else v for k, v in items}
    spec["process"] |= {"python": "/home/stranger/python", "gpus": 2, "isolation": "none"}
    spec["kubernetes"] |= {"kubeconfig": "/x", "context": "c", "pod": {"hostPID": True}}
    spec["slurm"] |= {"host": "evil", "setup": ["touch owned"], "sbatch": ["--x"], "python": "/x"}
    spec["modelarts"] |= {"endpoint": "http://evil", "body": {"x": 1}}
    spec["notify"] |= {"command": ["touch", "owned"]}
    spec["s3"] |= {"endpoint": "http://evil", "profile": "admin"}
    return spec | {
        "env": {"LD_PRELOAD": "/x.so"},
        "secrets": {"HUAWEICLOUD_SDK_SK": "***"},
        "inputs": {"D": "file:///home/reader"},
        "image": "evil/image",
        "source": "/etc",
        "links": "follow",
        "store": "s3://evil/x?endpoint=http://evil",
    }


def test_a_copy_takes_only_what_the_table_names():
    taken, left_out, _ = attached.split(full_description())

    assert taken["script"] == "train.py"
    assert (taken["args"], taken["nodes"], taken["outputs"]) == (["--lr", "0.1"], 3, {"M": ""})
    assert taken["process"] == {"gpus": 2}
    keys_known = {f"{section}.{key}" for section, keys in HARMLESS.items() for key in keys}
    flat = {f"{key}.{name}" if key in SECTIONS else f".{key}" for key, value in taken.items()
            for name in (value if key in SECTIONS else [""])}  # fmt: skip
    assert flat <= keys_known
    assert set(left_out) == {
        "env", "secrets", "inputs", "image", "source", "links", "store", "outputs.M",
        "process.python", "process.isolation", "kubernetes.kubeconfig", "kubernetes.context",
        "kubernetes.pod", "slurm.host", "slurm.setup", "slurm.sbatch", "slurm.python",
        "modelarts.endpoint", "modelarts.body", "notify.command", "s3.endpoint", "s3.profile",
    }  # fmt: skip


def test_a_key_is_harmless_only_if_this_table_has_it():
    """Whoever declares a key as harmless lets a stranger set it, so that needs a second look."""
    models = {"": JobSpec, **SECTIONS}
    declared = {
        section: {name for name, key in model.KEYS.items() if key.is_harmless}
        for section, model in models.items()
    }

    assert {section: keys for section, keys in declared.items() if keys} == HARMLESS


@pytest.mark.parametrize(
    "values",
    [
        {"script": "/bin/sh"},
        {"script": "-c"},
        {"script": "../../bin/sh"},
        {"script": ["train.py"]},
        {"launcher": "command"},
        {"launcher": ["command"]},
        {"args": ["***"]},
    ],
)
def test_a_copy_takes_no_program_and_no_masked_argument(values: dict[str, Any]):
    taken, left_out, _ = attached.split(values)

    assert (dict(taken), dict(left_out)) == ({}, values)


def test_a_flag_that_an_earlier_version_described_as_text_is_at_its_default():
    described = {"strict": "false", "fail_fast": "false", "modelarts": {"preemptible": "true"}}
    taken, left_out, chosen = attached.split(described)

    assert (taken["strict"], chosen, "fail_fast" in left_out) == ("false", [], False)
    assert left_out == {"modelarts.preemptible": "true"}


def test_cp_dry_run_shows_what_is_left_out(
    reader: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    store = tmp_path / "store"
    spec = full_description()
    spec["process"]["gpus"] = 0
    put_job(store, submission={"outputs": {}, "spec": spec})
    job = cloudjob.attach(f"{store.as_uri()}/{JOB}")

    assert main(["cp", "--dry-run", JOB]) == 0
    printed = capfd.readouterr().err
    assert f"{JOB} was submitted by stranger@elsewhere: the copy takes args, name, nodes" in printed
    assert "left out: process.python: /home/stranger/python\n" in printed
    assert "left out: env: {'LD_PRELOAD': '/x.so'}\n" in printed
    # The reader's own settings count for what is left out.
    Path("cloudjob.yaml").write_text("nodes: 9\nenv: {MINE: '1'}\nslurm: {host: login1}\n")
    spec = cloudjob.job_spec(copy_of=job)
    assert (spec.nodes, dict(spec.env), spec.slurm.host) == (3, {"MINE": "1"}, "login1")
    assert (spec.process.python, spec.image, spec.notify.command) == ("", "", ())
    assert spec.source == str(reader)
    assert not Path("owned").exists()


# -- limits of size and time -----------------------------------------------------------------------


def plant(kind: str, path: Path) -> Callable[[], None]:
    """Put something that is no object at a path; return a function that frees what it needs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "30 GB":
        path.touch()
        os.truncate(path, 30 * 10**9)
    elif kind == "a socket":
        listener = socket.socket(socket.AF_UNIX)
        folder = os.open(path.parent, os.O_RDONLY)
        # The path of a socket is short.
        listener.bind(f"/proc/self/fd/{folder}/{path.name}")
        os.close(folder)
        return listener.close
    elif kind == "nested":
        path.write_text('{"submission":' * 100_000)
    elif kind == "numbers":
        path.write_text(f'{{"job": {"9" * 1_000_000}}}')
    else:
        path.symlink_to({"a device": "/dev/zero", "a loop": path.name, "a folder": "/"}[kind])
    return lambda: None


KINDS = (
    "a pipe", "30 GB", "a device", "a loop", "a folder", "nested", "numbers",
    *(["a socket"] if sys.platform == "linux" else []),
)  # fmt: skip


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_entry_does_not_hide_the_others(
    kind: str, reader: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    store = tmp_path / "store"
    put_job(store, "good-22222222")
    free = plant(kind, store / "jobs" / "bad-33333333.json")
    (store / "jobs" / "root").symlink_to("/")

    assert main(["list", "--store", store.as_uri()]) == 0
    out, err = capfd.readouterr()
    assert "good-22222222" in out
    assert [line for line in err.splitlines() if line.startswith("warning: ")] == err.splitlines()
    assert "bad-33333333.json" in err
    assert len(err.splitlines()) == 1
    assert len(err) < 1000
    with pytest.raises(cloudjob.StoreError, match="bad-33333333"):
        cloudjob.attach(f"{store.as_uri()}/bad-33333333")
    free()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_record_or_log_does_not_hang_a_command(kind: str, reader: Path, tmp_path: Path):
    store = tmp_path / "store"
    put_job(store, "good-22222222")
    put_job(store, code=None)
    folder = store / JobPaths(JOB).records
    log, diary = Chunk(0, 1, 0).name, Path(JobPaths(JOB).journal(0)).name
    freed = [plant(kind, folder / name) for name in ("exit.json", log, diary)]
    freed.append(plant(kind, store / JOB / "code.json"))

    states = {job.id: job.last_status for job in cloudjob.jobs(store=store.as_uri())}
    assert {name: status and status.state for name, status in states.items()} == {
        "good-22222222": "SUCCEEDED",
        JOB: "UNKNOWN",
    }
    job = cloudjob.attach(f"{store.as_uri()}/{JOB}")
    if kind in ("30 GB", "nested", "numbers"):
        list(job.logs(is_stored=True))
    else:
        # What is no file is no stored log.
        with pytest.raises(cloudjob.UsageError, match="its nodes have stored none"):
            list(job.logs(is_stored=True))
    assert job.status().state == "UNKNOWN"
    # Its head writes one record, last, so no other will come.
    with pytest.raises(cloudjob.StoreError, match=f"waiting for {JOB}: .*record"):
        job.wait(timeout_s=60)
    for command in (["status", JOB], ["logs", JOB], ["metrics", JOB], ["report", JOB]):
        main(command)
    for free in freed:
        free()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_entry_stops_neither_a_submit_nor_store_gc(kind: str, reader: Path, tmp_path: Path):
    store = tmp_path / "store"
    names = ("sweeps/x.json", "claims/x.json", f"{JOB}/code.json", "jobs/x.json")
    planted = ("nested", "numbers")
    freed = [plant(kind, store / name) for name in names if kind not in planted or "jobs" in name]

    job = cloudjob.submit("train.py", launcher="python", store=store.as_uri())
    assert job.wait(timeout_s=100).state == "SUCCEEDED"
    assert main(["store", "gc", "--store", store.as_uri()]) == 0
    assert main(["list", "--store", store.as_uri()]) == 0
    for free in freed:
        free()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("record/exit.json", kind) for kind in ("a pipe", "30 GB", "numbers", "garbage")),
        *((f"record/{Chunk(0, 1, 0).name}", kind) for kind in ("a pipe", "30 GB")),
        *((f"outputs/MODEL/{manifest.key(0)}", kind) for kind in ("a pipe", "30 GB", "garbage")),
    ],
)
def test_what_is_no_object_is_named_by_each_reader(
    name: str, kind: str, reader: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    store = tmp_path / "store"
    put_outputs(store, "MODEL")
    if "outputs" in name:
        put_output(store, "MODEL").unlink()
    command = ["outputs"] if "outputs" in name else ["logs", "--stored"]
    command = ["status"] if "exit" in name else command
    cloudjob.attach(f"{store.as_uri()}/{JOB}")
    if kind == "garbage":
        (store / JOB / name).parent.mkdir(parents=True, exist_ok=True)
        (store / JOB / name).write_text("garbage")
    else:
        plant(kind, store / JOB / name)
    capfd.readouterr()

    main([*command, JOB])
    err = capfd.readouterr().err
    assert len([line for line in err.splitlines() if Path(name).name in line]) == 1, err


@pytest.mark.parametrize("kind", ["garbage", "nested", "30 GB", "a pipe"])
def test_a_note_that_cannot_be_read_stops_no_submit(
    kind: str, reader: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    store = tmp_path / "store"
    for name in ("claims/x.json", "sweeps/x.json"):
        plant("numbers" if kind == "garbage" else kind, store / name)

    assert main(["submit", "--store", store.as_uri(), "--launcher", "python", "train.py"]) == 0
    err = capfd.readouterr().err.splitlines()
    assert len([line for line in err if "sweeps/x.json" in line]) == 1


@pytest.mark.timeout(120)
@pytest.mark.parametrize("is_large", [False, True], ids=["small", "large"])
def test_an_output_ends_at_the_size_in_its_manifest(
    is_large: bool, reader: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    """An object that has grown to 30 GB fills no disk, and hides no other."""
    store = tmp_path / "store"
    put_outputs(store, "MODEL", "OTHER")
    put_output(store, "OTHER")
    path = put_output(store, "MODEL")
    if is_large:
        listed = manifest.StoredFile("x", "x", 9_000_000, "0" * 64, 10**18)
        path.write_bytes(manifest.dump(manifest.Manifest(JOB, 0, (listed,))))
    plant("30 GB", path.parent.parent / "x")
    job = cloudjob.attach(f"{store.as_uri()}/{JOB}")

    assert main(["outputs", "--to", "results", JOB]) == 4
    assert "MODEL/x" in capfd.readouterr().err
    assert [str(each) for each in Path("results").rglob("*x")] == ["results/OTHER/x"]
    each = next(file for file in job.outputs() if file.name == "MODEL/x")
    with pytest.raises(cloudjob.StoreError, match="bytes"):
        for _ in job.outputs().read(each):
            pass


def put_output(store: Path, name: str, more: dict[str, Any] | None = None) -> Path:
    """Store an output with the file x as a node does; return the path of its manifest."""
    folder = store / JobPaths(JOB).outputs / name
    (folder / manifest.FOLDER).mkdir(parents=True)
    (folder / "x").write_bytes(b"x")
    digest = hashlib.sha256(b"x").hexdigest()
    listed = manifest.Manifest(JOB, 0, (manifest.StoredFile("x", "x", 1, digest, 10**18),))
    path = folder / manifest.key(0)
    path.write_text(json.dumps({**json.loads(manifest.dump(listed)), **(more or {})}))
    return path


def put_outputs(store: Path, *names: str) -> None:
    """Write the description of a job with these outputs in its own store."""
    folder = JobPaths(JOB).outputs
    uris = {name: f"file:///elsewhere/{folder}/{name}" for name in names}
    put_job(store, submission={"outputs": uris, "spec": {"script": "train.py"}})


@pytest.mark.parametrize("kind", ["garbage", "30 GB"])
def test_a_bad_manifest_hides_no_other_output(
    kind: str, reader: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    store = tmp_path / "store"
    put_outputs(store, "BAD", "GOOD")
    put_output(store, "GOOD")
    path = put_output(store, "BAD")
    if kind == "garbage":
        path.write_text("garbage")
    else:
        plant(kind, path)
    job = cloudjob.attach(f"{store.as_uri()}/{JOB}")
    capfd.readouterr()

    assert main(["outputs", JOB]) == 0
    out, err = capfd.readouterr()
    assert out == "GOOD/x\n"
    assert "BAD" in err
    assert main(["outputs", "--to", "results", JOB]) == 4
    assert Path("results/GOOD/x").read_bytes() == b"x"
    assert job.event_metrics() == []
    assert main(["rm", "--force", JOB]) == 0
    assert not (store / JOB).exists()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "more",
    [
        {"links": {str(number): "/" for number in range(200_000)}},
        {"left_out": {str(number): "special" for number in range(200_000)}},
        {"left_out": {"new\nline\x1b[2J": "special", "list": ["special"]}},
        {"links": {"x": "a/" * 2_000_000 + "a"}},
    ],
    ids=["links", "notes", "lines", "a long link"],
)
def test_a_manifest_fills_neither_the_screen_nor_the_memory(
    more: dict[str, Any], reader: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    store = tmp_path / "store"
    put_outputs(store, "MODEL")
    put_output(store, "MODEL", more)
    cloudjob.attach(f"{store.as_uri()}/{JOB}")
    capfd.readouterr()

    assert main(["outputs", JOB]) == 0
    out, err = capfd.readouterr()
    assert out == "MODEL/x\n"
    assert 0 < len(err) < 20_000
    assert all(line.startswith(("MODEL", "reading the output")) for line in err.splitlines())
    assert main(["outputs", "--to", "results", JOB]) == 0


def test_a_manifest_opens_no_folder_of_the_reader(reader: Path, tmp_path: Path):
    store = tmp_path / "store"
    put_outputs(store, "MODEL")
    put_output(store, "MODEL", {"folders": {"own": 0o777, "new": 0}, "modes": {"x": 0o777}})
    own_folder = reader / "results" / "MODEL" / "own"
    own_folder.mkdir(parents=True)
    own_folder.chmod(0o700)

    job = cloudjob.attach(f"{store.as_uri()}/{JOB}")
    for _ in range(2):
        job.outputs().download("results")
    modes = {path.name: path.stat().st_mode & 0o777 for path in own_folder.parent.iterdir()}
    assert modes == {"own": 0o700, "new": 0o700, "x": 0o775}


def test_a_note_of_a_writer_with_an_endless_number_is_refused(reader: Path, tmp_path: Path):
    (tmp_path / "store" / "claims").mkdir(parents=True)
    note = f'{{"written_s": 1{"0" * 400}, "layers": []}}'
    (tmp_path / "store" / "claims" / "x.json").write_text(note)

    assert main(["store", "gc", "--store", (tmp_path / "store").as_uri()]) == 4


def test_a_record_fills_no_screen(reader: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    store = tmp_path / "store"
    put_job(store)
    failure = exits.Failure(message="x" * 3_000_000, last_lines=("y",) * 100_000)
    record = exits.ExitRecord(JOB, exits.Outcome(3, exits.Cause.USER, failure), AT, AT)
    (store / JobPaths(JOB).record).write_bytes(exits.dump(record))

    assert main(["list", "--store", store.as_uri()]) == 0
    assert len(capfd.readouterr().out) < 20_000


def test_compressed_zeros_do_not_fill_the_memory(reader: Path, tmp_path: Path):
    """A log and a journal of 4 MB may stand for gigabytes."""
    store = tmp_path / "store"
    put_job(store)
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    zeros = b"".join(packer.compress(bytes(1 << 20)) for _ in range(300)) + packer.flush()
    folder = store / JobPaths(JOB).records
    (folder / Chunk(0, 1, 0).name).write_bytes(zeros)
    (folder / Path(JobPaths(JOB).journal(0)).name).write_bytes(zeros)
    job = cloudjob.attach(f"{store.as_uri()}/{JOB}")

    assert max(len(line.data) for line in job.logs(is_stored=True)) <= 70 << 20
    assert len(journal.unpack(zeros)) == 0


def put_sparse_layers(store: Path, count: int, size_bytes: int) -> None:
    """Put layers into a package whose ends say that all before is the directory of a zip file."""
    put_job(store)
    digests = [f"{number:064x}" for number in range(count)]
    layers = tuple(packages.Layer(f"layers/{each}", each, size_bytes) for each in digests)
    descriptor = packages.Descriptor(f"sha256:{'a' * 64}", 1, 1, layers)
    (store / "layers").mkdir()
    (store / JOB / "code.json").write_bytes(packages.dump_descriptor(descriptor))
    begin = size_bytes - 98
    end = struct.pack("<4sLQL4s4H2LH", b"PK\6\7", 0, begin, 1, b"PK\5\6", *_ZIP64)
    for layer in layers:
        with (store / layer.key).open("wb") as file:
            file.seek(begin)
            head = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, 1, 1, begin, 0)
            file.write(head + end)


@pytest.mark.parametrize("size_bytes", [1 << 29, 30 << 30])
def test_a_layer_of_any_size_does_not_fill_the_memory(
    size_bytes: int, reader: Path, tmp_path: Path
):
    put_sparse_layers(tmp_path / "store", 1, size_bytes)
    cloudjob.attach(f"{(tmp_path / 'store').as_uri()}/{JOB}")

    with pytest.raises(cloudjob.StoreError, match=r"directory.*too long|MemoryError"):
        cloudjob.attach(JOB).code_files()


READ_LAYERS = f"""\
import resource
import cloudjob
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
try:
    cloudjob.attach({JOB!r}).code_files()
except cloudjob.StoreError as error:
    print(error)
"""


def test_many_large_layers_do_not_fill_the_memory_together(reader: Path, tmp_path: Path):
    put_sparse_layers(tmp_path / "store", 8, 128 << 20)
    cloudjob.attach(f"{(tmp_path / 'store').as_uri()}/{JOB}")

    done = subprocess.run(
        [sys.executable, "-c", READ_LAYERS], capture_output=True, text=True, check=False
    )

    assert "not a valid zip file" in done.stdout, done
    assert "MemoryError" not in done.stdout


def test_an_object_in_a_bucket_has_a_limit_of_size(
    reader: Path,
    tmp_path: Path,
    seaweedfs: Server,
    new_bucket: Callable[[Server], str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
):
    for name, value in client_environ(seaweedfs.endpoint).items():
        monkeypatch.setenv(name, value)
    uri = f"s3://{new_bucket(seaweedfs)}/jobs?endpoint={seaweedfs.endpoint}&addressing=path"
    store = open_store(uri)
    store.put_bytes(json.dumps(described("good-22222222")).encode(), "jobs/good-22222222.json")
    store.put_bytes(b" " * (5 << 20), "jobs/bad-33333333.json")

    with pytest.raises(UnreadableObject, match="larger than 4,194,304 bytes"):
        store.get_bytes("jobs/bad-33333333.json", limit_bytes=4 << 20)
    assert main(["list", "--store", uri]) == 0
    out, err = capfd.readouterr()
    assert "good-22222222" in out
    assert "bad-33333333.json in s3://" in err
    assert "larger than" in err


@pytest.mark.timeout(120)
def test_a_service_that_sends_a_byte_now_and_then_does_not_hang_a_read(
    reader: Path, monkeypatch: pytest.MonkeyPatch
):
    stop = threading.Event()

    class Trickle(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "1000000")
            self.end_headers()
            while not stop.wait(0.05):
                self.wfile.write(b"x")
                self.wfile.flush()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    from cloudjob.store import s3

    server = ThreadingHTTPServer(("127.0.0.1", 0), Trickle)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(s3, "_READ_S", 0.5)
    uri = f"s3://bucket/x?endpoint=http://127.0.0.1:{server.server_port}&addressing=path"
    store = open_store(uri, retry_s=0.1)

    with pytest.raises(cloudjob.StoreError, match="not complete after"):
        store.get_bytes("jobs/a.json", limit_bytes=1000)
    with pytest.raises(cloudjob.StoreError, match="not complete after"):
        store.get_range("jobs/a.json", 0, 1000)
    stop.set()
    server.shutdown()
    server.server_close()


def test_a_long_submission_is_read_again_when_it_is_needed(reader: Path, tmp_path: Path):
    """A list keeps only short ones, so that many long ones do not fill the memory."""
    store = tmp_path / "store"
    spec = {"script": "train.py", "args": ["x" * 100_000]}
    put_job(store, submission={"outputs": {}, "spec": spec})
    (record,) = descriptions.read_all(open_store(store.as_uri()), store.as_uri()).records
    (job,) = cloudjob.jobs(store=store.as_uri())

    assert record.spec_json == ""
    assert job.spec()["args"] == spec["args"]


def test_each_test_that_the_security_page_names_exists():
    root = Path(__file__).parents[3]
    page = (root / "docs" / "explanation" / "security.md").read_text()
    named = re.findall(r"`(tests/[a-z_/]+\.py)::(test_\w+)`", page)

    assert len(named) > 30
    for file, test in named:
        assert f"def {test}(" in (root / file).read_text(), (file, test)

"""The laptop half on a simulated macOS: Python on Linux without the functions that macOS lacks.

Each command runs with ``tests/support/macos`` in ``PYTHONPATH``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support import emulator, macos, operators
from tests.support.fake_kube_api import PODS, FakeApi

ROOT = Path(__file__).parents[2]
LIMIT_S = 180.0
TRAIN = """
import os, sys, time
print("arguments", sys.argv[1:], flush=True)
with open(os.path.join(os.environ["MODEL"], "weights"), "w") as file:
    file.write("trained")
while "--forever" in sys.argv:
    time.sleep(0.1)
"""
API = """
import cloudjob
job = cloudjob.submit("train.py", ["--lr", 0.1], backend="modelarts", launcher="python",
                      outputs={"MODEL": ""})
assert job.wait(check=True).state == "SUCCEEDED"
print([line.text for line in job.logs() if line.rank == 0])
print([file.name for file in job.outputs("MODEL")])
"""


@dataclass
class Mac:
    """A laptop with a project and its own state folder."""

    folder: Path
    environ: dict[str, str]

    def run(
        self, *arguments: str, code: int | None = 0, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, *arguments],
            env=self.environ,
            cwd=cwd or self.folder / "project",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert code is None or done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def cloudjob(self, *arguments: str, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        return self.run("-m", "cloudjob", *arguments, code=code)

    @property
    def state(self) -> Path:
        return self.folder / "Library" / "Application Support" / "cloudjob"


@pytest.fixture
def mac() -> Iterator[Mac]:
    """A laptop without an emulator; its home folder has a short path, as on a real one."""
    folder = Path(tempfile.mkdtemp(prefix="mac-", dir="/var/tmp"))
    environ = {
        **macos.environ(),
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "DOCKER_HOST": "unix:///nowhere/docker.sock",
    }
    (folder / "project").mkdir()
    (folder / "project" / "train.py").write_text(TRAIN)
    yield Mac(folder, environ)
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def service() -> Iterator[emulator.Api]:
    """An emulator on Linux, without the simulation."""
    with emulator.running() as api:
        yield api


@pytest.fixture
def submitter(mac: Mac, service: emulator.Api) -> Mac:
    """A laptop that has the emulator's address."""
    (mac.state / "emulator").mkdir(parents=True, mode=0o700)
    mac.state.chmod(0o700)
    shutil.copy2(service.home / "emulator" / "address.json", mac.state / "emulator")
    return mac


def test_the_simulated_macos_lacks_the_functions_of_linux(mac: Mac):
    code = (
        "import os, sys, select, selectors\n"
        "assert sys.platform == 'darwin'\n"
        "assert not hasattr(os, 'sched_getaffinity') and not hasattr(select, 'epoll')\n"
        "try: open('/proc/self/stat')\n"
        "except FileNotFoundError: print('none')\n"
    )
    assert mac.run("-c", code).stdout == "none\n"


def test_a_job_is_submitted_to_modelarts_followed_and_downloaded(submitter: Mac):
    submit = ("submit", "--backend", "modelarts", "--launcher", "python", "--output", "MODEL=")
    done = submitter.cloudjob(*submit, "train.py", "--epochs", "3")
    [job] = re.findall(r"job (\S+) started", done.stderr)

    assert done.stdout == "[0] arguments ['--epochs', '3']\n"
    assert submitter.state.joinpath("records.db").exists()
    status = json.loads(submitter.cloudjob("status", job, "--json").stdout)
    assert (status["state"], status["backend"]) == ("SUCCEEDED", "modelarts")
    assert submitter.cloudjob("logs", job).stdout == done.stdout
    [listed] = json.loads(submitter.cloudjob("list", "--json").stdout)
    assert listed["job"] == job
    submitter.cloudjob("outputs", job, "--to", "results")
    assert (submitter.folder / "project/results/MODEL/weights").read_text() == "trained"
    submitter.cloudjob("report", job)
    submitter.cloudjob("top", job, "--once")

    handle = submitter.cloudjob(*submit, "--detach", "train.py", "--forever").stdout.strip()
    submitter.cloudjob("cancel", handle)
    cancelled = submitter.cloudjob("wait", handle, "--json", code=None)
    assert json.loads(cancelled.stdout)["state"] == "CANCELLED"
    submitter.cloudjob("rm", "--force", handle)


def test_the_python_api_submits_to_modelarts(submitter: Mac):
    done = submitter.run("-c", API)

    assert done.stdout == "[\"arguments ['--lr', '0.1']\"]\n['MODEL/weights']\n"


def test_the_console_shows_the_jobs(mac: Mac):
    command = [sys.executable, "-m", "cloudjob", "console", "--no-open"]
    process = subprocess.Popen(command, env=mac.environ, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        lines = iter(process.stderr.readline, "")
        url = next(filter(None, (re.search(r"http://\S+", line) for line in lines)))
        browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        browser.open(url.group(), timeout=180).close()
        with browser.open(url.group().partition("/login")[0], timeout=180) as page:
            assert b"<title>" in page.read()
    finally:
        process.terminate()
        process.communicate(timeout=180)


UNSUPPORTED_COMMANDS = [
    (("submit", "train.py"), "running nodes as processes of this machine: they need Linux"),
    (("submit", "--dry-run", "train.py"), "they need Linux"),
    (("submit", "--backend", "docker", "train.py"), "there is no engine"),
    (("emulator", "up"), "there is no engine"),
    (("emulator", "up", "--settings", "process.yaml"), "they need Linux"),
]


@pytest.mark.parametrize(("arguments", "message"), UNSUPPORTED_COMMANDS)
def test_commands_that_need_linux_or_an_engine_fail_with_one_line_and_a_hint(
    mac: Mac, arguments: tuple[str, ...], message: str
):
    (mac.folder / "project" / "process.yaml").write_text("engine: process\n")

    lines = mac.cloudjob(*arguments, code=5).stderr.splitlines()

    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert lines[-1].startswith("hint: ")
    assert re.search("docker|Docker", lines[-1])


def test_a_dry_run_plans_the_nodes(mac: Mac):
    """To plan the nodes, the laptop imports the node half."""
    submit = ("submit", "--dry-run", "--json", "--backend", "slurm", "--launcher", "python")
    planned = json.loads(mac.cloudjob(*submit, "-n", "2", "train.py").stdout)

    assert len(planned["plans"]) == 2
    entry = str(ROOT / "cloudjob" / "jobentry.pyz")
    mac.environ.update(CLOUDJOB_JOB="train-1", CLOUDJOB_LAUNCHER="python", VC_TASK_INDEX="0")
    done = mac.run(entry, "--dry-run", "--json", "train.py")
    assert json.loads(done.stdout)["role"] == "head"


LOCKS = """
import os, subprocess, sys
from pathlib import Path
from typing import Any
from cloudjob.home import locks, scratch_folders
from tests.unit.cloudjob.home.test_locks import WATCH
path, free = Path("lock"), Path("free")
free.touch()
command = [sys.executable, "-c", WATCH, path, free, "500"]
watchers = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(3)]
for _ in range(20):
    other = locks.acquire(free)
    assert other is not None
    os.close(other)
for watcher in watchers:
    watcher.communicate()
taken = locks.acquire_new(path, b"")
assert locks.is_held(path) and locks.acquire(path) is None
watchers = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(3)]
assert [watcher.communicate()[0].strip() for watcher in watchers] == [b"0"] * 3
child = subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, pass_fds=(taken,))
os.close(taken)
assert locks.is_held(path)
child.communicate()
assert not locks.is_held(path)
with locks.hold(path), scratch_folders.new(Path("folder")) as scratch:
    assert locks.is_held(path) and scratch_folders.is_in_use(Path("folder"), scratch.name)
"""


def test_locks_are_held_shared_and_tested_without_linux(mac: Mac):
    mac.environ["PYTHONPATH"] += f":{ROOT}"
    mac.run("-c", LOCKS)


STORE = """
import os, sys
from pathlib import Path
from typing import Any
from cloudjob.emulator.obs.seaweedfs import SeaweedFS
Path("state").mkdir(exist_ok=True)
store = SeaweedFS(Path("state/obs").absolute(), "data")
store.start()
print(store._process.pid, flush=True)
if sys.argv[1:]:
    os.kill(os.getpid(), 9)
store.stop()
"""


def test_the_next_emulator_ends_the_store_of_one_that_was_killed(mac: Mac):
    killed = int(mac.run("-c", STORE, "kill", code=-9).stdout)
    assert is_running(killed)

    ended = int(mac.run("-c", STORE).stdout)

    assert not is_running(killed)
    assert not is_running(ended)


def is_running(process: int) -> bool:
    command = ["ps", "-o", "stat=", "-p", str(process)]
    state = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return bool(state) and not state.startswith("Z")


@pytest.fixture
def api() -> Iterator[FakeApi]:
    """An API server with Volcano that grants all permissions and runs jobs at once."""
    fake = FakeApi()
    fake.objects["/version"] = {"gitVersion": "v1.30"}
    fake.objects["/apis/batch.volcano.sh/v1alpha1"] = {"resources": [{"name": "jobs"}]}
    queue = "/apis/scheduling.volcano.sh/v1beta1/queues/default"
    fake.objects[queue] = {"status": {"state": "Open"}}

    def change(path: str, body: dict[str, Any]) -> None:
        if "accessreviews" in path:
            body["status"] = {"allowed": True}
        elif "/jobs/" in path and "status" not in body:
            at = "2026-11-21T10:00:00Z"
            body["status"] = {"state": {"phase": "Running", "lastTransitionTime": at}}
            body["metadata"] |= {"uid": "job", "creationTimestamp": at}
            for pod in operators.made_of(body).pods:
                name = pod["metadata"]["name"]
                pod["metadata"] |= {"uid": name, "creationTimestamp": at}
                pod["spec"]["nodeName"] = "machine"
                state = {"running": {"startedAt": at}}
                containers = [{"name": "cloudjob", "state": state}]
                pod["status"] = {"phase": "Running", "containerStatuses": containers}
                fake.objects[f"{PODS}/{name}"] = pod
                fake.logs[name] = b"[0] epoch 1\n"

    fake.on_change = change
    yield fake
    fake.close()


def test_a_job_is_submitted_to_kubernetes_and_shown(mac: Mac, api: FakeApi):
    mac.environ["KUBECONFIG"] = str(api.kubeconfig(mac.folder))
    store = mac.folder / "store"
    store.mkdir()
    volume = {"name": "store", "hostPath": {"path": str(store)}, "mountPath": str(store)}
    options = {"engine": "volcano", "volumes": [volume]}
    text = {"backend": "kubernetes", "store": f"file://{store}", "image": "base:1"}
    config = mac.folder / "project" / "job.yaml"
    config.write_text(json.dumps({**text, "kubernetes": options}))
    submit = ("submit", "--config", "job.yaml", "--launcher", "mpirun")

    handle = mac.cloudjob(*submit, "--detach", "train.py").stdout.strip()

    assert handle.startswith("kubernetes://")
    assert json.loads(mac.cloudjob("status", handle, "--json").stdout)["state"] == "RUNNING"
    assert "RUNNING" in mac.cloudjob("list").stdout
    assert mac.cloudjob("logs", handle).stdout == "[0] epoch 1\n"

"""Every fault at every stage: the job ends in time with the right status, and leaves nothing.

Each case holds a job at a stage, injects a fault, and then checks how the job ended, what is left,
and whether the next submit works. No case relies on timing: a program or a request blocks the stage
until the test releases it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support import folders
from tests.support.gates import Gate
from tests.support.polling import poll
from tests.support.servers import HANG, INTERNAL, Fault, FaultProxy, Server

# Method and targets of the requests that hold a job at a stage; each node has its own output.
GATES = {
    "uploading": ("PUT", "/layers/"),
    "before send": ("PUT", "/code.json"),
    "staging": ("GET", "/code.json"),
    "storing outputs": ("PUT", "/0.txt", "/1.txt"),
    "ending": ("PUT", "/exit.json"),
}
FAULTS = {
    "down": Fault(cut_request_at=0),
    "500": INTERNAL,
    "mute": HANG,
    "slow": Fault(bytes_per_s=2000),
}
SCRIPT = """
write_result(f"up-{rank}")
while HOLD and not os.path.exists(f"{results}/go"): time.sleep(0.02)
with open(f"{os.environ['model']}/{rank}.txt", "w") as file:
    file.write(f"weights of {rank}")
print("done", rank)
"""
# A wrapper that blocks until the test releases it, and then runs the real program.
WAITING_PROGRAM = """\
#!/bin/sh
case "$*" in --version) exec {real} "$@" ;; esac
echo $$ >{results}/{name}.new && mv {results}/{name}.new {results}/{name}
while [ ! -e {results}/go ]; do sleep 0.05; done
exec {real} "$@"
"""
LIMIT_S = 150.0
ARGUMENTS = ("--nodes", "2", "--grace-s", "1", "--output", "model=", "--output-sync-s", "1")


class End(NamedTuple):
    """How a job ended: its state and cause, and the exit code of a command that waits for it."""

    state: str
    cause: str | None
    code: int | None


SUCCEEDED = End("SUCCEEDED", None, 0)
# The platform lost a node.
LOST = End("FAILED", "platform", 137)
# The head's entry got SIGTERM; the exit code depends on whether it still wrote the record.
STOPPED = End("FAILED", "platform", None)
CANCELLED = End("CANCELLED", "cancelled", 143)
# No job was submitted; at most a record is left, which the user can remove.
NEVER = End("", None, 137)

SUBMITTED_STAGES = ("staging", "bring-up", "running", "storing outputs", "ending")
KILLED: dict[tuple[str, str], End] = {
    **{(stage, "submitter"): NEVER for stage in ("packing", "uploading", "before send")},
    **{(stage, "submitter"): SUCCEEDED for stage in SUBMITTED_STAGES},
    **{(stage, who): LOST for stage in SUBMITTED_STAGES for who in ("controller", "head's entry")},
    # In the stage "ending", a worker has already confirmed its outputs and exits.
    **{
        (stage, who): LOST
        for stage in SUBMITTED_STAGES[:-1]
        for who in ("worker's keeper", "worker's entry")
    },
    **{(stage, "mpirun"): LOST for stage in ("bring-up", "running")},
    **{(stage, "head's keeper"): STOPPED for stage in SUBMITTED_STAGES},
}
FROZEN: dict[tuple[str, str], End] = {
    key: CANCELLED for key, end in KILLED.items() if end is not NEVER
}


class Case:
    """A submit that is held at a stage."""

    def __init__(self, cloud, stage: str, temporary: Path) -> None:
        self.cloud = cloud
        self.stage = stage
        self.temporary = temporary
        self.gate: Gate | None = None
        self.store: tuple[str, ...] = ()
        self.job = ""
        cloud.environ["TMPDIR"] = str(temporary)
        cloud.write("train.py", "print(0)")

    def use(self, server: Server, bucket: str, proxy: FaultProxy) -> None:
        """Use a bucket as the store, behind a proxy that can hold requests."""
        self.cloud.environ.update({**server.environ, "AWS_ENDPOINT_URL": proxy.endpoint})
        self.server, self.proxy = server, proxy
        self.store = ("--store", f"s3://{bucket}/jobs")
        self.gate = Gate(proxy, *GATES[self.stage])

    def begin(self) -> None:
        """Submit, and wait until the job is at its stage."""
        cloud = self.cloud
        hold = {"packing": "git", "bring-up": "mpirun"}.get(self.stage)
        if hold:
            self._put_before_path(hold)
        (cloud.source / ".git").mkdir()
        script = cloud.script(f"HOLD = {self.stage == 'running'}\n{SCRIPT}")
        self.submit = cloud.start_submit(*ARGUMENTS, *self.store, script)
        if self.gate:
            self.gate.await_all(lambda: self.submit.process.poll() is not None)
        elif hold:
            cloud.await_results(hold)
        else:
            cloud.await_results("up-0", "up-1")
        if self.stage in SUBMITTED_STAGES:
            self.job = self.submit.job

    def break_store(self, fault: str) -> None:
        """Make the store fail from this stage on, permanently."""
        assert self.gate
        self.gate.inject(FAULTS[fault])
        self.begin()
        if fault == "down":
            self.proxy.close()

    def repair_store(self) -> None:
        """Make the store work again."""
        self.proxy.choose = lambda _: None

    def bypass_proxy(self) -> None:
        """Access the store without the proxy."""
        self.cloud.environ.update(self.server.environ)

    def listed(self) -> list[str]:
        """Return the ids of the jobs that `cloudjob list` shows."""
        return [job["job"] for job in json.loads(self.cloud.cli("list", "--json").out)]

    def release(self) -> None:
        """Let the job continue from its stage."""
        if self.gate:
            self.gate.open()
        (self.cloud.results / "go").touch()

    def victims(self, who: str) -> list[int]:
        """Return the process ids for a name such as ``worker's keeper``."""
        if who == "submitter":
            return [self.submit.process.pid]
        state = self.cloud.state(self.job)
        if who == "controller":
            return [state["controller"]]
        if who == "mpirun":
            return self._mpiruns()
        keeper = state["nodes"][who.startswith("worker")]["process"]
        return [keeper] if who.endswith("keeper") else [_entry_of(keeper)]

    def _mpiruns(self) -> list[int]:
        if self.stage == "bring-up":
            return [int((self.cloud.results / "mpirun").read_text())]
        return self.cloud.mpiruns()

    def _put_before_path(self, name: str) -> None:
        """Put a wrapper first on PATH that waits and then runs the program of the same name."""
        cloud = self.cloud
        real = shutil.which(name, path=cloud.environ["PATH"])
        folder = cloud.folder / "bin"
        folder.mkdir()
        program = folder / name
        program.write_text(WAITING_PROGRAM.format(real=real, name=name, results=cloud.results))
        program.chmod(0o755)
        cloud.environ["PATH"] = f"{folder}:{cloud.environ['PATH']}"

    # -- after the fault ------------------------------------------------------------------

    def ended(self) -> End:
        """Return how the job has ended."""
        done = self.submit.end(LIMIT_S)
        if not self.job:
            return End("", None, done.code)
        waited = self.cloud.cli("wait", self.job, limit_s=LIMIT_S)
        status = self.cloud.status(self.job)
        if status["state"] != "SUCCEEDED":
            assert status["failure"]["message"], status
        return End(status["state"], status["cause"], waited.code)

    def check_next(self) -> None:
        """Check that the next submit works, and that nothing but records is left after it."""
        cloud = self.cloud
        self.release()
        done = cloud.cli("submit", "--launcher", "python", *self.store, "train.py")
        assert done.code == 0, done
        for run in cloud.started:
            for text in (run.out, run.err):
                # A script may show its own, for example if the disk is full.
                ours = [line for line in text.split(b"\n") if not re.match(rb"\[\d+\] ", line)]
                assert b"Traceback" not in b"\n".join(ours), text.decode(errors="replace")
                assert not re.search(rb'File ".*/jobentry/', text), text.decode(errors="replace")
        poll(lambda: not self.leftovers(), f"end of {self.leftovers()}")

    def leftovers(self) -> list[str]:
        """Return the files and processes that must not be left when all jobs have ended."""
        home = self.cloud.home
        paths = [*self.temporary.iterdir(), *home.glob("process/*/node-?/")]
        return [*map(str, paths), *self.cloud.leftovers()]


@pytest.fixture
def case(
    cloud,
    request: pytest.FixtureRequest,
    fault_proxy: Callable[[Server], FaultProxy],
    new_bucket: Callable[[Server], str],
) -> Iterator[Callable[..., Case]]:
    """Return a function that submits a job and holds it at a stage."""
    # The path of a socket must be short.
    folder = Path(tempfile.mkdtemp(prefix="cf-", dir=folders.ROOT))
    cases = []

    def make(stage: str, *, fault: str = "", disk: Path | None = None) -> Case:
        if disk is not None:
            cloud.remove_home()
            cloud.home.symlink_to(disk / "home")
        new_case = Case(cloud, stage, disk / "tmp" if disk else folder)
        cases.append(new_case)
        if stage in GATES:
            server: Server = request.getfixturevalue("seaweedfs")
            new_case.use(server, new_bucket(server), fault_proxy(server))
        if fault:
            new_case.break_store(fault)
        else:
            new_case.begin()
        return new_case

    yield make
    for each in cases:
        each.release()
    cloud.kill_remaining()
    shutil.rmtree(folder)


def parametrize_cells(table: dict[tuple[str, str], End]) -> pytest.MarkDecorator:
    """Parametrize a test with the cells of a table."""
    cells = [
        pytest.param(*key, end, id=" ".join(key).replace(" ", "-")) for key, end in table.items()
    ]
    return pytest.mark.parametrize(("stage", "who", "end"), cells)


@parametrize_cells(KILLED)
def test_a_process_is_killed(case, stage: str, who: str, end: End):
    """After a SIGKILL the job ends or continues, and reports it."""
    held = case(stage)
    for process in held.victims(who):
        os.kill(process, signal.SIGKILL)
    if who == "submitter":
        held.submit.process.wait()
    if who in ("submitter", "worker's keeper", "worker's entry"):
        held.release()

    ended = held.ended()
    assert ended == end._replace(code=ended.code if end.code is None else end.code), held.submit
    assert (ended.code == 0) == (end.state in ("SUCCEEDED",)), held.submit
    assert b"cancelled" not in held.submit.err or end == STOPPED, f"{held.submit}"
    held.check_next()


@pytest.mark.lengthy
@parametrize_cells(FROZEN)
def test_a_frozen_process_does_not_outlive_a_cancel(case, stage: str, who: str, end: End):
    """The process is stopped by SIGSTOP, and the job is held at its stage during the cancel."""
    held = case(stage)
    frozen = held.victims(who)
    for process in frozen:
        os.kill(process, signal.SIGSTOP)

    cancelled = held.cloud.cli("cancel", held.job)
    assert cancelled.code == 0, cancelled
    waited = held.cloud.cli("wait", held.job)
    for process in frozen:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGCONT)
    status = held.cloud.status(held.job)

    assert (status["state"], status["cause"]) == end[:2], (status, waited)
    assert held.submit.end().code != 0
    held.check_next()


STORE_FAULTS = ("down", "500", "mute")


@pytest.mark.parametrize("fault", STORE_FAULTS)
@pytest.mark.parametrize("stage", ["uploading", "before send"])
def test_a_submit_whose_store_fails_is_cancelled_at_once(case, stage: str, fault: str):
    """Ctrl-C stops the submit while it retries a request; no job was started."""
    held = case(stage, fault=fault)
    held.submit.send(signal.SIGINT)

    done = held.submit.end()

    assert done.code == 130, done
    held.bypass_proxy()
    assert held.listed() == []
    held.check_next()


@pytest.mark.parametrize("fault", STORE_FAULTS)
@pytest.mark.parametrize("stage", ["staging", "storing outputs", "ending"])
def test_a_job_whose_store_fails_is_cancelled_at_once(case, stage: str, fault: str):
    """Each node retries requests independently, and does not delay the others."""
    held = case(stage, fault=fault)

    cancelled = held.cloud.cli("cancel", held.job)

    assert cancelled.code == 0, cancelled
    held.bypass_proxy()
    ended = held.ended()
    # The record may have been stored although the response never arrived.
    is_done = fault == "mute" and stage == "ending"
    assert ended[:2] in (CANCELLED[:2], *([SUCCEEDED[:2]] if is_done else [])), held.submit
    held.check_next()


# How a job ends if its store fails permanently from a stage on, so that no record is stored.
FAILED_STORE = {
    "staging": End("FAILED", "platform", 125),
    "storing outputs": End("FAILED", "platform", 125),
    "ending": SUCCEEDED,
}


@pytest.mark.lengthy
@pytest.mark.parametrize("fault", ["500", "mute"])
@pytest.mark.parametrize("stage", FAILED_STORE)
def test_a_job_whose_store_fails_for_good_ends(cloud, case, stage: str, fault: str):
    """It ends after `CLOUDJOB_STORE_PATIENCE_S` without progress, and its log has the reason."""
    cloud.environ["CLOUDJOB_STORE_PATIENCE_S"] = "2"
    held = case(stage, fault=fault)
    poll(lambda: held.cloud.state(held.job)["ended_at"], "end of the job", LIMIT_S)
    held.repair_store()

    assert held.ended() == FAILED_STORE[stage], held.submit
    assert b"gave up after 2 s" in held.submit.err, f"{held.submit}"
    held.check_next()


@pytest.mark.lengthy
@pytest.mark.parametrize("stage", GATES)
def test_a_job_succeeds_with_a_slow_store(case, stage: str):
    held = case(stage, fault="slow")
    held.job = held.submit.job

    assert held.ended() == SUCCEEDED, held.submit
    held.check_next()


# The submit's exit code and the job's state if the disk fills at a stage.
FULL = {
    "packing": (3, ""),
    "before send": (5, ""),
    "staging": (125, "FAILED"),
    # The code depends on whether the rank's output or the entry's own files fail first.
    "running": (None, "FAILED"),
    "storing outputs": (0, "SUCCEEDED"),
    "ending": (0, "SUCCEEDED"),
}


@pytest.mark.parametrize("stage", FULL)
def test_a_disk_that_fills_at_any_stage_is_reported(case, small_disk: Path, stage: str):
    """The job reports the full disk, and nothing is left once there is room again."""
    held = case(stage, disk=small_disk)
    filler = small_disk / "filler"
    fill(filler)
    held.release()

    code, state = FULL[stage]
    done = held.submit.end()
    filler.unlink()

    if code is None:
        code = done.code or -1
    assert done.code == code, done
    if held.job:
        assert held.cloud.cli("wait", held.job).code == code
        assert held.cloud.status(held.job)["state"] == state
    if code:
        assert b"no space left on device" in (done.err + done.out).lower(), done
    held.check_next()


def test_a_disk_that_fills_during_the_upload_is_reported(cloud, small_disk: Path):
    """There is one error line, and the store contains nothing incomplete."""
    arguments = ("--store", f"file://{small_disk}/store", "--launcher", "python", "job.py")
    cloud.write("job.py", "print('done')")
    large = cloud.source / "large.bin"
    large.write_bytes(os.urandom(8 << 20))

    done = cloud.submit(*arguments)

    assert done.code == 4, done
    assert len(re.findall(rb"(?m)^error: ", done.err)) == 1, done
    assert b"no space left on device" in done.err.lower(), done
    assert [path for path in (small_disk / "store").rglob("*") if path.is_file()] == []
    assert json.loads(cloud.cli("list", "--json").out) == []
    large.unlink()
    assert cloud.submit(*arguments).code == 0


@pytest.mark.parametrize("stage", ["packing", "uploading", "before send"])
def test_a_submitter_frozen_before_it_sends_blocks_no_other_command(case, stage: str):
    """While it is stopped by SIGSTOP, other commands and jobs work; then the submit continues."""
    held = case(stage)
    held.submit.send(signal.SIGSTOP)
    held.release()

    listed = json.loads(held.cloud.cli("list", "--json").out)
    assert [job["state"] for job in listed] in ([], ["PENDING"]), listed
    held.check_next()

    held.submit.send(signal.SIGCONT)
    held.job = held.submit.job
    assert held.ended() == SUCCEEDED, held.submit
    poll(lambda: not held.leftovers(), f"end of {held.leftovers()}")


LIMITS = ("nofile=10", "nofile=16", "nofile=20", "nofile=64", "as=50000000", "as=200000000")


@pytest.mark.lengthy
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("limit", LIMITS)
def test_a_job_under_a_low_limit_runs_or_reports_what_it_lacks(cloud, limit: str, is_first: bool):
    """The first to reach it may be the submit, the controller, a keeper, an entry or mpirun.

    The first submit also unpacks the entry and compiles the rules for secrets.
    """
    if is_first:
        cloud.remove_home()
    script = cloud.script("print('done', rank)")
    cloud.prefix = ("prlimit", f"--{limit}:{limit.partition('=')[2]}")

    done = cloud.submit("--nodes", "2", "--grace-s", "1", script)

    cloud.prefix = ()
    assert b"Traceback" not in done.err, done
    if done.code == 0:
        assert sorted(done.lines) == [b"[0] done 0", b"[1] done 1"]
    for job in json.loads(cloud.cli("list", "--json").out):
        assert (job["state"] == "SUCCEEDED") == (done.code == 0), job
    after = cloud.submit("--nodes", "2", script)
    assert after.code == 0, after


@pytest.mark.lengthy
@pytest.mark.parametrize("limit", [2, 6, 10, 16])
def test_a_job_under_a_limit_on_processes_runs_or_names_what_it_lacks(cloud, limit: int):
    """The first to reach it may be the submit, the controller, a node, mpirun or a rank."""
    if os.geteuid():
        pytest.skip("only root has a user without other processes")
    # The kernel counts the processes and threads of a user, and exempts root.
    user = 61_000 + limit
    caps = "+dac_override,+dac_read_search"
    plain = ("setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups")
    plain = (*plain, f"--inh-caps={caps}", f"--ambient-caps={caps}")
    # In a user namespace, the capabilities would not give access to root's interpreter.
    cloud.write("cloudjob.yaml", "process: {isolation: none}")
    cloud.write("job.py", "print('done')")
    cloud.chown_to(user)
    cloud.prefix = ("prlimit", f"--nproc={limit}:{limit}", *plain)

    arguments = ("--nodes", "2", "--grace-s", "1", "--launcher", "python", "job.py")
    done = cloud.submit(*arguments)

    cloud.prefix = plain
    assert b"Traceback" not in done.err, done
    if done.code == 0:
        assert sorted(done.lines) == [b"[0] done", b"[1] done"]
    else:
        assert _NO_PROCESS.search(done.err), done
    for job in json.loads(cloud.cli("list", "--json").out):
        assert (job["state"] == "SUCCEEDED") == (done.code == 0), job
    after = cloud.submit(*arguments)
    assert after.code == 0, after


# If a rank wrapper cannot start the script, only its exit code is known.
_NO_PROCESS = re.compile(
    rb"(?i)resource temporarily unavailable|can't start new thread|before all ranks had started"
)


def test_every_command_reports_a_read_only_home_folder(cloud, small_disk: Path):
    """Once the folder is writable again, every command works as before."""
    cloud.remove_home()
    cloud.home.symlink_to(small_disk / "home")
    script = cloud.script("print('done', rank)")
    job = cloud.submit(script).job
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)

    refused = [cloud.submit(script), *(cloud.cli(command, job) for command in ("status", "logs"))]

    subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
    for done in refused:
        assert done.code != 0, done
        assert b"read-only file system" in done.err.lower(), done
        assert b"hint: " in done.err, done
    assert cloud.status(job)["state"] == "SUCCEEDED"
    assert cloud.submit(script).code == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB: the entry of a node, unpacked and compiled, takes half of it."""
    if os.geteuid():
        pytest.skip("only root may mount a file system")
    folder = Path(tempfile.mkdtemp(prefix="cd-", dir=folders.ROOT))
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], check=True)
    for name in ("home", "tmp"):
        (folder / name).mkdir(mode=0o700)
    yield folder
    # A controller may still be exiting.
    subprocess.run(["umount", "--lazy", folder], check=True)
    folder.rmdir()


def fill(path: Path) -> None:
    """Write until the disk is full."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def _entry_of(keeper: int) -> int:
    """Return the process id of a node's entry, which its keeper starts first."""
    children = Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()
    return int(children[0])

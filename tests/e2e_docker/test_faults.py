"""Faults of nodes, engine, submitter and store; see tests/jobs/test_faults.py for processes."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import docker
import pytest

from cloudjob.backends.docker import engine as engines
from cloudjob.emulator.docker_nodes import bridge_address
from tests.support.engine import EngineProxy
from tests.support.gates import Gate
from tests.support.polling import Followed, poll
from tests.support.servers import HANG, INTERNAL, Fault, FaultProxy, Server

pytestmark = pytest.mark.docker

# See conftest.py: a command that waits for a job reads its record for up to a minute after its end.
LIMIT_S = 240.0
# Each node waits at the stage in $HOLD until /cache/go exists.
BOOT = """\
#!/bin/sh
if [ "$HOLD" = staging ]; then
    touch /cache/held
    until [ -e /cache/go ]; do sleep 0.1; done
fi
exec /opt/cloudjob/boot.sh "$@"
"""
MPIRUN = """\
#!/bin/sh
case "$*" in --version) exec /usr/bin/mpirun "$@" ;; esac
if [ "$HOLD" = bring-up ]; then
    touch /cache/held
    until [ -e /cache/go ]; do sleep 0.1; done
fi
exec /usr/bin/mpirun "$@"
"""
SCRIPT = """\
import os, pathlib, time
if "MODEL" in os.environ:
    with open(os.path.join(os.environ["MODEL"], os.environ["VC_TASK_INDEX"]), "wb") as file:
        # A sparse file would be stored at once.
        for _ in range(OUTPUT_BYTES >> 20):
            file.write(bytes(1 << 20))
pathlib.Path("/cache/held").touch()
while not os.path.exists("/cache/go"):
    time.sleep(0.05)
print("done", flush=True)
"""
OUTPUT_BYTES = 512 * 1024 * 1024
KILL_MPIRUN = """\
import os, pathlib
names = "mpirun", "orterun"
found = [p for p in pathlib.Path("/proc").glob("[0-9]*/comm") if p.read_text().strip() in names]
assert found
for path in found:
    os.kill(int(path.parent.name), 9)
"""


class End(NamedTuple):
    """How a job ended, by its status and by the exit code of a command that waits for it."""

    state: str
    cause: str | None
    code: int


SUCCEEDED = End("SUCCEEDED", None, 0)
LOST = End("FAILED", "platform", 137)
STAGES = ("staging", "bring-up", "running")
STORING, ENDING = "storing outputs", "ending"
KILLED: dict[tuple[str, str], End] = {
    (STORING, "submitter"): SUCCEEDED,
    (STORING, "head"): LOST,
    (STORING, "worker"): LOST,
    # There is no case for a worker: it has confirmed its outputs by then and exits.
    (ENDING, "submitter"): SUCCEEDED,
    (ENDING, "head"): LOST,
    **{(stage, "submitter"): SUCCEEDED for stage in STAGES},
    **{(stage, who): LOST for stage in STAGES for who in ("head", "worker")},
    **{(stage, "mpirun"): LOST for stage in ("bring-up", "running")},
}
PAUSED = [(stage, who) for stage in (*STAGES, STORING) for who in ("head", "worker")]
PAUSED.append((ENDING, "head"))
# The requests at which the proxy holds the nodes, or from which on the store fails.
STORE_STAGES = {
    "staging": ("GET", "/code.json"),
    STORING: ("PUT", "/0.txt", "/1.txt"),
    ENDING: ("PUT", "/exit.json"),
}


@pytest.fixture(scope="module")
def holding(derive):
    """An image whose nodes wait at a stage."""
    return derive(
        "holding",
        "COPY boot.sh /opt/test/\nCOPY mpirun /usr/local/bin/\n"
        'ENTRYPOINT ["/usr/bin/tini", "--", "/opt/test/boot.sh"]',
        **{"boot.sh": BOOT, "mpirun": MPIRUN},
    )


class Case:
    """A submit of two nodes that is held at a stage."""

    def __init__(
        self, cloud, image: str, stage: str, path: Path, settings: str, grace_s: int
    ) -> None:
        self.cloud = cloud
        self.stage = stage
        self.gate: Gate | None = None
        cloud.script(SCRIPT.replace("OUTPUT_BYTES", str(OUTPUT_BYTES)))
        cloud.image = image
        arguments = ["submit", "--backend", "docker", "--nodes", "2", "--grace-s", str(grace_s)]
        if stage == STORING:
            arguments += ["--output", "MODEL=", "--output-sync-s", "0"]
        (cloud.source / "cloudjob.yaml").write_text(settings)
        with path.open("wb") as file:
            process = cloud.start(*arguments, "-e", f"HOLD={stage}", "train.py", out=file)
        self.submit = Followed(process, path)
        self.submit.await_all(b"docker://local/", limit_s=LIMIT_S)
        (self.job,) = {item["Labels"]["cloudjob.job"] for item in cloud.containers()}
        held = self.nodes[:1] if stage == "bring-up" else self.nodes
        poll(lambda: all(self._has(node, "/cache/held") for node in held), "held node", LIMIT_S)

    @property
    def nodes(self) -> list[str]:
        """The ids of the containers, by node."""
        return [item["Id"] for item in self.cloud.containers(self.job)]

    def _has(self, node: str, path: str) -> bool:
        try:
            self.cloud.engine.get_archive(node, path)
        except docker.errors.NotFound:
            return False
        return True

    def kill(self, who: str) -> None:
        """Kill the submitter, mpirun or a node with SIGKILL."""
        engine = self.cloud.engine
        if who == "submitter":
            self.submit.end()
        elif who == "mpirun":
            call = engine.exec_create(self.nodes[0], ["python3", "-c", KILL_MPIRUN])
            engine.exec_start(call["Id"])
            assert engine.exec_inspect(call["Id"])["ExitCode"] == 0
        else:
            engine.kill(self.nodes[who == "worker"], "SIGKILL")

    def pause(self, who: str) -> None:
        """Pause a node. It is tried repeatedly, as runc may give up before the kernel is done."""

        def is_paused() -> bool:
            try:
                self.cloud.engine.pause(self.nodes[who == "worker"])
            except docker.errors.APIError as error:
                if "unable to freeze" not in str(error):
                    raise
                return False
            return True

        poll(is_paused, "paused node", LIMIT_S)

    def await_storing(self, who: str) -> None:
        """Let the ranks end, and wait until the node, slowed down, is storing its output."""
        node = self.nodes[who == "worker"]
        self.cloud.engine.update_container(node, cpu_period=100_000, cpu_quota=5_000)
        self.release()

        def is_storing() -> bool:
            # The head stores first.
            if who == "worker" and not self.output(0).exists():
                return False
            parts = self.output(0).parent.glob(".cloudjob-tmp-*")
            return any(path.stat().st_size for path in parts)

        poll(is_storing, "an output that is being stored", LIMIT_S)

    def output(self, node: int) -> Path:
        """Return where the output of a node is stored."""
        return self.cloud.home / "store" / self.job / "outputs" / "MODEL" / str(node)

    def await_ending(self, gate: Gate) -> None:
        """Let the ranks end, and wait until the head's request to store its record is held."""
        self.release()
        gate.await_all(lambda: self.submit.process.poll() is not None)
        self.gate = gate

    def release(self) -> None:
        """Let the remaining nodes continue."""
        if self.gate:
            self.gate.open()
            return
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w") as members:
            members.addfile(tarfile.TarInfo("go"))
        for node in self.nodes:
            self.cloud.engine.put_archive(node, "/cache", data.getvalue())

    def ended(self) -> End:
        """Return how the job has ended."""
        waited = self.cloud.run("wait", self.job)
        status = self.cloud.status(self.job)
        assert status["state"] == "SUCCEEDED" or status["failure"]["message"], status
        return End(status["state"], status["cause"], waited.code)


class Bucket:
    """A bucket of a server on loopback, which nodes reach through proxies on the bridge."""

    def __init__(self, cloud, name: str, server: Server, new_proxy) -> None:
        self.uri = f"s3://{name}/jobs"
        self._cloud, self._server, self._new_proxy = cloud, server, new_proxy
        cloud.environ.update(server.environ)

    def proxy(self) -> FaultProxy:
        """Point commands, and the nodes of jobs submitted from now on, to a new proxy."""
        bridge = bridge_address(self._cloud.engine.inspect_network("bridge"))
        proxy: FaultProxy = self._new_proxy(self._server, bridge)
        self._cloud.environ["AWS_ENDPOINT_URL"] = proxy.endpoint
        return proxy

    def bypass_proxies(self) -> None:
        """Point commands to the server itself; running nodes keep their proxies."""
        self._cloud.environ.update(self._server.environ)


@pytest.fixture
def bucket(cloud, seaweedfs: Server, new_bucket, fault_proxy) -> Bucket:
    """Return an empty bucket for the jobs."""
    return Bucket(cloud, new_bucket(seaweedfs), seaweedfs, fault_proxy)


@pytest.fixture
def case(
    cloud, holding: str, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Case]]:
    """Return a function that submits a job and holds it at a stage."""
    cases = []

    def make(stage: str, settings: str = "{}", grace_s: int = 1) -> Case:
        if stage == ENDING:
            bucket: Bucket = request.getfixturevalue("bucket")
            settings, gate = f"store: {bucket.uri}", Gate(bucket.proxy(), *STORE_STAGES[ENDING])
        cases.append(Case(cloud, holding, stage, tmp_path / "submit.log", settings, grace_s))
        if stage == ENDING:
            cases[-1].await_ending(gate)
        return cases[-1]

    yield make
    for each in cases:
        each.submit.end()


def check_next(cloud) -> None:
    """Assert that another submit works; the fixture checks that nothing is left in the engine."""
    cloud.script("print('next')")
    done = cloud.submit("--launcher", "python")
    assert done.code == 0, done


@pytest.mark.parametrize(
    ("stage", "who", "end"),
    [pytest.param(*key, end, id="-".join(key)) for key, end in KILLED.items()],
)
def test_a_process_or_node_is_killed(case, stage: str, who: str, end: End):
    """After a SIGKILL, the job ends or continues as listed in ``KILLED``."""
    held = case(stage)
    if stage == STORING:
        held.await_storing(who)
    held.kill(who)
    if stage != STORING:
        held.release()

    assert held.ended() == end, held.submit.path.read_text()
    assert b"cancelled" not in held.submit.path.read_bytes()
    if who != "submitter":
        assert held.submit.process.wait(LIMIT_S) == end.code
    check_next(held.cloud)


@pytest.mark.parametrize(("stage", "who"), PAUSED)
def test_a_paused_node_does_not_outlive_a_cancel(case, stage: str, who: str):
    """One node is paused with `docker pause`; the other one still waits at its stage."""
    # The time that a cancel leaves for storing; the least, 10 s, is too short on a busy machine.
    held = case(stage, grace_s=60 if stage == STORING else 1)
    node = held.nodes[who == "worker"]
    if stage == STORING:
        held.await_storing(who)
        # The kernel cannot freeze a process that is throttled by its CPU quota.
        held.cloud.engine.update_container(node, cpu_quota=-1)
    held.pause(who)

    cancelled = held.cloud.run("cancel", held.job)

    assert cancelled.code == 0, cancelled
    if stage == STORING:
        # The ranks had already succeeded, and `cancel` lets the node finish storing its output.
        assert held.ended() == SUCCEEDED
        sizes = [held.output(node).stat().st_size for node in (0, 1)]
        assert sizes == [OUTPUT_BYTES, OUTPUT_BYTES]
    else:
        status = held.cloud.status(held.job)
        code = held.submit.process.wait(LIMIT_S)
        # The engine lets a paused node handle the signal. After its ranks have succeeded, the head
        # gives its record up, unless a slow machine kills it before.
        has_ended_itself = b"the store has not answered" in held.submit.path.read_bytes()
        if stage == ENDING and has_ended_itself:
            assert (status["state"], status["exit_code"], code) == ("SUCCEEDED", 0, 0), status
        else:
            assert (status["state"], status["cause"]) == ("CANCELLED", "cancelled"), status
            assert code != 0
    held.release()
    check_next(held.cloud)


def test_an_attached_submit_ends_with_its_job_after_a_partition(case):
    """Each node gives up on the other, and no process waits for the disconnected node."""
    held = case("running", "network: {stall_min: 0.25}")
    [network] = held.cloud.networks()
    held.cloud.engine.disconnect_container_from_network(held.nodes[1], network["Id"])

    code = held.submit.process.wait(LIMIT_S)

    status = held.cloud.status(held.job)
    assert (code, status["cause"], status["failure"]["node"]) == (137, "platform", 1), status
    # A container that outlives the head by 30 s is killed.
    assert held.cloud.killed_nodes(held.job) == []
    check_next(held.cloud)


@pytest.mark.parametrize("request_line", [b"/networks/create", b"/archive?", b"/start "])
def test_a_submit_killed_while_it_creates_nodes_leaves_nothing_running(
    cloud, tmp_path, request_line
):
    proxy = EngineProxy(tmp_path / "engine.sock", engines.host())
    cloud.script("print('never')")
    reached = proxy.hold(request_line)
    cloud.environ["DOCKER_HOST"] = proxy.host
    submit = cloud.start("submit", "--backend", "docker", "--nodes", "2", "train.py")
    assert reached.wait(LIMIT_S)
    submit.kill()
    submit.communicate()
    proxy.stop()
    del cloud.environ["DOCKER_HOST"]

    (listed,) = json.loads(cloud.run("list", "--json").out)
    if request_line == b"/networks/create":
        assert listed["state"] == "UNKNOWN", listed
    else:
        assert (listed["state"], listed["cause"]) == ("FAILED", "platform"), listed
        assert cloud.run("wait", listed["job"]).code == 1
    assert cloud.run("rm", listed["job"]).code == 0
    check_next(cloud)


# -- faults of the store ----------------------------------------------------------------------

CUT = Fault(cut_request_at=0)
STORE_FAULTS = {
    "down for a time": CUT,
    "down for good": CUT,
    "500 for good": INTERNAL,
    "mute for good": HANG,
    "mute until cancelled": HANG,
    "slow": Fault(bytes_per_s=2000),
}
GIVEN_UP = End("FAILED", "platform", 125)
CANCELLED = End("CANCELLED", "cancelled", 143)
STORES = """\
import os, pathlib
name = os.environ["VC_TASK_INDEX"] + ".txt"
pathlib.Path(os.environ["MODEL"], name).write_text("weights")
"""


class Storing:
    """A detached job of two nodes with its own proxy to the store."""

    def __init__(self, cloud, stage: str, fault: str, bucket: Bucket) -> None:
        self.cloud, self.stage, self.fault, self.proxy = cloud, stage, fault, bucket.proxy()
        self.gate = Gate(self.proxy, *STORE_STAGES[stage])
        self.gate.inject(STORE_FAULTS[fault])
        self.environ = {
            "AWS_ENDPOINT_URL": self.proxy.endpoint,
            # On a busy host, a minute may pass before the last job is cancelled.
            "CLOUDJOB_STORE_PATIENCE_S": "2" if "good" in fault else "600",
        }
        arguments = ("submit", "--backend", "docker", "--nodes", "2", "--grace-s", "1", "--detach")
        arguments = (*arguments, "--output", "MODEL=", "--store", bucket.uri, "train.py")
        cloud.environ.update(self.environ)
        self.submit = cloud.start(*arguments)

    def go_through(self) -> None:
        """Wait until the store fails; then close or repair it or cancel the job, as needed."""
        out, err = self.submit.communicate(timeout=LIMIT_S)
        assert self.submit.returncode == 0, err
        self.job = out.decode().strip().rpartition("/")[2]
        self.gate.await_all()
        if self.fault == "down for good":
            self.proxy.close()
        elif self.fault == "down for a time":
            poll(lambda: self._failed() > 3, "failed requests", LIMIT_S)
            self.proxy.choose = lambda _: None
        elif self.fault == "mute until cancelled":
            self.cloud.environ.update(self.environ)
            done = self.cloud.run("cancel", self.job)
            assert done.code == 0, done

    def _failed(self) -> int:
        return sum(request.fault is not None for request in self.proxy.requests)

    @property
    def allowed_ends(self) -> set[End]:
        """How the job may end."""
        # Without a record, the engine knows how the job has ended.
        if self.stage == ENDING or self.fault in ("down for a time", "slow"):
            return {SUCCEEDED}
        if self.fault == "mute until cancelled":
            return {CANCELLED}
        # A store that never answers may still have stored the record.
        return {GIVEN_UP, *([GIVEN_UP._replace(cause="entry")] if "mute" in self.fault else [])}


@pytest.mark.parametrize("stage", STORE_STAGES)
def test_jobs_report_a_store_that_fails_at_any_stage(cloud, bucket: Bucket, stage: str):
    """Concurrent jobs each get a different fault of the store, from this stage on."""
    cloud.script(STORES)
    cases = [Storing(cloud, stage, fault, bucket) for fault in STORE_FAULTS]
    for case in cases:
        case.go_through()

    bucket.bypass_proxies()
    waiting = [cloud.start("wait", case.job) for case in cases]
    codes = [process.wait(LIMIT_S) for process in waiting]
    messages = [process.communicate()[1] for process in waiting]
    listed = {item["job"]: item for item in json.loads(cloud.run("list", "--json").out)}
    statuses = [listed[case.job] for case in cases]
    ends = [
        End(status["state"], status["cause"], code)
        for status, code in zip(statuses, codes, strict=True)
    ]
    wrong = {c.fault: end for c, end in zip(cases, ends, strict=True) if end not in c.allowed_ends}
    assert wrong == {}, messages
    check_next(cloud)

"""Jobs whose pods are placed by a real scheduler and run by a real kubelet."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import docker
import pytest

from tests.e2e_kube.conftest import LIMIT_S, Lab
from tests.e2e_kube.real import NODE, RealNode, alone
from tests.support.kube_cluster import Cluster, programs

pytestmark = [pytest.mark.kubernetes, pytest.mark.docker]

TRAIN = """
import os, pathlib, sys, time
print("hello", sys.argv[1:], os.environ["PRICE"], os.environ["TOKEN"], os.getuid(), flush=True)
print(os.environ["MA_CURRENT_INSTANCE_NAME"], os.environ["MA_CURRENT_IP"], flush=True)
if "wait" in sys.argv:
    time.sleep(600)
sys.exit("fail" in sys.argv)
"""


@pytest.fixture(scope="module")
def real_node(
    tmp_path_factory: pytest.TempPathFactory, engine: docker.APIClient, base_image: str
) -> Iterator[RealNode]:
    """A cluster with one real node."""
    cluster = Cluster(tmp_path_factory.mktemp("real-cluster"), has_nodes=True)
    node = RealNode(cluster, engine, tmp_path_factory.mktemp("kubelet"), base_image)
    with alone():
        try:
            cluster.start()
            node.start()
            yield node
        finally:
            node.stop()
            cluster.stop()


class RealLab(Lab):
    """A namespace whose pods really run."""

    def start_job(self, *arguments: str, attached: bool = False, **options: Any) -> RealJob:
        """Submit a job, and create its pods as its operator would."""
        self.image = options.pop("image", self.image)
        self.write(image_pull_policy="Never", cpus=0.1, **options)
        (self.source / "train.py").write_text(TRAIN)
        self.environ["TOKEN"] = "a b$(HOME)$$"
        args = ["submit", "--config", "job.yaml", *([] if attached else ["--detach"])]
        args += ["--launcher", "python", "-e", "PRICE=5$(A)", "--secret", "TOKEN", "train.py"]
        process = self.start(*args, *arguments)
        names_now: list[str] = []
        while not names_now:
            names_now = [item["metadata"]["name"] for item in self.get(self.path())["items"]]
            assert process.poll() in (None, 0), self.end(process)
        if not attached:
            assert self.end(process).code == 0
        # Give the pods' user write access to the store, as the owner of a network disk would.
        for folder, _, files in os.walk(self.folder / "store"):
            Path(folder).chmod(0o777)
            for file in files:
                Path(folder, file).chmod(0o666)
        return RealJob(self, names_now[0], self.operate(names_now[0]), process)


class RealJob:
    """A job, its pods, and the process that submitted it."""

    def __init__(self, lab: RealLab, job: str, pods: list[str], submitting: Any) -> None:
        self.lab, self.job, self.pods, self.submitting = lab, job, pods, submitting

    def pod(self, node: int = 0) -> dict[str, Any]:
        current: dict[str, Any] = self.lab.get(self.lab.core("Pod", self.pods[node])) or {}
        return current

    def state(self, name: str = "cloudjob") -> dict[str, Any]:
        """Return the state of a container in the pod of node 0."""
        statuses = (self.pod().get("status") or {}).get("containerStatuses") or ()
        states: list[dict[str, Any]] = [s["state"] for s in statuses if s["name"] == name]
        return states[0] if states else {}

    def shows(self, text: str) -> bool:
        """Whether ``status`` shows this text."""
        return text in self.lab.status(self.job)["native_state"]


@pytest.fixture(params=["volcano", "mpi-operator"])
def lab(request: pytest.FixtureRequest, real_node: RealNode, tmp_path: Path) -> RealLab:
    """A namespace on the cluster with a real node, once with each of two operators."""
    return new_lab(real_node, tmp_path, request.param)


@pytest.fixture
def volcano_lab(real_node: RealNode, tmp_path: Path) -> RealLab:
    """A namespace on the cluster with a real node, with Volcano."""
    return new_lab(real_node, tmp_path, "volcano")


def new_lab(real_node: RealNode, folder: Path, engine: str) -> RealLab:
    """Return a new namespace on the cluster of ``real_node``."""
    return RealLab(real_node.cluster, folder / "lab", engine=engine, image=real_node.image)


LAST_PHASES = {"volcano": ("Completed", "Failed"), "mpi-operator": ("Succeeded", "Failed")}


def test_a_real_kubelet_sets_up_a_pod_as_its_manifest_describes(
    lab: RealLab, until: Callable[..., None]
):
    job = lab.start_job("$(B)", "$$")
    until(lambda: "terminated" in job.state(), "end of the container", LIMIT_S)
    assert job.state()["terminated"]["exitCode"] == 0, lab.run("logs", job.job)
    lab.phase(job.job, LAST_PHASES[lab.engine][0])

    status = lab.status(job.job)
    assert (status["state"], status["cause"]) == ("SUCCEEDED", None), status
    assert [phase["name"] for phase in status["phases"]][:1] == ["stage"], "it left its record"
    assert "hello ['$(B)', '$$'] 5$(A) *** 1000" in lab.run("logs", job.job).out
    out = lab.run("logs", "--raw", "--rank", "0", job.job).out
    assert "hello ['$(B)', '$$'] 5$(A) a b$(HOME)$$ 1000" in out, out
    assert f"{job.pods[0]} {job.pod()['status']['podIP']}" in out, out


def test_commands_run_in_a_pod_and_its_stacks_are_read(
    volcano_lab: RealLab, until: Callable[..., None], tmp_path: Path
):
    """They reach the pod through kubectl; the program there is that of the rank."""
    lab = volcano_lab
    lab.environ["PATH"] = f"{programs()}:{os.environ['PATH']}"
    job = lab.start_job("wait")
    until(lambda: "hello" in lab.run("logs", job.job).out, "line of the script", LIMIT_S)
    lab.phase(job.job, "Running")
    text = 'printf "%s|" "$PRICE" "$TOKEN" "$(id -u)" "$(pwd)"; exit 7'

    done = lab.run("exec", job.job, "--", "sh", "-c", text)
    stacks = lab.run("stacks", "--json", job.job)
    page = tmp_path / "profile.html"
    profile = lab.run("profile", job.job, "--seconds", "1", "-o", str(page))

    folder = "/home/ma-user/modelarts/user-job-dir/code"
    assert (done.code, done.out) == (7, f"5$(A)|a b$(HOME)$$|1000|{folder}|"), done
    assert stacks.code == 0, stacks
    (group,) = json.loads(stacks.out)["groups"]
    assert group["frames"][0]["source"] == "time.sleep(600)"
    assert profile.code == 0, profile
    assert "sleeps: 100.0 %" in page.read_text()
    assert lab.run("exec", job.job, "nothing").code == 127


def test_an_image_that_is_missing_is_named_beside_a_sidecar_and_the_job_can_be_cancelled(
    volcano_lab: RealLab, until: Callable[..., None]
):
    lab = volcano_lab
    sidecar = {"name": "sidecar", "image": lab.image, "command": ["sleep", "600"]}
    job = lab.start_job(image="cloudjob/none:1", pod={"spec": {"containers": [sidecar]}})
    until(lambda: "running" in job.state("sidecar"), "sidecar", LIMIT_S)
    until(lambda: job.shows("node 0: ErrImageNeverPull: "), "reason", LIMIT_S)
    cancelling = lab.start("cancel", job.job)
    commands = f"/apis/bus.volcano.sh/v1alpha1/namespaces/{lab.namespace}/commands"
    until(lambda: lab.get(commands)["items"], "request to stop the job")
    lab.cluster.ask("DELETE", lab.core("Pod", job.pods[0]), {"gracePeriodSeconds": 0})
    lab.phase(job.job, "Aborted")

    assert lab.end(cancelling).code == 0
    assert lab.status(job.job)["state"] == "CANCELLED"


def test_an_unmountable_volume_and_a_node_without_room_are_reported(
    volcano_lab: RealLab, until: Callable[..., None]
):
    lab = volcano_lab
    source = {"hostPath": {"path": "/none", "type": "Directory"}}
    missing = {"name": "data", **source, "mountPath": "/data"}
    store = str(lab.folder / "store")
    volume = {"name": "store", "hostPath": {"path": store}, "mountPath": store}
    job = lab.start_job(volumes=[volume, missing])
    lab.phase(job.job, "Pending")
    until(lambda: job.shows('FailedMount: MountVolume.SetUp failed for volume "data"'), "reason")

    big = another_lab(lab).start_job(node_selector={"no": "such"})
    big.lab.phase(big.job, "Pending")
    until(lambda: big.shows("node 0: Unschedulable: 0/1 nodes are available"), "reason")


def another_lab(lab: RealLab) -> RealLab:
    """Return another namespace on the cluster of ``lab``."""
    return RealLab(lab.cluster, lab.folder.parent / "other", image=lab.image)


def test_a_drained_pod_does_not_make_the_job_cancelled(lab: RealLab, until: Callable[..., None]):
    """The kubelet sends SIGTERM to the head, which then writes the record of a cancelled job."""
    job = lab.start_job("wait")
    until(lambda: "hello" in lab.run("logs", job.job).out, "line of the script", LIMIT_S)
    lab.cluster.ask("DELETE", lab.core("Pod", job.pods[0]))
    until(lambda: not job.pod(), "end of the pod", LIMIT_S)
    (record,) = (lab.folder / "store").glob(f"{job.job}/**/exit.json")
    assert json.loads(record.read_text())["cause"] == "cancelled"
    lab.phase(job.job, "Aborted" if lab.engine == "volcano" else "Failed")

    status = lab.status(job.job)
    assert (status["state"], status["cause"]) == ("FAILED", "platform"), status


@pytest.mark.parametrize("is_frozen", [False, True], ids=["killed", "frozen"])
def test_a_kubelet_that_is_stopped_delays_neither_a_submit_nor_a_cancel(
    real_node: RealNode, volcano_lab: RealLab, until: Callable[..., None], is_frozen: bool
):
    lab = volcano_lab
    other = another_lab(lab)
    job, running = lab.start_job("wait", attached=True), other.start_job("wait")
    until(lambda: "running" in job.state() and "running" in running.state(), "pods", LIMIT_S)
    with real_node.frozen() if is_frozen else real_node.killed():
        until(lambda: other.status(running.job)["state"] == "PENDING", "status")
        other.phase(running.job, "Running")
        reason = (
            f"Running (node 0: its machine {NODE} no longer reports to the cluster; it may be lost)"
        )
        until(lambda: running.shows(reason), "report of the lost node", LIMIT_S)
        cancelling = other.start("cancel", "--now", running.job)
        until(lambda: not other.get(other.core("Pod"))["items"], "end of the pods")
        other.phase(running.job, "Aborted")
        assert other.end(cancelling).code == 0
        assert other.status(running.job)["state"] == "CANCELLED"

        lab.phase(job.job, "Failed")
        done = lab.end(job.submitting)
        assert done.code not in (0, None), done
        # The platform's log ends when the kubelet stops; the store may have more, but not all.
        assert "following the log of node 0: " in done.err, done
        assert "this log is not complete" in done.err, done
        assert "FAILED" in done.err, done


def test_a_node_that_is_gone_ends_the_job_as_failed(
    real_node: RealNode, volcano_lab: RealLab, until: Callable[..., None]
):
    lab = volcano_lab
    job = lab.start_job("wait", attached=True)
    until(lambda: "running" in job.state(), "container", LIMIT_S)
    lab.phase(job.job, "Running")
    with real_node.killed():
        lab.cluster.ask("DELETE", f"/api/v1/nodes/{NODE}")
        until(lambda: not job.pod(), "end of the pod", LIMIT_S)
        lab.phase(job.job, "Aborted")
        done = lab.end(job.submitting)
        assert done.code not in (0, None), done
        assert "Traceback" not in done.err, done
        status = lab.status(job.job)
        assert (status["state"], status["cause"]) == ("FAILED", "platform"), status

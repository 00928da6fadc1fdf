"""Jobs on a real API server; the tests play the operator and the kubelet.

``.ci/run heavy`` builds the programs and sets ``$CLOUDJOB_TEST_KUBERNETES`` to their folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import time
import urllib.error
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import yaml

from tests.support import operators, surroundings
from tests.support.kube_cluster import MERGE, Cluster, Log
from tests.support.newer_jobs import NewerCluster, NewerJobs
from tests.support.polling import Followed, poll

LIMIT_S = 180.0
RESOURCES = {
    "volcano": "/apis/batch.volcano.sh/v1alpha1/namespaces/{}/jobs",
    "mpi-operator": "/apis/kubeflow.org/v2beta1/namespaces/{}/mpijobs",
    "ms-operator": "/apis/mindspore.gitee.com/v1/namespaces/{}/msjobs",
    "job": "/apis/batch/v1/namespaces/{}/jobs",
    "jobset": "/apis/jobset.x-k8s.io/v1alpha2/namespaces/{}/jobsets",
}
PLURALS = {"ConfigMap": "configmaps", "Secret": "secrets", "Service": "services", "Pod": "pods"}


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """An API server with the operators' CRDs."""
    shared_cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        shared_cluster.start()
        yield shared_cluster
    finally:
        shared_cluster.stop()


@pytest.fixture(scope="session")
def newer_cluster(cluster: Cluster) -> Iterator[NewerCluster]:
    """The same API server, with the Jobs of a newer one."""
    jobs = NewerJobs(cluster.port)
    yield NewerCluster(cluster, jobs)
    jobs.close()


@dataclass(frozen=True)
class Done:
    """The result of a finished command."""

    code: int
    out: str
    err: str

    def __str__(self) -> str:
        return f"exit {self.code}\n--- out\n{self.out[-3000:]}\n--- err\n{self.err[-3000:]}"

    @property
    def job(self) -> str:
        match = re.search(r"kubernetes://[^\s/]+/[^/]+/[^/]+/([a-z0-9-]+)", self.err + self.out)
        assert match, self
        return match[1]


@dataclass
class Lab:
    """A namespace, the command line, and the actions of an operator and a kubelet."""

    cluster: Cluster
    folder: Path
    engine: str = "volcano"
    namespace: str = ""
    image: str = "cloudjob/base:latest"
    environ: dict[str, str | bytes] = field(default_factory=dict)
    python: str = ""
    prefix: tuple[str, ...] = ()
    groups: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.namespace = self.cluster.namespace()
        self.source.mkdir(parents=True)
        self.store.mkdir()
        (self.source / "train.py").write_text("print('hello')\n")
        self.environ["KUBECONFIG"] = str(self.cluster.kubeconfig(namespace=self.namespace))
        self.environ["CLOUDJOB_HOME"] = str(self.folder / "home")
        self.write()

    @property
    def source(self) -> Path:
        return self.folder / "source"

    @property
    def store(self) -> Path:
        return self.folder / "store"

    def write(self, **options: Any) -> None:
        """Write the job file; all options but ``mindspore`` go into section ``kubernetes``."""
        sections = {name: options.pop(name) for name in ("mindspore",) if name in options}
        store = str(self.store)
        volume = {"name": "store", "hostPath": {"path": store}, "mountPath": store}
        section = {"engine": self.engine, "volumes": [volume], "cpus": 1, **options}
        text = {
            "backend": "kubernetes",
            "store": f"file://{store}",
            "image": self.image,
            "kubernetes": section,
            **sections,
        }
        if self.engine == "ms-operator":
            text["launcher"] = "dynamic-cluster"
        (self.source / "job.yaml").write_text(yaml.safe_dump(text))

    # -- the command line ---------------------------------------------------------------------

    def start(
        self, *arguments: str, out: int | BinaryIO = subprocess.PIPE
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*surroundings.words(self), *arguments],
            cwd=self.source,
            env={**os.environ, **self.environ},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.PIPE if out == subprocess.PIPE else subprocess.STDOUT,
            text=True,
        )

    def end(self, process: subprocess.Popen[str], limit_s: float = LIMIT_S) -> Done:
        try:
            out, err = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            err += "\n(killed by the test: it took too long)"
        return Done(process.returncode, out, err)

    def run(self, *arguments: str) -> Done:
        return self.end(self.start(*arguments))

    def submit(self, *arguments: str) -> str:
        """Submit a job and return its id."""
        done = self.run("submit", "--config", "job.yaml", "--detach", *arguments, "train.py")
        assert done.code == 0, done
        return done.job

    def status(self, job: str) -> dict[str, Any]:
        done = self.run("status", job, "--json")
        assert done.code == 0, done
        values: dict[str, Any] = json.loads(done.out)
        return values

    def await_log(self, job: str, *texts: bytes) -> None:
        """Wait until the log of a job contains all of these texts."""
        path = self.folder / f"{job}.log"
        with path.open("wb") as file:
            process = self.start("logs", "--follow", job, out=file)
        with Followed(process, path) as followed:
            followed.await_all(*texts, limit_s=LIMIT_S)

    # -- the operator -------------------------------------------------------------------------

    def path(self, job: str = "") -> str:
        return RESOURCES[self.engine].format(self.namespace) + (f"/{job}" if job else "")

    def core(self, kind: str, name: str = "") -> str:
        tail = f"/{name}" if name else ""
        return f"/api/v1/namespaces/{self.namespace}/{PLURALS[kind]}{tail}"

    def get(self, path: str) -> Any:
        """Return an object, or None if it does not exist."""
        try:
            return self.cluster.ask("GET", path)
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
            return None

    def operate(self, job: str, *, again: bool = False) -> list[str]:
        """Create a job's objects as the operator does, and return the names of its pods by node.

        Args:
            again: Whether its other objects exist.
        """
        manifest = self.get(self.path(job))
        operated = operators.made_of(manifest, manifest["metadata"]["uid"])
        for item in [*([] if again else operated.objects), *operated.pods]:
            with contextlib.suppress(KeyError):
                del item["spec"]["schedulerName"]
            self.cluster.ask("POST", self.core(item["kind"]), item)
        return [item["metadata"]["name"] for item in operated.pods]

    def phase(self, job: str, phase: str, **more: Any) -> None:
        """Write the operator's status of the job."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        if self.engine == "volcano":
            status: Any = {"state": {"phase": phase, "lastTransitionTime": now}, **more}
        elif self.engine == "job":
            status = {**_job_status(phase, now), **more}
        elif self.engine == "jobset":
            status = {**_jobset_status(phase, now), **more}
        else:
            held = {"type": phase, "status": "True", "lastTransitionTime": now, **more}
            status = {"conditions": [held], "startTime": now, "replicaStatuses": {}}
        self.cluster.ask("PATCH", self.path(job) + "/status", {"status": status}, kind=MERGE)

    # -- the kubelet --------------------------------------------------------------------------

    def log(self, pod: str) -> Log:
        """Return the log of a pod's container."""
        return self.cluster.kubelet.log(self.namespace, pod)

    def pod_status(self, pod: str, status: dict[str, Any]) -> None:
        path = self.core("Pod", pod) + "/status"
        self.cluster.ask("PATCH", path, {"status": status}, kind=MERGE)

    def begin(self, *pods: str) -> None:
        """Bind pods to a cluster node, and mark their containers as running."""
        for pod in pods:
            binding = {
                "apiVersion": "v1",
                "kind": "Binding",
                "metadata": {"name": pod},
                "target": {"apiVersion": "v1", "kind": "Node", "name": "machine-0"},
            }
            self.cluster.ask("POST", self.core("Pod", pod) + "/binding", binding)
            now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            state = {"running": {"startedAt": now}}
            self.pod_status(
                pod, {"phase": "Running", "containerStatuses": [self._container(state)]}
            )

    def finish(self, pod: str, code: int = 0, reason: str = "", **more: Any) -> None:
        """Report that the container of a pod has ended."""
        self.log(pod).end()
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        terminated = {"exitCode": code, "startedAt": now, "finishedAt": now}
        terminated["reason"] = reason or ("Error" if code else "Completed")
        phase = "Failed" if code else "Succeeded"
        state = {"terminated": terminated}
        status = {"phase": phase, "containerStatuses": [self._container(state)], **more}
        self.pod_status(pod, status)

    def _container(self, state: dict[str, Any]) -> dict[str, Any]:
        return _container("mindspore" if self.engine == "ms-operator" else "cloudjob", state)

    def delete(self, pod: str) -> None:
        self.cluster.ask("DELETE", self.core("Pod", pod), {"gracePeriodSeconds": 0})


def _job_status(phase: str, now: str) -> dict[str, Any]:
    """Return the status that the Job controller writes in place of the phase of an operator."""
    ends = {"Succeeded": "Complete", "Failed": "Failed", "Suspended": "Suspended"}
    at = {"lastTransitionTime": now, "lastProbeTime": now}
    kinds = [ends[phase]] if phase in ends else []
    is_active = not kinds
    return {
        "conditions": [{"type": kind, "status": "True", **at} for kind in kinds],
        "startTime": now if phase != "Suspended" else None,
        "completionTime": now if phase == "Succeeded" else None,
        **{"active": int(is_active), "ready": int(phase == "Running"), "terminating": 0},
    }


def _jobset_status(phase: str, now: str) -> dict[str, Any]:
    """Return the status that JobSet's controller writes in place of the phase of an operator."""
    ends = {
        "Succeeded": ("Completed", "AllJobsCompleted"),
        "Failed": ("Failed", "FailedJobs"),
        "Suspended": ("Suspended", "SuspendedJobs"),
    }
    held = {"status": "True", "message": "", "lastTransitionTime": now}
    kinds = [ends[phase]] if phase in ends else []
    counts = dict.fromkeys(("ready", "succeeded", "failed", "suspended"), 0)
    return {
        "conditions": [{"type": kind, "reason": reason, **held} for kind, reason in kinds],
        "replicatedJobsStatus": [{"name": "node", **counts, "active": int(not kinds)}],
    }


def _container(name: str, state: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "image": "x",
        "imageID": "",
        "restartCount": 0,
        "ready": "running" in state,
        "state": state,
    }


def new_lab(request: pytest.FixtureRequest, folder: Path, engine: str) -> Lab:
    """Return a new namespace of the cluster that has this engine."""
    return Lab(cluster_of(request, engine), folder / "lab", engine=engine)


def cluster_of(request: pytest.FixtureRequest, engine: str) -> Cluster:
    """Return the cluster that has this engine."""
    name = "newer_cluster" if engine in ("job", "jobset") else "cluster"
    kube: Cluster = request.getfixturevalue(name)
    return kube


@pytest.fixture(params=["volcano", "mpi-operator", "job"])
def mpi_lab(request: pytest.FixtureRequest, tmp_path: Path, surround: Callable[[Lab], None]) -> Lab:
    """A new namespace, once with each engine that can start Open MPI."""
    value = new_lab(request, tmp_path, request.param)
    surround(value)
    return value


@pytest.fixture
def job_lab(request: pytest.FixtureRequest, tmp_path: Path) -> Lab:
    """A new namespace without an operator."""
    return new_lab(request, tmp_path, "job")


@pytest.fixture
def jobset_lab(request: pytest.FixtureRequest, tmp_path: Path) -> Lab:
    """A new namespace with JobSet."""
    return new_lab(request, tmp_path, "jobset")


@pytest.fixture
def mindspore_lab(request: pytest.FixtureRequest, tmp_path: Path) -> Lab:
    """A new namespace with MindSpore's operator."""
    return new_lab(request, tmp_path, "ms-operator")


@pytest.fixture(params=["volcano", "mpi-operator", "ms-operator"])
def operator_lab(request: pytest.FixtureRequest, tmp_path: Path) -> Lab:
    """A new namespace, once with each operator."""
    return new_lab(request, tmp_path, request.param)


@pytest.fixture(params=["volcano", "mpi-operator", "ms-operator", "job"])
def lab(request: pytest.FixtureRequest, tmp_path: Path, surround: Callable[[Lab], None]) -> Lab:
    """A new namespace, once with each engine."""
    value = new_lab(request, tmp_path, request.param)
    surround(value)
    return value


@pytest.fixture
def volcano_lab(request: pytest.FixtureRequest, tmp_path: Path) -> Lab:
    """A new namespace with Volcano."""
    return new_lab(request, tmp_path, "volcano")


def bind(lab: Lab, kind: str, role: str, user: str) -> None:
    """Give a user a role in the namespace."""
    group = "rbac.authorization.k8s.io"
    binding = {
        "apiVersion": f"{group}/v1",
        "kind": "RoleBinding",
        "metadata": {"name": f"{role}-{user}"},
        "roleRef": {"apiGroup": group, "kind": kind, "name": role},
        "subjects": [{"kind": "User", "name": user, "apiGroup": group}],
    }
    path = f"/apis/{group}/v1/namespaces/{lab.namespace}/rolebindings"
    lab.cluster.ask("POST", path, binding)


def may_edit(lab: Lab, cluster: Cluster, *users: str) -> None:
    """Give users the role ``edit`` in the namespace."""
    # A controller fills this role from others.
    cluster.controllers("clusterrole-aggregation")
    role = "/apis/rbac.authorization.k8s.io/v1/clusterroles/edit"
    poll(lambda: lab.get(role).get("rules"), "rules of the role edit")
    for user in users:
        bind(lab, "ClusterRole", "edit", user)


def log_in(lab: Lab, token: str) -> None:
    """Use the namespace as another user."""
    config = lab.cluster.kubeconfig(token=token, namespace=lab.namespace)
    lab.environ["KUBECONFIG"] = str(config)


@pytest.fixture
def until() -> Callable[..., None]:
    """A function that waits until a condition holds."""
    return poll

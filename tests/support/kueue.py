"""What Kueue does with one job: its Workload, admission, eviction and deactivation.

Written from the documentation of Kueue 0.19 (Workloads, and how to run Jobs). The tests call it in
place of its controllers: ``reconcile`` applies the rules to what users have changed since.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import ssl
import threading
import time
from collections.abc import Iterator
from typing import Any

from tests.e2e_kube.conftest import Lab
from tests.support.kube_cluster import MERGE, Cluster, make_certificate

GROUP = "kueue.x-k8s.io"
QUEUE_LABEL = f"{GROUP}/queue-name"
_VISIBILITY, _VERSION = f"visibility.{GROUP}", "v1beta2"


class Kueue:
    """Kueue, for one job that names a queue."""

    def __init__(self, lab: Lab, job: str) -> None:
        """Suspend the job, as the webhook does, and create its Workload."""
        self._lab = lab
        self._job = job
        self._path = f"/apis/{GROUP}/v1beta1/namespaces/{lab.namespace}/workloads"
        manifest = lab.get(lab.path(job))
        metadata = manifest["metadata"]
        owner = {key: metadata[key] for key in ("name", "uid")}
        owner |= {key: manifest[key] for key in ("apiVersion", "kind")}
        template = {"spec": {"containers": [{"name": "cloudjob"}]}}
        self._suspend(True)
        body = {
            **{"apiVersion": f"{GROUP}/v1beta1", "kind": "Workload"},
            "metadata": {
                "name": job,
                "labels": {f"{GROUP}/job-uid": metadata["uid"]},
                "ownerReferences": [{**owner, "controller": True}],
            },
            "spec": {
                "queueName": metadata["labels"][QUEUE_LABEL],
                "podSets": [{"name": "main", "count": 2, "template": template}],
            },
        }
        lab.cluster.ask("POST", f"{self._path}?fieldValidation=Strict", body)

    @property
    def workload(self) -> dict[str, Any]:
        """The Workload; empty after it was deleted."""
        return self._lab.get(f"{self._path}/{self._job}") or {}

    @property
    def is_suspended(self) -> bool:
        """Whether the job may have no pods."""
        return bool(self._policy(self._lab.get(self._lab.path(self._job))["spec"]).get("suspend"))

    def wait(self, reason: str, message: str) -> None:
        """Report why there is no quota for the job."""
        self._report(QuotaReserved=("False", reason, message))

    def admit(self) -> None:
        """Reserve quota for the job, and let it run."""
        self._report(
            QuotaReserved=("True", "QuotaReserved", "Quota reserved in ClusterQueue all"),
            Admitted=("True", "Admitted", "The workload is admitted"),
            Evicted=("False", "QuotaReserved", "Previously: evicted"),
        )
        self._suspend(False)

    def evict(self, reason: str, message: str) -> None:
        """Take the quota back; the job's controller then deletes the pods."""
        self._report(Evicted=("True", reason, message))
        self._suspend(True)
        self._report(
            QuotaReserved=("False", "Pending", message),
            Admitted=("False", "NoReservation", "The workload has no reservation"),
        )

    def reconcile(self) -> None:
        """Evict a deactivated job, and undo what others did to ``suspend``."""
        workload = self.workload
        if not workload:
            return
        held = {x["type"]: x["status"] == "True" for x in workload["status"]["conditions"]}
        is_admitted = held.get("Admitted", False)
        if is_admitted and not workload["spec"]["active"]:
            self.evict("Deactivated", "The workload is deactivated")
        elif is_admitted is self.is_suspended:
            self._suspend(not is_admitted)

    def _policy(self, spec: dict[str, Any]) -> dict[str, Any]:
        policy: dict[str, Any] = spec["runPolicy"] if self._lab.engine == "mpi-operator" else spec
        return policy

    def _suspend(self, is_suspended: bool) -> None:
        suspend: dict[str, Any] = {"suspend": is_suspended}
        if self._lab.engine == "mpi-operator":
            suspend = {"runPolicy": suspend}
        self._lab.cluster.ask("PATCH", self._lab.path(self._job), {"spec": suspend}, kind=MERGE)

    def _report(self, **conditions: tuple[str, str, str]) -> None:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        items = {
            item["type"]: item for item in self.workload.get("status", {}).get("conditions", ())
        }
        for kind, (status, reason, message) in conditions.items():
            item = {"type": kind, "status": status, "reason": reason, "message": message}
            items[kind] = {**item, "lastTransitionTime": now}
        status_path = f"{self._path}/{self._job}/status"
        status = {"status": {"conditions": [*items.values()]}}
        self._lab.cluster.ask("PATCH", status_path, status, kind=MERGE)


@contextlib.contextmanager
def visibility(cluster: Cluster) -> Iterator[None]:
    """Serve Kueue's API of positions in queues; the API server checks the permissions for it."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parts = self.path.partition("?")[0].strip("/").split("/")
            data = json.dumps(_pending(cluster, parts[4], parts[6]) if parts[7:] else _resources())
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(data.encode())

        def log_message(self, *args: Any) -> None:
            pass

    make_certificate(cluster.folder / "visibility", "localhost")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cluster.folder / "visibility.crt", cluster.folder / "visibility.key")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        cluster.serve(_VISIBILITY, _VERSION, server.server_port)
        try:
            cluster.await_resources(_VISIBILITY, _VERSION)
            yield
        finally:
            cluster.unserve(_VISIBILITY, _VERSION)
            server.shutdown()


def _resources() -> dict[str, Any]:
    resource = {"name": "localqueues/pendingworkloads", "kind": "PendingWorkloadsSummary"}
    return {
        **{"kind": "APIResourceList", "apiVersion": "v1"},
        "groupVersion": f"{_VISIBILITY}/{_VERSION}",
        "resources": [{**resource, "singularName": "", "namespaced": True, "verbs": ["get"]}],
    }


def _pending(cluster: Cluster, namespace: str, queue: str) -> dict[str, Any]:
    """Return the summary of a queue: the oldest Workload is the first."""
    path = f"/apis/{GROUP}/v1beta1/namespaces/{namespace}/workloads"
    items = [x for x in cluster.ask("GET", path)["items"] if x["spec"]["queueName"] == queue]
    items.sort(key=lambda item: (item["metadata"]["creationTimestamp"], item["metadata"]["name"]))
    return {
        **{"kind": "PendingWorkloadsSummary", "apiVersion": f"{_VISIBILITY}/{_VERSION}"},
        "items": [
            {"metadata": item["metadata"], "localQueueName": queue, "positionInLocalQueue": number}
            for number, item in enumerate(items)
        ],
    }

"""Failures between cloudjob and an API server over real HTTP: nothing is lost or done twice."""

from __future__ import annotations

import base64
import json
import ssl
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cloudjob.backends.kubernetes import client, request
from cloudjob.backends.kubernetes.backend import KubernetesBackend
from cloudjob.backends.kubernetes.client import Client
from cloudjob.backends.kubernetes.kubeconfig import find
from cloudjob.backends.kubernetes.request import ENGINES
from cloudjob.errors import BackendError, NotAuthorised
from cloudjob.retries import RequestLimits
from tests.e2e_kube.conftest import Lab
from tests.support.kube_cluster import Cluster, write_kubeconfig
from tests.support.servers import LOST_ANSWER, Fault, FaultProxy
from tests.unit.cloudjob.backends.test_kubernetes_build import submission

pytestmark = pytest.mark.kubernetes

QUICK = RequestLimits(total_s=20.0, answer_s=10.0, pause_s=0.05, longest_pause_s=0.5)


class ProxiedBackend:
    """A backend that reaches the cluster through a proxy."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab = lab
        self.proxy = FaultProxy(lab.cluster.port, tls=ssl._create_unverified_context())
        config = lab.cluster.kubeconfig(server=self.proxy.endpoint, namespace=lab.namespace)
        self.backend = self.backend_of(folder, config)

    def backend_of(self, folder: Path, config: Path) -> KubernetesBackend:
        options = {"engine": self.lab.engine, "kubeconfig": str(config)}
        return KubernetesBackend(folder / "home", options, environ={}, limits=QUICK)

    def send(self, nodes: int = 1) -> str:
        """Send a job and return its handle."""
        return self.backend.send(self.backend.build(submission(self.lab.engine, nodes=nodes)))

    def fail(self, fault: Fault, method: str, text: str, **more: Any) -> None:
        """Inject this fault into the next request of this method with this text in its target."""
        self.proxy.add(fault, when=lambda r: r.method == method and text in r.target, **more)


@pytest.fixture
def proxied(volcano_lab: Lab, tmp_path: Path) -> Iterator[ProxiedBackend]:
    """A backend behind a proxy that can inject faults."""
    backend = ProxiedBackend(volcano_lab, tmp_path)
    yield backend
    backend.proxy.close()


def job_of(handle: str) -> str:
    """Return the job id of a handle."""
    return handle.rpartition("/")[2]


# -- requests -------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [429, 500, 503, 504])
def test_a_request_to_a_busy_server_is_repeated(proxied: ProxiedBackend, status: int):
    headers = {"Retry-After": "1"} if status == 429 else {}
    proxied.fail(Fault(status=status, body=b"busy", headers=headers), "POST", "/jobs", times=2)
    begun = time.monotonic()
    handle = proxied.send()

    assert proxied.lab.get(proxied.lab.path(job_of(handle)))
    assert len(proxied.proxy.seen("POST", "/jobs")) == 3
    assert status != 429 or time.monotonic() - begun >= 2


@pytest.mark.parametrize("kind", ["/configmaps", "/secrets", "/jobs"])
def test_a_create_whose_answer_got_lost_makes_one_object(proxied: ProxiedBackend, kind: str):
    """The second create is refused (409 AlreadyExists), and the existing object is ours."""
    proxied.fail(LOST_ANSWER, "POST", kind)
    handle = proxied.send(nodes=2)
    job = proxied.lab.get(proxied.lab.path(job_of(handle)))

    assert len(proxied.proxy.seen("POST", kind)) == 2
    owned = proxied.lab.get(proxied.lab.core("Secret", f"{job_of(handle)}-delivery"))
    assert owned["metadata"]["ownerReferences"][0]["uid"] == job["metadata"]["uid"]


@pytest.mark.parametrize("is_temporary", [True, False])
def test_fresh_keys_go_into_the_secret_of_a_job_with_temporary_ones(
    proxied: ProxiedBackend, is_temporary: bool
):
    """A Secret with keys that never expire is immutable."""
    access = {"CLOUDJOB_S3_SESSION_TOKEN": "old"} if is_temporary else {}
    handle = proxied.backend.send(
        proxied.backend.build(submission("volcano")._replace(access=access))
    )
    path = proxied.lab.core("Secret", f"{job_of(handle)}-delivery")

    if not is_temporary:
        with pytest.raises(BackendError, match="immutable"):
            proxied.backend.refresh(handle, {"A": "fresh"})
        return
    proxied.backend.refresh(handle, {"A": "fresh"})

    data = proxied.lab.get(path)["data"]
    assert base64.b64decode(data["store-keys"]) == b"A=fresh\0"
    assert b"CLOUDJOB_S3_SESSION_TOKEN=old" in base64.b64decode(data["env"])


def test_an_object_of_another_job_is_not_taken_for_ours(proxied: ProxiedBackend):
    """If an object has our name but not our label, no job is made and our objects are removed."""
    job_request = request.build(submission("volcano"), ENGINES["volcano"], proxied.lab.namespace)
    other = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": job_request.job_names.delivery},
    }
    proxied.lab.cluster.ask("POST", proxied.lab.core("Secret"), other)

    with pytest.raises(BackendError, match="already exists"):
        proxied.send()

    assert proxied.lab.get(proxied.lab.path(job_request.job_names.name)) is None
    assert proxied.lab.get(proxied.lab.core("ConfigMap", job_request.job_names.entry)) is None


def test_a_job_that_cannot_be_created_leaves_no_services(mindspore_lab: Lab, tmp_path: Path):
    """When one Service is refused, the others are removed."""
    proxied = ProxiedBackend(mindspore_lab, tmp_path)
    try:
        fault = Fault(status=403, body=b'{"kind": "Status", "message": "no more", "code": 403}')
        proxied.proxy.add(
            fault, when=lambda r: r.method == "POST" and "/services" in r.target, skip=5
        )
        with pytest.raises(BackendError, match=r"creating the Service .*: no more"):
            proxied.send(nodes=20)
    finally:
        proxied.proxy.close()

    for kind in ("Service", "ConfigMap", "Secret"):
        assert mindspore_lab.get(mindspore_lab.core(kind))["items"] == [], kind


def test_a_patch_that_conflicts_is_retried(proxied: ProxiedBackend):
    """When two clients write at the same time, the server refuses one of them (409 Conflict)."""
    body = {"kind": "Status", "reason": "Conflict", "code": 409}
    proxied.fail(Fault(status=409, body=json.dumps(body).encode()), "PATCH", "/configmaps")
    handle = proxied.send()

    entry_map = proxied.lab.get(proxied.lab.core("ConfigMap", f"{job_of(handle)}-entry"))
    assert entry_map["metadata"]["ownerReferences"]


def test_an_unreachable_server_is_reported_in_one_line(proxied: ProxiedBackend):
    proxied.proxy.close()
    backend = KubernetesBackend(
        Path("/nowhere"), proxied.backend._options, environ={}, limits=RequestLimits(total_s=1.0)
    )
    with pytest.raises(BackendError) as caught:
        backend.send(backend.build(submission("volcano")))

    assert "there is no API server at http://127.0.0.1" in caught.value.message
    assert caught.value.hint


def test_an_expired_token_is_requested_again(proxied: ProxiedBackend, tmp_path: Path):
    """The kubeconfig's plugin is run again after a 401, once per request."""
    count = tmp_path / "count"
    plugin = tmp_path / "login"
    plugin.write_text(
        f"#!{sys.executable}\n"
        "import json, pathlib\n"
        f"count = pathlib.Path({str(count)!r})\n"
        "number = int(count.read_text()) + 1 if count.exists() else 1\n"
        "count.write_text(str(number))\n"
        f"token = {proxied.lab.cluster.admin!r} if number > 1 else 'expired'\n"
        "print(json.dumps({'kind': 'ExecCredential', 'status': {'token': token},\n"
        "                  'apiVersion': 'client.authentication.k8s.io/v1beta1'}))\n"
    )
    plugin.chmod(plugin.stat().st_mode | stat.S_IXUSR)
    user = {
        "exec": {
            "apiVersion": "client.authentication.k8s.io/v1beta1",
            "command": str(plugin),
            "interactiveMode": "Never",
        }
    }
    cluster = {"server": proxied.lab.cluster.endpoint, "insecure-skip-tls-verify": True}
    config = write_kubeconfig(tmp_path, cluster, user, proxied.lab.namespace)
    backend = proxied.backend_of(tmp_path, config)
    with pytest.warns(Warning, match="Unverified HTTPS"):
        handle = backend.send(backend.build(submission("volcano")))

    assert proxied.lab.get(proxied.lab.path(job_of(handle)))
    assert count.read_text() == "2"


def test_a_token_that_stays_invalid_ends_the_retries(proxied: ProxiedBackend, tmp_path: Path):
    """The request is repeated once, then the error is reported."""
    config = proxied.lab.cluster.kubeconfig(
        server=proxied.proxy.endpoint, token="nobody", namespace=proxied.lab.namespace
    )
    client = Client(find({"kubeconfig": str(config)}, {}, tmp_path), limits=QUICK)
    with pytest.raises(NotAuthorised):
        client.get(proxied.lab.core("Pod"), "looking for pods")

    assert len(proxied.proxy.seen("GET", "/pods")) == 2


def test_a_list_whose_continuation_has_expired_is_read_from_its_beginning(
    proxied: ProxiedBackend, tmp_path: Path
):
    """The continuation token of a page has expired when the next page is requested (410)."""
    handle = proxied.send(nodes=3)
    pods = proxied.lab.operate(job_of(handle))
    client = proxied.backend._client(proxied.backend._cluster)
    page = {"kind": "PodList", "items": [{"old": 1}], "metadata": {"continue": "then"}}
    proxied.fail(Fault(status=200, body=json.dumps(page).encode()), "GET", "/pods?limit")
    body = b'{"kind": "Status", "code": 410, "reason": "Expired"}'
    proxied.fail(Fault(status=410, body=body), "GET", "continue=then")
    listed = client.list(proxied.lab.core("Pod"), "looking for pods")

    assert [item["metadata"]["name"] for item in listed["items"]] == pods
    assert len(proxied.proxy.seen("GET", "/pods?limit")) == 3


# -- streams --------------------------------------------------------------------------------------


class Following(threading.Thread):
    """Follows a job's log in a thread."""

    def __init__(self, backend: KubernetesBackend, handle: str) -> None:
        super().__init__(daemon=True)
        self._pieces = backend.logs(handle, None, follow=True)
        self.data: dict[int, bytes] = {}
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            for node, data in self._pieces:
                if data:
                    self.data[node] = self.data.get(node, b"") + data
        except Exception as error:  # noqa: BLE001 (the test checks it)
            self.error = error

    def end(self) -> dict[int, bytes]:
        self.join(60)
        assert not self.is_alive(), "it still follows"
        assert self.error is None, self.error
        return self.data


def lines(count: int) -> list[bytes]:
    """Return ``count`` lines of a log, without newlines."""
    return [b"line %d" % number for number in range(count)]


def text(count: int) -> bytes:
    """Return a log of ``count`` lines."""
    return b"".join(line + b"\n" for line in lines(count))


@pytest.mark.parametrize("is_one_moment", [False, True], ids=["each its time", "one moment"])
def test_a_log_that_is_cut_again_and_again_has_each_line_once(
    proxied: ProxiedBackend, until: Callable[..., None], is_one_moment: bool
):
    lab = proxied.lab
    handle = proxied.send()
    (pod,) = lab.operate(job_of(handle))
    lab.begin(pod)
    lab.phase(job_of(handle), "Running")
    lab.cluster.kubelet.cut_after = 13
    try:
        log = lab.log(pod)
        following = Following(proxied.backend, handle)
        until(lambda: proxied.proxy.seen("GET", "follow=true"), "a stream")
        for number, line in enumerate(lines(40)):
            second = 0 if is_one_moment else number
            log.write(line, at=f"2026-11-21T10:00:{second:02d}.000000001Z")
        until(lambda: len(proxied.proxy.seen("GET", "follow=true")) > 2, "a stream after each cut")
        lab.finish(pod)
        lab.phase(job_of(handle), "Completed")

        assert following.end() == {0: text(40)}
    finally:
        lab.cluster.kubelet.cut_after = 0
    assert b"".join(data for _, data in proxied.backend.logs(handle, None, follow=False)) == text(
        40
    )


def test_a_log_whose_connection_breaks_has_each_line_once(
    proxied: ProxiedBackend, until: Callable[..., None]
):
    lab = proxied.lab
    handle = proxied.send()
    (pod,) = lab.operate(job_of(handle))
    lab.begin(pod)
    lab.phase(job_of(handle), "Running")
    proxied.fail(Fault(cut_response_at=300), "GET", "/log", times=2)
    following = Following(proxied.backend, handle)
    until(lambda: proxied.proxy.seen("GET", "/log"), "a stream")
    for number, line in enumerate(lines(30)):
        lab.log(pod).write(line, at=f"2026-11-21T10:00:00.{number:09d}Z")
    until(lambda: len(proxied.proxy.seen("GET", "/log")) > 2, "a stream after each break")
    lab.finish(pod)
    lab.phase(job_of(handle), "Completed")

    assert following.end() == {0: text(30)}


@pytest.mark.parametrize(
    "fault",
    [
        Fault(status=410, body=b'{"kind": "Status", "code": 410, "reason": "Expired"}'),
        Fault(status=429, body=b"busy"),
        Fault(status=401, body=b'{"kind": "Status", "code": 401, "reason": "Unauthorized"}'),
        Fault(cut_response_at=700),
        Fault(cut_response_at=700, resets=False),
    ],
    ids=["410", "429", "401", "reset", "end"],
)
def test_a_watch_that_breaks_misses_no_pod(
    proxied: ProxiedBackend, until: Callable[..., None], fault: Fault
):
    """It resumes where it stopped, or starts again if the server no longer has that version."""
    lab = proxied.lab
    handle = proxied.send(nodes=2)
    proxied.fail(fault, "GET", "watch=true", times=2)
    following = Following(proxied.backend, handle)
    until(lambda: proxied.proxy.seen("GET", "watch=true"), "a watch")
    pods = lab.operate(job_of(handle))
    for pod in pods:
        lab.log(pod).write(b"line 0")
        lab.begin(pod)
    lab.phase(job_of(handle), "Running")
    until(lambda: len(following.data) == 2 and all(following.data.values()), "lines of both")
    for pod in pods:
        lab.finish(pod)
    lab.phase(job_of(handle), "Completed")

    assert following.end() == {0: text(1), 1: text(1)}


def test_a_watch_that_is_reported_as_too_old_starts_again(
    proxied: ProxiedBackend, until: Callable[..., None]
):
    """Servers usually report it as an event of the type ERROR with the code 410."""
    lab = proxied.lab
    handle = proxied.send()
    event = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired"}}
    body = json.dumps(event).encode() + b"\n"
    proxied.fail(Fault(status=200, body=body), "GET", "watch=true")
    following = Following(proxied.backend, handle)
    until(lambda: len(proxied.proxy.seen("GET", "watch=true")) > 1, "a second watch")
    (pod,) = lab.operate(job_of(handle))
    lab.log(pod).write(b"line 0")
    lab.begin(pod)
    lab.finish(pod)
    lab.phase(job_of(handle), "Completed")

    assert following.end() == {0: text(1)}
    lists = [r for r in proxied.proxy.seen("GET", "/pods?") if "watch" not in r.target]
    assert len(lists) >= 2


def test_a_log_is_followed_on_when_a_token_has_expired(
    proxied: ProxiedBackend, until: Callable[..., None]
):
    """The first stream is refused (401); the next one logs in again, and no line is missing."""
    lab = proxied.lab
    handle = proxied.send()
    (pod,) = lab.operate(job_of(handle))
    lab.log(pod).write(b"line 0")
    lab.begin(pod)
    lab.phase(job_of(handle), "Running")
    body = b'{"kind": "Status", "code": 401, "reason": "Unauthorized"}'
    proxied.fail(Fault(status=401, body=body), "GET", "follow=true", times=2)
    following = Following(proxied.backend, handle)
    until(lambda: following.data.get(0), "the first line")
    lab.finish(pod)
    lab.phase(job_of(handle), "Completed")

    assert following.end() == {0: text(1)}
    assert len(proxied.proxy.seen("GET", "follow=true")) >= 3


def test_100_pods_need_one_watch_and_one_stream_each(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # On a busy machine, a connection may take longer than usual.
    monkeypatch.setattr(client, "_CONNECT_S", 60.0)
    lab = Lab(cluster, tmp_path / "lab")
    proxied = ProxiedBackend(lab, tmp_path)
    try:
        handle = proxied.send(nodes=100)
        pods = lab.operate(job_of(handle))
        lab.begin(*pods)
        lab.phase(job_of(handle), "Running")
        following = Following(proxied.backend, handle)
        for pod in pods:
            lab.log(pod).write(*lines(5))
        deadline = time.monotonic() + 60
        while sum(map(len, following.data.values())) < 100 * len(text(5)):
            assert time.monotonic() < deadline, len(following.data)
            time.sleep(0.1)
        count = len(proxied.proxy.requests)
        time.sleep(3)
        watches = proxied.proxy.seen("GET", "watch=true")
        streams = proxied.proxy.seen("GET", "follow=true")
        assert (len(watches), len(streams)) == (1, 100)
        assert len(proxied.proxy.requests) == count, "there are no other requests while pods write"
        for pod in pods:
            lab.finish(pod)
        lab.phase(job_of(handle), "Completed")
        assert following.end() == {node: text(5) for node in range(100)}
        assert len(proxied.proxy.seen("GET", "watch=true")) == 1
        assert len(proxied.proxy.seen("GET", "follow=true")) == 100
    finally:
        proxied.proxy.close()

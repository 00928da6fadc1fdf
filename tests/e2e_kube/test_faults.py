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
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cloudjob.backends.kubernetes import request
from cloudjob.backends.kubernetes.backend import KubernetesBackend
from cloudjob.backends.kubernetes.client import Client
from cloudjob.backends.kubernetes.kubeconfig import find
from cloudjob.backends.kubernetes.request import ENGINES
from cloudjob.errors import BackendError, NotAuthorised
from cloudjob.retries import Limits
from tests.cloudjob.backends.test_kubernetes_build import submission
from tests.e2e_kube.conftest import Lab
from tests.support.kube_cluster import Cluster, write_kubeconfig
from tests.support.servers import LOST_ANSWER, Fault, FaultProxy

pytestmark = pytest.mark.kubernetes

QUICK = Limits(total_s=20.0, answer_s=10.0, pause_s=0.05, longest_pause_s=0.5)


class Way:
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
def way(volcano_lab: Lab, tmp_path: Path) -> Iterator[Way]:
    """A backend behind a proxy that can inject faults."""
    made = Way(volcano_lab, tmp_path)
    yield made
    made.proxy.close()


def words_of(handle: str) -> str:
    """Return the job id of a handle."""
    return handle.rpartition("/")[2]


# -- requests -------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [429, 500, 503, 504])
def test_a_server_that_is_busy_is_asked_again(way: Way, status: int):
    headers = {"Retry-After": "1"} if status == 429 else {}
    way.fail(Fault(status=status, body=b"busy", headers=headers), "POST", "/jobs", times=2)
    begun = time.monotonic()
    handle = way.send()

    assert way.lab.get(way.lab.path(words_of(handle)))
    assert len(way.proxy.seen("POST", "/jobs")) == 3
    assert status != 429 or time.monotonic() - begun >= 2


@pytest.mark.parametrize("kind", ["/configmaps", "/secrets", "/jobs"])
def test_a_create_whose_answer_got_lost_makes_one_object(way: Way, kind: str):
    """The second create is refused (409 AlreadyExists), and the existing object is ours."""
    way.fail(LOST_ANSWER, "POST", kind)
    handle = way.send(nodes=2)
    job = way.lab.get(way.lab.path(words_of(handle)))

    assert len(way.proxy.seen("POST", kind)) == 2
    owned = way.lab.get(way.lab.core("Secret", f"{words_of(handle)}-delivery"))
    assert owned["metadata"]["ownerReferences"][0]["uid"] == job["metadata"]["uid"]


@pytest.mark.parametrize("is_temporary", [True, False])
def test_fresh_keys_go_into_the_secret_of_a_job_with_temporary_ones(way: Way, is_temporary: bool):
    """A Secret with keys that never expire is immutable."""
    access = {"CLOUDJOB_S3_SESSION_TOKEN": "old"} if is_temporary else {}
    handle = way.backend.send(way.backend.build(replace(submission("volcano"), access=access)))
    path = way.lab.core("Secret", f"{words_of(handle)}-delivery")

    if not is_temporary:
        with pytest.raises(BackendError, match="immutable"):
            way.backend.refresh(handle, {"A": "fresh"})
        return
    way.backend.refresh(handle, {"A": "fresh"})

    data = way.lab.get(path)["data"]
    assert base64.b64decode(data["store-keys"]) == b"A=fresh\0"
    assert b"CLOUDJOB_S3_SESSION_TOKEN=old" in base64.b64decode(data["env"])


def test_an_object_of_another_job_is_not_taken_for_ours(way: Way):
    """If an object has our name but not our label, no job is made and our objects are removed."""
    made = request.build(submission("volcano"), ENGINES["volcano"], way.lab.namespace)
    other = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": made.job_names.delivery}}
    way.lab.cluster.ask("POST", way.lab.core("Secret"), other)

    with pytest.raises(BackendError, match="already exists"):
        way.send()

    assert way.lab.get(way.lab.path(made.job_names.name)) is None
    assert way.lab.get(way.lab.core("ConfigMap", made.job_names.entry)) is None


def test_services_of_a_job_that_cannot_be_made_do_not_stay(mindspore_lab: Lab, tmp_path: Path):
    """When one Service is refused, the others are removed."""
    way = Way(mindspore_lab, tmp_path)
    try:
        fault = Fault(status=403, body=b'{"kind": "Status", "message": "no more", "code": 403}')
        way.proxy.add(fault, when=lambda r: r.method == "POST" and "/services" in r.target, skip=5)
        with pytest.raises(BackendError, match=r"creating the Service .*: no more"):
            way.send(nodes=20)
    finally:
        way.proxy.close()

    for kind in ("Service", "ConfigMap", "Secret"):
        assert mindspore_lab.get(mindspore_lab.core(kind))["items"] == [], kind


def test_a_patch_that_conflicts_is_retried(way: Way):
    """When two clients write at the same time, the server refuses one of them (409 Conflict)."""
    body = {"kind": "Status", "reason": "Conflict", "code": 409}
    way.fail(Fault(status=409, body=json.dumps(body).encode()), "PATCH", "/configmaps")
    handle = way.send()

    found = way.lab.get(way.lab.core("ConfigMap", f"{words_of(handle)}-entry"))
    assert found["metadata"]["ownerReferences"]


def test_an_unreachable_server_is_reported_in_one_line(way: Way):
    way.proxy.close()
    backend = KubernetesBackend(
        Path("/nowhere"), way.backend._options, environ={}, limits=Limits(total_s=1.0)
    )
    with pytest.raises(BackendError) as caught:
        backend.send(backend.build(submission("volcano")))

    assert "there is no API server at http://127.0.0.1" in caught.value.message
    assert caught.value.hint


def test_a_token_that_has_expired_is_asked_for_again(way: Way, tmp_path: Path):
    """The kubeconfig's plugin is run again after a 401, once per request."""
    count = tmp_path / "count"
    plugin = tmp_path / "login"
    plugin.write_text(
        f"#!{sys.executable}\n"
        "import json, pathlib\n"
        f"count = pathlib.Path({str(count)!r})\n"
        "number = int(count.read_text()) + 1 if count.exists() else 1\n"
        "count.write_text(str(number))\n"
        f"token = {way.lab.cluster.admin!r} if number > 1 else 'expired'\n"
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
    cluster = {"server": way.lab.cluster.endpoint, "insecure-skip-tls-verify": True}
    config = write_kubeconfig(tmp_path, cluster, user, way.lab.namespace)
    backend = way.backend_of(tmp_path, config)
    with pytest.warns(Warning, match="Unverified HTTPS"):
        handle = backend.send(backend.build(submission("volcano")))

    assert way.lab.get(way.lab.path(words_of(handle)))
    assert count.read_text() == "2"


def test_a_token_that_stays_invalid_ends_the_retries(way: Way, tmp_path: Path):
    """The request is repeated once, then the error is reported."""
    config = way.lab.cluster.kubeconfig(
        server=way.proxy.endpoint, token="nobody", namespace=way.lab.namespace
    )
    client = Client(find({"kubeconfig": str(config)}, {}, tmp_path), limits=QUICK)
    with pytest.raises(NotAuthorised):
        client.get(way.lab.core("Pod"), "looking for pods")

    assert len(way.proxy.seen("GET", "/pods")) == 2


def test_a_list_whose_continuation_has_expired_is_read_from_its_beginning(way: Way, tmp_path: Path):
    """The continuation token of a page has expired when the next page is requested (410)."""
    handle = way.send(nodes=3)
    pods = way.lab.operate(words_of(handle))
    client = way.backend._client(way.backend._cluster)
    page = {"kind": "PodList", "items": [{"old": 1}], "metadata": {"continue": "then"}}
    way.fail(Fault(status=200, body=json.dumps(page).encode()), "GET", "/pods?limit")
    body = b'{"kind": "Status", "code": 410, "reason": "Expired"}'
    way.fail(Fault(status=410, body=body), "GET", "continue=then")
    found = client.list(way.lab.core("Pod"), "looking for pods")

    assert [item["metadata"]["name"] for item in found["items"]] == pods
    assert len(way.proxy.seen("GET", "/pods?limit")) == 3


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
    way: Way, until: Callable[..., None], is_one_moment: bool
):
    lab = way.lab
    handle = way.send()
    (pod,) = lab.operate(words_of(handle))
    lab.begin(pod)
    lab.phase(words_of(handle), "Running")
    lab.cluster.kubelet.cut_after = 13
    try:
        log = lab.log(pod)
        following = Following(way.backend, handle)
        until(lambda: way.proxy.seen("GET", "follow=true"), "a stream")
        for number, line in enumerate(lines(40)):
            second = 0 if is_one_moment else number
            log.write(line, at=f"2026-11-21T10:00:{second:02d}.000000001Z")
        until(lambda: len(way.proxy.seen("GET", "follow=true")) > 2, "a stream after each cut")
        lab.finish(pod)
        lab.phase(words_of(handle), "Completed")

        assert following.end() == {0: text(40)}
    finally:
        lab.cluster.kubelet.cut_after = 0
    assert b"".join(data for _, data in way.backend.logs(handle, None, follow=False)) == text(40)


def test_a_log_whose_connection_breaks_has_each_line_once(way: Way, until: Callable[..., None]):
    lab = way.lab
    handle = way.send()
    (pod,) = lab.operate(words_of(handle))
    lab.begin(pod)
    lab.phase(words_of(handle), "Running")
    way.fail(Fault(cut_response_at=300), "GET", "/log", times=2)
    following = Following(way.backend, handle)
    until(lambda: way.proxy.seen("GET", "/log"), "a stream")
    for number, line in enumerate(lines(30)):
        lab.log(pod).write(line, at=f"2026-11-21T10:00:00.{number:09d}Z")
    until(lambda: len(way.proxy.seen("GET", "/log")) > 2, "a stream after each break")
    lab.finish(pod)
    lab.phase(words_of(handle), "Completed")

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
def test_a_watch_that_breaks_misses_no_pod(way: Way, until: Callable[..., None], fault: Fault):
    """It resumes where it stopped, or starts again if the server no longer has that version."""
    lab = way.lab
    handle = way.send(nodes=2)
    way.fail(fault, "GET", "watch=true", times=2)
    following = Following(way.backend, handle)
    until(lambda: way.proxy.seen("GET", "watch=true"), "a watch")
    pods = lab.operate(words_of(handle))
    for pod in pods:
        lab.log(pod).write(b"line 0")
        lab.begin(pod)
    lab.phase(words_of(handle), "Running")
    until(lambda: len(following.data) == 2 and all(following.data.values()), "lines of both")
    for pod in pods:
        lab.finish(pod)
    lab.phase(words_of(handle), "Completed")

    assert following.end() == {0: text(1), 1: text(1)}


def test_a_watch_that_is_reported_as_too_old_starts_again(way: Way, until: Callable[..., None]):
    """Servers usually report it as an event of the type ERROR with the code 410."""
    lab = way.lab
    handle = way.send()
    event = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired"}}
    body = json.dumps(event).encode() + b"\n"
    way.fail(Fault(status=200, body=body), "GET", "watch=true")
    following = Following(way.backend, handle)
    until(lambda: len(way.proxy.seen("GET", "watch=true")) > 1, "a second watch")
    (pod,) = lab.operate(words_of(handle))
    lab.log(pod).write(b"line 0")
    lab.begin(pod)
    lab.finish(pod)
    lab.phase(words_of(handle), "Completed")

    assert following.end() == {0: text(1)}
    lists = [r for r in way.proxy.seen("GET", "/pods?") if "watch" not in r.target]
    assert len(lists) >= 2


def test_a_log_is_followed_on_when_a_token_has_expired(way: Way, until: Callable[..., None]):
    """The first stream is refused (401); the next one logs in again, and no line is missing."""
    lab = way.lab
    handle = way.send()
    (pod,) = lab.operate(words_of(handle))
    lab.log(pod).write(b"line 0")
    lab.begin(pod)
    lab.phase(words_of(handle), "Running")
    body = b'{"kind": "Status", "code": 401, "reason": "Unauthorized"}'
    way.fail(Fault(status=401, body=body), "GET", "follow=true", times=2)
    following = Following(way.backend, handle)
    until(lambda: following.data.get(0), "the first line")
    lab.finish(pod)
    lab.phase(words_of(handle), "Completed")

    assert following.end() == {0: text(1)}
    assert len(way.proxy.seen("GET", "follow=true")) >= 3


def test_100_pods_need_one_watch_and_one_stream_each(cluster: Cluster, tmp_path: Path):
    lab = Lab(cluster, tmp_path / "lab")
    way = Way(lab, tmp_path)
    try:
        handle = way.send(nodes=100)
        pods = lab.operate(words_of(handle))
        lab.begin(*pods)
        lab.phase(words_of(handle), "Running")
        following = Following(way.backend, handle)
        for pod in pods:
            lab.log(pod).write(*lines(5))
        deadline = time.monotonic() + 60
        while sum(map(len, following.data.values())) < 100 * len(text(5)):
            assert time.monotonic() < deadline, len(following.data)
            time.sleep(0.1)
        asked = len(way.proxy.requests)
        time.sleep(3)
        watches = way.proxy.seen("GET", "watch=true")
        streams = way.proxy.seen("GET", "follow=true")
        assert (len(watches), len(streams)) == (1, 100)
        assert len(way.proxy.requests) == asked, "while pods write, nothing else is asked"
        for pod in pods:
            lab.finish(pod)
        lab.phase(words_of(handle), "Completed")
        assert following.end() == {node: text(5) for node in range(100)}
        assert len(way.proxy.seen("GET", "watch=true")) == 1
        assert len(way.proxy.seen("GET", "follow=true")) == 100
    finally:
        way.proxy.close()

"""A Kubernetes cluster without nodes: a real etcd, real API servers, and a fake kubelet's logs.

``.ci/kube-apiserver`` builds the programs; ``$CLOUDJOB_TEST_KUBERNETES`` is their folder. No pod
runs here: the tests create the pods that an operator would, and set their status as a kubelet does.

The API server is old. If the folder also has the program of ``.ci/kube-custom-apiserver``, a recent
API server behind the old one serves most custom resources (an aggregated API), for the same users.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import http.server
import json
import os
import secrets
import shutil
import socket
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml

from tests.support import kube_definitions

ROOT = Path(__file__).resolve().parents[2]
START_S = 180.0
MERGE = "application/merge-patch+json"

_DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
_SERVICES = "/apis/apiregistration.k8s.io/v1/apiservices"
_CUSTOM = "apiextensions-apiserver"
# The group that stays on the old API server, which drops unknown fields.
OLD_GROUP = "mindspore.gitee.com"


def programs() -> Path:
    """Return the folder of the API server's programs."""
    return Path(os.environ["CLOUDJOB_TEST_KUBERNETES"])


def crds() -> Path:
    """Return the folder of the operators' CRDs: beside the project, or ``$CLOUDJOB_CRDS``."""
    folder = Path(os.environ.get("CLOUDJOB_CRDS") or ROOT.parent / "shared" / "reference" / "crds")
    if not folder.is_dir():
        if os.environ.get("CLOUDJOB_REQUIRE_ALL") == "1":
            raise FileNotFoundError(f"the operators' CRDs: {folder}")
        pytest.skip(f"there are no CRDs in {folder}")
    return folder


@functools.cache
def crd(name: str) -> dict[str, Any]:
    """Return the CRD in the file of this name, given without its suffix."""
    # The loader in Python takes seconds for one of these large files.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    loaded: dict[str, Any] = yaml.load((crds() / f"{name}.yaml").read_bytes(), Loader=loader)
    return loaded


def schema(definition: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of the first served version of a CRD."""
    version = next(item for item in definition["spec"]["versions"] if item["served"])
    open_api: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    return open_api


def free_port() -> int:
    """Return a free port of the loopback interface."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


class Cluster:
    """An API server on loopback.

    ``admin`` may do everything, ``guest`` may only read pods, and ``peer`` may do nothing.
    """

    def __init__(self, folder: Path, *, has_nodes: bool = False) -> None:
        """Prepare it.

        Args:
            has_nodes: Whether real nodes will join, instead of ``machine-0``.
        """
        self.folder = folder
        self.has_nodes = has_nodes
        self.port = free_port()
        self.etcd_port = free_port()
        self.custom_port = free_port() if (programs() / _CUSTOM).exists() else 0
        self.admin, self.guest, self.peer = (secrets.token_hex(8) for _ in range(3))
        self._processes: list[subprocess.Popen[bytes]] = []
        self._context = ssl._create_unverified_context()
        self.kubelet = Kubelet(folder)

    @property
    def endpoint(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the API server and wait until it responds."""
        etcd = self.etcd_port
        self._start(
            *("etcd", f"--data-dir={self.folder / 'etcd'}", f"--listen-client-urls={_url(etcd)}"),
            *(f"--advertise-client-urls={_url(etcd)}", f"--listen-peer-urls={_url(free_port())}"),
            # Durability does not matter here: a crash of this machine also ends the tests.
            "--unsafe-no-fsync",
        )
        key = self.folder / "service-account.key"
        argv = ["openssl", "genrsa", "-out", str(key), "2048"]
        subprocess.run(argv, check=True, capture_output=True)
        make_certificate(self.folder / "proxy", "proxy")
        tokens = self.folder / "tokens.csv"
        users = [f"{self.admin},admin,1,system:masters", f"{self.guest},guest,2"]
        tokens.write_text("\n".join([*users, f"{self.peer},peer,3\n"]))
        self._start(
            *(str(programs() / "kube-apiserver"), f"--etcd-servers={_url(etcd)}"),
            *("--bind-address=127.0.0.1", f"--secure-port={self.port}"),
            f"--cert-dir={self.folder / 'certificates'}",
            *(f"--token-auth-file={tokens}", "--authorization-mode=RBAC"),
            *("--service-cluster-ip-range=10.96.0.0/16", f"--service-account-key-file={key}"),
            f"--service-account-signing-key-file={key}",
            "--service-account-issuer=https://kubernetes.default.svc",
            "--kubelet-preferred-address-types=InternalIP",
            # No controller creates service accounts here. Tolerations that the server adds would
            # look like a change to our pods.
            "--disable-admission-plugins=ServiceAccount"
            + ("" if self.has_nodes else ",DefaultTolerationSeconds"),
            # Short, so that the server also ends some watches during the tests.
            "--min-request-timeout=30",
            *self._proxy_options(),
            f"--proxy-client-cert-file={self.folder / 'proxy.crt'}",
            f"--proxy-client-key-file={self.folder / 'proxy.key'}",
        )
        self._until_answered(lambda: self.ask("GET", "/readyz", is_json=False), "/readyz")
        self.kubelet.start()
        if self.custom_port:
            self._start_custom()
        self._add_crds()
        if not self.has_nodes:
            self._add_node()
        self._add_guest()
        self._add_priority()

    def stop(self) -> None:
        """Stop the API server."""
        # Killed, as they would wait for open streams, and nothing has to be saved.
        for process in reversed(self._processes):
            process.kill()
            process.wait()
        self.kubelet.stop()

    def controllers(self, *names: str, more: Sequence[str] = ()) -> None:
        """Start controllers; ``garbagecollector`` deletes objects whose owner is gone.

        Args:
            more: Further options.
        """
        self._start(
            *(str(programs() / "kube-controller-manager"), f"--controllers={','.join(names)}"),
            *(f"--kubeconfig={self.kubeconfig()}", "--leader-elect=false", "--port=0"),
            *(f"--secure-port={free_port()}", "--bind-address=127.0.0.1", *more),
        )

    def scheduler(self) -> None:
        """Start a scheduler, which assigns nodes to pods."""
        self._start(
            *(str(programs() / "kube-scheduler"), f"--kubeconfig={self.kubeconfig()}"),
            *("--leader-elect=false", "--port=0", f"--secure-port={free_port()}"),
            "--bind-address=127.0.0.1",
        )

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        kind: str = "application/json",
        is_json: bool = True,
    ) -> Any:
        """Send a request as the administrator; raise ``HTTPError`` for an error response."""
        request = urllib.request.Request(
            self.endpoint + path,
            data=None if body is None else json.dumps(body).encode(),
            method=method,
            headers={"Authorization": f"Bearer {self.admin}", "Content-Type": kind},
        )
        with urllib.request.urlopen(request, context=self._context, timeout=30) as answer:
            data = answer.read()
        return json.loads(data) if is_json else data

    def kubeconfig(self, *, server: str = "", token: str = "", namespace: str = "default") -> Path:
        """Return a new kubeconfig."""
        cluster: dict[str, Any] = {"server": server or self.endpoint}
        if not server:
            authority = self.folder / "certificates" / "apiserver.crt"
            cluster["certificate-authority"] = str(authority)
        return write_kubeconfig(self.folder, cluster, {"token": token or self.admin}, namespace)

    def namespace(self) -> str:
        """Create a namespace and return its name."""
        name = f"lab-{secrets.token_hex(4)}"
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        self.ask("POST", "/api/v1/namespaces", body)
        return name

    def log_tail(self) -> str:
        """Return the last lines of the programs' logs, for an error message."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in logs)

    def _start(self, program: str, *args: str) -> None:
        path = shutil.which(program)
        assert path, f"there is no {program}"
        # This client expects the start of each watch to be marked, which the old server ignores.
        environ = {**os.environ, "KUBE_FEATURE_WatchListClient": "false"}
        with (self.folder / f"{Path(program).name}.log").open("wb") as log:
            self._processes.append(
                subprocess.Popen([path, *args], stdout=log, stderr=log, env=environ)
            )

    def _proxy_options(self) -> list[str]:
        """Return how an API server knows the users of a request that another one passes on."""
        return [
            f"--requestheader-client-ca-file={self.folder / 'proxy.crt'}",
            "--requestheader-allowed-names=proxy",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        ]

    def _start_custom(self) -> None:
        """Start the recent API server; the old one answers whether a user may do something."""
        login, etcd = self.kubeconfig(), self.etcd_port
        later = "MutatingAdmissionPolicy,ValidatingAdmissionPolicy"
        hooks = "MutatingAdmissionWebhook,ValidatingAdmissionWebhook"
        self._start(
            *(str(programs() / _CUSTOM), f"--etcd-servers={_url(etcd)}", "--etcd-prefix=/custom"),
            *("--bind-address=127.0.0.1", f"--secure-port={self.custom_port}"),
            f"--cert-dir={self.folder / 'custom'}",
            *(f"--kubeconfig={login}", f"--authentication-kubeconfig={login}"),
            *(f"--authorization-kubeconfig={login}", "--authentication-skip-lookup"),
            # Tests give and take permissions.
            "--authorization-webhook-cache-authorized-ttl=0s",
            "--authorization-webhook-cache-unauthorized-ttl=0s",
            # The old server has none of the objects that these plugins read.
            f"--disable-admission-plugins={hooks},{later}",
            *("--enable-priority-and-fairness=false", "--min-request-timeout=30"),
            # The pages of a list come from the store, so that `compact` takes them away at once.
            "--feature-gates=ListFromCacheSnapshot=false",
            *self._proxy_options(),
        )
        address = {"type": "ExternalName", "externalName": "127.0.0.1"}
        service = {"metadata": {"name": "custom"}, "spec": {**address, "ports": [{"port": 443}]}}
        self.ask("POST", "/api/v1/namespaces/default/services", service)
        self._until_answered(lambda: self.ask_custom("GET", _DEFINITIONS), "its definitions")

    def ask_custom(self, method: str, path: str, body: Any = None) -> Any:
        """Ask the recent API server itself, as the old one passes on a request of the admin."""
        context = ssl._create_unverified_context()
        context.load_cert_chain(self.folder / "proxy.crt", self.folder / "proxy.key")
        request = urllib.request.Request(
            f"https://127.0.0.1:{self.custom_port}{path}",
            data=None if body is None else json.dumps(body).encode(),
            method=method,
            headers={
                "Content-Type": "application/json",
                "X-Remote-User": "admin",
                "X-Remote-Group": "system:masters",
            },
        )
        with urllib.request.urlopen(request, context=context, timeout=30) as answer:
            return json.loads(answer.read())

    def compact(self) -> None:
        """Forget all versions of objects but the last, as servers do every few minutes."""

        def ask(path: str, **body: Any) -> Any:
            url, data = f"{_url(self.etcd_port)}/v3/kv/{path}", json.dumps(body).encode()
            with urllib.request.urlopen(url, data, timeout=30) as answer:
                return json.loads(answer.read())

        ask("compaction", revision=ask("range", key="AA==")["header"]["revision"], physical=True)

    def serve(self, group: str, version: str, port: int = 0) -> None:
        """Pass requests for a version of an API group on to the recent API server.

        Args:
            port: That of another server of this host; 0 for the recent API server.
        """
        name = f"{version}.{group}"
        service = {"name": "custom", "namespace": "default", "port": port or self.custom_port}
        spec = {
            "group": group,
            "version": version,
            "service": service,
            "insecureSkipTLSVerify": True,
            "groupPriorityMinimum": 1000,
            "versionPriority": 100,
        }
        self.ask("POST", _SERVICES, {"metadata": {"name": name}, "spec": spec})

    def unserve(self, group: str, version: str) -> None:
        """Remove a version of an API group from the cluster; its objects are kept."""
        self.ask("DELETE", f"{_SERVICES}/{version}.{group}")

    def _check_alive(self) -> None:
        for process in self._processes:
            assert process.poll() is None, self.log_tail()

    def _add_crds(self) -> None:
        files = [crd(path.stem) for path in sorted(crds().glob("*.*_*.yaml"))]
        versions = set()
        for item in [*files, kube_definitions.jobset(), *kube_definitions.kueue()]:
            group = item["spec"]["group"]
            is_custom = self.custom_port and group != OLD_GROUP
            (self.ask_custom if is_custom else self.ask)("POST", _DEFINITIONS, item)
            names = [version["name"] for version in item["spec"]["versions"] if version["served"]]
            versions |= {(group, name, is_custom) for name in names}
        for group, name, is_custom in sorted(versions):
            if is_custom:
                self.serve(group, name)
            self.await_resources(group, name)

    def await_resources(self, group: str, version: str) -> None:
        """Wait until the cluster serves a version of an API group."""
        path = f"/apis/{group}/{version}"
        self._until_answered(lambda: self.ask("GET", path)["resources"], path)

    def _until_answered(self, ask: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + START_S
        while True:
            self._check_alive()
            with contextlib.suppress(OSError):
                if ask():
                    return
            assert time.monotonic() < deadline, f"no answer to {what}: {self.log_tail()}"
            time.sleep(0.1)

    def _add_node(self) -> None:
        body = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "machine-0"}}
        self.ask("POST", "/api/v1/nodes", body)
        status = {
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": self.kubelet.port}},
        }
        self.ask("PATCH", "/api/v1/nodes/machine-0/status", {"status": status}, kind=MERGE)

    def _add_priority(self) -> None:
        group = "scheduling.k8s.io"
        priority = {"apiVersion": f"{group}/v1", "kind": "PriorityClass", "value": 1000}
        body = {**priority, "metadata": {"name": "high"}}
        self.ask("POST", f"/apis/{group}/v1/priorityclasses", body)

    def _add_guest(self) -> None:
        group = "rbac.authorization.k8s.io"
        rule = {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list"]}
        named = {"metadata": {"name": "guest"}, "apiVersion": f"{group}/v1"}
        path = f"/apis/{group}/v1"
        role = {**named, "kind": "ClusterRole", "rules": [rule]}
        self.ask("POST", f"{path}/clusterroles", role)
        binding = {
            **named,
            "kind": "ClusterRoleBinding",
            "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": "guest"},
            "subjects": [{"kind": "User", "name": "guest", "apiGroup": group}],
        }
        self.ask("POST", f"{path}/clusterrolebindings", binding)


def write_kubeconfig(
    folder: Path, cluster: dict[str, Any], user: dict[str, Any], namespace: str = "default"
) -> Path:
    """Write a kubeconfig with one context, ``test``, and return its path."""
    path = folder / f"kubeconfig-{secrets.token_hex(4)}"
    context = {"cluster": "test", "user": "test", "namespace": namespace}
    text = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "test", "cluster": cluster}],
        "users": [{"name": "test", "user": user}],
        "contexts": [{"name": "test", "context": context}],
    }
    path.write_text(yaml.safe_dump(text))
    path.chmod(0o600)
    return path


@dataclass
class Log:
    """The log of a container: each line with its time, as a kubelet stores it."""

    lines: list[tuple[str, bytes]] = field(default_factory=list)
    is_over: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)

    def write(self, *lines: bytes, at: str = "") -> None:
        """Add lines, all with the time ``at`` if it is given."""
        with self.changed:
            self.lines += [(at or _now(), line) for line in lines]
            self.changed.notify_all()

    def end(self) -> None:
        """End the streams of all followers."""
        with self.changed:
            self.is_over = True
            self.changed.notify_all()

    def since(self, moment: str, begin: int, *, follow: bool) -> Iterator[tuple[str, bytes]]:
        """Yield lines as they arrive."""
        at = begin
        while True:
            with self.changed:
                while follow and at >= len(self.lines) and not self.is_over:
                    self.changed.wait(1.0)
                new_lines = self.lines[at:]
                at = len(self.lines)
            for time_, line in new_lines:
                # A kubelet also compares whole seconds with nanoseconds.
                if not moment or time_ >= moment.rstrip("Z"):
                    yield time_, line
            if not follow or (self.is_over and at >= len(self.lines)):
                return


class Kubelet:
    """The part of a kubelet that an API server uses: the logs of containers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.port = free_port()
        self.logs: dict[str, Log] = {}
        self.requests: list[str] = []
        # Number of lines after which each stream ends without an error, as when a kubelet restarts.
        self.cut_after = 0
        self._server: http.server.ThreadingHTTPServer | None = None

    def log(self, namespace: str, pod: str) -> Log:
        """Return the log of a pod."""
        return self.logs.setdefault(f"{namespace}/{pod}", Log())

    def forget(self, namespace: str, pod: str) -> None:
        """Delete the log of a pod."""
        self.logs.pop(f"{namespace}/{pod}", Log()).end()

    def start(self) -> None:
        """Listen, with its own certificate."""
        folder = self._folder
        make_certificate(folder / "kubelet", "machine-0")
        kubelet = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                kubelet.requests.append(self.path)
                kubelet._serve(self)

            def log_message(self, *args: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self._server.daemon_threads = True
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "kubelet.crt", folder / "kubelet.key")
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        """Stop listening."""
        for log in self.logs.values():
            log.end()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def _serve(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        where = urlsplit(handler.path)
        query = {name: values[0] for name, values in parse_qs(where.query).items()}
        namespace, pod = where.path.split("/")[2:4]
        handler.send_response(200)
        handler.send_header("Content-Type", "text/plain")
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        follow = query.get("follow") == "true"
        with_times = query.get("timestamps") == "true"
        lines = self.log(namespace, pod).since(query.get("sinceTime", ""), 0, follow=follow)
        with contextlib.suppress(OSError):
            for number, (moment, line) in enumerate(lines, 1):
                data = (moment.encode() + b" " if with_times else b"") + line + b"\n"
                if follow and self.cut_after and number > self.cut_after:
                    # The stream ends with half of a line.
                    data = data[: len(data) // 2]
                handler.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
                handler.wfile.flush()
                if follow and self.cut_after and number > self.cut_after:
                    break
            handler.wfile.write(b"0\r\n\r\n")
            handler.wfile.flush()


def make_certificate(path: Path, name: str) -> None:
    """Write a self-signed certificate, and its key, to this path with a suffix."""
    argv = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    argv += ["-keyout", f"{path}.key", "-out", f"{path}.crt", "-subj", f"/CN={name}"]
    subprocess.run(argv, check=True, capture_output=True)


def _now() -> str:
    now = datetime.datetime.now(datetime.timezone.utc)
    return now.strftime("%Y-%m-%dT%H:%M:%S.%f") + "000Z"


def _url(port: int) -> str:
    return f"http://127.0.0.1:{port}"

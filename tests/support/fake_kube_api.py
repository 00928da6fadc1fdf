"""A small fake of the Kubernetes API server, without validation: objects by path, and logs.

For tests that need no cluster. ``tests.support.kube_cluster`` starts a real API server.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.support.kube_cluster import write_kubeconfig

Object = dict[str, Any]
NAMESPACE = "lab"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
EVENTS = f"/api/v1/namespaces/{NAMESPACE}/events"


class FakeApi:
    """Keeps objects by their paths and answers as an API server does.

    Set ``logs[pod]`` to the bytes of a log, to a list of them for a stream that then stays open, to
    the status of an error, or to None for a request that gets no response. ``seen`` lists the
    method and target of each request.
    """

    def __init__(self) -> None:
        self.objects: dict[str, Object] = {}
        self.logs: dict[str, bytes | list[bytes] | int | None] = {}
        self.seen: list[tuple[str, str]] = []
        self.headers: list[list[tuple[str, str]]] = []
        # Fields to drop from objects, and the response to each dry run.
        self.dropped: tuple[str, ...] = ()
        self.dry_run: tuple[int, Object] = (201, {})
        # Methods and parts of paths of the requests that are forbidden.
        self.forbidden: set[tuple[str, str]] = set()
        # The status with which every request is refused, and 0 to close each connection; None for
        # a server that answers.
        self.outage: int | None = None
        # The path that the server does not serve, as while it starts.
        self.unserved = ""
        # Called with each object that is patched or created, in place of an operator.
        self.on_change: Callable[[str, Object], object] = lambda path, body: None
        self._is_over = threading.Event()
        api = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                api.seen.append((self.command, self.path))
                api.headers.append(self.headers.items())
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else {}
                with contextlib.suppress(OSError):
                    api._answer(self, body)

            do_GET = do_POST = do_PATCH = do_DELETE = answer  # noqa: N815

            def log_message(self, *args: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        """Stop the server."""
        self._is_over.set()
        self._server.shutdown()
        self._server.server_close()

    def kubeconfig(self, folder: Path, user: Object | None = None) -> Path:
        """Return a kubeconfig for this server."""
        return write_kubeconfig(folder, {"server": self.endpoint}, user or {}, NAMESPACE)

    def requests_with(self, method: str, text: str) -> list[str]:
        """Return the targets of the requests with this method that contain ``text``."""
        return [target for name, target in self.seen if name == method and text in target]

    def _answer(self, handler: http.server.BaseHTTPRequestHandler, body: Object) -> None:
        is_unserved = bool(self.unserved) and handler.path.startswith(self.unserved)
        status = 404 if is_unserved else self.outage
        if status is not None:
            if status:
                _begin(handler, status)
                _chunk(handler, b'{"kind": "Status", "message": "not now"}')
                _chunk(handler, b"")
            handler.close_connection = True
            return
        where = urlsplit(handler.path)
        query = {name: values[0] for name, values in parse_qs(where.query).items()}
        if where.path.endswith("/log"):
            self._log(handler, where.path.split("/")[-2])
        elif query.get("watch") == "true":
            _begin(handler, 200)
            self._hold(handler)
        else:
            status, answer = self._do(handler.command, where.path, query, body)
            data = json.dumps(answer).encode()
            _begin(handler, status)
            _chunk(handler, data)
            _chunk(handler, b"")

    def _log(self, handler: http.server.BaseHTTPRequestHandler, pod: str) -> None:
        log = self.logs.get(pod, b"")
        if log is None:
            self._is_over.wait()
        elif isinstance(log, int):
            _begin(handler, log)
            _chunk(handler, b'{"kind": "Status", "message": "dial tcp: connection refused"}')
            _chunk(handler, b"")
        else:
            _begin(handler, 200)
            for data in filter(None, [log] if isinstance(log, bytes) else log):
                _chunk(handler, data)
            if isinstance(log, list):
                self._hold(handler)
            else:
                _chunk(handler, b"")

    def _hold(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        """Keep a stream open until an outage, or the end of the server."""
        while self.outage is None and not self._is_over.wait(0.05):
            pass
        handler.close_connection = True

    def _do(
        self, method: str, path: str, query: dict[str, str], body: Object
    ) -> tuple[int, Object]:
        if any(method == name and part in path for name, part in self.forbidden):
            return 403, {"kind": "Status", "reason": "Forbidden", "message": f"{path} is forbidden"}
        if method == "POST":
            body.setdefault("metadata", {})
            item_path = f"{path}/{body['metadata'].get('name', 'generated')}"
            body["metadata"].setdefault("uid", "u")
            body = _without(body, self.dropped)
            if "dryRun" in query:
                status, answer = self.dry_run
                return status, answer or body
            self.objects[item_path] = body
            self.on_change(item_path, body)
            return 201, body
        if path in self.objects:
            return 200, self._handle_object(method, path, body)
        if method == "GET" and path.rpartition("/")[2] in _LISTED:
            items = [item for name, item in self.objects.items() if is_in(name, path, query, item)]
            return 200, {"items": items, "metadata": {"resourceVersion": "1"}}
        if method == "DELETE" and path.endswith("/pods"):
            for name in [name for name in self.objects if name.startswith(f"{path}/")]:
                del self.objects[name]
            return 200, {}
        return 404, {"kind": "Status", "reason": "NotFound", "message": f"{path} not found"}

    def _handle_object(self, method: str, path: str, body: Object) -> Object:
        stored = self.objects[path]
        if method == "PATCH":
            _merge(stored, body)
            self.on_change(path, stored)
        elif method == "DELETE":
            del self.objects[path]
        return stored


_LISTED = ("pods", "events", "services", "jobs", "mpijobs", "msjobs", "workloads")


def is_in(name: str, path: str, query: Mapping[str, str], item: Object) -> bool:
    """Whether an object is in a list, by its path and the list's field selector."""
    involved = item.get("involvedObject") or {}
    for part in filter(None, query.get("fieldSelector", "").split(",")):
        field, _, value = part.partition("=")
        key = field.rstrip("!")
        parent, _, child = key.rpartition(".")
        value_there = involved.get(child) if parent else item.get(key)
        if (value_there == value) == field.endswith("!"):
            return False
    return name.startswith(f"{path}/")


def _without(item: Any, keys: tuple[str, ...]) -> Any:
    if isinstance(item, dict):
        return {key: _without(value, keys) for key, value in item.items() if key not in keys}
    return [_without(element, keys) for element in item] if isinstance(item, list) else item


def _merge(target: Object, patch: Object) -> None:
    for key, value in patch.items():
        if isinstance(value, dict) and isinstance(target.get(key), dict):
            _merge(target[key], value)
        else:
            target[key] = value


def _begin(handler: http.server.BaseHTTPRequestHandler, status: int) -> None:
    handler.send_response(status)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()


def _chunk(handler: http.server.BaseHTTPRequestHandler, data: bytes) -> None:
    # An empty chunk ends the response.
    handler.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
    handler.wfile.flush()

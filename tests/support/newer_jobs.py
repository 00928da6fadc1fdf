"""The Jobs of a Kubernetes newer than the test cluster, which drops fields that it does not know.

A server in front of the cluster's own: it validates Jobs strictly against upstream's schema, as
Kubernetes does since 1.25, keeps the newer fields, and leaves everything else to the cluster:
names, permissions, quotas, garbage collection, pods, logs.
"""

from __future__ import annotations

import contextlib
import copy
import http.client
import http.server
import json
import re
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.support import kube_schemas
from tests.support.kube_cluster import Cluster

Object = dict[str, Any]
VERSION = "1.33"
_JOBS = re.compile(r"/apis/batch/v1/namespaces/[^/]+/jobs(?:/[^/]+(?:/status)?)?")
# The fields that Kubernetes 1.20 drops.
_NEWER = {
    "spec": (
        *("completionMode", "backoffLimitPerIndex", "podReplacementPolicy", "successPolicy"),
        *("suspend", "ttlSecondsAfterFinished"),
    ),
    "status": ("ready", "terminating", "completedIndexes", "failedIndexes"),
}
_LIMIT_S = 180.0


class NewerJobs:
    """The server; ``endpoint`` is its address."""

    def __init__(self, port: int) -> None:
        """Serve in front of the API server on this port."""
        self._port = port
        self._newer: dict[str, Object] = {}
        self._lock = threading.Lock()
        self._context = ssl._create_unverified_context()
        newer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(length)
                try:
                    newer._answer(self, body)
                except (OSError, http.client.HTTPException):
                    # The cluster does not answer, or the client has left.
                    self.close_connection = True

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
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, handler: http.server.BaseHTTPRequestHandler, body: bytes) -> None:
        where = urlsplit(handler.path)
        is_of_jobs = _JOBS.fullmatch(where.path) is not None
        if is_of_jobs and handler.command == "POST" and "fieldValidation=Strict" in where.query:
            problems = kube_schemas.problems(json.loads(body), VERSION)
            if problems:
                message = f"strict decoding error: {problems[0]}"
                status = {"kind": "Status", "code": 400, "message": message}
                _send(handler, 400, json.dumps(status).encode())
                return
        with self._forwarded(handler, body) as answer:
            if not is_of_jobs and where.path != "/version":
                _stream(handler, answer)
                return
            data = answer.read()
            if answer.status < 300:
                sent = json.loads(body) if handler.command in ("POST", "PATCH") else {}
                is_kept = "dryRun" not in where.query
                data = self._with_newer(json.loads(data), sent, is_kept=is_kept)
            _send(handler, answer.status, data)

    @contextlib.contextmanager
    def _forwarded(
        self, handler: http.server.BaseHTTPRequestHandler, body: bytes
    ) -> Iterator[http.client.HTTPResponse]:
        """Yield the cluster's answer to a request."""
        upstream = http.client.HTTPSConnection(
            "127.0.0.1", self._port, timeout=_LIMIT_S, context=self._context
        )
        names = ("Authorization", "Content-Type", "Accept")
        headers = {name: handler.headers[name] for name in names if name in handler.headers}
        with contextlib.closing(upstream):
            upstream.request(handler.command, handler.path, body or None, headers)
            # Streams of logs may be silent for minutes.
            upstream.sock.settimeout(None)
            with upstream.getresponse() as answer:
                yield answer

    def _with_newer(self, answer: Object, sent: Object, *, is_kept: bool) -> bytes:
        """Return an answer with the fields that the cluster has dropped.

        Args:
            sent: The object or the merge patch in the request.
            is_kept: Whether the request changes anything, unlike a dry run.
        """
        if "gitVersion" in answer:
            major, minor = VERSION.split(".")
            answer |= {"major": major, "minor": minor, "gitVersion": f"v{VERSION}.0"}
        with self._lock:
            if sent:
                uid = answer["metadata"]["uid"]
                fields = _merged(self._newer.get(uid, {}), _newer_fields(sent))
                if is_kept:
                    self._newer[uid] = fields
                answer = _merged(answer, fields)
            for item in answer.get("items") or [answer]:
                uid = (item.get("metadata") or {}).get("uid", "")
                item |= _merged(item, self._newer.get(uid, {}))
        return json.dumps(answer).encode()


class NewerCluster(Cluster):
    """A cluster whose users and tests see the Jobs of a newer Kubernetes."""

    def __init__(self, cluster: Cluster, jobs: NewerJobs) -> None:
        # It shares everything else with the cluster.
        self.__dict__.update(cluster.__dict__)
        self._jobs = jobs

    @property
    def endpoint(self) -> str:
        return self._jobs.endpoint

    def kubeconfig(self, *, server: str = "", token: str = "", namespace: str = "default") -> Path:
        server = server or self.endpoint
        return super().kubeconfig(server=server, token=token, namespace=namespace)


def _newer_fields(sent: Object) -> Object:
    return {
        part: {key: sent[part][key] for key in names if key in sent[part]}
        for part, names in _NEWER.items()
        if part in sent
    }


def _merged(target: Object, patch: Object) -> Object:
    """Return a JSON merge patch applied to an object."""
    result = copy.deepcopy(target)
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = _merged(result[key], value)
        else:
            result[key] = value
    return result


def _send(handler: http.server.BaseHTTPRequestHandler, status: int, data: bytes) -> None:
    handler.send_response(status)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)


def _stream(handler: http.server.BaseHTTPRequestHandler, answer: http.client.HTTPResponse) -> None:
    """Pass an answer on as it arrives, in chunks: a client waits for more of any other stream."""
    handler.send_response(answer.status)
    handler.send_header("Content-Type", answer.headers.get("Content-Type") or "text/plain")
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    # A stream that broke off stays without its last chunk.
    with contextlib.suppress(OSError, http.client.HTTPException):
        while piece := answer.read1(1 << 16):
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            handler.wfile.flush()
        handler.wfile.write(b"0\r\n\r\n")
        return
    handler.close_connection = True

"""A small ModelArts for the tests of its client: real HTTP, signatures checked, faults on demand.

It knows the operations that cloudjob uses and no more; the emulator is the whole of it.
"""

from __future__ import annotations

import calendar
import json
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from huaweicloudsdkcore.sdk_request import SdkRequest
from huaweicloudsdkcore.signer.signer import Signer

from jobentry.contract.sigv4 import Keys

KEYS = Keys("AK0123456789", "the-secret-key")
PROJECT = "0123456789abcdef0123456789abcdef"
WINDOW_BYTES = 5 * 1024 * 1024


@dataclass
class Seen:
    """One request as it came.

    Args:
        path: With its query.
    """

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The value of the body."""
        return json.loads(self.body or b"null")


@dataclass
class Reply:
    """What is answered.

    Args:
        cut: Close the connection instead.
        cut_after: Close the connection after so many bytes of the body.
    """

    status: int = 200
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    cut: bool = False
    cut_after: int | None = None


Fault = Callable[[Seen], "Reply | None"]


@dataclass
class FakeModelArts:
    """The state of the service; a test changes it as it likes.

    Args:
        faults: Asked before a request is done; the first reply counts.
        after: Asked when it has been done: an answer may get lost.
        token: The token that is good now.
        ahead_s: How far its clock is ahead.
    """

    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    logs: dict[tuple[str, str], bytes] = field(default_factory=dict)
    exported: dict[tuple[str, str], bytes] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    flavors: list[dict[str, Any]] = field(default_factory=list)
    engines: list[dict[str, Any]] = field(default_factory=list)
    quotas: list[dict[str, Any]] = field(default_factory=list)
    images: dict[str, list[str]] = field(default_factory=dict)
    pools: dict[str, str] = field(default_factory=dict)
    tags: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    after: list[Fault] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    keys: Keys = KEYS
    token: str = ""
    ahead_s: float = 0.0
    encrypted: bool = False
    # The keys in the bucket.
    objects: list[str] = field(default_factory=list)
    location: str = "cn-north-4"
    endpoint: str = ""

    def asked(self, text: str) -> list[Seen]:
        """Return the requests whose line has this in it."""
        return [seen for seen in self.seen if text in f"{seen.method} {seen.path}"]

    def add(self, name: str, phase: str = "Running", nodes: int = 1, **status: Any) -> str:
        """Add a job and return its id."""
        body = {"kind": "job", "metadata": {"name": name}, "spec": {"resource": {}}}
        body["spec"]["resource"]["node_count"] = nodes
        job = self._made(body)
        job["status"].update(phase=phase, **status)
        return str(job["metadata"]["id"])

    def end(self, job: str, phase: str = "Completed", **status: Any) -> None:
        """Let a job end."""
        self.jobs[job]["status"].update(phase=phase, duration=60_000, **status)

    # -- requests -------------------------------------------------------------------------------

    def reply(self, seen: Seen) -> Reply:
        """Do what is asked."""
        self.seen.append(seen)
        for fault in self.faults:
            found = fault(seen)
            if found is not None:
                return found
        done = self._refusal(seen) or self._done(seen)
        for fault in self.after:
            found = fault(seen)
            if found is not None:
                return found
        return done

    def _refusal(self, seen: Seen) -> Reply | None:
        path = urlsplit(seen.path).path
        if path.startswith(("/exported/", "/v3/auth/", "/bucket")):
            return None
        if self.token and seen.headers.get("x-auth-token") == self.token:
            return None
        if _is_signed(seen, self.keys, time.time() + self.ahead_s):
            return None
        return _error(401, "APIGW.0301", "Incorrect IAM authentication information")

    def _done(self, seen: Seen) -> Reply:
        parts = urlsplit(seen.path)
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        for method, pattern, name in _ROUTES:
            found = re.fullmatch(pattern, parts.path)
            if found and method == seen.method:
                reply: Reply = getattr(self, name)(seen, query, *found.groups())
                return reply
        return Reply(404, {"error_msg": "no such API", "error_code": "APIGW.0101"})

    def _create(self, seen: Seen, _query: Any) -> Reply:
        body = seen.json
        name = body["metadata"]["name"]
        if any(job["metadata"]["name"] == name for job in self.jobs.values()):
            return _error(400, "ModelArts.2751", f"the name {name} is in use")
        return Reply(201, self._made(body))

    def _made(self, body: dict[str, Any]) -> dict[str, Any]:
        nodes = body["spec"]["resource"].get("node_count", 1)
        job = {
            **body,
            "metadata": {
                **body["metadata"],
                "id": str(uuid.uuid4()),
                "create_time": int(time.time() * 1000),
            },
            "status": {
                "phase": "Running",
                "secondary_phase": "Running",
                "start_time": int(time.time() * 1000),
                "duration": 0,
                "tasks": [f"worker-{index}" for index in range(nodes)],
            },
        }
        self.jobs[job["metadata"]["id"]] = job
        return job

    def _show(self, _seen: Seen, _query: Any, job: str) -> Reply:
        return Reply(200, self.jobs[job]) if job in self.jobs else _not_found(job)

    def _search(self, seen: Seen, _query: Any) -> Reply:
        asked = seen.json
        found = [job for job in self.jobs.values() if _passes(job, asked["filters"])]
        found.sort(key=lambda job: -job["metadata"]["create_time"])
        first = asked["offset"] * asked["limit"]
        page = found[first : first + asked["limit"]]
        return Reply(200, {"total": len(found), "count": len(page), "items": page})

    def _act(self, seen: Seen, _query: Any, job: str) -> Reply:
        if job not in self.jobs:
            return _not_found(job)
        status = self.jobs[job]["status"]
        if status["phase"] not in ("Creating", "Pending", "Running"):
            return _error(400, "ModelArts.2770", f"the job is {status['phase']}")
        assert seen.json == {"action_type": "terminate"}
        status.update(phase="Terminated", secondary_phase="Terminated", duration=1000)
        return Reply(202, self.jobs[job])

    def _delete(self, _seen: Seen, _query: Any, job: str) -> Reply:
        if job not in self.jobs:
            return _not_found(job)
        del self.jobs[job]
        return Reply(202)

    def _preview(self, _seen: Seen, _query: Any, job: str, task: str) -> Reply:
        if job not in self.jobs:
            return _not_found(job)
        log = self.logs.get((job, task))
        if log is None:
            return Reply(204)
        window = log[-WINDOW_BYTES:]
        text = window.decode("utf-8", "replace")
        return Reply(200, {"content": text, "current_size": len(window), "full_size": len(log)})

    def _url(self, _seen: Seen, _query: Any, job: str, task: str) -> Reply:
        if (job, task) not in self.exported:
            return Reply(204)
        return Reply(200, {"obs_url": f"{self.endpoint}/exported/{job}/{task}?Signature=abc"})

    def _exported(self, seen: Seen, _query: Any, job: str, task: str) -> Reply:
        data = self.exported[(job, task)]
        asked = re.fullmatch(r"bytes=(\d+)-", seen.headers.get("range", ""))
        if asked is None:
            return Reply(200, data)
        first = int(asked[1])
        if first >= len(data):
            return Reply(416, b"")
        headers = {"Content-Range": f"bytes {first}-{len(data) - 1}/{len(data)}"}
        return Reply(206, data[first:], headers)

    def _metrics(self, _seen: Seen, _query: Any, _job: str, task: str) -> Reply:
        values = [12.5, -1, 50] if task.endswith("0") else [1]
        return Reply(200, {"metrics": [{"metric": "cpuUsage", "value": values}]})

    def _events(self, _seen: Seen, query: dict[str, str], _job: str) -> Reply:
        limit = int(query["limit"])
        first = int(query["offset"]) * limit
        page = self.events[first : first + limit]
        return Reply(200, {"total": len(self.events), "events": page})

    def _flavors(self, _seen: Seen, _query: Any) -> Reply:
        return Reply(200, {"total_count": len(self.flavors), "flavors": self.flavors})

    def _engines(self, _seen: Seen, _query: Any) -> Reply:
        return Reply(200, {"total": len(self.engines), "items": self.engines})

    def _tags(self, seen: Seen, query: Any) -> Reply:
        words = urlsplit(seen.path).path.split("/")
        found = self.images.get(f"{words[4]}/{words[6].replace('%24', '$')}")
        if found is None:
            return Reply(404, {"errors": [{"errorCode": "SVCSTG.SWR.4040002"}]})
        begin, end = int(query["offset"]), int(query["offset"]) + int(query["limit"])
        return Reply(200, [{"Tag": tag} for tag in found[begin:end]])

    def _quotas(self, _seen: Seen, _query: Any) -> Reply:
        return Reply(200, {"quotas": self.quotas})

    def _pool(self, _seen: Seen, _query: Any, name: str) -> Reply:
        if name not in self.pools:
            return _error(404, "ModelArts.5000", f"pool {name} not found")
        return Reply(200, {"metadata": {"name": name}, "status": {"phase": self.pools[name]}})

    def _tag(self, seen: Seen, _query: Any, job: str) -> Reply:
        self.tags[job] = seen.json["tags"]
        return Reply(204)

    def _projects(self, _seen: Seen, query: dict[str, str]) -> Reply:
        projects = [{"id": PROJECT, "name": "cn-north-4"}]
        return Reply(200, {"projects": [p for p in projects if p["name"] == query["name"]]})

    def _tokens(self, seen: Seen, _query: Any) -> Reply:
        identity = seen.json["auth"]["identity"]
        if identity["methods"] == ["hw_ak_sk"]:
            given = identity["hw_ak_sk"]
            pair = (given["access"]["key"], given["secret"]["key"])
            is_known = pair == (self.keys.access_key, self.keys.secret_key)
        else:
            is_known = identity["password"]["user"]["password"] == "right"
        if not is_known:
            return Reply(401, {"error": {"code": 401, "message": "The password is wrong"}})
        self.token = uuid.uuid4().hex
        body = {"token": {"project": {"id": PROJECT, "name": "cn-north-4"}}}
        return Reply(201, body, {"X-Subject-Token": self.token})

    def _bucket(self, _seen: Seen, query: dict[str, str], name: str) -> Reply:
        if name != "bucket":
            return Reply(404, b"<Error><Code>NoSuchBucket</Code></Error>")
        if "encryption" in query:
            return Reply(200, _ENCRYPTION) if self.encrypted else Reply(404, b"<Error/>")
        if "prefix" in query:
            found = sorted(key for key in self.objects if key.startswith(query["prefix"]))
            listed = "".join(f"<Contents><Key>{key}</Key></Contents>" for key in found[:1])
            return Reply(200, f'<ListBucketResult xmlns="x">{listed}</ListBucketResult>'.encode())
        text = f"<LocationConstraint>{self.location}</LocationConstraint>"
        return Reply(200, text.encode())


_ENCRYPTION = b"""\
<ServerSideEncryptionConfiguration><Rule><ApplyServerSideEncryptionByDefault>
<SSEAlgorithm>kms</SSEAlgorithm>
</ApplyServerSideEncryptionByDefault></Rule></ServerSideEncryptionConfiguration>"""
_P = rf"/v2/{PROJECT}"
_J = rf"{_P}/training-jobs/([0-9a-f-]+)"
_ROUTES = (
    ("POST", rf"{_P}/training-jobs", "_create"),
    ("POST", rf"{_P}/training-job-searches", "_search"),
    ("GET", _J, "_show"),
    ("DELETE", _J, "_delete"),
    ("POST", rf"{_J}/actions", "_act"),
    ("GET", rf"{_J}/tasks/([a-z0-9-]+)/logs/preview", "_preview"),
    ("GET", rf"{_J}/tasks/([a-z0-9-]+)/logs/url", "_url"),
    ("GET", rf"{_J}/metrics/([a-z0-9-]+)", "_metrics"),
    ("GET", rf"{_J}/events", "_events"),
    ("GET", rf"{_P}/training-job-flavors", "_flavors"),
    ("GET", rf"{_P}/training-job-engines", "_engines"),
    ("GET", rf"{_P}/training-quotas", "_quotas"),
    ("GET", r"/v2/manage/namespaces/[^/]+/repos/[^/]+/tags", "_tags"),
    ("GET", rf"{_P}/pools/([a-z0-9-]+)", "_pool"),
    ("POST", rf"{_P}/modelarts-training-job/([0-9a-f-]+)/tags/create", "_tag"),
    ("GET", r"/v3/projects", "_projects"),
    ("POST", r"/v3/auth/tokens", "_tokens"),
    ("GET", r"/exported/([0-9a-f-]+)/([a-z0-9-]+)", "_exported"),
    ("GET", r"/(bucket[a-z0-9-]*)/?", "_bucket"),
)


def serve(fake: FakeModelArts) -> Iterator[FakeModelArts]:
    """Serve until the generator goes on."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _any(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            headers = {name.lower(): value for name, value in self.headers.items()}
            seen = Seen(self.command, self.path, headers, self.rfile.read(size))
            reply = fake.reply(seen)
            if reply.cut:
                self.close_connection = True
                self.connection.close()
                return
            data = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
            data = b"" if reply.body is None else data
            self.send_response_only(reply.status)
            self.send_header("Date", formatdate(time.time() + fake.ahead_s, usegmt=True))
            self.send_header("X-Request-Id", uuid.uuid4().hex)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            if reply.status != 204:
                self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: reply.cut_after] if reply.status != 204 else b"")
            self.close_connection |= reply.cut_after is not None

        do_GET = do_POST = do_DELETE = do_PUT = _any  # noqa: N815

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            pass

    server = Server(("127.0.0.1", 0), Handler)
    fake.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def once(text: str, reply: Reply, *, times: int = 1) -> Fault:
    """Return a fault that the first ``times`` requests with ``text`` in their line meet."""
    left = [times]

    def fault(seen: Seen) -> Reply | None:
        if text not in f"{seen.method} {seen.path}" or not left[0]:
            return None
        left[0] -= 1
        return reply

    return fault


def _error(status: int, code: str, message: str) -> Reply:
    return Reply(status, {"error_msg": message, "error_code": code})


def _not_found(job: str) -> Reply:
    # The service says 400, and not 404.
    return _error(400, "ModelArts.2775", f"the training job {job} does not exist")


def _passes(job: dict[str, Any], filters: list[dict[str, Any]]) -> bool:
    values = {"name": job["metadata"]["name"], "phase": job["status"]["phase"]}
    for wanted in filters:
        value = values[wanted["key"]]
        is_like = wanted["operator"] == "like"
        if not any(text in value if is_like else text == value for text in wanted["value"]):
            return False
    return True


def signature(seen: Seen, keys: Keys) -> str:
    """Return what the header ``Authorization`` of a request must be, by the vendor's signer."""
    parts = urlsplit(seen.path)
    listed = re.search("SignedHeaders=([^,]+)", seen.headers.get("authorization", ""))
    names = listed[1].split(";") if listed else []
    request = SdkRequest(
        method=seen.method,
        host=seen.headers["host"],
        resource_path=parts.path,
        query_params=parse_qsl(parts.query, keep_blank_values=True),
        header_params={name.title(): seen.headers.get(name, "") for name in names},
        body=seen.body,
    )
    Signer(SimpleNamespace(ak=keys.access_key, sk=keys.secret_key)).sign(request)
    return str(request.header_params["Authorization"])


def _is_signed(seen: Seen, keys: Keys, now: float) -> bool:
    """Whether the signature is right and not older than 15 minutes."""
    if "x-sdk-date" not in seen.headers or "authorization" not in seen.headers:
        return False
    at = calendar.timegm(time.strptime(seen.headers["x-sdk-date"], "%Y%m%dT%H%M%SZ"))
    if abs(at - now) > 900 or seen.headers.get("x-security-token", "") != keys.token:
        return False
    return signature(seen, keys) == seen.headers["authorization"]

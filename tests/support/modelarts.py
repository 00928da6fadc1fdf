"""ModelArts in the test's process: the emulator's API without nodes, with injected faults.

A job runs as soon as it is created, until the test ends it. OBS is a bucket in memory, as the
emulator's own object store supports neither regions nor encryption.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from starlette import requests
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from cloudjob.emulator.app import Api
from cloudjob.emulator.auth import Gateway
from cloudjob.emulator.database import Database, JobRow
from cloudjob.emulator.errors import ServiceRefusal
from cloudjob.emulator.fault_injection import Faults
from cloudjob.emulator.http_server import LOOPBACK, HttpServer, bind, port_of, target_of
from cloudjob.emulator.job_context import logs_of
from cloudjob.emulator.models import ObsPlace, now_ms
from cloudjob.emulator.node_logs import NodeLog
from cloudjob.emulator.obs.client import Object
from cloudjob.emulator.request import Request
from cloudjob.emulator.routes import jobs
from cloudjob.emulator.server import ENDPOINTS
from cloudjob.emulator.service import EmulatedService
from cloudjob.emulator.settings import Flavor, PresetEngine, Settings
from cloudjob.emulator.state import Account, User
from jobentry.contract.sigv4 import Keys

KEYS = Keys("AK0123456789", "the-secret-key")
PROJECT = "0123456789abcdef0123456789abcdef"
REGION = "cn-north-4"
PASSWORD = "right"
SETTINGS = Settings(
    region=REGION,
    pools={"pool-a": 3},
    flavors=(Flavor("cpu", max_nodes=4), Flavor("gpu", "GPU", max_nodes=4, cards=8)),
    engines=tuple(
        PresetEngine(name, version)
        for name, version in (
            ("PyTorch", "torch-1"),
            ("MPI", "ms-1"),
            ("Horovod", "hvd-1"),
            ("MindSpore-GPU", "ms-2"),
        )
    ),
)


@dataclass
class Seen:
    """A received request.

    Args:
        path: The path with the query.
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
    """An injected response.

    Args:
        cut: Close the connection instead of responding.
        cut_after: Close the connection after this many bytes of the body.
    """

    status: int = 200
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    cut: bool = False
    cut_after: int | None = None


Fault = Callable[[Seen], "Reply | None"]


def once(text: str, reply: Reply, *, times: int = 1) -> Fault:
    """Return a fault for the first ``times`` requests whose line contains ``text``."""
    times_left = [times]

    def fault(seen: Seen) -> Reply | None:
        if text not in f"{seen.method} {seen.path}" or not times_left[0]:
            return None
        times_left[0] -= 1
        return reply

    return fault


class _Queue:
    """Replaces the scheduler: jobs neither wait nor run anything."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def wake(self) -> None:
        for job, phase, _, _ in self._database.unfinished():
            if phase == "Creating":
                values = {"phase": "Running", "secondary": "Running", "start_ms": now_ms()}
                self._database.update_job(job, **values)
            elif phase == "Terminating":
                values = {"phase": "Terminated", "secondary": "Terminated", "end_ms": now_ms()}
                self._database.update_job(job, **values)

    def remove(self, job: str) -> None:
        self._database.remove_job(job)


class Obs:
    """The bucket ``bucket``, in memory.

    Args:
        objects: The content of each key.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.location = REGION
        self.is_encrypted = False
        self.endpoint = ""

    def has_bucket(self, bucket: str) -> bool:
        return bucket == "bucket"

    def make_bucket(self, bucket: str) -> None:
        """Do nothing: the emulator's logs go to the same bucket."""

    def list(self, _bucket: str, prefix: str, limit: int) -> list[Object]:
        keys = [key for key in self.objects if key.startswith(prefix)]
        return [Object(key.removeprefix(prefix), key, 0, "") for key in keys[:limit]]

    def put(self, path: Path, place: ObsPlace) -> None:
        self.objects[place.key] = path.read_bytes()

    def url(self, place: ObsPlace, _content_type: str, _seconds: int) -> str:
        return f"{self.endpoint}/bucket/{quote(place.key)}?Signature=abc"

    def reply(self, seen: Seen) -> Reply:
        """Return the response to a request."""
        parts = urlsplit(seen.path)
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        name, _, key = unquote(parts.path)[1:].partition("/")
        if not self.has_bucket(name):
            return Reply(404, b"<Error><Code>NoSuchBucket</Code></Error>")
        if key:
            return self._object(key, seen.headers.get("range", ""))
        if "encryption" in query:
            return Reply(200, _ENCRYPTION) if self.is_encrypted else Reply(404, b"<Error/>")
        if "prefix" in query:
            keys = sorted(key for key in self.objects if key.startswith(query["prefix"]))
            listed = "".join(f"<Contents><Key>{key}</Key></Contents>" for key in keys[:1])
            return Reply(200, f'<ListBucketResult xmlns="x">{listed}</ListBucketResult>'.encode())
        return Reply(200, f"<LocationConstraint>{self.location}</LocationConstraint>".encode())

    def _object(self, key: str, range_header: str) -> Reply:
        data = self.objects[key]
        match = re.fullmatch(r"bytes=(\d+)-", range_header)
        if match is None:
            return Reply(200, data)
        first = int(match[1])
        if first >= len(data):
            return Reply(416, b"")
        headers = {"Content-Range": f"bytes {first}-{len(data) - 1}/{len(data)}"}
        return Reply(206, data[first:], headers)


_ENCRYPTION = b"""\
<ServerSideEncryptionConfiguration><Rule><ApplyServerSideEncryptionByDefault>
<SSEAlgorithm>kms</SSEAlgorithm>
</ApplyServerSideEncryptionByDefault></Rule></ServerSideEncryptionConfiguration>"""


class ModelArts:
    """The service for one test.

    Args:
        folder: The folder of its jobs' logs.

    Attributes:
        faults: Called with each request before it is handled; the first reply is sent instead.
        after: Called with each request after it was handled; the first reply replaces the response.
        seen: All requests.
        ahead_s: Seconds by which the service's clock is ahead.
    """

    def __init__(self, endpoint: str, folder: Path) -> None:
        self.endpoint = endpoint
        self.faults: list[Fault] = []
        self.after: list[Fault] = []
        self.seen: list[Seen] = []
        self.images: dict[str, list[str]] = {}
        self.ahead_s = 0.0
        self.database = Database(Path(":memory:"))
        self.folder = folder
        self.obs: Any = Obs()
        self.obs.endpoint = endpoint
        self.configure()

    def configure(self, **values: Any) -> None:
        """Change settings of the emulator."""
        settings = replace(SETTINGS, **values)
        owner = User(settings.user, "user", KEYS, PASSWORD)
        account = Account((owner,), "domain", {settings.region: PROJECT})
        self.access = Gateway(account, settings, self.database, self._clock)
        services: dict[str, EmulatedService] = {}
        runtime: Any = SimpleNamespace(tags=lambda repository: self.images.get(repository, []))
        scheduler: Any = _Queue(self.database)
        self._service = services[PROJECT] = EmulatedService(
            account=account,
            settings=settings,
            database=self.database,
            faults=Faults(),
            obs=self.obs,
            access=self.access,
            runtime=runtime,
            folder=self.folder,
            projects=services,
        )
        self._service.scheduler = scheduler
        self._app = Api(ENDPOINTS, services, "-", self._clock)

    def _clock(self) -> float:
        return time.time() + self.ahead_s

    # -- what tests ask and change --------------------------------------------------------------

    def requests_with(self, text: str) -> list[Seen]:
        """Return the requests whose line contains ``text``."""
        return [seen for seen in self.seen if text in f"{seen.method} {seen.path}"]

    def jobs(self) -> list[JobRow]:
        """Return all jobs, oldest first."""
        return self.database.find_jobs([], order="rowid", limit=1000, skip=0)[1]

    def add(self, name: str, phase: str = "Running", nodes: int = 1, **algorithm: Any) -> str:
        """Add a job and return its id."""
        content = json.dumps(body(name, **algorithm)).encode()
        created = jobs.create(self._service, Request("POST", "", {}, content, "", {}))
        job = str(created["metadata"]["id"])
        self.database.update_job(job, phase=phase, secondary=phase, nodes=nodes)
        return job

    def end(self, job: str) -> None:
        """End a job successfully."""
        self.database.update_job(job, phase="Completed", secondary="Completed", end_ms=now_ms())

    def write_log(self, job: str, node: int, data: bytes) -> None:
        """Replace the log of a node with ``data``."""
        folder = logs_of(self.folder, job) / str(node)
        NodeLog(folder).run_path("1").write_bytes(data)

    def accepts_signature_of(self, seen: Seen) -> bool:
        """Whether a request has the signature that the vendor's signer would create."""
        request = Request(seen.method, seen.path, seen.headers, seen.body, "", {})
        try:
            self.access.check(request)
        except ServiceRefusal:
            return False
        return True

    # -- requests -------------------------------------------------------------------------------

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request, or inject a fault."""
        request = requests.Request(scope, receive)
        content = await request.body()
        seen = Seen(request.method, target_of(scope), dict(request.headers), content)
        self.seen.append(seen)
        reply = await run_in_threadpool(_first, self.faults, seen)
        if reply is None and seen.path.startswith("/bucket"):
            reply = self.obs.reply(seen)
        elif reply is None:
            sent: list[Any] = []

            async def replay() -> Any:
                return {"type": "http.request", "body": content}

            async def collect(message: Any) -> None:
                sent.append(message)

            await self._app(scope, replay, collect)
            reply = _first(self.after, seen)
            if reply is None:
                for message in sent:
                    await send(message)
                return
        await _send(reply, scope, receive, send)


def _first(faults: list[Fault], seen: Seen) -> Reply | None:
    return next((reply for fault in faults if (reply := fault(seen)) is not None), None)


async def _send(reply: Reply, scope: Any, receive: Any, send: Any) -> None:
    transport = scope["state"]["transport"]
    if reply.cut:
        transport.abort()
        await receive()
        return
    data = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
    data = b"" if reply.body is None else data
    response = Response(data, reply.status, {"X-Request-Id": uuid.uuid4().hex, **reply.headers})
    if reply.cut_after is None:
        await response(scope, receive, send)
        return
    start = {"type": "http.response.start", "status": reply.status}
    await send({**start, "headers": response.raw_headers})
    part = {"type": "http.response.body", "body": data[: reply.cut_after]}
    await send({**part, "more_body": True})
    transport.close()
    await receive()


def body(name: str, **algorithm: Any) -> dict[str, Any]:
    """Return the request body that creates a job of one node."""
    return {
        "kind": "job",
        "metadata": {"name": name},
        "algorithm": {"engine": {"image_url": "a/b"}, "command": "true", **algorithm},
        "spec": {"resource": {"flavor_id": "cpu", "node_count": 1}},
    }


class Server:
    """A server for the fake services of many tests, because starting a server is slow."""

    def __init__(self) -> None:
        listener = bind(LOOPBACK, 0)
        self._endpoint = f"http://{LOOPBACK}:{port_of(listener)}"
        self._current: ModelArts | None = None
        self._server = HttpServer()
        self._server.add(self, [listener])
        self._server.start()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request to the service of the current test."""
        assert self._current is not None
        await self._current(scope, receive, send)

    @contextmanager
    def service(self, folder: Path) -> Iterator[ModelArts]:
        """Serve a new service during a test."""
        self._current = ModelArts(self._endpoint, folder)
        try:
            yield self._current
        finally:
            self._current.database.close()

    def close(self) -> None:
        """Stop serving."""
        self._server.close()

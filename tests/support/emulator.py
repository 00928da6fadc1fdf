"""Emulators with short timeouts whose nodes are processes, and a client for them."""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qsl

from huaweicloudsdkcore.sdk_request import SdkRequest
from huaweicloudsdkcore.signer.signer import Signer

from cloudjob.emulator import daemon
from cloudjob.emulator.database import FINAL
from cloudjob.emulator.state import Address

DATE_FORMAT = "%Y%m%dT%H%M%SZ"
LIMIT_S = 180.0
SETTINGS = """\
engine: process
poll_s: 0.05
upload_period_s: 0.4
metric_period_s: 0.3
hour_s: 2
hang_s: 1
grace_s: 2
lock_s: 1
code_limit_files: 30
code_limit_depth: 4
code_limit_bytes: 2000000
log_preview_bytes: 100000
pools: {pool-a: 3}
public_nodes: 8
projects: [emulator-1_team]
users:
  reader: [modelarts:*:get, modelarts:*:list, obs:object:GetObject, obs:bucket:ListBucket]
  writer: [obs:object:PutObject]
  cleaner: [obs:object:DeleteObject, obs:bucket:*Bucket]
  guest: ["obs:object:*@guest-*", "obs:bucket:ListBucket@guest-*"]
"""


class Api:
    """A client of the emulator with its own signing code, and helpers for tests.

    Attributes:
        image: The image of jobs that run in containers.
    """

    image = "any/image:1"

    def __init__(self, address: Address, home: Path) -> None:
        self.address = address
        self.home = home

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: dict[str, str] | None = None,
        **how: str,
    ) -> tuple[int, Any, dict[str, str]]:
        """Send a signed request; ``{p}`` in the path is the project.

        Args:
            body: Sent as JSON; bytes are sent unchanged.
            how: ``access``, ``secret`` and ``date`` of the signature, instead of the usual ones.
        """
        target = self.target(path)
        host = self.address.endpoint.partition("//")[2]
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        data = b"" if body is None else data
        sent = {"Host": host, "Content-Type": "application/json", **(headers or {})}
        if "X-Auth-Token" not in sent and "Authorization" not in sent:
            sent = self.signed(method, target, data, sent, **how)
        with contextlib.closing(http.client.HTTPConnection(host, timeout=LIMIT_S)) as connection:
            connection.request(method, target, body=data, headers=sent)
            answer = connection.getresponse()
            text_ = answer.read()
            values = json.loads(text_, parse_constant=_refuse) if text_ else None
            return answer.status, values, {k.lower(): v for k, v in answer.getheaders()}

    def target(self, path: str) -> str:
        """Return a path with the project in place of ``{p}``."""
        return path.replace("{p}", f"/v2/{self.address.project_id}")

    def signed(
        self, method: str, target: str, body: bytes, headers: dict[str, str], **how: str
    ) -> dict[str, str]:
        """Return the headers of a request with a signature of the vendor's signer."""
        now = datetime.now(timezone.utc).strftime(DATE_FORMAT)
        path, _, query = target.partition("?")
        text = SdkRequest(
            method=method,
            resource_path=path,
            query_params=parse_qsl(query, keep_blank_values=True),
            header_params={**headers, "X-Sdk-Date": how.get("date", now)},
            body=body,
        )
        keys = SimpleNamespace(
            ak=how.get("access", self.address.access_key),
            sk=how.get("secret", self.address.secret_key),
        )
        return dict(Signer(keys).sign(text).header_params)

    def ok(self, method: str, path: str, body: Any = None) -> Any:
        """Send a request that must succeed."""
        status, values, _ = self.ask(method, path, body)
        assert status < 300, values
        return values

    def body(self, command: str, *, nodes: int = 1, **more: Any) -> dict[str, Any]:
        """Return the body that creates a job of a custom image."""
        algorithm = {"engine": {"image_url": self.image}, "command": command}
        return {
            "kind": "job",
            "metadata": {"name": new_name(), "annotations": more.pop("annotations", {})},
            "algorithm": {**algorithm, **more.pop("algorithm", {})},
            "spec": {
                "resource": {"flavor_id": "modelarts.vm.cpu.2u", "node_count": nodes},
                **more.pop("spec", {}),
            },
        }

    def create(self, command: str, **more: Any) -> str:
        """Create a job and return its id."""
        return str(
            self.ok("POST", "{p}/training-jobs", self.body(command, **more))["metadata"]["id"]
        )

    def show(self, job: str) -> Any:
        """Return a job."""
        return self.ok("GET", f"{{p}}/training-jobs/{job}")

    def await_phase(self, job: str, *phases: str, limit_s: float = LIMIT_S) -> Any:
        """Wait until a job is in one of these phases, by default until it has ended."""
        expected = phases or FINAL
        details = self.show(job)
        end = time.monotonic() + limit_s
        while details["status"]["phase"] not in expected:
            assert time.monotonic() < end, (details["status"], self.log(job), self.events(job))
            assert details["status"]["phase"] not in FINAL, (self.log(job), self.events(job))
            time.sleep(0.05)
            details = self.show(job)
        return details

    def log(self, job: str, node: int = 0) -> str:
        """Return the preview of a log; empty if there is none yet."""
        path = f"{{p}}/training-jobs/{job}/tasks/worker-{node}/logs/preview"
        status, values, _ = self.ask("GET", path)
        return str(values["content"]) if status == 200 else ""

    def await_log(self, job: str, text: str, node: int = 0) -> None:
        """Wait until a log contains a text."""
        await_true(lambda: text in self.log(job, node), lambda: self.log(job, node))

    def events(self, job: str) -> list[str]:
        """Return the events of a job, oldest first."""
        path = f"{{p}}/training-jobs/{job}/events?order=asc&limit=100"
        return [event["message"] for event in self.ok("GET", path)["events"]]

    def fault(self, kind: str, **values: Any) -> dict[str, Any]:
        """Inject a fault."""
        return daemon.add_fault(self.home, kind=kind, **values)


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def new_name() -> str:
    """Return a name that no job has."""
    return f"job-{uuid.uuid4().hex[:12]}"


def await_true(claim: Callable[[], Any], describe: Callable[[], Any] = lambda: "") -> Any:
    """Wait until ``claim`` returns a true value, and return that value."""
    end = time.monotonic() + LIMIT_S
    while True:
        result = claim()
        if result:
            return result
        assert time.monotonic() < end, describe()
        time.sleep(0.05)


@contextlib.contextmanager
def running(settings: str = SETTINGS) -> Iterator[Api]:
    """Run a separate emulator, and remove it at the end."""
    # In /tmp, as the paths of the nodes' Unix sockets are below it and must be short.
    home = Path(tempfile.mkdtemp(prefix="emu-", dir="/tmp"))
    path = home / "settings.yaml"
    path.write_text(settings)
    try:
        yield Api(daemon.up(home, config=path), home)
    finally:
        try:
            daemon.down(home)
            daemon.reset(home)
        finally:
            shutil.rmtree(home, ignore_errors=True)


def bucket_of(api: Api) -> Any:
    """Return a client of the emulator's OBS, and make the bucket called data."""
    client = s3_client(api.address, api.address.access_key, api.address.secret_key)
    client.create_bucket(Bucket="data")
    return client


def s3_client(
    address: Address, access: str, secret: str, token: str | None = None, signature: str = "s3v4"
) -> Any:
    """Return a client of the emulator's OBS with these keys."""
    import boto3
    from botocore.config import Config

    return boto3.session.Session().client(
        "s3",
        endpoint_url=address.s3_endpoint,
        aws_access_key_id=access,
        aws_secret_access_key=secret,
        aws_session_token=token,
        region_name=address.region,
        config=Config(
            signature_version=signature,
            s3={"addressing_style": "path"},
            retries={"total_max_attempts": 1},
        ),
    )


def keys(s3: Any, prefix: str) -> list[str]:
    """Return the keys in the bucket called data below a prefix."""
    listed = s3.list_objects(Bucket="data", Prefix=prefix)
    return [item["Key"] for item in listed.get("Contents", ())]

"""The node half's object client on real S3 servers, through a proxy that injects faults.

botocore checks the signatures, and boto3 checks the content of the store.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cloudjob.store.s3 import S3Store, bucket_uri
from jobentry import objects
from jobentry.contract import names, sigv4, variables
from jobentry.objects import ObjectError, ObjectMissing, client
from jobentry.secrets import private_environ
from tests.support.servers import (
    ACCESS_KEY,
    HANG,
    INTERNAL,
    LOST_ANSWER,
    OBS_DOMAIN,
    SECRET_KEY,
    THROTTLED,
    TOO_MANY,
    Fault,
    FaultProxy,
    Request,
    Server,
    boto3_client,
)

ROOT = Path(__file__).resolve().parent.parent.parent
LARGE = 20 * 1024 * 1024 + 7
QUICK = {"_PATIENCE_S": 90.0, "_STALL_S": 5.0, "_FIRST_PAUSE_S": 0.01, "_MAX_PAUSE_S": 0.1}


# Requests to OBS are signed in their own way, and only SeaweedFS checks signatures.
ON_SEAWEEDFS = ("s3 on seaweedfs", "obs on seaweedfs")


@pytest.fixture(scope="session", params=[*ON_SEAWEEDFS, "s3 on moto"])
def place(request: pytest.FixtureRequest) -> str:
    """The kind of a bucket and its server."""
    return str(request.param)


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest, place: str) -> Server:
    """A real S3 server."""
    s3_server: Server = request.getfixturevalue(place.rpartition(" ")[2])
    return s3_server


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the developer's own settings, and make the client's timeouts short."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "S3_", "OBS_", "CLOUDJOB_S3_")) or name.endswith(
            ("_proxy", "_PROXY")
        ):
            monkeypatch.delenv(name)
    for name, value in QUICK.items():
        monkeypatch.setattr(client, name, value)


class Bucket:
    """A new bucket, reached through ``scheme``."""

    def __init__(self, server: Server, name: str, scheme: str) -> None:
        self.name = name
        self.uri = f"{scheme}://{name}"
        self.boto3 = boto3_client(server.endpoint)

    def get(self, key: str) -> bytes:
        """Return what boto3 gets."""
        data: bytes = self.boto3.get_object(Bucket=self.name, Key=key)["Body"].read()
        return data

    def put(self, key: str, data: bytes) -> None:
        """Store an object with boto3."""
        self.boto3.put_object(Bucket=self.name, Key=key, Body=data)

    def keys(self) -> list[str]:
        """Return what boto3 lists."""
        pages = self.boto3.get_paginator("list_objects_v2").paginate(Bucket=self.name)
        return [item["Key"] for page in pages for item in page.get("Contents", [])]

    def uploads(self) -> list[Any]:
        """Return the multipart uploads that are neither completed nor aborted."""
        unfinished: list[Any] = self.boto3.list_multipart_uploads(Bucket=self.name).get(
            "Uploads", []
        )
        return unfinished


@pytest.fixture
def bucket(
    place: str,
    server: Server,
    new_bucket: Callable[[Server], str],
    monkeypatch: pytest.MonkeyPatch,
) -> Bucket:
    """An empty bucket, as S3 and as OBS."""
    for name, value in server.environ.items():
        monkeypatch.setenv(name, value)
    return Bucket(server, new_bucket(server), place.partition(" ")[0])


@pytest.fixture
def proxy(
    server: Server, fault_proxy: Callable[[Server], FaultProxy], monkeypatch: pytest.MonkeyPatch
) -> Callable[[], FaultProxy]:
    """A function that puts a fault proxy in front of the bucket's server."""

    def make() -> FaultProxy:
        faulty = fault_proxy(server)
        monkeypatch.setenv("AWS_ENDPOINT_URL", faulty.endpoint)
        return faulty

    return make


# -- signatures ---------------------------------------------------------------------------------

visible = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=12)
header_texts = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=20)


@given(
    method=st.sampled_from(["GET", "PUT", "POST", "DELETE", "HEAD"]),
    key=visible,
    query=st.lists(st.tuples(visible.filter(bool), visible), max_size=4, unique_by=lambda p: p[0]),
    headers=st.dictionaries(
        st.from_regex(r"x-amz-meta-[a-z0-9-]{1,8}|content-md5|range|if-match", fullmatch=True),
        header_texts,
        max_size=4,
    ),
    token=st.sampled_from(["", "a/token+with=letters=="]),
    at_s=st.integers(0, 2**32),
    payload=st.sampled_from([sigv4.UNSIGNED, hashlib.sha256(b"x").hexdigest()]),
)
def test_signatures_equal_those_of_botocore(  # noqa: PLR0913
    method: str,
    key: str,
    query: list[tuple[str, str]],
    headers: dict[str, str],
    token: str,
    at_s: int,
    payload: str,
):
    from botocore.auth import S3SigV4Auth
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    path = "/bucket/" + sigv4.encoded(key, "/")
    given_headers = {"Host": "host:9000", **headers}
    at = time.strftime(sigv4.MOMENT, time.gmtime(at_s))
    scope = sigv4.Scope("cn-north-4", at)
    request = sigv4.Request(method, path, query, given_headers)
    ours = sigv4.headers(request, sigv4.Keys("AK", "SK/+", token), scope, payload)

    botocore_auth = S3SigV4Auth(Credentials("AK", "SK/+", token or None), "s3", "cn-north-4")
    url = f"http://host:9000{path}?{sigv4.query_text(query)}"
    theirs = AWSRequest(method, url, headers={**given_headers, "X-Amz-Content-SHA256": payload})
    theirs.context["timestamp"] = at
    theirs.headers["X-Amz-Date"] = at
    if token:
        theirs.headers["X-Amz-Security-Token"] = token
    botocore_auth.payload = lambda request: payload  # type: ignore[method-assign]
    canonical = botocore_auth.canonical_request(theirs)
    expected = botocore_auth.signature(botocore_auth.string_to_sign(theirs, canonical), theirs)

    assert ours["authorization"].endswith(f"Signature={expected}")


# -- objects ------------------------------------------------------------------------------------

KEYS = ["a", "a b", "a+b", "50%", "é/ü", "训练", "x=1&y=2", "#?", "~'()*!", "a\u2028b", "~"]


@pytest.mark.parametrize("key", KEYS)
def test_an_object_can_have_any_name(bucket: Bucket, tmp_path: Path, key: str):
    """Every operation works on it, and boto3 sees the same objects."""
    uri = objects.uri_below(bucket.uri, key)
    objects.write(b"data", uri)
    (entry,) = objects.list(bucket.uri + "/")
    objects.copy(uri, uri + "-2")
    objects.fetch(uri, str(tmp_path / "it"), sha256=hashlib.sha256(b"data").hexdigest())

    assert bucket.get(key) == objects.read(uri) == (tmp_path / "it").read_bytes() == b"data"
    assert bucket.get(key + "-2") == b"data"
    assert (entry.name, entry.uri, entry.size_bytes) == (key, uri, 4)
    assert objects.stat(uri)[1:] == entry[1:]
    objects.delete(uri)
    objects.delete(uri)
    assert bucket.keys() == [key + "-2"]


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    # S3 allows 1,024 bytes, and a character has up to four.
    key=st.text(
        st.characters(codec="utf-8", exclude_categories=["Cc", "Cn", "Co"]),
        min_size=1,
        max_size=250,
    )
)
def test_unusual_names_survive_a_list(bucket: Bucket, key: str):
    # SeaweedFS stores objects in folders and treats a backslash as a slash.
    if "\\" in key or any(part in ("", ".", "..") for part in key.split("/")):
        return
    uri = objects.uri_below(bucket.uri, key)
    objects.write(b"x", uri)
    listed = [entry.name for entry in objects.list(bucket.uri + "/")]
    objects.delete(uri)

    assert listed == [key]


@pytest.mark.parametrize("size", [0, 1, 2 * 1024 * 1024, 8 * 1024 * 1024, LARGE])
def test_objects_of_every_size_are_transferred(bucket: Bucket, tmp_path: Path, size: int):
    data = os.urandom(size)
    (tmp_path / "in").write_bytes(data)
    moved: list[int] = []
    objects.put(str(tmp_path / "in"), bucket.uri + "/a", progress=moved.append)
    objects.fetch(bucket.uri + "/a", str(tmp_path / "out"), progress=moved.append)

    assert bucket.get("a") == (tmp_path / "out").read_bytes() == objects.read(bucket.uri + "/a")
    assert (tmp_path / "out").read_bytes() == data
    assert sum(moved) == 2 * size
    assert bucket.uploads() == []


@pytest.mark.parametrize("place", ON_SEAWEEDFS, indirect=True)
def test_a_list_spans_several_pages(bucket: Bucket):
    """Each key with the prefix is listed once, in order."""
    names = [f"p/{i:04}" for i in range(1100)]
    threads = [
        threading.Thread(
            target=lambda part: [objects.write(b"", f"{bucket.uri}/{n}") for n in part],
            args=(names[i::4],),
        )
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    objects.write(b"", bucket.uri + "/q")

    assert [entry.name for entry in objects.list(bucket.uri + "/p")] == [n[1:] for n in names]
    assert list(objects.list(bucket.uri + "/none/")) == []


def test_missing_objects_and_buckets_are_distinguished(bucket: Bucket):
    with pytest.raises(ObjectMissing, match=f"{bucket.uri}/none: 404"):
        objects.read(bucket.uri + "/none")
    with pytest.raises(ObjectMissing):
        objects.stat(bucket.uri + "/none")
    with pytest.raises(ObjectError, match="404 NoSuchBucket") as caught:
        objects.read(bucket.uri + "-none/a")
    assert "name of the bucket" in caught.value.hint


@pytest.mark.parametrize("place", ON_SEAWEEDFS, indirect=True)
def test_virtual_hosted_addressing_works(
    bucket: Bucket,
    proxy: Callable[[], FaultProxy],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
):
    """OBS requires the bucket in the host name; here, a proxy resolves it."""
    faulty = proxy()
    monkeypatch.setenv("CLOUDJOB_S3_ENDPOINT", f"http://{OBS_DOMAIN}")
    monkeypatch.setenv("http_proxy", faulty.endpoint)
    objects.write(b"x", bucket.uri + "/a b")
    (tmp_path / "large").write_bytes(b"y" * LARGE)
    objects.put(str(tmp_path / "large"), bucket.uri + "/large")

    assert bucket.get("a b") == b"x"
    assert bucket.get("large") == b"y" * LARGE
    assert faulty.requests[0].headers["host"] == f"{bucket.name}.{OBS_DOMAIN}"


def test_requests_to_obs_are_those_that_obs_accepts(
    bucket: Bucket, proxy: Callable[[], FaultProxy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Only OBS gets unsigned bodies; all get an MD5, no chunked bodies and lists of version 1."""
    faulty = proxy()
    (tmp_path / "large").write_bytes(b"y" * LARGE)
    objects.put(str(tmp_path / "large"), bucket.uri + "/large")
    objects.write(b"x", bucket.uri + "/small")
    list(objects.list(bucket.uri + "/"))

    bodies = [r for r in faulty.requests if int(r.headers.get("content-length", "0"))]
    is_obs = bucket.uri.startswith("obs")
    # If the server's disk stalls, the client may repeat a request; count distinct requests.
    assert len({(request.method, request.target) for request in bodies}) == 5
    assert not any("transfer-encoding" in request.headers for request in faulty.requests)
    assert all("content-md5" in request.headers for request in bodies)
    assert {r.headers["x-amz-content-sha256"] == sigv4.UNSIGNED for r in bodies} == {is_obs}
    assert "list-type=2" not in faulty.seen("GET")[-1].query


# -- faults -------------------------------------------------------------------------------------

FAULTS = {
    "throttled": THROTTLED,
    "too many": TOO_MANY,
    "internal": INTERNAL,
    "lost answer": LOST_ANSWER,
    "hang": HANG,
    "hangs in the middle": Fault(hangs_at=1_000_000),
    "cut": Fault(cut_response_at=1_000_000),
    "ends early": Fault(cut_response_at=1_000_000, resets=False),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fetch_survives_faults(
    bucket: Bucket, proxy: Callable[[], FaultProxy], tmp_path: Path, fault: Fault
):
    """Two requests fail, and the result is still complete."""
    data = os.urandom(LARGE)
    (tmp_path / "in").write_bytes(data)
    objects.put(str(tmp_path / "in"), bucket.uri + "/a")
    faulty = proxy()
    faulty.add(fault, when=lambda request: request.method == "GET", skip=0, times=2)
    objects.fetch(bucket.uri + "/a", str(tmp_path / "out"))

    assert (tmp_path / "out").read_bytes() == data
    assert sum(request.fault is not None for request in faulty.requests) == 2


def test_an_object_damaged_in_transit_is_fetched_again(
    bucket: Bucket, proxy: Callable[[], FaultProxy], tmp_path: Path
):
    objects.write(b"x" * 1_000_000, bucket.uri + "/a")
    faulty = proxy()
    faulty.add(Fault(corrupt_response_at=500_000), when=lambda request: request.method == "GET")
    objects.fetch(bucket.uri + "/a", str(tmp_path / "out"))

    assert (tmp_path / "out").read_bytes() == b"x" * 1_000_000
    faulty.add(Fault(corrupt_response_at=5), when=lambda r: r.method == "GET", times=3)
    with pytest.raises(ObjectError, match="its digest is"):
        objects.fetch(bucket.uri + "/a", str(tmp_path / "out"))
    assert (tmp_path / "out").read_bytes() == b"x" * 1_000_000


@pytest.mark.parametrize("place", ON_SEAWEEDFS, indirect=True)
def test_a_part_damaged_in_transit_is_sent_again(
    bucket: Bucket, proxy: Callable[[], FaultProxy], tmp_path: Path
):
    data = os.urandom(LARGE)
    (tmp_path / "in").write_bytes(data)
    faulty = proxy()
    faulty.add(Fault(corrupt_request_at=1000), when=lambda r: r.method == "PUT", times=2)
    objects.put(str(tmp_path / "in"), bucket.uri + "/a")

    assert bucket.get("a") == data
    assert sum(request.fault is not None for request in faulty.requests) == 2


@pytest.mark.parametrize(
    "fault",
    [
        THROTTLED,
        INTERNAL,
        LOST_ANSWER,
        Fault(cut_request_at=100),
        Fault(status=500, code="InternalError", is_done=True),
    ],
    ids=str,
)
def test_a_put_survives_faults(
    bucket: Bucket, proxy: Callable[[], FaultProxy], tmp_path: Path, fault: Fault
):
    data = os.urandom(LARGE)
    (tmp_path / "in").write_bytes(data)
    faulty = proxy()
    for method, parameter in (("POST", "uploads"), ("PUT", "partNumber"), ("POST", "uploadId")):
        faulty.add(fault, when=lambda r, m=method, p=parameter: r.method == m and p in r.target)
    objects.put(str(tmp_path / "in"), bucket.uri + "/a")

    assert bucket.get("a") == data
    assert sum(request.fault is not None for request in faulty.requests) == 3


def test_a_refused_put_leaves_no_parts(
    bucket: Bucket, proxy: Callable[[], FaultProxy], tmp_path: Path
):
    (tmp_path / "in").write_bytes(b"x" * LARGE)
    faulty = proxy()
    faulty.add(Fault(status=403, code="AccessDenied"), when=lambda r: "partNumber=3" in r.target)

    with pytest.raises(ObjectError, match=r"writing .*: 403 AccessDenied"):
        objects.put(str(tmp_path / "in"), bucket.uri + "/a")

    assert bucket.keys() == []
    assert bucket.uploads() == []


@pytest.mark.parametrize(
    ("code", "hint"),
    [
        ("RequestTimeTooSkewed", "set this node's clock"),
        ("AuthorizationHeaderMalformed", "to the region of the bucket"),
    ],
)
def test_a_wrong_clock_or_region_is_reported_with_a_hint(
    bucket: Bucket, proxy: Callable[[], FaultProxy], code: str, hint: str
):
    faulty = proxy()
    faulty.add(Fault(status=403, code=code))

    with pytest.raises(ObjectError, match=f"403 {code}") as caught:
        objects.write(b"x", bucket.uri + "/a")

    assert hint in caught.value.hint


def test_expired_temporary_keys_are_read_again(
    bucket: Bucket, proxy: Callable[[], FaultProxy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Fresh keys are read from the file in which the platform stores them."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    path = tmp_path / "credentials"
    text = "[default]\naws_access_key_id={}\naws_secret_access_key={}\n"
    path.write_text(text.format("old", "old") + "aws_session_token=old\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    faulty = proxy()

    def refuse_once(request: Request) -> Fault | None:
        path.write_text(text.format(ACCESS_KEY, SECRET_KEY))
        is_old = "x-amz-security-token" in request.headers
        return Fault(status=400, code="ExpiredToken") if is_old else None

    faulty.choose = refuse_once
    objects.write(b"x", bucket.uri + "/a")

    assert bucket.get("a") == b"x"
    # A client of an earlier test may still send requests to this port.
    small_puts = [
        request for request in faulty.requests if request.headers["content-length"] == "1"
    ]
    assert len(small_puts) == 2


def test_fresh_keys_that_are_delivered_replace_refused_ones(
    bucket: Bucket, proxy: Callable[[], FaultProxy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """`cloudjob refresh` delivers them while the job runs; an incomplete file is not used."""
    path, values = tmp_path / "store-keys", (ACCESS_KEY, SECRET_KEY, "")
    monkeypatch.setattr(private_environ, "_values", dict.fromkeys(names.STORE_KEYS, "old-old-old"))
    monkeypatch.setattr(private_environ, "_keys_path", str(path))
    fresh = variables.dump(dict(zip(names.STORE_KEYS, values, strict=True)))
    path.write_bytes(fresh[:-1])
    faulty = proxy()
    faulty.add(Fault(status=400, code="ExpiredToken"), times=1000)

    with pytest.raises(ObjectError, match="400 ExpiredToken") as caught:
        objects.write(b"x", bucket.uri + "/a")
    assert "`cloudjob refresh JOB`" in caught.value.hint

    path.write_bytes(fresh)
    faulty.clear()
    faulty.add(Fault(status=400, code="ExpiredToken"))
    objects.write(b"x", bucket.uri + "/a")

    assert bucket.get("a") == b"x"
    assert f"Credential={ACCESS_KEY}/" in faulty.requests[-1].headers["authorization"]


class Role(http.server.BaseHTTPRequestHandler):
    """The platform's endpoint for the keys of a container."""

    def log_message(self, *arguments: Any) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        """Return the keys for the right token."""
        is_known = self.headers["Authorization"] == "known"
        keys = {"AccessKeyId": ACCESS_KEY, "SecretAccessKey": SECRET_KEY, "Token": ""}
        body = json.dumps({**keys, "Expiration": "2099-01-01T00:00:00Z"}).encode()
        self.send_response(200 if is_known else 403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def test_credentials_of_a_role_are_fetched(bucket: Bucket, monkeypatch: pytest.MonkeyPatch):
    with http.server.HTTPServer(("127.0.0.1", 0), Role) as role_server:
        thread = threading.Thread(target=role_server.serve_forever, args=(0.05,))
        thread.start()
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        uri = f"http://127.0.0.1:{role_server.server_address[1]}/keys"
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", uri)
        monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN", "known")
        objects.write(b"x", bucket.uri + "/a")
        role_server.shutdown()
        thread.join()

    assert bucket.get("a") == b"x"


@pytest.mark.parametrize("place", ON_SEAWEEDFS, indirect=True)
@pytest.mark.parametrize("case", ["none", "wrong"])
def test_refused_keys_are_reported_with_a_hint(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, case: str
):
    if case == "none":
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-right-one")

    with pytest.raises(ObjectError, match="403") as caught:
        objects.write(b"x", bucket.uri + "/a")

    hint = "no keys are set" if case == "none" else "secret key"
    assert hint in caught.value.hint
    assert "not-the-right-one" not in str(caught.value) + caught.value.hint


def test_presigned_uris_need_no_keys(bucket: Bucket, server: Server, tmp_path: Path):
    def presigned(method: str) -> str:
        params = {"Bucket": bucket.name, "Key": "a"}
        uri: str = boto3_client(server.endpoint).generate_presigned_url(method, Params=params)
        return uri

    data = os.urandom(LARGE)
    objects.write(data, presigned("put_object"))
    objects.fetch(presigned("get_object"), str(tmp_path / "out"))

    assert bucket.get("a") == (tmp_path / "out").read_bytes() == data


@pytest.fixture
def signed(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """A function that presigns a URL as the laptop does, and then removes the keys."""
    options = f"endpoint={bucket.boto3.meta.endpoint_url}&region=cn-north-4"
    keys = {"ACCESS_KEY_ID": ACCESS_KEY, "SECRET_ACCESS_KEY": SECRET_KEY}
    environ = {f"{kind}_{name}": key for kind in ("AWS", "OBS") for name, key in keys.items()}
    store = S3Store(bucket_uri.read(f"{bucket.uri}?{options}"), environ=environ)

    def sign(method: str, key: str, limit_s: int = 600) -> str:
        uri = store.uri(key)
        table = {uri: store.sign(method, key, limit_s)}
        monkeypatch.setenv("CLOUDJOB_SIGNED_URIS", json.dumps(table))
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "none")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "none")
        return uri

    return sign


@pytest.mark.parametrize("place", ON_SEAWEEDFS, indirect=True)
def test_an_object_is_reached_by_its_presigned_url(
    bucket: Bucket, signed: Callable[..., str], tmp_path: Path
):
    bucket.put("a b", data := os.urandom(100_000))
    uri = signed("GET", "a b")
    objects.fetch(uri, str(tmp_path / "out"))

    assert objects.read(uri) == (tmp_path / "out").read_bytes() == data
    assert objects.peek(uri, 10) == data[:10]
    with pytest.raises(ObjectError, match="403"):
        objects.write(b"no", uri)
    objects.write(b"record", signed("PUT", "exit.json"))
    assert bucket.get("exit.json") == b"record"


@pytest.mark.parametrize("place", ON_SEAWEEDFS, indirect=True)
def test_an_expired_presigned_url_is_reported_without_its_signature(
    bucket: Bucket, signed: Callable[..., str]
):
    bucket.put("a", b"x")
    uri = signed("GET", "a", 1)
    deadline = time.monotonic() + 60
    while True:
        try:
            objects.read(uri)
        except ObjectError as error:
            caught = error
            break
        assert time.monotonic() < deadline, "the address is good for ever"
        time.sleep(0.2)

    assert "403" in str(caught)
    assert re.search(r"signed this address at \d{8}T\d{6}Z for 1 seconds", caught.hint)
    assert "X-Amz" not in str(caught) + caught.hint


@pytest.mark.parametrize("place", ON_SEAWEEDFS, indirect=True)
def test_an_object_without_a_presigned_url_needs_keys(bucket: Bucket, signed: Callable[..., str]):
    bucket.put("b", b"x")
    signed("GET", "a")

    with pytest.raises(ObjectError, match="403"):
        objects.read(bucket.uri + "/b")


@pytest.mark.long
def test_a_large_object_is_transferred_in_little_memory(
    seaweedfs: Server, new_bucket: Callable[[Server], str], tmp_path: Path
):
    """Upload and download of 300 MB use at most 100 MB."""
    name = new_bucket(seaweedfs)
    with (tmp_path / "in").open("wb") as file:
        for _ in range(300):
            file.write(os.urandom(1024) * 1024)
    code = (
        "import sys; from jobentry import objects\n"
        "objects.put(sys.argv[1], sys.argv[2]); objects.fetch(sys.argv[2], sys.argv[3])\n"
        # Not getrusage: its maximum includes the memory of the process that forked this one.
        "print(*(line.split()[1] for line in open('/proc/self/status') if 'VmHWM' in line))"
    )
    arguments = [str(tmp_path / "in"), f"s3://{name}/a", str(tmp_path / "out")]
    environ = {**os.environ, **seaweedfs.environ, "PYTHONPATH": str(ROOT / "entrypoints")}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )
    subprocess.run(["cmp", tmp_path / "in", tmp_path / "out"], check=True)

    assert int(done.stdout) * 1024 < 100e6

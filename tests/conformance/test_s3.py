"""Promises of S3 and OBS stores only, such as multipart uploads and retries."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cloudjob.errors import StoreError
from cloudjob.store.base import ObjectStore
from cloudjob.store.parallel import in_parallel
from tests.conformance.conftest import PART_BYTES, EmptyStore, storm
from tests.support.servers import (
    HANG,
    INTERNAL,
    LOST_ANSWER,
    SECRET_KEY,
    THROTTLED,
    Fault,
    FaultProxy,
    Request,
    Server,
    boto3_client,
)

ROOT = Path(__file__).parents[2]
DEADLINE_S = 180
KIB = 1024
# Four parts, the last of them short.
SIZE = 3 * PART_BYTES + 17
# How long to retry when the fault does not go away.
SHORT_RETRY_S = 0.5
NewStore = Callable[[str], EmptyStore]


@pytest.fixture
def empty_store(new_store: NewStore) -> EmptyStore:
    """Make an empty store on the real server, behind a proxy without faults."""
    return new_store("s3 on SeaweedFS")


@pytest.fixture
def store(empty_store: EmptyStore) -> ObjectStore:
    """Open the store."""
    return empty_store.open()


@pytest.fixture
def proxy(empty_store: EmptyStore) -> FaultProxy:
    """Return the proxy in front of the store's server."""
    assert empty_store.proxy is not None
    return empty_store.proxy


@pytest.fixture
def big(tmp_path: Path) -> Path:
    """Write a file that is uploaded in several parts."""
    path = tmp_path / "big"
    path.write_bytes(os.urandom(SIZE))
    return path


def uploads(empty_store: EmptyStore) -> list[Any]:
    """Return the multipart uploads that boto3 finds neither completed nor aborted."""
    assert empty_store.proxy is not None
    client = boto3_client(empty_store.proxy.endpoint)
    unfinished: list[Any] = (
        client.list_multipart_uploads(Bucket=bucket(empty_store)).get("Uploads") or []
    )
    return unfinished


def bucket(empty_store: EmptyStore) -> str:
    """Return the bucket of a store."""
    return empty_store.uri.split("/")[2]


def until(is_true: Callable[[], Any], what: str) -> None:
    """Wait for a condition, with a deadline."""
    end = time.monotonic() + DEADLINE_S
    while not is_true():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def is_part(request: Request) -> bool:
    """Return whether a request puts a part of an object."""
    return request.method == "PUT" and "partNumber=" in request.query


def is_get(request: Request) -> bool:
    """Return whether a request gets an object or a range of one."""
    return request.method == "GET" and "key" in request.path


# ---- multipart uploads


def no_faults(_: FaultProxy) -> None:
    """Leave the proxy as it is; the counterpart of ``storm``."""


@pytest.mark.parametrize("kind", ["s3 on SeaweedFS", "s3 on moto", "obs on SeaweedFS"])
@pytest.mark.parametrize("network", [no_faults, storm], ids=["no faults", "storm"])
def test_a_large_object_is_read_back_unchanged(
    new_store: NewStore, kind: str, network: Callable[[FaultProxy], None], big: Path, tmp_path: Path
):
    empty_store = new_store(kind)
    assert empty_store.proxy is not None
    network(empty_store.proxy)
    store = empty_store.open()
    sent, got = [0], [0]

    store.put(big, "key", on_progress=lambda count: sent.__setitem__(0, sent[0] + count))
    store.fetch(
        "key", tmp_path / "out", on_progress=lambda count: got.__setitem__(0, got[0] + count)
    )
    empty_store.proxy.choose = lambda _: None

    assert (tmp_path / "out").read_bytes() == big.read_bytes() == store.get_bytes("key")
    assert sent == got == [SIZE]
    assert uploads(empty_store) == []
    numbers = {
        re.search(r"partNumber=(\d+)", r.query) for r in empty_store.proxy.requests if is_part(r)
    }
    assert {match[1] for match in numbers if match} == {"1", "2", "3", "4"}


def test_objects_written_by_boto3_are_read(
    empty_store: EmptyStore, store: ObjectStore, proxy: FaultProxy, tmp_path: Path
):
    client = boto3_client(proxy.endpoint)
    one, many = (
        os.urandom(6000 * KIB),
        [os.urandom(6000 * KIB), os.urandom(5200 * KIB), os.urandom(9)],
    )
    client.put_object(Bucket=bucket(empty_store), Key="pre fix/key-one", Body=one)
    where = {"Bucket": bucket(empty_store), "Key": "pre fix/key-many"}
    upload = client.create_multipart_upload(**where)["UploadId"]
    tags = [
        client.upload_part(**where, UploadId=upload, PartNumber=number, Body=data)["ETag"]
        for number, data in enumerate(many, 1)
    ]
    parts = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, 1)]
    client.complete_multipart_upload(**where, UploadId=upload, MultipartUpload={"Parts": parts})

    store.fetch("key-one", tmp_path / "one")
    store.fetch("key-many", tmp_path / "many")

    assert store.get_bytes("key-one") == one == (tmp_path / "one").read_bytes()
    whole = b"".join(many)
    assert store.get_bytes("key-many") == whole == (tmp_path / "many").read_bytes()


def test_an_object_replaced_during_a_fetch_is_never_mixed(
    store: ObjectStore, proxy: FaultProxy, big: Path, tmp_path: Path
):
    store.put(big, "key")
    other = tmp_path / "other"
    other.write_bytes(os.urandom(SIZE))
    proxy.add(Fault(delay_s=1.5), when=is_get, skip=1, times=2)
    begun = len(proxy.requests)
    errors: list[StoreError] = []

    def read() -> None:
        try:
            store.fetch("key", tmp_path / "out")
        except StoreError as error:
            errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    until(lambda: sum(map(is_get, proxy.requests[begun:])) >= 3, "ranges are asked for")
    store.put(other, "key")
    reader.join(DEADLINE_S)

    if errors:
        assert "the object was replaced while it was read" in errors[0].message
        assert not (tmp_path / "out").exists()
    else:
        assert (tmp_path / "out").read_bytes() in (other.read_bytes(), big.read_bytes())


def test_a_file_that_changes_during_a_put_is_not_stored(
    empty_store: EmptyStore, store: ObjectStore, proxy: FaultProxy, big: Path
):
    proxy.add(Fault(delay_s=1), when=is_part, times=6)
    errors: list[StoreError] = []

    def put() -> None:
        with pytest.raises(
            StoreError, match=r"writing key in .*big changed while it was read"
        ) as caught:
            store.put(big, "key")
        errors.append(caught.value)

    writer = threading.Thread(target=put)
    writer.start()
    until(lambda: any(map(is_part, proxy.requests)), "parts are sent")
    with big.open("ab") as file:
        file.write(b"more")
    writer.join(DEADLINE_S)

    assert len(errors) == 1
    assert not store.exists("key")
    assert uploads(empty_store) == []


# ---- writers that are killed


@pytest.mark.parametrize("count", [1, 3, 6])
def test_a_killed_writer_leaves_the_old_object(
    empty_store: EmptyStore, proxy: FaultProxy, big: Path, count: int
):
    """The next put replaces it, and `store gc` removes the parts of the killed writer."""
    store = empty_store.open()
    store.put_bytes(b"old", "key")
    proxy.clear()
    # A short delay per request, so that the writer can be killed between two of them.
    proxy.choose = lambda _: Fault(delay_s=0.05)
    writer = start_writer(empty_store, big)
    until(lambda: len(proxy.requests) >= count, "the writer sends")
    writer.kill()
    writer.wait(DEADLINE_S)
    proxy.choose = lambda _: None
    is_done = any("uploadId=" in r.query and r.method == "POST" for r in proxy.requests)
    held = store.get_bytes("key")

    store.put(big, "key")

    assert held == b"old" or (is_done and held == big.read_bytes())
    assert store.get_bytes("key") == big.read_bytes()
    store.remove_unfinished(0)
    assert uploads(empty_store) == []


def start_writer(empty_store: EmptyStore, path: Path) -> subprocess.Popen[bytes]:
    """Start a process that puts a file."""
    code = "import sys, pathlib; from cloudjob.store.s3 import S3Store, bucket_uri\n"
    code += f"store = S3Store(bucket_uri.read(sys.argv[1]), part_bytes={PART_BYTES})\n"
    code += "store.put(pathlib.Path(sys.argv[2]), 'key')"
    environ = {**empty_store.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/entrypoints"}
    return subprocess.Popen([sys.executable, "-c", code, empty_store.uri, str(path)], env=environ)


def test_writers_of_one_object_do_not_disturb_each_other(empty_store: EmptyStore, big: Path):
    """Three processes put one key at the same time, and each sends its own parts."""
    writers = [start_writer(empty_store, big) for _ in range(3)]

    assert [writer.wait(DEADLINE_S) for writer in writers] == [0, 0, 0]
    assert empty_store.open().get_bytes("key") == big.read_bytes()
    assert uploads(empty_store) == []


# ---- a network that fails


@pytest.mark.parametrize(
    "fault",
    [
        THROTTLED,
        INTERNAL,
        LOST_ANSWER,
        HANG,
        Fault(status=500, code="InternalError", is_done=True),
        Fault(cut_request_at=1_000_000),
        Fault(status=503, code="SlowDown", headers={"Retry-After": "0"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("method", ["PUT", "POST"])
def test_a_put_survives_a_fault(
    empty_store: EmptyStore, proxy: FaultProxy, big: Path, fault: Fault, method: str
):
    proxy.add(fault, when=lambda r: r.method == method, skip=1)
    store = empty_store.open()

    store.put(big, "key")

    assert any(r.fault for r in proxy.requests)
    assert store.get_bytes("key") == big.read_bytes()
    assert uploads(empty_store) == []


@pytest.mark.parametrize(
    "fault",
    [
        THROTTLED,
        INTERNAL,
        LOST_ANSWER,
        HANG,
        Fault(cut_response_at=3_000_000),
        Fault(cut_response_at=3_000_000, resets=False),
        Fault(hangs_at=3_000_000),
    ],
    ids=str,
)
@pytest.mark.parametrize("skip", [0, 2])
def test_a_get_survives_a_fault(
    empty_store: EmptyStore, proxy: FaultProxy, big: Path, tmp_path: Path, fault: Fault, skip: int
):
    store = empty_store.open()
    store.put(big, "key")
    proxy.add(fault, when=is_get, skip=skip)

    store.fetch("key", tmp_path / "out")

    assert any(r.fault for r in proxy.requests)
    assert (tmp_path / "out").read_bytes() == big.read_bytes()


def test_a_long_list_is_complete_and_in_order(store: ObjectStore):
    keys = sorted(
        [f"a/{i:04}" for i in range(600)] + [f"a.{i:04}" for i in range(600)] + ["a", "a0", "b/c/d"]
    )
    in_parallel(lambda key: store.put_bytes(b"", key), [key for key in keys if key != "a"])

    assert list(store.list("a")) == [key for key in keys if key not in ("a", "b/c/d")]


# ---- what OBS does not support


@pytest.mark.parametrize("kind", ["obs on SeaweedFS", "obs on moto"])
def test_requests_to_obs_use_only_what_obs_supports(new_store: NewStore, kind: str, big: Path):
    """Virtual-hosted addresses, unsigned bodies, no newer checksums, and lists of version 1."""
    empty_store = new_store(kind)
    assert empty_store.proxy is not None
    store = empty_store.open()
    store.put(big, "a")
    store.put_bytes(b"x", "b")
    store.get_bytes("a")
    list(store.list())
    store.exists("a")
    store.delete("a")
    store.remove_unfinished(0)

    for request in empty_store.proxy.requests:
        assert request.headers["host"] == f"{bucket(empty_store)}.obs.cn-north-4.myhuaweicloud.com"
        assert request.headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
        assert "/cn-north-4/s3/aws4_request" in request.headers["authorization"]
        assert not [name for name in request.headers if "checksum" in name or "trailer" in name]
        assert "chunked" not in request.headers.get("content-encoding", "")
        assert "transfer-encoding" not in request.headers
        assert "list-type" not in request.query
        assert not request.query.startswith("delete")


# ---- errors and their hints


@pytest.mark.parametrize(
    ("environ", "message", "hint"),
    [
        (
            {"AWS_ACCESS_KEY_ID": "other"},
            "the service does not know the access key (403",
            "is it a key",
        ),
        ({"AWS_SECRET_ACCESS_KEY": "other"}, "the signature is wrong (403", "does the secret key"),
        (
            {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""},
            "no credentials in the environment or in a profile file",
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a profile: ?profile=NAME",
        ),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "connection refused", "is the endpoint right"),
        (
            {"AWS_ENDPOINT_URL": "http://no.invalid"},
            "the host name cannot be resolved",
            "is the endpoint",
        ),
        ({"AWS_ENDPOINT_URL": "ftp://host"}, "not https://host or http://host:port", "?endpoint"),
        ({"AWS_PROFILE": "nobody"}, "The config profile (nobody) could not be found", "set AWS_"),
    ],
    ids=str,
)
def test_an_error_is_one_line_with_a_hint(
    empty_store: EmptyStore,
    monkeypatch: pytest.MonkeyPatch,
    environ: dict[str, str],
    message: str,
    hint: str,
):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)

    with pytest.raises(StoreError) as caught:
        empty_store.open(SHORT_RETRY_S).put_bytes(b"x", "key")

    assert message in caught.value.message
    assert caught.value.hint.startswith(hint)
    assert SECRET_KEY not in caught.value.message + caught.value.hint
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("fault", "message", "hint"),
    [
        (Fault(status=403, code="AccessDenied"), "access denied (403", "do these keys have read"),
        (
            Fault(status=403, code="RequestTimeTooSkewed", headers={"Date": "LATE"}),
            "the clocks differ too much: this one is 36",
            "set this machine's clock",
        ),
        (
            Fault(
                status=301,
                code="PermanentRedirect",
                headers={"x-amz-bucket-region": "eu-west-101"},
            ),
            "the bucket is in eu-west-101 (301",
            "s3://BUCKET/pre%20fix?region=eu-west-101",
        ),
        (Fault(status=400, code="ExpiredToken"), "the temporary keys have expired", "get fresh"),
        (Fault(status=507, code="QuotaExceeded"), "the quota is used up (507", "remove what"),
        (Fault(status=503, code="SlowDown"), "the service kept asking to slow", "try again"),
        (Fault(status=418, code="Teapot"), "made by the test (418 Teapot)", ""),
    ],
    ids=str,
)
def test_error_codes_of_the_service_are_explained(
    empty_store: EmptyStore, proxy: FaultProxy, fault: Fault, message: str, hint: str
):
    late = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() - 3600))
    headers = {name: value.replace("LATE", late) for name, value in fault.headers.items()}
    proxy.add(replace(fault, headers=headers), times=100)

    with pytest.raises(StoreError) as caught:
        empty_store.open(SHORT_RETRY_S).put_bytes(b"x", "key")

    assert caught.value.message.startswith(f"writing key in s3://{bucket(empty_store)}/pre%20fix: ")
    assert message in caught.value.message
    assert caught.value.hint.startswith(hint.replace("BUCKET", bucket(empty_store)))


@pytest.mark.parametrize("verb", ["put", "get", "list", "delete"])
def test_a_missing_bucket_is_reported(new_store: NewStore, verb: str):
    store = replace(new_store("s3 on moto"), uri="s3://no-such-bucket/x").open()
    verbs: dict[str, Callable[[], object]] = {
        "put": lambda: store.put_bytes(b"x", "key"),
        "get": lambda: store.get_bytes("key"),
        "list": lambda: list(store.list()),
        "delete": lambda: store.delete("key"),
    }
    with pytest.raises(StoreError, match=r"in s3://no-such-bucket/x: no such bucket"):
        verbs[verb]()


def test_wrong_endpoints_are_reported(
    empty_store: EmptyStore, proxy: FaultProxy, seaweedfs: Server
):
    plain = replace(
        empty_store, uri=f"{empty_store.uri}?endpoint=https://127.0.0.1:{seaweedfs.port}"
    )
    with pytest.raises(StoreError, match=r"the TLS handshake failed") as caught:
        plain.open(SHORT_RETRY_S).put_bytes(b"x", "key")
    assert caught.value.hint == "should the endpoint be http:// or https://?"

    proxy.choose = lambda _: Fault(status=200, body=b"<html></html>")
    with pytest.raises(
        StoreError, match=r"listing keys in s3://.*: the answer is not a list of keys"
    ):
        list(empty_store.open().list())


def test_threads_share_a_store(store: ObjectStore, proxy: FaultProxy):
    storm(proxy)
    numbers = range(100)
    in_parallel(lambda i: store.put_bytes(b"%d" % i * 1000, f"key-{i}"), numbers)

    contents = in_parallel(lambda i: store.get_bytes(f"key-{i}"), numbers)

    assert contents == [b"%d" % i * 1000 for i in numbers]


# ---- many small objects


def fill(store: ObjectStore) -> dict[str, bytes]:
    """Put a hundred small objects, and return them by key."""
    contents = {f"key-{number}": b"%d " % number * 1000 for number in range(100)}
    in_parallel(lambda key: store.put_bytes(contents[key], key), contents)
    return contents


@pytest.mark.parametrize(
    "fault",
    [
        None,
        HANG,
        INTERNAL,
        THROTTLED,
        LOST_ANSWER,
        Fault(cut_response_at=300),
    ],
    ids=["storm", "hang", "internal", "throttled", "lost answer", "cut"],
)
def test_many_small_objects_survive_faults(
    empty_store: EmptyStore, proxy: FaultProxy, fault: Fault | None
):
    store = empty_store.open()
    contents = fill(store)
    if fault is None:
        storm(proxy)
    else:
        proxy.add(fault, when=is_get, times=3)

    assert dict(store.get_each(list(contents))) == contents


def test_many_objects_from_an_unreachable_store_are_one_error(empty_store: EmptyStore):
    nowhere = replace(empty_store, uri=f"{empty_store.uri}?endpoint=http://127.0.0.1:1").open(
        SHORT_RETRY_S
    )

    with pytest.raises(StoreError, match=r"reading key-\d+ in s3://.*connection refused"):
        list(nowhere.get_each([f"key-{number}" for number in range(100)]))

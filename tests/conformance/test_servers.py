"""The servers and the proxy do what other tests rely on, checked with plain boto3."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Any

import pytest
from botocore.exceptions import BotoCoreError, ClientError

from tests.support.servers import (
    HANG,
    INTERNAL,
    LOST_ANSWER,
    THROTTLED,
    TOO_MANY,
    Fault,
    FaultProxy,
    SeaweedFS,
    Server,
    boto3_client,
)

DATA = bytes(range(256)) * 4096
MakeBucket = Callable[[Server], str]
MakeProxy = Callable[[Server], FaultProxy]


@pytest.fixture
def proxy(seaweedfs: Server, fault_proxy: MakeProxy) -> FaultProxy:
    """Put a proxy in front of the real server."""
    return fault_proxy(seaweedfs)


@pytest.fixture
def bucket(seaweedfs: Server, new_bucket: MakeBucket) -> str:
    """Make an empty bucket."""
    return new_bucket(seaweedfs)


def put(client: Any, bucket: str) -> None:
    """Put the data with boto3."""
    client.put_object(Bucket=bucket, Key="key", Body=DATA)


def get(client: Any, bucket: str) -> bytes:
    """Get the data with boto3."""
    data: bytes = client.get_object(Bucket=bucket, Key="key")["Body"].read()
    return data


@pytest.mark.parametrize("name", ["seaweedfs", "moto"])
def test_a_server_returns_what_was_stored(
    name: str, request: pytest.FixtureRequest, new_bucket: MakeBucket, fault_proxy: MakeProxy
):
    server: Server = request.getfixturevalue(name)
    bucket, proxy = new_bucket(server), fault_proxy(server)
    client = boto3_client(proxy.endpoint)
    put(client, bucket)

    assert get(client, bucket) == get(boto3_client(server.endpoint), bucket) == DATA
    assert [(r.method, r.path) for r in proxy.requests] == [
        ("PUT", f"/{bucket}/key"),
        ("GET", f"/{bucket}/key"),
    ]


def test_a_killed_server_has_every_acknowledged_object(tmp_path: Any):
    """SeaweedFS restarts at the same address and still has the object."""
    server = SeaweedFS(tmp_path / "server")
    server.start()
    try:
        client = boto3_client(server.endpoint)
        client.create_bucket(Bucket="bucket")
        put(client, "bucket")
        endpoint = server.endpoint
        server.kill()
        server.start()

        assert server.endpoint == endpoint
        end = time.monotonic() + 60
        while True:
            try:
                assert get(client, "bucket") == DATA
                break
            except ClientError:
                # The S3 service answers before the volumes have reported their content.
                assert time.monotonic() < end
                time.sleep(0.1)
    finally:
        server.kill()


@pytest.mark.parametrize(
    ("fault", "status"), [(THROTTLED, 503), (TOO_MANY, 429), (INTERNAL, 500)], ids=str
)
def test_a_refusal_comes_from_the_proxy(proxy: FaultProxy, bucket: str, fault: Fault, status: int):
    """The matching request is refused once, and never reaches the server."""
    client = boto3_client(proxy.endpoint)
    proxy.add(fault, when=lambda r: r.method == "PUT")

    with pytest.raises(ClientError) as caught:
        put(client, bucket)
    with pytest.raises(ClientError):
        get(client, bucket)
    put(client, bucket)

    assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == status
    assert caught.value.response["Error"]["Code"] == fault.code
    assert get(client, bucket) == DATA


@pytest.mark.parametrize(
    "fault",
    [
        Fault(cut_request_at=1000),
        Fault(corrupt_request_at=1000),
        LOST_ANSWER,
        HANG,
        Fault(status=500, code="InternalError", is_done=True),
    ],
    ids=str,
)
def test_a_put_can_be_broken(proxy: FaultProxy, bucket: str, fault: Fault):
    """The client notices each fault, and a second put succeeds."""
    client = boto3_client(proxy.endpoint, read_timeout=2)
    proxy.add(fault)

    with pytest.raises((ClientError, BotoCoreError)):
        put(client, bucket)
    put(client, bucket)

    assert get(client, bucket) == DATA
    assert [r.fault for r in proxy.requests] == [fault, None, None]


def test_a_request_may_succeed_although_its_response_is_lost(proxy: FaultProxy, bucket: str):
    """The response is a 500, but the object is stored."""
    proxy.add(Fault(status=500, code="InternalError", is_done=True))
    with pytest.raises(ClientError):
        put(boto3_client(proxy.endpoint), bucket)

    assert get(boto3_client(proxy.endpoint), bucket) == DATA


@pytest.mark.parametrize(
    "fault",
    [
        Fault(cut_response_at=1000),
        Fault(cut_response_at=1000, resets=False),
        Fault(hangs_at=1000),
    ],
    ids=str,
)
def test_a_get_can_be_broken(proxy: FaultProxy, bucket: str, fault: Fault):
    """The client gets a part of the object and notices that the rest is missing."""
    client = boto3_client(proxy.endpoint, read_timeout=2)
    put(client, bucket)
    proxy.add(fault)

    with pytest.raises(BotoCoreError):
        get(client, bucket)
    assert get(client, bucket) == DATA


def test_a_byte_of_an_answer_can_be_flipped(proxy: FaultProxy, bucket: str):
    """Only the byte at the given offset differs."""
    client = boto3_client(proxy.endpoint, response_checksum_validation="when_required")
    put(client, bucket)
    proxy.add(Fault(corrupt_response_at=70_000))

    answer = get(client, bucket)

    assert [i for i in range(len(DATA)) if answer[i] != DATA[i]] == [70_000]
    assert hashlib.md5(get(client, bucket)).digest() == hashlib.md5(DATA).digest()


def test_an_answer_can_be_slow(proxy: FaultProxy, bucket: str):
    """A megabyte at 2 MB a second takes at least half a second."""
    client = boto3_client(proxy.endpoint)
    put(client, bucket)
    proxy.add(Fault(bytes_per_s=2_000_000))
    begun = time.monotonic()

    assert get(client, bucket) == DATA
    assert time.monotonic() - begun > 0.4


def test_a_fault_can_let_requests_pass_first(proxy: FaultProxy, bucket: str):
    """The first request passes, the next two fail, the fourth passes."""
    client = boto3_client(proxy.endpoint)
    proxy.add(INTERNAL, skip=1, times=2)
    put(client, bucket)

    for _ in range(2):
        with pytest.raises(ClientError):
            put(client, bucket)
    put(client, bucket)

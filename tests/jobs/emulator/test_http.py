"""How the two HTTP servers handle hostile, malformed and interrupted requests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import Response

from cloudjob.backends.process.keeper import descendants_of
from cloudjob.emulator import http_server
from cloudjob.emulator.http_server import HttpServer
from tests.support.emulator import Api, await_true, bucket_of, new_name, running

MIB = 1 << 20


@contextlib.contextmanager
def connected(endpoint: str) -> Iterator[socket.socket]:
    host, _, port = endpoint.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), 60) as connection:
        yield connection


def exchanged(endpoint: str, *parts: bytes) -> bytes:
    """Send the parts, and return all data that the server sends until it closes the connection."""
    with connected(endpoint) as client:
        with contextlib.suppress(ConnectionError):
            for part in parts:
                client.sendall(part)
        received = b""
        with contextlib.suppress(ConnectionError):
            while data := client.recv(MIB):
                received += data
        return received


def head(endpoint: str, line: str, *headers: str) -> bytes:
    host = endpoint.removeprefix("http://")
    return "\r\n".join((f"{line} HTTP/1.1", f"Host: {host}", *headers, "", "")).encode()


def presigned(s3: Any, operation: str, key: str, endpoint: str) -> str:
    url: str = s3.generate_presigned_url(operation, {"Bucket": "data", "Key": key})
    return url.removeprefix(endpoint)


@pytest.fixture(params=["endpoint", "s3_endpoint"])
def endpoint(session_api: Api, request: pytest.FixtureRequest) -> str:
    return str(getattr(session_api.address, request.param))


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GARBAGE\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", b"400"),
        (b"GET /" + b"a" * 300_000, b"414"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n", b"501"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 300_000, b"431"),
        (b"GET / HTTP/1.1\r\n" + b"".join(b"X%d: y\r\n" % n for n in range(40_000)), b"431"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"400"),
    ],
    ids=lambda value: repr(value[:40]),
)
def test_a_malformed_request_is_answered_and_closed(endpoint: str, request_: bytes, status: bytes):
    head, _, body = exchanged(endpoint, request_).partition(b"\r\n\r\n")

    assert head.split(b" ")[1] == status
    if b"Content-Type: application/xml" in head or b"content-type: application/xml" in head:
        assert b"<Error><Code>" in body
    else:
        assert json.loads(body)["error_code"] == "APIGW.0201"


def test_a_chunk_with_a_wrong_size_is_refused(session_api: Api):
    endpoint = session_api.address.endpoint
    start = head(endpoint, "POST /v3/auth/tokens", "Transfer-Encoding: chunked")

    assert exchanged(endpoint, start, b"zz\r\n{}\r\n0\r\n\r\n").startswith(b"HTTP/1.1 400 ")


def test_a_body_in_chunks_is_read(session_api: Api):
    endpoint = session_api.address.endpoint
    headers = ("Transfer-Encoding: chunked", "Connection: close")
    start = head(endpoint, "POST /v3/auth/tokens", *headers)

    answer = exchanged(endpoint, start, b'8\r\n{"auth":\r\n3\r\n{}}\r\n0\r\n\r\n')
    assert b"Expecting to find identity" in answer


def test_a_body_above_the_limit_is_refused_with_413(session_api: Api):
    endpoint = session_api.address.endpoint
    declared = head(endpoint, "POST /v3/auth/tokens", "Content-Length: 99999999999")
    chunked = head(endpoint, "POST /v3/auth/tokens", "Transfer-Encoding: chunked")
    chunk = b"%x\r\n%s\r\n" % (MIB, b"x" * MIB)

    head_, _, body = exchanged(endpoint, declared).partition(b"\r\n\r\n")
    assert head_.startswith(b"HTTP/1.1 413 ")
    assert json.loads(body)["error_msg"] == "Request entity too large."
    assert exchanged(endpoint, chunked, *[chunk] * 14).startswith(b"HTTP/1.1 413 ")


def test_two_requests_in_one_packet_get_two_answers(session_api: Api):
    endpoint = session_api.address.endpoint
    first = head(endpoint, "GET /nothing")
    second = head(endpoint, "GET /nothing", "Connection: close")

    assert exchanged(endpoint, first + second).count(b"APIGW.0101") == 2


def test_a_slash_at_the_end_of_a_path_makes_no_difference(api: Api):
    assert api.ask("GET", "{p}/training-job-flavors/")[0] == 200


def test_a_refused_upload_is_read_before_the_answer_is_lost(api: Api, s3: Any):
    api.fault("full-obs")
    endpoint, body = api.address.s3_endpoint, b"x" * 20 * MIB
    url = s3.generate_presigned_url("put_object", {"Bucket": "data", "Key": "refused"})
    target = url.removeprefix(endpoint)
    put = head(endpoint, f"PUT {target}", f"Content-Length: {len(body)}")
    last = head(endpoint, "GET /data/refused", "Connection: close")

    answer = exchanged(endpoint, put, body, last)
    assert answer.count(b"InsufficientStorageSpace") == 1
    assert answer.count(b"HTTP/1.1 403 ") == 2


def test_a_client_that_waits_for_100_is_refused_at_once(api: Api):
    api.fault("full-obs")
    endpoint = api.address.s3_endpoint
    put = head(endpoint, "PUT /data/x", "Content-Length: 1000", "Expect: 100-continue")

    answer = exchanged(endpoint, put)
    assert answer.startswith(b"HTTP/1.1 403 ")
    assert b"connection: close" in answer.lower()


def test_a_client_that_waits_for_100_gets_it(api: Api, s3: Any):
    endpoint, key = api.address.s3_endpoint, new_name()
    target = presigned(s3, "put_object", key, endpoint)
    put = head(
        endpoint, f"PUT {target}", "Content-Length: 3", "Expect: 100-continue", "Connection: close"
    )
    with connected(endpoint) as client:
        client.sendall(put)
        assert client.recv(1000).startswith(b"HTTP/1.1 100 ")
        client.sendall(b"abc")
        assert client.recv(1000).startswith(b"HTTP/1.1 200 ")
    assert s3.get_object(Bucket="data", Key=key)["Body"].read() == b"abc"


def test_an_upload_without_a_length_is_stored(api: Api, s3: Any):
    endpoint, key = api.address.s3_endpoint, new_name()
    target = presigned(s3, "put_object", key, endpoint)
    put = head(endpoint, f"PUT {target}", "Transfer-Encoding: chunked", "Connection: close")

    assert b" 200 " in exchanged(endpoint, put, b"3\r\nabc\r\n", b"2\r\nde\r\n0\r\n\r\n")
    assert s3.get_object(Bucket="data", Key=key)["Body"].read() == b"abcde"


@pytest.mark.parametrize("framing", ["Content-Length: 9000000", "Transfer-Encoding: chunked"])
def test_an_upload_that_breaks_off_leaves_no_object(api: Api, s3: Any, framing: str):
    endpoint, key = api.address.s3_endpoint, new_name()
    target = presigned(s3, "put_object", key, endpoint)
    with connected(endpoint) as client:
        client.sendall(head(endpoint, f"PUT {target}", framing))
        client.sendall(b"800000\r\n" + b"x" * 5 * MIB)

    s3.put_object(Bucket="data", Key=key + "-later", Body=b"")
    listed = s3.list_objects(Bucket="data", Prefix=key)["Contents"]
    assert [item["Key"] for item in listed] == [key + "-later"]


def test_a_download_that_breaks_off_ends_the_transfer_from_the_store(api: Api, s3: Any):
    endpoint, key = api.address.s3_endpoint, new_name()
    s3.put_object(Bucket="data", Key=key, Body=bytes(30 * MIB))
    before = sockets_of(api)
    with connected(endpoint) as client:
        client.sendall(head(endpoint, f"GET {presigned(s3, 'get_object', key, endpoint)}"))
        assert client.recv(1000).startswith(b"HTTP/1.1 200 ")
        assert sockets_of(api) > before
    await_true(lambda: sockets_of(api) <= before)


def sockets_of(api: Api) -> int:
    """Return how many sockets the emulator has open."""
    count = 0
    for entry in Path(f"/proc/{api.address.pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            count += str(entry.readlink()).startswith("socket:")
    return count


def test_many_clients_at_once_are_answered(api: Api, s3: Any):
    key = new_name()
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(24) as pool:
        for endpoint in (api.address.endpoint, api.address.s3_endpoint):
            for _ in range(200):
                stack.enter_context(connected(endpoint)).sendall(b"GET / HT")
        uploads = [
            pool.submit(s3.put_object, Bucket="data", Key=f"{key}/{n}", Body=os.urandom(100_000))
            for n in range(60)
        ]
        api_requests = [pool.submit(api.ask, "GET", "{p}/training-job-flavors") for _ in range(60)]
        assert {item.result()["ResponseMetadata"]["HTTPStatusCode"] for item in uploads} == {200}
        assert {item.result()[0] for item in api_requests} == {200}


def test_an_object_store_that_is_killed_comes_back():
    with running("engine: process\n") as api:
        s3 = bucket_of(api)
        endpoint = api.address.s3_endpoint
        target = presigned(s3, "put_object", "k", endpoint)
        weed_processes = [
            process
            for process in descendants_of(api.address.pid)
            if b"weed" in Path(f"/proc/{process}/cmdline").read_bytes()
        ]
        with connected(endpoint) as client:
            client.sendall(head(endpoint, f"PUT {target}", "Content-Length: 2000000"))
            client.sendall(b"x" * MIB)
            for process in weed_processes:
                os.kill(process, signal.SIGKILL)
            with contextlib.suppress(ConnectionError):
                client.sendall(b"x" * (2_000_000 - MIB))
            assert b"HTTP/1.1 503 " in client.recv(1000)
        await_true(lambda: b"HTTP/1.1 200 " in exchanged(endpoint, put_of(endpoint, target)))
        assert s3.get_object(Bucket="data", Key="k")["Body"].read() == b"abc"


def put_of(endpoint: str, target: str) -> bytes:
    return head(endpoint, f"PUT {target}", "Content-Length: 3", "Connection: close") + b"abc"


@pytest.mark.parametrize("parts", [(), (b"GET / HT",), (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",)])
def test_a_silent_connection_is_closed(monkeypatch: pytest.MonkeyPatch, parts: tuple[bytes, ...]):
    """The client stops sending before a request, within its head, or after the answer.

    No answer waits for the acknowledgement of its first part, which a client delays by 40 ms.
    """
    delays: list[bool] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        end = scope["state"]["transport"].get_extra_info("socket")
        delays.append(not end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        await Response("ok")(scope, receive, send)

    monkeypatch.setattr(http_server, "IDLE_S", 0.2)
    server, listener = HttpServer(), http_server.bind("127.0.0.1", 0)
    server.add(app, [listener])
    server.start()
    try:
        with connected(f"http://127.0.0.1:{http_server.port_of(listener)}") as client:
            for part in parts:
                client.sendall(part)
            while client.recv(1000):
                pass
    finally:
        server.close()
    assert delays == [False] * any(b"\r\n\r\n" in part for part in parts)

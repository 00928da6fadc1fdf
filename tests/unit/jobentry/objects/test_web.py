"""Objects of a web server: redirects, ranges, retries, proxies, and masked secrets."""

from __future__ import annotations

import contextlib
import http.server
import os
import resource
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

import pytest

from jobentry import objects
from jobentry.objects import ObjectError, ObjectMissing, client

DATA = bytes(range(256)) * 20_000
SECRET = "X-Amz-Signature=c0ffee"


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers with the server's ``answer``, by default ranges of ``DATA``."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        """Handle a download."""
        self.serve()

    def do_PUT(self) -> None:
        """Handle an upload."""
        self.serve()

    def serve(self) -> None:
        """Record the request and let the test answer it."""
        length = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(length)
        server: Any = self.server
        server.seen.append((self.command, self.path, dict(self.headers), body))
        server.answer(self, len(server.seen))

    def send(self, status: int, body: bytes = b"", **headers: str) -> None:
        """Send an answer of known length."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def send_data(self) -> None:
        """Send the requested range of ``DATA``."""
        range_header = self.headers.get("Range")
        if range_header is None:
            self.send(200, DATA, ETag='"1"')
            return
        first, _, last = range_header.partition("=")[2].partition("-")
        begin, end = int(first), min(int(last) + 1, len(DATA))
        place = "bytes %d-%d/%d" % (begin, end - 1, len(DATA))
        self.send(206, DATA[begin:end], Content_Range=place, ETag='"1"')


class Server(http.server.ThreadingHTTPServer):
    """A server that ignores clients that disconnect early."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report all errors but lost connections."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


@pytest.fixture
def server() -> Iterator[Any]:
    """A web server that answers with ``server.answer``."""
    http_server: Any = Server(("127.0.0.1", 0), Handler)
    http_server.seen = []
    http_server.answer = lambda handler, count: handler.send_data()
    http_server.uri = "http://127.0.0.1:%d" % http_server.server_address[1]
    thread = threading.Thread(target=http_server.serve_forever, args=(0.05,))
    thread.start()
    yield http_server
    http_server.shutdown()
    thread.join()
    http_server.server_close()


@pytest.fixture(autouse=True)
def _short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the timeouts, and use no proxy."""
    monkeypatch.setattr(client, "_PATIENCE_S", 20.0)
    monkeypatch.setattr(client, "_STALL_S", 4.0)
    monkeypatch.setattr(client, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(client, "_MAX_PAUSE_S", 0.05)
    monkeypatch.setattr(client, "_down", {})
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


@pytest.fixture
def _short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give up after 1 s."""
    monkeypatch.setenv("CLOUDJOB_STORE_PATIENCE_S", "1")


def fetched(uri: str, folder: Path) -> bytes:
    """Fetch an object and return its bytes; no other file may be left."""
    with contextlib.suppress(FileNotFoundError):
        (folder / "got" / "it").unlink()
    objects.fetch(uri, str(folder / "got" / "it"))
    assert [path.name for path in (folder / "got").iterdir()] == ["it"]
    return (folder / "got" / "it").read_bytes()


def test_an_object_is_read_in_ranges(server: Any, tmp_path: Path):
    uri = server.uri + "/a/b?" + SECRET

    assert fetched(uri, tmp_path) == objects.read(uri) == DATA
    assert objects.stat(uri) == objects.Entry("", uri, len(DATA), "1", 0)
    assert {target for _, target, _, _ in server.seen} == {"/a/b?" + SECRET}


def whole(handler: Handler, count: int) -> None:
    """Answer like a server that does not support ranges."""
    handler.send(200, DATA)


def chunked(handler: Handler, count: int) -> None:
    """Answer like a server that does not know the length of the body."""
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    for begin in range(0, len(DATA), 100_000):
        piece = DATA[begin : begin + 100_000]
        handler.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
    handler.wfile.write(b"0\r\n\r\n")


@pytest.mark.parametrize("answer", [whole, chunked])
def test_a_server_without_ranges_is_supported(
    server: Any, tmp_path: Path, answer: Callable[..., None]
):
    server.answer = answer

    assert fetched(server.uri + "/a", tmp_path) == objects.read(server.uri + "/a") == DATA


def test_an_empty_object_is_read(server: Any, tmp_path: Path):
    server.answer = lambda handler, count: (
        handler.send(416, Content_Range="bytes */0")
        if handler.headers.get("Range")
        else handler.send(200)
    )

    assert fetched(server.uri + "/a", tmp_path) == objects.read(server.uri + "/a") == b""
    assert objects.stat(server.uri + "/a").size_bytes == 0


def send_truncated(handler: Handler) -> None:
    """Announce the full length and send only a part."""
    first = handler.headers.get("Range", "bytes=0-").partition("=")[2].partition("-")[0]
    handler.send_response(206)
    last = min(int(handler.headers["Range"].rpartition("-")[2]) + 1, len(DATA))
    handler.send_header("Content-Length", str(last - int(first)))
    handler.send_header("Content-Range", "bytes %s-%d/%d" % (first, last - 1, len(DATA)))
    handler.end_headers()
    handler.wfile.write(DATA[int(first) : int(first) + 300_000])
    handler.close_connection = True


def test_a_broken_range_is_resumed(server: Any, tmp_path: Path):
    # The first answer is complete: after a break, it would be requested from the start again.
    server.answer = lambda handler, count: (
        handler.send_data() if count in (1, 6) else send_truncated(handler)
    )

    assert fetched(server.uri + "/a", tmp_path) == DATA
    begins = [
        int(headers["Range"].partition("=")[2].partition("-")[0])
        for _, _, headers, _ in server.seen[1:]
    ]
    assert [later - before for before, later in zip(begins, begins[1:])] == [300_000] * 4


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_transient_errors_are_retried(server: Any, tmp_path: Path, status: int):
    server.answer = lambda handler, count: (
        handler.send(status) if count % 2 else handler.send_data()
    )

    assert fetched(server.uri + "/a", tmp_path) == DATA


@pytest.mark.usefixtures("_short_patience")
def test_retries_end_with_a_message_after_a_time_limit(server: Any, tmp_path: Path):
    server.answer = lambda handler, count: handler.send(503)
    uri = server.uri + "/a?" + SECRET
    for act in (objects.read, lambda uri: fetched(uri, tmp_path)):
        client._down.clear()
        with pytest.raises(
            ObjectError, match=r"503 Service Unavailable; gave up after 1 s \(attempts: \d+\)$"
        ) as caught:
            act(uri)
        assert f"{server.uri}/a?***: " in str(caught.value)
        assert "CLOUDJOB_STORE_PATIENCE_S" in caught.value.hint
        assert "c0ffee" not in str(caught.value) + caught.value.hint


@pytest.mark.usefixtures("_short_patience")
def test_a_slow_answer_that_breaks_off_after_the_time_limit_is_requested_again(
    server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """On a slow connection, one answer takes longer than the time limit of retries."""
    clock = time.monotonic
    late_s = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock() + late_s[0])

    def answer(handler: Handler, count: int) -> None:
        if count == 1:
            send_truncated(handler)
            late_s[0] = 100.0
        else:
            handler.send_data()

    server.answer = answer

    assert fetched(server.uri + "/a", tmp_path) == DATA


@pytest.mark.usefixtures("_short_patience")
def test_a_long_wait_is_reported_without_signatures(
    server: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(client, "_FIRST_NOTICE_S", 0.2)
    monkeypatch.setattr(client, "_next_notice_at", 0.0)
    server.answer = lambda handler, count: handler.send(503)
    with pytest.raises(ObjectError):
        objects.read(server.uri + "/a?" + SECRET)

    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("jobentry: ")
    assert f"{server.uri}/a?***: 503 Service Unavailable; trying again" in line


def test_a_server_that_stops_answering_counts_as_broken(server: Any, tmp_path: Path):
    stop = threading.Event()

    def answer(handler: Handler, count: int) -> None:
        if count == 1:
            handler.send_response(206)
            handler.send_header("Content-Length", "1000")
            handler.send_header("Content-Range", "bytes 0-999/1000")
            handler.end_headers()
            handler.wfile.write(b"x")
            stop.wait(30)
            handler.close_connection = True
        else:
            handler.send_data()

    server.answer = answer
    content = fetched(server.uri + "/a", tmp_path)
    stop.set()

    assert content == DATA


@pytest.mark.usefixtures("_short_patience")
def test_a_refused_connection_is_reported(tmp_path: Path):
    with pytest.raises(ObjectError, match=r"/a: connection refused; gave up after 1 s"):
        fetched("http://127.0.0.1:9/a", tmp_path)


@pytest.mark.usefixtures("_short_patience")
def test_a_server_that_was_given_up_costs_no_patience_again_until_it_answers(
    server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Not every output waits for a broken store; later outputs are stored once it is back."""
    monkeypatch.setattr(client, "_DOWN_PAUSE_S", 1e6)
    server.answer = lambda handler, count: handler.send(503)
    with pytest.raises(ObjectError, match="gave up after 1 s"):
        objects.read(server.uri + "/a")
    request_count = len(server.seen)
    for _ in range(100):
        with pytest.raises(ObjectError, match="the server does not answer"):
            objects.read(server.uri + "/a")
    assert len(server.seen) == request_count

    monkeypatch.setattr(client, "_DOWN_PAUSE_S", 0.0)
    server.answer = lambda handler, count: handler.send_data()
    assert objects.read(server.uri + "/a") == DATA
    assert client._down == {}


def test_missing_objects_and_buckets_are_distinguished(server: Any, tmp_path: Path):
    server.answer = lambda handler, count: handler.send(404 if "none" in handler.path else 403)

    with pytest.raises(ObjectMissing, match=r"reading .*/none: 404 Not Found$"):
        objects.read(server.uri + "/none")
    with pytest.raises(ObjectError, match=r"reading .*/closed\?\*\*\*: 403 Forbidden$"):
        objects.read(server.uri + "/closed?" + SECRET)
    assert len(server.seen) == 2


def test_an_object_replaced_while_it_is_read_is_fetched_again(server: Any, tmp_path: Path):
    versions = iter(range(100))

    def answer(handler: Handler, count: int) -> None:
        first, last = handler.headers["Range"].partition("=")[2].split("-")
        place = "bytes %s-%s/%d" % (first, last, len(DATA))
        body = b"x" * (int(last) + 1 - int(first))
        handler.send(206, body, Content_Range=place, ETag='"%d"' % next(versions))

    server.answer = answer
    with pytest.raises(ObjectError, match="it was replaced while it was read"):
        fetched(server.uri + "/a", tmp_path)
    assert list((tmp_path / "got").iterdir()) == []


def test_a_wrong_digest_is_refused(server: Any, tmp_path: Path):
    with pytest.raises(ObjectError, match=r"its digest is \w{64}, not 0{64}$"):
        objects.fetch(server.uri + "/a", str(tmp_path / "it"), sha256="0" * 64)
    assert list(tmp_path.iterdir()) == []


def test_redirects_are_followed_within_limits(server: Any, tmp_path: Path):
    uri = server.uri

    def answer(handler: Handler, count: int) -> None:
        if handler.path == "/new":
            handler.send_data()
        elif handler.path == "/file":
            handler.send(302, Location="file:///etc/passwd")
        else:
            handler.send(302, Location={"/old": "new", "/loop": uri + "/loop"}[handler.path])

    server.answer = answer

    assert fetched(uri + "/old", tmp_path) == DATA
    with pytest.raises(ObjectError, match=r"/loop: 302 Found"):
        objects.read(uri + "/loop")
    with pytest.raises(ObjectError, match="which is less safe"):
        objects.read(uri + "/file")


def test_an_object_is_written(server: Any):
    server.answer = lambda handler, count: handler.send(503 if count % 2 else 200)
    objects.write(DATA, server.uri + "/a?" + SECRET)
    objects.write(b"", server.uri + "/b")

    taken = [(method, target, body) for method, target, _, body in server.seen[1::2]]
    assert taken == [("PUT", "/a?" + SECRET, DATA), ("PUT", "/b", b"")]


def test_credentials_in_a_uri_are_sent_but_not_shown(server: Any):
    server.answer = lambda handler, count: handler.send(403)
    uri = server.uri.replace("//", "//user:pass%20word@")

    with pytest.raises(ObjectError) as caught:
        objects.read(uri + "/a")

    assert "pass" not in str(caught.value)
    assert server.seen[0][2]["Authorization"] == "Basic dXNlcjpwYXNzIHdvcmQ="


def test_the_proxy_variables_are_used(server: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("http_proxy", server.uri.replace("//", "//me:secret@"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")

    assert objects.read("http://far.example/a") == DATA
    assert objects.read(server.uri + "/b") == DATA
    targets = [target for _, target, _, _ in server.seen]
    assert targets[0] == "http://far.example/a"
    assert targets[-1] == "/b"
    assert server.seen[0][2]["Proxy-Authorization"] == "Basic bWU6c2VjcmV0"
    assert server.seen[0][2]["Host"] == "far.example"


def test_an_error_of_the_disk_is_reported_without_retries(server: Any, tmp_path: Path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(ObjectError, match=r"writing .*/it: file too large$") as caught:
            objects.fetch(server.uri + "/a", str(tmp_path / "it"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    assert "ulimit -f" in caught.value.hint
    assert len(server.seen) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "uri",
    [
        "http://",
        "http:///a",
        "https://host/a b",
        "https://host:port/a",
        "https://hö/a",
        "http://h\n",
    ],
)
def test_an_invalid_uri_is_refused_before_any_request(uri: str):
    with pytest.raises(ObjectError, match="not a URI of the form"):
        objects.check(uri)


def test_a_web_server_cannot_list_objects(server: Any):
    with pytest.raises(ObjectError, match="does not list its objects"):
        list(objects.list(server.uri + "/a/"))

"""Notices about waits for a store or a cluster, and how the command line prints them."""

from __future__ import annotations

import contextlib
import http.server
import itertools
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import kubernetes.client  # noqa: F401 (imported now, as the import can exceed timeouts)
import pytest

from cloudjob import retries
from cloudjob.backends.kubernetes import client as kube_client
from cloudjob.backends.kubernetes import kubeconfig
from cloudjob.cli.messages import print_library_log
from cloudjob.errors import BackendError, StoreError
from cloudjob.home.records import Records
from cloudjob.package import claims
from cloudjob.retries import RequestLimits, WaitNotices
from cloudjob.store.directory import DirectoryStore
from cloudjob.store.s3 import S3Store, bucket_uri, client
from cloudjob.submission import pipeline

DEADLINE_S = 180.0


@pytest.fixture
def early_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the first notice appear soon."""
    monkeypatch.setattr(retries, "FIRST_S", 0.05)


@dataclass
class SilentService:
    """A service that accepts requests and never answers."""

    listener: socket.socket

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.listener.getsockname()[1]}"

    def connection_count(self) -> int:
        """Return the number of connections since the last call."""
        count = 0
        self.listener.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                self.listener.accept()[0].close()
                count += 1
        return count


@pytest.fixture
def silent_service() -> Iterator[SilentService]:
    """A service on a free port that never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield SilentService(listener)


def test_a_wait_is_reported_every_five_seconds(caplog: pytest.LogCaptureFixture):
    now_s = 0.0
    notices = WaitNotices(lambda: now_s)
    for now_s in range(19):
        notices.report(0.0, f"asking: no answer for {now_s} s")

    assert caplog.messages == [
        f"asking: no answer for {after_s} s; trying again" for after_s in (5, 10, 15)
    ]


def test_a_store_that_does_not_answer_is_reported_and_given_up(
    early_notices: None,
    silent_service: SilentService,
    s3_store: Callable[[str, float], S3Store],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(client, "_READ_S", 0.2)
    monkeypatch.setattr(client, "_FIRST_PAUSE_S", 0.01)
    store = s3_store(silent_service.url, 0.1)
    with pytest.raises(StoreError) as caught:
        store.get_bytes("key")

    reason = f"{silent_service.url}: it does not answer"
    assert caught.value.message == f"reading key in s3://bucket: {reason}"
    assert silent_service.connection_count() == 2
    assert caplog.messages == [f"asking s3://bucket: {reason}; trying again"]


class LogHook(logging.Handler):
    """Calls a function for each message that cloudjob logs."""

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__()
        self._act = act

    def emit(self, record: logging.LogRecord) -> None:
        self._act()

    def __enter__(self) -> None:
        logging.getLogger("cloudjob").addHandler(self)

    def __exit__(self, *_: object) -> None:
        logging.getLogger("cloudjob").removeHandler(self)


class EmptyStoreHandler(http.server.BaseHTTPRequestHandler):
    """Answers every HEAD request with 404: no object exists."""

    def do_HEAD(self) -> None:
        self.send_error(404)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def s3_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str, float], S3Store]:
    """Return a function that opens a store at an endpoint."""
    monkeypatch.setenv("CLOUDJOB_HOME", str(tmp_path))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    return lambda url, retry_s: S3Store(
        bucket_uri.read(f"s3://bucket?endpoint={url}"), retry_s=retry_s
    )


def test_a_store_that_refuses_connections_is_retried_until_it_answers(
    early_notices: None,
    s3_store: Callable[[str, float], S3Store],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(retries, "FIRST_S", 0.0)
    monkeypatch.setattr(retries, "_NEXT_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = ("127.0.0.1", free.getsockname()[1])
    servers: list[http.server.HTTPServer] = []
    failures = itertools.count(1)

    def come_back() -> None:
        if next(failures) == 12:
            servers.append(http.server.HTTPServer(address, EmptyStoreHandler))
            threading.Thread(target=servers[0].serve_forever, daemon=True).start()

    store = s3_store(f"http://127.0.0.1:{address[1]}", 60.0)
    monkeypatch.setattr(client, "_MAX_PAUSE_S", 0.05)
    try:
        with LogHook(come_back):
            assert not store.exists("key")
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


def test_the_pause_between_two_attempts_can_be_interrupted(
    early_notices: None, s3_store: Callable[[str, float], S3Store], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(retries, "FIRST_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setattr(client, "_FIRST_PAUSE_S", 1e6)
    monkeypatch.setattr(client, "_MAX_PAUSE_S", 1e6)
    store = s3_store(url, 1e9)
    paused = threading.Event()
    with LogHook(paused.set), ThreadPoolExecutor(1) as pool:
        pending = pool.submit(store.exists, "key")
        assert paused.wait(DEADLINE_S)
        while not pending.done():
            store.abort()
            time.sleep(0.01)
        with pytest.raises(StoreError, match="interrupted"):
            pending.result()


def test_a_submit_that_is_cancelled_does_not_wait_for_a_store(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(pipeline, "_UNDO_S", 0.1)
    monkeypatch.setattr(claims, "_UNDO_S", 0.1)
    for_ever = threading.Event()

    class UnresponsiveStore(DirectoryStore):
        def delete(self, key: str) -> None:
            for_ever.wait()

        def list(self, prefix: str = "", *, with_unfinished: bool = False) -> Iterator[str]:
            for_ever.wait()
            return iter(())

    store = UnresponsiveStore(tmp_path / "store")
    try:
        with (
            Records(tmp_path / "records.db") as db,
            pytest.raises(KeyboardInterrupt),
            pipeline.undo_on_failure(store, db, "job-1"),
            claims.Claim(store, "job-1"),
        ):
            raise KeyboardInterrupt
    finally:
        for_ever.set()


def test_a_cluster_that_does_not_answer_is_reported(
    early_notices: None,
    silent_service: SilentService,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
):
    config = tmp_path / "config"
    config.write_text(
        "apiVersion: v1\nkind: Config\ncurrent-context: x\n"
        "contexts: [{name: x, context: {cluster: x, user: x}}]\n"
        f"clusters: [{{name: x, cluster: {{server: '{silent_service.url}'}}}}]\n"
        "users: [{name: x, user: {token: t}}]\n"
    )
    limits = RequestLimits(total_s=0.5, answer_s=0.2, pause_s=0.01)
    cluster = kubeconfig.find({"kubeconfig": str(config)}, {}, tmp_path)
    with pytest.raises(BackendError) as caught:
        kube_client.Client(cluster, limits=limits).get("/version", "asking")

    assert caught.value.message == f"asking: no answer in time at {silent_service.url}"
    assert caplog.messages == [f"{caught.value.message}; trying again"]


def test_the_command_line_prints_what_the_library_logs(
    early_notices: None, capsys: pytest.CaptureFixture[str]
):
    print_library_log()
    print_library_log()
    WaitNotices().report(time.monotonic() - 1, "get x: it says \x1b[31mno")

    assert capsys.readouterr().err == "get x: it says \\x1b[31mno; trying again\n"

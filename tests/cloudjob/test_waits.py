"""Who waits for a service reads for what: stores, clusters, ModelArts and the command line."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import kubernetes.client  # noqa: F401 (to import it takes as long as the patience below)
import pytest

from cloudjob import waits
from cloudjob.backends.kubernetes import client, site
from cloudjob.cli.say import hear_library
from cloudjob.errors import BackendError, StoreError
from cloudjob.store.s3 import S3Store, burst, connection, place
from cloudjob.store.s3.wire import Patience, Request
from cloudjob.waits import Waits


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the first word come soon."""
    monkeypatch.setattr(waits, "FIRST_S", 0.05)


@dataclass
class Silent:
    """A service that takes what comes and never answers."""

    listener: socket.socket

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.listener.getsockname()[1]}"

    def asked(self) -> int:
        """Return how many connections have come since it was asked last."""
        count = 0
        self.listener.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                self.listener.accept()[0].close()
                count += 1
        return count


@pytest.fixture
def silent() -> Iterator[Silent]:
    """One of its kind."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield Silent(listener)


def test_a_short_wait_is_nobodys_business_and_a_long_one_is_not_told_all_the_time(
    caplog: pytest.LogCaptureFixture,
):
    """The first word after five seconds, the next fifteen later."""
    now_s = 0.0
    told = Waits(lambda: now_s)
    for now_s in range(41):
        told.tell(0.0, f"asking: no answer for {now_s} s")

    assert caplog.messages == [
        f"asking: no answer for {after_s} s; trying again" for after_s in (5, 20, 35)
    ]


def test_a_store_that_says_nothing_is_told_and_soon_given_up(
    soon: None,
    silent: Silent,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
):
    """After three times the longest silence; who then cleans up asks once."""
    monkeypatch.setenv("CLOUDJOB_HOME", str(tmp_path))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    patience = Patience(first_s=0.01, stall_s=0.2)
    store = S3Store(place.read(f"s3://bucket?endpoint={silent.url}"), patience=patience)
    with pytest.raises(StoreError) as caught:
        store._wire.send(Request("GET", "get key", "key"))

    assert caught.value.message == f"get key: {silent.url}: it does not answer"
    assert silent.asked() == 3
    assert caplog.messages == [f"{caught.value.message}; trying again"]

    with pytest.raises(StoreError):
        store._wire.send(Request("DELETE", "delete key", "key"))
    assert silent.asked() == 1


@pytest.mark.parametrize("count", [1, 3])
def test_a_store_that_has_said_nothing_yet_is_told_while_it_is_waited_for(
    soon: None,
    silent: Silent,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    count: int,
):
    """One request, or many over connections that one thread looks after."""
    monkeypatch.setattr(connection, "QUIET_S", 0.1)
    monkeypatch.setattr(burst, "QUIET_S", 0.1)
    monkeypatch.setenv("CLOUDJOB_HOME", str(tmp_path))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    patience = Patience(tries_to_hear=1, stall_s=0.5)
    store = S3Store(place.read(f"s3://bucket?endpoint={silent.url}"), patience=patience)
    requests = [Request("GET", "get key", "key")] * count
    began_s = time.monotonic()
    if count == 1:
        with pytest.raises(StoreError):
            store._wire.send(requests[0])
    else:
        assert [answer for _, answer in burst.answers(store._wire, requests)] == [None] * count

    assert time.monotonic() - began_s >= 0.5
    assert caplog.messages == [f"get key: {silent.url}: nothing comes back; still waiting"]


def test_a_cluster_that_says_nothing_is_told(
    soon: None, silent: Silent, caplog: pytest.LogCaptureFixture, tmp_path: Path
):
    """Before it is given up."""
    kubeconfig = tmp_path / "config"
    kubeconfig.write_text(
        "apiVersion: v1\nkind: Config\ncurrent-context: x\n"
        "contexts: [{name: x, context: {cluster: x, user: x}}]\n"
        f"clusters: [{{name: x, cluster: {{server: '{silent.url}'}}}}]\n"
        "users: [{name: x, user: {token: t}}]\n"
    )
    patience = client.Patience(total_s=0.5, first_s=0.01, answer_s=0.2)
    found = site.find({"kubeconfig": str(kubeconfig)}, {}, tmp_path)
    with pytest.raises(BackendError) as caught:
        client.Client(found, patience=patience).get("/version", "asking")

    assert caught.value.message == f"asking: no answer in time at {silent.url}"
    assert caplog.messages == [f"{caught.value.message}; trying again"]


def test_the_command_line_says_what_the_library_logs(
    soon: None, capsys: pytest.CaptureFixture[str]
):
    """In one line each, whatever a service has said; once, however often it was set up."""
    hear_library()
    hear_library()
    Waits().tell(time.monotonic() - 1, "get x: it says \x1b[31mno")

    assert capsys.readouterr().err == "get x: it says \\x1b[31mno; trying again\n"

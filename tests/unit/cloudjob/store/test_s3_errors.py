"""What is reported of requests to a bucket that get no answer."""

from __future__ import annotations

import socket

import pytest

from cloudjob.errors import StoreError
from cloudjob.store import open_store


@pytest.fixture
def proxied(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Return what sets the proxy of a user with keys."""
    for name in ("https_proxy", "HTTPS_PROXY", "ALL_PROXY", "all_proxy", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "access")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    return monkeypatch


def test_a_socks_proxy_is_named_without_its_password(proxied: pytest.MonkeyPatch):
    proxied.setenv("https_proxy", "socks5://user:password@127.0.0.1:9")
    with pytest.raises(StoreError, match="HTTPS_PROXY or ALL_PROXY names a SOCKS proxy") as caught:
        open_store("s3://bucket/x?region=us-east-1", retry_s=0.1).get_bytes("key", limit_bytes=1)

    assert "password" not in f"{caught.value.message} {caught.value.hint}"
    assert "HTTP proxy" in caught.value.hint


def test_a_proxy_that_does_not_connect_is_named(proxied: pytest.MonkeyPatch):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        proxied.setenv("https_proxy", f"http://127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(StoreError, match="the proxy does not connect to it") as caught:
            open_store("s3://bucket/x?region=us-east-1", retry_s=0.1).get_bytes(
                "key", limit_bytes=1
            )

    assert "HTTPS_PROXY" in caught.value.hint

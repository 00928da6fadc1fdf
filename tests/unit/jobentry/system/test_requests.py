"""Requests to a head through the socket in its folder."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from jobentry.system import requests


def _answer(node_dir: str, answer: bytes) -> threading.Thread:
    """Answer the next request in a thread."""
    server = requests.listen(node_dir)
    server.setblocking(True)

    def serve() -> None:
        with server:
            stream, _ = server.accept()
            with stream:
                while not stream.recv(4096).endswith(b"\n"):
                    pass
                stream.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    return thread


def test_a_folder_with_a_long_path_can_be_asked(tmp_path: Path) -> None:
    folder = tmp_path / ("long-" * 20) / ("path-" * 20)
    folder.mkdir(parents=True)
    thread = _answer(str(folder), b"x" * 200_000 + b"\n")

    assert requests.ask(str(folder), b"{}") == b"x" * 200_000
    thread.join()


def test_only_the_user_of_the_job_can_connect(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        requests.listen(str(tmp_path)).close()
        # A job that is restarted in place finds the socket of its first attempt.
        with requests.listen(str(tmp_path)):
            (path,) = tmp_path.iterdir()
            assert path.stat().st_mode & 0o777 == 0o600
        assert os.umask(0) == 0
    finally:
        os.umask(previous)


def test_no_answer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(requests.RequestError, match="No such file"):
        requests.ask(str(tmp_path / "missing"), b"{}")
    with pytest.raises(requests.RequestError, match="No such file"):
        requests.ask(str(tmp_path), b"{}")
    requests.listen(str(tmp_path)).close()
    with pytest.raises(requests.RequestError, match="refused"):
        requests.ask(str(tmp_path), b"{}")


@pytest.mark.parametrize("answer", [b"", b'{"at": 1'])
def test_a_head_that_ends_in_the_middle_is_an_error(tmp_path: Path, answer: bytes) -> None:
    thread = _answer(str(tmp_path), answer)

    with pytest.raises(requests.RequestError, match="its head ended"):
        requests.ask(str(tmp_path), b"{}")
    thread.join()


def test_an_endless_answer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "ANSWER_LIMIT_BYTES", 1000)
    thread = _answer(str(tmp_path), b"x" * 5000)

    with pytest.raises(requests.RequestError, match="longer than 1000 bytes"):
        requests.ask(str(tmp_path), b"{}")
    thread.join()

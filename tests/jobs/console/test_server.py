"""Tests of how the process of `cloudjob console` starts and exits."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from cloudjob.console.server import _is_about_present_browsers, _shortened
from cloudjob.errors import StoreError

LIMIT_S = 180.0


def start(folder: Path, *options: str, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
    """Start a console whose temporary folder is ``folder / "tmp"``."""
    (folder / "tmp").mkdir()
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "cloudjob", "console", "--no-open", *options],
        env={**os.environ, "CLOUDJOB_HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp")},
        stdin=stdin,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_restore_default_signals,
    )


def _restore_default_signals() -> None:
    """Restore the default handling of signals that the caller of the tests may ignore."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 143)]
)
def test_a_signal_ends_the_console_without_a_traceback_or_a_file(
    number: signal.Signals, code: int, tmp_path: Path
):
    process = start(tmp_path)
    assert process.stderr is not None
    lines = [process.stderr.readline() for _ in range(3)]
    link = re.search(r"http://\S+", "".join(lines))
    assert link
    # An HTTP error is a response, so the server is running.
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(link.group().partition("/login")[0], timeout=LIMIT_S)
    process.send_signal(number)
    rest = process.communicate(timeout=LIMIT_S)[1]

    assert (process.returncode, rest) == (code, "")
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_port_in_use_is_reported(tmp_path: Path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        output = start(tmp_path, "--port", str(port)).communicate(timeout=LIMIT_S)[1]

    assert output.startswith(f"error: starting the console: port {port}: Address already in use\n")


def test_a_page_that_does_not_exist_is_ours_and_its_address_is_not_logged(tmp_path: Path):
    process = start(tmp_path)
    assert process.stderr is not None
    link = re.search(r"http://\S+", "".join(process.stderr.readline() for _ in range(3)))
    assert link
    browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    browser.addheaders = [("Accept", "text/html"), ("Sec-Fetch-Site", "none")]
    browser.open(link.group(), timeout=LIMIT_S)
    with pytest.raises(urllib.error.HTTPError) as missing:
        browser.open(link.group().partition("/login")[0] + "/nothing/here", timeout=LIMIT_S)
    for address in (
        "/job/none-2345678b",
        "/job/none-2345678b/log",
        "/sweep/none-2345678b",
        "/compare?jobs=none-2345678b",
        "/api/jobs/none-2345678b/outputs.zip",
    ):
        with pytest.raises(urllib.error.HTTPError) as unknown:
            browser.open(link.group().partition("/login")[0] + address, timeout=LIMIT_S)
        with unknown.value as answer:
            assert (answer.code, b"none-2345678b" in answer.read()) == (404, True)
    process.send_signal(signal.SIGTERM)
    rest = process.communicate(timeout=LIMIT_S)[1]

    with missing.value as answer:
        page = answer.read().decode()
    assert (answer.code, rest) == (404, "")
    assert "There is no such page" in page
    assert "HTTPException" not in page


def test_enter_in_the_terminal_prints_a_link_for_another_browser(tmp_path: Path):
    terminal_fd, stdin_fd = os.openpty()
    process = start(tmp_path, stdin=stdin_fd)
    assert process.stderr is not None
    first = [process.stderr.readline() for _ in range(4)]
    os.write(terminal_fd, b"\n")
    _, link = (process.stderr.readline() for _ in range(2))
    page = urllib.request.urlopen(link.strip(), timeout=LIMIT_S)
    process.send_signal(signal.SIGTERM)
    rest = process.communicate(timeout=LIMIT_S)[1]
    os.close(terminal_fd)
    os.close(stdin_fd)

    assert first[3] == "for another browser: press Enter for a new link\n"
    assert (page.status, process.returncode, rest) == (200, 143, "")


def test_a_browser_in_the_terminal_has_the_keys_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    code = "from cloudjob.cli.commands import console; print(console._browses_in_terminal())"
    answers = []
    for browser in ("/bin/cat", "/missing/browser"):
        monkeypatch.setenv("BROWSER", browser)
        monkeypatch.setenv("PATH", str(tmp_path))
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
        answers.append(done.stdout)

    assert answers == [b"True\n", b"True\n"]
    monkeypatch.delenv("BROWSER")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == (
        b"False\n"
    )


def test_a_page_that_loads_when_the_console_ends_leaves_no_traceback():
    def is_logged(text: str, error: BaseException | None = None) -> bool:
        cause = (type(error), error, None) if error else None
        return _shortened(logging.LogRecord("uvicorn.error", 40, "", 0, text, (), cause))

    assert not is_logged("Cancel %s running task(s), timeout graceful shutdown exceeded")
    assert not is_logged("Exception in ASGI application", asyncio.CancelledError())
    assert is_logged("Exception in ASGI application", ValueError())


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (StoreError("listing the outputs: refused"), "listing the outputs: refused"),
        (RuntimeError("the response has begun"), "the cause"),
    ],
)
def test_a_failed_download_is_logged_without_a_traceback(error: Exception, expected: str):
    error.__cause__ = StoreError("the cause")
    record = logging.LogRecord("", logging.ERROR, "", 0, "", (), (type(error), error, None))

    assert _shortened(record)
    assert (record.getMessage(), record.exc_info) == (expected, None)


def test_a_browser_that_leaves_while_a_page_loads_leaves_no_traceback():
    def is_logged(error: Exception | str) -> bool:
        record = logging.LogRecord("nicegui", logging.ERROR, "", 0, error, (), None)
        return _is_about_present_browsers(record)

    assert not is_logged(RuntimeError("The client this element belongs to has been deleted."))
    assert not is_logged(RuntimeError("The parent slot of Column(id=4) has been deleted."))
    assert not is_logged("Client has been deleted but is still being used. This is most likely …")
    assert is_logged(RuntimeError("another error"))
    assert is_logged(ValueError("another error"))

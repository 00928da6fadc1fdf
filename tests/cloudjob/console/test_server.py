"""Tests of how the process of `cloudjob console` starts and exits."""

from __future__ import annotations

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

LIMIT_S = 120.0


def start(folder: Path, *options: str) -> subprocess.Popen[str]:
    """Start a console whose temporary folder is ``folder / "tmp"``."""
    (folder / "tmp").mkdir()
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "cloudjob", "console", "--no-open", *options],
        env={**os.environ, "CLOUDJOB_HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp")},
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
    shown = [process.stderr.readline() for _ in range(3)]
    link = re.search(r"http://\S+", "".join(shown))
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
        shown = start(tmp_path, "--port", str(port)).communicate(timeout=LIMIT_S)[1]

    assert shown.startswith(f"error: starting the console: port {port}: Address already in use\n")

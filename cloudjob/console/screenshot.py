"""Draws an HTML page with a browser that is installed on this machine."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

from cloudjob.errors import UsageError

# All browsers take the same options.
_BROWSERS = (
    *("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "microsoft-edge"),
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
)
_LIMIT_S = 120.0
# The page's time limit in milliseconds of its virtual clock, which skips idle time.
_DRAWING_MS = 10_000
_HINT = "without --png, the report is an HTML file that any browser shows"


def take(page: str, width_px: int, height_px: int) -> bytes:
    """Return a PNG of an HTML page.

    Raises:
        UsageError: There is no browser, or it draws nothing.
    """
    browser = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if browser is None:
        raise UsageError("drawing the report: found neither Chromium, Chrome nor Edge", hint=_HINT)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "page.html").write_bytes(page.encode("utf-8", "backslashreplace"))
        image = folder / "image.png"
        error = _run(
            (
                browser,
                "--headless",
                f"--user-data-dir={folder / 'profile'}",
                # Chromium refuses to sandbox itself as root; the page is ours and loads nothing.
                *(["--no-sandbox"] if os.geteuid() == 0 else []),
                "--disable-gpu",
                "--disable-background-networking",
                "--host-resolver-rules=MAP * ~NOTFOUND",
                "--hide-scrollbars",
                f"--window-size={width_px},{height_px}",
                f"--virtual-time-budget={_DRAWING_MS}",
                f"--screenshot={image}",
                (folder / "page.html").as_uri(),
            )
        )
        if image.exists() and image.stat().st_size:
            return image.read_bytes()
    raise UsageError(f"drawing the report: {browser}: {error}", hint=_HINT)


def _run(command: tuple[str, ...]) -> str:
    """Run a browser with all its processes; return the last line that it printed."""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        # It makes a socket there, whose path must be short.
        env={**os.environ, "TMPDIR": "/tmp"},
        start_new_session=True,
    ) as process:
        try:
            _, printed = process.communicate(timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            return f"it drew nothing in {_LIMIT_S:g} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    lines = printed.decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else f"it ended with exit code {process.returncode}"

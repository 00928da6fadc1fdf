"""Sends a notification to a webhook, whose URL must not appear in any message, or to a command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from http.client import HTTPException
from typing import Any
from urllib import error as urls
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from cloudjob.errors import CloudJobError
from cloudjob.model.text import hide
from cloudjob.notify.message import Notice, Targets, body, is_here
from cloudjob.retries import RequestLimits, retried
from cloudjob.store.parallel import call_with_timeout

# How long to try to reach a webhook.
LIMITS = RequestLimits(total_s=60.0, answer_s=10.0, pause_s=1.0, longest_pause_s=15.0)
# Status codes of a service that is overloaded or restarting.
_BUSY = (429, 500, 502, 503, 504)
# The variable that gives a command everything as one JSON object.
_VARIABLE = "CLOUDJOB_NOTIFICATION"
_COMMAND_S = 60.0
# Seconds between two checks of a command's output, and the number of bytes kept of it.
_LOOK_S, _MAX_BYTES = 0.1, 1_000_000
_MAX_STDERR_BYTES, _MAX_CHARACTERS = 64 * 1024, 300


class NotSent(CloudJobError):
    """A notification was not sent.

    Args:
        is_refused: Whether it certainly did not arrive, so that a retry is safe.
    """

    def __init__(self, message: str, *, is_refused: bool = False) -> None:
        super().__init__(message)
        self.is_refused = is_refused


def send(notice: Notice, targets: Targets, limits: RequestLimits = LIMITS) -> None:
    """Send a notification to every target.

    Raises:
        NotSent: With the error of each target that it did not reach.
    """
    sent = body(notice, targets.masked_texts)
    failures = []
    if targets.webhook:
        try:
            _call(targets.webhook, sent, limits)
        except NotSent as error:
            failures.append(f"webhook: {error.message}")
    if targets.command:
        try:
            _run(targets.command, sent, targets.masked_texts)
        except NotSent as error:
            failures.append(f"command {targets.command[0]}: {error.message}")
    if failures:
        reason = hide("; ".join(failures), targets.masked_texts)
        job = notice.values["job"]
        raise NotSent(f"sending the notification of the {notice.event} of {job}: {reason}")


def _run(command: Sequence[str], sent: Mapping[str, Any], masked_texts: Sequence[str]) -> None:
    """Run the user's command once, with the text on its standard input.

    Raises:
        NotSent: It failed, or took too long.
    """
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stderr:
        stdin.write(f"{sent['text']}\n".encode("utf-8", "backslashreplace"))
        stdin.seek(0)
        try:
            process = subprocess.Popen(
                command,
                stdin=stdin,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                env={**os.environ, _VARIABLE: json.dumps(sent)},
                start_new_session=True,
            )
        except OSError as error:
            raise NotSent(str(error.strerror)) from None
        code = _exit_code(process, stderr.fileno())
        end = stderr.seek(0, os.SEEK_END)
        stderr.seek(max(0, end - _MAX_STDERR_BYTES))
        last = hide(stderr.read().decode("utf-8", "replace").strip("\0\n "), masked_texts)
        last = last.split("\n")[-1][-_MAX_CHARACTERS:]
    if code:
        raise NotSent(f"exit code {code}" + (f": {last}" if last else ""))


def _exit_code(process: subprocess.Popen[bytes], stderr: int) -> int:
    """Wait for a command and return its exit code; its output must not fill the disk."""
    deadline = time.monotonic() + _COMMAND_S
    while time.monotonic() < deadline:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(_LOOK_S)
        if os.fstat(stderr).st_blocks * 512 > _MAX_BYTES:
            os.truncate(stderr, 0)  # the file becomes sparse: the command keeps its offset
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    raise NotSent(f"it ran for {_COMMAND_S:g} s and was ended")


# -- webhook --------------------------------------------------------------------------------------


class _NoRedirects(HTTPRedirectHandler):
    """Treats a redirect as a failure: it could lead to any host, even over plain HTTP."""

    def redirect_request(self, *_: object) -> None:
        return None


def _call(url: str, body: Mapping[str, Any], limits: RequestLimits) -> None:
    """Send an object; retry while the webhook cannot have received it.

    Raises:
        NotSent: The webhook refused it, or did not answer, so that it may have arrived.
    """
    data = json.dumps({**body, "text": for_slack(body["text"])}).encode("ascii")

    def pause_s(error: CloudJobError, _tries: int) -> float | None:
        return 0.0 if isinstance(error, NotSent) and error.is_refused else None

    retried(lambda: _post(url, data, limits.answer_s), pause_s, limits)


def for_slack(text: str) -> str:
    """Escape a text for Slack, so that the output of a rank cannot mention a whole channel."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _post(url: str, data: bytes, limit_s: float) -> None:
    handlers: list[Any] = [_NoRedirects]
    if is_here(urlsplit(url).hostname or ""):
        handlers.append(ProxyHandler({}))
    request = Request(url, data, {"Content-Type": "application/json", "User-Agent": "cloudjob"})

    def send() -> None:
        with build_opener(*handlers).open(request, timeout=limit_s):
            pass

    try:
        # A socket's timeout restarts with each byte.
        call_with_timeout(limit_s, send)
    except urls.HTTPError as error:
        error.close()
        more = "; redirects are not followed" if 300 <= error.code < 400 else ""
        message = f"it answered {error.code}{more}"
        raise NotSent(message, is_refused=error.code in _BUSY) from None
    except urls.URLError as error:
        reason = getattr(error.reason, "strerror", None) or str(error.reason)
        raise NotSent(reason, is_refused=True) from None
    except (OSError, HTTPException, ValueError) as error:
        # The text of the exception may contain the URL.
        raise NotSent(f"no answer ({type(error).__name__})") from None

"""Serves the console: NiceGUI pages and the endpoints of tables and files behind ``access``."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
import tempfile
import threading
import webbrowser
from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, PlainTextResponse
from nicegui import app as nicegui_app
from nicegui import ui

from cloudjob.console.access import Access
from cloudjob.console.pages import compare, emulator, job, job_list, sweep
from cloudjob.console.pages.frame import STATIC
from cloudjob.console.state import Console
from cloudjob.console.text import displayable
from cloudjob.errors import CloudJobError, JobNotFound

_HOST = "127.0.0.1"
_END_S = 2
# What NiceGUI raises or logs if a page is built whose browser has left.
_CLOSED = re.compile(r"(client this element belongs to|parent slot of .*|^Client) has been deleted")


def serve(
    home: Path,
    port: int,
    *,
    opens_browser: bool,
    on_ready: Callable[[str, Callable[[], str]], None],
) -> None:
    """Serve the console until SIGINT or SIGTERM.

    Args:
        port: The port on loopback; 0 for a free one.
        on_ready: Called with the one-time link that opens the console, and a function that returns
            a new one.

    Raises:
        OSError: The port is in use.
    """
    with _listener(port) as (descriptor, actual), tempfile.TemporaryDirectory() as folder:
        guarded = Access(_application(Console(home)), actual)
        config = uvicorn.Config(
            guarded,
            fd=descriptor,
            lifespan="on",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=_END_S,
        )
        logging.getLogger("uvicorn.error").addFilter(_shortened)
        logging.getLogger("nicegui").addFilter(_is_about_present_browsers)

        def new_link() -> str:
            return f"http://{_HOST}:{actual}{guarded.new_login_path()}"

        link = new_link()
        on_ready(link, new_link)
        if opens_browser:
            page = opening_page(link, Path(folder))
            # In a thread, because a terminal browser blocks and needs the running server.
            threading.Thread(target=webbrowser.open, args=(page.as_uri(),), daemon=True).start()
        uvicorn.Server(config).run()


def _is_about_present_browsers(record: logging.LogRecord) -> bool:
    """Drop NiceGUI's tracebacks about pages that were closed while they were built."""
    error = record.exc_info[1] if record.exc_info else record.msg
    return not (isinstance(error, (RuntimeError, str)) and _CLOSED.search(str(error)))


async def _problem(request: Request, error: Exception) -> Response:
    """Show a page of ours instead of NiceGUI's, which names Python's exception."""
    text, code = "There is no such page.", 404
    if isinstance(error, CloudJobError):
        text, code = displayable(error.message), 404 if isinstance(error, JobNotFound) else 502
    if "text/html" not in request.headers.get("accept", ""):
        return PlainTextResponse(f"{text}\n", code)
    page = (STATIC / "problem.html").read_text().replace("MESSAGE", escape(text))
    return HTMLResponse(page, code)


def _shortened(record: logging.LogRecord) -> bool:
    """Drop messages about browsers that disconnected, and tracebacks of failed downloads.

    Also those about pages that were loading when the console ended.
    """
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, asyncio.CancelledError) or "graceful shutdown" in str(record.msg):
        return False
    # The cause, of a response that had begun and could not become that of ``_problem``.
    for each in (error and error.__cause__, error):
        if isinstance(each, CloudJobError):
            record.msg, record.args, record.exc_info = "%s", (each.message,), None
    return "No response returned" not in str(error)


def _application(console: Console) -> FastAPI:
    application = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    nicegui_app.add_static_files("/static", STATIC, max_cache_age=0)
    for kind in (404, CloudJobError):
        nicegui_app.add_exception_handler(kind, _problem)
    for page in (job_list, job, compare, sweep, emulator):
        page.register(console)
    ui.run_with(
        application,
        title="cloudjob",
        dark=None,
        language="en-US",
        favicon=STATIC / "icon.svg",
        reconnect_timeout=30,
        show_welcome_message=False,
    )
    return application


@contextlib.contextmanager
def _listener(port: int) -> Iterator[tuple[int, int]]:
    """Listen on loopback; yield the descriptor and the port."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((_HOST, port))
        # The browser may connect before the server accepts.
        listener.listen()
        yield listener.fileno(), listener.getsockname()[1]


def opening_page(link: str, folder: Path) -> Path:
    """Return a file that opens the link, because other users can read a browser's arguments."""
    page = folder / "open.html"
    page.write_text(f'<meta http-equiv="refresh" content="0; url={escape(link)}">\n')
    return page

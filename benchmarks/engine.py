"""A small client of the container engine's socket, using only the standard library."""

from __future__ import annotations

import http.client
import json
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlencode

from benchmarks.venv import NotRun

_DEFAULT = "unix:///var/run/docker.sock"
_VERSION = "v1.41"
_LIMIT_S = 120.0
# Containers to create, start or remove at once, as in cloudjob's backend.
AT_ONCE = 8
_GONE = (304, 404, 409)


class EngineError(Exception):
    """The engine refused a request."""


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_LIMIT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Engine:
    """The container engine on this machine.

    Raises:
        NotRun: There is none, or this user may not access it.
    """

    def __init__(self) -> None:
        host = os.environ.get("DOCKER_HOST") or _DEFAULT
        if not host.startswith("unix://"):
            raise NotRun(f"the engine {host} is not on a socket of this machine")
        self._path = host.removeprefix("unix://")
        try:
            self.request("GET", "/version")
        except OSError as error:
            raise NotRun(
                f"no container engine at {host}: {error.strerror}; is it running, may we use it?"
            ) from error

    def request(self, method: str, path: str, body: object = None, **query: object) -> Any:
        """Return the engine's JSON response; None if it is empty.

        Raises:
            EngineError: The engine refused the request.
        """
        connection = _Connection(self._path)
        try:
            query_string = "?" + urlencode(
                {name: _query_value(value) for name, value in query.items()}
            )
            data = None if body is None else json.dumps(body)
            headers = {"Content-Type": "application/json"}
            connection.request(method, f"/{_VERSION}{path}{query_string}", data, headers)
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        if answer.status >= 400:
            raise EngineError(f"{method} {path}: {answer.status} {text.decode(errors='replace')}")
        return json.loads(text) if text else None

    def remove(self, label: str) -> None:
        """Remove every container and network with this label."""
        filters = {"label": [label]}
        containers = self.request("GET", "/containers/json", all=True, filters=filters)
        with ThreadPoolExecutor(AT_ONCE) as threads:
            list(threads.map(self._remove, containers))
        for item in self.request("GET", "/networks", filters=filters):
            self._gone("DELETE", f"/networks/{item['Id']}")

    def _remove(self, container: dict[str, Any]) -> None:
        self._gone("DELETE", f"/containers/{container['Id']}", force=True, v=True)

    def _gone(self, method: str, path: str, **query: object) -> None:
        try:
            self.request(method, path, **query)
        except EngineError as error:
            if not any(f": {code} " in str(error) for code in _GONE):
                raise


def _query_value(value: object) -> str:
    if isinstance(value, bool):
        return "1" if value else "0"
    return value if isinstance(value, str) else json.dumps(value)

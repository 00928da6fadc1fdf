"""A container engine in memory, for tests of what the docker backend does in unusual orders."""

from __future__ import annotations

import contextlib
import io
import tarfile
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import docker.errors
import requests

from cloudjob.backends.docker.request import (
    GRACE_LABEL,
    JOB_LABEL,
    NAME_LABEL,
    NODE_LABEL,
    NODES_LABEL,
    network_name,
)

NEVER = "0001-01-01T00:00:00Z"


def ago(seconds: float) -> str:
    """Return a time in the past, as an engine writes it."""
    return (datetime.now(timezone.utc) - timedelta(seconds=seconds)).isoformat()


def _refusal(code: int, message: str) -> docker.errors.APIError:
    response = requests.Response()
    response.status_code = code
    return docker.errors.APIError(message, response)


class FakeEngine:
    """The containers and the network of one job.

    Attributes:
        before: Called once before the first request of this name, such as ``inspect``: it makes
            something happen between two requests of the backend.
        signals: The signals that were sent: the number of a node, and a name.
        names: The names of containers, by node, that somebody has renamed.
        others: Containers that somebody else has made, as the engine lists them.
        files: The files that were put into containers: the number of a node, and a path.
    """

    base_url = "http+docker://localhost"
    api_version = "1.41"

    def __init__(self, job: str, nodes: int, grace_s: float = 10.0) -> None:
        self.has_network = True
        self.before: dict[str, Callable[[], object]] = {}
        self.names: dict[int, str] = {}
        self.others: list[dict[str, Any]] = []
        self.signals: list[tuple[int, str]] = []
        self.files: dict[tuple[int, str], bytes] = {}
        labels = {JOB_LABEL: job, NODES_LABEL: str(nodes), GRACE_LABEL: str(grace_s)}
        self._labels = labels
        self._states: dict[int, dict[str, Any]] = {}
        for node in range(nodes):
            self.run(node)

    def run(self, node: int) -> None:
        """Start a node."""
        self._set(node, "running", 0, NEVER)

    def create(self, node: int) -> None:
        """Create a node without starting it."""
        self._set(node, "created", 0, NEVER)

    def end(self, node: int, code: int, seconds_ago: float = 1.0) -> None:
        """Let a node end."""
        self._set(node, "exited", code, ago(seconds_ago))

    def remove(self, node: int) -> None:
        """Remove the container of a node."""
        del self._states[node]

    def pause(self, node: int) -> None:
        """Pause a node."""
        self._set(node, "paused", 0, NEVER)

    def _set(self, node: int, status: str, code: int, finished_at: str) -> None:
        self._states[node] = {
            "Status": status,
            "Running": status == "running",
            "ExitCode": code,
            "StartedAt": ago(1000),
            "FinishedAt": finished_at,
        }

    def _state(self, name: str) -> tuple[int, dict[str, Any]]:
        node = int(name.removeprefix("id-"))
        if node not in self._states:
            raise _refusal(404, "no such container")
        return node, self._states[node]

    def _begin(self, request: str) -> None:
        if action := self.before.pop(request, None):
            action()

    # -- what the backend calls -------------------------------------------------------------------

    def containers(self, **_: Any) -> list[dict[str, Any]]:
        """Return the list of containers."""
        self._begin("containers")
        return [
            {
                "Id": f"id-{node}",
                "Names": [f"/{self.names.get(node, f'worker-{node}')}"],
                "HostConfig": {"NetworkMode": network_name(self._labels[JOB_LABEL])},
                "State": state["Status"],
                "Labels": {**self._labels, NODE_LABEL: str(node), NAME_LABEL: f"worker-{node}"},
            }
            for node, state in self._states.items()
        ] + self.others

    def networks(self, **_: Any) -> list[dict[str, Any]]:
        """Return the list of networks."""
        self._begin("networks")
        return [{"Id": "network"}] if self.has_network else []

    def inspect_container(self, name: str) -> dict[str, Any]:
        """Return what is known about a container."""
        self._begin("inspect")
        state = dict(self._state(name)[1])
        return {"State": state, "HostConfig": {"LogConfig": {"Type": "local"}}}

    def kill(self, name: str, signal: str) -> None:
        """Send a signal; only SIGKILL ends a node."""
        self._begin("kill")
        node, state = self._state(name)
        if not state["Running"]:
            raise _refusal(409, "is not running")
        self.signals.append((node, signal))
        if signal == "SIGKILL":
            self.end(node, 137, 0.0)

    def put_archive(self, name: str, folder: str, archive: bytes) -> None:
        """Put files into a container."""
        node, _ = self._state(name)
        with tarfile.open(fileobj=io.BytesIO(archive)) as members:
            for member in members.getmembers():
                file = members.extractfile(member)
                assert file is not None
                self.files[node, f"{folder}/{member.name}"] = file.read()

    def remove_container(self, name: str, **_: Any) -> None:
        """Remove a container."""
        del self._states[self._state(name)[0]]

    def remove_network(self, _name: str) -> None:
        """Remove the network."""
        self.has_network = False

    def get(self, url: str, **_: Any) -> contextlib.nullcontext[Any]:
        """Return the response to a request for a log, which is empty."""
        self._state(url.split("/")[-2])
        response = contextlib.nullcontext(self)
        response.raw = self  # type: ignore[attr-defined]
        return response

    def stream(self, _size: int, **_: Any) -> Iterator[bytes]:
        """Yield the body of that response."""
        yield from ()

    def _raise_for_status(self, _response: object) -> None:
        """Accept that response."""

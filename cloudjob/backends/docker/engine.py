"""The connection to the engine, and the translation of its errors."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import Any, TypeVar

from cloudjob.errors import BackendError, Unreachable

DEFAULT_HOST = "unix:///var/run/docker.sock"
NOT_FOUND = 404
# HTTP statuses for an object that is gone, or is being removed, or already in the wanted state.
GONE = (NOT_FOUND, 409)
_LIMIT_S = 120
# Requests sent at once: more would only queue in the engine.
_AT_ONCE = 8
_START = "`sudo systemctl start docker`" if sys.platform == "linux" else "start Docker Desktop"


class EngineRefusal(Enum):
    """Refusals that only the words of the engine tell from others."""

    RANGE_IS_TAKEN = ("overlaps",)
    NO_SUCH_PROGRAM = ("no such file", "not found")


_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def connect() -> Any:
    """Return a client of the engine that ``DOCKER_HOST`` or the context of ``docker`` names.

    Raises:
        BackendError: There is no engine, or this user may not use it.
    """
    engine = host()
    with translate_errors(f"connecting to the engine at {engine}"):
        import docker

        scheme, _, path = docker.utils.parse_host(engine).partition("://")
        if scheme == "http+unix":
            # Where nobody listens, the SDK would leave its socket open.
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(_LIMIT_S)
                probe.connect(f"/{path.lstrip('/')}")
        settings = {"base_url": engine, **docker.utils.kwargs_from_env()}
        return docker.APIClient(**settings, version="auto", timeout=_LIMIT_S, max_pool_size=64)


def host() -> str:
    """Return where the engine listens; desktop engines name a socket of the user in a context."""
    from_environment = os.environ.get("DOCKER_HOST")
    if from_environment:
        return from_environment
    try:
        from docker.context import ContextAPI

        address = str(ContextAPI.get_current_context().Host)
    except Exception:  # noqa: BLE001 (not installed, or a damaged file of another program)
        address = ""
    return address if address.startswith("unix://") else DEFAULT_HOST


def image(client: Any, reference: str) -> dict[str, Any]:
    """Return what the engine knows about an image.

    Raises:
        BackendError: The engine does not have the image.
    """
    try:
        with translate_errors(f"looking for the image {reference}"):
            return dict(client.inspect_image(reference))
    except BackendError as error:
        if status_code(error) != NOT_FOUND:
            raise
        name = reference.removeprefix("cloudjob/").partition(":")[0]
        is_ours = reference.startswith("cloudjob/")
        raise BackendError(
            f"looking for the image {reference}: the engine does not have it",
            hint=f"cloudjob image build {name}" if is_ours else f"docker pull {reference}",
        ) from error


def status_code(error: BaseException | None) -> int:
    """Return the HTTP status of the engine's error; 0 if the error has none."""
    cause = error.__cause__ if isinstance(error, BackendError) else error
    response = getattr(cause, "response", None)
    return int(getattr(response, "status_code", 0) or 0)


def is_refusal(error: BackendError, refusal: EngineRefusal) -> bool:
    """Whether the engine has refused a request for this reason."""
    return any(words in error.message for words in refusal.value)


def for_each(items: Iterable[_Item], action: Callable[[_Item], _Result]) -> list[_Result]:
    """Call a function for each item, several at once; raise the first failure at the end."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return [future.result() for future in [pool.submit(action, item) for item in items]]


def for_each_existing(items: Iterable[_Item], action: Callable[[_Item], object]) -> None:
    """Call a function for each item; an item that has already ended or is gone is not an error."""

    def act(item: _Item) -> None:
        try:
            with translate_errors("ending a job"):
                action(item)
        except BackendError as error:
            if status_code(error) not in GONE:
                raise

    for_each(items, act)


@contextlib.contextmanager
def translate_errors(doing: str) -> Iterator[None]:
    """Turn errors of the SDK, its HTTP client and the system into ``BackendError``."""
    try:
        import docker.errors
        import requests.exceptions
        import urllib3.exceptions
    except ImportError as error:
        raise BackendError(
            f"{doing}: the Docker SDK is not installed", hint="pip install 'cloudjob[docker]'"
        ) from error
    try:
        yield
    except docker.errors.APIError as error:
        message = str(error.explanation or error).strip()
        raise BackendError(f"{doing}: {message}", hint=_hint(message)) from error
    except (
        docker.errors.DockerException,
        docker.errors.StreamParseError,
        requests.exceptions.RequestException,
        urllib3.exceptions.HTTPError,
        OSError,
    ) as error:
        message, hint, kind = _reason(error)
        raise kind(f"{doing}: {message}", hint=hint) from error


# The engine's message -> what to try.
_HINTS = (
    (
        "bind source path does not exist",
        "the engine must run on this machine when the store is a folder (file://)",
    ),
    ("could not select device driver", "this engine has no GPUs: docker.gpus must be 0"),
    (
        "unknown device",
        "nodes do not share GPUs: this machine needs docker.gpus GPUs for each node",
    ),
    ("no space left", "`docker system df` shows what uses the space"),
    ("non-overlapping IPv4", "too many networks: `cloudjob rm --orphans`, `docker network prune`"),
    ("all predefined address pools", "`cloudjob rm --orphans`, or `docker network prune`"),
    ("Minimum memory limit", "set docker.memory_gib to a larger number"),
    ("Range of CPUs", "set docker.cpus to a number that this machine has"),
)


def _hint(message: str) -> str:
    return next((hint for part, hint in _HINTS if part in message), "")


def _reason(error: BaseException) -> tuple[str, str, type[BackendError]]:
    """Return message, hint and class for the innermost error of a chain."""
    cause: BaseException | None = error
    seen = []
    while cause is not None and cause not in seen:
        seen.append(cause)
        if isinstance(cause, PermissionError):
            return (
                "permission denied",
                "allow this user to use the engine: `sudo usermod -aG docker $USER`; log in again",
                BackendError,
            )
        if isinstance(cause, (FileNotFoundError, ConnectionRefusedError)):
            return (
                "there is no engine",
                f"is it running? {_START}, or set DOCKER_HOST to another engine",
                Unreachable,
            )
        cause = _inner(cause)
    message = str(error).strip() or type(error).__name__
    return (
        message,
        "`docker info` shows the state of the engine, which DOCKER_HOST selects",
        Unreachable,
    )


def _inner(error: BaseException) -> BaseException | None:
    # requests and urllib3 keep the reason among the arguments, not in the chain.
    for item in (error.__cause__, error.__context__, *error.args, getattr(error, "reason", None)):
        if isinstance(item, BaseException) and item is not error:
            return item
    return None

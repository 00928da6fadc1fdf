"""Requests to the API server, with kubectl's login and retries."""

from __future__ import annotations

import contextlib
import json
import ssl
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlencode

from cloudjob.backends.kubernetes import errors, kubeconfig
from cloudjob.backends.kubernetes.engine import Resource
from cloudjob.backends.kubernetes.errors import ApiError
from cloudjob.backends.kubernetes.kubeconfig import Cluster
from cloudjob.errors import BackendError, CloudJobError, Unreachable
from cloudjob.retries import LIMITS, RequestLimits, retried

Query = Mapping[str, str]
POD = Resource("", "v1", "pods", "Pod")
EVENT = Resource("", "v1", "events", "Event")

_JSON, _MERGE = "application/json", "application/merge-patch+json"
_CONNECT_S = 10.0
# A stream that is silent for this long is reopened: its connection may be dead.
_SILENCE_S = 300.0


class ConnectionBroken(Unreachable):
    """A connection broke, or was never established."""


class Client:
    """The API server of one cluster; any number of threads may use it."""

    def __init__(self, cluster: Cluster, *, limits: RequestLimits = LIMITS) -> None:
        self._cluster = cluster
        self._limits = limits
        self._opened: kubeconfig.Login | None = None

    @property
    def cluster(self) -> Cluster:
        """The cluster."""
        return self._cluster

    # -- objects ------------------------------------------------------------------------------

    def get(self, path: str, doing: str, query: Query | None = None) -> dict[str, Any]:
        """Return the object at a path."""
        return self._json("GET", path, doing, query=query)

    def create(
        self, resource: Resource, namespace: str, body: Mapping[str, Any], label: str
    ) -> dict[str, Any]:
        """Create an object and return it.

        If an answer gets lost, the object may exist already: an object of the same name with the
        same value of this label is ours.
        """
        name = body["metadata"].get("name", "")
        doing = f"creating the {resource.kind} {name or 'of a job'}"
        try:
            return self.post(resource.path(namespace), body, doing)
        except ApiError as error:
            if error.status != errors.CONFLICT or not name:
                raise
            existing = self.get(resource.path(namespace, name), doing)
            expected = body["metadata"].get("labels", {}).get(label)
            if existing["metadata"].get("labels", {}).get(label) != expected:
                raise
            return existing

    def post(
        self, path: str, body: Mapping[str, Any], doing: str, query: Query | None = None
    ) -> dict[str, Any]:
        """Post an object and return the answer; the server does not store every kind of object."""
        return self._json("POST", path, doing, query=query, body=body)

    def patch(self, path: str, body: Mapping[str, Any], doing: str) -> dict[str, Any]:
        """Merge ``body`` into an object and return the result."""
        return self._json("PATCH", path, doing, body=body)

    def delete(self, path: str, doing: str, query: Query | None = None, **options: Any) -> bool:
        """Delete an object, or all that a selector matches; return whether there was one."""
        body = {"kind": "DeleteOptions", "apiVersion": "v1", **options}
        try:
            self._json("DELETE", path, doing, query=query, body=body)
        except errors.ObjectNotFound:
            return False
        return True

    def list(self, path: str, doing: str, query: Query | None = None) -> dict[str, Any]:
        """Return a list with all its pages."""
        items: list[Any] = []
        more = ""
        while True:
            page = {**(query or {}), "limit": "500", **({"continue": more} if more else {})}
            try:
                page_items = self.get(path, doing, page)
            except ApiError as error:
                if error.status != errors.GONE or not more:
                    raise
                # The server no longer has the rest of the list: start from its beginning.
                more, items = "", []
                continue
            items += page_items.get("items") or []
            more = str((page_items.get("metadata") or {}).get("continue") or "")
            if not more:
                return {**page_items, "items": items}

    # -- streams ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def stream(self, path: str, query: Query, doing: str) -> Iterator[Iterator[bytes]]:
        """Open a stream and yield its pieces as they arrive.

        Raises:
            ApiError: The server refused the request.
            ConnectionBroken: The connection broke.
        """
        answer = self._send("GET", path, doing, query=query, is_stream=True)
        try:
            if answer.status == errors.UNAUTHORISED:
                # Discard the login, so that the next request logs in again.
                self._opened = None
            if answer.status >= 400:
                raise errors.api_error(doing, answer.status, answer.data)
            yield _pieces(answer, doing)
        finally:
            answer.close()
            answer.release_conn()

    # -- one request --------------------------------------------------------------------------

    def _json(self, method: str, path: str, doing: str, **options: Any) -> dict[str, Any]:
        """Send a request until the server answers it, and return the answer."""

        def send() -> dict[str, Any]:
            answer = self._send(method, path, doing, **options)
            if answer.status == errors.UNAUTHORISED:
                # An expired token: the files or the plugin may have a new one.
                self._opened = None
                answer = self._send(method, path, doing, **options)
            if answer.status < 400:
                return _loaded(answer.data, doing)
            error = errors.api_error(doing, answer.status, answer.data, is_made=method == "POST")
            error.retry_after_s = _seconds(answer.headers.get("Retry-After"))
            raise error

        def pause_s(error: CloudJobError, _tries: int) -> float | None:
            if isinstance(error, ApiError):
                is_conflict = error.status == errors.CONFLICT and method == "PATCH"
                may_pass = error.status in errors.TRANSIENT_STATUSES or is_conflict
                return error.retry_after_s if may_pass else None
            return 0.0 if isinstance(error, ConnectionBroken) else None

        return retried(send, pause_s, self._limits)

    def _send(
        self,
        method: str,
        path: str,
        doing: str,
        *,
        query: Query | None = None,
        body: Mapping[str, Any] | None = None,
        is_stream: bool = False,
    ) -> Any:
        """Send a request once, and return the answer of urllib3, whatever its status."""
        import urllib3

        if self._opened is None:
            self._opened = kubeconfig.open_login(self._cluster)
        login = self._opened
        headers = urllib3.HTTPHeaderDict(login.headers(doing))
        headers["Accept"] = "application/json, */*"
        headers["Content-Type"] = _MERGE if method == "PATCH" else _JSON
        read_s = _SILENCE_S if is_stream else self._limits.answer_s
        with _translate_errors(doing, login.host):
            return login.pool.request(
                method,
                login.host + path + (f"?{urlencode(query)}" if query else ""),
                body=None if body is None else json.dumps(body).encode("utf-8"),
                headers=headers,
                timeout=urllib3.Timeout(connect=_CONNECT_S, read=read_s),
                retries=False,
                redirect=False,
                preload_content=not is_stream,
            )


def _pieces(answer: Any, doing: str) -> Iterator[bytes]:
    with _translate_errors(doing, ""):
        yield from answer.stream(1 << 16, decode_content=True)


def _loaded(data: bytes, doing: str) -> dict[str, Any]:
    try:
        return dict(json.loads(data))
    except ValueError as error:
        raise BackendError(
            f"{doing}: the answer is not JSON", hint="is this the address of an API server?"
        ) from error


def _seconds(text: str | None) -> float:
    """Return the pause that the server asks for, which is never a date."""
    return float(text) if text and text.isascii() and text.isdecimal() else 0.0


@contextlib.contextmanager
def _translate_errors(doing: str, host: str) -> Iterator[None]:
    """Turn errors of the HTTP client and the system into ``ConnectionBroken``."""
    import urllib3.exceptions

    try:
        yield
    except (urllib3.exceptions.HTTPError, OSError) as error:
        reason, hint = _why(error)
        raise ConnectionBroken(
            f"{doing}: {reason}{f' at {host}' if host else ''}", hint=hint
        ) from error


def _why(error: BaseException) -> tuple[str, str]:
    """Return message and hint for an error of the HTTP client, by the error that caused it."""
    cause: BaseException = error
    while inner := _inner(cause):
        cause = inner
    if isinstance(cause, ssl.SSLError):
        return "the kubeconfig does not trust the server's certificate", (
            "does certificate-authority-data of this context belong to the cluster?"
        )
    if isinstance(cause, ConnectionRefusedError):
        return "there is no API server", "is this the right context?"
    if isinstance(cause, TimeoutError):
        return (
            "no answer in time",
            "is this the right context, and can this machine reach its server?",
        )
    reason = cause.strerror if isinstance(cause, OSError) else ""
    message = reason or " ".join(str(error).split()) or type(error).__name__
    return message, "does `kubectl get pods` work?"


def _inner(error: BaseException) -> BaseException | None:
    """Return the error that urllib3 has wrapped."""
    wrapped = (getattr(error, "reason", None), error.__cause__, *error.args)
    return next((item for item in wrapped if isinstance(item, BaseException)), None)

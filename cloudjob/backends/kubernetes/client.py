"""Requests to the API server: with kubectl's login, and retried where that may help."""

from __future__ import annotations

import contextlib
import json
import os
import ssl
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlencode

from cloudjob.backends.kubernetes import errors, kubeconfig
from cloudjob.backends.kubernetes.engine import Resource
from cloudjob.backends.kubernetes.errors import Refused
from cloudjob.backends.kubernetes.kubeconfig import Cluster
from cloudjob.errors import BackendError, CloudJobError, Unreachable
from cloudjob.retries import LIMITS, Limits, retried

Query = Mapping[str, str]
POD = Resource("", "v1", "pods", "Pod")
EVENT = Resource("", "v1", "events", "Event")

_JSON, _MERGE = "application/json", "application/merge-patch+json"
_CONNECT_S = 10.0
# A stream that is silent for this long is reopened: its connection may be dead.
_SILENCE_S = 300.0


class Broken(Unreachable):
    """A connection broke, or was never established."""


class _Ask(NamedTuple):
    """One request.

    Args:
        doing: What it is for, as an error begins.
        kind: The type of the body.
        read_s: How long no byte may come.
    """

    method: str
    path: str
    doing: str
    query: Query | None = None
    body: Mapping[str, Any] | None = None
    kind: str = _JSON
    read_s: float = 0.0


class Client:
    """The API server of one cluster; any number of threads may use it."""

    def __init__(self, cluster: Cluster, *, limits: Limits = LIMITS) -> None:
        self._cluster = cluster
        self._limits = limits
        self._opened: kubeconfig.Login | None = None

    @property
    def cluster(self) -> Cluster:
        """The cluster."""
        return self._cluster

    # -- objects ------------------------------------------------------------------------------

    def get(self, path: str, doing: str, query: Query | None = None) -> dict[str, Any]:
        """Return what lies at a path."""
        return self._json(_Ask("GET", path, doing, query))

    def create(
        self, resource: Resource, namespace: str, body: Mapping[str, Any], label: str
    ) -> dict[str, Any]:
        """Create an object and return it.

        An answer may get lost, and then the object is there: one of the same name with the same
        value of this label is ours.
        """
        name = body["metadata"].get("name", "")
        doing = f"creating the {resource.kind} {name or 'of a job'}"
        try:
            return self._json(_Ask("POST", resource.path(namespace), doing, body=body))
        except Refused as error:
            if error.status != errors.CONFLICT or not name:
                raise
            found = self.get(resource.path(namespace, name), doing)
            wanted = body["metadata"].get("labels", {}).get(label)
            if found["metadata"].get("labels", {}).get(label) != wanted:
                raise
            return found

    def ask(
        self, path: str, body: Mapping[str, Any], doing: str, query: Query | None = None
    ) -> dict[str, Any]:
        """Post an object that the server only answers and does not store; return the answer."""
        return self._json(_Ask("POST", path, doing, query, body))

    def patch(self, path: str, body: Mapping[str, Any], doing: str) -> dict[str, Any]:
        """Merge ``body`` into an object and return that."""
        return self._json(_Ask("PATCH", path, doing, body=body, kind=_MERGE))

    def delete(self, path: str, doing: str, query: Query | None = None, **options: Any) -> bool:
        """Delete an object, or all that a selector matches; return whether there was one."""
        body = {"kind": "DeleteOptions", "apiVersion": "v1", **options}
        try:
            self._json(_Ask("DELETE", path, doing, query, body))
        except errors.Missing:
            return False
        return True

    def list(self, path: str, doing: str, query: Query | None = None) -> dict[str, Any]:
        """Return a list with all its pages."""
        whole: dict[str, Any] = {}
        items: list[Any] = []
        more = ""
        while True:
            page = {**(query or {}), "limit": "500", **({"continue": more} if more else {})}
            try:
                whole = self.get(path, doing, page)
            except Refused as error:
                # The rest of the list is older than what the server keeps: once more from its
                # beginning.
                if error.status != errors.GONE or not more:
                    raise
                more, items = "", []
                continue
            items += whole.get("items") or []
            more = str((whole.get("metadata") or {}).get("continue") or "")
            if not more:
                return {**whole, "items": items}

    # -- streams ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def stream(self, path: str, query: Query, doing: str) -> Iterator[Iterator[bytes]]:
        """Open a stream and yield its pieces as they arrive.

        Raises:
            Refused: The server refused the request.
            Broken: The connection broke.
        """
        answer = self._asked(_Ask("GET", path, doing, query, read_s=_SILENCE_S))
        try:
            if answer.status == errors.UNAUTHORISED:
                # As for every request, the next one logs in again.
                self._opened = None
            if answer.status >= 400:
                raise errors.refused(doing, answer.status, answer.data)
            yield _pieces(answer, doing)
        finally:
            answer.close()
            answer.release_conn()

    # -- one request --------------------------------------------------------------------------

    def _json(self, ask: _Ask) -> dict[str, Any]:
        """Send a request until the server answers it, and return the answer."""

        def pause_s(error: CloudJobError, _tries: int) -> float | None:
            if isinstance(error, Refused):
                return error.retry_after_s if _may_pass(ask, error.status) else None
            return 0.0 if isinstance(error, Broken) else None

        return retried(lambda: self._json_once(ask), pause_s, self._limits)

    def _json_once(self, ask: _Ask) -> dict[str, Any]:
        answer = self._asked(ask)
        data = _read(answer, ask.doing)
        if answer.status == errors.UNAUTHORISED:
            # An expired token: the files or the plugin may have a new one.
            self._opened = None
            answer = self._asked(ask)
            data = _read(answer, ask.doing)
        if answer.status < 400:
            return _loaded(data, ask.doing)
        error = errors.refused(ask.doing, answer.status, data, is_made=ask.method == "POST")
        error.retry_after_s = _seconds(answer.headers.get("Retry-After"))
        raise error

    def _asked(self, ask: _Ask) -> Any:
        import urllib3

        if self._opened is None:
            self._opened = kubeconfig.opened(self._cluster)
        way = self._opened
        query = f"?{urlencode(ask.query)}" if ask.query else ""
        headers = urllib3.HTTPHeaderDict(way.headers(ask.doing))
        headers["Accept"] = "application/json, */*"
        headers["Content-Type"] = ask.kind
        with _translated(ask.doing, way.host):
            return way.pool.request(
                ask.method,
                way.host + ask.path + query,
                body=None if ask.body is None else json.dumps(ask.body).encode("utf-8"),
                headers=headers,
                timeout=urllib3.Timeout(
                    connect=_CONNECT_S, read=ask.read_s or self._limits.answer_s
                ),
                retries=False,
                redirect=False,
                preload_content=False,
            )


def _may_pass(ask: _Ask, status: int) -> bool:
    """Whether a refusal may be another one next time."""
    is_conflict = status == errors.CONFLICT and ask.method == "PATCH"
    return status in errors.MAY_PASS or is_conflict


def _read(answer: Any, doing: str) -> bytes:
    with _translated(doing, ""):
        try:
            data: bytes = answer.read()
        finally:
            answer.release_conn()
    return data


def _pieces(answer: Any, doing: str) -> Iterator[bytes]:
    with _translated(doing, ""):
        yield from answer.stream(1 << 16, decode_content=True)


def _loaded(data: bytes, doing: str) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError as error:
        raise BackendError(
            f"{doing}: the answer is not JSON", hint="is this the address of an API server?"
        ) from error
    return dict(found)


def _seconds(text: str | None) -> float:
    """Return the pause that the server asks for, which is never a date."""
    return float(text) if text and text.isascii() and text.isdecimal() else 0.0


@contextlib.contextmanager
def _translated(doing: str, host: str) -> Iterator[None]:
    """Turn errors of the HTTP client and the system into ``Broken``."""
    import urllib3.exceptions

    try:
        yield
    except (urllib3.exceptions.HTTPError, OSError) as error:
        said, hint = _why(error, host)
        raise Broken(f"{doing}: {said}", hint=hint) from error


def _why(error: BaseException, host: str) -> tuple[str, str]:
    """Return message and hint from the innermost error that has a known cause."""
    from urllib3.exceptions import ConnectTimeoutError, NewConnectionError, ReadTimeoutError

    at = f" at {host}" if host else ""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, ssl.SSLError):
            return f"the server's certificate is not the one that the kubeconfig trusts{at}", (
                "is certificate-authority-data of this context that of the cluster?"
            )
        if isinstance(found, ConnectionRefusedError):
            return f"there is no API server{at}", "is this the right context?"
        is_late = isinstance(found, (ConnectTimeoutError, ReadTimeoutError))
        # urllib3 reports a refused connection as a connect timeout, too.
        if is_late and not isinstance(found, NewConnectionError):
            return (
                f"no answer in time{at}",
                "is this the right context, and does the network reach it?",
            )
        if isinstance(found, OSError) and found.errno:
            return f"{os.strerror(found.errno)}{at}", "does `kubectl get pods` work?"
        reason = getattr(found, "reason", None)
        found = reason if isinstance(reason, BaseException) else found.__cause__
    said = " ".join(str(error).split()) or type(error).__name__
    return f"{said}{at}", "does `kubectl get pods` work?"

"""Logs of pods: read once, or followed with one watch and one stream per pod, and saved on the way.

A log is deleted with its pod. So a log that was read to its end is saved to a file on this machine,
and read from there once the pod is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cloudjob.backends.follow import END_BYTES, END_LINES, Piece, Streams, whole_lines
from cloudjob.backends.kubernetes import errors
from cloudjob.backends.kubernetes.client import POD, Client, ConnectionBroken
from cloudjob.backends.kubernetes.errors import ApiError
from cloudjob.backends.kubernetes.state import Pod, pod_of
from cloudjob.errors import BackendError, NotAuthorised, Unreachable
from cloudjob.home import writing
from cloudjob.model import times
from cloudjob.retries import WaitNotices

# Seconds between two checks of a job without open streams, and of one with silent pods.
_END_CHECK_S = 1.0
_END_CHECK_SILENT_S = 10.0
# Seconds that a follower waits after the job's end for an unreadable or silent log.
_LAST_S = 15.0
# The same for a log whose connection broke: the next request may have to time out first.
_LAST_BROKEN_S = 60.0
# The same for a pod that still runs after the job's end, within its grace period.
_LAST_RUNNING_S = 60.0
# Seconds before a stream, or the watch, is reopened.
_REOPEN_S = 0.5
# Errors that may pass: a server that starts again may know neither users nor roles for a while.
PASSING = (Unreachable, NotAuthorised)
# A log is refused with this status while its container starts.
_STARTING = 400
# Seconds after which the server ends a watch, which then resumes from the last version.
_WATCH_S = 300
# Seconds of lines that are remembered as read: a reopened stream starts at a whole second, and
# lines of stdout and stderr may be in a different order than their times.
_WINDOW_S = 3.0


@dataclass(slots=True)
class Place:
    """Which pods to read, and where their logs are saved.

    Args:
        node_of: Returns the number of a node, from its pod.
        labels: The selector of the pods.
        node: The requested node; None for all.
        folder: The folder of the saved logs.
    """

    namespace: str
    job: str
    node_of: Callable[[Mapping[str, Any]], int | None]
    node: int | None
    folder: Path
    labels: str
    container: str

    @property
    def pods(self) -> str:
        """The path of the namespace's pods."""
        return POD.path(self.namespace)

    @property
    def selector(self) -> dict[str, str]:
        """The label selector of the job's pods."""
        return {"labelSelector": self.labels}

    def log(self, pod: str) -> str:
        """The path of a pod's log."""
        return f"{POD.path(self.namespace, pod)}/log"

    def pod(self, manifest: Mapping[str, Any]) -> Pod:
        """Return a pod of the API's list."""
        return pod_of(manifest, self.node_of, self.container)

    def is_requested(self, pod: Pod) -> bool:
        """Whether the log of this pod is requested."""
        return pod.node is not None and self.node in (None, pod.node)


def pods(client: Client, place: Place) -> tuple[list[Pod], str]:
    """Return the pods of a job by node, and the resource version of this list."""
    listed = client.list(place.pods, f"looking for the pods of job {place.job}", place.selector)
    items = [place.pod(item) for item in listed["items"]]
    items.sort(key=lambda pod: (pod.node if pod.node is not None else -1, pod.created_at))
    return items, str(listed["metadata"].get("resourceVersion") or "")


def read_all(client: Client, place: Place) -> Iterator[Piece]:
    """Yield all lines that exist now, node by node.

    Raises:
        BackendError: A log cannot be read; all others have been yielded.
    """
    existing, _ = pods(client, place)
    saved = _saved_logs(place, existing)
    errors: list[BackendError] = []
    for pod in existing:
        yield from _read_saved(saved, pod.node)
        saved = [item for item in saved if item[0] != pod.node]
        if place.is_requested(pod) and pod.has_started:
            try:
                yield from _read(client, place, pod)
            except BackendError as error:
                errors.append(error)
    for node in sorted({node for node, _ in saved}):
        yield from _read_saved(saved, node)
    if errors:
        raise _incomplete_error(errors)


def read_ends(client: Client, place: Place) -> Iterator[Piece]:
    """Yield whole lines from the beginning and from the end of the log of each pod.

    Raises:
        BackendError: A log cannot be read.
    """
    for pod in pods(client, place)[0]:
        if place.is_requested(pod) and pod.has_started and pod.node is not None:
            head = _read_part(client, place, pod, {"limitBytes": str(END_BYTES)})
            yield pod.node, head[: head.rfind(b"\n") + 1]
            if len(head) >= END_BYTES:
                tail = _read_part(client, place, pod, {"tailLines": str(END_LINES)})
                # The first may be the rest of a long line.
                yield pod.node, tail[tail.find(b"\n") + 1 : tail.rfind(b"\n") + 1]


def _read_part(client: Client, place: Place, pod: Pod, part: dict[str, str]) -> bytes:
    doing = f"reading the log of node {pod.node}"
    # Refused while the container starts.
    with contextlib.suppress(ApiError):
        query = {"container": place.container, **part}
        with client.stream(place.log(pod.name), query, doing) as pieces:
            return b"".join(pieces)
    return b""


def follow(
    client: Client,
    place: Place,
    has_ended: Callable[[], bool],
    on_pods: Callable[[list[Pod]], object],
) -> Iterator[Piece]:
    """Yield the logs until the job has ended; an empty piece means that nothing is new.

    Args:
        has_ended: Returns whether the job has ended; called only while no pod writes.
        on_pods: Called with pods as they change, from any thread.

    Raises:
        BackendError: The job has ended, and a log cannot be read to its end.
    """
    follower = _Follower(client, place, on_pods)
    try:
        for node, path in _saved_logs(place, pods(client, place)[0]):
            yield node, path.read_bytes()
        follower.start()
        end_checks = _EndChecks(time.monotonic())
        while True:
            piece = follower.streams.next()
            yield piece
            now = time.monotonic()
            if not end_checks.is_due(now, has_data=bool(piece[1]), is_idle=follower.is_idle):
                continue
            end_checks.record(now, has_ended=has_ended())
            if end_checks.ended_at is not None and follower.is_drained(end_checks.silent_s(now)):
                return
    finally:
        follower.streams.stop()


@dataclass(slots=True)
class _EndChecks:
    """When a follower asks whether the job has ended.

    Args:
        data_at: When a pod last wrote something.
        ended_at: When the job was first seen to have ended.
    """

    data_at: float
    ended_at: float | None = None
    _next_at: float = 0.0

    def is_due(self, now: float, *, has_data: bool, is_idle: bool) -> bool:
        """Whether to ask now; open streams report their end by themselves."""
        if has_data:
            self.data_at = now
            return False
        if is_idle or self.ended_at is not None:
            return now >= self._next_at
        return now >= max(self._next_at, self.data_at) + _END_CHECK_SILENT_S

    def record(self, now: float, *, has_ended: bool) -> None:
        """Record the job's state; a restarted job has not ended."""
        self._next_at = now + _END_CHECK_S
        self.ended_at = (self.ended_at or now) if has_ended else None

    def silent_s(self, now: float) -> float:
        """Return for how many seconds nothing has arrived since the end of the job."""
        return now - max(self.data_at, self.ended_at or now)


@dataclass(slots=True)
class _Window:
    """The last lines that were read, so that each is yielded once.

    Args:
        since: The time of the youngest, as the server writes it.
    """

    since: str = ""
    _had: Counter[bytes] = field(default_factory=Counter)
    _order: deque[tuple[str, bytes]] = field(default_factory=deque)
    _again: Counter[bytes] = field(default_factory=Counter)

    def reopen(self) -> None:
        """Note that lines may be repeated from here on."""
        self._again = Counter(self._had)

    def is_new(self, line: bytes) -> bool:
        """Whether this line, with its timestamp, is new."""
        if self._again.get(line, 0):
            self._again[line] -= 1
            return False
        moment = line.partition(b" ")[0].decode("ascii", "replace")
        self.since = max(self.since, moment)
        self._had[line] += 1
        self._order.append((moment, line))
        oldest = _earlier(self.since, _WINDOW_S)
        while self._order and self._order[0][0] < oldest:
            _, old = self._order.popleft()
            self._had[old] -= 1
            if not self._had[old]:
                del self._had[old]
        return True

    @property
    def query(self) -> dict[str, str]:
        """The time from which a reopened stream must start."""
        # The API takes whole seconds; one more second covers lines in another order.
        return {"sinceTime": _earlier(self.since, 1.0)} if self.since else {}


class _Follower:
    """The threads of one follower: one for the watch, and one for each pod."""

    def __init__(
        self, client: Client, place: Place, on_pods: Callable[[list[Pod]], object]
    ) -> None:
        self._client = client
        self._place = place
        self._on_pods = on_pods
        self.streams = Streams()
        self._lock = threading.Lock()
        self._seen: set[str] = set()
        self._over: set[str] = set()
        self._reading: dict[str, Pod] = {}
        # Pods whose streams are open, and why those of the others are not.
        self._open: set[str] = set()
        self._errors: dict[str, BackendError] = {}
        self._since_s: dict[str, float] = {}
        self._notices = WaitNotices()

    def start(self) -> None:
        """Start with the pods that exist."""
        existing, version = pods(self._client, self._place)
        self._add_pods(existing)
        self.streams.add(lambda: self._watch(version))

    @property
    def is_idle(self) -> bool:
        """Whether no stream is open, and everything that was read has been taken."""
        with self._lock:
            return not self._open and self.streams.is_taken

    def is_drained(self, silent_s: float) -> bool:
        """Whether there is nothing more to read; reads what the watch has missed.

        Args:
            silent_s: Seconds since the job's end in which nothing has arrived.

        Raises:
            BackendError: A log could not be read to its end in that time.
        """
        try:
            existing, _ = pods(self._client, self._place)
        except PASSING:
            return False
        self._add_pods(existing)
        running = {pod.uid for pod in existing if not (pod.is_over or pod.is_cut_off)}
        with self._lock:
            if not (self._reading and self.streams.is_taken):
                return self.streams.is_taken
            unread = [
                self._errors.get(uid) or _unreachable_error(pod)
                for uid, pod in self._reading.items()
                if uid not in self._open & running
            ]
        is_broken = any(isinstance(error, ConnectionBroken) for error in unread)
        if unread and silent_s > (_LAST_BROKEN_S if is_broken else _LAST_S):
            raise _incomplete_error(unread)
        return silent_s > _LAST_RUNNING_S

    def _add_pods(self, listed: list[Pod]) -> None:
        self._on_pods(listed)
        for pod in listed:
            if not (self._place.is_requested(pod) and pod.has_started):
                continue
            with self._lock:
                if pod.is_over:
                    self._over.add(pod.uid)
                if pod.uid in self._seen:
                    continue
                self._seen.add(pod.uid)
                self._reading[pod.uid] = pod
            self.streams.add(lambda pod=pod: self._read(pod))  # type: ignore[misc]

    def _read(self, pod: Pod) -> Iterator[Piece]:
        assert pod.node is not None
        try:
            with _saving(self._place, pod) as keep:
                for data in self._lines(pod):
                    keep(data)
                    yield pod.node, data
        finally:
            with self._lock:
                self._reading.pop(pod.uid, None)

    def _lines(self, pod: Pod) -> Iterator[bytes]:
        """Yield each line of a pod once, until the pod has ended or is gone."""
        window = _Window()
        is_last = is_again = False
        while not self.streams.is_stopped:
            is_last = is_last or pod.uid in self._over
            try:
                yield from self._open_stream(pod, window, is_last=is_last, is_again=is_again)
                if is_last:
                    return
            except errors.ObjectNotFound:
                return
            except ConnectionBroken as error:
                is_last = False
                self._record_error(pod, error)
            except ApiError as error:
                if error.status != _STARTING and not _may_pass(error, is_again=is_again):
                    raise
                self._record_error(pod, error)
            finally:
                with self._lock:
                    self._open.discard(pod.uid)
            window.reopen()
            is_again = True
            # A server that is away is not asked for each pod: the next stream shows what is left.
            if pod.uid in self._errors or not self._is_over(pod):
                self.streams.wait(_REOPEN_S)

    def _record_error(self, pod: Pod, error: BackendError) -> None:
        """Record why a log cannot be read now, and report it if that lasts."""
        if self.streams.is_stopped:
            return
        with self._lock:
            self._errors[pod.uid] = error
            since_s = self._since_s.setdefault(pod.uid, time.monotonic())
            self._notices.report(since_s, error.message)

    def _open_stream(
        self, pod: Pod, window: _Window, *, is_last: bool, is_again: bool
    ) -> Iterator[bytes]:
        """Yield the new lines of one stream, which the server may end at any time."""
        query = {"container": self._place.container, "timestamps": "true", **window.query}
        query["follow"] = "false" if is_last else "true"
        path, doing = self._place.log(pod.name), f"following the log of node {pod.node}"
        with self._client.stream(path, query, doing) as pieces:
            # A log is requested by name, and an operator reuses the name for a new pod.
            if is_again and self._current(pod) is None:
                raise errors.ObjectNotFound(
                    f"{doing}: its pod was deleted", status=404, reason="NotFound"
                )
            with self._lock:
                self._open.add(pod.uid)
                self._errors.pop(pod.uid, None)
                self._since_s.pop(pod.uid, None)
            yield from _new_lines(pieces, window, is_last=is_last)

    def _is_over(self, pod: Pod) -> bool:
        """Ask whether a pod whose stream ended has itself ended: servers end streams, too."""
        if pod.uid not in self._over and not self.streams.is_stopped:
            with contextlib.suppress(*PASSING):
                now = self._current(pod)
                if now is None or now.is_over:
                    self._over.add(pod.uid)
        return pod.uid in self._over

    def _current(self, pod: Pod) -> Pod | None:
        """Return the pod as it is now, None when it is gone or another has its name."""
        path = POD.path(self._place.namespace, pod.name)
        try:
            current = self._client.get(path, f"reading the state of node {pod.node}")
        except errors.ObjectNotFound:
            return None
        now = self._place.pod(current)
        return now if now.uid == pod.uid else None

    def _watch(self, version: str) -> Iterator[Piece]:
        """Start a reader for each new pod from this moment on."""
        is_again = False
        while not self.streams.is_stopped:
            try:
                if not version:
                    # The server no longer has the version from which we would resume.
                    existing, version = pods(self._client, self._place)
                    self._add_pods(existing)
                version = self._watch_once(version)
            except ConnectionBroken:
                pass
            except ApiError as error:
                if error.status == errors.GONE:
                    version = ""
                elif not _may_pass(error, is_again=is_again):
                    raise
            is_again = True
            self.streams.wait(_REOPEN_S)
        yield from ()

    def _watch_once(self, version: str) -> str:
        """Watch until the server ends it, and return the last known version."""
        query = {
            **self._place.selector,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(_WATCH_S),
            "resourceVersion": version,
        }
        doing = f"watching the pods of job {self._place.job}"
        # If the stream breaks off within a line, the next watch repeats it from that version.
        with (
            contextlib.suppress(ConnectionBroken, ValueError),
            self._client.stream(self._place.pods, query, doing) as pieces,
        ):
            for line in (line for lines in whole_lines(pieces) for line in lines.splitlines()):
                version = self._handle_event(json.loads(line), version)
                if not version or self.streams.is_stopped:
                    break
        return version

    def _handle_event(self, event: dict[str, Any], version: str) -> str:
        """Handle one event and return its version; empty if the server no longer has it."""
        changed = event.get("object") or {}
        if event.get("type") == "ERROR":
            return ""
        if event.get("type") == "DELETED":
            with self._lock:
                self._over.add(changed["metadata"]["uid"])
        elif event.get("type") in ("ADDED", "MODIFIED"):
            self._add_pods([self._place.pod(changed)])
        return str((changed.get("metadata") or {}).get("resourceVersion") or version)


def _may_pass(error: ApiError, *, is_again: bool) -> bool:
    """Whether a refusal may pass: a user without this right is told so at once.

    Args:
        is_again: Whether the same request was tried before.
    """
    return isinstance(error, PASSING) and (is_again or error.status != errors.FORBIDDEN)


def _read(client: Client, place: Place, pod: Pod) -> Iterator[Piece]:
    assert pod.node is not None
    doing = f"reading the log of node {pod.node}"
    query = {"container": place.container}
    with _saving(place, pod) as keep:
        try:
            with client.stream(place.log(pod.name), query, doing) as pieces:
                for data in whole_lines(pieces):
                    keep(data)
                    yield pod.node, data
        except ApiError as error:
            if error.status not in (_STARTING, errors.NOT_FOUND):
                raise


def _unreachable_error(pod: Pod) -> BackendError:
    return BackendError(
        f"following the log of node {pod.node}: the machine {pod.host} does not answer"
    )


def _incomplete_error(errors: list[BackendError]) -> BackendError:
    """Return one error for logs that cannot be read."""
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return Unreachable(
        f"{errors[0].message}{more}",
        hint="this log is not complete; `cloudjob logs` reads the rest when the machine answers",
    )


def _new_lines(pieces: Iterator[bytes], window: _Window, *, is_last: bool) -> Iterator[bytes]:
    """Yield the lines that were not yielded yet, without their times.

    Args:
        is_last: Whether the text after the last newline is a line, too, because the container has
            ended. Otherwise the stream broke off, and the next one repeats the whole line.
    """
    rest = b""
    for piece in pieces:
        whole, newline, rest = (rest + piece).rpartition(b"\n")
        if newline:
            lines = [line for line in whole.split(b"\n") if window.is_new(line)]
            if lines:
                yield b"".join(line.partition(b" ")[2] + b"\n" for line in lines)
    if is_last and rest and window.is_new(rest):
        yield rest.partition(b" ")[2] + b"\n"


def _earlier(moment: str, seconds: float) -> str:
    """Return a time of the API, some seconds earlier, in whole seconds."""
    at = times.rfc3339(times.seconds_of(moment) - seconds)
    return f"{at[:19]}Z" if at else ""


# -- saved logs -----------------------------------------------------------------------------------


@contextlib.contextmanager
def _saving(place: Place, pod: Pod) -> Iterator[Callable[[bytes], object]]:
    """Save a pod's log while it is read; keep the earlier copy if that is longer."""
    path = place.folder / f"{pod.node}-{pod.uid}.log"
    new = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.new")
    with writing(f"saving the log of node {pod.node}", new):
        place.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with new.open("wb") as file:
            try:
                yield file.write
            finally:
                file.flush()
                if not path.exists() or path.stat().st_size <= new.stat().st_size:
                    new.replace(path)
                else:
                    new.unlink()


def _saved_logs(place: Place, existing_pods: list[Pod]) -> list[tuple[int, Path]]:
    """Return node and file of saved logs whose pods are not in ``pods_there``, oldest first."""
    pod_uids = {pod.uid for pod in existing_pods}
    saved = []
    for path in place.folder.glob("*.log"):
        number, _, uid = path.stem.partition("-")
        if place.node in (None, int(number)) and uid not in pod_uids:
            saved.append((path.stat().st_mtime, int(number), path))
    return [(node, path) for _, node, path in sorted(saved)]


def _read_saved(saved: list[tuple[int, Path]], node: int | None) -> Iterator[Piece]:
    for index, path in saved:
        if index == node:
            yield index, path.read_bytes()

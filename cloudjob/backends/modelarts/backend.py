"""The modelarts backend: Huawei Cloud's training jobs, or an emulator of them on this machine.

The platform copies code and inputs to the nodes and outputs to the bucket, with permissions of its
own, so the user's keys stay on this machine. A handle is ``modelarts://host/project/id/job``, with
``modelarts+http`` for an emulator. Before a job is created, its id is ``-``; such a job is found by
its name, which is unique.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cloudjob.backends import handles
from cloudjob.backends.base import Backend, Check, Devices
from cloudjob.backends.modelarts import delivery, errors, logs, state
from cloudjob.backends.modelarts import request as requests
from cloudjob.backends.modelarts import site as sites
from cloudjob.backends.modelarts.client import ModelArtsClient
from cloudjob.backends.modelarts.request import ModelArtsRequest
from cloudjob.backends.modelarts.site import Site
from cloudjob.backends.modelarts.transport import LIMITS
from cloudjob.backends.native import Ended, Event, Metric, NativeStatus
from cloudjob.errors import BackendError, JobNotFound, Unanswered
from cloudjob.model.submission import Submission
from cloudjob.retries import RequestLimits
from jobentry.contract.exits import Cause, Failure

if TYPE_CHECKING:
    from cloudjob.model.job import JobSpec

_SCHEMES = {"https": "modelarts", "http": "modelarts+http"}
# Seconds between two requests for a job's status: the service limits the requests in a minute.
_POLL_S, _LOCAL_POLL_S = 5.0, 0.2
_LOG_POLL_S = 2.0
# Seconds that a job may take to end before it is deleted.
_END_S = 300.0
_AT_ONCE = 8
# Statuses with which the service refuses to end a job that has ended.
_ENDED_STATUSES = (400, 404, 409)
# In a handle, the id of a job that is not created yet, or is not known.
_NO_ID = "-"
# In a handle, the project that IAM names for the user's keys.
_OWN_PROJECT = "-"


class _Handle(NamedTuple):
    endpoint: str
    project: str
    id: str
    job: str


class ModelArtsBackend(Backend[ModelArtsRequest]):
    """Runs jobs on ModelArts; see ``Backend`` for what it promises."""

    copies_files = True

    def __init__(
        self,
        home: Path,
        options: dict[str, Any],
        *,
        environ: Mapping[str, str] | None = None,
        user_home: Path | None = None,
        limits: RequestLimits = LIMITS,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._home = home
        self._options = options
        self._environ = os.environ if environ is None else environ
        self._user_home = user_home or Path.home()
        self._limits = limits
        self._pause = pause
        self._found: Site | None = None
        self._clients: dict[tuple[str, str], ModelArtsClient] = {}
        self._ids: dict[str, str] = {}

    @property
    def poll_s(self) -> float:
        return _LOCAL_POLL_S if self._site.is_local else _POLL_S

    def store(self) -> tuple[str, Mapping[str, str]]:
        """Return the store that the job file names, or the emulator's."""
        keys = self._site.keys
        if keys is None:
            return self._site.store_uri, {}
        variables = {
            "HUAWEICLOUD_SDK_AK": keys.access_key,
            "HUAWEICLOUD_SDK_SK": keys.secret_key,
            "HUAWEICLOUD_SDK_SECURITY_TOKEN": keys.token,
        }
        return self._site.store_uri, {name: value for name, value in variables.items() if value}

    def checks(self, spec: JobSpec | None, store: str) -> list[Check]:
        from cloudjob.backends.modelarts import checks

        return checks.run(self._client(), spec, store)

    # -- forward ------------------------------------------------------------------------------

    def devices(self, spec: JobSpec, *, may_query: bool) -> Devices | None:
        """Return the GPUs or NPUs of the flavor; in a dedicated pool only the nodes know."""
        from cloudjob.backends.modelarts import checks

        return checks.devices(self._client(), spec) if may_query else None

    def build(self, submission: Submission) -> ModelArtsRequest:
        return requests.build(submission, self._site)

    def show(self, request: ModelArtsRequest) -> dict[str, Any]:
        return requests.show(request)

    def environments(self, request: ModelArtsRequest) -> Iterable[Mapping[str, str]]:
        return request.environments

    def companions(self, request: ModelArtsRequest) -> Mapping[str, bytes]:
        return delivery.companions(request)

    def handle(self, request: ModelArtsRequest) -> str:
        """Return the handle of a job that is not created yet, with its name and no id."""
        return _handle(self._client(), _NO_ID, request.job)

    def own_handle(self, handle: str, job: str) -> str:
        """Return a handle with the service and project of the reader, and without an id.

        The job is found by its name, which is unique in a project: an id could be that of any job.
        """
        theirs, ours = _parse_handle(handle), self._site
        doing = f"looking for {job} on ModelArts"
        if theirs.endpoint != ours.endpoint:
            hint = "set modelarts.region or modelarts.endpoint in your configuration"
            raise handles.not_ours(doing, f"the service {theirs.endpoint}", ours.endpoint, hint)
        if ours.project_id and theirs.project != ours.project_id:
            hint = "set modelarts.project_id in your configuration"
            raise handles.not_ours(doing, f"the project {theirs.project}", ours.project_id, hint)
        return _written_handle(ours.endpoint, ours.project_id or _OWN_PROJECT, _NO_ID, job)

    def send(self, request: ModelArtsRequest) -> str:
        client = self._client()
        created = client.create(request.body)
        job = str((created.get("metadata") or {}).get("id") or "")
        if not job:
            raise Unanswered(f"creating the job {request.job}: the answer has no id")
        if request.tags:
            try:
                client.tag(job, request.tags)
            except BackendError as error:
                # The job exists, so the submit must remove it or keep its record.
                raise Unanswered(error.message, hint=error.hint) from error
        return _handle(client, job, request.job)

    # -- back ---------------------------------------------------------------------------------

    def status(self, handle: str) -> NativeStatus:
        """Return the status of the job."""
        where = self._where(handle)
        client = self._client(where)
        native = state.status_of(client.show(where.id))
        if not isinstance(native, Ended) or native.cause is not Cause.PLATFORM:
            return native
        failure = native.failure or Failure()
        if failure.exit_code is None:
            # No node has reported a failure; the first error event says why.
            with suppress(BackendError):
                events = client.events(where.id)
                bad = next((event for event in events if event.get("level") == "Error"), {})
                if bad.get("message"):
                    message = f"{failure.message}: {bad['message']}"
                    return native._replace(failure=failure._replace(message=message))
        return native

    def statuses(self, handles: Sequence[str]) -> Mapping[str, NativeStatus | None]:
        """Return the status of many jobs from one search for those that have not ended.

        When more than a few others are left, a second search finds out which of them are gone.
        """
        groups: dict[tuple[str, str], dict[str, _Handle]] = {}
        for handle in handles:
            where = _parse_handle(handle)
            groups.setdefault((where.endpoint, where.project), {})[handle] = where
        status_of: dict[str, NativeStatus | None] = {}
        for by_handle in groups.values():
            client = self._client(next(iter(by_handle.values())))
            listed = _search(client, by_handle, state.ACTIVE)
            status_of |= {
                handle: status for handle, status in listed.items() if not status.state.is_final
            }
            others = {handle: where for handle, where in by_handle.items() if handle not in listed}
            if len(others) > _AT_ONCE:
                existing = _search(client, others)
                status_of |= dict.fromkeys(handle for handle in others if handle not in existing)
        return status_of

    def logs(self, handle: str, node: int | None, *, follow: bool) -> Iterator[tuple[int, bytes]]:
        where = self._where(handle)
        yield from logs.follow(
            self._client(where),
            where.id,
            node,
            is_live=follow,
            poll_s=min(self.poll_s, _LOG_POLL_S),
            pause=self._pause,
        )

    def cancel(self, handle: str, *, is_urgent: bool = False) -> None:
        """Ask the job to end; the service decides how long it may take."""
        where = self._where(handle)
        try:
            self._client(where).terminate(where.id)
        except errors.ServiceError as error:
            # A job that has ended, or is ending, stays as it is.
            if error.status not in _ENDED_STATUSES or isinstance(error, JobNotFound):
                raise
            status = self.status(handle)
            if not (status.state.is_final or status.native == "Terminating"):
                raise

    def remove(self, handle: str) -> None:
        """Delete the job, after it has ended."""
        try:
            where = self._where(handle)
            client = self._client(where)
            if not self.status(handle).state.is_final:
                self.cancel(handle)
                self._wait_until_ended(handle)
            client.delete(where.id)
        except JobNotFound:
            return

    def events(self, handle: str) -> list[Event]:
        where = self._where(handle)
        return [
            Event(
                at=str(event.get("time") or ""),
                level=str(event.get("level") or ""),
                source=str(event.get("source") or ""),
                message=str(event.get("message") or ""),
            )
            for event in self._client(where).events(where.id)
        ]

    def metrics(self, handle: str) -> list[Metric]:
        where = self._where(handle)
        client = self._client(where)
        tasks = state.tasks(client.show(where.id))
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            of_tasks = pool.map(lambda task: client.metrics(where.id, task), tasks)
            return [
                Metric(state.node_of(task), str(metric.get("metric")), _values(metric))
                for task, metrics in zip(tasks, of_tasks, strict=True)
                for metric in metrics
            ]

    # -- the service --------------------------------------------------------------------------

    @property
    def _site(self) -> Site:
        if self._found is None:
            self._found = sites.find(self._options, self._environ, self._home, self._user_home)
        return self._found

    def _client(self, where: _Handle | None = None) -> ModelArtsClient:
        """Return the client of this site, or of the site of a job."""
        key = (where.endpoint, where.project) if where else ("", "")
        if key not in self._clients:
            site = self._site
            if where is not None:
                project = "" if where.project == _OWN_PROJECT else where.project
                site = replace(site, endpoint=where.endpoint, project_id=project)
            self._clients[key] = ModelArtsClient(site, limits=self._limits, pause=self._pause)
        return self._clients[key]

    def _where(self, handle: str) -> _Handle:
        """Return the parts of a handle, with the job's id.

        Raises:
            JobNotFound: The handle has no id, and the service has no job of this name.
        """
        where = _parse_handle(handle)
        if where.id != _NO_ID:
            return where
        if handle not in self._ids:
            job = self._client(where).named(where.job)
            if job is None:
                raise JobNotFound(f"looking for {handle}: the service has no job of this name")
            self._ids[handle] = str(job["metadata"]["id"])
        return where._replace(id=self._ids[handle])

    def _wait_until_ended(self, handle: str) -> None:
        deadline = time.monotonic() + _END_S
        while not self.status(handle).state.is_final:
            if time.monotonic() > deadline:
                raise BackendError(
                    f"removing {handle}: it does not end", hint="try again in a few minutes"
                )
            self._pause(self.poll_s)


def _handle(client: ModelArtsClient, job: str, name: str) -> str:
    return _written_handle(client.site.endpoint, client.project_id(), job, name)


def _written_handle(endpoint: str, project: str, job: str, name: str) -> str:
    scheme, _, host = endpoint.partition("://")
    return handles.write(_SCHEMES[scheme], host, project, job, name)


def _search(
    client: ModelArtsClient, by_handle: Mapping[str, _Handle], phases: Sequence[str] = ()
) -> dict[str, NativeStatus]:
    """Return the status of those jobs that a search finds.

    Args:
        phases: The phases that they may be in; empty for any.
    """
    by_id = {where.job if where.id == _NO_ID else where.id: h for h, where in by_handle.items()}
    filters = [{"key": "phase", "operator": "in", "value": list(phases)}] if phases else []
    status_of: dict[str, NativeStatus] = {}
    for job in client.search(filters):
        metadata = job.get("metadata") or {}
        handle = by_id.get(str(metadata.get("id"))) or by_id.get(str(metadata.get("name")))
        if handle is not None:
            status_of[handle] = state.status_of(job)
        if len(status_of) == len(by_handle):
            break
    return status_of


def _parse_handle(handle: str) -> _Handle:
    scheme = "http" if handle.startswith(f"{_SCHEMES['http']}:") else "https"
    host, project, number, job = handles.read(handle, _SCHEMES[scheme], 4)
    return _Handle(f"{scheme}://{host}", project, number, job)


def _values(metric: Mapping[str, Any]) -> tuple[float | None, ...]:
    """Return the values by minute; -1, the service's mark for no measurement, becomes None."""
    values = (float(value) for value in metric.get("value") or ())
    return tuple(None if value < 0 else value for value in values)

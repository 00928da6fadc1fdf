"""The operations of ModelArts that cloudjob uses."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import requests

from cloudjob.backends.modelarts import errors
from cloudjob.backends.modelarts.errors import ServiceError
from cloudjob.backends.modelarts.site import Site
from cloudjob.backends.modelarts.transport import LIMITS, Transport, unsigned, value_of
from cloudjob.errors import BackendError, CloudJobError, Unanswered
from cloudjob.retries import RequestLimits, retried

# How many jobs, events or tags one request returns: the most that the service allows.
_JOBS_PAGE, _EVENTS_PAGE, _TAGS_PAGE = 50, 100, 100
_JSON = {"Content-Type": "application/json"}
# Asks for the whole log as a file, and not for its beginning as text.
_WHOLE_LOG = {"Content-Type": "application/octet-stream"}


class ModelArtsClient:
    """The service at one site; any number of threads may use it."""

    def __init__(
        self,
        site: Site,
        *,
        limits: RequestLimits = LIMITS,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._transport = Transport(site, limits, pause)
        self._limits = limits
        self._pause = pause

    @property
    def site(self) -> Site:
        """The service's endpoints and the user's credentials."""
        return self._transport.site

    @property
    def clock_ahead_s(self) -> float:
        """How far this machine's clock is ahead of the service's, by its last answer."""
        return self._transport.clock_ahead_s

    def project_id(self) -> str:
        """Return the project; ask IAM for it if none is set."""
        return self._transport.project_id()

    # -- jobs ---------------------------------------------------------------------------------

    def create(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Create a job and return it, or return the job of this name that exists already.

        The answer to a create may get lost, and a second create would run the job twice. So
        cloudjob looks for a job of this name before it sends the request again. The service
        accepts no two jobs of one name, so looking too early does no harm.

        Raises:
            Unanswered: The job may or may not have been created.
        """
        name = body["metadata"]["name"]
        doing = f"creating the job {name}"

        def create() -> dict[str, Any]:
            try:
                answer = self._call("POST", "/training-jobs", doing, json=body, is_repeatable=False)
                return dict(answer or {})
            except (Unanswered, ServiceError) as error:
                if isinstance(error, ServiceError) and error.code != errors.DUPLICATE_NAME:
                    raise
                created = self._find_created(error, name)
                if created is None:
                    raise
                return created

        def pause_s(error: CloudJobError, _tries: int) -> float | None:
            return 0.0 if isinstance(error, Unanswered) else None

        return retried(create, pause_s, self._limits, sleep=self._pause)

    def _find_created(self, error: BackendError, name: str) -> dict[str, Any] | None:
        """Return the job of this name after its create has failed."""
        try:
            return self.named(name)
        except BackendError as unknown:
            raise Unanswered(error.message, hint=unknown.message) from unknown

    def named(self, name: str) -> dict[str, Any] | None:
        """Return the job of exactly this name, if there is one."""
        filters = [{"key": "name", "operator": "like", "value": [name]}]
        for job in self.search(filters):
            if job.get("metadata", {}).get("name") == name:
                return job
        return None

    def show(self, job: str) -> dict[str, Any]:
        """Return a job."""
        return dict(self._call("GET", f"/training-jobs/{job}", f"asking for job {job}") or {})

    def search(self, filters: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the jobs that match all ``filters``, newest first."""

        def page(number: int) -> Any:
            body = {
                "offset": number,
                "limit": _JOBS_PAGE,
                "sort_by": "create_time",
                "order": "desc",
                "filters": filters,
            }
            return self._call("POST", "/training-job-searches", "searching jobs", json=body)

        return _paged(page, "items", _JOBS_PAGE)

    def terminate(self, job: str) -> None:
        """Ask a job to end."""
        path, body = f"/training-jobs/{job}/actions", {"action_type": "terminate"}
        self._call("POST", path, f"stopping job {job}", json=body)

    def delete(self, job: str) -> None:
        """Delete a job."""
        self._call("DELETE", f"/training-jobs/{job}", f"deleting job {job}")

    def tag(self, job: str, tags: Mapping[str, str]) -> None:
        """Put tags on a job."""
        body = {"tags": [{"key": key, "value": value} for key, value in tags.items()]}
        path = f"/modelarts-training-job/{job}/tags/create"
        self._call("POST", path, f"tagging job {job}", json=body)

    def log_preview(self, job: str, task: str) -> dict[str, Any] | None:
        """Return the end of a task's log; None when there is none yet."""
        path = f"/training-jobs/{job}/tasks/{task}/logs/preview"
        answer = self._call("GET", path, f"reading the log of {task} of job {job}")
        return dict(answer) if answer else None

    def log_url(self, job: str, task: str) -> str:
        """Return a URL of the whole log of a task; empty if there is none yet."""
        path = f"/training-jobs/{job}/tasks/{task}/logs/url"
        doing = f"getting the URL of the log of {task} of job {job}"
        answer = self._call("GET", path, doing, headers=_WHOLE_LOG) or {}
        return str(answer.get("obs_url") or "")

    def metrics(self, job: str, task: str) -> list[dict[str, Any]]:
        """Return the resource usage of a task, minute by minute."""
        path = f"/training-jobs/{job}/metrics/{task}"
        answer = self._call("GET", path, f"reading metrics of {task} of job {job}") or {}
        return list(answer.get("metrics") or [])

    def events(self, job: str) -> Iterator[dict[str, Any]]:
        """Yield the events of a job, oldest first."""
        path, doing = f"/training-jobs/{job}/events", f"reading events of job {job}"

        def page(number: int) -> Any:
            query = {"limit": _EVENTS_PAGE, "offset": number, "order": "asc"}
            return self._call("GET", path, doing, params=query)

        return _paged(page, "events", _EVENTS_PAGE)

    # -- what the service offers ----------------------------------------------------------------

    def flavors(self) -> list[dict[str, Any]]:
        """Return the kinds of nodes of the public pool."""
        answer = self._call("GET", "/training-job-flavors", "listing flavors") or {}
        return list(answer.get("flavors") or [])

    def engines(self) -> list[dict[str, Any]]:
        """Return the preset engines."""
        answer = self._call("GET", "/training-job-engines", "listing engines") or {}
        return list(answer.get("items") or [])

    def pool(self, name: str) -> dict[str, Any]:
        """Return a dedicated pool."""
        return dict(self._call("GET", f"/pools/{name}", f"asking for the pool {name}") or {})

    def quotas(self) -> list[dict[str, Any]]:
        """Return this user's quotas and their usage."""
        answer = self._call("GET", "/training-quotas", "asking for quotas") or {}
        return list(answer.get("quotas") or [])

    def image_tags(self, namespace: str, repository: str, like: str) -> list[str]:
        """Return the tags of an image in SWR, the region's registry, that contain ``like``.

        Raises:
            ServiceError: The status is 404 if SWR does not know the image.
        """
        doing = f"asking for the image {namespace}/{repository}"
        # In the API, "$" separates the folders in the name of a repository.
        name = repository.replace("/", "$")
        url = f"{self.site.registry}/v2/manage/namespaces/{namespace}/repos/{name}/tags"
        tags: list[str] = []
        while True:
            query = {"limit": _TAGS_PAGE, "offset": len(tags), "tag": like}
            answer = self._transport.send("GET", url, doing, params=query, headers=_JSON)
            page = value_of(answer, doing) or []
            tags += [str(item.get("Tag")) for item in page]
            if len(page) < _TAGS_PAGE:
                return tags

    def fetch(self, url: str, first: int, doing: str) -> bytes | None:
        """Return an object's bytes from ``first`` on; the URL needs no signature.

        None when it is not there (yet).
        """
        headers = {"Range": f"bytes={first}-"} if first else {}
        options: dict[str, Any] = {"auth": unsigned, "headers": headers, "allow_redirects": True}
        try:
            answer = self._transport.send("GET", url, doing, **options)
        except ServiceError as error:
            if error.status == requests.codes.requested_range_not_satisfiable:
                return b""
            if error.status in (requests.codes.not_found, requests.codes.forbidden):
                return None
            raise
        is_part = answer.status_code == requests.codes.partial_content
        return answer.content if is_part else answer.content[first:]

    def _call(self, method: str, path: str, doing: str, **options: Any) -> Any:
        """Send a request and return the value of its answer; None for an empty one.

        Args:
            path: Below ``/v2/{project}``.
            options: The options of ``Transport.send``.
        """
        url = f"{self.site.endpoint}/v2/{self.project_id()}{path}"
        options = {"headers": _JSON, **options}
        return value_of(self._transport.send(method, url, doing, **options), doing)


def _paged(page: Callable[[int], Any], key: str, page_size: int) -> Iterator[dict[str, Any]]:
    """Yield the items of all pages. The service's offset is the number of a page."""
    number = seen = 0
    while True:
        answer = page(number) or {}
        items = answer.get(key) or []
        yield from items
        number, seen = number + 1, seen + len(items)
        if len(items) < page_size or seen >= int(answer.get("total") or 0):
            return

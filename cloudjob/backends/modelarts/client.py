"""Requests to the service: signed, tried again when that may help, refusals as errors."""

from __future__ import annotations

import email.utils
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from cloudjob import __version__
from cloudjob.backends.modelarts import refusals
from cloudjob.backends.modelarts import site as sites
from cloudjob.backends.modelarts.refusals import Refusal
from cloudjob.backends.modelarts.sign import Asked, signed, signed_for_bucket
from cloudjob.backends.modelarts.site import Site
from cloudjob.backends.modelarts.tries import Patience, Tries
from cloudjob.errors import BackendError, NotAuthorised, Unanswered
from cloudjob.waits import Waits
from jobentry.contract.sigv4 import Keys

# How many jobs or events are asked for at a time: the most that the service gives.
_JOBS_PAGE, _EVENTS_PAGE, _TAGS_PAGE = 50, 100, 100
# The service refuses a request whose date is further off than 15 minutes.
SKEW_LIMIT_S = 15 * 60.0
_TOKEN_LIFE_S = 20 * 3600.0
_MAY_PASS = (429, 500, 502, 503, 504)
# The gateway has not let it through, so nothing was done.
_NOT_DONE = (429,)
_JSON = (("Content-Type", "application/json"),)
_WHOLE_LOG = "application/octet-stream"
_AGENT = f"cloudjob/{__version__}"

Query = tuple[tuple[str, str], ...]


class Answer(NamedTuple):
    """What came back for a request that was not refused."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self, doing: str) -> Any:
        """Return the value of the body, None for an empty one."""
        if not self.body:
            return None
        try:
            return json.loads(self.body)
        except ValueError as error:
            raise BackendError(
                f"{doing}: the answer is no JSON", hint="is the endpoint that of ModelArts?"
            ) from error


class Client:
    """The service's operations; any number of threads may use it."""

    def __init__(
        self,
        site: Site,
        *,
        patience: Patience = Patience(),  # noqa: B008 (a frozen value)
        clock: Callable[[], float] = time.time,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        self._site = site
        self._patience = patience
        self._clock = clock
        self._pause = pause
        self._waits = Waits(clock)
        self._lock = threading.Lock()
        self._sessions = threading.local()
        self._token = ""
        self._token_until = 0.0
        self._ahead_s = 0.0

    @property
    def site(self) -> Site:
        """Where the service is."""
        return self._site

    @property
    def clock_ahead_s(self) -> float:
        """How far this machine's clock is ahead of the service's, by its last answer."""
        return self._ahead_s

    # -- jobs ---------------------------------------------------------------------------------

    def create(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Create a job and return it; a job of this name that is there already is that job.

        The answer to a create may get lost, and a second one would run the job twice. So nothing
        is sent again before we have looked whether a job of this name is there; and as the
        service takes no two jobs of one name, a look that comes too early does no harm.
        """
        name = body["metadata"]["name"]
        doing = f"creating the job {name}"
        deadline = self._clock() + self._patience.total_s
        while True:
            try:
                made = self.call("POST", "/training-jobs", doing, body=body, is_safe=False)
            except Unanswered:
                if self._clock() > deadline:
                    raise
            except refusals.ServiceError as error:
                found = self.named(name) if error.refusal.code == refusals.DUPLICATE_NAME else None
                if found is None:
                    raise
                return found
            else:
                return dict(made or {})
            found = self.named(name)
            if found is not None:
                return found
            self._pause(self._patience.first_s)

    def named(self, name: str) -> dict[str, Any] | None:
        """Return the job of exactly this name, if there is one."""
        filters = [{"key": "name", "operator": "like", "value": [name]}]
        for job in self.search(filters):
            if job.get("metadata", {}).get("name") == name:
                return job
        return None

    def show(self, job: str) -> dict[str, Any]:
        """Return a job."""
        return dict(self.call("GET", f"/training-jobs/{job}", f"asking for job {job}") or {})

    def search(self, filters: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the jobs that pass all ``filters``, newest first."""
        # What the service calls the offset is the number of a page.
        page = seen = 0
        while True:
            body = {
                "offset": page,
                "limit": _JOBS_PAGE,
                "sort_by": "create_time",
                "order": "desc",
                "filters": filters,
            }
            found = self.call("POST", "/training-job-searches", "searching jobs", body=body) or {}
            items = found.get("items") or []
            yield from items
            seen += len(items)
            page += 1
            if len(items) < _JOBS_PAGE or seen >= int(found.get("total") or 0):
                return

    def terminate(self, job: str) -> None:
        """Ask a job to end."""
        path, body = f"/training-jobs/{job}/actions", {"action_type": "terminate"}
        self.call("POST", path, f"stopping job {job}", body=body)

    def delete(self, job: str) -> None:
        """Delete a job."""
        self.call("DELETE", f"/training-jobs/{job}", f"deleting job {job}")

    def tag(self, job: str, tags: Mapping[str, str]) -> None:
        """Put tags on a job."""
        body = {"tags": [{"key": key, "value": value} for key, value in tags.items()]}
        path = f"/modelarts-training-job/{job}/tags/create"
        self.call("POST", path, f"tagging job {job}", body=body)

    def log_preview(self, job: str, task: str) -> dict[str, Any] | None:
        """Return the end of a task's log; None when there is none yet."""
        path = f"/training-jobs/{job}/tasks/{task}/logs/preview"
        found = self.call("GET", path, f"reading the log of {task} of job {job}")
        return dict(found) if found else None

    def log_url(self, job: str, task: str) -> str:
        """Return a URL of the whole of a task's log; empty when there is none yet."""
        path = f"/training-jobs/{job}/tasks/{task}/logs/url"
        doing = f"asking where the log of {task} of job {job} is"
        # The type says what is wanted: the whole log as a file, and not its beginning as text.
        asked = Asked("GET", self._url(path), headers=(("Content-Type", _WHOLE_LOG),))
        found = self.exchange(asked, doing).json(doing) or {}
        return str(found.get("obs_url") or "")

    def metrics(self, job: str, task: str) -> list[dict[str, Any]]:
        """Return what a task used, minute by minute."""
        path = f"/training-jobs/{job}/metrics/{task}"
        found = self.call("GET", path, f"reading metrics of {task} of job {job}") or {}
        return list(found.get("metrics") or [])

    def events(self, job: str) -> Iterator[dict[str, Any]]:
        """Yield what happened to a job, the first first."""
        page = seen = 0
        while True:
            query = (("limit", str(_EVENTS_PAGE)), ("offset", str(page)), ("order", "asc"))
            path = f"/training-jobs/{job}/events"
            found = self.call("GET", path, f"reading events of job {job}", query=query) or {}
            items = found.get("events") or []
            yield from items
            seen += len(items)
            page += 1
            if len(items) < _EVENTS_PAGE or seen >= int(found.get("total") or 0):
                return

    # -- what there is --------------------------------------------------------------------------

    def flavors(self) -> list[dict[str, Any]]:
        """Return the kinds of nodes of the public pool."""
        found = self.call("GET", "/training-job-flavors", "listing flavors") or {}
        return list(found.get("flavors") or [])

    def engines(self) -> list[dict[str, Any]]:
        """Return the preset engines."""
        found = self.call("GET", "/training-job-engines", "listing engines") or {}
        return list(found.get("items") or [])

    def pool(self, name: str) -> dict[str, Any]:
        """Return a dedicated pool."""
        return dict(self.call("GET", f"/pools/{name}", f"asking for the pool {name}") or {})

    def quotas(self) -> list[dict[str, Any]]:
        """Return how much of what may be used, and is."""
        found = self.call("GET", "/training-quotas", "asking for quotas") or {}
        return list(found.get("quotas") or [])

    def image_tags(self, namespace: str, repository: str, like: str) -> list[str]:
        """Return the tags like ``like`` that SWR, the registry of the region, has of an image.

        Raises:
            ServiceError: 404 where it knows no such image.
        """
        doing = f"asking for the image {namespace}/{repository}"
        # A name with folders in it stands in a path with this sign between them.
        name = repository.replace("/", "$")
        url = f"{self._site.registry}/v2/manage/namespaces/{namespace}/repos/{name}/tags"
        tags: list[str] = []
        while True:
            query = (("limit", str(_TAGS_PAGE)), ("offset", str(len(tags))), ("tag", like))
            found = self.exchange(Asked("GET", url, query, _JSON), doing).json(doing) or []
            tags += [str(item.get("Tag")) for item in found]
            if len(found) < _TAGS_PAGE:
                return tags

    # -- requests -------------------------------------------------------------------------------

    def call(
        self,
        method: str,
        path: str,
        doing: str,
        *,
        query: Query = (),
        body: Any = None,
        is_safe: bool = True,
    ) -> Any:
        """Ask ModelArts, and return the value of the answer; None for an empty one (204).

        Args:
            path: Below ``/v2/{project}``.
            is_safe: Whether doing it twice is as good as doing it once.

        Raises:
            ServiceError: The service refuses.
            Unanswered: It was sent, is not safe, and nobody knows whether it was done.
            BackendError: The service cannot be reached.
        """
        data = b"" if body is None else json.dumps(body).encode("ascii")
        asked = Asked(method, self._url(path), query, _JSON, data)
        return self.exchange(asked, doing, is_safe=is_safe).json(doing)

    def _url(self, path: str) -> str:
        return f"{self._site.endpoint}/v2/{self.project_id()}{path}"

    def exchange(self, asked: Asked, doing: str, *, is_safe: bool = True) -> Answer:
        """Send a request as ourselves until there is an answer."""
        tries = self._tries()
        is_renewed = False
        while True:
            answer = self._once(asked, doing, tries, is_safe=is_safe)
            if answer is None:
                continue
            refusal = _refusal(answer)
            if refusal is None:
                return answer
            if refusal.status == 401 and not is_renewed and self._renew():
                is_renewed = True
                continue
            error = refusals.error(doing, refusal)
            if refusal.status not in _MAY_PASS:
                raise error
            if not is_safe and refusal.status not in _NOT_DONE:
                raise Unanswered(error.message)
            if not tries.again(error.message, answer.headers):
                raise error

    def _tries(self) -> Tries:
        return Tries(self._patience, self._clock, self._pause, self._waits)

    def _once(self, asked: Asked, doing: str, tries: Tries, *, is_safe: bool) -> Answer | None:
        """Send it once; None when there was no answer and it is to be sent again."""
        import requests

        try:
            answer = self._send(asked, self._proof(asked))
        except requests.exceptions.RequestException as error:
            was_sent = not isinstance(
                error, (requests.exceptions.ConnectTimeout, requests.exceptions.InvalidURL)
            ) and not _is_refused(error)
            failure = self._unreachable(doing, asked.url, error)
            if was_sent and not is_safe:
                raise Unanswered(failure.message, hint=failure.hint) from error
            if not tries.again(failure.message, is_there=was_sent):
                raise failure from error
            return None
        self._look_at_clock(answer)
        return answer

    def _send(self, asked: Asked, headers: Mapping[str, str]) -> Answer:
        response = self._session(asked.url).request(
            asked.method,
            asked.target,
            data=asked.body,
            headers=dict(headers),
            timeout=(10.0, self._patience.answer_s),
            allow_redirects=False,
        )
        return Answer(response.status_code, response.headers, response.content)

    def _session(self, url: str) -> Any:
        """Return the connections of this thread: a session of requests is not for several."""
        import requests

        session = getattr(self._sessions, "session", None)
        if session is None:
            session = self._sessions.session = requests.Session()
            session.headers.clear()
            session.headers["User-Agent"] = _AGENT
            # Else a line of ~/.netrc takes the place of our signature.
            session.auth = lambda request: request
            # A company's proxy cannot reach what runs on this machine.
            host = urlsplit(url).hostname or ""
            session.trust_env = not (host == "localhost" or host.startswith("127."))
        return session

    def _unreachable(self, doing: str, url: str, error: Exception) -> BackendError:
        import requests

        host = urlsplit(url).netloc
        if isinstance(error, requests.exceptions.SSLError):
            return BackendError(
                f"{doing}: {host} has a certificate that is not trusted",
                hint="if your company's proxy inspects TLS, set REQUESTS_CA_BUNDLE=its-ca.pem",
            )
        if isinstance(error, requests.exceptions.Timeout):
            what = "no answer in time"
        elif _is_refused(error):
            what = "nobody is there"
        else:
            what = "the connection broke"
        hint = "is the endpoint right, and the network there?"
        return BackendError(
            f"{doing}: {host}: {what}",
            hint="cloudjob emulator up" if self._site.origin == "emulator" else hint,
        )

    # -- who we are -----------------------------------------------------------------------------

    def project_id(self) -> str:
        """Return the project; asks for it where nobody has said it."""
        with self._lock:
            if not self._site.project_id:
                self._site = replace(self._site, project_id=self._ask_for_project())
            return self._site.project_id

    def _ask_for_project(self) -> str:
        region = self._site.region
        doing = f"asking for the project of {region or 'this endpoint'}"
        if not region:
            raise BackendError(doing, hint="set HUAWEICLOUD_SDK_PROJECT_ID, or HW_REGION_NAME")
        if self._has_token:
            # A token says for which project it is.
            self._new_token()
            return self._site.project_id
        asked = Asked("GET", f"{self._site.iam_endpoint}/v3/projects", (("name", region),))
        found = (self.exchange(asked, doing).json(doing) or {}).get("projects") or []
        for project in found:
            if project.get("name") == region:
                return str(project["id"])
        raise NotAuthorised(
            f"{doing}: this account has none of that name", hint="is the region right?"
        )

    def _proof(self, asked: Asked) -> dict[str, str]:
        """Return the headers of a request, with what proves who sends it."""
        now = self._clock() - self._ahead_s
        headers, keys = asked.headers, self._site.keys
        if keys is None or self._site.wants_token:
            return {**dict(headers), "X-Auth-Token": self._current_token()}
        if self._site.project_id:
            headers = (*headers, ("X-Project-Id", self._site.project_id))
        return signed(asked._replace(headers=headers), keys, now)

    def _renew(self) -> bool:
        """Look for other proof than that which was refused; say whether there is any."""
        if self._has_token:
            self._token_until = 0.0
            return True
        if abs(self._ahead_s) > 60:
            # The next one is signed by the service's own clock, which its answer has told us.
            return True
        fresh = sites.renewed(self._site)
        is_other = fresh is not None and fresh != self._site.keys
        if is_other:
            self._site = replace(self._site, keys=fresh)
        return is_other

    @property
    def _has_token(self) -> bool:
        """Whether a token says who we are, and not a signature."""
        return self._site.keys is None or self._site.wants_token

    def _current_token(self) -> str:
        if self._clock() >= self._token_until:
            self._new_token()
        return self._token

    def _new_token(self) -> None:
        """Ask IAM for a token, which is good for a day."""
        doing = "asking IAM for a token"
        project = (
            {"id": self._site.project_id} if self._site.project_id else {"name": self._site.region}
        )
        scope = {"project": project}
        auth = {"identity": self._identity(), "scope": scope}
        self._take_token(self._ask_for_token(auth, doing), doing)

    def _identity(self) -> dict[str, Any]:
        """Return what IAM gives a token for."""
        keys, login = self._site.keys, self._site.login
        if keys is not None:
            given = {"access": {"key": keys.access_key}, "secret": {"key": keys.secret_key}}
            return {"methods": ["hw_ak_sk"], "hw_ak_sk": given}
        assert login is not None, "a site has keys or a login"
        user = {"name": login.user, "password": login.password, "domain": {"name": login.domain}}
        return {"methods": ["password"], "password": {"user": user}}

    def _ask_for_token(self, auth: Mapping[str, Any], doing: str) -> Answer:
        import requests

        asked = Asked(
            "POST",
            f"{self._site.iam_endpoint}/v3/auth/tokens",
            headers=(("Content-Type", "application/json"),),
            body=json.dumps({"auth": auth}).encode("ascii"),
        )
        tries = self._tries()
        while True:
            try:
                answer = self._send(asked, dict(asked.headers))
            except requests.exceptions.RequestException as error:
                failure = self._unreachable(doing, asked.url, error)
                if tries.again(failure.message):
                    continue
                raise failure from error
            refusal = _refusal(answer)
            if refusal is None:
                return answer
            refused = refusals.error(doing, refusal)
            if refusal.status not in _MAY_PASS or not tries.again(refused.message, answer.headers):
                raise refused

    def _take_token(self, answer: Answer, doing: str) -> None:
        self._token = answer.headers.get("X-Subject-Token", "")
        if not self._token:
            raise BackendError(f"{doing}: the answer has none", hint="is the IAM endpoint right?")
        self._token_until = self._clock() + _TOKEN_LIFE_S
        said = (answer.json(doing) or {}).get("token") or {}
        project = str((said.get("project") or {}).get("id") or "")
        if project and not self._site.project_id:
            self._site = replace(self._site, project_id=project)

    def _look_at_clock(self, answer: Answer) -> None:
        if "Date" in answer.headers:
            self._ahead_s = self._ahead_of(answer)

    def _ahead_of(self, answer: Answer) -> float:
        """Return how far we are ahead of who answered; a minute or less is none."""
        said = email.utils.parsedate_tz(answer.headers.get("Date", ""))
        if said is None:
            return 0.0
        ahead_s = self._clock() - email.utils.mktime_tz(said)
        # The header has whole seconds, and the answer took its time.
        return ahead_s if abs(ahead_s) > 60 else 0.0

    # -- objects --------------------------------------------------------------------------------

    def fetch(self, url: str, first: int, doing: str) -> tuple[bytes, int] | None:
        """Return an object's bytes from ``first`` on and its size, by a URL that needs no proof.

        None when it is not there (yet).
        """
        tries = self._tries()
        asked = Asked("GET", url)
        while True:
            answer = self._fetched(asked, first, doing, tries)
            if answer is None:
                continue
            if answer.status in (404, 403):
                return None
            if answer.status == 416:
                return b"", first
            if answer.status == 206:
                return answer.body, _size(answer, first + len(answer.body))
            if answer.status == 200:
                return answer.body[first:], len(answer.body)
            found = f"{doing}: HTTP {answer.status}"
            if answer.status not in _MAY_PASS or not tries.again(found, answer.headers):
                raise BackendError(found)

    def _fetched(self, asked: Asked, first: int, doing: str, tries: Tries) -> Answer | None:
        import requests

        try:
            response = self._session(asked.url).get(
                asked.url,
                headers={"Range": f"bytes={first}-"} if first else {},
                timeout=(10.0, self._patience.answer_s),
            )
        except requests.exceptions.RequestException as error:
            failure = self._unreachable(doing, asked.url, error)
            if not tries.again(failure.message):
                raise failure from error
            return None
        return Answer(response.status_code, response.headers, response.content)

    def bucket(self, url: str, query: Query, region: str, doing: str) -> Answer:
        """Ask OBS something about a bucket, and return its answer, also when it refuses."""
        keys = self._site.keys
        if keys is None:
            raise NotAuthorised(f"{doing}: a token is no key of OBS", hint=sites.KEYS_HINT)
        asked = Asked("GET", url, query)
        answer = self._asked_bucket(asked, keys, region, 0.0, doing)
        # OBS has a clock of its own, and refuses what is far off it.
        ahead_s = self._ahead_of(answer)
        if answer.status == 403 and ahead_s:
            return self._asked_bucket(asked, keys, region, ahead_s, doing)
        return answer

    def _asked_bucket(
        self, asked: Asked, keys: Keys, region: str, ahead_s: float, doing: str
    ) -> Answer:
        import requests

        try:
            return self._send(
                asked, signed_for_bucket(asked, keys, region, self._clock() - ahead_s)
            )
        except requests.exceptions.RequestException as error:
            raise self._unreachable(doing, asked.url, error) from error


def _refusal(answer: Answer) -> Refusal | None:
    if answer.status < 400:
        return None
    return refusals.read(answer.status, answer.body, answer.headers.get("X-Request-Id", ""))


def _is_refused(error: Exception) -> bool:
    """Whether nobody listens there: then nothing was sent."""
    text = repr(error)
    return "NewConnectionError" in text or "NameResolutionError" in text


def _size(answer: Answer, default: int) -> int:
    total = answer.headers.get("Content-Range", "").rpartition("/")[2]
    return int(total) if total.isdecimal() else default

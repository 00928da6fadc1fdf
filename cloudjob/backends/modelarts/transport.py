"""Sends authenticated requests to Huawei Cloud, with retries."""

from __future__ import annotations

import email.utils
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import requests
from requests import PreparedRequest, Response, exceptions
from requests.adapters import HTTPAdapter
from urllib3.exceptions import NewConnectionError

from cloudjob.backends.modelarts import errors
from cloudjob.backends.modelarts import site as sites
from cloudjob.backends.modelarts.errors import ServiceError
from cloudjob.backends.modelarts.sign import sign
from cloudjob.backends.modelarts.site import Site
from cloudjob.errors import SOCKS, BackendError, CloudJobError, NotAuthorised, Unanswered
from cloudjob.installation import VERSION
from cloudjob.retries import RequestLimits, retried

# The service limits requests per minute, so a request is retried for longer than that.
LIMITS = RequestLimits(total_s=90.0)
# The service refuses a request whose date is more than 15 minutes off.
SKEW_LIMIT_S = 15 * 60.0
_CONNECT_S = 10.0
# Attempts to connect if nothing listens.
_CONNECTS = 4
_CONNECTIONS = 16
_TOKEN_LIFE_S = 20 * 3600.0
# The gateway answers 429 before anything is done.
_TOO_MANY = 429
_TRANSIENT_STATUSES = (_TOO_MANY, 500, 502, 503, 504)

_NETWORK = "is the endpoint right, and can this machine reach it?"
_PROXY = "are HTTPS_PROXY and NO_PROXY right?"
_TLS = "if your company's proxy inspects TLS, set REQUESTS_CA_BUNDLE=its-ca.pem"
# Error of requests -> what it means, what to try, and whether the request may have been sent.
_FAILURES: tuple[tuple[type[Exception], str, str, bool], ...] = (
    (exceptions.SSLError, "its certificate is not trusted", _TLS, False),
    (exceptions.ProxyError, "the proxy does not connect to it", _PROXY, False),
    # The address of each service is an http or https URL.
    (exceptions.InvalidSchema, *SOCKS, False),
    (exceptions.ConnectTimeout, "no connection in time", _NETWORK, False),
    (exceptions.Timeout, "no answer in time", _NETWORK, True),
    (exceptions.InvalidJSONError, "the request is not JSON", "check modelarts.body", False),
    (ValueError, "this is not a valid URL", _NETWORK, False),
    (Exception, "the connection broke", _NETWORK, True),
)


class NoAnswer(BackendError):
    """A request got no answer.

    Args:
        was_sent: Whether the service may have received it.
    """

    def __init__(self, message: str, *, hint: str, was_sent: bool) -> None:
        super().__init__(message, hint=hint)
        self.was_sent = was_sent


class Transport:
    """A connection to the services of one site; any number of threads may use it."""

    def __init__(self, site: Site, limits: RequestLimits, pause: Callable[[float], None]) -> None:
        self._site = site
        self._limits = limits
        self._pause = pause
        self._session = _session(site)
        self._lock = threading.RLock()
        self._token = ""
        self._token_until_s = 0.0
        self._ahead_s = 0.0

    @property
    def site(self) -> Site:
        """The services' endpoints, with the current project and keys."""
        return self._site

    @property
    def clock_ahead_s(self) -> float:
        """How far this machine's clock is ahead of the service's, by its last answer."""
        return self._ahead_s

    def send(
        self, method: str, url: str, doing: str, *, is_repeatable: bool = True, **options: Any
    ) -> Response:
        """Send a request, retry it until it is answered, and return the answer.

        Args:
            is_repeatable: Whether the request is idempotent.
            options: The options of ``requests``.

        Raises:
            ServiceError: The service refuses.
            Unanswered: The request is not repeatable, and may or may not have been carried out.
            BackendError: The service cannot be reached.
        """

        def pause_s(error: CloudJobError, tries: int) -> float | None:
            may_pass = _is_transient(error, tries) and (is_repeatable or not _may_be_done(error))
            return getattr(error, "retry_after_s", 0.0) if may_pass else None

        try:
            return retried(
                lambda: self._send_once(method, url, doing, **options),
                pause_s,
                self._limits,
                sleep=self._pause,
            )
        except (NoAnswer, ServiceError) as error:
            if is_repeatable or not _may_be_done(error):
                raise
            raise Unanswered(error.message, hint=error.hint) from error

    def _send_once(
        self, method: str, url: str, doing: str, *, auth: Any = None, **options: Any
    ) -> Response:
        limits = (_CONNECT_S, self._limits.answer_s)
        options = {"auth": auth or self._authorise, "timeout": limits, **options}
        options.setdefault("allow_redirects", False)
        signed_ahead_s = self._ahead_s
        try:
            answer = self._session.request(method, url, **options)
            if auth is None:
                self._compare_clocks(answer)
                if answer.status_code == requests.codes.unauthorized and self._renew(
                    was_corrected=bool(signed_ahead_s)
                ):
                    answer = self._session.request(method, url, **options)
        except requests.RequestException as error:
            raise self._no_answer(doing, url, error) from error
        if answer.status_code >= requests.codes.bad_request:
            raise errors.service_error(doing, answer)
        return answer

    def _no_answer(self, doing: str, url: str, error: requests.RequestException) -> NoAnswer:
        _, what, hint, was_sent = next(row for row in _FAILURES if isinstance(error, row[0]))
        reason = getattr(error.args[0], "reason", None) if error.args else None
        if isinstance(reason, NewConnectionError):
            what, was_sent = "nothing is listening there", False
        if self._site.origin == "emulator":
            hint = "cloudjob emulator up"
        message = f"{doing}: {urlsplit(url).netloc}: {what}"
        return NoAnswer(message, hint=hint, was_sent=was_sent)

    def _compare_clocks(self, answer: Response) -> None:
        date = email.utils.parsedate_tz(answer.headers.get("Date", ""))
        if date is not None:
            ahead_s = time.time() - email.utils.mktime_tz(date)
            # The header has whole seconds, and the answer took a moment.
            self._ahead_s = ahead_s if abs(ahead_s) > 60 else 0.0

    # -- authentication -------------------------------------------------------------------------

    def project_id(self) -> str:
        """Return the project; ask IAM for it if none is set."""
        with self._lock:
            if not self._site.project_id:
                self._site = replace(self._site, project_id=self._ask_for_project())
            return self._site.project_id

    def _ask_for_project(self) -> str:
        region = self._site.region
        doing = f"asking for the project of {region or 'this endpoint'}"
        if not region:
            raise BackendError(doing, hint="set HUAWEICLOUD_SDK_PROJECT_ID, or HW_REGION_NAME")
        if self._uses_token:
            # A token belongs to one project and comes with its id.
            self._current_token()
            return self._site.project_id
        url = f"{self._site.iam_endpoint}/v3/projects"
        answer = self.send("GET", url, doing, params={"name": region})
        for project in (value_of(answer, doing) or {}).get("projects") or []:
            if project.get("name") == region:
                return str(project["id"])
        raise NotAuthorised(
            f"{doing}: this account has no project of that name", hint="is the region right?"
        )

    def _authorise(self, request: PreparedRequest) -> PreparedRequest:
        """Add a token or a signature to a request."""
        keys = self._site.keys
        if keys is None or self._uses_token:
            request.headers["X-Auth-Token"] = self._current_token()
            return request
        if self._site.project_id:
            request.headers["X-Project-Id"] = self._site.project_id
        sign(request, keys, time.time() - self._ahead_s)
        return request

    def _renew(self, *, was_corrected: bool) -> bool:
        """Return whether a refused request can be repeated with a fresh token or signature.

        Args:
            was_corrected: Whether it was signed with another time than that of this machine.
        """
        if self._uses_token:
            self._token_until_s = 0.0
            return True
        if self._ahead_s or was_corrected:
            # The answer contains the service's time, with which the next request is signed; the
            # clocks may also agree now.
            return True
        keys = sites.renewed_keys(self._site)
        if keys is None or keys == self._site.keys:
            return False
        self._site = replace(self._site, keys=keys)
        return True

    @property
    def _uses_token(self) -> bool:
        """Whether requests carry a token instead of a signature."""
        return self._site.keys is None or self._site.wants_token

    def _current_token(self) -> str:
        with self._lock:
            if time.time() >= self._token_until_s:
                self._take_token()
            return self._token

    def _take_token(self) -> None:
        """Request a token from IAM, which is valid for a day."""
        doing = "asking IAM for a token"
        site = self._site
        project = {"id": site.project_id} if site.project_id else {"name": site.region}
        auth = {"identity": _identity(site), "scope": {"project": project}}
        url = f"{site.iam_endpoint}/v3/auth/tokens"
        answer = self.send("POST", url, doing, json={"auth": auth}, auth=unsigned)
        self._token = answer.headers.get("X-Subject-Token", "")
        if not self._token:
            raise BackendError(
                f"{doing}: the answer contains no token", hint="is the IAM endpoint right?"
            )
        self._token_until_s = time.time() + _TOKEN_LIFE_S
        token = (value_of(answer, doing) or {}).get("token") or {}
        project_id = str((token.get("project") or {}).get("id") or "")
        if project_id and not site.project_id:
            self._site = replace(site, project_id=project_id)


def unsigned(request: PreparedRequest) -> PreparedRequest:
    """Leave a request unsigned, even if ~/.netrc has a password for the host."""
    return request


def value_of(answer: Response, doing: str) -> Any:
    """Return the value of an answer; None for an empty one."""
    if not answer.content:
        return None
    try:
        return answer.json()
    except requests.JSONDecodeError as error:
        raise BackendError(
            f"{doing}: the answer is not JSON", hint="is this the endpoint of ModelArts?"
        ) from error


def _session(site: Site) -> requests.Session:
    session = requests.Session()
    session.mount("https://", HTTPAdapter(pool_maxsize=_CONNECTIONS))
    session.mount("http://", HTTPAdapter(pool_maxsize=_CONNECTIONS))
    session.headers["User-Agent"] = f"cloudjob/{VERSION}"
    # A company's proxy cannot reach an emulator on this machine.
    session.trust_env = not site.is_local
    return session


def _identity(site: Site) -> dict[str, Any]:
    """Return the identity in a request for a token."""
    if site.keys is not None:
        access, secret = {"key": site.keys.access_key}, {"key": site.keys.secret_key}
        return {"methods": ["hw_ak_sk"], "hw_ak_sk": {"access": access, "secret": secret}}
    login = site.login
    assert login is not None, "a site has keys or a login"
    user = {"name": login.user, "password": login.password, "domain": {"name": login.domain}}
    return {"methods": ["password"], "password": {"user": user}}


def _is_transient(error: CloudJobError, tries: int) -> bool:
    """Return whether another try may succeed."""
    if isinstance(error, NoAnswer):
        return error.was_sent or tries < _CONNECTS
    return isinstance(error, ServiceError) and error.status in _TRANSIENT_STATUSES


def _may_be_done(error: CloudJobError) -> bool:
    """Return whether the service may have carried out a request that failed with ``error``."""
    if isinstance(error, NoAnswer):
        return error.was_sent
    return isinstance(error, ServiceError) and error.status in _TRANSIENT_STATUSES[1:]

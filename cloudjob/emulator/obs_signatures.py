"""Verifies signatures of requests to OBS that SeaweedFS cannot verify itself.

SeaweedFS knows only the keys of users. Requests with a temporary key, and those whose target is
changed, are verified here and signed again with the user's own key.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import NamedTuple
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from cloudjob.emulator.auth import SKEW_S
from cloudjob.emulator.database import Database
from cloudjob.emulator.proxy import Message, Refusal
from cloudjob.emulator.state import Account, User
from jobentry.contract import sigv4
from jobentry.contract.sigv4 import Keys

_V4 = re.compile(
    r"AWS4-HMAC-SHA256 Credential=(?P<access>[^/]+)/(?P<scope>[^,]+), ?"
    r"SignedHeaders=(?P<names>[^,\s]+), ?Signature=(?P<text>[0-9a-f]+)\Z"
)
_V2 = re.compile(r"AWS (?P<access>[^: ]+):(?P<text>\S+)\Z")
_OBJECT_ACTIONS = {"GET": "GetObject", "HEAD": "GetObject", "DELETE": "DeleteObject"}
_BUCKET_ACTIONS = {"PUT": "CreateBucket", "DELETE": "DeleteBucket", "GET": "ListBucket"}
_TOKENS = ("x-amz-security-token", "x-obs-security-token")
# Parameters of a URL that carry its signature, in lower case.
_V4_PARAMETERS = (
    *("x-amz-algorithm", "x-amz-credential", "x-amz-date", "x-amz-expires"),
    *("x-amz-signedheaders", "x-amz-signature"),
)
_V2_PARAMETERS = ("awsaccesskeyid", "accesskeyid", "expires", "signature")
_PARAMETERS = (*_V4_PARAMETERS, *_V2_PARAMETERS, *_TOKENS)
_CHUNKED = (b"content-encoding", b"aws-chunked")
_EXPIRED = Refusal(403, "AccessDenied", "Request has expired.")
_FORM = Refusal(403, "AccessDenied", "Forms are refused if not every user may write here.")
_MISMATCH = Refusal(403, "SignatureDoesNotMatch", "The request signature does not match.")
_UNSIGNED = Refusal(403, "AccessDenied", "There are headers that are not signed.")
_UNREADABLE = Refusal(403, "AccessDenied", "The signature of the request cannot be read.")


class _Signature(NamedTuple):
    """A signature, from the headers or from the URL.

    Args:
        scope: Date, region and service in version 4; empty in version 2.
        names: The headers that version 4 covers.
        moment: The time that the signature covers.
        begin_s: The start of its validity.
    """

    access: str
    text: str
    scope: str
    names: tuple[str, ...]
    moment: str
    begin_s: float
    end_s: float
    is_url: bool


class ObsSignatures:
    """Verifies and replaces signatures.

    Args:
        clock: The time of the service, in seconds since the epoch.
    """

    def __init__(self, account: Account, database: Database, clock: Callable[[], float]) -> None:
        self._account = account
        self._database = database
        self._clock = clock

    def sign_again(self, given: Message, sent: Message) -> Message | Refusal:
        """Return the request to pass on in place of the given one."""
        try:
            found = _signature_of(given)
        except (KeyError, OverflowError, TypeError, ValueError):
            return _UNREADABLE
        if found is None:
            return self._unsigned(given, sent)
        key = self._database.key(found.access)
        user = self._account.user(key.user) if key else self._account.user_of_key(found.access)
        if user is None:
            return sent
        forbidden = _forbidden(given, user)
        if forbidden:
            return Refusal(403, "AccessDenied", f"The user lacks the permission {forbidden}.")
        if key is None and sent == given:
            return sent
        secret = key.secret if key else user.keys.secret_key
        refusal = self._check_token(given, key.token, key.expires_s) if key else None
        refusal = refusal or self._check(found, secret, given)
        return refusal or _signed(found, user.keys, sent)

    def _unsigned(self, given: Message, sent: Message) -> Message | Refusal:
        # The key of a form is in its unread body, so a POST is refused if any user may not send it.
        if given.method == "POST" and any(_forbidden(given, user) for user in self._account.users):
            return _FORM
        return sent

    def _check_token(self, given: Message, token: str, expires_s: float) -> Refusal | None:
        values = {**_query(given.target), **given.values()}
        if next((values[name] for name in _TOKENS if name in values), "") != token:
            return Refusal(403, "InvalidToken", "The provided token is malformed or invalid.")
        if expires_s <= self._clock():
            return Refusal(403, "ExpiredToken", "The provided token has expired.")
        return None

    def _check(self, found: _Signature, secret: str, given: Message) -> Refusal | None:
        if not found.begin_s <= self._clock() <= found.end_s:
            return _EXPIRED
        if found.scope and any(_needs_signature(name, found) for name in given.values()):
            return _UNSIGNED
        expected = [_v4(found, secret, given)] if found.scope else _v2(found, secret, given)
        is_right = any(
            secrets.compare_digest(text.encode(), found.text.encode("utf-8", "surrogateescape"))
            for text in expected
        )
        return None if is_right else _MISMATCH


def _needs_signature(header: str, found: _Signature) -> bool:
    is_of_s3 = header.startswith("x-amz-") and header != "x-amz-content-sha256"
    return is_of_s3 and header not in found.names


def _query(target: str) -> dict[str, str]:
    """Return the query parameters by name in lower case; a repeated name has its last value."""
    pairs = parse_qsl(target.partition("?")[2], keep_blank_values=True)
    return {name.lower(): value for name, value in pairs}


def _signature_of(given: Message) -> _Signature | None:
    """Return the signature of a request; None if it has none.

    Raises:
        ValueError, KeyError, TypeError, OverflowError: It cannot be parsed, or there are two.
    """
    values, query = given.values(), _query(given.target)
    signed = [name for name in ("x-amz-signature", "signature") if name in query]
    authorization = values.get("authorization")
    if authorization is None and not signed:
        return None
    if authorization is None:
        (name,) = signed
        return _v4_of_url(query) if name == "x-amz-signature" else _v2_of_url(query)
    found = _V4.match(authorization) or _V2.match(authorization)
    if found is None or signed:
        raise ValueError(authorization)
    moment = values.get("x-amz-date") or values.get("date", "")
    at_s = _seconds(moment)
    scope, names = "", ()
    if found.re is _V4:
        scope, names = found["scope"], tuple(found["names"].split(";"))
        moment = time.strftime(sigv4.MOMENT, time.gmtime(at_s))
    times = (moment, at_s - SKEW_S, at_s + SKEW_S)
    return _Signature(found["access"], found["text"], scope, names, *times, is_url=False)


def _v4_of_url(query: dict[str, str]) -> _Signature:
    access, _, scope = query["x-amz-credential"].partition("/")
    names = tuple(query["x-amz-signedheaders"].split(";"))
    moment = query["x-amz-date"]
    at_s, life_s = _seconds(moment), int(query["x-amz-expires"])
    times = (moment, at_s - SKEW_S, at_s + life_s)
    return _Signature(access, query["x-amz-signature"], scope, names, *times, is_url=True)


def _v2_of_url(query: dict[str, str]) -> _Signature:
    access = query.get("awsaccesskeyid") or query["accesskeyid"]
    moment = query["expires"]
    return _Signature(access, query["signature"], "", (), moment, 0, int(moment), is_url=True)


def _seconds(moment: str) -> float:
    if moment[8:9] == "T":
        return datetime.strptime(moment, sigv4.MOMENT).replace(tzinfo=timezone.utc).timestamp()
    return parsedate_to_datetime(moment).timestamp()


def _forbidden(given: Message, user: User) -> str:
    """Return the action of a request that its user may not perform; empty for none."""
    return next((name for name, bucket in _actions(given) if not user.may(name, bucket)), "")


def _actions(given: Message) -> Iterator[tuple[str, str]]:
    """Yield each action that the user of a request needs permission for, and its bucket."""
    bucket, _, key = unquote(given.target.partition("?")[0]).lstrip("/").partition("/")
    query = _query(given.target)
    if not key:
        name = _BUCKET_ACTIONS.get(given.method, "")
        if given.method == "POST":
            yield f"obs:object:{'DeleteObject' if 'delete' in query else 'PutObject'}", bucket
        elif bucket and name:
            yield f"obs:bucket:{name}", bucket
        return
    is_part = given.method == "DELETE" and ("uploadid" in query or "tagging" in query)
    name = "PutObject" if is_part else _OBJECT_ACTIONS.get(given.method, "PutObject")
    yield f"obs:object:{name}", bucket
    for header, value in given.values().items():
        if header.endswith("-copy-source"):
            yield "obs:object:GetObject", unquote(value).lstrip("/").partition("/")[0]


def _signed(found: _Signature, keys: Keys, sent: Message) -> Message:
    """Return a request without its signature and security tokens, signed by its user."""
    payload = sent.values().get("x-amz-content-sha256", sigv4.UNSIGNED)
    if payload.startswith("STREAMING-"):
        # The signature of each chunk depends on that of the headers, which is replaced here.
        # SeaweedFS would also store the content coding.
        payload = "STREAMING-UNSIGNED-PAYLOAD-TRAILER"
        sent = sent._replace(headers=[item for item in sent.headers if item != _CHUNKED])
    path, _, query = sent.target.partition("?")
    pairs = [
        (name, value)
        for name, value in parse_qsl(query, keep_blank_values=True)
        if not found.is_url or name.lower() not in _PARAMETERS
    ]
    path = quote(unquote(path), safe="/~")
    # SeaweedFS refuses unsigned S3 headers.
    signed = {
        name: value
        for name, value in sent.values().items()
        if name == "host" or (name.startswith("x-amz-") and name not in _TOKENS)
    }
    scope = sigv4.Scope("obs", time.strftime(sigv4.MOMENT, time.gmtime()))
    made = sigv4.headers(sigv4.Request(sent.method, path, pairs, signed), keys, scope, payload)
    replaced = (*made, "date", *_TOKENS)
    headers = [item for item in sent.headers if item[0].decode("latin-1") not in replaced]
    headers += [(name.encode(), value.encode("latin-1")) for name, value in made.items()]
    target = path + ("?" + sigv4.query_text(pairs) if pairs else "")
    return Message(sent.method, target, headers)


def _v4(found: _Signature, secret: str, given: Message) -> str:
    """Return the signature that botocore computes."""
    from botocore.auth import S3SigV4Auth, S3SigV4QueryAuth
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    _, region, service, _ = found.scope.split("/")
    values = given.values()
    path, mark, query = given.target.partition("?")
    # Clients may percent-encode other characters in the request than in the signed text.
    pairs = [
        "=".join(quote(unquote(part), safe="~") for part in pair.split("=", 1))
        for pair in query.split("&")
        if not (found.is_url and unquote(pair).lower().startswith("x-amz-signature="))
    ]
    url = f"http://obs{quote(unquote(path), safe='/~')}{mark}{'&'.join(pairs)}"
    signed = {name: values[name] for name in found.names if name in values}
    request = AWSRequest(given.method, url, signed)
    request.context["timestamp"] = found.moment
    signer = S3SigV4QueryAuth if found.is_url else S3SigV4Auth
    v4 = signer(Credentials("-", secret), service, region)
    return str(v4.signature(v4.string_to_sign(request, v4.canonical_request(request)), request))


def _v2(found: _Signature, secret: str, given: Message) -> list[str]:
    """Return the signatures that clients compute, with URL tokens as headers or in the query."""
    from botocore.auth import HmacV1Auth
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    signer = HmacV1Auth(Credentials("-", secret))
    values, query = given.values(), _query(given.target)
    tokens = {name: query[name] for name in _TOKENS if name in query}
    # The date of the request; empty if the request has the header x-amz-date.
    is_dated = "x-amz-date" in values and not found.is_url
    signer._get_date = lambda: "" if is_dated else found.moment
    found_of = []
    for more, known in ((tokens, ()), ({}, _TOKENS)):
        signer.QSAOfInterest = [*HmacV1Auth.QSAOfInterest, *known]
        headers = AWSRequest(given.method, "http://obs", {**values, **more}).headers
        found_of.append(signer.get_signature(given.method, urlsplit(given.target), headers))
    return found_of

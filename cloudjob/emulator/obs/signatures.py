"""Finds the user who signed a request to OBS, and checks the signature and its permissions."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import NamedTuple
from urllib.parse import SplitResult

from cloudjob.emulator.auth import SKEW_S, Credential, credential
from cloudjob.emulator.database import Database
from cloudjob.emulator.obs.body import ChunkKey
from cloudjob.emulator.obs.request import (
    OF_SIGNATURE,
    PAYLOAD,
    SIGNATURES,
    SIGNED_CHUNKS,
    TOKENS,
    Message,
    ObsRequest,
    Refused,
)
from cloudjob.emulator.state import Account, User
from jobentry.contract import sigv4

_ALGORITHM = "AWS4-HMAC-SHA256"
_V4 = re.compile(
    _ALGORITHM + r" Credential=(?P<access>[^/,\s]+)/(?P<scope>[^,\s]+), ?"
    r"SignedHeaders=(?P<names>[^,\s]+), ?Signature=(?P<text>[0-9a-f]+)\Z"
)
_V2 = re.compile(r"AWS (?P<access>[^: ]+):(?P<text>\S+)\Z")
_UNREADABLE = "The signature of the request cannot be read."
# What a URL with a signature of version 4 must have, and how long it may be valid.
_OF_V4_URL = {
    *("x-amz-algorithm", "x-amz-credential", "x-amz-date", "x-amz-expires"),
    *("x-amz-signature", "x-amz-signedheaders"),
}
_LIFE, _LONGEST_LIFE_S = re.compile(r"[0-9]{1,6}\Z"), 7 * 24 * 3600


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


class Requester(NamedTuple):
    """Who signed a request.

    Args:
        chunk_key: What signs the chunks of its body; None for another kind of body.
    """

    user: User
    chunk_key: ChunkKey | None


class ObsSignatures:
    """Verifies signatures.

    Args:
        clock: The time of the service, in seconds since the epoch.
    """

    def __init__(self, account: Account, database: Database, clock: Callable[[], float]) -> None:
        self._account = account
        self._database = database
        self._clock = clock

    def signer(self, message: Message) -> Requester:
        """Return who signed a request.

        Raises:
            Refused: Nobody did, or the signature is wrong.
        """
        try:
            signature = _signature_of(message)
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            raise _denied(_UNREADABLE) from error
        owner = credential(self._account, self._database, signature.access)
        if owner is None:
            raise Refused(403, "InvalidAccessKeyId", "The access key does not exist.")
        if owner.token:
            self._check_token(message, owner)
        self._check(signature, owner.secret, message)
        return Requester(owner.user, _chunk_key(signature, owner.secret, message))

    def _check_token(self, message: Message, owner: Credential) -> None:
        values = {**message.parameters(), **message.headers}
        token = next((values[name] for name in TOKENS if name in values), "")
        if not secrets.compare_digest(token.encode(), owner.token.encode()):
            raise Refused(403, "InvalidToken", "The provided token is malformed or invalid.")
        if owner.expires_s <= self._clock():
            raise Refused(403, "ExpiredToken", "The provided token has expired.")

    def _check(self, signature: _Signature, secret: str, message: Message) -> None:
        if not signature.begin_s <= self._clock() <= signature.end_s:
            raise _denied("Request has expired.")
        if signature.scope and any(_needs_signature(name, signature) for name in message.headers):
            raise _denied("There are headers that are not signed.")
        if signature.scope and not signature.is_url and PAYLOAD not in message.headers:
            # Such a signature is that of an empty body, whatever the body is.
            raise Refused(400, "InvalidRequest", f"The header {PAYLOAD} is missing.")
        expected = (
            [_v4(signature, secret, message)]
            if signature.scope
            else _v2(signature, secret, message)
        )
        if not any(_is_same(text, signature.text) for text in expected):
            raise Refused(403, "SignatureDoesNotMatch", "The request signature does not match.")


def check_permission(request: ObsRequest, user: User) -> None:
    """Check that a user may do what a request asks for.

    Raises:
        Refused: The user lacks a permission.
    """
    for action, bucket in request.actions:
        if not user.may(action, bucket):
            raise _denied(f"The user lacks the permission {action}.")


def _is_same(text: str, sent: str) -> bool:
    return secrets.compare_digest(text.encode(), sent.encode())


def _needs_signature(header: str, signature: _Signature) -> bool:
    # A URL is signed without a body, so its client may add the digest.
    is_of_s3 = header.startswith("x-amz-") and not (signature.is_url and header == PAYLOAD)
    return (is_of_s3 or header == "host") and header not in signature.names


def _signature_of(message: Message) -> _Signature:
    """Return the signature of a request.

    Raises:
        Refused: It has none.
        ValueError, KeyError, TypeError, OverflowError: It cannot be parsed, or there are two.
    """
    query, authorization = message.parameters(), message.headers.get("authorization")
    in_url = [name for name in SIGNATURES if name in query]
    if authorization is None and not in_url:
        raise _denied("The request is not signed.")
    if authorization is None:
        (name,) = in_url
        return _v4_of_url(query) if name == "x-amz-signature" else _v2_of_url(query)
    match = _V4.match(authorization) or _V2.match(authorization)
    if match is None or not OF_SIGNATURE.isdisjoint(query):
        raise ValueError(authorization)
    moment = message.headers.get("x-amz-date") or message.headers.get("date", "")
    at_s = _seconds(moment)
    scope, names = "", ()
    if match.re is _V4:
        scope, names = match["scope"], tuple(match["names"].split(";"))
        moment = time.strftime(sigv4.MOMENT, time.gmtime(at_s))
    times = (moment, at_s - SKEW_S, at_s + SKEW_S)
    return _Signature(match["access"], match["text"], scope, names, *times, is_url=False)


def _v4_of_url(query: dict[str, str]) -> _Signature:
    if not query.keys() >= _OF_V4_URL or query["x-amz-algorithm"] != _ALGORITHM:
        raise _invalid_url(f"It needs {', '.join(sorted(_OF_V4_URL))}, with {_ALGORITHM}.")
    life = query["x-amz-expires"]
    if not _LIFE.match(life) or int(life) > _LONGEST_LIFE_S:
        raise _invalid_url(f"x-amz-expires must be a number of seconds up to {_LONGEST_LIFE_S}.")
    access, _, scope = query["x-amz-credential"].partition("/")
    names = tuple(query["x-amz-signedheaders"].split(";"))
    moment = query["x-amz-date"]
    at_s = _seconds(moment)
    times = (moment, at_s - SKEW_S, at_s + int(life))
    return _Signature(access, query["x-amz-signature"], scope, names, *times, is_url=True)


def _v2_of_url(query: dict[str, str]) -> _Signature:
    access = query.get("awsaccesskeyid") or query["accesskeyid"]
    moment = query["expires"]
    return _Signature(access, query["signature"], "", (), moment, 0, int(moment), is_url=True)


def _seconds(moment: str) -> float:
    if moment[8:9] == "T":
        return datetime.strptime(moment, sigv4.MOMENT).replace(tzinfo=timezone.utc).timestamp()
    return parsedate_to_datetime(moment).timestamp()


def _chunk_key(signature: _Signature, secret: str, message: Message) -> ChunkKey | None:
    """Return what signs the chunks of a body; None for another kind of body.

    Raises:
        Refused: The signature of the request cannot cover chunks.
    """
    if not message.headers.get(PAYLOAD, "").startswith(SIGNED_CHUNKS):
        return None
    if signature.is_url or not signature.scope:
        raise _denied("Signed chunks need a signature of version 4 in the headers.")
    key = sigv4.signing_key(secret, signature.scope)
    return ChunkKey(key, signature.text, signature.moment, signature.scope)


def _v4(signature: _Signature, secret: str, message: Message) -> str:
    """Return the signature that botocore computes.

    Raises:
        Refused: The scope is not that of a signature.
    """
    from botocore.auth import S3SigV4Auth, S3SigV4QueryAuth
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    parts = signature.scope.split("/")
    if len(parts) != 4 or parts[3] != "aws4_request" or parts[0] != signature.moment[:8]:
        raise _denied(_UNREADABLE)
    # Clients may percent-encode other characters in the request than in the signed text.
    pairs = [
        f"{sigv4.encoded(name)}={sigv4.encoded(value)}"
        for name, value in message.query
        if not (signature.is_url and name.lower() == "x-amz-signature")
    ]
    mark = "?" if pairs else ""
    url = f"http://obs{sigv4.encoded(message.path, safe='/')}{mark}{'&'.join(pairs)}"
    signed = {name: message.headers[name] for name in signature.names if name in message.headers}
    request = AWSRequest(message.method, url, signed)
    request.context["timestamp"] = signature.moment
    signer = S3SigV4QueryAuth if signature.is_url else S3SigV4Auth
    v4 = signer(Credentials("-", secret), parts[2], parts[1])
    return str(v4.signature(v4.string_to_sign(request, v4.canonical_request(request)), request))


def _v2(signature: _Signature, secret: str, message: Message) -> list[str]:
    """Return the signatures that clients compute, with URL tokens as headers or in the query."""
    from botocore.auth import HmacV1Auth
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    signer = HmacV1Auth(Credentials("-", secret))
    values, query = message.headers, message.parameters()
    tokens = {name: query[name] for name in TOKENS if name in query}
    # The date of the request; empty if the request has the header x-amz-date.
    is_dated = "x-amz-date" in values and not signature.is_url
    signer._get_date = lambda: "" if is_dated else signature.moment
    path = message.target.partition("?")[0]
    # Built from what was read: in the target, `%61cl` and `#` would hide parameters and names.
    pairs = (
        sigv4.encoded(name) + (f"={sigv4.encoded(value)}" if value else "")
        for name, value in message.query
    )
    url = SplitResult("", "", path, "&".join(pairs), "")
    # Some clients sign the path of a bucket with a slash and send it without.
    paths = (path,) if "/" in path[1:] else (path, path + "/")
    expected = []
    for more, more_names in ((tokens, ()), ({}, TOKENS)):
        signer.QSAOfInterest = [*HmacV1Auth.QSAOfInterest, *more_names]
        headers = AWSRequest(message.method, "http://obs", {**values, **more}).headers
        expected += [
            signer.get_signature(message.method, url, headers, auth_path=path) for path in paths
        ]
    return expected


def _invalid_url(message: str) -> Refused:
    return Refused(400, "AuthorizationQueryParametersError", message)


def _denied(message: str) -> Refused:
    return Refused(403, "AccessDenied", message)

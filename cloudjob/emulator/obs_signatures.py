"""Signatures of requests to OBS that SeaweedFS cannot verify itself.

SeaweedFS knows only the keys of users. Requests with a temporary key, and those whose target we
change, are verified here and signed again with the user's own key.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from urllib.parse import quote, unquote, urlsplit

from cloudjob.emulator.database import Database
from cloudjob.emulator.proxy import Headers, Message, Refusal
from cloudjob.emulator.state import Account
from jobentry.contract import sigv4
from jobentry.contract.sigv4 import Keys

_V4 = re.compile(
    r"AWS4-HMAC-SHA256 Credential=(?P<access>[^/]+)/(?P<date>[^/]+)/(?P<region>[^/]+)"
    r"/(?P<service>[^/]+)/aws4_request, ?SignedHeaders=(?P<names>[^,\s]+), ?"
    r"Signature=(?P<signature>[0-9a-f]+)\Z"
)
_V2 = re.compile(r"AWS (?P<access>[^: ]+):(?P<signature>\S+)\Z")
_IN_QUERY = re.compile(r"[?&](X-Amz-)?Signature=", re.IGNORECASE)
# The access key of a request: in a header of either version, or in a URL.
_ACCESS = re.compile(
    r"Credential=(?P<v4>[^/%&]+)|\bA\w+ (?P<v2>[^: ]+):|AccessKeyId=(?P<url>[^&]+)"
)
_OF_OBJECTS = {"GET": "GetObject", "HEAD": "GetObject", "DELETE": "DeleteObject"}
_OF_BUCKETS = {"PUT": "CreateBucket", "DELETE": "DeleteBucket", "GET": "ListBucket"}
_TOKENS = ("x-amz-security-token", "x-obs-security-token")
# Each chunk of such a body is signed with the key that signs the headers.
_SIGNED_CHUNKS = "STREAMING-AWS4-HMAC-SHA256"


class ObsSignatures:
    """Verifies and replaces signatures.

    Args:
        clock: Seconds since the epoch, as the service sees it.
    """

    def __init__(self, account: Account, database: Database, clock: Callable[[], float]) -> None:
        self._account = account
        self._database = database
        self._clock = clock

    def sign_again(self, given: Message, sent: Message) -> Headers | Refusal:
        """Return the headers of the request that is sent on, in place of the given one."""
        authorization = given.values().get("authorization", "")
        forbidden = self._forbidden(given, authorization or given.target)
        if forbidden:
            return Refusal(0, 403, "AccessDenied", f"The user lacks the permission {forbidden}.")
        found = _V4.match(authorization) or _V2.match(authorization)
        if found is None:
            if sent != given and _IN_QUERY.search(given.target):
                return Refusal(0, 501, "NotImplemented", "A URL with a signature for such a key.")
            return sent.headers
        key = self._database.key(found["access"])
        if key is None and sent == given:
            return sent.headers
        user = self._account.user(key.user) if key else self._account.user_of_key(found["access"])
        if user is None:
            return sent.headers
        secret = key.secret if key else user.keys.secret_key
        refusal = self._check_token(given, key.token, key.expires_s) if key else None
        refusal = refusal or _check(found, secret, given)
        return refusal or _signed(found, user.keys, sent)

    def _forbidden(self, given: Message, signed: str) -> str:
        """Return the action that the user of a request may not do; empty for none."""
        found = _ACCESS.search(signed)
        if found is None:
            return ""
        access = unquote(found[found.lastgroup or 0])
        key = self._database.key(access)
        user = self._account.user(key.user) if key else self._account.user_of_key(access)
        if user is None:
            return ""
        return next((action for action in _actions(given) if not user.may(action)), "")

    def _check_token(self, given: Message, token: str, expires_s: float) -> Refusal | None:
        values = given.values()
        if next((values[name] for name in _TOKENS if name in values), "") != token:
            return Refusal(0, 403, "InvalidToken", "The provided token is malformed or invalid.")
        if expires_s <= self._clock():
            return Refusal(0, 403, "ExpiredToken", "The provided token has expired.")
        return None


def _actions(given: Message) -> list[str]:
    """Return what the user of a request must be allowed to do."""
    path, _, query = given.target.partition("?")
    bucket, _, key = path.lstrip("/").partition("/")
    names = [pair.partition("=")[0] for pair in query.split("&")]
    if key:
        is_part = "uploadId" in names or "tagging" in names
        name = "" if is_part and given.method == "DELETE" else _OF_OBJECTS.get(given.method, "")
        is_copy = any("-copy-source" in header for header in given.values())
        return [f"obs:object:{name or 'PutObject'}"] + ["obs:object:GetObject"] * is_copy
    if given.method == "POST":
        return ["obs:object:DeleteObject"] if "delete" in names else []
    name = _OF_BUCKETS.get(given.method, "")
    return [f"obs:bucket:{name}"] if bucket and name else []


def _check(found: re.Match[str], secret: str, given: Message) -> Refusal | None:
    if given.values().get("x-amz-content-sha256", "").startswith(_SIGNED_CHUNKS):
        return Refusal(0, 501, "NotImplemented", "Signed chunks with such a key.")
    if secrets.compare_digest(_signature(found, secret, given), found["signature"]):
        return None
    return Refusal(0, 403, "SignatureDoesNotMatch", "The request signature does not match.")


def _signed(found: re.Match[str], keys: Keys, sent: Message) -> Headers:
    """Return the headers without security tokens, signed with the keys of a user."""
    left = [(name, value) for name, value in sent.headers if name.decode("latin-1") not in _TOKENS]
    text = f"AWS {keys.access_key}:"
    if found.re is _V4:
        known = {name.decode("latin-1") for name, _ in left}
        names = [name for name in found["names"].split(";") if name in known]
        text = (
            f"AWS4-HMAC-SHA256 Credential={keys.access_key}/{found['date']}/{found['region']}"
            f"/{found['service']}/aws4_request, SignedHeaders={';'.join(names)}, Signature="
        )
    text += _signature(found, keys.secret_key, sent._replace(headers=left))
    return [
        (name, text.encode("latin-1") if name == b"authorization" else value)
        for name, value in left
    ]


def _signature(found: re.Match[str], secret: str, message: Message) -> str:
    """Return the signature that botocore makes, of the same version and scope."""
    from botocore.auth import HmacV1Auth, S3SigV4Auth
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    method, target, _ = message
    values, credentials = message.values(), Credentials("-", secret)
    path, mark, query = target.partition("?")
    if found.re is _V2:
        headers = AWSRequest(method, "http://obs", values).headers
        signer = HmacV1Auth(credentials)
        # The date is that of the request, or none beside x-amz-date.
        signer._get_date = lambda: "" if "x-amz-date" in values else values.get("date", "")
        return str(signer.get_signature(method, urlsplit(target), headers))
    names = found["names"].split(";")
    signed = {name: values[name] for name in names if name in values}
    # Clients may send other characters encoded than those that are encoded for the signature.
    pairs = [
        "=".join(quote(unquote(word), safe="~") for word in pair.split("=", 1))
        for pair in query.split("&")
    ]
    url = f"http://obs{quote(unquote(path), safe='/~')}{mark}{'&'.join(pairs)}"
    request = AWSRequest(method, url, signed)
    request.context["timestamp"] = values.get("x-amz-date") or _moment(values.get("date", ""))
    v4 = S3SigV4Auth(credentials, found["service"], found["region"])
    return str(v4.signature(v4.string_to_sign(request, v4.canonical_request(request)), request))


def _moment(date: str) -> str:
    """Return a header's date as signatures have it."""
    try:
        return parsedate_to_datetime(date).strftime(sigv4.MOMENT)
    except ValueError:
        return ""

"""The signature of a request, against the vendor's own signer."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from cloudjob.emulator import signing

SECRET = "secret/+key"
# The vendor's signer in a process of its own: its import leaves warnings behind.
_VENDOR = """
import json, sys
from huaweicloudsdkcore.auth.credentials import BasicCredentials
from huaweicloudsdkcore.sdk_request import SdkRequest
from huaweicloudsdkcore.signer.signer import Signer
made = []
for method, path, query, headers, body in json.load(sys.stdin):
    request = SdkRequest(
        method=method, schema="http", host="127.0.0.1:1", resource_path=path,
        query_params=[tuple(pair) for pair in query], header_params=dict(headers), body=body,
    )
    signed = Signer(BasicCredentials("access", "secret/+key", "p")).sign(request)
    made.append([signed.uri, dict(signed.header_params)])
print(json.dumps(made))
"""
_JSON = {"Content-Type": "application/json"}
CASES = [
    ("GET", "/v2/p/training-jobs/1", [], {}, ""),
    ("GET", "/v2/p/training-job-flavors", [["flavor_type", "CPU"]], _JSON, ""),
    ("GET", "/v2/p/a b/ü~", [["b", "ü &=+"], ["a", "x"], ["a-b", "~"], ["empty", ""]], _JSON, ""),
    ("POST", "/v2/p/training-jobs", [], {**_JSON, "X-Project-Id": "p"}, '{"name": "jü"}'),
    ("POST", "/v2/p/x/", [], {"Content-Type": "text/plain"}, "not signed"),
    ("PUT", "/v2/p/x", [], {**_JSON, "X-Security-Token": " t ", "with_underscore": "1"}, "{}"),
]


@pytest.fixture(scope="module")
def vendor() -> list[tuple[str, dict[str, str]]]:
    """What the vendor's signer makes of the cases: target and headers."""
    done = subprocess.run(
        [sys.executable, "-c", _VENDOR],
        input=json.dumps(CASES),
        capture_output=True,
        text=True,
        check=True,
    )
    return [(target, headers) for target, headers in json.loads(done.stdout)]


@pytest.mark.parametrize("index", range(len(CASES)))
def test_what_the_vendor_signs_is_valid(index: int, vendor: list[tuple[str, dict[str, str]]]):
    """The target as it goes over the wire, with the headers as they are sent."""
    method, _, _, _, body = CASES[index]
    target, headers = vendor[index]
    known = {name.lower(): value for name, value in headers.items()}
    signed = signing.parse(known["authorization"])
    text = signing.Text(method, target, known, body.encode())

    assert signed is not None
    assert signed.access == "access"
    assert signing.is_valid(text, signed, SECRET)


@pytest.mark.parametrize(
    "change",
    [
        {"method": "PUT"},
        {"target": "/v2/p/x/training-jobs"},
        {"target": "/v2/p/training-jobs?a=1"},
        {"body": b'{"name": "other"}'},
        {"headers": {"x-project-id": "other"}},
        {"headers": {"host": "other"}},
        {"headers": {"x-sdk-date": "20000101T000000Z"}},
    ],
    ids=str,
)
def test_a_changed_request_is_not(change: dict[str, object], vendor):
    """Method, target, signed headers and body: each of them is signed."""
    method, _, _, _, body = CASES[3]
    target, headers = vendor[3]
    known = {name.lower(): value for name, value in headers.items()}
    signed = signing.parse(known["authorization"])
    values = {"method": method, "target": target, "headers": known, "body": body.encode()}
    more = change.pop("headers", {})
    values.update(change)
    values["headers"] = {**known, **more}

    assert signed is not None
    assert not signing.is_valid(signing.Text(**values), signed, SECRET)


def test_a_wrong_secret_is_not():
    """Whoever does not have it cannot sign."""
    text = signing.Text("GET", "/x", {"host": "h", "x-sdk-date": "20260101T000000Z"}, b"")
    names = ("host", "x-sdk-date")
    made = signing.Signed("a", names, signing.signature(text, names, SECRET))

    assert signing.is_valid(text, made, SECRET)
    assert not signing.is_valid(text, made, SECRET + "x")


def test_a_digest_that_is_not_the_bodys_is_refused():
    """A client may say the digest itself; it must be true."""
    known = {"host": "h", "x-sdk-date": "20260101T000000Z", "x-sdk-content-sha256": "0" * 64}
    text = signing.Text("POST", "/x", known, b"body")
    names = tuple(sorted(known))
    made = signing.Signed("a", names, signing.signature(text, names, SECRET))

    assert not signing.is_valid(text, made, SECRET)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Bearer x",
        "SDK-HMAC-SHA256 Access=a",
        "SDK-HMAC-SHA256 Access=a, SignedHeaders=host, Signature=short",
        "V11-HMAC-SHA256 Credential=a, SignedHeaders=host, Signature=" + "0" * 64,
    ],
)
def test_other_authorizations_are_none_of_ours(text: str):
    """They are refused as what they are, not taken for a wrong signature."""
    assert signing.parse(text) is None

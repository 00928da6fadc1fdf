"""Our signature of a request is the one that botocore makes of it."""

from __future__ import annotations

import time
from typing import Any

from botocore.auth import UNSIGNED_PAYLOAD, S3SigV4Auth
from botocore.awsrequest import AWSRequest
from hypothesis import given
from hypothesis import strategies as st

from cloudjob.store.s3 import place, sign
from cloudjob.store.s3.keys import Keys

AT_S = 1_780_000_000.0
TEXT = st.text(st.characters(exclude_categories=("C",)), min_size=1, max_size=12)
VALUE = st.text(st.characters(codec="ascii", exclude_categories=("C",)), max_size=20)


class Judge(S3SigV4Auth):  # type: ignore[misc]  # botocore has no types
    """botocore's signer of S3, for bodies that are not signed, at a moment that is known."""

    def payload(self, _request: Any) -> str:
        return str(UNSIGNED_PAYLOAD)

    def _modify_request_before_signing(self, request: Any) -> None:
        super()._modify_request_before_signing(request)
        request.context["timestamp"] = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(AT_S))
        del request.headers["X-Amz-Date"]
        request.headers["X-Amz-Date"] = request.context["timestamp"]


@given(
    method=st.sampled_from(["GET", "PUT", "POST", "DELETE", "HEAD"]),
    key=TEXT,
    query=st.dictionaries(TEXT, st.text(st.characters(exclude_categories=("C",)), max_size=9)),
    headers=st.dictionaries(
        st.sampled_from(["range", "if-match", "content-md5", "x-amz-copy-source", "x-amz-meta-a"]),
        VALUE,
    ),
    keys=st.builds(Keys, st.just("AK"), TEXT, st.sampled_from(["", "to/ken+="])),
)
def test_a_signature_is_that_of_botocore(
    method: str, key: str, query: dict[str, str], headers: dict[str, str], keys: Keys
):
    """Whatever stands in key, query, headers and keys."""
    path = f"/bucket/{place.quoted(key)}"
    call = sign.Call(method, "host:8333", path, tuple(query.items()), headers)
    text = sign.query_text(call.query)
    url = f"http://host:8333{path}" + (f"?{text}" if text else "")
    judged: Any = AWSRequest(method, url, headers={"host": call.host, **headers})
    Judge(keys, "s3", "cn-north-4").add_auth(judged)

    ours = sign.headers(call, keys, "cn-north-4", AT_S)

    assert ours["authorization"] == judged.headers["Authorization"]
    assert ours.get("x-amz-security-token") == judged.headers.get("X-Amz-Security-Token")


def test_another_day_is_signed_with_another_key():
    """What is remembered of a key is remembered for one day, one region and one key."""
    call = sign.Call("GET", "host", "/")
    made = {
        sign.headers(call, Keys("AK", secret), region, at_s)["authorization"]
        for secret in ("one", "two")
        for region in ("a", "b")
        for at_s in (AT_S, AT_S + 86_400)
    }

    assert len(made) == 8

"""Signatures, compared with the examples in S3's own documentation."""

from __future__ import annotations

from jobentry.contract import sigv4

EXAMPLE = sigv4.Keys("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
AT = "20130524T000000Z"
EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def signature(request: sigv4.Request) -> str:
    """Return the signature of a request of the documentation."""
    headers = sigv4.headers(request, EXAMPLE, sigv4.Scope("us-east-1", AT), EMPTY)
    return headers["authorization"].rpartition("Signature=")[2]


def test_the_documented_get_request_has_its_signature():
    headers = {"Host": "examplebucket.s3.amazonaws.com", "Range": "bytes=0-9"}

    signed = signature(sigv4.Request("GET", "/test.txt", (), headers))

    assert signed == "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"


def test_the_documented_list_request_has_its_signature():
    headers = {"Host": "examplebucket.s3.amazonaws.com"}
    query = (("prefix", "J"), ("max-keys", "2"))

    signed = signature(sigv4.Request("GET", "/", query, headers))

    assert signed == "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"


def test_a_query_parameter_may_have_no_value():
    headers = {"Host": "examplebucket.s3.amazonaws.com"}

    signed = signature(sigv4.Request("GET", "/", (("lifecycle", ""),), headers))

    assert signed == "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543"


def test_each_day_region_and_key_has_its_own_signing_key():
    request = sigv4.Request("GET", "/", (), {"Host": "host"})
    keys = {
        sigv4.headers(request, sigv4.Keys("AK", secret), sigv4.Scope(region, at))["authorization"]
        for secret in ("one", "two")
        for region in ("a", "b")
        for at in (AT, "20130525T000000Z")
    }

    assert len(keys) == 8


def test_the_repr_of_keys_hides_the_secret():
    assert "secret" not in repr(sigv4.Keys("AK", "secret", "secret"))

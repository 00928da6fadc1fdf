"""Signatures, against the example that S3's own documentation works out."""

from __future__ import annotations

import calendar
import time

from jobentry.objects import sign

EXAMPLE = sign.Keys("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
AT_S = calendar.timegm(time.strptime("20130524T000000Z", "%Y%m%dT%H%M%SZ"))
EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def signature(request: sign.Request) -> str:
    """Return the signature of a request of the documentation."""
    headers = sign.headers(request, EXAMPLE, sign.Scope("us-east-1", AT_S), EMPTY)
    return headers["Authorization"].rpartition("Signature=")[2]


def test_the_get_of_the_documentation():
    """A part of an object."""
    headers = {"Host": "examplebucket.s3.amazonaws.com", "Range": "bytes=0-9"}

    found = signature(sign.Request("GET", "/test.txt", (), headers))

    assert found == "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"


def test_the_list_of_the_documentation():
    """A query of two words."""
    headers = {"Host": "examplebucket.s3.amazonaws.com"}
    query = (("prefix", "J"), ("max-keys", "2"))

    found = signature(sign.Request("GET", "/", query, headers))

    assert found == "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"


def test_a_word_of_a_query_may_have_no_value():
    """The documentation's question for the life cycle of a bucket."""
    headers = {"Host": "examplebucket.s3.amazonaws.com"}

    found = signature(sign.Request("GET", "/", (("lifecycle", ""),), headers))

    assert found == "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543"

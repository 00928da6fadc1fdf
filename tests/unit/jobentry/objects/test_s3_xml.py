"""Lists and errors of S3 in XML, from servers and from attackers."""

from __future__ import annotations

from urllib.parse import quote_plus
from xml.sax.saxutils import escape

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobentry.objects import Entry, s3_xml
from jobentry.objects.s3_xml import XmlError

NAMESPACE = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'


def page(*rows: str, more: str = "") -> bytes:
    """Return a list as a server sends it."""
    text = f"<ListBucketResult {NAMESPACE}>{more}{''.join(rows)}</ListBucketResult>"
    return b'<?xml version="1.0" encoding="UTF-8"?>\n' + text.encode()


def row(key: str, size: int = 1, tag: str = '"0"') -> str:
    """Return one object of a list."""
    return (
        f"<Contents><Key>{key}</Key><LastModified>2026-01-02T03:04:05.000Z</LastModified>"
        f"<ETag>{escape(tag)}</ETag><Size>{size}</Size><Owner><ID>x</ID></Owner></Contents>"
    )


ANY = st.text(st.characters(codec="utf-8"), min_size=1)
PLAIN = st.text(
    st.characters(codec="utf-8", min_codepoint=0x20, exclude_characters="\x7f￾￿"),
    min_size=1,
)


# The first draw builds tables of all Unicode characters, which is slow on PyPy.
@given(st.lists(ANY))
def test_encoded_keys_come_back_whatever_they_are(keys: list[str]):
    more = "<EncodingType>url</EncodingType><IsTruncated>false</IsTruncated>"
    data = page(*(row(quote_plus(key)) for key in keys), more=more)

    assert [item.name for item in s3_xml.page(data)[0]] == keys


@given(st.lists(PLAIN))
def test_keys_that_are_not_encoded_are_taken_as_they_are(keys: list[str]):
    """Without ``EncodingType``, a plus is a plus."""
    data = page(*(row(escape(key)) for key in keys))

    assert [item.name for item in s3_xml.page(data)[0]] == keys


def test_a_listed_object_has_size_tag_and_time():
    """The tag has no quotes."""
    assert s3_xml.page(page(row("a", 7, '"abc-2"')))[0] == [
        Entry("a", "", 7, "abc-2", 1767323045 * 10**9)
    ]


@pytest.mark.parametrize("is_truncated", [True, False])
def test_is_truncated_tells_whether_the_list_continues(is_truncated: bool):
    more = f"<IsTruncated>{str(is_truncated).lower()}</IsTruncated><NextMarker>x</NextMarker>"

    assert s3_xml.page(page(row("first"), more=more))[1] == is_truncated


HOSTILE = {
    "nothing": b"",
    "no xml": b"\xff\xfe\x00<",
    "half": page(row("a"))[:-30],
    "another thing": b"<Error><Code>X</Code></Error>",
    "no size": page("<Contents><Key>a</Key></Contents>"),
    "size of letters": page(row("a").replace("<Size>1", "<Size>one")),
    "goes on nowhere": page(more="<IsTruncated>true</IsTruncated>"),
    "too deep": b"<ListBucketResult>" + b"<a>" * 100_000,
    "too long": page(row("a" * s3_xml.LIMIT_BYTES)),
    "entities": (
        b'<!DOCTYPE l [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;">]>'
        b"<ListBucketResult>&b;</ListBucketResult>"
    ),
    "a file of ours": (
        b'<!DOCTYPE l [<!ENTITY a SYSTEM "file:///etc/passwd">]>'
        b"<ListBucketResult><Contents><Key>&a;</Key><Size>1</Size></Contents></ListBucketResult>"
    ),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_an_answer_that_is_not_a_list_is_refused(data: bytes):
    """It does not count as an empty list."""
    with pytest.raises(XmlError):
        s3_xml.page(data)


@given(st.binary())
def test_any_bytes_are_parsed_without_a_crash(data: bytes):
    """An unreadable error has no code."""
    assert s3_xml.error(data) == ("", "")


def test_an_error_has_a_code_and_a_message():
    """S3 and OBS send errors in this form."""
    text = b"<Error><Code>NoSuchKey</Code><Message>none &lt;here&gt;</Message></Error>"

    assert s3_xml.error(text) == ("NoSuchKey", "none <here>")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2026-01-02T03:04:05.678Z", 1767323045),
        ("Fri, 02 Jan 2026 03:04:05 GMT", 1767323045),
        ("yesterday", 0),
        ("", 0),
    ],
)
def test_times(text: str, seconds: int):
    assert s3_xml.when(text) == seconds * 10**9

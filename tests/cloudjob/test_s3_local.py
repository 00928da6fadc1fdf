"""Our own side of a transfer to a service of S3."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloudjob.store.s3 import local


@pytest.fixture(params=["isal", "without isal"], scope="module")
def library(request: pytest.FixtureRequest) -> Iterator[str]:
    """With the quick library and without it: not every machine has a wheel."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param != "isal":
            patch.setitem(sys.modules, "isal.isal_zlib", None)
        local._fastest_crc32.cache_clear()
        yield request.param
    local._fastest_crc32.cache_clear()


@given(pieces=st.lists(st.binary(max_size=40)))
def test_a_checksum_is_that_of_all_pieces(library: str, pieces: list[bytes]):
    """Whichever library makes it, and also when it goes on from a copy."""
    assert (local._fastest_crc32() is zlib.crc32) == (library != "isal")
    begun = local.Crc32()
    for piece in pieces:
        begun.update(memoryview(piece))
    goes_on = begun.copy()
    goes_on.update(b"more")

    assert begun.digest() == zlib.crc32(b"".join(pieces)).to_bytes(4, "big")
    assert goes_on.digest() == zlib.crc32(b"".join([*pieces, b"more"])).to_bytes(4, "big")

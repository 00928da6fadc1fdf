"""The stream that many ranks share: the bytes of every rank are recovered exactly."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jobentry.contract import lines
from jobentry.contract.lines import Line

# Bytes that could be mistaken for a prefix, a line end, or a part of a character.
DATA = st.lists(
    st.sampled_from([b"\n", b"\r", b"[1] ", b"[2]+ ", b"]", b"+ ", b" ", b"x", b"\0", b"\xff"])
    | st.binary(max_size=8)
).map(b"".join)
# A rank, the bytes that it writes, and whether its incomplete line is then shown.
WRITES = st.lists(st.tuples(st.sampled_from([0, 1, 2, 37]), DATA, st.booleans()))


def streamed(writes: list[tuple[int, bytes, bool]]) -> bytes:
    """Return the stream of an entry that reads the bytes of the ranks piece by piece."""
    stream = b""
    waiting: dict[int, bytes] = {}
    last = [(rank, b"", True) for rank, _, _ in writes]
    for rank, data, is_shown in writes + last:
        buffered = waiting.get(rank, b"") + data
        text, taken = lines.write(rank, buffered)
        stream += text
        waiting[rank] = buffered[taken:]
        if is_shown and waiting[rank]:
            stream += lines.write_part(rank, waiting.pop(rank))
    return stream


def split(stream: bytes) -> list[bytes]:
    """Return the lines of a stream, which must end with a newline."""
    assert stream == b"" or stream.endswith(b"\n")
    return [line + b"\n" for line in stream.split(b"\n")[:-1]]


@given(WRITES)
def test_the_bytes_of_every_rank_are_recovered(writes: list[tuple[int, bytes, bool]]):
    written: dict[int, bytes] = {}
    for rank, data, _ in writes:
        written[rank] = written.get(rank, b"") + data

    read: dict[int, bytes] = dict.fromkeys(written, b"")
    for line in split(streamed(writes)):
        rank, data = lines.read(line)
        assert rank is not None
        read[rank] += data

    assert read == written


def test_each_line_has_its_prefix():
    assert lines.write(3, b"a\n\nb\r\nrest") == (b"[3] a\n[3] \n[3] b\r\n", 6)
    assert lines.write(3, b"rest") == (b"", 0)


def test_an_incomplete_line_is_marked():
    assert lines.write_part(12, b"50 %\r") == b"[12]+ 50 %\r\n"
    assert lines.read(b"[12]+ 50 %\r\n") == Line(12, b"50 %\r")


def test_lines_without_a_prefix_are_the_entrys():
    for line in (b"jobentry: hello\n", b"[x] a\n", b" [1] a\n", b"[1]a\n", b"[-1] a\n", b""):
        assert lines.read(line) == Line(None, line)


@given(st.binary())
def test_any_line_can_be_read(line: bytes):
    """A reader never fails, whatever a platform mixes into the stream."""
    rank, data = lines.read(line)

    assert line.endswith(data) or line == b"[%d]+ %s\n" % (rank or 0, data)

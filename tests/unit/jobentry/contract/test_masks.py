"""Marks of secrets in a log: the log keeps every byte, and only the shown text is masked."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jobentry.contract import journal, lines, masks

TEXTS = st.lists(st.sampled_from([b"secret", b"\n", b"[3] ", b"a", b"\xff"]), max_size=20)


def stream_of(rank: int, data: bytes) -> bytes:
    """Return the stream text of ``data`` with every ``secret`` marked."""
    places = [n for n in range(len(data)) if data.startswith(b"secret", n)]
    ranges = [(place, place + 6) for place in places]
    return masks.write(rank, data, ranges)


@given(TEXTS.map(b"".join))
def test_a_marked_log_keeps_every_byte_and_shows_no_secret(data: bytes):
    data += b"\n"
    text = stream_of(3, data)

    assert journal.split(text)[0] == lines.write(3, data)[0]
    assert masks.Splitter().split(text) == (
        lines.write(3, data.replace(b"secret", b"***"))[0],
        [],
    )


def test_a_mark_in_one_piece_masks_the_line_in_the_next():
    """Lines of other ranks and of the entry may be between the mark and its line."""
    splitter = masks.Splitter()
    mark, line = stream_of(3, b"my secret\n").splitlines(keepends=True)

    outputs = [
        splitter.split(piece)
        for piece in (mark, b"jobentry: my secret\n[13] my secret\n", line, line)
    ]

    assert outputs == [
        (b"", []),
        (b"jobentry: my secret\n[13] my secret\n", []),
        (b"[3] my ***\n", []),
        (b"[3] my secret\n", []),
    ]


def test_incomplete_lines_are_masked_too():
    text = masks.write_part(0, b"a secret", [(2, 8)])

    assert masks.Splitter().split(text) == (b"[0]+ a ***\n", [])


def test_a_line_full_of_secrets_has_a_short_mark():
    data = b"secret " * 100_000 + b"\n"

    text = stream_of(0, data)

    assert len(text) < len(data) + 200
    assert masks.Splitter().split(text)[0] == b"[0] *** \n"


def test_a_line_that_the_platform_has_changed_is_masked_as_a_whole():
    text = stream_of(0, b"\xff secret\nnext\n")

    output, _ = masks.Splitter().split(text.replace(b"\xff", "\ufffd".encode()))

    assert output == b"[0] ***\n[0] next\n"


@given(st.binary(max_size=40))
def test_damaged_marks_do_not_affect_other_lines(junk: bytes):
    junk = junk.replace(b"\n", b"")
    text = journal.MARK + b'{"mask":[3' + junk + b"\n[3] kept\n[4] kept\n"

    output, _ = masks.Splitter().split(text)

    assert output.endswith(b"[4] kept\n")

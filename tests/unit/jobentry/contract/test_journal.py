"""The journal of a node: entries are dumped and loaded, and invalid lines are refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobentry.contract import journal, lines
from jobentry.contract.journal import Device, Phase, RankSample, Sample
from jobentry.contract.slow import Reason, Slow
from jobentry.contract.stacks import Frame

# The precision of a journal: seconds have three decimal places, other numbers one.
SECONDS = st.integers(1, 2**42).map(lambda number: number / 1000)
TENTHS = st.integers(0, 999).map(lambda number: number / 10)
COUNTS = st.integers(0, 2**40)
NAMES = st.text(st.characters(codec="ascii", categories=["L", "N", "P", "Zs"]), min_size=1)
PHASES = st.builds(
    Phase, NAMES.map(lambda name: name[:80]), SECONDS, st.none() | SECONDS, SECONDS, COUNTS, COUNTS
)
PLACES = st.just("") | NAMES.map(lambda name: name[:120])
RANKS = st.lists(
    st.builds(
        RankSample, COUNTS.map(lambda n: n % 5000), COUNTS, COUNTS, COUNTS,
        st.sampled_from("RSDTZEF?"), COUNTS, COUNTS, st.none() | st.integers(0, 100), PLACES,
    ),
    max_size=6,
    unique_by=lambda sample: sample.rank,
).map(lambda ranks_drawn: tuple(sorted(ranks_drawn)))  # fmt: skip
DEVICES = st.builds(
    Device, st.sampled_from(["gpu", "npu"]), st.integers(0, 15), *[st.none() | TENTHS] * 6,
    st.none() | COUNTS, COUNTS,
)  # fmt: skip


def numbers(length: int) -> st.SearchStrategy[tuple[float, ...]]:
    return st.just(()) | st.tuples(*[TENTHS] * length)


SAMPLES = st.builds(
    Sample,
    at=st.integers(1, 2**40).map(lambda number: number / 10),
    cpu=numbers(4),
    cpus=st.integers(0, 1024),
    own_cpu=numbers(2),
    memory=numbers(2),
    pressure=numbers(5),
    oom_kills=COUNTS,
    disk=numbers(2),
    network=numbers(2),
    rdma=numbers(2),
    space=numbers(2),
    devices=st.lists(DEVICES, max_size=3).map(tuple),
    ranks=RANKS,
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["r", "c", "m", "q", "s", "t", "k", "x"]), inner)
    ),
    max_leaves=8,
)
KEYS = st.sampled_from(["phase", "from", "to", "at", "bytes", "cpu", "memory", "devices", "ranks"])


@given(PHASES | SAMPLES)
def test_an_entry_that_was_dumped_is_loaded(entry: journal.Entry):
    assert journal.load(journal.dump(entry)[:-1]) == entry


@given(st.binary(max_size=50) | st.dictionaries(KEYS, JSON).map(lambda x: json.dumps(x).encode()))
def test_any_line_is_loaded_without_an_error(line: bytes):
    entry = journal.load(line)
    assert entry is None or isinstance(entry, (Phase, Sample))


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"[]",
        b'{"at":NaN}',
        b'{"at":1,"memory":[1]}',
        b'{"phase":"a\\u001b[31m","from":1}',
        b'{"phase":"run","from":1e999}',
        b'{"at":1,"ranks":{"r":"0-999999999","c":0,"m":0,"q":0,"s":"R","t":1,"k":0}}',
        b'{"at":1,"ranks":{"r":"0-1024","c":0,"m":0,"q":0,"s":"R","t":1,"k":0}}',
        b'{"at":1,"ranks":{"r":"0","c":9%s,"m":0,"q":0,"s":"R","t":1,"k":0}}' % (b"9" * 400),
        b'{"at":1,"oom_kills":"9%s"}' % (b"9" * 400),
        b'{"at":1,"memory":[1e308,1e308]}',
        b'{"at":1,"ranks":{"r":"0-1","c":[0],"m":0,"q":0,"s":"R","t":1,"k":0}}',
        b'{"at":1,"x":"' + b"x" * journal.LINE_LIMIT_BYTES + b'"}',
    ],
)
def test_a_damaged_line_is_refused(line: bytes):
    assert journal.load(line) is None


@given(st.lists(st.binary(max_size=20), max_size=5), st.lists(PHASES | SAMPLES, max_size=5))
def test_a_script_cannot_print_an_entry(printed: list[bytes], entries: list[journal.Entry]):
    """Whatever ranks print, the journal contains the entries of the node and nothing else."""
    forged = journal.MARK + b'{"phase":"run","from":1,"to":2}\n'
    dumped = [journal.dump(entry) for entry in entries]
    data = b"".join(journal.MARK + line for line in dumped)
    output = b""
    for text in [*printed, forged, b"\r" + forged]:
        whole = text.replace(b"\n", b"") + b"\n"
        output += lines.write(7, whole)[0] + lines.write_part(7, text.rstrip(b"\n"))

    others, journal_lines = journal.split(output + data)

    assert (others, journal_lines) == (output, [line[:-1] for line in dumped])


@given(st.lists(PHASES | SAMPLES, max_size=5))
def test_a_stored_journal_contains_its_lines(entries: list[journal.Entry]):
    dumped = [journal.dump(entry) for entry in entries]

    packed = journal.pack(dumped)

    assert [line + b"\n" for line in journal.unpack(packed)] == dumped
    assert journal.unpack(packed[:-12]) == [] or len(dumped) > 0
    assert journal.unpack(b"not gzip") == []


@given(
    st.lists(st.sampled_from([b"[0] a", b"", b"x jobentry# {}", b"jobentry# x", b"jobentry: b"]))
)
def test_a_log_in_parts_by_time_keeps_every_byte(texts: list[bytes]):
    data = b"".join(text + b"\n" for text in texts)
    parts = list(journal.by_time(data))

    assert b"".join(part for _, part in parts) == data
    assert all(not at for at, _ in parts)


def test_lines_have_the_time_of_the_line_of_the_journal_before_them():
    sample = journal.MARK + journal.dump(Sample(at=100.0))
    data = b"a\n" + sample + b"[0] b\nc\n" + journal.time_mark(102.5) + b"[1]+ d\n"

    assert [(at, part.partition(b"}\n")[2] or part) for at, part in journal.by_time(data)] == [
        (0.0, b"a\n"), (100.0, b"[0] b\nc\n"), (102.5, b"[1]+ d\n"),
    ]  # fmt: skip
    assert journal.load(journal.time_mark(102.5)[len(journal.MARK) :]) is None
    assert journal.split(data)[0] == b"a\n[0] b\nc\n[1]+ d\n"
    assert list(journal.by_time(b"")) == [(0.0, b"")]


def test_waits_and_places_of_ranks_are_read_as_they_were_written():
    samples = (
        RankSample(0, 5, 100, 3, "S", 1, 0, 70, "allreduce at train.py:41"),
        RankSample(1, 99, 100, 3, "R", 1, 0, 2, "data.py:30"),
        RankSample(2, 5, 100, 3, "S", 1, 0, None, ""),
    )

    for ranks in (samples, samples[:1], samples[2:]):
        line = journal.dump(Sample(at=1.0, ranks=ranks))
        entry = journal.load(line)
        assert isinstance(entry, Sample)
        assert entry.ranks == ranks
    # A job whose ranks cannot be read pays nothing for them.
    assert b'"w"' not in line


def test_earlier_readers_ignore_waits_places_and_slow_ranks():
    """They read the six columns that they know, and take an entry without a time for none."""
    rank = RankSample(0, 5, 100, 3, "S", 1, 0, 70, "train.py:41")
    columns = json.loads(journal.dump(Sample(at=1.0, ranks=(rank,))))["ranks"]
    place = Frame("data.py", 30, "augment")
    slow = Slow((1,), (0,), 5.0, 31, Reason.UNEVEN, "uneven work", place, 72)

    assert [columns[name] for name in "cmqstk"] == [5, 100, 3, "S", 1, 0]
    assert list(json.loads(journal.dump(slow))) == ["slow"]
    assert journal.load(journal.dump(slow)) == slow


@pytest.mark.parametrize(
    "columns",
    ['"w":[1,2]', '"n":["a"],"p":[5]', '"n":["a"],"p":[0,0]', '"n":3', '"w":"xy"'],
)
def test_damaged_waits_and_places_are_no_entry(columns):
    line = '{"at":1.0,"ranks":{"r":"0","c":5,"m":1,"q":1,"s":"S","t":1,"k":0,%s}}' % columns

    assert journal.load(line.encode()) is None

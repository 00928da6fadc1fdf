"""The exit record of a job: records are dumped and loaded, and invalid data is refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobentry.contract import exits
from jobentry.contract.exits import Cause, ExitRecord, Failure, Outcome, RecordError
from jobentry.contract.hangs import Activity, Confidence, Group, Hang, Rule
from jobentry.contract.stacks import Frame
from jobentry.contract.waits import Wait

# Includes the surrogates that stand for invalid UTF-8, as in a log or a file name.
TEXT = st.text(max_size=20) | st.binary(max_size=5).map(
    lambda data: data.decode("utf-8", "surrogateescape")
)
NUMBERS = st.integers(-(2**63), 2**63)
FAILURES = st.builds(
    Failure,
    node=st.none() | NUMBERS,
    host=TEXT,
    rank=st.none() | NUMBERS,
    signal=st.none() | NUMBERS,
    exit_code=st.none() | NUMBERS,
    message=TEXT,
    last_lines=st.lists(TEXT, max_size=3).map(tuple),
)
FRAMES = st.builds(Frame, TEXT, st.integers(0, 99), TEXT, TEXT)
GROUPS = st.builds(
    Group,
    st.just((0, 2)),
    st.just((1,)),
    st.sampled_from(Activity),
    st.sampled_from(Wait),
    TEXT,
    FRAMES,
    TEXT,
    st.integers(0, 99_999),
)
HANGS = st.builds(
    Hang,
    st.sampled_from(Rule),
    st.sampled_from(Confidence),
    st.just(1.5),
    st.just(2.5),
    st.lists(GROUPS, max_size=2).map(tuple),
    st.just(0),
)
RECORDS = st.builds(
    ExitRecord,
    job=TEXT,
    outcome=st.builds(
        Outcome,
        exit_code=NUMBERS,
        cause=st.sampled_from(Cause),
        failure=st.none() | FAILURES,
    ),
    started_at=TEXT,
    ended_at=TEXT,
    phases=st.lists(st.tuples(NUMBERS, TEXT, TEXT, TEXT), max_size=3).map(tuple),
    damaged_layers=st.lists(TEXT, max_size=3).map(tuple),
    hang=st.none() | HANGS,
    cut_logs=st.lists(st.builds(exits.CutLog, NUMBERS, NUMBERS, TEXT), max_size=3).map(tuple),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from(
    [
        "job",
        "exit_code",
        "cause",
        "failure",
        "started_at",
        "ended_at",
        "phases",
        "damaged_layers",
        "hang",
        "cut_logs",
        "node",
        "rank",
        "signal",
        "last_lines",
    ]
)


@given(RECORDS)
def test_what_is_dumped_is_loaded(record: ExitRecord):
    """The last lines of a log may contain any text."""
    assert exits.load(exits.dump(record)) == record


def test_a_record_is_readable_text():
    failure = Failure(0, "a", 1, None, 3, "m", ("x",))
    assert exits.dump(ExitRecord("j", Outcome(3, Cause.USER, failure))) == (
        b'{\n "cause": "user",\n "cut_logs": [],\n "damaged_layers": [],\n "ended_at": "",\n'
        b' "exit_code": 3,\n'
        b' "failure": {\n'
        b'  "exit_code": 3,\n  "host": "a",\n  "last_lines": [\n   "x"\n  ],\n'
        b'  "message": "m",\n  "node": 0,\n  "rank": 1,\n  "signal": null,\n'
        b'  "stack_lines": []\n },\n'
        b' "job": "j",\n "phases": [],\n "started_at": ""\n}\n'
    )


def test_unknown_keys_in_a_record_are_ignored():
    assert exits.load(b'{"job": "j", "exit_code": 0, "colour": "red"}') == ExitRecord(
        "j", Outcome(0)
    )


@pytest.mark.parametrize("cause", ["eclipse", 3, None, ["user"]])
def test_a_cause_of_a_later_version_is_unknown(cause: object):
    record = exits.load(json.dumps({"job": "j", "exit_code": 1, "cause": cause}).encode())

    assert record == ExitRecord("j", Outcome(1, Cause.UNKNOWN))


def test_a_cause_prints_as_its_word():
    assert (str(Cause.USER), f"{Cause.USER}", json.dumps(Cause.USER)) == ("user", "user", '"user"')


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"3",
        b'"x"',
        b"{}",
        b'{"job": "j"}',
        b'{"job": "j", "exit_code": "x"}',
        b'{"job": "j", "exit_code": null}',
        b'{"job": "j", "exit_code": Infinity}',
        b'{"job": "j", "exit_code": 9%s}' % (b"9" * 400),
        b'{"job": "j", "exit_code": NaN}',
        b'{"job": "j", "exit_code": 0, "failure": 3}',
        b'{"job": "j", "exit_code": 0, "failure": {"rank": 1e999}}',
        b'{"job": "j", "exit_code": 0, "phases": [[1]]}',
        b'{"job": "j", "exit_code": 0, "phases": 1}',
        b'{"job": "j", "exit_code": 0, "damaged_layers": 1}',
        b'{"job": "\xff", "exit_code": 0}',
        b"[" * 100_000,
    ],
)
def test_an_invalid_record_is_refused(data: bytes):
    with pytest.raises(RecordError, match="reading an exit record: it is not valid"):
        exits.load(data)


@given(st.binary() | st.dictionaries(KEYS, JSON).map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_read_as_a_record_or_refused(data: bytes):
    try:
        record = exits.load(data)
    except RecordError:
        return
    assert exits.load(exits.dump(record)) == record


def test_the_exit_code_of_a_signal_is_128_plus_its_number():
    assert exits.code_of_signal(9) == 137

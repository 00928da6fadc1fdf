"""Tests of job texts with bytes that are not UTF-8 or with control sequences."""

from __future__ import annotations

import json

import pytest

from cloudjob.console.facts import texts_of
from cloudjob.console.job_list import Changes, row_of
from cloudjob.console.pages.http import json_response
from cloudjob.console.text import coloured_line, displayable, displayable_line
from cloudjob.model.status import Failure, JobState
from tests.support.statuses import status_of

MESSAGE = b"caf\xe9 <b>".decode("utf-8", "surrogateescape")


def test_a_message_that_is_not_utf8_does_not_stop_the_list():
    row = {"reason": MESSAGE}

    assert json.loads(bytes(json_response(Changes(1, [row], [], "")).body))["rows"] == [row]


def test_bytes_that_are_not_utf8_are_escaped_on_pages():
    assert displayable(MESSAGE) == "caf\\udce9 <b>"
    assert displayable("café €") == "café €"


def test_a_page_shows_no_terminal_sequences_and_no_bidirectional_marks():
    assert (
        displayable("\x1b[31mOOM\x1b[0m\x1b]0;title\x07\0 a\u202egpj.exe\n\tb")
        == "OOM agpj.exe\n\tb"
    )


def test_the_list_shortens_a_reason_that_is_very_long():
    failure = Failure(message="\x1b[1m" + "A" * 1_000_000)
    row = row_of(status_of(state=JobState.FAILED, failure=failure))

    assert set(row["reason"]) == {"A"}
    assert 300 < len(row["reason"]) < 500


def test_an_empty_text_is_a_value_of_a_variable_but_not_of_a_key():
    variables = {"A": "", "B": '""', "C": "b"}
    spec = {"outputs": {"MODEL": ""}, "env": variables, "image": "", "docker": {"gpus": ""}}

    assert texts_of({"A": ""}) == {"A": '""'}
    assert texts_of(spec, keeps_empty=False) == {
        "outputs.MODEL": '""',
        "env.A": '""',
        "env.B": r'"\"\""',
        "env.C": "b",
    }


@pytest.mark.parametrize(
    ("line", "text", "spans"),
    [
        (b"plain", "plain", []),
        (b"\x1b[33mWARN\x1b[0m: a", "WARN: a", [(0, 4, "ansi-3")]),
        (b"a \x1b[1;91mb\x1b[22mc", "a bc", [(2, 3, "ansi-1 ansi-bold"), (3, 4, "ansi-1")]),
        (b"\x1b[1mb\x1b[md", "bd", [(0, 1, "ansi-bold")]),
        # Colours that depend on the background, and sequences that are no colours.
        (b"\x1b[38;5;31mb\x1b[2Kc", "bc", []),
        (b"\x1b[31m\x1b]0;title\x07b", "b", [(0, 1, "ansi-1")]),
        # The last state of a progress bar.
        (b"\x1b[31m10%\r\x1b[32m20%", "20%", [(0, 3, "ansi-2")]),
        (b"\x1b[31m<b>\xff", "<b>\ufffd", [(0, 4, "ansi-1")]),
    ],
)
def test_a_line_has_the_colours_of_a_terminal(
    line: bytes, text: str, spans: list[tuple[int, int, str]]
):
    assert coloured_line(line) == (text, spans)
    assert displayable_line(line) == text

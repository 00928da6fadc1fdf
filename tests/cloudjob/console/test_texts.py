"""Texts of jobs that are not UTF-8."""

from __future__ import annotations

import json

from cloudjob.console.job_list import Changes
from cloudjob.console.pages import words
from cloudjob.console.pages.answer import answer

MESSAGE = b"caf\xe9 <b>".decode("utf-8", "surrogateescape")


def test_a_message_that_is_not_utf8_does_not_stop_the_list():
    row = {"reason": MESSAGE}

    assert json.loads(bytes(answer(Changes(1, [row], [], "")).body))["rows"] == [row]


def test_bytes_that_are_not_utf8_are_escaped_on_pages():
    assert words.text(MESSAGE) == "caf\\udce9 <b>"
    assert words.text("café €") == "café €"

"""The messages in the log of an entry that say why it failed."""

from __future__ import annotations

import pytest

from jobentry.contract import messages


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("unpacking the entry: no space left", True),
        (messages.hint("free some space"), False),
        (messages.retry("put x: refused"), False),
        (messages.unwritten_record("put exit.json: refused"), False),
    ],
)
def test_only_a_failure_is_the_reason(message: str, expected: bool):
    assert messages.is_reason(messages.MARK + message) is expected


@pytest.mark.parametrize("line", ["", "[0] epoch 1", "hint: free some space"])
def test_a_line_of_a_rank_is_no_reason(line: str):
    assert not messages.is_reason(line)

"""Stacks as the nodes send them, and as the laptop reads them."""

from __future__ import annotations

import pytest

from jobentry.contract.stacks import (
    Frame,
    ProcessStacks,
    Stacks,
    StacksError,
    ThreadStack,
    dump,
    load,
)

THREAD = ThreadStack(
    70, "S", "futex_do_wait", True, (Frame("é.py", 3, "<module>", "x\n\udc80"),), True
)
STACKS = Stacks(1.5, (ProcessStacks(2, 1, 70, "python é.py", True, (THREAD,), ""),), (3,))


def test_stacks_are_loaded_as_they_were_dumped() -> None:
    data = dump(STACKS)

    assert load(data) == STACKS
    assert b"\n" not in data


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"null",
        b"{}",
        b"\xff",
        b"[" * 100_000,
        b'{"at": 1e999, "processes": [[1]], "silent": []}',
        b'{"at": 1, "processes": [1], "silent": []}',
        b'{"at": 1, "processes": [[0, 0, 1, "", true, [[1, "S", "", 0, 5]], ""]], "silent": []}',
        b'{"at": 1, "processes": [], "silent": ["x"]}',
    ],
)
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(StacksError, match="it is not valid"):
        load(data)

"""A dry run whose planning fails: the error has a reason, even if the entry printed none."""

from __future__ import annotations

from pathlib import Path

import pytest

import cloudjob
from cloudjob.errors import BackendError, SpecError
from cloudjob.model.text import why_failed


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("kill -9 $PPID", "it was killed by SIGKILL (often the kernel, when memory is short)"),
        ("kill -15 $PPID", "it was killed by SIGTERM"),
    ],
)
def test_an_entry_that_ends_without_a_message_is_reported(
    program: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The entry asks mpirun for its version; here, that kills the entry."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "mpirun").write_text(f"#!/bin/sh\n{program}\nsleep 9\n")
    (tmp_path / "bin" / "mpirun").chmod(0o700)
    (tmp_path / "train.py").write_text("")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setenv("CLOUDJOB_HOME", str(tmp_path / "home"))
    spec = cloudjob.JobSpec(script="train.py", source=str(tmp_path), launcher="mpirun")

    with pytest.raises(SpecError) as caught:
        cloudjob.preview(spec)

    assert caught.value.message == f"planning a node: {reason}"


def test_no_error_ends_with_a_colon():
    assert why_failed(3, b"\n") == "it ended with exit code 3 without a message"
    assert why_failed(1, b" x: y\n") == "x: y"
    assert BackendError(f"reading x: {TimeoutError()}").message == "reading x: no reason was given"
    assert SpecError(["a: ", "b"]).message == "a: no reason was given; b"

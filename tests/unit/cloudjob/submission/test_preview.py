"""A dry run whose planning fails: the error has a reason, even if the entry printed none."""

from __future__ import annotations

from pathlib import Path

import pytest

import cloudjob
from cloudjob.errors import BackendError, SpecError, StoreError
from cloudjob.model.text import why_failed
from tests.support.homes import make_used_home


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
    make_used_home(tmp_path / "home")
    monkeypatch.setenv("CLOUDJOB_HOME", str(tmp_path / "home"))
    spec = cloudjob.JobSpec(script="train.py", source=str(tmp_path), launcher="mpirun")

    with pytest.raises(SpecError) as caught:
        cloudjob.preview(spec)

    assert caught.value.message == f"planning a node: {reason}"


def test_a_job_without_servers_sends_no_certificates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its nodes connect to none, so a bundle that cannot be read stops only a job that has some."""
    (tmp_path / "train.py").write_text("")
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "missing.pem"))
    make_used_home(tmp_path / "home")
    monkeypatch.setenv("CLOUDJOB_HOME", str(tmp_path / "home"))
    spec = cloudjob.JobSpec(script="train.py", source=str(tmp_path), launcher="python")

    assert cloudjob.preview(spec).submission["job"]
    with pytest.raises(StoreError, match="reading certificates: AWS_CA_BUNDLE="):
        cloudjob.preview(spec.with_values(inputs={"D": "https://host/data"}))


def test_no_error_ends_with_a_colon():
    assert why_failed(3, b"\n") == "it ended with exit code 3 without a message"
    assert why_failed(1, b" x: y\n") == "x: y"
    assert BackendError(f"reading x: {TimeoutError()}").message == "reading x: no reason was given"
    assert SpecError(["a: ", "b"]).message == "a: no reason was given; b"

"""The folder of a job that may have been submitted to Slurm is kept, so the job can be found."""

from __future__ import annotations

from pathlib import Path

import pytest

import cloudjob
from cloudjob.backends.slurm import request
from cloudjob.backends.slurm.backend import SlurmBackend
from cloudjob.errors import BackendError, Unanswered
from tests.cloudjob.backends.test_slurm_build import LOCAL_CLUSTER, submission


@pytest.mark.parametrize(
    ("message", "kind", "is_kept"),
    [
        ("invalid partition specified: gpu", BackendError, False),
        ("Socket timed out on send/recv operation", Unanswered, True),
    ],
)
def test_the_folder_is_kept_if_sbatch_may_have_submitted_the_job(
    message: str,
    kind: type[BackendError],
    is_kept: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "sbatch").write_text(f"#!/bin/sh\necho 'sbatch: error: {message}' >&2\nexit 1\n")
    (tools / "sbatch").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    backend = SlurmBackend(tmp_path, {})
    backend._found = LOCAL_CLUSTER._replace(
        folder=str(tmp_path / "slurm"),
        entry=str(Path(cloudjob.__file__).with_name("jobentry.pyz")),
    )
    made = request.build(submission(), backend._found)

    with pytest.raises(BackendError) as caught:
        backend.send(made)

    assert type(caught.value) is kind
    assert Path(made.folder).exists() is is_kept


def test_fresh_keys_are_a_file_that_only_its_owner_reads(tmp_path: Path):
    backend = SlurmBackend(tmp_path, {})
    backend._found = LOCAL_CLUSTER._replace(folder=str(tmp_path / "slurm"))
    made = request.build(submission(), backend._found)
    handle = backend.handle(made)
    with pytest.raises(BackendError, match="No such file or directory"):
        backend.refresh(handle, {"A": "old"})

    Path(made.folder).mkdir(parents=True)
    backend.refresh(handle, {"A": "old"})
    backend.refresh(handle, {"A": "new\n"})

    (path,) = Path(made.folder).iterdir()
    assert path.name == "store-keys"
    assert path.read_bytes() == b"A=new\n\0"
    assert path.stat().st_mode & 0o777 == 0o600

"""The programs of a node that the entry asks for their versions."""

from __future__ import annotations

from pathlib import Path

from jobentry.node import tools


def test_mpirun_is_started_from_the_folder_that_bin_links_to():
    """Open MPI takes its prefix from the path, and refuses ``/``, which it takes from /bin."""
    version = tools.start_version("/bin:/usr/bin")
    assert version is not None
    version.communicate(timeout=180)

    assert list(version.args) == [str(Path("/bin").resolve() / "mpirun"), "--version"]

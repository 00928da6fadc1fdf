"""The programs of a node that the entry asks for their versions."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from jobentry.node import tools


@pytest.mark.skipif(
    not shutil.which("mpirun", path="/bin") and os.environ.get("CLOUDJOB_REQUIRE_ALL") != "1",
    reason="an mpirun in /bin is needed",
)
def test_mpirun_is_started_from_the_folder_that_bin_links_to():
    """Open MPI takes its prefix from the path, and refuses ``/``, which it takes from /bin."""
    version = tools.start_version("/bin")
    assert version is not None
    version.communicate(timeout=180)

    assert list(version.args) == [str(Path("/bin").resolve() / "mpirun"), "--version"]

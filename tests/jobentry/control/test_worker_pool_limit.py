"""The head's limit on open files, in a subprocess, as a lowered hard limit cannot be raised."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
from jobentry.control.worker_pool import _allow_open_files

soft, hard, workers = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
_allow_open_files(workers)
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "workers", "expected"),
    [
        pytest.param(512, 1024, 1, (512, 1024), id="a small job keeps what it was given"),
        pytest.param(300, 1024, 100, (456, 1024), id="as many as it needs"),
        pytest.param(300, 1024, 9999, (1024, 1024), id="no more than it may have"),
    ],
)
def test_the_limit_of_open_files_grows_with_the_workers(
    soft: int, hard: int, workers: int, expected: tuple[int, int]
):
    argv = [sys.executable, "-c", SCRIPT, str(soft), str(hard), str(workers)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(argv, env=env, check=True, capture_output=True, text=True)

    assert tuple(map(int, done.stdout.split())) == expected

"""The file with which a backend reports that a node has ended."""

from __future__ import annotations

import pytest

from jobentry.contract import node_end


@pytest.mark.parametrize("code", [0, 1, 125, 137, 255])
def test_an_exit_code_is_read_as_it_was_written(code: int):
    assert node_end.load(node_end.dump(code)) == code


@pytest.mark.parametrize("data", [b"", b"\n", b"13", b"-9\n", b"x\n", b"\xff\n", b"1\n2\n"])
def test_an_incomplete_file_reports_nothing(data: bytes):
    assert node_end.load(data) is None


def test_a_failure_before_joining_is_recognised_in_a_record():
    failure = node_end.failure(2, "worker-2", 125)

    assert failure.message == "node 2 (worker-2) ended with exit code 125 before it joined the job"
    assert node_end.is_before_joining(failure)
    assert not node_end.is_before_joining(failure._replace(message="node 2 (worker-2) is gone"))

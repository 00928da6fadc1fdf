"""Tests of a failure as Markdown."""

from __future__ import annotations

from cloudjob.console.markdown import failure_text
from cloudjob.model.status import Failure, JobState
from tests.support.statuses import status_of


def test_a_failure_has_its_place_its_reason_its_hint_and_its_last_lines():
    failure = Failure(node=1, rank=5, message="ValueError: <b> @all", last_lines=("a", "b"))
    status = status_of(
        state=JobState.FAILED,
        started_at="2026-01-31T10:00:00.000Z",
        ended_at="2026-01-31T10:01:30.000Z",
        failure=failure,
        exit_code=1,
    )

    assert failure_text(status, "more memory") == (
        f"**{status.job}: FAILED**: ValueError: \\<b\\> \\@all (node 1 rank 5)\n\n"
        f"backend {status.backend}, {status.nodes} x {status.procs_per_node} ranks, "
        "ran for 1 min 30 s, exit code 1\n\n"
        "Hint: more memory\n\n"
        "```text\na\nb\n```\n"
    )


def test_no_line_ends_the_block_of_the_others():
    status = status_of(failure=Failure(message="m", last_lines=("````", "<script>\x1b[31m")))

    assert failure_text(status, "").endswith("`````text\n````\n<script>\n`````\n")

"""What Horovod prints about a stall."""

from __future__ import annotations

from pathlib import Path

from jobentry.contract.hangs import Late
from jobentry.contract.stacks import Frame, ThreadStack
from jobentry.node import stall_reports

# Of Horovod 0.28.1.
REPORT = """\
[2026-11-28 02:40:12.3: W /tmp/horovod/common/stall_inspector.cc:107] One or more tensors were \
submitted to be reduced by subset of ranks and are waiting for remainder of ranks for more than \
60 seconds. This may indicate that different ranks are trying to submit different tensors.
Missing ranks:
0: [allreduce.accuracy]
2: [allreduce.loss, allreduce.lr ...]
"""


def waits(file: str) -> ThreadStack:
    return ThreadStack(1, "S", "futex", False, (Frame(file, 1, "synchronize"),))


def test_the_ranks_and_tensors_of_the_last_report_are_read():
    expected = (Late(0, ("allreduce.accuracy",)), Late(2, ("allreduce.loss", "allreduce.lr ...")))

    assert stall_reports.read(REPORT) == expected
    assert stall_reports.read("Missing ranks:\n1: [a]\n" + REPORT) == expected
    assert stall_reports.read("epoch 3\nMissing ranks: none\n") == ()


def test_names_of_tensors_may_have_brackets():
    text = "Missing ranks:\n0: [grads[0], grads[1]]\n12!: [a]\n\nstep 4: [1]\n"

    assert stall_reports.read(text) == (Late(0, ("grads[0]", "grads[1]")), Late(12, ("a",)))


def test_only_what_a_rank_in_horovod_has_printed_since_it_waits_is_believed(tmp_path: Path):
    log = tmp_path / "rank-0.log"
    inside, outside = waits("/lib/horovod/torch/mpi_ops.py"), waits("train.py")
    assert stall_reports.size_of(str(log)) == 0
    assert stall_reports.late(inside, str(log), 0) == ()

    log.write_text(REPORT)

    assert len(stall_reports.late(inside, str(log), 0)) == 2
    assert stall_reports.late(outside, str(log), 0) == ()
    assert stall_reports.late(inside, str(log), stall_reports.size_of(str(log))) == ()

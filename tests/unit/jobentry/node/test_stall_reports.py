"""What Horovod prints about a stall."""

from __future__ import annotations

from pathlib import Path

from jobentry.contract.hangs import Late
from jobentry.contract.stacks import Frame, ThreadStack
from jobentry.node import stall_reports
from jobentry.node.stall_reports import StallReports

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

    assert stall_reports.read(REPORT.encode()) == (expected, len(REPORT))
    earlier = "Missing ranks:\n1: [a]\n"
    assert stall_reports.read((earlier + REPORT).encode()) == (expected, len(earlier + REPORT))
    assert stall_reports.read(b"epoch 3\nMissing ranks: none\n") == ((), 0)


def test_names_of_tensors_may_have_brackets():
    text = b"Missing ranks:\n0: [grads[0], grads[1]]\n12!: [a]\n\nstep 4: [1]\n"

    late, _ = stall_reports.read(text)

    assert late == (Late(0, ("grads[0]", "grads[1]")), Late(12, ("a",)))


def test_only_what_a_rank_in_horovod_has_printed_since_it_waits_is_believed(tmp_path: Path):
    log = tmp_path / "rank-0.log"
    threads = waits("/lib/horovod/torch/mpi_ops.py"), waits("train.py")
    inside, outside = (StallReports(str(log), thread) for thread in threads)
    assert inside.late(10.0) == ((), 0.0)

    log.write_text(REPORT)

    late, age_s = inside.late(20.0)
    assert (len(late), age_s) == (2, 0.0)
    assert outside.late(20.0) == ((), 0.0)
    assert StallReports(str(log), threads[0]).late(20.0) == ((), 0.0)


def test_a_report_is_as_old_as_its_last_line_whatever_else_is_printed(tmp_path: Path):
    log = tmp_path / "rank-0.log"
    reports = StallReports(str(log), waits("/lib/horovod/torch/mpi_ops.py"))
    log.write_text(REPORT)
    late, _ = reports.late(20.0)

    for size in (1, 2, 100_000):
        log.write_text(REPORT + size * "\n")
        assert reports.late(50.0) == (late, 30.0), size

    log.write_text(REPORT + 100_000 * "\n" + REPORT)
    assert reports.late(80.0) == (late, 0.0)

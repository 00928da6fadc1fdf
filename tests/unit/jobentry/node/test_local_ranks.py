"""The ranks of a node: their reports, and how they are stopped, with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Callable

import pytest

from jobentry.contract.exits import Failure
from jobentry.contract.paths import NodePaths
from jobentry.control.loop import Lines
from jobentry.node.local_ranks import End, LocalRanks
from jobentry.system import linux


@pytest.fixture
def ranks(tmp_path: Path) -> LocalRanks:
    """A node without ranks; all its folders are the same."""
    folder = str(tmp_path)
    return LocalRanks(NodePaths(folder, folder, folder, folder, folder))


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    """A list of processes that are killed after the test."""
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def start(processes: list[subprocess.Popen[bytes]], command: str = "exec sleep 60") -> int:
    """Start a shell command as the leader of its own process group, and return its ID."""
    process = subprocess.Popen(["sh", "-c", command], start_new_session=True)
    processes.append(process)
    return process.pid


def test_processes_that_a_rank_waits_for_are_reported(
    ranks: LocalRanks, capsys: pytest.CaptureFixture[str]
):
    assert ranks.handle_event("waits 3 2 python train.py; sleep 9") == ("waits", None)
    assert capsys.readouterr().err == (
        "jobentry: rank 3: its script has ended, but it started processes that still run"
        " (2: python train.py; sleep 9); the rank waits for them\n"
    )


def test_a_started_rank_is_known_by_its_processes(ranks: LocalRanks):
    assert ranks.handle_event("start 3 100 101") == ("start", None)
    assert (ranks.wrappers, ranks.running) == ({3: 100}, [3])


def test_the_end_of_a_rank_is_reported(ranks: LocalRanks):
    """The line has the rank, the exit code, the signal, the time and the message, here empty."""
    ranks.handle_event("start 3 100 101")

    assert ranks.handle_event("end 3 139 11 0 12.5 ") == ("end", End(3, 139, 11, False, 12.5, ""))
    assert ranks.running == []


@pytest.mark.parametrize(
    "line",
    [
        "", "\0", "start", "start 1 2", "start x y z", "start 0 0 0", "start 0 -1 100",
        "start 0 100 1", "start -1 100 101", "start 0 100 %d" % 10**30, "start 0 1e9 101",
        "gone 3", "gone 7", "gone x", "end", "end 3 0 0", "end 7 0 0 0 1.5 ", "end 3 x 0 0 1.5 m",
        "end 3 0 0 0 nan m", "fail 3 0 0 0 inf m", "fail 3 %d 0 0 1.5 m" % 10**30, "other 3",
        "end " + "9" * 10_000,
        "peak 3", "peak 3 x", "peak 7 5", "peak 3 -1", "peak 3 %d" % 10**30, "\udcff\udcfe 3 4",
    ],
)  # fmt: skip
def test_an_invalid_line_is_ignored(ranks: LocalRanks, line: str):
    """Any script can write to the FIFO."""
    ranks.handle_event("start 3 100 101")

    assert ranks.handle_event(line) == ("", None)
    assert (ranks.wrappers, ranks.running, ranks.ends) == ({3: 100}, [3], {})


def test_a_line_without_an_end_is_dropped():
    lines = Lines(limit_bytes=1000)

    assert [lines.feed(b"x" * 600) for _ in range(1000)] == [[]] * 1000
    assert lines.feed(b"x\nstart 1 2 3\n")[-1] == b"start 1 2 3"


def test_a_failed_rank_counts_as_running_until_it_has_exited(ranks: LocalRanks):
    ranks.handle_event("start 0 100 101")
    kind, end = ranks.handle_event("fail 0 1 0 0 1.5 ValueError: a  b")

    assert (kind, end) == ("fail", End(0, 1, 0, False, 1.5, "ValueError: a  b", is_leaving=True))
    assert ranks.running == [0]
    assert ranks.handle_event("gone 0") == ("gone", None)
    assert (ranks.running, ranks.ends) == ([], {0: end})


def test_a_killed_rank_wrapper_is_noticed(
    ranks: LocalRanks, processes: list[subprocess.Popen[bytes]], until: Callable[..., None]
):
    wrapper, program = start(processes, "exit 0"), start(processes)
    ranks.handle_event("start 2 %d %d" % (wrapper, program))
    until(lambda: ranks.missing)
    (end,) = ranks.lost()

    assert end[:4] == (2, 137, signal.SIGKILL, False)
    assert ranks.lost() == []
    assert processes[1].wait(180) == -signal.SIGKILL


def test_killing_a_wrapper_after_a_failure_is_not_a_second_failure(
    ranks: LocalRanks, processes: list[subprocess.Popen[bytes]], until: Callable[..., None]
):
    wrapper = start(processes, "exit 0")
    ranks.handle_event("start 2 %d %d" % (wrapper, wrapper))
    end = ranks.handle_event("fail 2 1 0 0 1.0 Error")[1]
    until(lambda: ranks.missing)

    assert ranks.lost() == []
    assert ranks.ends == {2: end}


def test_a_stop_reaches_all_processes_of_a_rank(
    ranks: LocalRanks, processes: list[subprocess.Popen[bytes]], tmp_path: Path
):
    out = tmp_path / "out"
    wrapper = start(
        processes,
        "(trap 'echo child >>%s; exit' TERM; echo up >>%s; while :; do sleep 0.05; done) & wait"
        % (out, out),
    )
    ranks.handle_event("start 0 %d %d" % (wrapper, wrapper))
    while not out.exists() or out.read_text() != "up\n":
        pass
    ranks.stop()

    assert processes[0].wait(180) == -signal.SIGTERM
    while out.read_text() != "up\nchild\n":
        pass
    assert (tmp_path / "stopping").exists()
    ranks.release()
    assert not (tmp_path / "stopping").exists()
    ranks.release()


def test_a_stop_reaches_a_rank_that_reports_later(
    ranks: LocalRanks, processes: list[subprocess.Popen[bytes]]
):
    wrapper = start(processes)
    ranks.stop()
    ranks.handle_event("start 0 %d %d" % (wrapper, wrapper))

    assert processes[0].wait(180) == -signal.SIGTERM


def test_signals_are_passed_on_to_running_ranks(
    ranks: LocalRanks, processes: list[subprocess.Popen[bytes]]
):
    wrappers = [start(processes) for _ in range(3)]
    for rank, wrapper in enumerate(wrappers):
        ranks.handle_event("start %d %d %d" % (rank, wrapper, wrapper))
    ranks.handle_event("end 0 0 0 0 1.0 ")
    ranks.handle_event("fail 1 1 0 0 1.0 Error")
    ranks.forward_signal(signal.SIGUSR1)

    assert processes[2].wait(180) == -signal.SIGUSR1
    assert [processes[0].poll(), processes[1].poll()] == [None, None]


def test_a_kill_ends_all_processes_of_ranks(
    ranks: LocalRanks, processes: list[subprocess.Popen[bytes]]
):
    wrapper, program, finished = (start(processes) for _ in range(3))
    ranks.handle_event("start 0 %d %d" % (wrapper, program))
    ranks.handle_event("start 1 %d %d" % (finished, finished))
    ranks.handle_event("end 1 0 0 0 1.0 ")
    ranks.kill()

    assert [process.wait(180) for process in processes] == [-signal.SIGKILL] * 3


@pytest.mark.parametrize("line", ["", "end 0 0 0 0 1.0 ", "fail 0 1 0 0 1.0 Error"])
def test_another_process_with_a_reused_id_gets_no_signal(
    ranks: LocalRanks, processes: list[subprocess.Popen[bytes]], line: str
):
    """The rank has ended, with a report or without, and its ids belong to a later process."""
    other = start(processes)
    fields = linux.stat(other)
    fields[19] = b"1"
    with pytest.MonkeyPatch.context() as earlier:
        earlier.setattr(linux, "stat", lambda process: fields)
        ranks.handle_event("start 0 %d %d" % (other, other))
    ranks.handle_event(line)
    ranks.forward_signal(signal.SIGINT)
    ranks.stop()
    ranks.kill()
    ranks.lost()
    os.kill(other, signal.SIGUSR2)

    # SIGINT, SIGTERM and SIGKILL would have ended it earlier.
    assert processes[0].wait(180) == -signal.SIGUSR2


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (End(1, 3, 0, False, 0.0, ""), "ended with exit code 3"),
        (End(1, 1, 0, False, 0.0, "ValueError: x"), "ValueError: x"),
        (End(1, 139, 11, False, 0.0, ""), "killed by SIGSEGV"),
        (
            End(1, 137, 9, False, 0.0, ""),
            "killed by SIGKILL (often the kernel, when memory is short)",
        ),
        (End(1, 178, 50, False, 0.0, ""), "killed by signal 50"),
    ],
)
def test_a_failure_names_place_reason_and_last_lines(
    ranks: LocalRanks, tmp_path: Path, end: End, message: str
):
    (tmp_path / "rank-1.log").write_text("a\nb\n")

    assert ranks.failure(end, 2, "host") == Failure(
        node=2,
        host="host",
        rank=1,
        signal=end.signal or None,
        exit_code=end.code,
        message=message,
        last_lines=("a", "b"),
    )


def test_a_failure_says_what_the_devices_of_its_node_have_reported(ranks: LocalRanks):
    ranks.device_errors = lambda: "GPU 1 reported Xid 79"
    failed = End(1, 1, None, False, 0.0, "RuntimeError: CUDA error")

    assert (
        ranks.failure(failed, 0, "a").message == "RuntimeError: CUDA error; GPU 1 reported Xid 79"
    )
    asked = failed._replace(was_asked_to_end=True)
    assert "Xid" not in ranks.failure(asked, 0, "a").message

"""The stacks of Python processes that a signal ends: real crashes, under the script runner."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Callable, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobentry.contract.exits import Failure
from jobentry.contract.paths import NodePaths
from jobentry.contract.stacks import Frame
from jobentry.node import crashes
from jobentry.node.crashes import Crash, Thread
from jobentry.node.local_ranks import End, LocalRanks
from jobentry.rank import crash_file
from jobentry.secrets import masking


def pythons() -> list[str]:
    """Return the interpreters of other versions that this machine has."""
    paths = sorted((Path.home() / ".pyenv" / "versions").glob("3.[89].*/bin/python"))
    paths += sorted((Path.home() / ".pyenv" / "versions").glob("3.1?.*/bin/python"))
    return [str(path) for path in paths] or [sys.executable]


# PyPy has other words, and survives some of these crashes.
PYTHON = sys.executable if sys.implementation.name == "cpython" else pythons()[-1]


class Crashed(NamedTuple):
    """A script that has ended, its output, and the crashes in its file."""

    code: int
    out: str
    err: str
    crashes: list[Crash]


CrashScript = Callable[..., Crashed]


@pytest.fixture
def crash(zipapp: str, tmp_path: Path) -> CrashScript:
    """A function that runs a script as a rank whose wrapper is this process."""
    (tmp_path / "node").mkdir()
    (tmp_path / "code").mkdir()

    def run(text: str, interpreter: str = PYTHON, **env: str) -> Crashed:
        (tmp_path / "code" / "train.py").write_text(textwrap.dedent(text).lstrip("\n"))
        others = {name: value for name, value in os.environ.items() if name != _VARIABLE}
        done = subprocess.run(
            [interpreter, zipapp, "--script", "train.py"],
            cwd=tmp_path / "code",
            env={**others, "CLOUDJOB_NODE_DIR": str(tmp_path / "node"), **env},
            capture_output=True,
            encoding="utf-8",
            timeout=60,
            check=False,
        )
        path = crash_file.path_of(str(tmp_path / "node"), os.getpid())
        return Crashed(
            done.returncode,
            done.stdout,
            done.stderr,
            crashes.of_file(path, str(tmp_path / "code")),
        )

    return run


_VARIABLE = crash_file.PYTHONFAULTHANDLER
STEP = """
    import ctypes, os
    def step():
        {}  # here
    step()
    """


@pytest.mark.parametrize(
    ("line", "number", "reason"),
    [
        ("ctypes.string_at(0)", signal.SIGSEGV, "Segmentation fault"),
        ("os.kill(os.getpid(), 8)", signal.SIGFPE, "Floating[- ]point exception"),
        ("os.abort()", signal.SIGABRT, "Aborted"),
        ("os.kill(os.getpid(), 7)", signal.SIGBUS, "Bus error"),
        ("os.kill(os.getpid(), 4)", signal.SIGILL, "Illegal instruction"),
    ],
)
def test_the_line_at_which_a_signal_ends_a_script_is_found(
    crash: CrashScript, line: str, number: int, reason: str
):
    crashed = crash(STEP.format(line))

    assert (crashed.code, crashed.out, crashed.err) == (-number, "", "")
    (one,) = crashed.crashes
    assert re.fullmatch(reason, one.reason)
    assert one.process == 0
    assert one.place == f"step() at train.py:3: {line}  # here"
    assert one.stack_lines[0] == "the thread that crashed:"
    assert one.stack_lines[-1] == "  <module> at train.py:4: step()"


@pytest.mark.parametrize("interpreter", pythons())
def test_every_python_writes_its_stacks(crash: CrashScript, interpreter: str):
    crashed = crash(STEP.format("ctypes.string_at(0)"), interpreter)

    assert [one.place for one in crashed.crashes] == [
        "step() at train.py:3: ctypes.string_at(0)  # here"
    ]


def test_the_other_threads_are_kept(crash: CrashScript):
    crashed = crash(
        """
        import ctypes, threading
        ready = threading.Event()
        def wait():
            ready.set()
            threading.Event().wait()
        threading.Thread(target=wait, daemon=True).start()
        ready.wait()
        ctypes.string_at(0)
        """
    )

    (one,) = crashed.crashes
    lines = one.stack_lines
    assert one.place == "<module> at train.py:8: ctypes.string_at(0)"
    assert lines.index("  <module> at train.py:8: ctypes.string_at(0)") < lines.index("thread 1:")
    assert "  wait() at train.py:5: threading.Event().wait()" in lines


def test_a_forked_process_writes_with_its_process_id(crash: CrashScript):
    """As the workers of a data loader: each at its own place, even at the same moment."""
    crashed = crash(
        """
        import ctypes, os
        def load(index):
            ctypes.string_at(index)
        children = []
        for index in range(3):
            children.append(os.fork())
            if not children[-1]:
                load(index)
        for child in children:
            os.waitpid(child, 0)
        print(*children)
        """
    )

    assert crashed.code == 0
    assert [one.process for one in crashed.crashes] == sorted(map(int, crashed.out.split()))
    assert {one.place for one in crashed.crashes} == {
        "load() at train.py:3: ctypes.string_at(index)"
    }


@pytest.mark.parametrize("limit", [256, 4096])
def test_a_script_that_closes_descriptors_gets_no_stacks_in_its_files(
    crash: CrashScript, tmp_path: Path, limit: int
):
    crashed = crash(
        f"""
        import ctypes, os
        os.closerange(3, {limit})
        file = open("mine", "w")
        ctypes.string_at(0)
        """
    )

    assert crashed.code == -signal.SIGSEGV
    assert [one.place for one in crashed.crashes] == (
        ["<module> at train.py:4: ctypes.string_at(0)"] if limit == 256 else []
    )
    assert (tmp_path / "code" / "mine").read_text() == ""


def test_a_forked_process_leaves_alone_what_took_the_number_of_the_file(
    crash: CrashScript, tmp_path: Path
):
    crashed = crash(
        """
        import os
        os.closerange(3, 4096)
        file = os.open("mine", os.O_WRONLY | os.O_CREAT)
        for number in range(4, 1000):
            os.dup2(file, number)
        child = os.fork()
        if not child:
            os.write(700, b"mine")
            os._exit(0)
        os.waitpid(child, 0)
        """
    )

    assert crashed.code == 0
    assert (tmp_path / "code" / "mine").read_text() == "mine"


def test_programs_that_the_script_starts_do_not_get_the_file(crash: CrashScript):
    crashed = crash(
        """
        import os, subprocess
        print(os.listdir("/proc/self/fd"), flush=True)
        subprocess.run(["ls", "-l", "/proc/self/fd"], close_fds=False)
        """
    )

    assert "'700'" in crashed.out
    assert "crash-" not in crashed.out


@pytest.mark.parametrize(
    ("first_line", "value", "is_in_log"),
    [
        ("import faulthandler; faulthandler.enable()", None, True),
        ("pass", "1", True),
        ("pass", "", False),
        ("import faulthandler; faulthandler.disable()", None, False),
    ],
)
def test_the_users_own_choice_wins(
    crash: CrashScript, tmp_path: Path, first_line: str, value: str | None, is_in_log: bool
):
    env = {} if value is None else {_VARIABLE: value}
    crashed = crash(f"{first_line}\nimport ctypes\nctypes.string_at(0)\n", **env)

    assert crashed.code == -signal.SIGSEGV
    assert crashed.crashes == []
    assert ("Fatal Python error: Segmentation fault" in crashed.err) == is_in_log
    log = tmp_path / "rank-0.log"
    log.write_text("before\n" + crashed.err)
    assert [one.place for one in crashes.of_log(str(log), str(tmp_path / "code"))] == (
        ["<module> at train.py:3: ctypes.string_at(0)"] if is_in_log else []
    )


def test_only_the_user_can_read_the_stacks(crash: CrashScript, tmp_path: Path):
    before = os.umask(0)
    try:
        crash("")
    finally:
        os.umask(before)
    path = Path(crash_file.path_of(str(tmp_path / "node"), os.getpid()))

    assert path.stat().st_mode & 0o777 == 0o600


def test_secrets_in_stacks_are_masked(crash: CrashScript):
    masking.mask_secrets_of({"CLOUDJOB_SECRET_NAMES": "S", "S": "hunter2-hunter2"})
    try:
        crashed = crash('import os\nos.kill(os.getpid(), 11), "hunter2-hunter2"\n')
    finally:
        masking.mask_secrets_of({})

    assert [one.place for one in crashed.crashes] == [
        '<module> at train.py:2: os.kill(os.getpid(), 11), "***"'
    ]


# -- reading what anybody may have written ------------------------------------------------------


@given(st.text() | st.text().map(lambda text: f"Fatal Python error: Aborted\n\n{text}"))
def test_any_text_can_be_parsed(text: str):
    crashes.parse(text, "/code")


OF_3_14 = """Fatal Python error: Segmentation fault

Thread 0x00007f00aa [loader] (most recent call first):
  File "/code/data.py", line 7 in load
  File "/code/train.py", line ??? in main

Current thread 0x00007f00bb [python] (most recent call first):
  File "/usr/lib/python3.14/ctypes/__init__.py", line 519 in string_at
  File "/code/train.py", line 41 in step
  File "/code/train.py", line 52 in <module>
  File "/node/entry/jobentry/rank/script_runner.py", line 79 in _run
  File "/node/entry/__main__.py", line 16 in <module>

Current thread's C stack trace (most recent call first):
  Binary file "/lib/libpython3.14.so", at _Py_DumpStack+0x31 [0x7f]

Extension modules: mpi4py.MPI (total: 1)
"""


def test_a_report_with_thread_names_and_a_native_stack_is_read():
    assert crashes.parse(OF_3_14, "/code") == Crash(
        0,
        "Segmentation fault",
        (
            Thread(
                True,
                (
                    Frame("/usr/lib/python3.14/ctypes/__init__.py", 519, "string_at"),
                    Frame("train.py", 41, "step"),
                    Frame("train.py", 52, "<module>"),
                ),
            ),
            Thread(False, (Frame("data.py", 7, "load"), Frame("train.py", 0, "main"))),
        ),
    )


@pytest.mark.parametrize("more", ["", ", approximate line numbers"], ids=["no lock", "PyPy"])
def test_a_report_of_one_stack_is_read(more: str):
    """As PyPy writes it, and a Python without the interpreter lock."""
    head = f"Fatal Python error: Aborted\n\nStack (most recent call first{more}):\n"
    parsed = crashes.parse(head + '  File "/code/x.py", line 3 in f\n', "/code")

    assert parsed is not None
    assert parsed.place == "f() at x.py:3"


def test_what_is_kept_of_a_crash_is_limited():
    calls = '  File "/code/%s.py", line 1 in f\n' % ("x" * 900)
    thread = "Thread 0x00aa (most recent call first):\n" + calls * 100
    text = "Fatal Python error: Aborted\n\n" + thread * 100 + thread.replace("Th", "Current th", 1)
    parsed = crashes.parse(text, "/code")

    assert parsed is not None
    assert parsed.stack_lines[0] == "the thread that crashed:"
    assert len(parsed.stack_lines) <= 200
    assert sum(map(len, parsed.stack_lines)) <= 60_000


@pytest.mark.parametrize("kind", ["fifo", "link", "folder", "missing"])
def test_only_a_plain_file_is_read(tmp_path: Path, kind: str):
    path, other = tmp_path / "crash-5", tmp_path / "other"
    other.write_text("Fatal Python error: Aborted\n")
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(other)
    elif kind == "folder":
        path.mkdir()

    assert crashes.of_file(str(path), "/code") == []
    assert [one.reason for one in crashes.of_file(str(other), "/code")] == ["Aborted"]


# -- the failure of a rank ----------------------------------------------------------------------


@pytest.fixture
def ranks(tmp_path: Path) -> LocalRanks:
    """The ranks of a node with one rank, whose wrapper is this process."""
    folder = str(tmp_path)
    ranks = LocalRanks(NodePaths(folder, folder, folder, folder, folder))
    ranks.handle_event("start 0 %d %d" % (os.getpid(), os.getpid()))
    return ranks


REPORT = """Fatal Python error: {}

Current thread 0x00007f00bb (most recent call first):
  File "{}/code/train.py", line 2 in step
"""


@pytest.mark.parametrize(
    ("end", "process", "message"),
    [
        (End(0, 139, 11, False, 0.0, ""), 0, "killed by SIGSEGV in step() at train.py:2: work(x)"),
        (
            End(0, 1, 0, False, 0.0, "RuntimeError: worker"),
            77,
            "RuntimeError: worker; its process 77: Segmentation fault in step() at train.py:2:"
            " work(x)",
        ),
        (
            End(0, 139, 0, False, 0.0, ""),
            None,
            "ended with exit code 139; Segmentation fault in step() at train.py:2: work(x)",
        ),
        (End(0, 3, 0, False, 0.0, ""), None, "ended with exit code 3"),
        (End(0, 0, 0, False, 0.0, ""), 77, "ended with exit code 0"),
        (End(0, 3, 0, False, time.time() + 10_000, ""), 77, "ended with exit code 3"),
    ],
)
def test_the_failure_of_a_rank_names_the_line(
    ranks: LocalRanks, tmp_path: Path, end: End, process: int | None, message: str
):
    """It is in the rank's file, or in its log: ``process`` is then None."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text("def step():\n    work(x)\n")
    report = REPORT.format("Segmentation fault", tmp_path)
    if process is None:
        (tmp_path / "rank-0.log").write_text(report)
    else:
        path = crash_file.path_of(str(tmp_path), os.getpid())
        with Path(path).open("wb") as file:
            file.seek(process * crash_file.SLOT_BYTES)
            file.write(report.encode())
    failure: Failure = ranks.failure(end, 0, "a")

    assert failure.message == message
    assert bool(failure.stack_lines) == ("step()" in message)

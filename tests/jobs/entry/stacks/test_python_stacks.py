"""Python stacks read from outside are those that the process shows, on each Python that is here."""

from __future__ import annotations

import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Callable, NamedTuple

import pytest

from jobentry.stacks.memory import Memory, UnreadableError
from jobentry.stacks.python_stacks import Frame, Interpreter, PythonThread, python_stacks

# Threads at rest in different kinds of calls; SIGUSR1 lets Python write their stacks.
AT_REST = """
import faulthandler, signal, sys, threading, time
faulthandler.register(signal.SIGUSR1, file=open(sys.argv[1], "w"), all_threads=True)
class Données:
    def lädt(self, lock):
        lock.acquire(
            timeout=600
        )
def generator(seconds):
    yield from (time.sleep(seconds) for _ in range(2))
def deep(depth):
    return deep(depth - 1) if depth else time.sleep(600)
lock = threading.Lock()
lock.acquire()
threads = [
    threading.Thread(target=Données().lädt, args=[lock], daemon=True),
    threading.Thread(target=lambda: list(generator(600)), daemon=True),
    threading.Thread(target=deep, args=[90], daemon=True),
    threading.Thread(target=lambda: sorted([2, 1], key=lambda _: time.sleep(600)), daemon=True),
]
for thread in threads:
    thread.start()
exec(compile("\\n" * 300 + "print('ready', flush=True); time.sleep(600)", "<made up>", "exec"))
"""
# Calls and returns all the time; the name of each function says which ones may call it.
MOVING = """
import sys, threading
def of_main(): return [of_main_a(n) for n in range(9)]
def of_main_a(n): return of_main_a_a(n) + of_main_a_b(n)
def of_main_a_a(n): return sum(map(str.__len__, [str(n)] * 9))
def of_main_a_b(n): return of_main_a_a(n) if n % 2 else max(n, 1)
def of_other(): return [of_other_a(n) for n in range(9)]
def of_other_a(n): return of_other_a_a(n)
def of_other_a_a(n): return len(str(n) * 50)
def churn():
    while True:
        thread = threading.Thread(target=of_other)
        thread.start()
        thread.join()
threading.Thread(target=churn, daemon=True).start()
print("ready", flush=True)
while True: of_main()
"""
CALLERS = {
    "of_main": {"<module>"},
    "of_main_a": {"of_main", "<listcomp>"},
    "of_main_a_a": {"of_main_a", "of_main_a_b"},
    "of_main_a_b": {"of_main_a"},
    "of_other": {"run"},
    "of_other_a": {"of_other", "<listcomp>"},
    "of_other_a_a": {"of_other_a"},
    "<listcomp>": {"of_main", "of_other"},
}


COMPUTING = """
def compute(): return sum(range(10 ** 15))

print("ready", flush=True)
compute()
"""
LOOPING = """
def loop():
    number = 0
    while True:
        number += 1
        number -= 1
print("ready", flush=True)
loop()
"""


class Call(NamedTuple):
    """A call as ``faulthandler`` writes it."""

    file: str
    line: int
    function: str


class Target:
    """A Python process that runs a program."""

    def __init__(self, interpreter: str, program: str, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [interpreter, "-c", program, *arguments], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"


Start = Callable[..., subprocess.Popen]


@pytest.fixture
def start() -> Iterator[Start]:
    """A function that starts a Python program that prints "ready", and kills it at the end."""
    targets: list[Target] = []

    def started(interpreter: str, program: str, *arguments: str) -> subprocess.Popen:
        targets.append(Target(interpreter, program, *arguments))
        return targets[-1].process

    yield started
    for target in targets:
        target.process.kill()
        target.process.communicate()


def interpreters() -> list[str]:
    """Paths of the running interpreter, Debian's, and those of pyenv."""
    others = [Path("/usr/bin/python3"), *Path.home().glob(".pyenv/versions/3.*/bin/python3")]
    existing = [path for path in others if path.exists() and _version(path) >= (3, 8)]
    return sorted({sys.executable, *map(str, existing)})


def _version(path: Path) -> tuple[int, ...]:
    text = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])


@pytest.fixture(params=interpreters())
def interpreter(request: pytest.FixtureRequest) -> str:
    """The path of a Python interpreter."""
    return str(request.param)


def test_stacks_are_those_that_python_shows(
    interpreter: str, start: Start, tmp_path: Path, until: Callable[..., None]
) -> None:
    result = tmp_path / "shown"
    process = start(interpreter, AT_REST, str(result))
    until(lambda: len(_stacks(process.pid)) == 5)
    until(lambda: all(len(thread.frames) > 1 for thread in _stacks(process.pid)[1:]))

    process.send_signal(signal.SIGUSR1)

    until(lambda: "<made up>" in result.read_text() and _as_shown(result) == _as_read(process.pid))


def test_the_main_thread_is_first_and_has_the_process_id(interpreter: str, start: Start) -> None:
    process = start(interpreter, MOVING)

    assert _stacks(process.pid)[0].thread_id == process.pid


@pytest.mark.parametrize("reads", [100, pytest.param(2_000, marks=pytest.mark.lengthy)])
def test_no_torn_stack_is_returned_of_threads_that_call_start_and_end(
    interpreter: str, start: Start, reads: int
) -> None:
    process = start(interpreter, MOVING)
    with Memory(process.pid) as memory:
        _check_reads(Interpreter(memory), reads)

    assert process.poll() is None


class SlowMemory(Memory):
    """Memory whose reader is interrupted between two reads, as on a busy machine."""

    def read(self, address: int, size_bytes: int) -> bytes:
        content = super().read(address, size_bytes)
        end_s = time.perf_counter() + random.random() * 0.0002
        while time.perf_counter() < end_s:
            pass
        return content


@pytest.mark.parametrize("reads", [15, pytest.param(150, marks=pytest.mark.lengthy)])
def test_no_torn_stack_is_returned_to_a_slow_reader(
    interpreter: str, start: Start, reads: int
) -> None:
    process = start(interpreter, MOVING)

    with SlowMemory(process.pid) as memory:
        _check_reads(Interpreter(memory), reads)

    assert process.poll() is None


def test_the_line_of_a_thread_that_computes_in_c_is_exact(
    interpreter: str, start: Start, until: Callable[..., None]
) -> None:
    process = start(interpreter, COMPUTING)
    calls = (Frame("<string>", 2, "compute"), Frame("<string>", 5, "<module>"))
    expected = [PythonThread(process.pid, calls, False)]

    with SlowMemory(process.pid) as memory:
        python = Interpreter(memory)
        # Its call begins a moment after it has said that it is ready.
        until(lambda: python.threads() == expected)


def test_the_function_of_an_endless_loop_is_shown(
    interpreter: str, start: Start, until: Callable[..., None]
) -> None:
    process = start(interpreter, LOOPING)

    def calls(python: Interpreter) -> list[tuple[list[str], bool]]:
        return [
            ([frame.function for frame in thread.frames], thread.is_moving)
            for thread in python.threads()
        ]

    with SlowMemory(process.pid) as memory:
        python = Interpreter(memory)
        until(lambda: calls(python) == [(["loop", "<module>"], True)])


def test_a_blocked_system_call_is_not_interrupted(start: Start) -> None:
    # poll(2) is never restarted: it fails with EINTR after any signal or stop.
    process = start(
        sys.executable,
        "import ctypes\nprint('ready', flush=True)\nprint(ctypes.CDLL(None).poll(None, 0, 1500))",
    )
    while process.poll() is None:
        try:
            python_stacks(process.pid)
        except UnreadableError:
            break

    assert process.stdout is not None
    assert process.stdout.read() == "0\n"


def test_a_stopped_process_can_be_read(start: Start) -> None:
    process = start(sys.executable, "import time\nprint('ready', flush=True)\ntime.sleep(600)")
    process.send_signal(signal.SIGSTOP)

    (thread,) = _stacks(process.pid)

    assert [frame.function for frame in thread.frames] == ["<module>"]
    assert not thread.is_moving


def test_a_process_without_python_is_said_to_have_none() -> None:
    process = subprocess.Popen(["/bin/sleep", "600"])
    try:
        with pytest.raises(UnreadableError, match="no CPython"):
            python_stacks(process.pid)
    finally:
        process.kill()
        process.wait()


def test_a_process_that_has_ended_is_said_to_be_unreadable() -> None:
    process = subprocess.Popen(["/bin/true"])
    process.wait()

    with pytest.raises(UnreadableError, match="cannot be opened"):
        python_stacks(process.pid)


def _check_reads(python: Interpreter, reads: int) -> None:
    """Check that no stack of many is torn; some may be refused, because nothing stood still."""
    refusals, wrong = 0, []
    for _ in range(reads):
        try:
            wrong += _wrong_calls(python)
        except UnreadableError:
            refusals += 1

    assert wrong == []
    assert refusals < reads


def _wrong_calls(python: Interpreter) -> list[list[str]]:
    """Read all stacks, and return those in which a function is called by one that never does."""
    stacks = [[frame.function for frame in thread.frames] for thread in python.threads()]
    return [
        names
        for names in stacks
        if any(
            name in CALLERS and caller not in CALLERS[name]
            for name, caller in zip(names, names[1:])
        )
    ]


def _stacks(process: int) -> list[PythonThread]:
    try:
        return python_stacks(process)
    except UnreadableError:
        return []


def _as_read(process: int) -> list[list[Call]]:
    return sorted([Call(*frame) for frame in thread.frames] for thread in _stacks(process))


def _as_shown(path: Path) -> list[list[Call]]:
    """Return the stacks that ``faulthandler`` has written; it replaces what is not ASCII."""
    threads: list[list[Call]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        match = re.match(r'  File "(.*)", line (\d+) in (.*)', line)
        if match:
            name = match.group(3).encode().decode("unicode_escape")
            threads[-1].append(Call(match.group(1), int(match.group(2)), name))
        elif "most recent call first" in line:
            threads.append([])
    return sorted(threads)

"""Native calls of programs in C, and of Python programs."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobentry.stacks.memory import UnreadableError
from jobentry.stacks.native_calls import NativeStacks, is_arm_call, is_intel_call, readable_name
from jobentry.system import linux
from tests.support.polling import poll

PROGRAM = """
#include <signal.h>
#include <unistd.h>
#include <stdlib.h>
volatile int steps;
void count_signal(int number) { steps++; }
int raise_signals(void) {
    signal(SIGUSR1, count_signal);
    for (int sent = 1; !raise(SIGUSR1) && steps == sent; sent++);
    return 3;
}
__attribute__((noinline)) int wait_for_nothing(void) { pause(); return steps; }
__attribute__((noinline)) int compute(void) { for (;;) steps++; return steps; }
__attribute__((noinline)) int train(int spins) {
    int result = spins ? compute() : wait_for_nothing();
    return result + steps;
}
int main(int count, char **arguments) {
    return count > 2 ? raise_signals() : train(count > 1) + steps;
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> str:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.fail("a C compiler is missing")
    folder = tmp_path_factory.mktemp("native")
    (folder / "program.c").write_text(PROGRAM)
    subprocess.run(
        [compiler, "-O1", "-o", folder / "program", folder / "program.c"], check=True, timeout=180
    )
    return str(folder / "program")


@contextlib.contextmanager
def _running(*argv: str) -> Iterator[int]:
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        try:
            yield process.pid
        finally:
            process.kill()


def _names(process: int, *, may_stop: bool = True) -> list[str]:
    with contextlib.suppress(UnreadableError):
        calls = NativeStacks().calls(process, process, may_stop=may_stop)
        return [call.function for call in calls]
    return []


def test_calls_of_a_program_that_is_blocked(program: str) -> None:
    with _running(program) as process:
        poll(lambda: "pause" in _names(process), "the program to pause")
        names = _names(process, may_stop=False)
    assert names[0] == "pause"
    assert [name for name in names if name in ("wait_for_nothing", "train", "main")] == [
        "wait_for_nothing",
        "train",
        "main",
    ]


def test_calls_of_a_program_that_runs_which_then_goes_on(program: str) -> None:
    with _running(program, "spin") as process:
        poll(lambda: _names(process)[:1] == ["compute"], "the program to compute")
        assert _names(process)[-1] == "main"
        assert _names(process, may_stop=False) == []
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        tracer = Path(f"/proc/{process}/status").read_text().partition("TracerPid:")[2].split()[0]
    assert (state, tracer) == ("R", "0")


def test_a_python_program_shows_what_its_innermost_call_does() -> None:
    script = "import os, time; print('ready', flush=True); time.sleep(600)"
    with _running(sys.executable, "-c", script) as process:
        poll(lambda: any("nanosleep" in name for name in _names(process)), "the sleep")
        names = _names(process, may_stop=False)
    assert not any(name.startswith("_PyEval") for name in names)
    assert not any(name == "main" for name in names)


def test_a_process_that_has_ended_is_unreadable(program: str) -> None:
    with _running(program) as process:
        pass
    with pytest.raises(UnreadableError):
        NativeStacks().calls(process, process, may_stop=True)


@pytest.mark.parametrize("looks", [40, pytest.param(200, marks=pytest.mark.lengthy)])
def test_many_stops_disturb_nothing(looks: int) -> None:
    """A program whose main thread computes, and whose other threads wait, never sees an error."""
    script = (
        "import select, threading, time\n"
        "def poll():\n"
        "    epoll = select.epoll()\n"
        "    while True: epoll.poll(0.01)\n"
        "threading.Thread(target=poll, daemon=True).start()\n"
        "end = time.monotonic() + 600\n"
        "print('ready', flush=True)\n"
        "while time.monotonic() < end: sum(range(1000))\n"
    )
    stacks = NativeStacks()
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            stops = 0
            for _ in range(looks):
                for thread in linux.threads(process.pid):
                    with contextlib.suppress(UnreadableError):
                        stops += bool(stacks.calls(process.pid, thread, may_stop=True))
            assert stops >= looks, "most looks succeed"
            assert process.poll() is None
        finally:
            process.kill()
        assert process.stderr is not None
        assert process.stderr.read() == b""


def test_no_signal_that_arrives_during_a_stop_is_lost(program: str) -> None:
    """The program ends as soon as a signal that it has sent to itself does not arrive."""
    with subprocess.Popen([program, "raise", "signals"]) as process:
        try:
            stops = 0
            for _ in range(20):
                with contextlib.suppress(UnreadableError):
                    stops += bool(NativeStacks().calls(process.pid, process.pid, may_stop=True))
            assert process.poll() is None
            assert stops >= 15, "most looks succeed"
        finally:
            process.kill()


def test_a_program_goes_on_if_its_reader_is_killed(program: str) -> None:
    reader = (
        "import sys, time; from jobentry.stacks import tracing;"
        "tracing.registers_of_running(int(sys.argv[1]), lambda _: time.sleep(600))"
    )

    def state(process: int) -> str:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]

    with _running(program, "spin") as process:
        poll(lambda: _names(process)[:1] == ["compute"], "the program to compute")
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        with subprocess.Popen([sys.executable, "-c", reader, str(process)], env=environ) as tracer:
            poll(lambda: state(process) == "t", "the program to be stopped")
            tracer.kill()
        poll(lambda: state(process) == "R", "the program to go on")


def test_tracing_from_a_thread_leaves_no_child(program: str) -> None:
    with _running(program, "spin") as process:
        poll(lambda: _names(process)[:1] == ["compute"], "the program to compute")
        children = _children()
        names: list[list[str]] = []
        thread = threading.Thread(target=lambda: names.append(_names(process)))
        thread.start()
        thread.join(180)
        assert names[0][0] == "compute"
        assert _children() == children


def _children() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def test_names_of_cpp() -> None:
    assert [
        readable_name(symbol)
        for symbol in (
            "PMPI_Barrier",
            "pthread_cond_wait@@GLIBC_2.3.2",
            "_ZN4c10d4Work4waitENSt6chronoE",
            "_ZNK4gloo9transport4wait",
            "_Z7computev",
            "_ZNSt10_HashtableIPKvSt4pairE5eraseE",
            "_Znwm",
            "_ZN99broken",
            "_ZN3",
        )
    ] == [
        "PMPI_Barrier",
        "pthread_cond_wait",
        "c10d::Work::wait",
        "gloo::transport::wait...",
        "compute",
        "std::_Hashtable...",
        "_Znwm",
        "broken...",
        "...",
    ]


@pytest.mark.parametrize(
    ("before", "is_call"),
    [
        ("0000 e810203040", True),  # call with a relative address
        ("0000000000 ffd0", True),  # call *%rax
        ("00000000 41ffd4", True),  # call *%r12
        ("00 ff1540302010", True),  # call *0x10203040(%rip)
        ("ff942410203040", True),  # call *0x40302010(%rsp)
        ("00000000 ff5008", True),  # call *8(%rax)
        ("00000000 89d8c3", False),  # mov; ret
        ("0000000000 ffe0", False),  # jmp *%rax
    ],
)
def test_calls_of_x86_64(before: str, is_call: bool) -> None:
    assert is_intel_call(bytes.fromhex(before)) is is_call


@pytest.mark.parametrize(
    ("instruction", "is_call"),
    [
        (0x94000010, True),  # bl
        (0x97FFFFF0, True),  # bl backwards
        (0xD63F0100, True),  # blr x8
        (0xD73F0909, True),  # blraa x8, x9
        (0xD63F091F, True),  # blraaz x8
        (0xD61F0100, False),  # br x8
        (0xD65F03C0, False),  # ret
        (0xAA0003E0, False),  # mov x0, x0
    ],
)
def test_calls_of_aarch64(instruction: int, is_call: bool) -> None:
    assert is_arm_call(b"\0\0\0" + instruction.to_bytes(4, "little")) is is_call

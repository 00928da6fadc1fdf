"""The rank wrapper: environment, log and end of a rank, with real programs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobentry.contract import names
from jobentry.control.loop import Lines
from jobentry.log import Relay
from jobentry.node.rank_output import RankOutput
from jobentry.rank import wrapper

TEXT = st.text(st.characters(exclude_characters="\0"), max_size=10)
NAMES = st.from_regex(r"[A-Z_][A-Z0-9_]{0,6}", fullmatch=True) | st.sampled_from(
    sorted(names.PER_NODE) + list(names.CHANGED_BY_OPEN_MPI) + ["LANG", "USER", "MA_X"]
)


def test_a_rank_has_carried_variables_and_those_of_its_node():
    session = {
        "MA_VJ_NAME": "head",
        "LR": "head",
        "MA_CURRENT_IP": "10.0.0.1",
        "VC_TASK_INDEX": "0",
        "OMPI_COMM_WORLD_RANK": "3",
        "PATH": "/openmpi/bin:/session/bin",
        "CLOUDJOB_EXACT_PATH": "/head/bin",
        "TMPDIR": "/tmp/ompi.1",
        "PWD": "/root",
        "USER": "ssh",
        "SSH_CLIENT": "10.0.0.1 22",
        "HWLOC_PLUGINS_PATH": "/of/user",
        "HWLOC_COMPONENTS": names.WITHOUT_DEVICES["HWLOC_COMPONENTS"],
    }
    node = {
        "MA_VJ_NAME": "node",
        "LR": "node",
        "MA_CURRENT_IP": "10.0.0.2",
        "VC_TASK_INDEX": "1",
        "TOKEN": "secret",
        "TMPDIR": "/node/tmp",
        "PWD": "/node/code",
        "PATH": "/node/bin",
        "USER": "node",
    }

    assert wrapper.rank_environment(session, node) == {
        "MA_VJ_NAME": "head",
        "LR": "head",
        "MA_CURRENT_IP": "10.0.0.2",
        "VC_TASK_INDEX": "1",
        "OMPI_COMM_WORLD_RANK": "3",
        "TOKEN": "secret",
        "TMPDIR": "/node/tmp",
        "PWD": "/node/code",
        "PATH": "/head/bin",
        "USER": "node",
        "HWLOC_PLUGINS_PATH": "/of/user",
        "PYTHONUNBUFFERED": "1",
    }


def test_without_an_entry_a_rank_keeps_the_session_environment():
    assert wrapper.rank_environment({"USER": "me", "PATH": "/bin"}, {}) == {
        "USER": "me",
        "PATH": "/bin",
        "PYTHONUNBUFFERED": "1",
    }


def test_the_user_may_unset_pythonunbuffered():
    assert wrapper.rank_environment({}, {"PYTHONUNBUFFERED": ""}) == {"PYTHONUNBUFFERED": ""}


@given(st.dictionaries(NAMES, TEXT), st.dictionaries(NAMES, TEXT))
def test_variables_of_other_nodes_do_not_reach_a_rank(
    session: dict[str, str], node: dict[str, str]
):
    environ = wrapper.rank_environment(session, node)

    for name in names.PER_NODE:
        if name in node:
            assert environ[name] == node[name]
    assert set(environ) <= {*session, *node, "PYTHONUNBUFFERED"}
    assert set(node) <= set(environ)


def test_the_environment_of_a_node_is_read_exactly(tmp_path: Path):
    """Values contain newlines, equal signs and bytes that are not UTF-8."""
    (tmp_path / "env").write_bytes(b"A=1\0B=x=y\0C=\0D=a\nb\0E=\xff\0")

    assert wrapper.read_node_env({"CLOUDJOB_NODE_DIR": str(tmp_path)}) == {
        "A": "1", "B": "x=y", "C": "", "D": "a\nb", "E": "\udcff",
    }  # fmt: skip
    assert wrapper.read_node_env({"CLOUDJOB_NODE_DIR": str(tmp_path / "none")}) == {}
    assert wrapper.read_node_env({}) == {}


def test_the_program_follows_two_dashes():
    """A second ``--`` belongs to the program."""
    assert wrapper.program(["--", "a", "--", "b%3A"]) == ["a", "--", "b%3A"]
    assert wrapper.program(["--percent", "--", "%3A", "%253A"]) == [":", "%3A"]


class Node:
    """A node's folder, the rank wrappers started in it, and what reads their reports and output."""

    def __init__(self, folder: Path, zipapp: str) -> None:
        self.folder = folder
        self.logs = folder / "log"
        self.logs.mkdir()
        os.mkfifo(folder / "events")
        self.events = os.open(folder / "events", os.O_RDWR)
        self.reports: list[list[str]] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self._zipapp = zipapp
        self._asked = 0
        self._output = RankOutput(str(self.logs), Relay(str(self.logs)))
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        lines = Lines()
        while data := os.read(self.events, 4096):
            for line in lines.feed(data):
                kind, *values = line.decode().split(" ")
                if kind == "close":
                    return
                if kind == "output":
                    self._output.take(int(values[0]), str(self.folder / "-".join((kind, *values))))
                else:
                    self.reports.append([kind, *values])

    def start(self, *program: str, number: int = 0, **more: str) -> subprocess.Popen[bytes]:
        environ = {
            **os.environ,
            "OMPI_COMM_WORLD_RANK": str(number),
            "CLOUDJOB_NODE_DIR": str(self.folder),
            **more,
        }
        process = subprocess.Popen(
            [sys.executable, self._zipapp, "--rank", "--", *program],
            env=environ,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def log(self, number: int = 0) -> bytes:
        self.lines()  # then the reader has taken the output of each rank, and settle knows it
        self._output.settle(number)
        path = self.logs / ("rank-%d.log" % number)
        return path.read_bytes() if path.exists() else b""

    def lines(self) -> list[list[str]]:
        """Return the reports of the wrappers so far, split at spaces."""
        self._asked += 1
        os.write(self.events, b"asked %d\n" % self._asked)
        while ["asked", str(self._asked)] not in self.reports:
            time.sleep(0.01)
        return [report for report in self.reports if report[0] != "asked"]

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            assert process.stderr is not None
            process.stderr.close()
        os.write(self.events, b"close\n")
        self._reader.join()
        self._output.finish()
        os.close(self.events)


@pytest.fixture
def node(tmp_path: Path, zipapp: str) -> Iterator[Node]:
    """A node without ranks."""
    node = Node(tmp_path, zipapp)
    yield node
    node.close()


def test_a_rank_reports_its_start_and_end(node: Node):
    process = node.start("sh", "-c", "echo $$; exit 3", number=7)

    assert process.wait(180) == 3
    start, end = node.lines()
    assert start == ["start", "7", str(process.pid), node.log(7).decode().strip()]
    assert end[:5] == ["end", "7", "3", "0", "0"]


def test_a_log_keeps_every_byte(node: Node):
    process = node.start("sh", "-c", "printf 'a\\377\\r'; printf b >&2; printf c")

    assert process.wait(180) == 0
    assert node.log() == b"a\xff\rbc"


@pytest.mark.parametrize(
    "attempt",
    [
        "echo warning >/dev/stderr",
        "echo warning >/dev/stdout",
        "echo warning | tee /dev/stderr >/dev/null",
        "echo warning; : >/dev/stdout",
        "echo warning; : >/proc/self/fd/2",
        "echo warning; truncate -s 0 /dev/stdout 2>/dev/null",
        "echo warning; dd if=/dev/null of=/dev/stdout status=none",
        f"{sys.executable} -c \"print('warning', file=open('/dev/stdout', 'w'))\"",
        f"echo warning; {sys.executable} -c 'import os; os.ftruncate(1, 0)' 2>/dev/null",
    ],
)
def test_a_log_cannot_be_truncated_by_its_rank(node: Node, attempt: str):
    process = node.start("sh", "-c", f"echo before; {attempt}; echo after; echo last >&2; exit 3")

    assert process.wait(180) == 3
    assert node.log() == b"before\nwarning\nafter\nlast\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_other_users_in_a_rank_can_open_its_output(node: Node):
    text = "echo out >/dev/stdout; echo error >/dev/stderr"
    process = node.start("setpriv", "--reuid=65534", "--clear-groups", "sh", "-c", text)

    assert process.wait(180) == 0
    assert node.log() == b"out\nerror\n"


def test_what_a_killed_rank_wrote_last_is_in_its_log(node: Node, until: Callable[..., None]):
    """Even if its wrapper is killed with it."""
    process = node.start("sh", "-c", f"seq 20000; touch {node.folder}/done; exec sleep 60")
    until(lambda: (node.folder / "done").exists())
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(180)

    assert node.log() == b"".join(b"%d\n" % number for number in range(1, 20001))


@pytest.mark.parametrize("kill", ["os.kill(os.getpid(), 9)", "os._exit(137)"])
def test_the_most_memory_of_a_killed_program_is_reported(node: Node, kill: str):
    """A shell ends with 137 if a program that it has started is killed."""
    program = f"import os; x = bytearray(200 << 20); {kill}"

    assert node.start(sys.executable, "-c", program, number=4).wait(180) == 137
    peak, end = node.lines()[1:]
    assert peak[:2] == ["peak", "4"]
    assert 200 << 10 < int(peak[2]) < 1000 << 10
    assert end[:3] == ["end", "4", "137"]


def test_a_killed_program_is_reported_with_its_signal(node: Node):
    process = node.start("sh", "-c", "kill -SEGV $$")

    assert process.wait(180) == 139
    assert node.lines()[1][:5] == ["end", "0", "139", "11", "0"]


@pytest.mark.parametrize(
    ("program", "code", "text"),
    [
        ("no-such-program", 127, b"jobentry: starting no-such-program: not found on PATH\n"),
        ("/etc/passwd", 126, b"jobentry: starting /etc/passwd: Permission denied\n"),
        ("/etc", 126, b"jobentry: starting /etc: Permission denied\n"),
    ],
)
def test_a_program_that_cannot_be_started_is_reported(
    node: Node, program: str, code: int, text: bytes
):
    """The exit codes are those of a shell: 127 for not found, 126 for not executable."""
    process = node.start(program)

    assert process.wait(180) == code
    assert node.log() == text


@pytest.mark.parametrize(("name", "is_asked"), [("TERM", 1), ("USR1", 0)])
def test_only_a_signal_that_ends_jobs_excuses_a_rank(
    name: str, is_asked: int, node: Node, until: Callable[..., None]
):
    """SIGUSR1 asks ranks for a checkpoint; what they do later is their own."""
    process = node.start(
        "sh", "-c", f"trap 'echo saved; exit 5' {name}; echo up; while :; do sleep 0.05; done"
    )
    until(lambda: node.log() == b"up\n")
    os.killpg(process.pid, signal.Signals[f"SIG{name}"])

    assert process.wait(180) == 5
    assert node.log().endswith(b"saved\n")
    assert node.lines()[1][:5] == ["end", "0", "5", "0", str(is_asked)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_a_program_has_default_signal_handlers(node: Node, until: Callable[..., None], number: int):
    process = node.start("sleep", "60")
    until(lambda: len(node.lines()) == 1)
    program = int(node.lines()[0][3])
    until(lambda: Path("/proc/%d/comm" % program).read_text() == "sleep\n")
    os.kill(program, number)

    assert process.wait(180) == 128 + number


def test_the_program_dies_with_its_wrapper(node: Node, until: Callable[..., None]):
    process = node.start("sleep", "60")
    until(lambda: len(node.lines()) == 1)
    program = int(node.lines()[0][3])
    process.kill()

    def is_gone() -> bool:
        try:
            return ") Z " in Path("/proc/%d/stat" % program).read_text()
        except OSError:
            return True

    until(is_gone)


def test_a_program_whose_wrapper_died_early_does_not_start(tmp_path: Path):
    text = """
import os, sys
from jobentry.rank import wrapper
parent = os.getpid()
def asks_too_late(option, value):
    while os.getppid() == parent:
        pass
wrapper.linux.prctl = lambda: asks_too_late
wrapper._start(["touch", "started"], dict(os.environ))
"""
    process = subprocess.run(
        [sys.executable, "-c", text],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        # Reading from the pipe also waits for the program, which inherits it.
        stdout=subprocess.PIPE,
        timeout=180,
        check=True,
    )

    assert process.stdout == b""
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize("code", [0, 3])
def test_a_rank_ends_after_background_processes_of_its_script(
    node: Node, until: Callable[..., None], code: int
):
    go = node.folder / "go"
    wait = f"while [ ! -e {go} ]; do sleep 0.05; done"
    process = node.start("bash", "-c", f"for i in 1 2; do ({wait}; exit {code}) & done; exit 0")
    until(lambda: len(node.lines()) == 2)
    go.touch()

    assert process.wait(180) == code
    _, waiting, end = node.lines()
    assert waiting[:3] == ["waits", "0", "2"]
    assert " ".join(waiting[3:]).startswith("bash -c for i in 1 2;")
    assert end[:5] == ["end", "0", str(code), "0", "0"]


def test_a_rank_does_not_wait_for_daemons(node: Node):
    has_session = 'read -r _ _ _ _ _ session _ </proc/$!/stat; [ "$session" = $! ]'
    process = node.start(
        "bash", "-c", f"setsid sleep 600 >&- 2>&- & echo $!; until {has_session}; do :; done"
    )

    assert process.wait(180) == 0
    assert [fields[0] for fields in node.lines()] == ["start", "end"]
    os.kill(int(node.log()), signal.SIGKILL)


def test_processes_that_a_script_kills_are_not_a_failure(node: Node):
    process = node.start("bash", "-c", "sleep 600 & kill $!; exit 0")

    assert process.wait(180) == 0


def test_a_cancel_ends_background_processes_of_a_script(node: Node, until: Callable[..., None]):
    process = node.start("bash", "-c", "sleep 600 & exit 0")
    until(lambda: len(node.lines()) == 2)
    os.killpg(process.pid, signal.SIGTERM)

    assert process.wait(180) == 143
    assert node.lines()[2][:5] == ["end", "0", "143", "15", "1"]


def test_the_wrapper_waits_while_the_job_is_stopped(node: Node, until: Callable[..., None]):
    """When the first rank exits, mpirun stops all, so none exits before the others are done."""
    process = node.start("sh", "-c", "until [ -e go ]; do sleep 0.05; done", PWD=str(node.folder))
    until(lambda: len(node.lines()) == 1)
    (node.folder / "stopping").touch()
    (node.folder / "go").touch()
    until(lambda: len(node.lines()) == 2)
    assert process.poll() is None
    (node.folder / "stopping").unlink()

    assert process.wait(180) == 0


def test_a_rank_does_not_start_while_the_job_is_stopped(node: Node):
    (node.folder / "stopping").touch()
    process = node.start("echo", "hello")

    assert (process.wait(180), node.log()) == (143, b"")


def test_a_rank_waits_until_all_workers_are_connected(tmp_path: Path):
    (tmp_path / "waiting").touch()
    waiter = threading.Thread(target=wrapper._wait_for_workers, args=(str(tmp_path),))
    waiter.start()
    assert waiter.is_alive()

    (tmp_path / "waiting").unlink()

    waiter.join(60)
    assert not waiter.is_alive()


def test_a_rank_runs_in_its_nodes_code(node: Node):
    """Each node has its own copy of the code; mpirun knows only the head's."""
    code = node.folder / "code"
    code.mkdir()
    (node.folder / "env").write_bytes(b"PATH=/usr/bin:/bin\0PWD=" + os.fsencode(code) + b"\0LR=1\0")
    process = node.start("sh", "-c", 'pwd; echo "$LR"', PWD="/", LR="2")

    assert process.wait(180) == 0
    assert node.log() == os.fsencode(code) + b"\n2\n"


def test_a_missing_secret_is_reported(node: Node):
    process = node.start("true", CLOUDJOB_SECRET_NAMES="TOKEN HOME KEY")

    assert process.wait(180) == 125
    assert node.log() == b"jobentry: secret TOKEN, KEY did not reach this node\n"


def test_the_wrapper_works_without_an_entry(zipapp: str):
    """The program writes to the standard output of the wrapper."""
    environ = {name: value for name, value in os.environ.items() if "CLOUDJOB" not in name}
    done = subprocess.run(
        [sys.executable, zipapp, "--rank", "--percent", "--", "echo", "%3A", "100%25"],
        env=environ,
        stdout=subprocess.PIPE,
        check=False,
    )

    assert (done.returncode, done.stdout) == (0, b": 100%\n")


def test_a_failing_script_reports_before_it_exits(node: Node, until: Callable[..., None]):
    script = node.folder / "x.py"
    script.write_text(
        "import atexit, time\natexit.register(time.sleep, 60)\nraise ValueError('too\\nlong')\n"
    )
    process = node.start(sys.executable, node._zipapp, "--script", str(script), number=2)
    until(lambda: len(node.lines()) == 2)
    report = node.lines()[1]

    assert report[:3] + report[6:] == ["fail", "2", "1", "ValueError:", "too"]
    assert process.wait(180) == 1
    assert node.lines()[2] == ["gone", "2"]
    assert node.log(2).endswith(b"ValueError: too\nlong\n")


TORCH_SCRIPT = """\
import atexit, signal, time, torch.distributed
def leave():
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    print("leaving", flush=True)
    time.sleep(60)
atexit.register(leave)
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
print("up", flush=True)
{wait}
"""


# Not signal.pause(): the signal may come before it, and it would wait for another one.
WAIT = "while not asked: time.sleep(0.01)"


@pytest.mark.parametrize(
    ("wait", "was_asked"), [("", "0"), (WAIT, "1")], ids=["not asked", "asked"]
)
def test_a_script_of_torch_that_is_ended_while_it_leaves_had_ended_well(
    node: Node, until: Callable[..., None], wait: str, was_asked: str
):
    """Its connections may be closed, and other ranks have failed, before it has exited."""
    (node.folder / "torch").mkdir()
    for name in ("__init__.py", "distributed.py"):
        (node.folder / "torch" / name).write_text("")
    script = node.folder / "x.py"
    script.write_text(TORCH_SCRIPT.format(wait=wait))
    process = node.start(sys.executable, node._zipapp, "--script", str(script))
    until(lambda: b"up" in node.log())
    if wait:
        os.killpg(process.pid, signal.SIGTERM)
    until(lambda: b"leaving" in node.log())
    left_at_s = time.time()
    os.killpg(process.pid, signal.SIGTERM)

    process.wait(180)
    kind, _, code, _, asked, at_s, *_ = node.lines()[1]
    assert (kind, code, asked) == ("end", "0", was_asked)
    assert float(at_s) <= left_at_s

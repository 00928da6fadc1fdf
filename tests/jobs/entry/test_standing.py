"""Ranks that do not move are noticed: real processes that wait, compute, stop and go on."""

from __future__ import annotations

import concurrent.futures
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jobentry.contract.hangs import Activity, Progress, Standing
from jobentry.contract.journal import Device
from jobentry.contract.paths import NodePaths
from jobentry.contract.stacks import Frame
from jobentry.contract.waits import Wait
from jobentry.node.collectives import Launched
from jobentry.node.local_ranks import LocalRanks
from jobentry.node.profiling import take_profile
from jobentry.node.standing import Devices, Pace, Reports, StandingRanks
from jobentry.system import linux

# A wrapper: its child is the program of the rank.
WRAPPER = "import subprocess, sys; subprocess.call(sys.argv[1:])"
SCALE = 0.02
# Programs of CPython can be read, also by an entry that PyPy runs.
PYTHON = sys.executable if sys.implementation.name == "cpython" else "/usr/bin/python3"


class Node:
    """A node with ranks; each rank has a process that stands in for its wrapper."""

    def __init__(self, folder: Path, until: Callable[..., None]) -> None:
        self.folder = folder
        self._until = until
        self._wrappers: list[subprocess.Popen[bytes]] = []
        self.paths = paths = NodePaths(*[str(folder)] * 5)
        self.ranks = LocalRanks(paths)
        self.reports: list[list[Standing]] = []
        self.launched: dict[int, Launched] = {}
        self.devices: tuple[Device, ...] = ()
        self.standing = StandingRanks(
            self.ranks,
            paths,
            3,
            Reports(self.reports.append, lambda shares: None),
            Pace(SCALE),
            Devices(lambda: self.devices, lambda: self.launched),
        )

    def start(self, rank: int, *command: str) -> int:
        wrapper = subprocess.Popen(
            [sys.executable, "-c", WRAPPER, *command], start_new_session=True, cwd=self.folder
        )
        self._wrappers.append(wrapper)
        children = Path(f"/proc/{wrapper.pid}/task/{wrapper.pid}/children")
        self._until(lambda: children.read_text().split())
        child = int(children.read_text().split()[0])
        self.ranks.handle_event("start %d %d %d" % (rank, wrapper.pid, child))
        return child

    def start_python(self, rank: int, text: str) -> int:
        path = self.folder / f"job{rank}.py"
        path.write_text(text)
        return self.start(rank, PYTHON, str(path))

    def found(self) -> dict[int, Standing]:
        """Look once, and return the ranks that do not move, as they were reported last."""
        self.standing.look()
        return {each.rank: each for each in self.reports[-1]} if self.reports else {}

    def await_all(self, *ranks: int) -> dict[int, Standing]:
        # Another look may differ: on a busy machine, a rank that runs may stand still for a while.
        seen: list[dict[int, Standing]] = []
        self._until(lambda: (seen.append(self.found()), set(seen[-1]) == set(ranks))[1])
        return seen[-1]

    def close(self) -> None:
        self.standing.close()
        for wrapper in self._wrappers:
            os.killpg(wrapper.pid, signal.SIGKILL)
            wrapper.wait()


def build(folder: Path, source: str, name: str = "libmpi_solver.so") -> str:
    """Return the path of a library with this C code."""
    path = folder / name
    (folder / "solver.c").write_text(source)
    command = ["cc", "-O1", "-fPIC", "-shared", "-fno-optimize-sibling-calls", "-o", str(path)]
    subprocess.run([*command, str(folder / "solver.c")], check=True, timeout=180)
    return str(path)


@pytest.fixture
def node(tmp_path: Path, until: Callable[..., None]) -> Iterator[Node]:
    new_node = Node(tmp_path, until)
    yield new_node
    new_node.close()


def test_a_rank_that_waits_is_reported_with_its_place(node: Node):
    os.mkfifo(node.folder / "pipe")
    node.start_python(1, "def load():\n    return open('pipe').read()\nload()\n")

    standing = node.await_all(1)[1]

    assert standing[:4] == (1, 3, Activity.IDLE, Wait.FILE)
    assert standing.does == "opening a pipe that no other process has opened"
    assert standing.place == ("job1.py", 2, "load", "return open('pipe').read()")
    assert standing.still_s >= 25 * SCALE
    assert standing.cpu_percent < 5


STUCK = {
    "import time\ntime.sleep(600)": "sleeping",
    "import threading\nlock = threading.Lock()\nlock.acquire()\nlock.acquire()": (
        "waiting for a lock or another thread"
    ),
    "import ctypes\nctypes.PyDLL(None).sleep(600)": "sleeping",
    "import multiprocessing\nmultiprocessing.Queue().get()": "reading from a pipe",
    "import subprocess\nsubprocess.run(['sleep', '600'])": "waiting for a child process",
    "import socket, urllib.request\n"
    "server = socket.create_server(('127.0.0.1', 0))\n"
    "urllib.request.urlopen('http://127.0.0.1:%d' % server.getsockname()[1])": "waiting for data",
    "import multiprocessing\n"
    "pipes = multiprocessing.Pipe()\n"
    "pipes[0].recv()": "waiting for data of a socket",
    "import multiprocessing\n"
    "pipes = multiprocessing.Pipe()\n"
    "pipes[0].send(bytes(10**7))": "writing to a socket that nobody reads",
    "import os, pty, sys\n"
    "terminal, end = pty.openpty()\n"
    "os.dup2(end, 0)\n"
    "input('go on? ')": "waiting for input",
    "import fcntl, os\n"
    "files = open('lock', 'w'), open('lock', 'w')\n"
    "fcntl.flock(files[0], fcntl.LOCK_EX)\n"
    "fcntl.flock(files[1], fcntl.LOCK_EX)": "waiting for a lock on a file",
}


def test_what_a_rank_waits_for_is_named_with_the_line_of_its_script(node: Node):
    for rank, text in enumerate(STUCK):
        node.start_python(rank, text)

    standing_of = node.await_all(*range(len(STUCK)))

    for rank, (text, does) in enumerate(STUCK.items()):
        lines = text.splitlines()
        assert standing_of[rank].does.startswith(does), standing_of[rank]
        assert standing_of[rank].activity is Activity.IDLE
        assert standing_of[rank].place[:2] == ("job%d.py" % rank, len(lines)), standing_of[rank]
        assert standing_of[rank].place[3] == lines[-1]


def test_what_a_rank_does_tells_one_that_computes_from_one_that_waits(node: Node):
    node.start_python(0, "while True: pass")
    node.start_python(1, "def f():\n    sum(range(10**15))\nf()")
    node.start_python(2, "import time\ntime.sleep(600)")
    node.start_python(3, "import time\nclass comm: Barrier = time.sleep\ncomm.Barrier(600)")

    node.start_python(
        4, "import asyncio\nasync def serve():\n    while True: await asyncio.sleep(.05)\n"
        "asyncio.run(serve())"
    )  # fmt: skip

    expected = {
        0: (Activity.BUSY, Wait.NOTHING),
        1: (Activity.BUSY, Wait.NOTHING),
        2: (Activity.IDLE, Wait.SLEEP),
        3: (Activity.WAITING, Wait.RANKS),
        4: (Activity.BUSY, Wait.EVENTS),
    }

    def seen() -> bool:
        standing_of = node.await_all(*expected)
        assert standing_of[3].operation == "barrier"
        return expected == {rank: (each.activity, each.wait) for rank, each in standing_of.items()}

    # A rank may not wake up once within the fraction of a second in which the usage is measured.
    node._until(seen)


def test_a_rank_whose_thread_downloads_is_busy(node: Node):
    """It receives with ``recv``, which /proc/PID/io does not count."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        node.start_python(
            0,
            "import socket, threading\n"
            f"stream = socket.create_connection({server.getsockname()})\n"
            "def download():\n    while stream.recv(4096): pass\n"
            "threading.Thread(target=download).start()\n"
            "lock = threading.Lock()\nlock.acquire()\nlock.acquire()\n",
        )
        stream, _ = server.accept()
    with stream, concurrent.futures.ThreadPoolExecutor() as pool:
        ended = threading.Event()
        pool.submit(
            lambda: [stream.sendall(bytes(50_000)) for _ in iter(lambda: ended.wait(0.02), True)]
        )

        def is_busy() -> bool:
            standing = node.await_all(0)[0]
            return standing.activity is Activity.BUSY and standing.moved_bytes_s >= 100_000

        try:
            # On a busy machine, little may arrive in the first fraction of a second.
            node._until(is_busy)
        finally:
            ended.set()


def test_the_threads_of_horovod_do_not_make_a_rank_busy(node: Node):
    """They talk to those of other ranks a thousand times a second; a thread of rank 1 computes."""
    source = (
        "#include <pthread.h>\nvolatile int n;\n"
        "void *loop(void *none) { for (;;) n++; }\n"
        "void start(void) { pthread_t thread; pthread_create(&thread, 0, loop, 0); }\n"
    )
    for rank, name in enumerate(("mpi_lib_v2.so", "solver.so")):
        library = build(node.folder, source, name)
        node.start_python(
            rank, f"import ctypes, time\nctypes.CDLL({library!r}).start()\ntime.sleep(600)\n"
        )

    def are_told_apart() -> bool:
        standing = node.await_all(0, 1)
        # On a busy machine, rank 1 may get no CPU for a moment, and what the process and the thread
        # of rank 0 have used may be read at different times.
        return [standing[rank].activity for rank in (0, 1)] == [Activity.IDLE, Activity.BUSY]

    node._until(are_told_apart)


def test_a_rank_that_waits_for_others_in_c_code_waits_also_if_it_spins(node: Node):
    """Only its C functions show that it waits: no line of Python says so."""
    library = build(
        node.folder,
        "volatile int n; int MPI_Barrier(void) { for (;;) n++; }\n"
        "int solve(void) { return MPI_Barrier() + n; }\n",
    )
    process = node.start_python(0, f"import ctypes\nctypes.CDLL({library!r}).solve()\n")

    standing = node.await_all(0)[0]

    assert (standing.activity, standing.wait) == (Activity.WAITING, Wait.RANKS)
    assert standing.does == "waiting for other ranks (MPI_Barrier)"
    assert linux.stat(process)[0] == b"R", "it goes on"


@pytest.mark.parametrize("is_seen_before", [True, False], ids=["seen before", "first seen then"])
def test_a_rank_that_has_left_its_script_is_reported_with_the_call_in_which_it_waits(
    node: Node, until: Callable[..., None], is_seen_before: bool
):
    """As with mpi4py, which calls MPI_Finalize when Python is at its end and runs no calls."""
    library = build(
        node.folder,
        "#include <stdlib.h>\n"
        "volatile int n; int MPI_Finalize(void) { for (;;) n++; }\n"
        'void at_exit(void) { system("touch left"); n = MPI_Finalize() + n; }\n',
    )
    os.mkfifo(node.folder / "pipe")
    node.start_python(
        0,
        f"import ctypes\nlibrary = ctypes.CDLL({library!r})\nopen('pipe').close()\n"
        "ctypes.pythonapi.Py_AtExit(library.at_exit)\n",
    )
    if is_seen_before:
        assert node.await_all(0)[0].place.file == "job0.py"
    os.close(os.open(node.folder / "pipe", os.O_WRONLY))
    until((node.folder / "left").exists)

    until(lambda: any(not each.place.file for each in node.found().values()))
    standing = node.found()[0]

    assert (standing.activity, standing.wait) == (Activity.WAITING, Wait.RANKS)
    assert (standing.place.file, standing.operation) == ("", "finalize")
    profile = take_profile(node.ranks, node.paths, 3, 0, 0.1)
    assert profile is not None
    assert profile.problem == "it has not begun to run Python, or is at its end"


def test_a_rank_that_moves_is_not_reported(node: Node, until: Callable[..., None]):
    node.start_python(0, "import time\nwhile True:\n    time.sleep(.01)\n    sum(range(300_000))")
    node.start_python(1, "import time\ntime.sleep(600)")

    assert set(node.await_all(1)) == {1}


def test_a_rank_that_moves_again_is_reported_and_its_stay_remembered(
    node: Node, until: Callable[..., None]
):
    text = "import os, time\ndef step(n):\n    os.read(0, 1)\nstep(1)\nos.write(1, b'x')\nstep(2)\n"
    read, write = os.pipe()
    path = node.folder / "job.py"
    path.write_text(text)
    node.start(0, "sh", "-c", f"exec {PYTHON} job.py < /proc/{os.getpid()}/fd/{read}")
    stayed_s = node.await_all(0)[0].still_s

    os.write(write, b"12")
    until(lambda: node.found() == {})
    os.close(write)
    os.close(read)

    (longest_s,) = set(node.standing._longest_s.values())
    assert longest_s >= stayed_s


def test_a_stopped_rank_is_gone(node: Node, until: Callable[..., None]):
    program = node.start_python(0, "import time\ntime.sleep(600)")
    node.await_all(0)

    os.kill(program, signal.SIGSTOP)
    until(lambda: node.found()[0].activity is Activity.GONE)
    assert node.found()[0].does == "stopped by a signal"

    os.kill(program, signal.SIGCONT)
    until(lambda: node.found()[0].activity is Activity.IDLE)


def test_the_program_that_a_shell_or_a_launcher_has_started_counts(node: Node):
    (node.folder / "inner.py").write_text("import time\ndef inner(): time.sleep(600)\ninner()\n")
    command = f"{PYTHON} inner.py"
    node.start(0, "bash", "-c", f"{command}; echo")
    node.start_python(1, f"import subprocess\nsubprocess.run({command.split()})")

    node.start_python(
        2,
        "import multiprocessing\nfork = multiprocessing.get_context('fork')\n"
        "queue = fork.Queue()\nprocess = fork.Process(target=queue.put, args=(bytes(10**6),))\n"
        "process.start()\nprocess.join()\n",
    )

    standing_of = node.await_all(0, 1, 2)

    assert [standing_of[rank].place.function for rank in (0, 1)] == ["inner", "inner"]
    assert standing_of[0].does == "sleeping"
    waits = r"sleeping; process \d+, for which <module>\(\) at job1\.py:2 waits"
    assert re.fullmatch(waits, standing_of[1].does), standing_of[1]
    # It waits at its end, not where it was forked.
    assert "for which <module>() at job2.py:6 waits" in standing_of[2].does
    assert standing_of[2].place.file != "job2.py"


PROGRAM = """\
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
volatile int n;
extern int MPI_Barrier(void), MPI_Bcast(void);
void stuck(void) { pause(); n++; }
void repeats(void) { for (volatile int i = 0; ; i++) n = MPI_Bcast() + i; }
void later(void) { while (access("moves-on", F_OK)) n = MPI_Barrier(); stuck(); }
int main(int count, char **words) {
    switch (atoi(words[1])) {
        case 0: n = MPI_Barrier(); break;
        case 1: stuck(); break;
        case 2: repeats(); break;
        case 3: for (;;) n++;
        case 4: later(); break;
    }
    return n;
}
"""


def test_a_program_without_python_is_reported_if_it_waits_for_others_or_never_runs(
    node: Node, until: Callable[..., None]
):
    """Rank 2 makes the same call again and again, rank 3 computes, and rank 5 has no MPI."""
    library = build(
        node.folder,
        "#include <unistd.h>\nvolatile int n;\n"
        'int MPI_Barrier(void) { while (access("moves-on", F_OK)) n++; return n; }\n'
        "int MPI_Bcast(void) { for (int at = 0; at < 3000000; at++) n++; return n; }\n",
    )
    (node.folder / "solve.c").write_text(PROGRAM)
    command = ["cc", "-O1", "-fno-optimize-sibling-calls", "-o", "solve", "solve.c", library]
    subprocess.run(command, cwd=node.folder, check=True, timeout=180)
    for rank in range(4):
        node.start(rank, "./solve", str(rank))
    node.start(4, "sh", "-c", "./solve 4; true")
    node.start(5, "sleep", "600")

    standing = node.await_all(0, 1, 4)

    assert [(each.activity, each.wait) for _, each in sorted(standing.items())] == [
        (Activity.WAITING, Wait.RANKS),
        (Activity.IDLE, Wait.OTHER),
        (Activity.WAITING, Wait.RANKS),
    ]
    assert standing[0].place == Frame("solve", 0, "MPI_Barrier")
    assert standing[1].place == Frame("solve", 0, "stuck")

    (node.folder / "moves-on").touch()
    until(lambda: 0 not in node.found())
    until(lambda: node.found().get(4, standing[4]).place.function == "stuck")


def test_a_thread_that_waits_for_others_excuses_its_main_thread(node: Node):
    """Rank 0 waits for the end of its thread, rank 1 for a signal."""
    library = build(node.folder, "#include <unistd.h>\nint MPI_Recv(void) { pause(); return 0; }\n")
    (node.folder / "solve.c").write_text(
        "#include <pthread.h>\n#include <unistd.h>\nvolatile int n;\nextern int MPI_Recv(void);\n"
        "void *receive(void *none) { n = MPI_Recv(); return none; }\n"
        "int main(int count, char **words) {\n"
        "    pthread_t thread;\n"
        "    pthread_create(&thread, 0, receive, 0);\n"
        "    return count > 1 ? pause() : pthread_join(thread, 0);\n"
        "}\n"
    )
    command = ["cc", "-O1", "-pthread", "-o", "solve", "solve.c", library]
    subprocess.run(command, cwd=node.folder, check=True, timeout=180)
    node.start(0, "./solve")
    node.start(1, "./solve", "pause")

    standing = node.await_all(0, 1)

    waiting = (Activity.WAITING, Wait.RANKS)
    assert [(each.activity, each.wait) for _, each in sorted(standing.items())] == [waiting] * 2


def test_a_rank_is_still_reported_if_looks_are_so_rare_that_each_measurement_is_old(node: Node):
    """Without a report it would seem to move. Looks are rare where one of them costs much."""
    node.start_python(0, "import time\ntime.sleep(600)")
    node.await_all(0)

    time.sleep(1.1 * 60 * SCALE)

    assert set(node.found()) == {0}


def test_the_end_of_a_rank_ends_its_report(node: Node, until: Callable[..., None]):
    program = node.start_python(0, "import time\ntime.sleep(600)")
    node.await_all(0)

    os.kill(program, signal.SIGKILL)

    until(lambda: node.found() == {})


def test_a_loop_that_makes_the_same_call_again_and_again_moves(node: Node):
    loop = "for number in range(10**9):\n    time.sleep(.3)"
    node.start_python(0, f"import time\n{loop}\n")
    node.start_python(
        1, "import time\ndef main():\n  {}\nmain()\n".format(loop.replace("\n", "\n  "))
    )
    node.start_python(2, "import time\ntime.sleep(600)")
    # The variables of earlier versions are not read.
    is_new = subprocess.check_output(
        [PYTHON, "-c", "import sys; print(sys.version_info >= (3, 11))"]
    )
    standing = {2} if is_new == b"True\n" else {0, 1, 2}
    node.await_all(*standing)

    seen = [set(node.found()) for _ in range(200) if time.sleep(0.01) is None]

    assert seen == [standing] * 200


@pytest.mark.parametrize(
    ("power_w", "computes"),
    [(521.0, True), (124.0, False)],
    ids=["multiplies matrices", "waits in a collective"],
)
def test_a_report_says_what_the_devices_do_and_which_collective_a_rank_has_not_launched(
    node: Node, power_w: float, computes: bool
):
    """Both keep an H200 busy all the time; the power differs."""
    node.devices = (Device("gpu", 0, 100.0, power_w=power_w, power_limit_w=700.0),)
    child = node.start_python(4, "import time\ntime.sleep(600)\n")
    node.start_python(5, "import time\ntime.sleep(600)\n")
    node.launched = {child: Launched(Progress.BEHIND, "AllReduce 31")}

    standing_of = node.await_all(4, 5)

    assert [standing_of[rank].computes for rank in (4, 5)] == [computes, computes]
    assert [standing_of[rank].progress for rank in (4, 5)] == [Progress.BEHIND, Progress.UNKNOWN]
    assert [standing_of[rank].missing for rank in (4, 5)] == ["AllReduce 31", ""]


# As PyTorch's loader: a process of multiprocessing calls the job's code, and the rank waits for it.
LOADER = """\
import multiprocessing as fork

def batches(load):
    multiprocessing = fork.get_context("fork")
    queue = multiprocessing.Queue()
    busy = multiprocessing.Process(target=lambda: queue.put(load()))
    busy.start()
    while True:
        yield {wait}
"""
LOADING = """\
import sys
sys.path.insert(0, "site-packages")
from torch.utils.data import dataloader

def load():
    with open("fifo") as file:
        return file.read()

for batch in dataloader.batches(load):
    print(batch)
"""


@pytest.mark.parametrize(
    ("wait", "activity", "does"),
    [
        (
            "multiprocessing.Queue().get(timeout=600)",
            Activity.IDLE,
            "waiting for data of its loader",
        ),
        # PyTorch's wakes up now and then, and may be looked at just then.
        ("max(iter(int, 1))", Activity.BUSY, "running"),
    ],
    ids=["blocked", "awake"],
)
def test_a_rank_that_waits_for_its_data_loader_is_reported_with_what_the_loader_does(
    node: Node, wait: str, activity: Activity, does: str
):
    os.mkfifo(node.folder / "fifo")
    folder = node.folder / "site-packages/torch/utils/data"
    folder.mkdir(parents=True)
    (folder / "dataloader.py").write_text(LOADER.format(wait=wait))

    node.start_python(0, LOADING)
    standing = node.await_all(0)[0]

    assert (standing.place.line, standing.activity) == (9, activity)
    assert re.fullmatch(
        does + r"; its process \d+ is in load\(\) at job0\.py:6, "
        r"opening a pipe that no other process has opened",
        standing.does,
    )

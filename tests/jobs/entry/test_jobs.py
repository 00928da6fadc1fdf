"""Head and workers from start to end: complete entries, real ranks and real signals.

Only mpirun is a stand-in: a small program that starts the rank command as mpirun does. tests/jobs
covers real Open MPI versions.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable, NamedTuple

import pytest

from jobentry.contract import exits, journal

MPIRUN = """\
import os, shlex, signal, subprocess, sys, time

args = sys.argv[1:]
if args == ["--version"]:
    print("mpirun (Open MPI) 4.1.4")
    sys.exit()
if "FAKE_CODE" in os.environ:
    print("it is not to be")
    sys.exit(int(os.environ["FAKE_CODE"]))
hang = os.environ.get("FAKE_HANG", "")
with open(os.environ["ALL"] + "/mpiruns", "a") as file:
    file.write("%d\\n" % os.getpid())
with open(os.environ["ALL"] + "/mpiruns") as file:
    is_first = len(file.readlines()) == 1
if hang == "always" or (hang == "first" and is_first):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    agent = args[args.index("plm_rsh_agent") + 1].split()
    # On one node, mpirun starts no remote shell.
    if agent != ["/bin/sh"]:
        subprocess.Popen([*agent, "node1", "exec orted 600"], start_new_session=True)
        subprocess.Popen(["orted", "600"], start_new_session=True)
    os.makedirs("%s/ompi.h.0/pid.%d" % (os.environ.get("TMPDIR", "/tmp"), os.getpid()))
    time.sleep(600)
at = args.index("--rank")
while args[at].startswith("-"):
    at -= 1
program = args[at:]
if not os.access(program[0], os.X_OK) or os.path.isdir(program[0]):
    program = args[args.index(sys.executable) :]
names = [args[i + 1] for i, argument in enumerate(args[:at]) if argument == "-x"]
with open(args[args.index("--tune") + 1]) as file:
    names += [line.split()[1] for line in file]
with open(args[args.index("--hostfile") + 1]) as file:
    slots = [line.split()[0] for line in file for _ in range(int(line.split("slots=")[1]))]
agent = args[args.index("plm_rsh_agent") + 1].split() if "plm_rsh_agent" in args else []
ranks = []
for rank in range(int(args[args.index("-np") + 1])):
    own = {"OMPI_COMM_WORLD_RANK": str(rank)}
    if slots[rank] == slots[0]:
        ranks.append(subprocess.Popen(program, env={**os.environ, **own}, start_new_session=True))
    else:
        if hang == "worker":
            time.sleep(600)
        own.update((name, os.environ[name]) for name in names)
        command = ["env", *("%s=%s" % pair for pair in own.items()), *program]
        argv = [*agent, slots[rank], "exec " + " ".join(map(shlex.quote, command))]
        ranks.append(subprocess.Popen(argv, start_new_session=True))
code = 0
while ranks:
    time.sleep(0.02)
    for rank in list(ranks):
        if rank.poll() is not None:
            ranks.remove(rank)
            if rank.returncode and not code:
                code = rank.returncode
                print("a rank ended badly")
                for other in ranks:
                    other.terminate()
sys.exit(code if code >= 0 else 128 - code)
"""


class Result(NamedTuple):
    """The exit code and the output of an entry."""

    code: int
    out: str
    err: str


class Entry:
    """A running entry."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self.process = process
        self.folder = folder

    @property
    def out(self) -> str:
        """The log without the journal, as a user sees it."""
        text, _ = journal.split((self.folder / "out").read_bytes())
        return text.decode("utf-8", "backslashreplace")

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text()

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, within_s: float = 60.0) -> Result:
        code = self.process.wait(within_s)
        return Result(code, self.out, self.err)


class Job:
    """A job on nodes that share a file system, as emulated nodes do."""

    def __init__(self, folder: Path, zipapp: str) -> None:
        self.folder = folder
        self.code = folder / "code"
        self.code.mkdir()
        self.zipapp = zipapp
        self.nodes = 1
        self.environ: dict[str, str] = {}
        self.entries: list[Entry] = []
        programs = folder / "bin"
        programs.mkdir()
        self._write(programs / "mpirun", "#!%s -IS\n%s" % (sys.executable, MPIRUN))
        self._write(programs / "python", '#!/bin/sh\nexec %s "$@"\n' % sys.executable)
        self.path = "%s:/usr/bin:/bin" % programs
        (programs / "orted").symlink_to("/bin/sleep")
        (folder / "key").write_text("the key of the job")

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o755)

    def script(self, text: str) -> None:
        """Write the script of the job, which can use ``rank`` and the shared folder ``$ALL``."""
        rank = "rank = int(os.environ['OMPI_COMM_WORLD_RANK'])\n"
        modules = "import os, signal, subprocess, sys, time\n"
        (self.code / "x.py").write_text(modules + rank + text)

    def start(self, node: int = 0, **more: str) -> Entry:
        """Start the entry of a node."""
        folder = self.folder / ("node%d" % node)
        (folder / "tmp").mkdir(parents=True, exist_ok=True)
        environ = {
            "PATH": self.path,
            "LC_ALL": "C.UTF-8",
            "HOME": str(folder),
            "MA_HOME": str(folder),
            "TMPDIR": str(folder / "tmp"),
            # Every machine has lo, so no message about network interfaces is printed.
            "NCCL_SOCKET_IFNAME": "lo",
            "OMPI_MCA_btl_tcp_if_include": "lo",
            "CLOUDJOB_JOB": "j",
            "CLOUDJOB_NODE_DIR": str(folder / "node"),
            "CLOUDJOB_CONTROL_DIR": str(self.folder),
            "CLOUDJOB_SSH_KEY": str(self.folder / "key"),
            "CLOUDJOB_RECORD_URI": (self.folder / "exit.json").as_uri(),
            "CLOUDJOB_GRACE_S": "2",
            "CLOUDJOB_START_TIMEOUT_S": "20",
            "VC_WORKER_HOSTS": ",".join("node%d" % index for index in range(self.nodes)),
            "VC_TASK_INDEX": str(node),
            "ALL": str(self.folder),
            **self.environ,
            **more,
        }
        with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
            process = subprocess.Popen(
                [sys.executable, self.zipapp, "x.py"],
                cwd=self.code,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        entry = Entry(process, folder)
        self.entries.append(entry)
        return entry

    def run(self, **more: str) -> list[Result]:
        """Run the entries of all nodes until they exit; the result of the head comes first."""
        entries = [self.start(node, **more) for node in range(self.nodes)]
        return [entry.wait() for entry in entries]

    @property
    def record(self) -> dict[str, Any]:
        """The exit record that the head wrote."""
        values = json.loads((self.folder / "exit.json").read_text())
        assert isinstance(values, dict)
        return values

    @property
    def failure(self) -> dict[str, Any]:
        """The failure in the exit record."""
        values = self.record["failure"]
        assert isinstance(values, dict)
        return values

    def mpiruns(self) -> list[str]:
        """Return the process id of each mpirun that was started."""
        return (self.folder / "mpiruns").read_text().split()

    def kill_node(self, node: int) -> None:
        """Kill all processes of a node at once."""
        for process in self.running_processes("node%d/" % node):
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)

    def running_processes(self, below: str = "") -> list[int]:
        """Return the running processes of this job, or of one of its nodes."""
        mark = os.fsencode("=%s/%s" % (self.folder, below))
        pids = []
        for folder in Path("/proc").iterdir():
            try:
                if mark in (folder / "environ").read_bytes():
                    pids.append(int(folder.name))
            except (OSError, ValueError):
                pass
        return pids

    def close(self) -> None:
        for process in self.running_processes():
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
        for entry in self.entries:
            entry.process.wait()


@pytest.fixture
def job(tmp_path: Path, zipapp: str) -> Iterator[Job]:
    """A job on one node, without a script."""
    job = Job(tmp_path, zipapp)
    yield job
    job.close()


@pytest.fixture
def two_node_job(job: Job) -> Job:
    """A job on two nodes with one slot each."""
    job.nodes = 2
    return job


UP = "open(os.environ['ALL'] + '/up%d' % rank, 'w').close()\n"
# On SIGTERM, a rank saves until the test creates the file `go`.
SAVES = """
def save(*_):
    print('saving', flush=True)
    while not os.path.exists(os.environ['ALL'] + '/go'):
        time.sleep(0.02)
    print('saved', flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
"""
WAIT = "time.sleep(600)\n"
TWO_FAILS_FIRST = """
first = os.environ['ALL'] + '/first'
if rank == 2:
    open(first, 'w').close()
    sys.exit(22)
while not os.path.exists(first):
    time.sleep(0.02)
time.sleep(1.0)
sys.exit(20 + rank)
"""


def ranks_have_started(job: Job, ranks: int) -> Callable[[], bool]:
    """Return a condition that holds once this number of ranks has started."""
    return lambda: all((job.folder / ("up%d" % rank)).exists() for rank in range(ranks))


def pending(entry: Entry) -> int:
    """Return the pending signals of the entry as a bit mask."""
    status = Path("/proc/%d/status" % entry.process.pid).read_text()
    return sum(
        int(line.split()[1], 16)
        for line in status.splitlines()
        if line.startswith(("SigP", "ShdP"))
    )


# -- one node -----------------------------------------------------------------------------------


def test_a_successful_job_ends_with_0_and_leaves_nothing(job: Job):
    job.environ["CLOUDJOB_PROCS_PER_NODE"] = "3"
    job.script("print('hello', rank)\nprint('err', file=sys.stderr)\n")
    (result,) = job.run()
    record = job.record

    assert (result.code, result.err) == (0, "")
    assert sorted(result.out.splitlines()) == [
        "[0] err", "[0] hello 0", "[1] err", "[1] hello 1", "[2] err", "[2] hello 2",
    ]  # fmt: skip
    assert (record["job"], record["exit_code"], record["cause"], record["failure"]) == (
        "j", 0, "", None,
    )  # fmt: skip
    phases = record["phases"]
    assert [phase[:2] for phase in phases] == [
        [0, "stage"], [0, "bring-up"], [0, "run"], [0, "start ranks"], [0, "first output"],
    ]  # fmt: skip
    assert [phase[2] for phase in phases] == sorted(phase[2] for phase in phases)
    assert all(record["started_at"] <= begun <= end <= record["ended_at"]
               for _, _, begun, end in phases)  # fmt: skip
    assert job.running_processes() == []
    assert not (job.folder / "node0" / "node").exists()


# In a crash, PyPy knows only where the code of a function begins.
CRASHED_AT = {
    "cpython": "5: os.kill(os.getpid(), signal.SIGSEGV)",
    "pypy": "1: import os, signal, subprocess, sys, time",
}[sys.implementation.name]


@pytest.mark.parametrize(
    ("text", "code", "number", "message"),
    [
        ("sys.exit(3)", 3, None, "sys.exit(3)"),
        ("sys.exit('no\\nway')", 1, None, "sys.exit('no\\nway')"),
        (
            "os.kill(os.getpid(), signal.SIGSEGV)",
            139,
            11,
            f"killed by SIGSEGV in <module> at x.py:{CRASHED_AT}",
        ),
        (
            "os.kill(os.getppid(), signal.SIGKILL); time.sleep(60)",
            137,
            9,
            "killed by SIGKILL",
        ),
    ],
)
def test_a_rank_that_fails_ends_the_job(
    job: Job, text: str, code: int, number: int | None, message: str
):
    """The other ranks are stopped; the record has the rank, how it ended and its last lines."""
    job.environ["CLOUDJOB_PROCS_PER_NODE"] = "3"
    job.script("print('line of', rank)\nif rank == 1:\n    %s\n%s" % (text, WAIT))
    (result,) = job.run()

    assert result.code == code
    assert "jobentry: rank 1 on node 0 (node0): " + message in result.err
    assert (job.record["exit_code"], job.record["cause"]) == (code, "user")
    assert job.failure["last_lines"][0] == "line of 1"
    assert bool(job.failure["stack_lines"]) == (number == signal.SIGSEGV)
    lines = ("last_lines", "stack_lines")
    # What the kernel's counter says about a kill follows, if this machine has one.
    counts = (exits.MEMORY_GUESS, exits.NOT_FOR_MEMORY)
    failure = {name: value for name, value in job.failure.items() if name not in lines}
    assert failure.pop("message").removeprefix(message) in (counts if number == 9 else ("",))
    assert failure == {
        "node": 0, "host": "node0", "rank": 1, "signal": number, "exit_code": code,
    }  # fmt: skip
    assert job.running_processes() == []


def test_a_missing_program_ends_with_127(job: Job):
    (job.code / "x.py").write_text("")
    (result,) = job.run(MA_SCRIPT_INTERPRETER="/no/python")

    assert (result.code, job.record["cause"]) == (127, "user")
    assert "/no/python" in job.failure["last_lines"][0]


def test_a_repeated_sigterm_does_not_shorten_the_grace_period(job: Job, until: Callable[..., None]):
    """A scheduler sends SIGCONT and SIGTERM again while the ranks save."""
    job.environ.update(CLOUDJOB_GRACE_S="60")
    job.script(
        "def end(number, frame):\n"
        "    print('saving', flush=True)\n"
        "    while not os.path.exists(os.environ['ALL'] + '/go'):\n"
        "        time.sleep(0.02)\n"
        "    print('saved', flush=True)\n"
        "    os._exit(0)\n"
        "signal.signal(signal.SIGUSR1, lambda *_: print('after it', flush=True))\n"
        "signal.signal(signal.SIGTERM, end)\n" + UP + WAIT
    )
    entry = job.start()
    until(ranks_have_started(job, 1))
    entry.send(signal.SIGTERM)
    until(lambda: "saving" in entry.out)
    for number in (signal.SIGCONT, signal.SIGTERM, signal.SIGHUP):
        entry.send(number)
    until(lambda: not pending(entry))
    # The entry handles signals in order: once this one reaches the rank, the others are handled.
    entry.send(signal.SIGUSR1)
    until(lambda: "after it" in entry.out)
    (job.folder / "go").touch()
    result = entry.wait()

    assert (result.code, job.record["cause"]) == (143, "cancelled")
    assert "saved" in result.out
    assert job.running_processes() == []


def test_an_mpirun_that_starts_no_rank_is_an_error_of_the_entry(job: Job):
    job.script("")
    (result,) = job.run(FAKE_CODE="213")

    assert result.code == 125
    assert "jobentry: mpirun: it is not to be" in result.err
    assert (job.record["cause"], job.failure["exit_code"]) == ("entry", 125)
    assert job.failure["message"] == "mpirun ended with exit code 213 before all ranks had started"
    assert job.failure["last_lines"] == ["it is not to be"]


def test_an_mpirun_that_hangs_twice_ends_the_job(job: Job):
    """It is ended after a timeout and started again; the second timeout fails the job."""
    job.script("")
    (result,) = job.run(FAKE_HANG="always", CLOUDJOB_START_TIMEOUT_S="1")

    assert (result.code, job.record["cause"]) == (125, "entry")
    text = "starting the ranks: mpirun started 0 of 1 and then hung for 1 s"
    without = "; without a rank: node 0 (node0)"
    assert result.err.splitlines() == [
        f"jobentry: {text}{without}: ending it, and starting it again",
        f"jobentry: {text}, at the second try, too{without}",
    ]
    assert job.failure["message"] == f"{text}, at the second try, too{without}"
    assert len(job.mpiruns()) == 2
    assert list((job.folder / "node0/tmp/ompi.h.0").iterdir()) == []
    assert job.running_processes() == []


def test_a_killed_mpirun_ends_its_ranks(job: Job, until: Callable[..., None]):
    job.script(UP + WAIT)
    entry = job.start()
    until(ranks_have_started(job, 1))
    (mpirun,) = [
        process
        for process in job.running_processes()
        if b"bin/mpirun" in Path("/proc/%d/cmdline" % process).read_bytes()
    ]
    os.kill(mpirun, signal.SIGKILL)
    result = entry.wait()

    assert (result.code, job.record["cause"]) == (137, "platform")
    assert job.failure["message"] == "mpirun was killed by SIGKILL"
    assert job.running_processes() == []


def test_processes_left_by_ranks_are_killed(job: Job):
    job.script(
        "subprocess.Popen(['setsid', '-f', 'sleep', '60'])\n"
        "subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
    )
    (result,) = job.run()

    assert result.code == 0
    assert job.running_processes() == []


def test_a_killed_entry_can_be_restarted(job: Job, until: Callable[..., None]):
    job.script("signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + UP + WAIT)
    entry = job.start()
    until(ranks_have_started(job, 1))
    entry.send(signal.SIGTERM)
    until(lambda: "s to end" in entry.err)
    entry.send(signal.SIGKILL)
    entry.process.wait()
    for process in job.running_processes():
        # It may have ended since, with the one before it.
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    until(lambda: job.running_processes() == [])
    job.script("print('again')")
    (result,) = job.run()

    assert (result.code, result.out) == (0, "[0] again\n")


# -- two nodes ----------------------------------------------------------------------------------


def test_a_job_runs_on_two_nodes(two_node_job: Job):
    """Each node shows the output of its own ranks and exits with the exit code of the job."""
    two_node_job.environ["CLOUDJOB_PROCS_PER_NODE"] = "2"
    two_node_job.script("print('hello', rank)\n")
    head, worker = two_node_job.run()

    assert (head.code, worker.code) == (0, 0)
    assert sorted(head.out.splitlines()) == ["[0] hello 0", "[1] hello 1"]
    assert sorted(worker.out.splitlines()) == ["[2] hello 2", "[3] hello 3"]
    assert (head.err, worker.err) == ("", "")
    assert two_node_job.running_processes() == []


def test_each_rank_has_the_right_environment(two_node_job: Job):
    """It has the head's exact values, except for secrets and variables of a single node."""
    ugly = "a b\t'\"=;#$HOME\\ \n*ü"
    two_node_job.environ.update(
        CLOUDJOB_ENV_NAMES="LR UGLY EMPTY",
        CLOUDJOB_SECRET_NAMES="TOKEN",
        UGLY=ugly,
        EMPTY="",
        MA_X="k=v",
        S3_Y="plain",
    )
    two_node_job.script(
        "import json\n"
        "with open(os.environ['ALL'] + '/env%d' % rank, 'w') as file:\n"
        "    json.dump(dict(os.environ), file)\n"
    )
    entries = [
        two_node_job.start(0, LR="head", TOKEN="head", MA_CURRENT_IP="10.0.0.1", OTHER="head"),
        two_node_job.start(1, LR="node", TOKEN="node", MA_CURRENT_IP="10.0.0.2", OTHER="node"),
    ]
    assert [entry.wait().code for entry in entries] == [0, 0]
    environments = [
        json.loads((two_node_job.folder / name).read_text()) for name in ("env0", "env1")
    ]

    for environ, node, other in zip(environments, ("head", "node"), ("10.0.0.1", "10.0.0.2")):
        assert (environ["UGLY"], environ["EMPTY"]) == (ugly, "")
        assert (environ["MA_X"], environ["S3_Y"], environ["LR"]) == ("k=v", "plain", "head")
        assert (environ["TOKEN"], environ["OTHER"], environ["MA_CURRENT_IP"]) == (node, node, other)
        assert environ["PATH"] == two_node_job.path
        assert environ["PWD"] == str(two_node_job.code)
        assert not [name for name in environ if name.startswith("CLOUDJOB_EXACT_")]


def test_the_record_names_a_failed_rank_of_a_worker(two_node_job: Job):
    """The record has node, host, rank and the last lines of a log that the head cannot read."""
    two_node_job.script("print('line of', rank)\nif rank:\n    sys.exit(3)\n" + WAIT)
    head, worker = two_node_job.run()

    assert (head.code, worker.code) == (3, 3), (head.err, worker.err)
    assert two_node_job.record["cause"] == "user"
    assert two_node_job.failure == {
        "node": 1, "host": "node1", "rank": 1, "signal": None, "exit_code": 3,
        "message": "sys.exit(3)", "last_lines": ["line of 1"], "stack_lines": [],
    }  # fmt: skip
    assert two_node_job.running_processes() == []


def test_each_node_chooses_its_own_interfaces(two_node_job: Job):
    two_node_job.environ["OPENMPI_X_ARGS"] = "-x NCCL_SOCKET_IFNAME -x HOME"
    two_node_job.script("print(os.environ['NCCL_SOCKET_IFNAME'])\n")
    entries = [
        two_node_job.start(0, NCCL_SOCKET_IFNAME="none7"),
        two_node_job.start(1, NCCL_SOCKET_IFNAME="lo"),
    ]
    head, worker = [entry.wait() for entry in entries]

    assert (head.out, worker.out) == ("[0] none7\n", "[1] lo\n")
    assert head.err.startswith(
        "jobentry: choosing the network: NCCL_SOCKET_IFNAME=none7: no such network interface on"
        " node 0 (node0), which has lo"
    )
    assert worker.err == ""


def test_a_users_interfaces_reach_every_node(two_node_job: Job):
    two_node_job.environ["OPENMPI_X_ARGS"] = "-x NCCL_SOCKET_IFNAME=none7"
    two_node_job.script("print(os.environ['NCCL_SOCKET_IFNAME'])\n")
    head, worker = two_node_job.run()

    assert (head.out, worker.out) == ("[0] none7\n", "[1] none7\n")
    for node, result in enumerate((head, worker)):
        assert f"NCCL_SOCKET_IFNAME=none7: no such network interface on node {node}" in result.err


def test_daemons_of_a_hung_start_are_killed_before_the_next(two_node_job: Job):
    daemons = "[f for f in os.listdir('/proc') if f.isdecimal() and is_daemon(f)]"
    two_node_job.script(
        "def is_daemon(process):\n"
        "    try:\n"
        "        command = open('/proc/' + process + '/cmdline', errors='replace').read()\n"
        "        marks = open('/proc/' + process + '/environ', errors='replace').read()\n"
        "    except OSError: return False\n"
        "    return command.split('\\0')[0] == 'orted' and os.environ['ALL'] in marks\n"
        f"print('daemons', {daemons})\n"
    )
    head, worker = two_node_job.run(FAKE_HANG="first", CLOUDJOB_START_TIMEOUT_S="5")

    assert (head.code, worker.code) == (0, 0), (head, worker)
    assert "ending it, and starting it again" in head.err
    assert (head.out, worker.out) == ("[0] daemons []\n", "[1] daemons []\n")
    assert len(two_node_job.mpiruns()) == 2


def test_a_start_with_running_ranks_is_not_repeated(two_node_job: Job):
    """A rank that has started runs the script, which must not run twice."""
    two_node_job.script("with open(os.environ['ALL'] + '/runs', 'a') as f: f.write('x')\n" + WAIT)
    head, worker = two_node_job.run(FAKE_HANG="worker", CLOUDJOB_START_TIMEOUT_S="5")

    text = "starting the ranks: mpirun started 1 of 2 and then hung for 5 s"
    assert (head.code, worker.code) == (125, 125)
    assert two_node_job.failure["message"] == f"{text}; without a rank: node 1 (node1)"
    assert (two_node_job.failure["node"], two_node_job.failure["host"]) == (1, "node1")
    assert (two_node_job.folder / "runs").read_text() == "x"
    assert len(two_node_job.mpiruns()) == 1
    assert two_node_job.running_processes() == []


@pytest.mark.parametrize(("node", "number"), [(0, signal.SIGHUP), (1, signal.SIGTERM)])
def test_a_stop_signal_to_any_node_cancels_the_job_on_all(
    node: int, number: int, two_node_job: Job, until: Callable[..., None]
):
    two_node_job.environ["CLOUDJOB_GRACE_S"] = "60"
    two_node_job.script(SAVES + UP + WAIT)
    entries = [two_node_job.start(index) for index in range(2)]
    until(ranks_have_started(two_node_job, 2))
    entries[node].send(number)
    until(lambda: all("saving" in entry.out for entry in entries))
    (two_node_job.folder / "go").touch()
    head, worker = (entry.wait() for entry in entries)

    assert (head.code, worker.code) == (128 + number,) * 2
    assert "saved" in head.out
    assert "saved" in worker.out
    assert two_node_job.record["cause"] == "cancelled"
    assert two_node_job.failure["node"] == node
    assert two_node_job.running_processes() == []


def test_sigusr1_reaches_the_ranks_of_all_nodes(two_node_job: Job, until: Callable[..., None]):
    two_node_job.script("signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))\n" + UP + WAIT)
    entries = [two_node_job.start(node) for node in range(2)]
    until(ranks_have_started(two_node_job, 2))
    entries[0].send(signal.SIGUSR1)

    assert [entry.wait().code for entry in entries] == [0, 0]


def test_the_loss_of_a_worker_ends_the_job(two_node_job: Job, until: Callable[..., None]):
    two_node_job.script(UP + WAIT)
    head, _ = (two_node_job.start(node) for node in range(2))
    until(ranks_have_started(two_node_job, 2))
    two_node_job.kill_node(1)
    result = head.wait(180)

    assert (result.code, two_node_job.record["cause"]) == (137, "platform")
    assert two_node_job.failure["message"] == "node 1 (node1) is gone: its connection ended"
    assert (two_node_job.failure["node"], two_node_job.failure["host"]) == (1, "node1")
    until(lambda: two_node_job.running_processes() == [])


def test_a_job_with_a_frozen_worker_can_be_cancelled(two_node_job: Job, until: Callable[..., None]):
    """The head waits for the grace period and a few seconds, but not for the worker's report."""
    two_node_job.environ.update(CLOUDJOB_LAUNCHER="python", CLOUDJOB_OUTPUT_LIMIT_S="3600")
    two_node_job.script("")
    text = "import os, time\nopen('%s/up' + os.environ['VC_TASK_INDEX'], 'w').close()\n"
    (two_node_job.code / "x.py").write_text(text % two_node_job.folder + WAIT)
    head, worker = (two_node_job.start(node) for node in range(2))
    until(ranks_have_started(two_node_job, 2))
    worker.send(signal.SIGSTOP)
    head.send(signal.SIGTERM)
    result = head.wait(60)

    assert (result.code, two_node_job.record["cause"]) == (143, "cancelled")


def test_the_loss_of_the_head_ends_a_worker(two_node_job: Job, until: Callable[..., None]):
    two_node_job.script(UP + WAIT)
    head, worker = (two_node_job.start(node) for node in range(2))
    until(ranks_have_started(two_node_job, 2))
    os.killpg(head.process.pid, signal.SIGKILL)
    result = worker.wait(180)

    assert result.code == 125
    assert "the head (node0) is gone" in result.err


def test_a_head_that_is_suspended_for_too_long_is_to_blame(
    two_node_job: Job, until: Callable[..., None]
):
    """Its worker gives it up, which the head sees as the end of the worker."""
    two_node_job.environ.update(CLOUDJOB_STALL_S="8")
    two_node_job.script(UP + WAIT)
    head, worker = (two_node_job.start(node) for node in range(2))
    until(ranks_have_started(two_node_job, 2))
    head.send(signal.SIGSTOP)
    stopped_at = time.monotonic()
    assert worker.wait(180).code == 125
    until(lambda: time.monotonic() > stopped_at + 8)
    head.send(signal.SIGCONT)
    result = head.wait(180)

    assert (result.code, two_node_job.record["cause"]) == (137, "platform")
    assert (two_node_job.failure["node"], two_node_job.failure["host"]) == (0, "node0")
    assert two_node_job.failure["message"].startswith("node 0 (node0) was suspended for ")


def test_a_missing_worker_is_named_by_the_head(two_node_job: Job, until: Callable[..., None]):
    two_node_job.script("")
    result = two_node_job.start(0, CLOUDJOB_START_TIMEOUT_S="1").wait()

    assert (result.code, two_node_job.record["cause"]) == (125, "entry")
    assert (two_node_job.failure["node"], two_node_job.failure["host"]) == (1, "node1")
    assert "node 1 (node1)" in two_node_job.failure["message"]
    until(lambda: two_node_job.running_processes() == [])


def test_a_worker_ends_without_its_head(two_node_job: Job):
    two_node_job.script("")
    result = two_node_job.start(1, CLOUDJOB_START_TIMEOUT_S="1").wait()

    assert result.code == 125
    assert "waiting for the head (node0): nothing in 1 s" in result.err


def test_a_worker_may_start_before_its_head(two_node_job: Job, until: Callable[..., None]):
    two_node_job.script("print('hello')\n")
    worker = two_node_job.start(1)
    until(lambda: (worker.folder / "node" / "events").exists())
    head = two_node_job.start(0)

    assert (head.wait().code, worker.wait().code) == (0, 0)


def test_a_job_cancelled_while_staging_has_a_record(job: Job, until: Callable[..., None]):
    """Inputs can be large; a job that is cancelled meanwhile leaves no processes."""
    job.script("")
    # This server accepts the request and never answers.
    with socket.create_server(("127.0.0.1", 0)) as slow:
        uri = "http://127.0.0.1:%d/data" % slow.getsockname()[1]
        entry = job.start(CLOUDJOB_INPUTS=json.dumps({"DATA": uri}))
        slow.settimeout(60)
        with slow.accept()[0]:
            entry.send(signal.SIGTERM)
            result = entry.wait(180)

    assert (result.code, result.err) == (143, "jobentry: cancelled: the job was sent SIGTERM\n")
    assert (job.record["exit_code"], job.record["cause"]) == (143, "cancelled")
    # `mpirun --version` may still be running.
    until(lambda: job.running_processes() == [])


def test_a_job_cancelled_before_its_ranks_start_ends_at_once(
    two_node_job: Job, until: Callable[..., None]
):
    two_node_job.script("")
    head = two_node_job.start(0, CLOUDJOB_GRACE_S="600")
    until(lambda: (head.folder / "node" / "events").exists())
    until(lambda: two_node_job.running_processes() != [head.process.pid])
    head.send(signal.SIGTERM)
    result = head.wait()

    assert (result.code, two_node_job.record["cause"]) == (143, "cancelled")
    # `mpirun --version` may still be running.
    until(lambda: two_node_job.running_processes() == [])


def test_the_record_names_the_first_of_many_failing_nodes(job: Job):
    job.nodes = 4
    job.script(TWO_FAILS_FIRST)
    results = job.run()

    assert [result.code for result in results] == [22] * 4
    assert (job.failure["node"], job.failure["rank"]) == (2, 2)
    assert job.running_processes() == []


KILLED_WRAPPER_SCRIPT = """
import os, signal, subprocess, sys, time
from jobentry.control import loop as node_loop
from jobentry.contract import paths
from jobentry.contract.env import NodeEnv
from jobentry.node.journal import Journal

# Python 3.8, and PyPy, have no pidfd: there the loop notices it at its next tick.
node_loop._TICK_S = 600.0 if hasattr(os, "pidfd_open") else 0.1
node = NodeEnv(node_dir=sys.argv[1])
where = paths.node_paths({"HOME": sys.argv[1]}, node)
os.makedirs(where.log_dir, exist_ok=True)
os.mkfifo(where.events)
# Not our child, as the wrapper of a rank is mpirun's: no SIGCHLD reports its end.
text = subprocess.run(
    ["sh", "-c", "sleep 600 >/dev/null & echo $!"], stdout=subprocess.PIPE, check=True
).stdout
wrapper = int(text)
ends = []
setup = node_loop.NodeSetup(node, where, Journal())
loop = node_loop.NodeLoop(setup, node_loop.NodeEvents(rank_ended=ends.append))
with open(where.events, "w") as events:
    events.write("start 0 %d %d\\n" % (wrapper, wrapper))
while not loop.ranks.wrappers:
    loop.step()
# Read the rest of the start, so that only the end of the wrapper can wake the loop.
loop.read_events()
os.kill(wrapper, signal.SIGKILL)
while not ends:
    loop.step()
print(ends[0].rank, int(ends[0].signal), ends[0].is_reported)
os._exit(0)
"""


def test_the_end_of_a_rank_wrapper_is_noticed_at_once(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-c", KILLED_WRAPPER_SCRIPT, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        timeout=180,
        check=True,
    )

    assert done.stdout == b"0 9 False\n"

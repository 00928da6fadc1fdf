"""mpirun's commands on other nodes, and what a killed one leaves: real agents, and no ssh."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jobentry.contract import names
from jobentry.contract.env import NodeEnv
from jobentry.control import commands
from jobentry.launchers import rsh_agent
from jobentry.launchers.common import Process
from tests.support.loops import make_loop, paths_in, signals_restored

COMMAND = " PATH=/usr/bin:$PATH ; export PATH ; /usr/bin/orted -mca x 'a\tb' ü \udcff\n; true"


class FakeWorker:
    """Stands in for a worker, and records the messages that it gets."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.sent: list[tuple[str, dict[str, Any]]] = []

    def send(self, kind: str, **values: Any) -> None:
        self.sent.append((kind, values))


class Head:
    """A head's loop, its remote commands, and the agents that send requests to it."""

    def __init__(self, folder: Path) -> None:
        self.where = paths_in(folder)
        os.mkfifo(self.where.agent_requests)
        Path(self.where.agent).write_text(rsh_agent.TEXT)
        self.loop = make_loop(NodeEnv(job="j", hosts=("a", "b.j")), self.where)
        self.remote = FakeWorker("b.j")
        self.local = FakeWorker("localhost")
        workers: list[Any] = [self.remote, self.local]
        self.commands = commands.RemoteCommands(self.where, self.loop, "head", workers)
        self.agents: list[subprocess.Popen[bytes]] = []

    def start_agent(self, *args: str) -> subprocess.Popen[bytes]:
        """Start an agent as mpirun does."""
        argv = [*rsh_agent.argv(self.where.agent), *args]
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        # Otherwise the loop would treat it as an orphan.
        self.loop.own_children.add(process.pid)
        self.agents.append(process)
        return process

    def until(self, claim: Any) -> None:
        """Run the loop until a condition holds."""
        deadline = time.monotonic() + 60
        while not claim():
            assert time.monotonic() < deadline, self.remote.sent
            self.loop.step()


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Head]:
    """A head; its agents are killed after the test."""
    with signals_restored():
        new_head = Head(tmp_path)
        yield new_head
    for process in new_head.agents:
        assert process.stdout is not None
        process.kill()
        process.wait()
        process.stdout.close()
    new_head.loop.relay.finish()


@pytest.mark.parametrize(
    "host", ["b.j", "b", "b.j.space.svc"], ids=["whole-name", "short-name", "more-than-whole"]
)
def test_a_command_goes_to_the_worker_byte_for_byte(head: Head, host: str):
    head.commands.open()
    process = head.start_agent(host, COMMAND)

    head.until(lambda: head.remote.sent)
    [(kind, values)] = head.remote.sent
    assert (kind, values["command"]) == ("run-command", COMMAND)
    head.commands.answered(values["number"], ["exit 7", " a  b\\n ü "], None)
    head.commands.answered(values["number"], ["say it"], 3)

    assert process.communicate(timeout=60)[0].decode() == "exit 7\n a  b\\n ü \nsay it\n"
    assert process.returncode == 3
    assert not list(Path(head.where.node_dir).glob("ask-*"))


def test_the_users_host_file_may_contain_addresses(head: Head):
    head.commands.open()
    head.start_agent("127.0.0.1", "true")
    unknown = head.start_agent("127.0.0.2", "true")

    head.until(lambda: head.local.sent and unknown.poll() is not None)

    assert [values["command"] for _, values in head.local.sent] == ["true"]
    assert unknown.returncode == 255


def test_commands_wait_until_all_workers_are_connected(head: Head):
    first = head.start_agent("b", "one")
    second = head.start_agent("b", "two")
    head.until(lambda: len(head.commands._waiting or []) == 2)
    assert head.remote.sent == []
    assert first.poll() is None
    assert second.poll() is None

    head.commands.open()

    assert sorted(values["command"] for _, values in head.remote.sent) == ["one", "two"]


def test_an_unknown_host_is_an_error_for_mpirun(head: Head):
    head.commands.open()
    process = head.start_agent("c", "true")

    head.until(lambda: process.poll() is not None)

    assert (process.returncode, process.communicate()[0]) == (255, b"c is not a node of this job\n")


def test_a_warning_of_open_mpi_that_says_nothing_is_not_shown(
    capsys: pytest.CaptureFixture[str], head: Head
):
    """The kernel lets only one of mpirun and its agent set the process group of the agent."""
    warning = "[w0:1] plm:ssh: Warning: setpgid(7,7) failed in parent with errno=Permission denied"
    text = f"{warning}\n{'-' * 70}\nreal\n"
    started = commands.LaunchProcesses(head.loop, lambda: False)
    assert started.start([Process("mpirun", ("printf", "%s", text), os.environ)], "/") == ""
    head.until(lambda: not started.are_running)

    assert capsys.readouterr().err == "jobentry: mpirun: real\n"


def test_a_command_whose_agent_is_gone_does_no_harm(head: Head):
    head.commands.open()
    process = head.start_agent("b", "true")
    head.until(lambda: head.remote.sent)
    process.kill()
    process.wait()

    head.commands.answered(head.remote.sent[0][1]["number"], ["late"], 0)

    assert not list(Path(head.where.node_dir).glob("ask-*"))


def test_a_session_has_the_environment_that_sshd_would_give():
    """It has no secrets and no variables of the platform, which ranks get in other ways."""
    user = pwd.getpwuid(os.geteuid())
    environ = {"PATH": "/opt/bin", "HOME": "/h", "TMPDIR": "/t", "TOKEN": "s", "MA_VJ_NAME": "j"}

    assert commands.session_environment(environ, user, "/n") == {
        "USER": user.pw_name,
        "LOGNAME": user.pw_name,
        "SHELL": user.pw_shell,
        "HOME": "/h",
        "PATH": "/opt/bin",
        "TMPDIR": "/t",
        "CLOUDJOB_NODE_DIR": "/n",
    }
    emulated = commands.session_environment({"CLOUDJOB_CONTROL_DIR": "/c"}, user, "/n")
    assert names.WITHOUT_DEVICES.items() <= emulated.items()


def test_a_user_without_a_usable_shell_gets_sh(monkeypatch: pytest.MonkeyPatch):
    user = pwd.getpwuid(os.geteuid())
    nologin = pwd.struct_passwd((*user[:6], "/usr/sbin/nologin"))
    monkeypatch.setattr(pwd, "getpwuid", lambda number: nologin)
    assert commands._user() == pwd.struct_passwd((*user[:6], "/bin/sh"))

    def unknown(number: int) -> pwd.struct_passwd:
        raise KeyError(number)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert commands._user().pw_shell == "/bin/sh"


@pytest.mark.parametrize("path", ["/home/ma-user/.cloudjob/j/agent", "/a-b_c.d/agent"])
def test_the_agent_is_used_at_a_path_that_mpirun_accepts(path: str):
    assert rsh_agent.is_safe_path(path)


@pytest.mark.parametrize("path", ["/a b/agent", "/a:b/agent", "/a\nb/agent", "/a'b/agent"])
def test_ssh_is_used_at_a_path_that_mpirun_would_split(path: str):
    assert not rsh_agent.is_safe_path(path)


# -- what a killed mpirun leaves ------------------------------------------------------------------

# The same path is on every emulated node, whose folders are its own.
NODE_DIR = "/.cloudjob-of-a-test/1/node"
ELSEWHERE = ("unshare", "--user", "--map-root-user", "--mount")


@pytest.fixture
def daemon(tmp_path: Path) -> str:
    """A program with the name of a daemon, which waits."""
    path = tmp_path / "prted"
    shutil.copy(shutil.which("sleep") or "", path)
    return str(path)


def test_only_the_daemons_of_this_node_are_ended(daemon: str, until: Callable[..., None]) -> None:
    def start(*prefix: str, node_dir: str = NODE_DIR) -> subprocess.Popen[bytes]:
        environ = {**os.environ, "CLOUDJOB_NODE_DIR": node_dir}
        process = subprocess.Popen([*prefix, daemon, "600"], env=environ)
        exe = Path(f"/proc/{process.pid}/exe")
        until(lambda: str(exe.readlink()) == daemon)
        return process

    this_node, other_node = start(), start(node_dir=f"{NODE_DIR}-2")
    other_job = start(*ELSEWHERE)
    try:
        assert commands.end_daemons(NODE_DIR) == [this_node.pid]
        assert this_node.wait(180) == -9
        assert (other_node.poll(), other_job.poll()) == (None, None)
    finally:
        for process in (this_node, other_node, other_job):
            process.kill()
            process.wait()

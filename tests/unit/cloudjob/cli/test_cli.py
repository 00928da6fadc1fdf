"""Tests of the command line: help pages, messages, exit codes and imports."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cloudjob import cli
from cloudjob.cli import main
from cloudjob.cli.commands.status import print_status
from cloudjob.cli.endings import report
from cloudjob.cli.interrupts import Interrupts
from cloudjob.cli.messages import print_error, print_name
from cloudjob.cli.parser import _COMMANDS, parser_of
from cloudjob.errors import BackendError
from cloudjob.model.status import Code, Failure, JobState, Phase, Wait, WaitPhase
from tests.support.homes import make_used_home
from tests.support.statuses import status_of
from tests.support.users import python_of_user

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize("command", [name for name, _, _ in _COMMANDS])
def test_each_command_has_a_help_page(command: str, capsys: pytest.CaptureFixture[str]):
    """The help page lists at least one option or argument."""
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    help_text = capsys.readouterr().out

    assert ended.value.code == 0
    assert help_text.startswith(f"usage: cloudjob {command} ")
    assert re.search(
        r"--(json|to|raw|force|now|print|port|once|rank)|SHELL|ACTION|COMMAND|TOPIC|EXAMPLE",
        help_text,
    )


def test_help_imports_no_command():
    code = (
        "import sys; from cloudjob.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted(name for name in sys.modules if name.startswith('cloudjob.cli.')))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = [f"cloudjob.cli.{name}" for name in ("messages", "options", "parser")]

    assert done.stdout.splitlines()[-1] == repr(names)


@pytest.mark.parametrize("port", ["65536", "80000", "-1", "x", "9" * 30])
def test_an_invalid_port_is_refused(port: str, capsys: pytest.CaptureFixture[str]):
    assert main(["emulator", "up", f"--port={port}"]) == 2
    assert f"'{port}' is not a" in capsys.readouterr().err


def test_orphans_are_removed_without_the_docker_extra(tmp_path: Path):
    code = (
        "import sys; from cloudjob.cli import main\n"
        "for name in ('docker', 'requests', 'urllib3'): sys.modules[name] = None\n"
        "sys.exit(main(['rm', '--orphans']))"
    )
    environ = {**os.environ, "CLOUDJOB_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stderr) == (0, "0 orphans\n")


@pytest.mark.parametrize(
    "error", [MemoryError(), SystemError("error return without exception set")]
)
def test_a_command_without_memory_says_so_in_one_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """CPython raises the ``SystemError`` when it has no memory even for an exception."""

    def fail(_argv: list[str]) -> int:
        raise error

    monkeypatch.setattr(cli, "_run", fail)

    assert main(["list"]) == 1
    assert capsys.readouterr().err == (
        "error: running cloudjob: there is not enough memory\n"
        "hint: `ulimit -v` shows this shell's limit\n"
    )


def test_a_current_folder_that_was_removed_is_named(tmp_path: Path):
    argv = [sys.executable, "-m", "cloudjob.cli", "submit", "train.py"]
    done = subprocess.run(
        ["sh", "-c", 'mkdir gone && cd gone && rmdir ../gone && exec "$@"', "sh", *argv],
        env={**os.environ, "CLOUDJOB_HOME": str(tmp_path / "home")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.returncode == 2
    assert done.stderr == (
        "error: reading the current folder: it was removed\nhint: cd to a folder that exists\n"
    )


@pytest.mark.parametrize("command", [["submit", "train.py"], ["list"], ["console"]])
def test_a_shell_that_allows_too_few_open_files_is_named(command: list[str], tmp_path: Path):
    argv = [sys.executable, "-m", "cloudjob.cli", *command]
    done = subprocess.run(
        ["sh", "-c", 'ulimit -n 20 && exec "$@"', "sh", *argv],
        env={**os.environ, "CLOUDJOB_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "error: running cloudjob: this shell allows only 20 open files\n"
        "hint: `ulimit -n 1024` allows more, if `ulimit -Hn` does\n"
    )


def test_no_message_controls_the_terminal(capsys: pytest.CaptureFixture[str]):
    hostile = "\x1b]0;x\x07\r\u202e\x9b2J\udcff"
    failure = Failure(
        node=0, host=hostile, rank=1, exit_code=1, message=hostile, last_lines=(hostile, hostile)
    )
    status = status_of(
        name=hostile,
        state=JobState.FAILED,
        native_state=hostile,
        created_at=hostile,
        cause=hostile,
        failure=failure,
        code=Code(uri="", digest="", size_bytes=0, files=0),
        wait=Wait(phase=WaitPhase.QUEUE, since=hostile, message=hostile, hint=hostile),
    )
    print_status(status)
    print_error(BackendError(f"asking: {hostile}", hint=hostile))
    printed = capsys.readouterr()

    for text in printed:
        assert "\\x1b]0;x\\x07\\r\\u202e\\x9b2J\\udcff" in text
    assert all(c.isprintable() or c == "\n" for c in printed.out + printed.err)
    assert printed.err.count("\n") == 2


def test_a_status_says_once_what_the_job_waits_for(capsys: pytest.CaptureFixture[str]):
    wait = Wait(phase=WaitPhase.SCHEDULING, since="", message="no room", hint="ask for less")
    print_status(status_of(native_state="Pending (no room)", backend="kubernetes", wait=wait))
    printed = capsys.readouterr().out

    assert "waits    no room; ask for less\n" in printed
    assert "backend  kubernetes (Pending)\n" in printed


def test_a_status_begins_with_how_the_job_ended_and_why(capsys: pytest.CaptureFixture[str]):
    failure = Failure(node=1, host="w-1", rank=2, exit_code=1, message="shapes differ")
    status = status_of(
        state=JobState.FAILED,
        started_at="2026-11-21T10:00:00.000Z",
        ended_at="2026-11-21T10:01:02.000Z",
        failure=failure._replace(last_lines=("Traceback", "ValueError: shapes differ")),
        phases=(Phase(node=0, name="stage", started_at="2026-11-21T10:00:00.000Z"),),
    )
    print_status(status, [("hint", ""), ("command", "train.py --lr 0.1"), ("sweep", "lr=0.1")])
    printed = capsys.readouterr()

    assert printed.out.splitlines()[:8] == [
        "job      train-1",
        "state    FAILED in 1 min 02 s",
        "reason   node 1 rank 2: shapes differ [exit code 1]",
        "         host w-1",
        "         | Traceback",
        "         | ValueError: shapes differ",
        "command  train.py --lr 0.1",
        "sweep    lr=0.1",
    ]
    assert "stage" not in printed.out
    assert printed.err == ""
    print_status(status, has_phases=True)
    assert "NODE  PHASE" in capsys.readouterr().out


def test_names_of_outputs_have_their_bytes_in_a_file_and_are_safe_on_a_terminal(
    capfdbinary: pytest.CaptureFixture[bytes],
):
    name = "model/\x1b]0;x\x07\udcff\n.ckpt"
    print_name(name)
    sys.stdout.flush()
    parent_fd, child_fd = os.openpty()
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"from cloudjob.cli.messages import print_name\nprint_name({name!r})",
        ],
        stdout=child_fd,
        check=True,
    )
    os.close(child_fd)

    assert done.returncode == 0
    assert capfdbinary.readouterr().out == b"model/\x1b]0;x\x07\xff\\n.ckpt\n"
    assert os.read(parent_fd, 1000) == b"model/\\x1b]0;x\\x07\\udcff\\n.ckpt\r\n"
    os.close(parent_fd)


def test_a_cancel_by_ctrl_c_that_fails_is_one_line_and_no_traceback(
    capsys: pytest.CaptureFixture[str],
):
    class Stuck:
        id = "train-1"

        def cancel(self, *, is_urgent: bool) -> None:
            raise BackendError("cancelling train-1: no answer", hint="is there a network?")

    interrupts = Interrupts()
    interrupts.set_job(Stuck())  # type: ignore[arg-type]
    interrupts._on_signal(2, None)
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join(180)

    assert capsys.readouterr().err.splitlines()[1:] == [
        "error: cancelling train-1: no answer",
        "hint: is there a network?",
    ]


@pytest.mark.parametrize(
    ("failure", "lines"),
    [
        (Failure(exit_code=143), []),
        (Failure(node=0, exit_code=143), []),
        (
            Failure(node=0, exit_code=143, message="node 0 (w-0) ended with exit code 143"),
            ["  node 0 (w-0) ended with exit code 143"],
        ),
        (
            Failure(node=1, exit_code=137, message="ended by SIGKILL, without a record"),
            ["  node 1: ended by SIGKILL, without a record [exit code 137]"],
        ),
        (
            Failure(node=1, host="w-1", rank=2, exit_code=1, message="ValueError: shapes differ"),
            ["  node 1 rank 2: ValueError: shapes differ [exit code 1]", "  host w-1"],
        ),
    ],
)
def test_a_failure_is_reported_in_one_line_that_repeats_nothing(
    failure: Failure, lines: list[str], capsys: pytest.CaptureFixture[str]
):
    report(status_of(state=JobState.FAILED, failure=failure))

    assert capsys.readouterr().err.splitlines() == ["job train-1: FAILED", *lines]


@pytest.mark.parametrize(
    ("argv", "problem", "hint"),
    [
        (["sumbit"], " has no command 'sumbit'", "did you mean `cloudjob submit`?"),
        (["train.py"], " has no command 'train.py'", "did you mean `cloudjob submit train.py`?"),
        (["xyz"], " has no command 'xyz'", "`cloudjob --help` lists them"),
        (["store", "gcc"], " store has no action 'gcc'", "did you mean `cloudjob store gc`?"),
        (["submit", "--node", "2", "a"], " submit has no option --node", "did you mean --nodes?"),
        (["store", "gc", "--dryrun"], " store has no option --dryrun", "did you mean --dry-run?"),
        (["--verzion"], " has no option --verzion", "did you mean --version?"),
    ],
)  # fmt: skip
def test_a_mistyped_argument_gets_a_suggestion(
    argv: list[str],
    problem: str,
    hint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()

    assert main(argv) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"error: reading the command line: cloudjob{problem}",
        f"hint: {hint}",
    ]


def test_help_pages_fit_a_terminal_of_80_columns(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    pages = [parser_of("")] + [
        page for name, _, _ in _COMMANDS for page in command_parsers(parser_of(name), name)
    ]
    too_wide = {
        page.prog: line
        for page in pages for line in page.format_help().splitlines() if len(line) > 80
    }  # fmt: skip

    assert too_wide == {}


def command_parsers(
    parser: argparse.ArgumentParser, name: str
) -> Iterator[argparse.ArgumentParser]:
    """Yield the parser of a command, and those of its actions."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner, subparser in action.choices.items():
                if name in ("", inner):
                    yield subparser
                    yield from command_parsers(subparser, "")


def test_wait_waits_for_several_jobs_and_ends_with_the_first_failure(
    home: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["wait", "good-2", "bad-4", "bad-3"]) == 4
    assert capsys.readouterr().err.splitlines() == [
        "job good-2: SUCCEEDED", "job bad-4: FAILED", "job bad-3: FAILED",
    ]  # fmt: skip
    assert main(["wait", "good-2", "bad-3", "--json"]) == 3
    assert [status["job"] for status in json.loads(capsys.readouterr().out)] == ["good-2", "bad-3"]
    assert main(["wait", "good-2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["job"] == "good-2"
    assert main(["wait", "good-2", "bad-9"]) == 6


def test_list_watch_prints_the_list_until_it_is_interrupted(
    home: Path, add_ended: Callable[[str, int], None]
):
    argv = [sys.executable, "-m", "cloudjob.cli", "list", "--watch", "--name", "bad-*"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = [process.stdout.readline().split()[0] for _ in range(3)]
        add_ended("bad-5", 5)
        later = [process.stdout.readline().split()[0] for _ in range(4)]
        process.send_signal(signal.SIGINT)

        assert process.wait(60) == 130
    assert first[0] == later[0] == "JOB"
    assert sorted(first[1:]) == ["bad-3", "bad-4"]
    assert sorted(later[1:]) == ["bad-3", "bad-4", "bad-5"]


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_no_file_gets_the_number_of_a_closed_standard_stream(tmp_path: Path, closed: str):
    """Otherwise the log of a job would be written into a file that cloudjob has open."""
    program = (
        "import os, sys\n"
        "from cloudjob.cli import main\n"
        "assert main(['metrics', '--csv', 'none']) == 6\n"
        "assert main(['list', '--json']) == 0\n"
        "assert None not in (sys.stdin, sys.stdout, sys.stderr)\n"
        "sys.exit(os.open('new', os.O_CREAT | os.O_WRONLY))\n"
    )
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", program],
        env={**os.environ, "CLOUDJOB_HOME": str(tmp_path / "home")},
        cwd=tmp_path,
        timeout=120,
    )

    assert done.returncode > 2


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('exec "$@" > /dev/full', "no space left on device"),
        ('truncate -s 1M log; ulimit -f 1000; exec "$@" >> log', "file too large"),
    ],
)
def test_an_output_without_space_is_an_error_of_one_line(
    home: Path, tmp_path: Path, text: str, why: str
):
    done = subprocess.run(
        ["sh", "-c", text, "sh", sys.executable, "-m", "cloudjob.cli", "list"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        timeout=180,
    )

    assert done.returncode == 1
    message = f"error: writing a file or the output of this command: {why}"
    assert done.stderr.splitlines()[0] == message
    assert len(done.stderr.splitlines()) == 2


def test_a_user_without_a_home_folder_needs_only_a_state_folder():
    """As in a container of OpenShift: ``HOME`` is not set, and no list of users has this one."""
    python, why_not = python_of_user()
    if os.geteuid() != 0 or why_not:
        assert os.environ.get("CLOUDJOB_REQUIRE_ALL") != "1", why_not or "root is needed"
        pytest.skip(why_not or "only root can be another user")
    nobody = ("setpriv", "--reuid=54321", "--regid=54321", "--clear-groups")
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        Path(folder).chmod(0o777)

        def listed(**environ: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [*nobody, python, "-m", "cloudjob.cli", "list"],
                env={"PATH": os.defpath, "PYTHONPATH": f"{ROOT}:{ROOT}/entrypoints", **environ},
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=120,
            )

        with_folder = listed(CLOUDJOB_HOME=f"{folder}/home")
        without = [listed(), listed(HOME=""), listed(HOME="relative")]

    assert (with_folder.returncode, with_folder.stdout) == (0, ""), with_folder
    assert [done.stderr.splitlines() for done in without] == 3 * [
        [
            "error: opening the job records: /.local/share/cloudjob/records.db: Permission denied",
            "hint: make the folder writable for this user, or set CLOUDJOB_HOME to another one",
        ]
    ]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder, which contains a script."""
    make_used_home(tmp_path / "home")
    monkeypatch.setenv("CLOUDJOB_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CLOUDJOB_CONFIG", os.devnull)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text("import torch.distributed, wandb\n")
    (folder / ".env").write_text("TOKEN=1")
    (folder / "requirements.txt").write_text("torch\n")
    monkeypatch.chdir(folder)
    return folder


def test_a_dry_run_prints_text_and_json_only_on_request(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TOKEN", "very-secret")
    argv = ["submit", "-n", "3", "-e", "A=x y", "--secret", "TOKEN", "--output", "MODEL="]
    argv += ["--launcher", "python", "--dry-run"]

    assert main([*argv, "train.py", "--lr", "0.1"]) == 0
    page = capsys.readouterr().out
    assert main([*argv, "--json", "train.py"]) == 0
    everything = json.loads(capsys.readouterr().out)
    assert main([*argv, "--show-request", "train.py"]) == 0
    request = json.loads(capsys.readouterr().out)

    rows = [line.split(maxsplit=1) for line in page.split("\n\n")[0].splitlines()]
    assert ["job", "train, on the backend process"] in rows
    assert ["size", "3 nodes with 1 rank each, 3 in all"] in rows
    assert ["command", "train.py --lr 0.1"] in rows
    assert ["variable", "A=x y"] in rows
    assert ["secret", "TOKEN"] in rows
    assert ["output", "MODEL to the store"] in rows
    assert any(row[0] == "left" and ".env: may hold secrets" in row[1] for row in rows)
    assert any(line.startswith("nodes 1-2") for line in page.splitlines())
    assert len(page.splitlines()) < 24
    assert "very-secret" not in page
    assert len(everything["plans"]) == 3
    assert request["nodes"] == 3 or len(request["nodes"]) == 3
    assert not (project.parent / "home" / "store").exists()


def test_init_writes_a_job_file_that_can_be_submitted_and_overwrites_none(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WANDB_API_KEY", "very-secret")

    assert main(["init"]) == 0
    text = (project / "cloudjob.yaml").read_text()
    assert main(["submit", "--dry-run", "--launcher", "python"]) == 0
    assert "command   train.py" in capsys.readouterr().out
    assert main(["init"]) == 2
    assert "it already exists" in capsys.readouterr().err
    assert main(["init", "--print"]) == 0

    assert capsys.readouterr().out == text == (project / "cloudjob.yaml").read_text()
    assert "# auto is torchrun here: train.py imports torch.distributed.\n" in text
    assert "secrets: [WANDB_API_KEY]\n" in text
    assert "requirements.txt lists it; it imports torch" in text
    assert "very-secret" not in text


def test_example_lists_and_copies_examples_and_overwrites_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)

    assert main(["example"]) == 0
    assert "digits " in capsys.readouterr().out
    assert main(["example", "digits"]) == main(["example", "docker.yaml", "new/folder"]) == 0
    assert capsys.readouterr().out == "digits\nnew/folder/docker.yaml\n"
    train = tmp_path / "digits" / "train.py"
    train.write_text("mine")
    (tmp_path / "slurm.yaml").symlink_to("nowhere")

    assert main(["example", "digits"]) == main(["example", "slurm.yaml"]) == 2
    assert "copying the example digits: digits exists already" in capsys.readouterr().err
    assert main(["example", "digit"]) == 2
    assert "hint: did you mean digits?" in capsys.readouterr().err
    assert main(["example", "digits", "/proc"]) == 2
    assert capsys.readouterr().err.startswith("error: copying the example digits: /proc/digits: ")
    assert train.read_text() == "mine"
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(
    ("is_served", "expected"),
    [
        (True, "# docker: found a container engine\n"),
        (False, "# docker: found a container engine, but this user cannot connect to it\n"),
    ],
)
def test_init_reports_whether_the_container_engine_can_be_used(
    project: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    is_served: bool,
    expected: str,
):
    assert (project / "train.py").is_file()
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{folder}/docker.sock")
        if is_served:
            server.listen()
        monkeypatch.setenv("DOCKER_HOST", f"unix://{folder}/docker.sock")

        assert main(["init", "--print"]) == 0

    assert expected in capsys.readouterr().out


def test_init_finds_nothing_in_a_variable_that_is_set_but_empty(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    for name in ("AWS_ACCESS_KEY_ID", "HUAWEICLOUD_SDK_AK"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_PROFILE", "HUAWEICLOUD_SDK_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "")

    assert main(["init", "--print"]) == 0

    text = capsys.readouterr().out
    assert "# modelarts: nothing found\n" in text
    assert "# store:" not in text


def test_init_asks_for_the_script_if_several_could_be_meant(
    project: Path, capsys: pytest.CaptureFixture[str]
):
    (project / "train.py").unlink()
    (project / "a.py").touch()
    # Not even root can read this file.
    (project / "b.py").symlink_to("/proc/self/mem")

    assert main(["init"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"error: looking for the script in {project}: found a.py, b.py",
        "hint: cloudjob init SCRIPT",
    ]
    assert main(["init", "c.py"]) == 2
    assert list(project.glob("*.yaml")) == []


def test_an_option_sets_any_key_of_a_section_that_has_one_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text("kubernetes: {namespace: mine, cpus: 1}\n")
    arguments = ["--set", "kubernetes.namespace=lab=", "--set", "kubernetes.gpus=2"]
    assert main(["config", "show", "--json", "--config", "job.yaml", *arguments]) == 0

    rows = {row["key"]: row["value"] for row in json.loads(capfd.readouterr().out)}
    keys = ("kubernetes.namespace", "kubernetes.gpus", "kubernetes.cpus")
    assert [rows[key] for key in keys] == ["lab=", "2", "1.0"]
    for wrong, message in (
        ("kubernetes.namespace", "reading --set kubernetes.namespace: not SECTION.KEY=VALUE"),
        ("nodes=2", "reading --set nodes=2: not SECTION.KEY=VALUE"),
        ("kubernetes.nmespace=x", "did you mean 'namespace'"),
        ("kubernetes.gpus=many", "kubernetes.gpus: "),
        ("retries.max=3", "reading --set retries.max: retries is not a section"),
        ("script.x=1", "reading --set script.x: script is not a section"),
    ):
        assert main(["config", "show", "--set", wrong]) == 2
        assert message in capfd.readouterr().err

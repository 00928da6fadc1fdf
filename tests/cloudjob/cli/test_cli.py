"""The command line: every command that --help names is there, and costs only its own modules."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloudjob.cli import follow, main
from cloudjob.cli.options import GROUPS
from cloudjob.cli.parser import _COMMANDS, parser_of
from cloudjob.cli.say import print_name, tell_error
from cloudjob.errors import BackendError
from cloudjob.home import records_path
from cloudjob.home.records import JobRecord, Records
from cloudjob.model.job import OPTIONS
from cloudjob.model.status import Code, Failure, JobState, JobStatus, to_json


@pytest.mark.parametrize("command", [name for name, _, _ in _COMMANDS])
def test_each_command_says_what_it_does(command: str, capsys: pytest.CaptureFixture[str]):
    """It has options of its own, and a word more than its name."""
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    shown = capsys.readouterr().out

    assert ended.value.code == 0
    assert shown.startswith(f"usage: cloudjob {command} ")
    assert re.search(r"--json|--to|--raw|--force|--now|ACTION|COMMAND|TOPIC", shown)


def test_help_imports_no_command():
    """Who asks for help waits for nothing else."""
    code = (
        "import sys; from cloudjob.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted(name for name in sys.modules if name.startswith('cloudjob.cli.')))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = [f"cloudjob.cli.{name}" for name in ("options", "parser", "say")]

    assert done.stdout.splitlines()[-1] == repr(names)


@pytest.mark.parametrize("port", ["65536", "80000", "-1", "x", "9" * 30])
def test_a_port_that_is_none_is_refused(port: str, capsys: pytest.CaptureFixture[str]):
    assert main(["emulator", "up", f"--port={port}"]) == 2
    assert f"'{port}' is not a" in capsys.readouterr().err


def test_orphans_are_removed_without_the_docker_extra(tmp_path: Path):
    """And a job of the docker backend is reported in one line."""
    code = (
        "import sys; from cloudjob.cli import main\n"
        "for name in ('docker', 'requests', 'urllib3'): sys.modules[name] = None\n"
        "sys.exit(main(['rm', '--orphans']))"
    )
    environ = {**os.environ, "CLOUDJOB_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stderr) == (0, "0 orphan(s)\n")


def test_no_message_controls_the_terminal(capsys: pytest.CaptureFixture[str]):
    """Whatever a script has written, a record says, or a store has answered."""
    bad = "\x1b]0;x\x07\r\u202e\x9b2J\udcff"
    failure = Failure(node=0, host=bad, rank=1, exit_code=1, message=bad, last_lines=(bad, bad))
    status = JobStatus(
        job="train-1",
        name=bad,
        backend="process",
        state=JobState.FAILED,
        native_state=bad,
        nodes=1,
        procs_per_node=1,
        created_at=bad,
        cause=bad,
        failure=failure,
        code=Code(uri="", digest="", size_bytes=0, files=0),
    )
    follow.print_status(status)
    tell_error(BackendError(f"asking: {bad}", hint=bad))
    shown = capsys.readouterr()

    assert "\\x1b]0;x\\x07\\r\\u202e\\x9b2J\\udcff" in shown.err
    assert all(c.isprintable() or c == "\n" for c in shown.out + shown.err)
    assert shown.err.count("\n") == 6


def test_names_of_outputs_have_their_bytes_in_a_file_and_are_safe_on_a_terminal(
    capfdbinary: pytest.CaptureFixture[bytes],
):
    name = "model/\x1b]0;x\x07\udcff\n.ckpt"
    print_name(name)
    sys.stdout.flush()
    near, far = os.openpty()
    done = subprocess.run(
        [sys.executable, "-c", f"from cloudjob.cli.say import print_name\nprint_name({name!r})"],
        stdout=far,
        check=True,
    )
    os.close(far)

    assert done.returncode == 0
    assert capfdbinary.readouterr().out == b"model/\x1b]0;x\x07\xff\n.ckpt\n"
    assert os.read(near, 1000) == b"model/\\x1b]0;x\\x07\\udcff\\n.ckpt\r\n"
    os.close(near)


def test_a_cancel_by_ctrl_c_that_fails_is_one_line_and_no_traceback(
    capsys: pytest.CaptureFixture[str],
):
    class Stuck:
        id = "train-1"

        def cancel(self, *, is_urgent: bool) -> None:
            raise BackendError("cancelling train-1: no answer", hint="is there a network?")

    interrupts = follow.Interrupts()
    interrupts.give(Stuck())  # type: ignore[arg-type]
    interrupts._heard(2, None)
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join(30)

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
            ["  node 1 (w-1) rank 2: ValueError: shapes differ [exit code 1]"],
        ),
    ],
)
def test_a_failure_is_reported_in_one_line_that_repeats_nothing(
    failure: Failure, lines: list[str], capsys: pytest.CaptureFixture[str]
):
    follow.report(
        JobStatus(
            job="train-1",
            name="train",
            backend="process",
            state=JobState.FAILED,
            native_state="failed",
            nodes=2,
            procs_per_node=1,
            created_at="2026-01-01T00:00:00.000Z",
            failure=failure,
        )
    )

    assert capsys.readouterr().err.splitlines() == ["job train-1: FAILED", *lines]


@pytest.mark.parametrize(
    ("words", "problem", "hint"),
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
def test_a_mistyped_word_gets_a_suggestion(
    words: list[str],
    problem: str,
    hint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()

    assert main(words) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"error: reading the command line: cloudjob{problem}",
        f"hint: {hint}",
    ]


def test_every_option_of_a_job_is_in_one_group_of_its_help_page():
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(OPTIONS)


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
            for inner, found in action.choices.items():
                if name in ("", inner):
                    yield found
                    yield from command_parsers(found, "")


def ended(job: str, code: int) -> JobRecord:
    """Return the record of a job that ended with this exit code."""
    status = JobStatus(
        job=job, name="train", backend="process", nodes=1, procs_per_node=1, exit_code=code,
        state=JobState.FAILED if code else JobState.SUCCEEDED, native_state="ended",
        created_at="2026-01-01T00:00:00.000Z",
    )  # fmt: skip
    return JobRecord(
        job=job, name="train", backend="process", handle=f"process://local/{job}", nodes=1,
        state=status.state, procs_per_node=1, created_at=status.created_at, code_uri="",
        code_digest="", code_size_bytes=0, code_files=0, store="file:///nowhere", spec_json="{}",
        final_json=json.dumps(to_json(status)),
    )  # fmt: skip


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a home with three jobs that have ended: with 0, 3 and 4."""
    monkeypatch.setenv("CLOUDJOB_HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir(mode=0o700)
    with Records(records_path(tmp_path / "home")) as db:
        for job, code in (("good-2", 0), ("bad-3", 3), ("bad-4", 4)):
            db.add(ended(job, code))
    return tmp_path / "home"


def test_wait_waits_for_several_jobs_and_ends_with_the_first_failure(
    home: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["wait", "good-2", "bad-4", "bad-3"]) == 4
    assert capsys.readouterr().err.splitlines() == [
        "job good-2: SUCCEEDED", "job bad-4: FAILED", "job bad-3: FAILED",
    ]  # fmt: skip
    assert main(["wait", "good-2", "bad-3", "--json"]) == 3
    assert [each["job"] for each in json.loads(capsys.readouterr().out)] == ["good-2", "bad-3"]
    assert main(["wait", "good-2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["job"] == "good-2"
    assert main(["wait", "good-2", "bad-9"]) == 6


def test_list_watch_prints_the_list_until_it_is_interrupted(home: Path):
    words = [sys.executable, "-m", "cloudjob.cli", "list", "--watch", "--name", "bad-*"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = [process.stdout.readline().split()[0] for _ in range(3)]
        with Records(records_path(home)) as db:
            db.add(ended("bad-5", 5))
        later = [process.stdout.readline().split()[0] for _ in range(4)]
        process.send_signal(signal.SIGINT)

        assert process.wait(60) == 130
    assert first[0] == later[0] == "JOB"
    assert sorted(first[1:]) == ["bad-3", "bad-4"]
    assert sorted(later[1:]) == ["bad-3", "bad-4", "bad-5"]

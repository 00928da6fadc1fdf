"""The command line: every command that --help names is there, and costs only its own modules."""

from __future__ import annotations

import re
import subprocess
import sys
import threading

import pytest

from cloudjob.cli import follow, main
from cloudjob.cli.parser import _COMMANDS
from cloudjob.errors import BackendError


@pytest.mark.parametrize("command", [name for name, _, _ in _COMMANDS])
def test_each_command_says_what_it_does(command: str, capsys: pytest.CaptureFixture[str]):
    """It has options of its own, and a word more than its name."""
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    shown = capsys.readouterr().out

    assert ended.value.code == 0
    assert shown.startswith(f"usage: cloudjob {command} ")
    assert re.search(r"--json|--to|--raw|--force|--now|ACTION|COMMAND", shown)


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

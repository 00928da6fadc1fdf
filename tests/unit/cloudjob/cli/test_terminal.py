"""Tests of tables and progress reports, on a terminal and in a pipe."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from cloudjob.cli import live
from cloudjob.cli.live import Transfers
from cloudjob.cli.tables import print_table
from cloudjob.machine import images

JOB = "resnet-imagenet-large-2k83xnf2"
TABLE = f"""
from cloudjob.cli.tables import print_table
print_table([("{JOB}", "FAILED", 16)], ("JOB", "STATE", "NODES"), numbers=("NODES",))
print_table([("docker", "MISSING", "there is no engine: \\x1b[2J, is it running?")])
"""
TRANSFER = """
import time
from cloudjob import library_log
from cloudjob.cli import live
from cloudjob.cli.messages import print_library_log
live._QUIET_S = 0.0
print_library_log()
with live.Transfers("sent") as transfers:
    transfers.start()
    transfers.update(150_000_000, 200_000_000)
    library_log.warn("asking: no answer")
    time.sleep(0.2)
    transfers.update(160_000_000, 200_000_000)
"""


def on_terminal(code: str, columns: int, **environ: str) -> str:
    """Return what a program writes to a terminal of this width."""
    parent_fd, child_fd = os.openpty()
    fcntl.ioctl(child_fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    names = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
    inherited = {name: value for name, value in os.environ.items() if name not in names}
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=child_fd,
        stdout=child_fd,
        stderr=child_fd,
        env={**inherited, "TERM": "xterm-256color", **environ},
    )
    os.close(child_fd)
    screen = b""
    try:
        while piece := os.read(parent_fd, 65536):
            screen += piece
    except OSError:
        pass  # the program has closed the terminal
    finally:
        os.close(parent_fd)
    assert process.wait() == 0, screen
    return screen.decode()


WAITING = """
import threading
from cloudjob.cli import live
asked = threading.Event()
def line():
    asked.set()
    return "job train-1: RUNNING for 2 s"
with live.waiting(line):
    asked.wait(60)
"""


def test_a_command_that_waits_shows_the_state_on_a_terminal(capfd: pytest.CaptureFixture[str]):
    assert "job train-1: RUNNING for 2 s" in on_terminal(WAITING, 80)
    with live.waiting(lambda: "never"):
        pass

    assert capfd.readouterr() == ("", "")


FITTING = """
from cloudjob.cli.tables import print_fitting
rows = [(f"job-{number}", "why it failed " * (number % 2)) for number in range(50)]
print("shown", print_fitting(rows, ("JOB", "REASON"), height=9))
"""


@pytest.mark.parametrize(("columns", "count"), [(80, 8), (26, 8), (14, 5)])
def test_a_table_that_is_too_long_for_the_terminal_shows_its_first_rows(columns: int, count: int):
    lines = on_terminal(FITTING, columns, NO_COLOR="1").splitlines()
    *table, last = [re.sub("\x1b[^m]*m", "", line) for line in lines]

    assert last == f"shown {count}"
    assert sum(-(-len(line) // columns) for line in table) <= 9
    assert [line.split()[0] for line in table if line.startswith("job-")] == [
        f"job-{number}" for number in range(count)
    ]


NARROW = """
from cloudjob.cli.tables import without_spare
rows = [("train-训练", "process", "1 min", "why " * 9)]
headers, rows = without_spare(("JOB", "BACKEND", "AGE", "REASON"), rows, ("BY", "AGE", "BACKEND"))
print(*headers, len(rows[0]))
"""


@pytest.mark.parametrize(
    ("columns", "headers"),
    [(44, "JOB BACKEND AGE REASON 4"), (43, "JOB BACKEND REASON 3"), (9, "JOB REASON 2")],
)
def test_a_narrow_terminal_has_fewer_columns(columns: int, headers: str):
    assert headers in on_terminal(NARROW, columns)


def test_a_table_in_a_pipe_has_aligned_columns(capsys: pytest.CaptureFixture[str]):
    rows = [("train-1", "RUNNING", 2), ("x", "FAILED", 128)]
    print_table(rows, ("JOB", "STATE", "NODES"), numbers=("NODES",))

    assert capsys.readouterr().out == (
        "JOB      STATE    NODES\n"
        "train-1  RUNNING      2\n"
        "x        FAILED     128\n"
    )  # fmt: skip


@pytest.mark.parametrize("columns", [80, 40, 20])
def test_a_table_on_a_terminal_keeps_ids_whole_and_folds_the_last_column(columns: int):
    screen = on_terminal(TABLE, columns)

    assert JOB in screen
    assert "\x1b[2J" not in screen
    assert "\x1b[31mFAILED" in screen
    lines = [line for line in screen.splitlines() if "engine" in line or "running" in line]
    assert len(lines) == (2 if columns == 40 else 1)
    # Blanks at the end of a heading would be lines of a narrow terminal.
    texts = [re.sub("\x1b[^m]*m", "", line) for line in screen.splitlines()]
    assert [text for text in texts if text.endswith(" ")] == []


ERROR = """
from cloudjob.cli.messages import print_error, print_message
from cloudjob.errors import CloudJobError
print_error(CloudJobError("reading x: no such \x1b[2Jfile: error: it failed", hint="look"))
print_message("job train-1: FAILED in 2.5 s")
"""


def test_no_color_is_respected():
    assert "\x1b[3" not in on_terminal(TABLE, 80, NO_COLOR="1")
    assert "\x1b[3" not in on_terminal(TRANSFER, 80, NO_COLOR="1")
    assert "\x1b" not in on_terminal(ERROR, 80, NO_COLOR="1")


def test_a_message_has_its_first_word_and_the_state_of_a_job_coloured():
    assert on_terminal(ERROR, 80).splitlines() == [
        "\x1b[1;31merror:\x1b[0m reading x: no such \\x1b[2Jfile: error: it failed",
        "\x1b[36mhint:\x1b[0m look",
        "job train-1: \x1b[1;31mFAILED\x1b[0m in 2.5 s",
    ]
    assert "\x1b" not in on_terminal(ERROR, 80, TERM="dumb")


@pytest.mark.parametrize("code", [TABLE, ERROR])
def test_a_pipe_has_colours_if_they_are_forced(code: str):
    names = ("NO_COLOR", "FORCE_COLOR")
    environ = {name: value for name, value in os.environ.items() if name not in names}
    for forced in ({}, {"FORCE_COLOR": "1"}):
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**environ, **forced},
            check=True,
        )
        assert (b"FAILED\x1b[0m" in done.stdout) == bool(forced)
        assert b"\x1b[2J" not in done.stdout


@pytest.mark.parametrize("columns", [80, 40])
def test_a_bar_on_a_terminal_fits_into_one_line_and_is_removed_at_the_end(columns: int):
    screen = on_terminal(TRANSFER, columns)

    assert "150.0/200.0 MB" in screen
    assert screen.endswith("\r\x1b[1A\x1b[2K") or screen.endswith("\x1b[2K")
    assert "asking: no answer" in screen
    # The cursor is never hidden, since a killed command could not show it again.
    assert "\x1b[?25l" not in screen


def test_a_dumb_terminal_gets_lines():
    assert "\x1b" not in on_terminal(TRANSFER, 80, TERM="dumb")


def test_a_transfer_in_a_pipe_is_reported_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(live, "_QUIET_S", 0.0)
    with Transfers("fetched") as transfers:
        transfers.start()
        for step in range(1, 6):
            transfers.update(10 * step << 20, 100 << 20)
        transfers.start()
        transfers.update(1 << 20, 0)
    first, second = capsys.readouterr().err.splitlines()

    assert first.startswith("fetched 10.5 MB of 104.9 MB, ")
    assert second.startswith("fetched 1.0 MB, ")


def test_a_transfer_with_json_shows_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(live, "_QUIET_S", 0.0)
    with Transfers("sent", is_shown=False) as transfers:
        transfers.start()
        transfers.update(50, 100)

    assert capsys.readouterr().err == ""


def test_a_terminal_that_is_closed_does_not_end_a_transfer():
    code = TRANSFER.replace("logging.", "import os; os.close(2)\n    logging.") + "\nprint('done')"

    assert on_terminal(code, 80).endswith("done\r\n")


def test_a_command_without_stderr_works():
    code = f"import sys; sys.stderr = None\n{TRANSFER}\nprint('done')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)

    assert done.stdout == b"done\n"


def test_a_quick_transfer_imports_no_rich():
    code = TRANSFER.replace("_QUIET_S = 0.0", "_QUIET_S = 60.0") + (
        "\nimport sys; print([name for name in sys.modules if name.startswith('rich')])"
    )

    assert on_terminal(code, 80).splitlines()[-1] == "[]"


LIVE = """
import os, time
from cloudjob.cli import live
from cloudjob.cli.messages import print_message
with live.LiveLines(1) as lines:
    lines.show([b"[%d] 10%%" % rank for rank in range(3)])
    lines.write(1, b"[1] a line\\n")
    print_message("job x waits")
    lines.show([b"[0] \\x1b[31m" + b"x" * 200, b"job x, preparing"])
    os.write(1, b"^C")
    lines.write(2, b"jobentry: hint\\n")
    BEFORE_THE_END
"""


def replayed(screen: str) -> list[str]:
    """Return the lines that a terminal shows after this output."""
    lines, row, column = [""], 0, 0
    plain = re.sub(r"\x1b\[[0-9;]*m", "", screen)
    for part in re.split(r"(\x1b\[\d+[A-Z]|\r|\n)", plain):
        if part == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif part == "\r":
            column = 0
        elif part.endswith("A") and part.startswith("\x1b"):
            row -= int(part[2:-1])
        elif part == "\x1b[2K":
            lines[row] = ""
        else:
            lines[row] = lines[row][:column].ljust(column) + part + lines[row][column + len(part) :]
            column += len(part)
    while len(lines) > row + 1 and not lines[-1]:
        lines.pop()
    return lines


def test_live_lines_stay_below_the_text_and_are_removed_at_the_end():
    text = ["[1] a line", "job x waits", "jobentry: hint"]
    while_live = replayed(on_terminal(LIVE.replace("BEFORE_THE_END", "os._exit(0)"), 40))

    assert while_live == [*text, f"[0] {'x' * 35}…", "job x, preparing", ""]
    assert replayed(on_terminal(LIVE.replace("BEFORE_THE_END", ""), 40)) == [*text, ""]
    closed = (
        LIVE.replace("BEFORE_THE_END", "os.close(1); lines.show([b'x'])") + "print_message('done')"
    )
    assert on_terminal(closed, 40).endswith("done\r\n")


def test_live_lines_fill_half_of_the_terminal_at_most():
    show = "lines.show([b'[%d]' % rank for rank in range(1000)]); os._exit(0)"
    lines = replayed(on_terminal(LIVE.replace("BEFORE_THE_END", show), 40))

    assert lines[-2:] == ["… 988 more", ""]
    assert lines[-14:-2] == [f"[{rank}]" for rank in range(12)]


def test_a_pull_counts_the_bytes_of_all_layers():
    """The engine repeatedly reports the progress of each layer."""
    seen: list[tuple[int, int]] = []
    events = [
        {"status": "Pulling fs layer", "id": "a"},
        {"status": "Downloading", "id": "a", "progressDetail": {"current": 1, "total": 10}},
        {"status": "Downloading", "id": "b", "progressDetail": {"current": 5, "total": 20}},
        {"status": "Download complete", "id": "a", "progressDetail": {}},
        {"status": "Already exists", "id": "c"},
    ]

    assert list(images._counted(iter(events), lambda *count: seen.append(count))) == events
    assert seen == [(1, 10), (6, 30), (15, 30)]


BUILD = """
import time
from cloudjob.cli.commands import machine
machine._FRAME_S = 0.01
with machine.BuildSteps() as steps:
    steps.report("Step 2/9 : RUN pip install torch")
    time.sleep({sleep_s})
    steps.report("Collecting torch")
"""


def test_an_image_build_shows_its_step_and_how_long_it_has_lasted():
    screen = on_terminal(BUILD.format(sleep_s=1.2), 80)

    assert "Step 2/9 : RUN pip install torch (1 s)" in screen
    assert re.search(r"1 s  Collecting torch", screen)


def test_an_image_build_in_a_pipe_prints_each_line_once_with_the_time_since_its_start():
    done = subprocess.run(
        [sys.executable, "-c", BUILD.format(sleep_s=0)], capture_output=True, text=True, check=True
    )

    texts = [re.sub(r"^ *\d+ s  ", "", line) for line in done.stderr.splitlines()]
    assert texts == ["Step 2/9 : RUN pip install torch", "Collecting torch"]


def test_a_character_that_the_locale_lacks_is_escaped(tmp_path: Path):
    (tmp_path / "训练.txt").touch()

    listed = subprocess.run(
        [sys.executable, "-m", "cloudjob", "package", "ls"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "CLOUDJOB_HOME": str(tmp_path / "home")},
        stdout=subprocess.PIPE,
        check=True,
    ).stdout

    assert rb"\u8bad\u7ec3.txt" in listed

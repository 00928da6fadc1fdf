"""Measure the commands that read a log, with 100 MB of lines.

``python -m benchmarks.long_log`` prints one JSON object: the CPU time of each command and its most
memory, for each kind of lines, and the load of the machine. It exits with 1 if a limit does not
hold.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

LOG_BYTES, LINES_AT_ONCE = 100_000_000, 20_000
LIMIT_S = {"tail": 2.0, "grep": 10.0, "metrics": 10.0, "report": 10.0}
LIMIT_MIB = 200.0
_RANDOM = random.Random(37)
_WORDS = b"the loss acc lr epoch step of 12 0.5 model batch data and checkpoint time".split()
_CLOUDJOB = Path(sys.executable).parent / "cloudjob"
_KINDS: dict[str, Callable[[int], bytes]] = {
    "short": lambda number: b"[0] %d\n" % number,
    "empty": lambda number: b"[0] \n",
    "loss": lambda number: (
        b"[1] step %d of the epoch: %s\n" % (number, b"loss 0.5" if number % 10 == 0 else b"...")
    ),
    "words": lambda _: b"[0] %s\n" % b" ".join(_RANDOM.choices(_WORDS, k=9)),
    "bytes": lambda _: b"[0] %s\n" % _RANDOM.randbytes(80).translate(None, b"\r\n"),
    "json": lambda number: (
        b'[0] {"step": %d, "loss": %.4f, "acc": %.3f}\n' % (number, 5 / (number + 1), 0.5)
    ),
    "bar": lambda number: (
        b"[0] \rEpoch 1: 10%%|# | %d/1000 [00:12<00:34, loss=%.3f]\r\n" % (number, 0.5)
    ),
    "dense": lambda number: b"[0] step %d: loss=%.4f, acc=%.3f\n" % (number, 5 / (number + 1), 0.5),
}


def main() -> int:
    """Measure, print, and return the exit code."""
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="cloudjob-long-log-") as name:
        folder = Path(name)
        os.environ["CLOUDJOB_HOME"] = str(folder / "home")
        log = _log_of_job(folder)
        commands = {
            "tail": ("logs", "--tail", "5", "log"),
            "grep": ("logs", "--grep", "no such line", "log"),
            "metrics": ("metrics", "--metric", "loss=loss ([0-9.]+)", "log"),
            "report": ("report", "--to", str(folder / "report.html"), "log"),
        }
        for kind, line in _KINDS.items():
            _fill(log, line)
            for command, words in commands.items():
                cpu_s, memory_mib = _measured(words)
                figures |= {f"{command}-{kind}_s": cpu_s, f"{command}-{kind}_mib": memory_mib}
    figures["load"] = os.getloadavg()[0]
    print(json.dumps({key: round(value, 2) for key, value in figures.items()}))
    is_slow = any(
        figures[f"{command}-{kind}_s"] > limit
        for command, limit in LIMIT_S.items()
        for kind in _KINDS
    )
    is_large = any(
        figures[f"{command}-{kind}_mib"] > LIMIT_MIB for command in LIMIT_S for kind in _KINDS
    )
    return int(is_slow or is_large)


def _log_of_job(folder: Path) -> Path:
    """Run a job, and return the file of its log."""
    (folder / "source").mkdir()
    (folder / "source" / "train.py").write_text("print('start')\n")
    argv = (_CLOUDJOB, "submit", "--launcher", "python", "--name", "log", "train.py")
    subprocess.run(argv, cwd=folder / "source", check=True, capture_output=True)
    return next((folder / "home" / "process").glob("*/node-0.log"))


def _fill(log: Path, line: Callable[[int], bytes]) -> None:
    with log.open("wb") as file:
        number = 0
        while file.tell() < LOG_BYTES:
            file.write(b"".join(line(number + at) for at in range(LINES_AT_ONCE)))
            number += LINES_AT_ONCE
            file.write(b'jobentry# {"time":%d.0}\n' % (1_700_000_000 + number // LINES_AT_ONCE))


def _measured(words: tuple[str, ...]) -> tuple[float, float]:
    """Return the CPU seconds of a command, and its most memory in MiB."""
    process = subprocess.Popen(
        (_CLOUDJOB, *words), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"cloudjob {words[0]}: exit code {process.returncode}")
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


if __name__ == "__main__":
    sys.exit(main())

"""The command init."""

from __future__ import annotations

import argparse
import os

from cloudjob.cli.messages import print_message
from cloudjob.errors import UsageError

_FILE = "cloudjob.yaml"


def _init(options: argparse.Namespace) -> int:
    from pathlib import Path

    from cloudjob.config import load
    from cloudjob.submission import new_job_file

    folder = Path.cwd()
    script = options.script or new_job_file.find_script(folder)
    spec = load({"script": script}, job_file=None, cwd=folder, environ=os.environ).spec
    if not Path(spec.source, spec.script).is_file():
        raise UsageError(
            f"describing {spec.script}: there is no such file in {spec.source}",
            hint="cloudjob init SCRIPT",
        )
    text = new_job_file.job_file(spec.script, Path(spec.source), os.environ)
    if options.print:
        print(text, end="")
        return 0
    path = Path(spec.source) / _FILE
    new_job_file.write(path, text)
    print_message(f"wrote {path}; `cloudjob submit` runs {spec.script}")
    return 0


def add_init(parser: argparse.ArgumentParser) -> None:
    """Give the command init its arguments."""
    parser.set_defaults(run=_init)
    text = "the program to run; by default train.py, main.py or the only script here"
    parser.add_argument("script", metavar="SCRIPT", nargs="?", help=text)
    parser.add_argument("--print", action="store_true", help="print the file instead of writing it")

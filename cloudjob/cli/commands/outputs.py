"""The command outputs: lists or downloads the outputs of a job."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

import cloudjob
from cloudjob.cli.messages import print_message, print_name
from cloudjob.cli.options import job_argument
from cloudjob.cli.tables import print_table
from cloudjob.model.text import size_text

_INCOMPLETE = "  (may be incomplete)"


def _outputs(options: argparse.Namespace) -> int:
    job = cloudjob.attach(options.job)
    files = job.outputs()
    for name, uri in files.refused.items():
        if uri.startswith("pvc:"):
            print_message(f"warning: the output {name} is not read: only pods reach {uri}")
            print_message("hint: start a pod that mounts the claim, then `kubectl cp`")
            continue
        print_message(f"warning: the output {name} is not read: {job.submitted_by} chose {uri}")
        print_message("hint: if you trust that place, copy it with your own tools")
    for note in files.notes:
        print_message(note)
    if not files and not files.notes and not files.refused:
        print_message(f"job {job.id} has saved no outputs")
    elif options.to is None:
        _print_outputs(files)
    else:
        _fetch_outputs(files, Path(options.to))
    return 0


def _print_outputs(files: cloudjob.Outputs) -> None:
    """Print the names with sizes on a terminal; to a file or pipe, only the names."""
    names = [file.name + _INCOMPLETE * file.is_incomplete for file in files]
    if sys.stdout.isatty() and names:
        sizes = [size_text(file.size_bytes) for file in files]
        rows = list(zip(sizes, names, strict=True))
        print_table(rows, ("SIZE", "NAME"), numbers=("SIZE",))
        return
    for name in names:
        print_name(name)


def _fetch_outputs(outputs: cloudjob.Outputs, folder: Path) -> None:
    from cloudjob.cli.live import Transfers

    is_new = not folder.exists()
    try:
        with Transfers("fetched") as transfers:
            files = outputs.download(folder, on_progress=transfers.report)
    finally:
        if is_new and folder.is_dir():
            # Neither git nor the package of the next job takes what a job has made.
            with contextlib.suppress(OSError):
                (folder / ".gitignore").write_text("*\n")
    for file in files:
        print_name(str(folder / file.name))
        if file.is_incomplete:
            print_message(f"{file.name} may be incomplete: something was writing to it")


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """Give the command outputs its options."""
    parser.set_defaults(run=_outputs)
    job_argument(parser)
    parser.add_argument("--to", metavar="DIR", help="copy them to folders in DIR")

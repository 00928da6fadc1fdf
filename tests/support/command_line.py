"""The command line in a fork of a process that has imported it: starting Python costs far more."""

from __future__ import annotations

import faulthandler
import functools
import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path


@functools.cache
def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [__name__, "cloudjob.api", "cloudjob.cli.commands.list", "cloudjob.cli"]
    )
    return context


def run(
    arguments: Sequence[str | bytes],
    environ: Mapping[str, str | bytes],
    cwd: Path,
    output: tuple[Path, Path],
    limit_s: float,
) -> int | None:
    """Run a command and return its exit code; None if it had not ended in time and was killed."""
    process = _context().Process(target=_main, args=(arguments, environ, cwd, output))
    process.start()
    process.join(limit_s)
    code = process.exitcode
    if code is None and process.pid:
        # faulthandler then writes the stacks of all its threads to stderr.
        os.kill(process.pid, signal.SIGABRT)
        process.join(10)
        process.kill()
        process.join()
    process.close()
    return code


def _main(
    arguments: Sequence[str | bytes],
    environ: Mapping[str, str | bytes],
    cwd: Path,
    output: tuple[Path, Path],
) -> None:
    from cloudjob.cli import main

    os.environb.clear()
    for name, value in environ.items():
        os.environb[os.fsencode(name)] = os.fsencode(value)
    os.chdir(cwd)
    paths = (Path(os.devnull), *output)
    for descriptor, path in enumerate(paths):
        opened = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.dup2(opened, descriptor)
        os.close(opened)
    faulthandler.enable(file=2)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.argv = ["cloudjob", *map(os.fsdecode, arguments)]
    sys.exit(main(sys.argv[1:]))

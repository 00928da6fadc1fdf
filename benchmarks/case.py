"""The benchmark cases: the subjects of each comparison and the figures to measure."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks import nodes, simulation, subject
from benchmarks.jobs import lines
from benchmarks.measure import Command, Failed, Sample
from benchmarks.subject import Bench

Figures = dict[str, float]
Inspect = Callable[[Sample], Figures]
MANY_LINES_FACTOR = 5
# Number of nodes -> maximum number of rounds.
_CONTAINERS = {2: None, 4: None, 8: 5, 16: 3, 32: 3}
_SUBMITS = {2: 5, 8: 3, 32: 2}
_WORKERS = (250, 500, 1000, 2000)


@dataclass(frozen=True)
class Subject:
    """One side of a comparison: a command to run and measure, or a function that measures itself.

    ``rounds`` limits the rounds of a slow subject, which then has no warm-up either.
    """

    name: str
    command: Callable[[Bench, Path], Command] | None = None
    rounds: int | None = None
    inspect: Inspect | None = None
    take: Callable[[Bench], Figures] | None = None


@dataclass(frozen=True)
class Case:
    """Subjects that do the same thing; ratios refer to the first one."""

    name: str
    title: str
    figures: tuple[str, ...]
    subjects: tuple[Subject, ...]
    rounds: int | None = None
    watches_memory: bool = False

    @property
    def group(self) -> str:
        """The name without its number, as --only takes it."""
        return self.name.partition("-")[0]


def cases(line_count: int) -> tuple[Case, ...]:
    """Return every case; those of logs have ``line_count`` lines."""
    many = line_count * MANY_LINES_FACTOR
    return (
        _start("help", "--help"),
        _start("version", "--version"),
        _noop(2),
        _noop(4),
        Case(
            "entry",
            "a no-op script through the entry of the container, one node, 2 ranks",
            ("wall_s", "cpu_s"),
            all_ran(
                2,
                Subject("mpirun", partial(subject.mpirun_local, ranks=2, script="noop.py")),
                Subject("jobentry", partial(subject.jobentry, ranks=2, is_unpacked=True)),
                Subject("jobentry, zipped", partial(subject.jobentry, ranks=2, is_unpacked=False)),
                Subject("sagemaker-training", partial(subject.sagemaker_entry, ranks=2), rounds=2),
            ),
        ),
        *(_containers(count, rounds) for count, rounds in _CONTAINERS.items()),
        *(_submit(count, rounds) for count, rounds in _SUBMITS.items()),
        *(_probe(count) for count in _WORKERS),
        _slurm(),
        _log("log", line_count, None),
        _log("log-5x", many, 2),
        *(_store(way, size) for size in ("big", "small") for way in ("up", "down")),
    )


def _start(name: str, option: str) -> Case:
    return Case(
        name,
        f"start: {option}",
        ("cpu_s", "wall_s"),
        (
            Subject("torchx", partial(subject.torchx_start, option=option)),
            Subject("modelarts-macli", partial(subject.macli_start, option=option)),
            Subject("cloudjob", partial(subject.cloudjob_start, option=option)),
            Subject("python -c pass", subject.python_start),
        ),
    )


def _noop(nodes: int) -> Case:
    script = "noop.py"
    return Case(
        f"noop-{nodes}",
        f"submit to done: a no-op script, one rank on each of {nodes} nodes",
        ("wall_s", "cpu_s"),
        all_ran(
            nodes,
            Subject("mpirun", partial(subject.mpirun_nodes, nodes=nodes)),
            Subject("torchx", partial(_torchx, nodes=nodes, args=(script,))),
            Subject("submitit", partial(subject.submitit_job, nodes=nodes)),
            Subject("cloudjob", partial(_cloudjob, nodes=nodes, args=(script,))),
        ),
    )


def _containers(count: int, rounds: int | None) -> Case:
    return Case(
        f"containers-{count}",
        f"a no-op script, one rank on each of {count} containers that all begin at one moment",
        ("first_line_s", "done_s", "cpu_s", "head_cpu_s"),
        (
            Subject("mpirun", take=partial(_in_containers, count, nodes.MPIRUN)),
            Subject("serial", take=partial(_in_containers, count, nodes.SERIAL)),
            Subject("cloudjob", take=partial(_in_containers, count, nodes.ENTRY)),
        ),
        rounds=rounds,
    )


def _in_containers(count: int, way: nodes.Way, bench: Bench) -> Figures:
    try:
        return vars(bench.pool.nodes(count).run(way))
    except Failed:
        # A process of the failed run may still be running there.
        bench.pool.close()
        raise


def _submit(count: int, rounds: int) -> Case:
    return Case(
        f"submit-{count}",
        f"submit to done on the docker backend, {count} containers, beside the engine alone",
        ("wall_s", *nodes.PHASES),
        (
            Subject("engine", take=partial(_engine_alone, count)),
            Subject("cloudjob", take=partial(_submitted, count)),
        ),
        rounds=rounds,
    )


def _engine_alone(count: int, bench: Bench) -> Figures:
    return nodes.engine_alone(bench.pool, count)


def _submitted(count: int, bench: Bench) -> Figures:
    return nodes.submitted(bench.pool, bench.source("noop.py"), count)


def _probe(count: int) -> Case:
    return Case(
        f"probe-{count}",
        f"the head brings {count:,} simulated workers up, some slow and some late",
        simulation.FIGURES,
        (Subject("jobentry", take=partial(_simulated, count)),),
        rounds=3,
    )


def _slurm() -> Case:
    return Case(
        "slurm-2",
        "submit to done on a real Slurm: a no-op script once on each of 2 nodes, beside srun",
        ("wall_s",),
        (
            Subject("srun", take=lambda bench: bench.cluster.srun()),
            Subject("sbatch", take=lambda bench: bench.cluster.sbatch()),
            Subject("cloudjob", take=lambda bench: bench.cluster.submit("python")),
            Subject("cloudjob, mpirun", take=lambda bench: bench.cluster.submit("mpirun")),
        ),
    )


def _simulated(count: int, bench: Bench) -> Figures:
    return simulation.bring_up(bench, count)


def _log(name: str, count: int, rounds: int | None) -> Case:
    args = ("lines.py", str(count))
    size_mb = count * len(lines.block(0)) // lines.BLOCK / 1e6
    return Case(
        name,
        f"{count:,} lines ({size_mb:g} MB) of one rank through the log path",
        ("wall_s", "cpu_s", "rss_mib", "other_rss_mib", "lost_lines", "lost_bytes", "is_exact"),
        (
            Subject("mpirun", partial(_mpirun, args=args), inspect=_log_check(count)),
            Subject(
                "torchx",
                partial(_torchx, nodes=1, args=args),
                inspect=_log_check(count, b"python/0 ", stream="stderr"),
            ),
            Subject(
                "cloudjob",
                partial(_cloudjob, nodes=1, args=args),
                inspect=_log_check(count, b"[0] "),
            ),
        ),
        rounds=rounds,
        watches_memory=True,
    )


_SIZES = {"big": "one file of 200 MB", "small": "2,000 files of 4 KiB"}
_WAYS = {"up": "to", "down": "from"}
_CLIENTS = ("boto3", "obstore", "s5cmd", "minio", "cloudjob")


def _store(way: str, size: str) -> Case:
    return Case(
        f"store-{size}-{way}",
        f"{_SIZES[size]} {_WAYS[way]} a SeaweedFS on this machine",
        ("transfer_s", "wall_s", "cpu_s", "rss_mib"),
        tuple(
            Subject(
                name,
                partial(subject.store_client, client=name, way=way, size=size),
                inspect=_transfer,
            )
            for name in _CLIENTS
        ),
        rounds=5,
        watches_memory=True,
    )


def _transfer(sample: Sample) -> Figures:
    """Return the seconds of the transfer itself, as reported by the driver."""
    return {"transfer_s": float(sample.stdout.read_bytes().split()[-1])}


def _mpirun(bench: Bench, run: Path, args: tuple[str, ...]) -> Command:
    return subject.mpirun_local(bench, run, 1, *args)


def _torchx(bench: Bench, run: Path, nodes: int, args: tuple[str, ...]) -> Command:
    return subject.torchx_job(bench, run, nodes, *args)


def _cloudjob(bench: Bench, run: Path, nodes: int, args: tuple[str, ...]) -> Command:
    return subject.cloudjob_job(bench, run, nodes, *args)


def all_ran(ranks: int, *subjects: Subject) -> tuple[Subject, ...]:
    """Return ``subjects``, whose runs fail unless each rank's one line appears.

    Open MPI 5 was seen to start fewer processes than asked and to exit with 0; TorchX 0.7 loses
    the line of a rank that ran in one of a few hundred runs.
    """

    def inspect(sample: Sample) -> Figures:
        text = sample.stdout.read_bytes() + sample.stderr.read_bytes()
        count = text.count(b"noop ran")
        if count != ranks:
            raise Failed(f"the output of {count} of {ranks} ranks came out")
        return {}

    return tuple(replace(each, inspect=inspect) for each in subjects)


@dataclass(frozen=True)
class _Log:
    digest: str
    lines: int
    bytes: int


def _log_check(count: int, prefix: bytes = b"", stream: str = "stdout") -> Inspect:
    """Return a function that compares the received log with what the script wrote."""

    def inspect(sample: Sample) -> Figures:
        came = _read(sample.stdout if stream == "stdout" else sample.stderr, prefix)
        wrote = _written(count)
        return {
            "lost_lines": wrote.lines - came.lines,
            "lost_bytes": wrote.bytes - came.bytes,
            "is_exact": float(came.digest == wrote.digest),
        }

    return inspect


def _read(path: Path, prefix: bytes) -> _Log:
    """Return the log in ``path``: the lines that begin with ``prefix``, without it."""
    digest, count, size = hashlib.sha256(), 0, 0
    with path.open("rb") as file:
        for line in file:
            if line.startswith(prefix):
                digest.update(line[len(prefix) :])
                count += 1
                size += len(line) - len(prefix)
    return _Log(digest.hexdigest(), count, size)


def _written(count: int) -> _Log:
    """Return the log that the script writes."""
    digest, size = hashlib.sha256(), 0
    for start in range(0, count, lines.BLOCK):
        block = lines.block(start)
        digest.update(block)
        size += len(block)
    return _Log(digest.hexdigest(), count, size)

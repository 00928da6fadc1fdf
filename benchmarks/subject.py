"""The subjects: each function returns the command of one run in a new folder."""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from benchmarks import venv
from benchmarks.measure import Command
from benchmarks.nodes import Pool
from benchmarks.server import Server
from benchmarks.slurm import Cluster
from benchmarks.venv import ROOT, NotRun

_AGENT = ROOT / "benchmarks" / "agent"
_ALLOW_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@dataclass(frozen=True)
class Bench:
    """The settings that all subjects share.

    ``jobs`` holds the scripts to run, each in a folder of its own; ``python`` runs them; ``pool``
    holds the containers of a case that needs some.
    """

    homes: Path
    jobs: Path
    bin: Path
    mpirun: Path
    mpi_version: str
    cloudjob: Path
    zipapp: Path | None
    pool: Pool
    store: Server | None = None
    slurm: Cluster | None = None

    @property
    def cluster(self) -> Cluster:
        """The Slurm of a case that needs one."""
        if self.slurm is None:
            raise NotRun("there is no Slurm")
        return self.slurm

    @property
    def python(self) -> str:
        """The interpreter of every script, the same for all subjects."""
        return str(self.bin / "python")

    def source(self, script: str) -> Path:
        """Return the folder that holds ``script`` and nothing else."""
        return self.jobs / script.removesuffix(".py")

    def command(self, argv: tuple[str, ...], run: Path, script: str, **env: str) -> Command:
        """Return ``argv`` with an environment that is independent of the caller's."""
        home = self.homes / Path(argv[0]).name
        tmp = run / "tmp"
        for folder in (home, tmp):
            folder.mkdir(parents=True, exist_ok=True)
        path = os.pathsep.join([str(self.bin), str(self.mpirun.parent), os.environ["PATH"]])
        base = {"PATH": path, "HOME": str(home), "TMPDIR": str(tmp), "LANG": "C.UTF-8"}
        return Command(argv, {**base, **_ALLOW_ROOT, **env}, self.source(script), limit_s=300)


def python_start(bench: Bench, run: Path) -> Command:
    """Start an interpreter that does nothing: the lower limit for any Python program."""
    return bench.command((bench.python, "-c", "pass"), run, "noop.py")


def torchx_start(bench: Bench, run: Path, option: str) -> Command:
    """Start `torchx --help` and the like."""
    return bench.command((_script("torchx", "torchx"), option), run, "noop.py")


def macli_start(bench: Bench, run: Path, option: str) -> Command:
    """Start `macli --help` and the like: the command line of ModelArts."""
    return bench.command((_script("modelarts-macli", "macli"), option), run, "noop.py")


def cloudjob_start(bench: Bench, run: Path, option: str) -> Command:
    """Start `cloudjob --help` and the like."""
    return bench.command((_cloudjob(bench), option), run, "noop.py")


def mpirun_nodes(bench: Bench, run: Path, nodes: int) -> Command:
    """Start plain mpirun with one rank on each of ``nodes`` emulated nodes, each with a daemon.

    Open MPI treats 127.0.0.2 and up as other machines; names would cost DNS lookups.
    """
    hosts = ",".join(f"127.0.0.{2 + node}:1" for node in range(nodes))
    is_5 = int(bench.mpi_version.partition(".")[0]) >= 5
    agent = ("--mca", "plm_ssh_agent" if is_5 else "plm_rsh_agent", str(_AGENT))
    # Nodes that share a host name but not a TMPDIR must not use shared memory: ranks crash.
    btl = ("--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "lo")
    rank = (bench.python, "noop.py")
    argv = (str(bench.mpirun), "-np", str(nodes), "--host", hosts, *agent, *btl)
    source = str(bench.source("noop.py"))
    nodes_folder = str(run / "nodes")
    return bench.command((*argv, "--wdir", source, *rank), run, "noop.py", BENCH_NODES=nodes_folder)


def mpirun_local(bench: Bench, run: Path, ranks: int, script: str, *args: str) -> Command:
    """Start plain mpirun on this machine."""
    rank = (bench.python, script, *args)
    return bench.command((str(bench.mpirun), "-np", str(ranks), *rank), run, script)


def torchx_job(bench: Bench, run: Path, nodes: int, script: str, *args: str) -> Command:
    """Run N copies of a script with TorchX, with the log streamed to stderr."""
    component = ("utils.python", "--script", script, "--num_replicas", str(nodes))
    torchx_args = ("run", "--scheduler", "local_cwd", *component, *(("--", *args) if args else ()))
    return bench.command((_script("torchx", "torchx"), *torchx_args), run, script)


def submitit_job(bench: Bench, run: Path, nodes: int) -> Command:
    """Run a job of N tasks on submitit's local executor."""
    python = str(venv.prepare("submitit") / "bin" / "python")
    driver = str(venv.PEERS / "submitit_driver.py")
    argv = (python, driver, str(run / "folder"), str(nodes), bench.python, "noop.py")
    return bench.command(argv, run, "noop.py")


def sagemaker_entry(bench: Bench, run: Path, ranks: int) -> Command:
    """Start the entry of the SageMaker training toolkit on one host, MPI enabled."""
    folder = venv.prepare("sagemaker-training") / "bin"
    base = run / "ml"
    _sagemaker_files(base, ranks, bench.source("noop.py") / "noop.py")
    argv = (str(folder / "python"), str(venv.PEERS / "sagemaker_driver.py"))
    # With its own Open MPI 4.1, as Open MPI 5 refuses its options.
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    env = {"PATH": path, "SAGEMAKER_BASE_DIR": str(base), "AWS_EC2_METADATA_DISABLED": "true"}
    return bench.command(argv, run, "noop.py", **env)


def unpacked_entry(bench: Bench) -> Path:
    """Return the node half unpacked, as the process backend and our images start it."""
    target = bench.homes / "jobentry"
    if not target.exists():
        argv = [bench.python, "-I", "-S", str(entry_of(bench)), "--unpack", str(target)]
        subprocess.run(argv, check=True)
    return target


def jobentry(bench: Bench, run: Path, ranks: int, *, is_unpacked: bool) -> Command:
    """Start the node half of cloudjob on one node."""
    entry = unpacked_entry(bench) if is_unpacked else entry_of(bench)
    env = {"MA_NUM_HOSTS": "1", "CLOUDJOB_PROCS_PER_NODE": str(ranks)}
    argv = (bench.python, "-I", "-S", str(entry), "noop.py")
    return bench.command(argv, run, "noop.py", **env)


def entry_of(bench: Bench) -> Path:
    """Return the zipapp of the node half.

    Raises:
        NotRun: There is none.
    """
    if bench.zipapp is None:
        raise NotRun("no zipapp: scripts/build_zipapp.py did not make one; give --zipapp")
    return bench.zipapp


def cloudjob_job(bench: Bench, run: Path, nodes: int, script: str, *args: str) -> Command:
    """Run `cloudjob submit` on the process backend, which emulates all nodes."""
    submit_args = ("submit", "--nodes", str(nodes), "--procs-per-node", "1", script, *args)
    home = str(bench.homes / "cloudjob-home")
    return bench.command((_cloudjob(bench), *submit_args), run, script, CLOUDJOB_HOME=home)


def open_mpi_version(mpirun: Path) -> str:
    """Return the version that ``mpirun`` prints.

    Raises:
        NotRun: It prints no version.
    """
    done = subprocess.run((str(mpirun), "--version"), check=False, capture_output=True, text=True)
    match = re.search(r"\d+\.\d+\.\d+", done.stdout)
    if match is None:
        raise NotRun(f"mpirun --version says no version of Open MPI: {done.stdout[:80]!r}")
    return match.group()


def store_client(bench: Bench, run: Path, client: str, way: str, size: str) -> Command:
    """Transfer ``big`` or ``small`` ``up`` or ``down`` with an S3 client."""
    if bench.store is None:
        raise NotRun("there is no server")
    ours = client == "cloudjob"
    folder = bench.cloudjob.parent if ours else venv.prepare(client) / "bin"
    prefix = "in/" if way == "down" else f"{run.name}/"
    driver = str(venv.PEERS / "store_driver.py")
    argv = (str(folder / "python"), driver, client, way, size, str(bench.store.folder), prefix)
    home = str(run / "home")
    return bench.command(argv, run, "noop.py", **bench.store.environ, CLOUDJOB_HOME=home)


def _script(peer: str, name: str) -> str:
    return str(venv.prepare(peer) / "bin" / name)


def _cloudjob(bench: Bench) -> str:
    if not bench.cloudjob.exists():
        raise NotRun("cloudjob is not installed: run scripts/demo or give --cloudjob")
    return str(bench.cloudjob)


def _sagemaker_files(base: Path, ranks: int, script: Path) -> None:
    """Write the files that the platform writes under /opt/ml before it starts a container."""
    group = {
        "instance_group_name": "homogeneousCluster",
        "instance_type": "local",
        "hosts": ["localhost"],
    }
    files = {
        "hyperparameters": {
            "sagemaker_program": script.name,
            "sagemaker_mpi_enabled": "true",
            "sagemaker_mpi_num_of_processes_per_host": str(ranks),
        },
        "resourceconfig": {
            "current_host": "localhost",
            "hosts": ["localhost"],
            "current_group_name": "homogeneousCluster",
            "current_instance_type": "local",
            "instance_groups": [group],
            "network_interface_name": "lo",
        },
        "inputdataconfig": {},
    }
    config = base / "input" / "config"
    for folder in (config, base / "code", base / "model", base / "output" / "data"):
        folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (config / f"{name}.json").write_text(json.dumps(value))
    (base / "code" / script.name).write_bytes(script.read_bytes())

"""Benchmark cases of the launchers: a tool started by hand, and the same tool through the entry.

The frameworks are those of the tests; the tests' variables name the interpreters that have them.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks import venv
from benchmarks.case import Case, Subject, all_ran
from benchmarks.measure import Command
from benchmarks.subject import Bench, entry_of, unpacked_entry
from benchmarks.venv import ROOT, NotRun

_NOOP = "noop.py"
_HOST = "127.0.0.1"
# The start script in MindSpore's documentation, changed to end when a rank does.
_CLUSTER = ROOT / "benchmarks" / "peers" / "mindspore-cluster.sh"
_RANK = ROOT / "benchmarks" / "peers" / "mindspore-mpi-rank.sh"


@dataclass(frozen=True)
class _Launcher:
    """One launcher, and how to start the same ranks by hand.

    Args:
        by_hand: Returns the command that a person would type.
        framework: What the script imports, or the launcher starts.
        variables: The variables that select the launcher, if its name is not that of the case.
    """

    name: str
    ranks: int
    by_hand: Callable[[Bench, Path, _Launcher], Command]
    framework: str = ""
    script: str = _NOOP
    variables: Mapping[str, str] | None = None

    def python(self, bench: Bench) -> str:
        """Return the interpreter of the script."""
        return _framework(self.framework) if self.framework else bench.python


def cases() -> tuple[Case, ...]:
    """Return a case for each launcher; mpirun's own is ``entry``, and srun's ``slurm``."""
    return tuple(_case(launcher) for launcher in _LAUNCHERS)


def names() -> tuple[str, ...]:
    """Return the names of all cases."""
    return tuple(case.name for case in cases())


def _case(launcher: _Launcher) -> Case:
    return Case(
        f"launchers-{launcher.name}",
        f"a no-op, {launcher.ranks} rank(s) on one node: {launcher.name} by hand and by the entry",
        ("wall_s", "cpu_s"),
        all_ran(
            launcher.ranks,
            Subject("by hand", partial(_by_hand, launcher=launcher)),
            Subject("jobentry", partial(_entry, launcher=launcher)),
            Subject("unpacked", partial(_unpacked, launcher=launcher)),
        ),
    )


def _by_hand(bench: Bench, run: Path, launcher: _Launcher) -> Command:
    return launcher.by_hand(bench, run, launcher)


def _entry(bench: Bench, run: Path, launcher: _Launcher) -> Command:
    """Start the node half of cloudjob on one node with this launcher."""
    program = ("python3", _NOOP) if launcher.name == "command" else (launcher.script,)
    port = str(_free_port())
    env = {
        "MA_NUM_HOSTS": "1",
        "CLOUDJOB_PROCS_PER_NODE": str(launcher.ranks),
        "CLOUDJOB_LAUNCHER": launcher.name,
        "MA_SCRIPT_INTERPRETER": launcher.python(bench),
        "MASTER_PORT": port,
        "MS_SCHED_PORT": port,
        **(launcher.variables or {}),
    }
    if launcher.name == "mpich":
        env.update(_mpich_path(bench))
    argv = (bench.python, "-I", "-S", str(entry_of(bench)), *program)
    return bench.command(argv, run, launcher.script, **env)


def _unpacked(bench: Bench, run: Path, launcher: _Launcher) -> Command:
    """Start the same entry from unpacked files."""
    return _entry(replace(bench, zipapp=unpacked_entry(bench)), run, launcher)


# -- by hand -------------------------------------------------------------------------------------


def _script(bench: Bench, run: Path, launcher: _Launcher, *args: str, **env: str) -> Command:
    argv = (launcher.python(bench), launcher.script, *args)
    return bench.command(argv, run, launcher.script, **env)


def _pytorch_modelarts(bench: Bench, run: Path, launcher: _Launcher) -> Command:
    place = ("--init_method", f"tcp://{_HOST}:{_free_port()}", "--rank", "0", "--world_size", "1")
    return _script(bench, run, launcher, *place)


def _tensorflow(bench: Bench, run: Path, launcher: _Launcher) -> Command:
    cluster = {"worker": [f"{_HOST}:{_free_port()}"]}
    config = {"cluster": cluster, "task": {"type": "worker", "index": 0}}
    return _script(bench, run, launcher, TF_CONFIG=json.dumps(config))


def _each(bench: Bench, run: Path, launcher: _Launcher) -> Command:
    """Start the script in a shell loop, as the documentation does for a rank table."""
    text = 'i=0; while [ $i -lt "$1" ]; do RANK_ID=$i DEVICE_ID=$i "$2" "$3" & i=$((i + 1)); done; '
    argv = ("sh", "-c", text + "wait", "sh", str(launcher.ranks))
    script = (launcher.python(bench), launcher.script)
    return bench.command((*argv, *script), run, launcher.script, RANK_SIZE=str(launcher.ranks))


def _torchrun(bench: Bench, run: Path, launcher: _Launcher) -> Command:
    size = ("--nnodes=1", f"--nproc-per-node={launcher.ranks}")
    argv = (launcher.python(bench), "-m", "torch.distributed.run", *size, launcher.script)
    # If it is not set, torchrun sets it and prints a long message.
    return bench.command(argv, run, launcher.script, OMP_NUM_THREADS="1")


def _mpirun(bench: Bench, run: Path, launcher: _Launcher) -> Command:
    """Start Open MPI's mpirun with the options in Horovod's documentation."""
    options = (
        "-bind-to",
        "none",
        "-map-by",
        "slot",
        "-mca",
        "pml",
        "ob1",
        "-mca",
        "btl",
        "^openib",
    )
    size = ("-np", str(launcher.ranks), "--oversubscribe")
    rank = (launcher.python(bench), launcher.script)
    return bench.command((str(bench.mpirun), *size, *options, *rank), run, launcher.script)


def _mpich(bench: Bench, run: Path, launcher: _Launcher) -> Command:
    argv = ("mpiexec.hydra", "-np", str(launcher.ranks), launcher.python(bench), launcher.script)
    return bench.command(argv, run, launcher.script, **_mpich_path(bench))


def _horovodrun(bench: Bench, run: Path, launcher: _Launcher) -> Command:
    python = launcher.python(bench)
    # Without an interface, Horovod starts a task on every node to list them, which was seen to
    # hang.
    options = ("--gloo", "-np", str(launcher.ranks), "--network-interface", "lo")
    argv = (python, "-m", "horovod.runner.launch", *options, python, launcher.script)
    return bench.command(argv, run, launcher.script)


def _msrun(bench: Bench, run: Path, launcher: _Launcher) -> Command:
    size = (f"--worker_num={launcher.ranks}", f"--local_worker_num={launcher.ranks}")
    meeting = (f"--master_port={_free_port()}", "--join=True", f"--log_dir={run / 'log'}")
    tail = "--tail_worker_log=" + ",".join(str(rank) for rank in range(launcher.ranks))
    args = ("-m", "mindspore.parallel.cluster.run", *size, *meeting, tail, launcher.script)
    python = launcher.python(bench)
    return bench.command((python, *args), run, launcher.script, PATH=_first(bench, python))


def _dynamic_cluster(bench: Bench, run: Path, launcher: _Launcher) -> Command:
    args = (str(launcher.ranks), launcher.python(bench), launcher.script)
    return _with_scheduler(bench, run, launcher, (str(_CLUSTER), *args))


def _mindspore_mpi(bench: Bench, run: Path, launcher: _Launcher) -> Command:
    options = ("-np", str(launcher.ranks), "--oversubscribe", "sh", str(_RANK))
    program = (launcher.python(bench), launcher.script)
    argv = (str(_CLUSTER), "0", *program, str(bench.mpirun), *options, *program)
    return _with_scheduler(bench, run, launcher, argv)


def _with_scheduler(bench: Bench, run: Path, launcher: _Launcher, argv: tuple[str, ...]) -> Command:
    env = {
        "MS_WORKER_NUM": str(launcher.ranks),
        "MS_SCHED_HOST": _HOST,
        "MS_SCHED_PORT": str(_free_port()),
    }
    return bench.command(("sh", *argv), run, launcher.script, **env)


# -- requirements --------------------------------------------------------------------------------


def _framework(name: str) -> str:
    """Return an interpreter that has the framework.

    Raises:
        NotRun: No interpreter has it.
    """
    variable = f"CLOUDJOB_TEST_{name.upper()}"
    path = os.environ.get(variable, "")
    if path:
        return path
    if name == "torch":
        return str(venv.prepare("torch") / "bin" / "python")
    raise NotRun(f"${variable} names no interpreter with it, as .ci/run makes one")


def _mpich_path(bench: Bench) -> dict[str, str]:
    folder = os.environ.get("CLOUDJOB_TEST_MPICH")
    if not folder:
        raise NotRun("$CLOUDJOB_TEST_MPICH names no folder, as .ci/mpich makes one")
    return {"PATH": os.pathsep.join([f"{folder}/usr/bin", str(bench.bin), os.environ["PATH"]])}


def _first(bench: Bench, program: str) -> str:
    """Return a PATH that starts with the folder of ``program``, as msrun starts ``python``."""
    folders = [str(Path(program).parent), str(bench.mpirun.parent), os.environ["PATH"]]
    return os.pathsep.join(folders)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])


_DEVICES = "10.0.0.1 0=192.168.0.1 1=192.168.1.1"
_LAUNCHERS = (
    _Launcher("python", 1, _script),
    _Launcher("command", 1, _script),
    _Launcher("pytorch-modelarts", 1, _pytorch_modelarts),
    _Launcher("tensorflow", 1, _tensorflow),
    _Launcher(
        "rank-table",
        2,
        _each,
        variables={"CLOUDJOB_DEVICES": _DEVICES, "CLOUDJOB_DEVICE_TARGET": "Ascend"},
    ),
    _Launcher("mpich", 2, _mpich, variables={"CLOUDJOB_LAUNCHER": "mpirun"}),
    _Launcher("torchrun", 2, _torchrun, "torch"),
    _Launcher("horovod", 2, _mpirun, "horovod", "horovod_noop.py"),
    _Launcher("horovod-gloo", 2, _horovodrun, "horovod", "horovod_noop.py"),
    _Launcher("msrun", 2, _msrun, "mindspore", "mindspore_noop.py"),
    _Launcher("dynamic-cluster", 2, _dynamic_cluster, "mindspore", "mindspore_noop.py"),
    _Launcher("mindspore-mpi", 2, _mindspore_mpi, "mindspore", "mindspore_noop.py"),
)

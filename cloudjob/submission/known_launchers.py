"""The programs, modules and functions that start the ranks of a training, or a cluster for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

# A launcher of cloudjob -> the programs that it replaces; "" for those that none replaces. Some
# start ranks only with a certain word (``accelerate:launch``); ``-m:NAME`` is a module of Python.
_PROGRAMS = {
    "mpirun": "mpirun mpiexec orterun prterun prun mpiexec.hydra mpiexec.mpich mpiexec.openmpi"
    " mpirun.openmpi mpirun.mpich mpirun_rsh oshrun jsrun aprun ibrun mpprun"
    " flux:run flux:submit flux:alloc flux:batch",
    "srun": "srun",
    "msrun": "msrun -m:mindspore.parallel.cluster.run",
    "horovod": "horovodrun -m:horovod.runner.launch",
    "rank-table": "davincirun.py",
    "torchrun": "torchrun accelerate:launch accelerate-launch composer deepspeed ds baguarun bfrun"
    " dlrover-run fleetrun torchx colossalai:run fabric:run lightning:run tune:run"
    " -m:torch.distributed.launch -m:torch.distributed.run -m:torch.distributed.launcher"
    " -m:torch_npu.distributed.run -m:accelerate.commands.launch -m:deepspeed.launcher.runner"
    " -m:deepspeed.launcher.launch -m:colossalai.cli -m:composer.cli.launcher"
    " -m:lightning.fabric.cli -m:lightning_fabric.cli -m:fabric.cli"
    " -m:bagua.distributed.launch -m:bagua.distributed.run",
    "": "xla_dist axolotl:train axolotl:preprocess dask:scheduler dask:worker"
    " llamafactory-cli:train mim:train oumi:distributed ray:start ray:job ray:submit ray:up"
    " ray:exec swift:sft swift:pt swift:rlhf xtuner:train"
    " -m:paddle.distributed.launch -m:paddle.distributed.fleet.launch"
    " -m:torch_xla.distributed.xla_dist",
}
# The same for functions.
_FUNCTIONS = {
    "torchrun": "torch.multiprocessing.spawn torch.distributed.launcher.api.elastic_launch"
    " torch.distributed.launcher.elastic_launch torch.distributed.run.main"
    " torch.distributed.run.run torch.distributed.launch.main accelerate.notebook_launcher"
    " accelerate.debug_launcher",
    "horovod": "horovod.run horovod.torch.run",
    "": "paddle.distributed.spawn torch_xla.distributed.xla_multiprocessing.spawn torch_xla.launch",
}
_NO_START = frozenset(("--version", "-V", "--help", "-h"))
# Programs that run the command in their arguments.
_WRAPPERS = frozenset(
    (
        *("apptainer", "catchsegv", "chrt", "conda", "coverage", "dumb-init", "gosu", "hatch"),
        *("ionice", "mamba", "memray", "micromamba", "ncu", "nsys", "numactl", "parallel", "pdm"),
        *("perf", "pipenv", "pipx", "pixi", "poetry", "py-spy", "rye", "script", "setsid"),
        *("singularity", "ssh", "stdbuf", "strace", "su-exec", "taskset", "timeout", "tini"),
        *("tini-static", "unbuffer", "uv", "uvx", "xargs", "xvfb-run"),
    )
)
# The number of words of such a program that may precede the command.
_MAX_WRAPPED = 50


def _launcher_by_name(rows: Mapping[str, str]) -> dict[str, str]:
    return {
        name.replace(":", " "): launcher for launcher, row in rows.items() for name in row.split()
    }


FUNCTIONS = _launcher_by_name(_FUNCTIONS)
_BY_NAME = {**FUNCTIONS, **_launcher_by_name(_PROGRAMS)}


class Known(NamedTuple):
    """A launcher in a command.

    Args:
        launcher: The launcher of cloudjob that replaces it; empty if none does.
        shown: The program, module or function that the command names.
    """

    launcher: str
    shown: str


def in_command(argv: Sequence[str]) -> Known | None:
    """Return the launcher that a command starts; None if it starts none."""
    is_wrapped = argv[0].rpartition("/")[2] in _WRAPPERS
    starts = range(_MAX_WRAPPED if is_wrapped else 1)
    return next(filter(None, (_at_start(argv[at:]) for at in starts if at < len(argv))), None)


def _at_start(argv: Sequence[str]) -> Known | None:
    if argv[1:2] and argv[1] in _NO_START:
        return None
    program, *words = [argument.rpartition("/")[2] for argument in argv]
    word = next((word for word in words if not word.startswith("-")), "")
    names = [program, f"{program} {word}"]
    if "-m" in words[:-1]:
        names.append(f"-m {words[words.index('-m') + 1]}")
    elif program.startswith(("python", "pypy")) and "-c" not in words:
        # `python -u /usr/bin/torchrun …`
        names.append(word)
    for name in names:
        if name in _BY_NAME:
            return Known(_BY_NAME[name], name.removeprefix("-m "))
    return None

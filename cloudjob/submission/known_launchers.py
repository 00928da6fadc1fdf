"""The programs, modules and functions that start the ranks of a training, or a cluster for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

# Programs, and the launcher of cloudjob that replaces each; empty if none does.
_PROGRAMS: Mapping[str, str] = {
    **dict.fromkeys(("mpirun", "mpiexec", "orterun", "prterun", "prun"), "mpirun"),
    **dict.fromkeys(("mpiexec.hydra", "mpiexec.mpich", "mpiexec.openmpi"), "mpirun"),
    **dict.fromkeys(("mpirun.openmpi", "mpirun.mpich", "mpirun_rsh", "oshrun"), "mpirun"),
    **dict.fromkeys(("jsrun", "aprun", "ibrun", "mpprun"), "mpirun"),
    "srun": "srun",
    "msrun": "msrun",
    "torchrun": "torchrun",
    "horovodrun": "horovod",
    "davincirun.py": "rank-table",
    **dict.fromkeys(("accelerate-launch", "composer", "deepspeed", "ds"), "torchrun"),
    **dict.fromkeys(("baguarun", "bfrun", "dlrover-run", "fleetrun", "torchx"), "torchrun"),
    "xla_dist": "",
}
# Programs that start ranks only with one of these words.
_WITH_WORDS: Mapping[str, tuple[str, frozenset[str]]] = {
    "accelerate": ("torchrun", frozenset(("launch",))),
    "axolotl": ("", frozenset(("train", "preprocess"))),
    "colossalai": ("torchrun", frozenset(("run",))),
    "dask": ("", frozenset(("scheduler", "worker"))),
    "fabric": ("torchrun", frozenset(("run",))),
    "flux": ("mpirun", frozenset(("run", "submit", "alloc", "batch"))),
    "lightning": ("torchrun", frozenset(("run",))),
    "llamafactory-cli": ("", frozenset(("train",))),
    "mim": ("", frozenset(("train",))),
    "oumi": ("", frozenset(("distributed",))),
    "ray": ("", frozenset(("start", "job", "submit", "up", "exec"))),
    "swift": ("", frozenset(("sft", "pt", "rlhf"))),
    "tune": ("torchrun", frozenset(("run",))),
    "xtuner": ("", frozenset(("train",))),
}
_MODULES: Mapping[str, str] = {
    **dict.fromkeys(("torch.distributed.launch", "torch.distributed.run"), "torchrun"),
    **dict.fromkeys(("torch_npu.distributed.run", "torch.distributed.launcher"), "torchrun"),
    **dict.fromkeys(("accelerate.commands.launch", "deepspeed.launcher.runner"), "torchrun"),
    **dict.fromkeys(("deepspeed.launcher.launch", "colossalai.cli"), "torchrun"),
    **dict.fromkeys(("composer.cli.launcher", "lightning.fabric.cli"), "torchrun"),
    **dict.fromkeys(("lightning_fabric.cli", "fabric.cli"), "torchrun"),
    **dict.fromkeys(("bagua.distributed.launch", "bagua.distributed.run"), "torchrun"),
    "horovod.runner.launch": "horovod",
    "mindspore.parallel.cluster.run": "msrun",
    "paddle.distributed.launch": "",
    "paddle.distributed.fleet.launch": "",
    "torch_xla.distributed.xla_dist": "",
}
# Functions that start ranks.
FUNCTIONS: Mapping[str, str] = {
    "torch.multiprocessing.spawn": "torchrun",
    "torch.distributed.launcher.api.elastic_launch": "torchrun",
    "torch.distributed.launcher.elastic_launch": "torchrun",
    "torch.distributed.run.main": "torchrun",
    "torch.distributed.run.run": "torchrun",
    "torch.distributed.launch.main": "torchrun",
    "accelerate.notebook_launcher": "torchrun",
    "accelerate.debug_launcher": "torchrun",
    "horovod.run": "horovod",
    "horovod.torch.run": "horovod",
    "paddle.distributed.spawn": "",
    "torch_xla.distributed.xla_multiprocessing.spawn": "",
    "torch_xla.launch": "",
}
_NO_START = frozenset(("--version", "-V", "--help", "-h"))
# Programs that run the command in their arguments.
_WRAPPERS = frozenset(
    (
        *("apptainer", "chrt", "conda", "coverage", "gosu", "hatch", "ionice", "mamba"),
        *("micromamba", "ncu", "nsys", "numactl", "parallel", "pdm", "perf", "pipenv", "pixi"),
        *("poetry", "py-spy", "rye", "script", "setsid", "singularity", "ssh", "stdbuf"),
        *("strace", "su-exec", "taskset", "tini", "timeout", "tini-static", "unbuffer", "uv"),
        *("uvx", "xargs", "xvfb-run", "catchsegv", "dumb-init", "memray", "pipx"),
    )
)


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
    names = [argument.rpartition("/")[2] for argument in argv]
    if argv[1:2] and argv[1] in _NO_START:
        return None
    found = _program(names) or _module(argv)
    if found is None and names[0] in _WRAPPERS:
        starts = range(1, len(argv))
        return next(filter(None, (in_command(argv[at:]) for at in starts)), None)
    return found


def _program(names: Sequence[str]) -> Known | None:
    program = names[0]
    known = {**_PROGRAMS, **FUNCTIONS}
    if program in known:
        return Known(known[program], program)
    if program in _WITH_WORDS:
        launcher, words = _WITH_WORDS[program]
        word = next((name for name in names[1:] if not name.startswith("-")), "")
        return Known(launcher, f"{program} {word}") if word in words else None
    # `python davincirun.py …`, `python -u /usr/bin/torchrun …`
    is_python = program.startswith(("python", "pypy"))
    script = next((name for name in names[1:] if not name.startswith("-")), "")
    if is_python and "-m" not in names[1:] and "-c" not in names[1:] and script in _PROGRAMS:
        return Known(_PROGRAMS[script], script)
    return None


def _module(argv: Sequence[str]) -> Known | None:
    module = argv[argv.index("-m") + 1] if "-m" in argv[:-1] else ""
    return Known(_MODULES[module], module) if module in _MODULES else None

"""Chooses a launcher by the imports of a script, and finds launchers that a script starts itself.

Nothing is run. A script that starts a launcher runs once on each node, as each rank would start all
ranks again. For other scripts the first match decides: the script's own imports, the imports of the
modules beside it (breadth first), optional imports, the name of the image.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from cloudjob.errors import SpecError
from cloudjob.model.text import given, one_line
from cloudjob.submission.scripts import SHELLS, Command, ScriptFiles, commands_of
from jobentry.contract.launchers import DEFAULT, LAUNCHERS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cloudjob.model.job import JobSpec

# In order of precedence. mpi4py comes before torch: a script that imports both has MPI start its
# ranks and passes rank and size on to torch.
_BY_IMPORT: Mapping[str, str] = {
    "horovod": "horovod",
    "mindspore": "msrun",
    "mpi4py": "mpirun",
    "torch.distributed": "torchrun",
    "torch.nn.parallel.DistributedDataParallel": "torchrun",
}
_BY_IMAGE: Mapping[str, str] = {
    "horovod": "horovod",
    "mindspore": "msrun",
    "mpi": "mpirun",
    "openmpi": "mpirun",
    "pytorch": "torchrun",
    "torch": "torchrun",
}
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

_COUNTS = r"-{1,2}(?:np|n|c|nproc_per_node|nproc-per-node|local_worker_num|worker_num)(?:=(\d+))?"
_PYTHON = r"(?:.*/)?python[\d.]*|.*\.py"


class Nested(NamedTuple):
    """A launcher that a script starts itself.

    Args:
        where: The place in the script, such as ``run.sh line 12``.
        what: What the script does there, as the predicate of a sentence.
        replacement: Arguments of ``cloudjob submit`` that do the same; empty if there are none.
        is_waited_for: Whether the script ends after this launcher, so that it can run as it is.
        is_failure_ignored: Whether the script succeeds although this launcher has failed.
    """

    where: str
    what: str
    replacement: str
    is_waited_for: bool
    is_failure_ignored: bool


class Choice(NamedTuple):
    """A launcher and the reason for it, such as ``train.py imports torch.distributed``."""

    launcher: str
    why: str


def choose(spec: JobSpec, files: ScriptFiles, nested: Nested | None) -> Choice:
    """Return the launcher for a job that names none.

    Args:
        nested: The launcher that the script starts itself, if any.
    """
    if nested and nested.is_waited_for:
        return Choice("python", f"{nested.where} {nested.what}")
    choice = _in_imports(files, Path(spec.source), spec.script) or _in_image(spec)
    if choice:
        is_gloo = spec.env.get("HOROVOD_CONTROLLER", "").lower() == "gloo"
        if choice.launcher == "horovod" and is_gloo:
            return Choice("horovod-gloo", f"{choice.why}, and HOROVOD_CONTROLLER is gloo")
        return choice
    if spec.script.endswith(".py"):
        first: dict[str, str] = {}
        for module, launcher in _BY_IMPORT.items():
            first.setdefault(launcher, module)
        frameworks = ", ".join(first.values())
        return Choice(DEFAULT, f"{one_line(spec.script)} imports none of {frameworks}")
    return Choice(DEFAULT, f"{one_line(spec.script)} is not a Python script")


def _in_image(spec: JobSpec) -> Choice | None:
    """Return the launcher that the name of the image or of the preset engine suggests."""
    engine = spec.section(spec.backend).get("engine", "")
    for what, text in (("image", spec.image), ("engine", str(engine))):
        words = set(re.findall(r"[a-z]+", text.lower()))
        for word, launcher in _BY_IMAGE.items():
            if word in words:
                return Choice(launcher, f"the {what} is {given(text)}")
    return None


def _in_imports(files: ScriptFiles, source: Path, script: str) -> Choice | None:
    """Return the launcher that matches the imports of the script or of the modules beside it."""
    if not script.endswith(".py"):
        return None
    folder = (source / script).parent
    fallback: Choice | None = None
    for level in files.levels(source, script):
        # For each certainty, the first file that imports each module.
        importers: list[dict[str, Path]] = [{}, {}, {}]
        for path in level:
            for name, certainty in files.imports(path, folder).others.items():
                for module in _BY_IMPORT:
                    if f"{name}.".startswith(f"{module}."):
                        importers[certainty].setdefault(module, path)
        certain, lazy, optional = (_best(modules, source, script) for modules in importers)
        if certain or lazy:
            return certain or lazy
        fallback = fallback or optional
    return fallback


def _best(importers: Mapping[str, Path], source: Path, script: str) -> Choice | None:
    """Return the launcher with the highest precedence among the imported modules, if any."""
    module = next((module for module in _BY_IMPORT if module in importers), None)
    if module is None:
        return None
    name = one_line(importers[module].relative_to(source).as_posix())
    by = "" if importers[module] == source / script else f", which {one_line(script)} imports,"
    others = [other for other in importers if _BY_IMPORT[other] != _BY_IMPORT[module]]
    rest = f", and {' and '.join(others)}" if others else ""
    return Choice(_BY_IMPORT[module], f"{name}{by} imports {module}{rest}")


# -- launchers that a script starts ----------------------------------------------------------------


def check_nested(spec: JobSpec, nested: Nested | None) -> None:
    """Refuse a shell script that starts ranks if the job's launcher also starts ranks.

    A Python script may start them in one rank only, so it causes no more than a warning.

    Raises:
        SpecError: The script starts ranks; the hint names the submit that does the same.
    """
    repeated = what_is_repeated(spec, nested)
    if not repeated or spec.script.endswith(".py"):
        return
    hint = f"with --launcher python {one_line(spec.script)} runs once on each node as it is"
    if nested and nested.replacement:
        hint = f"submit what it starts: cloudjob submit {nested.replacement}; {hint}"
    raise SpecError(
        [f"script: {repeated}, and cloudjob would run it once for each rank"], hint=hint
    )


def what_is_repeated(spec: JobSpec, nested: Nested | None) -> str:
    """Return what a script does that its launcher does once for each rank; empty for nothing."""
    launcher = LAUNCHERS.get(spec.launcher)
    if nested is None or launcher is None or launcher.is_one_a_node:
        return ""
    return f"{nested.where} {nested.what}"


def ignored_exit_code(spec: JobSpec, nested: Nested | None) -> str:
    """Return a command of a script whose exit code the script ignores; empty if there is none."""
    if nested is None or not nested.is_failure_ignored or spec.strict:
        return ""
    return (
        f"{nested.where} {nested.what} and ignores its exit code, so the job succeeds if it fails"
    )


def find_nested(files: ScriptFiles, source: Path, script: str) -> Nested | None:
    """Return the first launcher started by a script or by the shell scripts it runs."""
    names = [script]
    for name in names:
        commands = commands_of(files[source / name])
        has_wait = any(command.argv[0] == "wait" for command in commands)
        for at, command in enumerate(commands):
            is_ignored = command.is_failure_ignored or _goes_on_after(commands, at, name)
            where = f"{one_line(name)} line {command.line}"
            nested = _nested(command, where, has_wait=has_wait, is_ignored=is_ignored)
            if nested is not None:
                return nested
            # The shell script that the command runs, if any.
            is_shell = command.argv[0] in SHELLS
            words = command.argv[1:] if is_shell else command.argv[:1]
            further = next((word for word in words if not word.startswith("-")), "")
            if further.endswith(".sh") and not further.startswith("/"):
                further = further.removeprefix("./")
                names += [further] if further not in names else []
    return None


def _goes_on_after(commands: Sequence[Command], at: int, name: str) -> bool:
    """Whether a shell script goes on after a command that has failed, and never checks it."""
    later = commands[at + 1 :]
    if name.endswith(".py") or not later or later[0].argv[0] == "exit":
        return False
    if any("$?" in word or "PIPESTATUS" in word for command in later for word in command.argv):
        return False
    return not any(
        command.argv[0] == "set" and re.search(r" -\w*e| errexit", " ".join(command.argv))
        for command in commands
    )


def _nested(command: Command, where: str, *, has_wait: bool, is_ignored: bool) -> Nested | None:
    argv = command.argv
    is_left_behind = command.is_background and not has_wait
    nested = in_command(argv)
    if nested:
        launcher, program = nested
        what, replacement = f"starts {program} itself", replacement_of(launcher, argv)
        return Nested(where, what, replacement, not is_left_behind, is_ignored)
    if command.is_repeated and is_left_behind and any(re.fullmatch(_PYTHON, word) for word in argv):
        what = "starts processes in a loop and does not wait for them"
        replacement = f"--procs-per-node N {_program(argv)}"
        return Nested(where, what, replacement, is_waited_for=False, is_failure_ignored=False)
    return None


def replacement_of(launcher: str, argv: Sequence[str]) -> str:
    """Return the arguments of ``cloudjob submit`` that do the same; empty without a launcher."""
    count = _count(argv)
    size = f" --procs-per-node {count}" if count else ""
    return f"--launcher {launcher}{size} {_program(argv)}" if launcher else ""


def _count(argv: Sequence[str]) -> str:
    """Return the number of ranks that a command starts; empty if it is in a variable."""
    for argument, following in pairwise((*argv, "")):
        option = re.fullmatch(_COUNTS, argument)
        if option:
            return option.group(1) or (following if following.isdecimal() else "")
    return ""


def _program(argv: Sequence[str]) -> str:
    """Return the Python script that a command starts, as ``cloudjob submit`` expects it."""
    script = next((argument for argument in argv if argument.endswith(".py")), "SCRIPT")
    return one_line(script.removeprefix("./"))


_BY_NAME = {
    name.replace(":", " "): launcher
    for rows in (_FUNCTIONS, _PROGRAMS)
    for launcher, row in rows.items()
    for name in row.split()
}


def in_command(argv: Sequence[str]) -> tuple[str, str] | None:
    """Return the launcher that a command starts; None if it starts none.

    Returns:
        The launcher of cloudjob that replaces it, empty if none does, and the program, module or
        function that the command names.
    """
    is_wrapped = argv[0].rpartition("/")[2] in _WRAPPERS
    for at in range(min(_MAX_WRAPPED if is_wrapped else 1, len(argv))):
        if nested := _at_start(argv[at:]):
            return nested
    return None


def _at_start(argv: Sequence[str]) -> tuple[str, str] | None:
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
            return _BY_NAME[name], name.removeprefix("-m ")
    return None

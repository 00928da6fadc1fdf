"""Writes the first job file of a project, from its files and the backends of this machine."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from cloudjob import backends
from cloudjob.backends.process import devices
from cloudjob.errors import UsageError
from cloudjob.model.job import JobSpec
from cloudjob.model.rules import BACKENDS
from cloudjob.model.text import one_line
from cloudjob.submission import checks, launcher_choice, scripts

# Usual names of a script that trains.
_SCRIPTS = ("train.py", "main.py", "run.py")
# Module -> the secret variable that it reads.
_SECRETS = {
    "wandb": "WANDB_API_KEY",
    "huggingface_hub": "HF_TOKEN",
    "transformers": "HF_TOKEN",
    "datasets": "HF_TOKEN",
    "comet_ml": "COMET_API_KEY",
    "mlflow": "MLFLOW_TRACKING_TOKEN",
    "neptune": "NEPTUNE_API_TOKEN",
}
_REQUIREMENTS = ("requirements.txt", "environment.yml", "environment.yaml", "pyproject.toml")


def find_script(folder: Path) -> str:
    """Return the script of a folder.

    Raises:
        UsageError: There is none, or there are several and none has a usual name.
    """
    scripts_there = sorted(path.name for path in folder.glob("*.py") if path.is_file())
    for name in _SCRIPTS:
        if name in scripts_there:
            return name
    runnable = [name for name in scripts_there if b"__main__" in scripts.read(folder / name)]
    for names in (runnable, scripts_there):
        if len(names) == 1:
            return names[0]
    listed = ", ".join(map(one_line, scripts_there[:5])) or "no Python file"
    raise UsageError(
        f"looking for the script in {one_line(str(folder))}: found {listed}",
        hint="cloudjob init SCRIPT",
    )


def job_file(script: str, folder: Path, environ: Mapping[str, str]) -> str:
    """Return the text of a job file for a script in a folder."""
    return "\n\n".join("\n".join(part) for part in _parts(script, folder, environ)) + "\n"


def _parts(script: str, folder: Path, environ: Mapping[str, str]) -> Iterator[list[str]]:
    spec = JobSpec(script=script, source=str(folder))
    read = checks.read_script(spec)
    modules = {name.partition(".")[0] for name in read.files[folder / script].imports}
    choice = launcher_choice.choose(spec, read.files, read.nested)
    yield [
        "# The job of this folder: `cloudjob submit` runs it, and with --dry-run shows the plan.",
        "# Options take precedence. `cloudjob docs job-file` describes every key.",
    ]
    yield [f"script: {_scalar(script)}", "# args: [--epochs, 3]"]
    yield [f"# auto is {choice.launcher} here: {choice.why}.", "launcher: auto"]
    yield ["nodes: 1", *_ranks(environ)]
    yield [*_backends(environ), "backend: process"]
    yield [*_requirements(folder, modules)]
    yield [
        "# Files that the script writes to the folder $MODEL are saved; `cloudjob outputs` fetches",
        "# them.",
        "outputs:",
        '  MODEL: ""',
        "# inputs:",
        "#   DATA: s3://bucket/data        # $DATA is the path of the copy on each node",
    ]
    yield [*_secrets(modules, environ)]
    yield ["# timeout_min: 60", "# retries: 1"]


def _scalar(text: str) -> str:
    """Return a text as YAML; JSON where a plain word could mean something else."""
    import json

    return text if re.fullmatch(r"[A-Za-z][\w./-]*", text) else json.dumps(text)


def _ranks(environ: Mapping[str, str]) -> Iterator[str]:
    count, kind = devices.count(environ)
    device_text = (
        f"this machine has {count} {kind}{'s' * (count > 1)}" if count else "this machine has none"
    )
    yield f"# Ranks on each node; by default one for each GPU or NPU, else 1 ({device_text})."
    yield "# procs_per_node: 1"


def _backends(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield which backends this machine can use; no platform is called."""
    yield "# Where the job runs: process emulates nodes on this machine."
    for backend, kind in BACKENDS.items():
        if not kind.shares_files:
            what = backends.found_here(backend, environ)
            yield f"# {backend}: {f'found {what}' if what else 'nothing found'}"
    configured = {name for name, value in environ.items() if value}
    if keys := {"AWS_ACCESS_KEY_ID", "AWS_PROFILE"} & configured:
        yield f"# store: s3://bucket/jobs   # found ${min(keys)}"
    yield "# `cloudjob doctor --backend NAME` checks one of them."


def _requirements(folder: Path, modules: Iterable[str]) -> Iterator[str]:
    files = [name for name in _REQUIREMENTS if (folder / name).is_file()]
    frameworks = "torch", "tensorflow", "mindspore", "horovod", "mpi4py", "jax", "numpy", "sklearn"
    used = [name for name in frameworks if name in set(modules)]
    reason = f"{', '.join(files)} lists it" if files else "there is no requirements.txt"
    imports = f"; it imports {', '.join(used)}" if used else ""
    yield "# cloudjob installs nothing: the image, or this machine's Python, must have what the"
    yield f"# script needs ({reason}{imports})."
    yield "# image: registry.example.com/train:1"


def _secrets(modules: Iterable[str], environ: Mapping[str, str]) -> Iterator[str]:
    names = sorted({_SECRETS[name] for name in modules if name in _SECRETS})
    available = [name for name in names if environ.get(name)]
    yield "# Secret variables; each submit takes their values from your environment."
    if available:
        yield f"secrets: [{', '.join(available)}]"
    else:
        why = "" if not names else "   # set it first"
        yield f"# secrets: [{', '.join(names) or 'API_TOKEN'}]{why}"


def write(path: Path, text: str) -> None:
    """Write a new file.

    Raises:
        UsageError: It already exists, or cannot be written.
    """
    try:
        with path.open("x", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(
            f"writing {one_line(str(path))}: it already exists",
            hint="--print shows what would be written",
        ) from None
    except OSError as error:
        raise UsageError(
            f"writing {one_line(str(path))}: {os.strerror(error.errno or 0)}"
        ) from error

"""The scripts of a job on Slurm, as text: the batch script, and those that every node runs.

Each is a file beside this module after a header with the values of one job; ``setup.sh`` is only a
header. The scripts are in the job's folder, and write files there that show the job's status:
``state`` (one line per event), ``node-I.log``, ``end-I`` (how node I ended: exit code and reason).
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cloudjob.model import grid
from jobentry.contract import paths

JOB_SCRIPT, NODE_SCRIPT, CLEAN_SCRIPT = "job.sh", "node.sh", "clean.sh"
SETUP_SCRIPT, START_SCRIPT, ENTER_SCRIPT = "setup.sh", "start.sh", "enter.sh"
# The beginning of a job's name on Slurm; its id follows.
JOB_NAME = "cloudjob-"
STATE, ID, SLURM_LOG = "state", "id", "slurm.log"
# Slurm may warn a minute earlier than requested (sbatch(1), --signal); an even earlier warning
# announces a preemption, not the end of the job's time.
EARLY_S = 65

# In Slurm's log: a node that does not see the job's folder, and so has no other way to report it.
_UNSEEN = "cloudjob-unseen:"
# In Slurm's log: what follows belongs to this attempt.
_BEGIN = "cloudjob: an attempt begins"


@dataclass(frozen=True, slots=True)
class NodeText:
    """The parameters of the nodes' scripts.

    Args:
        python: The interpreter of the entry; empty to look for one on each node.
        entry: The name of the entry's file, for that interpreter.
        args: The script and its arguments.
        paths: PATH and the like, which the nodes share with the submitter.
        keeps_record: Whether the record stays in the job's folder.
        cpus_per_rank: For an srun that starts the ranks; 0 if none does.
        interpreter: The script's interpreter at submit time, if ``setup`` may select another one.
    """

    job: str
    scratch: str
    setup: tuple[str, ...]
    python: str
    entry: str
    args: tuple[str, ...]
    paths: Mapping[str, str]
    keeps_record: bool
    cpus_per_rank: int = 0
    interpreter: str = ""


@dataclass(frozen=True, slots=True)
class JobText:
    """The parameters of the script for sbatch.

    Args:
        options: The text after each ``#SBATCH``.
        final_codes: The exit codes after which a failed job is not tried again.
        requeues: Whether a preempted job starts again.
        warn_s: How long before the end of the job's time Slurm warns.
        needs_shell: Whether the nodes use ssh between them; else the key can be any secret.
        uses_pmix: Whether an srun of the head starts the ranks.
    """

    options: tuple[str, ...]
    title: str
    nodes: int
    retries: int
    final_codes: tuple[int, ...]
    requeues: bool
    warn_s: int
    needs_shell: bool
    uses_pmix: bool


def job_script(job: JobText) -> str:
    """Return the script for sbatch."""
    head = "".join(f"#SBATCH {option}\n" for option in job.options)
    values = _assignments(
        nodes=job.nodes,
        retries=job.retries,
        final=" ".join(map(str, job.final_codes)),
        requeue=int(job.requeues),
        warn_s=job.warn_s,
        due_s=job.warn_s + EARLY_S,
        uses_ssh=int(job.needs_shell),
        uses_pmix=int(job.uses_pmix),
        key=paths.DELIVERED_SSH_KEY,
        fresh=paths.DELIVERED_KEYS,
        unseen=_UNSEEN,
        begin=_BEGIN,
    )
    return f"#!/bin/sh\n{head}# {job.title}\n{values}{_body(JOB_SCRIPT)}"


def node_scripts(node: NodeText) -> dict[str, str]:
    """Return the scripts that every node runs, by their names."""
    # Programs create sockets below it, whose paths must be short, so the job's name is left out.
    folder = {"scratch": node.scratch, "suffix": grid.unique_part(node.job)}
    # `module` is a function of login shells.
    shell = "/bin/bash -l" if node.setup or not node.paths else "/bin/sh"
    nodes = _assignments(**folder, setup_shell=shell)
    return {
        NODE_SCRIPT: f"#!/bin/sh\n{nodes}{_body(NODE_SCRIPT)}",
        CLEAN_SCRIPT: f"#!/bin/sh\n{_assignments(**folder)}{_body(CLEAN_SCRIPT)}",
        SETUP_SCRIPT: _setup_script(node),
        START_SCRIPT: _start_script(node),
        ENTER_SCRIPT: f'#!/bin/sh\n{_assignments(**folder)}set -- {_entry(node, "$PWD")} "$@"\n'
        f"{_body(ENTER_SCRIPT)}",
    }


def _setup_script(node: NodeText) -> str:
    exports = "".join(f"export {name}={shlex.quote(v)}\n" for name, v in node.paths.items())
    setup = "".join(f"{line}\n" for line in node.setup)
    if setup:
        setup = f"{_BEFORE_SETUP}{setup}trap - DEBUG\n"
    # The output of the entry goes to the log wherever ``setup`` has sent its own.
    output = '</dev/null >>"$cloudjob_here/node-$cloudjob_index.log" 2>&1'
    return f'{exports}{setup}exec /bin/sh "$cloudjob_here/{START_SCRIPT}" {output}\n'


def _start_script(node: NodeText) -> str:
    values = _assignments(
        keeps_record=int(node.keeps_record),
        cpus_per_rank=node.cpus_per_rank,
        interpreter=node.interpreter,
    )
    entry = _entry(node, "$cloudjob_here")
    args = " ".join(shlex.quote(arg) for arg in node.args)
    return f"{values}set -- {entry} \\\n    {args}\n{_body(START_SCRIPT)}"


def _entry(node: NodeText, folder: str) -> str:
    """Return the command of the entry, whose files are in this folder."""
    if node.python:
        return f'{shlex.quote(node.python)} -I -S "{folder}/{node.entry}"'
    return f'sh "{folder}/boot.sh"'


# bash runs a trap for DEBUG before each command of this script, but not in functions like `module`.
# So node.sh knows the command that has ended or replaced the shell.
_BEFORE_SETUP = """\
export cloudjob_tools="$(command -v python; command -v mpirun)" cloudjob_libmpi="${MPI4PY_LIBMPI:-}"
trap 'printf "%s\\n" "$BASH_COMMAND" >|"$cloudjob_work/setup"' DEBUG
"""


def _assignments(**values: object) -> str:
    return "".join(f"{name}={shlex.quote(str(value))}\n" for name, value in values.items())


def _body(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="ascii")

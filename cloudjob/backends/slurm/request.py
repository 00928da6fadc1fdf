"""The request for a job: its scripts, and the files beside them. No I/O."""

from __future__ import annotations

import math
import os
import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cloudjob.backends import interpreters
from cloudjob.backends.base import Devices
from cloudjob.backends.encoding import file_path, file_uri
from cloudjob.backends.slurm import script
from cloudjob.backends.slurm.cluster import SlurmCluster
from cloudjob.errors import SpecError
from cloudjob.model import grid
from cloudjob.model import submission as submissions
from cloudjob.model.submission import Submission
from cloudjob.model.text import masked
from jobentry.contract import exits, hang_actions, names
from jobentry.contract.launchers import needs_sshd

if TYPE_CHECKING:
    from cloudjob.model.job import JobSpec

# Variables that a node, or the nodes' script, determines itself.
_OF_NODE = (
    names.VC_TASK_INDEX,
    names.VK_TASK_INDEX,
    names.VC_WORKER_HOSTS,
    names.SSHD_PORT,
    names.MA_CURRENT_IP,
    names.MA_CURRENT_HOST_IP,
    names.MA_CURRENT_INSTANCE_NAME,
    names.MA_HOME,
    names.MA_MOUNT_PATH,
    names.MA_JOB_DIR,
    names.MA_LOG_DIR,
    "WORKSPACE",
)
# Options that cloudjob sets: with other values, the job would lose its files, its signals or its
# nodes, or would not be submitted.
_RESERVED = (
    *("job-name", "output", "error", "open-mode", "chdir", "workdir", "nodes", "ntasks"),
    *("ntasks-per-node", "tasks-per-node", "signal", "array", "export", "export-file", "wrap"),
    *("parsable", "wait", "requeue", "no-requeue", "test-only", "help", "usage", "version"),
)
_RESERVED_SHORT = "JoeDNnaWVh"
# Short options without a value, which other options may follow in the same word.
_SHORT_FLAGS = "HIkKOsvQ"
# A later warning would leave no time for outputs.
_OUTPUTS_S = 30
# Minutes of the job's time on Slurm that staging and bring-up may take.
_ROOM_MIN = 10
_MAX_WARN_S = 65535
# Devices of each node: --gres=nvme:1,gpu:a100:8, --gpus-per-node=8.
_DEVICES = re.compile(
    r"--(?:gpus-per-node[= ]|gres[= ](?:[^ ]*,)?[gn]pu(?![^:,(]):?)(?:[^,:(]+:)?([0-9]{0,4})"
)
_SITE_DEFAULTS = ("partition", "account", "qos", "reservation")


@dataclass(frozen=True, slots=True)
class SlurmRequest:
    """The files of the job's folder, and the script to submit there.

    Args:
        folder: The job's folder; ``~`` at its beginning is the home on the login node.
        job_script: The script for sbatch.
        node_scripts: The scripts that every node runs, by their names.
        env: The variables of all entries.
        local: The folder of a store on this machine, which has the package and gets the outputs and
            the record; empty if the nodes reach the store themselves.
        layers: The files of the package's layers there.
        entry: The file of the entry.
        inherited: The variables with a site's defaults that sbatch may see. They take precedence
            over the script, so those for options that the job itself sets are left out.
        environments: The variables of each node's entry, as far as they are known before the start.
    """

    job: str
    folder: str
    job_script: str
    node_scripts: Mapping[str, str]
    env: Mapping[str, str] = field(repr=False)
    entry: str
    local: str
    layers: tuple[str, ...]
    secret_names: tuple[str, ...]
    inherited: tuple[str, ...]
    environments: tuple[Mapping[str, str], ...] = field(repr=False)


def build(submission: Submission, cluster: SlurmCluster) -> SlurmRequest:
    """Return the request for ``submission``.

    Raises:
        SpecError: This backend cannot run the job.
    """
    spec = submission.spec
    problems = list(_problems(spec))
    if problems:
        raise SpecError(problems)
    folder = f"{cluster.folder}/{submission.job}"
    # With a host, the nodes cannot read the store's folder, so its files are sent with the job.
    local = file_path(submission.code.uri) if cluster.host.name else ""
    variables = _variables(submission, cluster, folder, is_local=bool(local))
    return SlurmRequest(
        job=submission.job,
        folder=folder,
        job_script=script.job_script(_job_text(submission)),
        node_scripts=script.node_scripts(
            script.NodeText(
                job=submission.job,
                scratch=spec.slurm.scratch.rstrip("/"),
                setup=spec.slurm.setup,
                python=cluster.entry_python,
                entry=posixpath.basename(cluster.entry),
                args=(spec.script, *spec.args),
                paths=cluster.paths,
                keeps_record=bool(local),
                cpus_per_rank=spec.slurm.cpus_per_rank if _is_srun(spec) else 0,
                interpreter=cluster.python if _may_change_python(spec) else "",
            )
        ),
        env=variables,
        entry=cluster.entry,
        local=posixpath.dirname(posixpath.dirname(local)) if local else "",
        layers=tuple(file_path(uri) for uri in submission.code.layers) if local else (),
        secret_names=submission.masked_names,
        inherited=tuple(
            f"SBATCH_{name.upper()}" for name in _SITE_DEFAULTS if not getattr(spec.slurm, name)
        ),
        environments=tuple(_environments(submission, cluster, variables)),
    )


def _job_text(submission: Submission) -> script.JobText:
    spec = submission.spec
    return script.JobText(
        _options(submission),
        title=f"cloudjob's job {submission.job}: {spec.nodes} nodes x {spec.ranks_per_node} ranks",
        nodes=spec.nodes,
        retries=spec.retries,
        final_codes=tuple(_final_codes(spec)),
        requeues=spec.slurm.requeue,
        warn_s=_warn_s(spec),
        needs_shell=_needs_shell(spec),
        uses_pmix=_is_srun(spec),
    )


def _final_codes(spec: JobSpec) -> Iterator[int]:
    """Yield the exit codes after which a failed job is not tried again: all that a script sees."""
    if "user" not in spec.retry.on:
        yield from exits.EXCEPTION_CODES
    # A job that is ended because it hangs has the same code.
    if "hang" not in spec.retry.on or spec.hang.action != hang_actions.STOP:
        yield exits.TIMED_OUT


def show(request: SlurmRequest) -> dict[str, Any]:
    """Return ``request`` as plain JSON values, secrets as ``***``."""
    return {
        "folder": request.folder,
        script.JOB_SCRIPT: request.job_script.splitlines(),
        **{name: text.splitlines() for name, text in request.node_scripts.items()},
        "env": masked(dict(sorted(request.env.items())), request.secret_names),
    }


def located(request: SlurmRequest, folder: str) -> dict[str, str]:
    """Return the variables of all entries, now that the job's folder has an absolute path."""
    before = file_uri(request.folder)
    return {
        name: value.replace(before, file_uri(folder)) if name in _WITH_PLACES else value
        for name, value in request.env.items()
    }


_WITH_PLACES = (names.CLOUDJOB_OUTPUTS,)


def _variables(
    submission: Submission, cluster: SlurmCluster, folder: str, *, is_local: bool
) -> dict[str, str]:
    """Return the variables of all entries; the script of the nodes adds those of each node."""
    spec = submission.spec
    node = submissions.node_env(submission, 0, submissions.host_names(submission))
    node = node._replace(interpreter=cluster.python)
    if is_local:
        # The descriptor and the record are found by their names in the job's folder.
        node = node._replace(code_uri="", record_uri="")
        package_folder = posixpath.dirname(submission.code.uri) + "/"
        places = (
            (
                name,
                f"{file_uri(folder)}/{uri.removeprefix(package_folder)}"
                if uri.startswith(package_folder)
                else uri,
            )
            for name, uri in submission.outputs
        )
        node = node._replace(outputs=tuple(places))
    if _is_srun(spec):
        node = node._replace(launcher="srun")
    env = submissions.variables(submission, node, home="", address="")
    # The user's own variables, without those that each node determines.
    of_node = ["HOME", names.MA_NUM_GPUS]
    if _may_change_python(spec):
        of_node.append(names.MA_SCRIPT_INTERPRETER)
    for name in of_node:
        if name not in spec.env:
            env.pop(name, None)
    env |= interpreters.source_variables(spec, cluster.editable_installs)
    return {name: value for name, value in env.items() if name not in _OF_NODE}


def _environments(
    submission: Submission, cluster: SlurmCluster, variables: Mapping[str, str]
) -> Iterator[dict[str, str]]:
    """Yield the variables of each entry, without host names and addresses, known at the start."""
    hosts = submissions.host_names(submission)
    for index in range(len(hosts)):
        node = submissions.node_env(submission, index, hosts)
        scratch = submission.spec.slurm.scratch
        home = f"{scratch}/cloudjob-{grid.unique_part(submission.job)}/home"
        whole = submissions.variables(submission, node, home=home, address="0.0.0.0")
        node_env = {name: whole[name] for name in _OF_NODE if name in whole}
        yield {"PATH": os.defpath, **cluster.paths, **node_env, **variables}


def devices(spec: JobSpec) -> Devices:
    """Return the GPUs or NPUs that a job asks for on each node."""
    options = spec.slurm
    if options.gpus:
        return Devices(options.gpus, f"slurm.gpus is {options.gpus}")
    for text in (f"--gres={options.gres}", *options.sbatch):
        if match := _DEVICES.match(text):
            return Devices(int(match[1] or 1), f"#SBATCH {text}")
    return Devices(0, "")


def _options(submission: Submission) -> tuple[str, ...]:
    """Return the text after each ``#SBATCH``."""
    spec = submission.spec
    options = spec.slurm
    value_of = {
        "job-name": f"{script.JOB_NAME}{submission.job}",
        "output": script.SLURM_LOG,
        "open-mode": "append",
        "nodes": str(spec.nodes),
        "ntasks-per-node": str(spec.ranks_per_node),
        "cpus-per-task": str(options.cpus_per_rank),
        "time": str(_time_min(spec) or ""),
        "mem": f"{math.ceil(options.memory_gib * 1024)}M" if options.memory_gib else "",
        "gpus-per-node": str(options.gpus or ""),
        "signal": f"B:USR1@{_warn_s(spec)}",
    }
    names_of_site = ("partition", "account", "qos", "reservation", "constraint", "nodelist")
    for name in (*names_of_site, "exclude", "gres"):
        value_of[name] = getattr(options, name)
    flags = ["exclusive"] if options.exclusive else []
    # Always set: a site may requeue by default, and then a job would run twice.
    flags.append("requeue" if options.requeue else "no-requeue")
    return (
        *(f"--{name}={value}" for name, value in value_of.items() if value),
        *(f"--{name}" for name in flags),
        *spec.slurm.sbatch,
    )


def _time_min(spec: JobSpec) -> int:
    """Return the job's time limit on Slurm: its own limit, plus time to start and to end."""
    limit_min = spec.slurm.time_min
    if limit_min or not spec.timeout_min:
        return limit_min
    return math.ceil(spec.timeout_min + spec.grace_s / 60) + _ROOM_MIN


def _warn_s(spec: JobSpec) -> int:
    warn_s = spec.slurm.warn_s or math.ceil(spec.grace_s) + _OUTPUTS_S
    # A warning that is due before the job starts is sent at once.
    return min(warn_s, 30 * (_time_min(spec) or _MAX_WARN_S), _MAX_WARN_S)


def _is_srun(spec: JobSpec) -> bool:
    is_pmix = spec.launcher == "mpirun" and spec.slurm.mpi == "pmix"
    return is_pmix or spec.launcher == "srun"


def _may_change_python(spec: JobSpec) -> bool:
    """Whether the script's interpreter is known only after ``setup``."""
    return bool(spec.slurm.setup) and not spec.slurm.python


def _needs_shell(spec: JobSpec) -> bool:
    """Whether the nodes use ssh between them; assumed while the launcher is not chosen yet."""
    return not _is_srun(spec) and needs_sshd(spec.launcher, spec.env)


def _problems(spec: JobSpec) -> Iterator[str]:
    options = spec.slurm
    for key, beginnings in (("scratch", ("/",)), ("folder", ("/", "~/"))):
        value = getattr(options, key)
        if value and not value.startswith(beginnings):
            yield f"slurm.{key}: is not an absolute path (given {value!r})"
    for key in (*_SITE_DEFAULTS, "constraint", "nodelist", "exclude", "gres"):
        value = getattr(options, key)
        if value.split() not in ([], [value]):
            yield f"slurm.{key}: contains a space (given {value!r})"
    yield from _option_problems(spec.slurm.sbatch)


def _option_problems(lines: tuple[str, ...]) -> Iterator[str]:
    for index, line in enumerate(lines):
        try:
            arguments = shlex.split(line)
        except ValueError:
            arguments = []
        reserved = next((name for name in map(_reserved, arguments) if name), "")
        if reserved:
            yield f"slurm.sbatch[{index}]: {reserved} is set by cloudjob (given {line!r})"
        elif not arguments or not line.startswith("-") or "\n" in line:
            yield (
                f"slurm.sbatch[{index}]: is not an option of sbatch (given {line!r}; "
                "for example --licenses=matlab:1)"
            )


def _reserved(argument: str) -> str:
    """Return the option in ``argument`` that cloudjob sets, empty for none.

    sbatch also takes the beginning of a long option, and several short ones in one argument.
    """
    if argument.startswith("--"):
        name = argument[2:].partition("=")[0]
        return next(("--" + reserved for reserved in _RESERVED if reserved.startswith(name)), "")
    for letter in argument[1:] if argument.startswith("-") else "":
        if letter in _RESERVED_SHORT:
            return "-" + letter
        if letter not in _SHORT_FLAGS:
            break
    return ""

"""Checks of the cluster, for `cloudjob doctor --backend slurm` and for each submit."""

from __future__ import annotations

from cloudjob.backends.base import Check
from cloudjob.backends.slurm import errors
from cloudjob.backends.slurm.cluster import SlurmCluster, SlurmHost, quoted, with_clean_environment
from cloudjob.errors import BackendError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cloudjob.model.job import JobSpec

_OLDEST = (20, 11)


def run(cluster: SlurmCluster, spec: JobSpec | None) -> list[Check]:
    """Return the results of the checks; before a submit only the cheap ones.

    Args:
        spec: The job; None for `cloudjob doctor`, which looks at everything.
    """
    host = cluster.host
    if spec is not None and spec.script:
        return []
    where = f" on {host.name}" if host.name else ""
    try:
        return [
            _version(host, where),
            _controller(host),
            *_nodes(host),
            _folder(host, cluster.folder),
            _sacct(host),
        ]
    except BackendError as error:
        return [Check("Slurm", False, error.message, error.hint)]


def _version(host: SlurmHost, where: str) -> Check:
    done = host.run("", "sbatch --version")
    hint = "run this on a login node, or set slurm.host to one"
    if done.code:
        return Check("sbatch", False, f"none{where}: {done.message}", hint)
    text = done.out.decode("utf-8", "replace").strip()
    numbers = [int(n) for n in text.rpartition(" ")[2].split(".")[:2] if n.isdecimal()]
    return Check(
        "sbatch",
        tuple(numbers) >= _OLDEST,
        f"{text}{where}",
        "cloudjob needs Slurm 20.11 or later, for srun --overlap",
    )


def _controller(host: SlurmHost) -> Check:
    done = host.run("", with_clean_environment("scontrol ping"))
    text = done.out.decode("utf-8", "replace")
    lines = [line for line in text.splitlines() if " at " in line or "UP" in line or "DOWN" in line]
    hint = "the controller is down, or refuses connections from this machine"
    is_up = any(" is UP" in line for line in lines)
    return Check("controller", is_up, "; ".join(lines) or done.message, hint)


def _nodes(host: SlurmHost) -> list[Check]:
    done = host.run("", with_clean_environment("sinfo -h -o '%P %a %l %D %T %G'"))
    if done.code:
        error = errors.command_error("sinfo", done.message)
        return [Check("partitions", False, error.message, error.hint)]
    lines = done.out.decode("utf-8", "replace").splitlines()
    partitions = "; ".join(" ".join(line.split()) for line in lines)
    hint = "no partition has a node that you may use"
    return [Check("partitions", bool(lines), partitions or "none", hint)]


def _folder(host: SlurmHost, folder: str) -> Check:
    path = quoted(folder)
    done = host.run(
        "", f"umask 077; mkdir -p {path} && t=$(mktemp {path}/probe-XXXXXX) && rm $t && echo {path}"
    )
    hint = "set slurm.folder to a folder on a disk that all nodes share"
    if done.code:
        return Check("folder", False, done.message, hint)
    return Check("folder", True, done.out.decode("utf-8", "replace").strip(), hint)


def _sacct(host: SlurmHost) -> Check:
    done = host.run("", with_clean_environment("sacct -n -X -S now"))
    return Check(
        "accounting",
        done.code == 0,
        "sacct answers" if done.code == 0 else done.message,
        "without it, the end of a job whose script was killed is known only as long as Slurm"
        " remembers the job (MinJobAge)",
        is_needed=False,
    )

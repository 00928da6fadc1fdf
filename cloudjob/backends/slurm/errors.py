"""The errors of Slurm's commands, each with a hint."""

from __future__ import annotations

import re

from cloudjob.errors import BackendError

_NO_MUNGE = (
    "munged does not run on the machine with Slurm's commands, or has another key: tell the"
    " administrator of the cluster"
)
_NO_COMMANDS = "run this on a login node, or set slurm.host to one"
# The first part that occurs in an output gives the hint.
_HINTS = (
    ("munge", _NO_MUNGE),
    ("authentication error", _NO_MUNGE),
    (
        "SubmitJob",
        "your QOS or account allows no more jobs at once: wait until one of yours has ended"
        " (squeue --me), or set slurm.qos or slurm.account",
    ),
    (
        "violates accounting",
        "your QOS or account is at a limit, which sacctmgr show qos and sacctmgr show assoc list:"
        " ask for less, or set slurm.qos or slurm.account",
    ),
    ("not found", _NO_COMMANDS),
    # Of env, which starts the commands: a translation has other words after it.
    ("env: ", _NO_COMMANDS),
    (
        "configuration source",
        "run this on a login node, or set slurm.host to one; or set SLURM_CONF",
    ),
    ("invalid partition", "sinfo -s lists the partitions; set slurm.partition to one of them"),
    (
        "Invalid account",
        "sacctmgr show assoc user=$USER lists yours; set slurm.account and slurm.qos",
    ),
    ("Invalid qos", "sacctmgr show assoc user=$USER format=account,qos lists yours; set slurm.qos"),
    ("Invalid feature", "sinfo -o '%N %f' lists features; set slurm.constraint to some of them"),
    (
        "time limit",
        "slurm.time_min, or timeout_min, is above the partition's limit: sinfo -o '%P %l'",
    ),
    (
        "Requested node configuration is not available",
        "sinfo -o '%N %c %m %G' lists what nodes have",
    ),
    ("More processors requested", "use fewer nodes or procs_per_node, or another slurm.partition"),
    ("Node count specification invalid", "sinfo -s shows how many nodes a partition has"),
    (
        "Requested partition configuration not available",
        "sinfo -s shows whether the partition is up",
    ),
    ("Required partition not available", "sinfo -s shows whether the partition is up"),
    ("Invalid generic resource", "sinfo -o '%N %G' lists devices; set slurm.gpus or slurm.gres"),
    (
        "requested reservation",
        "scontrol show reservation lists them; set slurm.reservation to one of them",
    ),
    (
        "Unable to contact slurm controller",
        "the controller may be down for a while; scontrol ping shows it",
    ),
    ("Socket timed out", "the controller is busy; try again in a minute"),
    (
        "Access/permission denied",
        "your account is not allowed to do this: ask the administrator of the cluster",
    ),
    (
        "unrecognized option",
        "slurm.sbatch contains an option that this version of Slurm does not have",
    ),
)
_DEFAULT = (
    "`cloudjob submit --show-request` prints the scripts; `cloudjob doctor --backend slurm` checks"
    " the cluster"
)


# "sbatch: error: ", at the beginning of an output and of each of its lines.
_PREFIX = re.compile(r"(?:^|(?<=; ))(?:[a-z]{4,10}: )?(?:error|fatal): ")
# A line of munge's library that no user can follow.
_NO_ADVICE = "If munged is up, restart with --num-threads=10"

# sbatch sent the job and received no answer: the controller may have accepted it.
_MAY_BE_DONE = ("Socket timed out", "Zero Bytes were transmitted")


def may_be_done(output: str) -> bool:
    """Whether a failed command may have taken effect."""
    return any(part in output for part in _MAY_BE_DONE)


def command_error(doing: str, output: str) -> BackendError:
    """Return the error for the output of a Slurm command."""
    lines = _PREFIX.sub("", output).replace("Batch job submission failed: ", "").split("; ")
    message = "; ".join(dict.fromkeys(line for line in lines if line != _NO_ADVICE))
    hint = next((hint for part, hint in _HINTS if part.lower() in output.lower()), _DEFAULT)
    return BackendError(f"{doing}: {message}", hint=hint)

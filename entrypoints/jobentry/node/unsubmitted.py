"""Complete the settings of an entry that an image's boot command starts, without a submit.

The entry then replaces the platform's documented start script, ``run_mpi.sh python train.py``: the
command may name a program, and the nodes share the ssh key that is in the image.
"""

from __future__ import annotations

import os
import re
import shutil
from typing import Mapping, Sequence

from jobentry.contract import names
from jobentry.contract.env import NodeEnv
from jobentry.contract.launchers import LAUNCHERS
from jobentry.log import log_message
from jobentry.node.prepare import check_script, read_key

# The private keys that ssh uses by default.
_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")
_LAUNCHER = r"(mpirun|mpiexec|torchrun|msrun|horovodrun|torch\.distributed\.(?:launch|run))"
# A program or module that starts ranks, in a line that is not a comment: in a shell script,
# and as the beginning of a string in Python.
_STARTS_RANKS = {
    ".sh": re.compile(rf"^[^#\n]*?(?<![\w.-]){_LAUNCHER}\b", re.MULTILINE),
    ".py": re.compile(rf"^[^#\n]*?[\"'](?:python[\d.]* -m )?{_LAUNCHER}[\"' ]", re.MULTILINE),
}
_STARTS_PROGRAMS = re.compile(r"\bsubprocess\b|\bos\.(?:system|popen|exec|spawn|posix_spawn)")
_PYTHON = re.compile(r"python[\d.]*\Z")


def is_unsubmitted(environ: Mapping[str, str]) -> bool:
    """Whether the environment is that of a job that cloudjob has not submitted."""
    return not environ.get(names.CLOUDJOB_JOB)


def complete(
    node: NodeEnv, argv: tuple[str, ...], environ: Mapping[str, str]
) -> tuple[NodeEnv, tuple[str, ...]]:
    """Return the settings and the command of a rank, completed if no submit has done so."""
    if not is_unsubmitted(environ):
        return node, argv
    return _with_program(_with_key(node), argv, environ.get("PATH", os.defpath))


def warn_of_nested_launcher(node: NodeEnv, folder: str, script: str) -> None:
    """Log a message if several ranks run a script that starts ranks itself.

    ``submit`` refuses such a script; here, the platform's documented command would run it as well.
    """
    pattern = _STARTS_RANKS.get(os.path.splitext(script)[1])
    if LAUNCHERS[node.launcher].is_one_a_node or not pattern:
        return
    with open(os.path.join(folder, script), encoding="utf-8", errors="replace") as file:
        text = file.read()
    match = pattern.search(text)
    if match and script.endswith(".py") and not _STARTS_PROGRAMS.search(text):
        return
    if match:
        log_message(
            f"warning: each rank runs {script}, which starts {match.group(1)} itself;"
            f" {names.CLOUDJOB_LAUNCHER}=python runs it once on each node"
        )


def check(node: NodeEnv, folder: str, argv: Sequence[str]) -> None:
    """Check that the script and the key are there, for a dry run.

    Raises:
        EntryError: One of them is missing.
    """
    if not LAUNCHERS[node.launcher].takes_command:
        check_script(folder, argv[0])
    warn_of_nested_launcher(node, folder, argv[0])
    read_key(node)


def _with_key(node: NodeEnv) -> NodeEnv:
    """Return the settings with the key in ``~/.ssh`` if the job has none and needs one."""
    if node.nodes == 1 or node.ssh_key:
        return node
    for name in _KEYS:
        path = os.path.join(os.path.expanduser("~"), ".ssh", name)
        if os.path.isfile(path):
            log_message(f"the nodes use the key {path}, as {names.CLOUDJOB_SSH_KEY} is not set")
            return node._replace(ssh_key=path)
    return node


def _with_program(
    node: NodeEnv, argv: tuple[str, ...], path: str
) -> tuple[NodeEnv, tuple[str, ...]]:
    """Return the settings and a command whose first argument may be a program.

    ``python [-u] train.py`` becomes the script ``train.py`` with that interpreter, and
    ``bash run.sh`` the script ``run.sh``.

    Args:
        path: Where programs are, as in ``PATH``; a file of that name comes first.
    """
    launcher = LAUNCHERS.get(node.launcher)
    is_command = launcher is not None and launcher.takes_command
    program = argv[0] if os.path.isfile(argv[0]) else shutil.which(argv[0], path=path)
    if is_command or not program:
        return node, argv
    rest = argv[1:]
    if _PYTHON.match(os.path.basename(program)):
        # Ranks are unbuffered without this option.
        script = rest[1:] if rest[:1] == ("-u",) else rest
        if script and script[0].endswith(".py"):
            return node._replace(interpreter=program), script
    if os.path.basename(program) == "bash" and rest and rest[0].endswith(".sh"):
        return node, rest
    return node, (program, *rest)

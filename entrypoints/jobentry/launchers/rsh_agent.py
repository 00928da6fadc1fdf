"""The agent that mpirun starts instead of ssh: it passes the command to the head's entry. No I/O.

The head's entry has a control connection to each worker, which runs the command.
"""

from __future__ import annotations

import re
from typing import Mapping

from jobentry.contract import names
from jobentry.contract.env import NodeEnv
from jobentry.contract.launchers import asks_for_ssh

# Called like ssh: ``AGENT HOST COMMAND``. It writes its arguments to a file, opens the FIFO for the
# answer so that nothing written there is lost, and sends its process id to the entry; ``1<>`` opens
# without waiting for a reader. The answer is the command's output, line by line, and its exit code.
TEXT = """\
me=${0%/*}/ask-$$
umask 077
mkfifo "$me-answer" && exec 3<>"$me-answer" || exit 255
host=$1
shift
printf '%s\\n%s' "$host" "$*" >"$me" || exit 255
echo "$$" 1<>"${0%/*}/asks" || exit 255
while IFS= read -r line <&3; do
    case $line in
    "exit "*) exit "${line#exit }" ;;
    *) printf '%s\\n' "${line#say }" ;;
    esac
done
exit 255
"""


def argv(path: str) -> tuple[str, str]:
    """Return the command that replaces ssh; ``path`` is the file of the agent."""
    return "/bin/sh", path


def is_used(node: NodeEnv, environ: Mapping[str, str], path: str) -> bool:
    """Whether mpirun uses the agent instead of ssh; the result is the same on every node.

    Args:
        environ: The variables of the job.
        path: The file of the agent.
    """
    if node.nodes == 1:
        return False
    return bool(node.control_dir) or (not asks_for_ssh(environ) and is_safe_path(path))


def is_safe_path(path: str) -> bool:
    """Whether mpirun accepts this path, as it splits arguments at spaces and agents at colons."""
    return not set(path) & set(" \t\n:,;\"'\\")


def request(text: str) -> tuple[str, str]:
    """Return the host and the command for it that an agent wrote to a file.

    Like ssh, it joins the command's words with spaces.
    """
    host, _, command = text.partition("\n")
    return host, command


def on_this_node(command: str, environ: Mapping[str, str]) -> str:
    """Return mpirun's command with the interfaces of this node instead of the head's.

    mpirun repeats its own parameters on the command line of its daemons, where they take precedence
    over variables (4.1.4, 4.1.8 and 5.0.11).
    """
    for name in names.OF_DAEMONS:
        value, parameter = environ.get(name, ""), name.partition("_MCA_")[2]
        # A name with other characters could not be quoted for every shell.
        if re.fullmatch(r"[\w.:,/@-]+", value):
            command = re.sub(f'(?<= {parameter} )"[^"]*"', f'"{value}"', command)
    return command


def answer(lines: list[str], code: int | None) -> str:
    """Return the text for an agent's FIFO: lines to print and, unless it is None, the exit code."""
    output = "".join(f"say {line}\n" for line in lines)
    return output if code is None else f"{output}exit {code}\n"

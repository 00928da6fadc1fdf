"""What mpirun takes for ssh: it asks the head's entry, which has a line to each worker. No I/O."""

from __future__ import annotations

from typing import Mapping, NamedTuple

from jobentry.contract.env import NodeEnv
from jobentry.contract.launchers import asks_for_ssh

# ``AGENT HOST COMMAND``, as ssh is called. It leaves its words in a file, opens the FIFO of its
# answer so that what is written there waits for it, and tells the entry its process id; ``1<>``
# waits for no reader. What comes back are lines of what the command wrote, and the line of its end.
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


class Ask(NamedTuple):
    """A command that mpirun wants run on a host."""

    host: str
    command: str


def words(path: str) -> tuple[str, str]:
    """Return what is started in place of ssh, where the text lies at ``path``."""
    return "/bin/sh", path


def is_used(node: NodeEnv, environ: Mapping[str, str], path: str) -> bool:
    """Whether mpirun has the agent in place of ssh; every node comes to the same answer.

    Args:
        environ: The variables of the job.
        path: Where the agent lies.
    """
    if node.nodes == 1:
        return False
    return bool(node.control_dir) or (not asks_for_ssh(environ) and can_be_named(path))


def can_be_named(path: str) -> bool:
    """Whether mpirun understands this path: it parts words at blanks, and agents at colons."""
    return not set(path) & set(" \t\n:,;\"'\\")


def ask(text: str) -> Ask:
    """Return what stands in the file that an agent has left; as ssh, it joins words with blanks."""
    host, _, command = text.partition("\n")
    return Ask(host, command)


def answer(lines: list[str], code: int | None) -> str:
    """Return what an agent reads: lines to show and, unless it is None, the exit code."""
    shown = "".join(f"say {line}\n" for line in lines)
    return shown if code is None else f"{shown}exit {code}\n"

"""The line between the head and its workers: one remote shell each, open for the whole job.

Over it the head says how the job goes on, and each side notices when the other is gone. It needs
nothing on the far side but ``sh`` and ``cat``: two FIFOs, made by the worker's entry, join the
session to the entry. One message is one line of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from typing import Any, Dict, List, NamedTuple, Optional

from jobentry.contract.env import NodeEnv

# The session ends when the worker's entry closes its FIFO; the entry sees the end of the head's
# when the first cat, which reads the session's input, is gone. ``<&3``, because a shell gives a
# command in the background an empty input.
_JOIN = (
    'd="${CLOUDJOB_NODE_DIR:-$HOME/.cloudjob/%s}"; '
    'until [ -p "$d/from-head" ]; do sleep 0.05; done; '
    'exec 3<&0; cat <&3 >"$d/from-head" & exec cat "$d/to-head" 3<&-'
)


class PeerError(Exception):
    """A node cannot be reached."""


class Message(NamedTuple):
    """What one side says to the other: a word, and values that go with it."""

    word: str
    values: Dict[str, Any]


def dump(word: str, **values: Any) -> bytes:
    """Return the line that says ``word``."""
    return json.dumps({"word": word, **values}).encode("ascii") + b"\n"


def load(line: bytes) -> Message:
    """Return what a line says."""
    values = json.loads(line.decode("ascii"))
    return Message(values.pop("word"), values)


class Lines:
    """Puts pieces of a stream together to lines."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> List[bytes]:
        """Return the lines that are complete with ``data``."""
        *found, self._rest = (self._rest + data).split(b"\n")
        return found


def shell_command(node: NodeEnv, host: str, command: str) -> List[str]:
    """Return the argv that runs ``command`` in a shell on ``host``."""
    if node.remote_shell:
        return [node.remote_shell, host, command]
    return ["ssh", "-p", str(node.sshd_port), "-o", "BatchMode=yes", host, command]


class Peer:
    """A worker, as the head sees it."""

    def __init__(self, node: NodeEnv, index: int) -> None:
        self.index = index
        self.host = node.hosts[index]
        self.is_ready = False
        self.is_idle = False
        self.is_gone = False
        self.clock_ahead_s = 0.0
        self._lines = Lines()
        command = _JOIN % ("%s-%d" % (node.job, index))
        try:
            self._session = subprocess.Popen(
                shell_command(node, self.host, command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            raise PeerError(
                "opening a remote shell to %s: %s" % (self.host, error.strerror)
            ) from error

    @property
    def process(self) -> int:
        """The process id of the remote shell."""
        return self._session.pid

    def fileno(self) -> int:
        """The descriptor on which the worker is heard."""
        assert self._session.stdout is not None
        return self._session.stdout.fileno()

    def hear(self) -> Optional[List[Message]]:
        """Return what the worker has said, None when it is gone."""
        data = os.read(self.fileno(), 65536)
        if not data:
            self.is_gone = True
            return None
        return [load(line) for line in self._lines.feed(data)]

    def tell(self, word: str, **values: Any) -> None:
        """Say ``word`` to the worker, if it is there."""
        assert self._session.stdin is not None
        with contextlib.suppress(OSError):
            self._session.stdin.write(dump(word, **values))

    def close(self, patience_s: float) -> None:
        """Hang up, and wait until the session has ended."""
        assert self._session.stdin is not None
        with contextlib.suppress(OSError):
            self._session.stdin.close()
        try:
            self._session.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._session.kill()
            self._session.wait()

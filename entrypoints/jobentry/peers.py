"""The line between the head and its workers: one each, open for the whole job.

Over it the head says how the job goes on, and each side notices when the other is gone. One message
is one line of JSON. It is a remote shell where the launcher needs that anyway, with nothing on the
far side but ``sh`` and ``cat``: two FIFOs, made by the worker's entry, join the session to the
entry. Else it is a connection of our own (``wire``), which ends at the same FIFOs.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from jobentry.contract.env import NodeEnv
from jobentry.launchers.common import remote_shell

if TYPE_CHECKING:
    from jobentry.wire import Session, Wires

# The session ends when the worker's entry closes its FIFO; the entry sees the end of the head's
# when the first cat, which reads the session's input, is gone. ``<&3``, because a shell gives a
# command in the background an empty input. ``4<`` comes first, and ``1<>`` does not wait for a
# reader: else a session whose entry is killed just then would wait for it for ever.
_JOIN = (
    'd="${CLOUDJOB_NODE_DIR:-$HOME/.cloudjob/%s}"; '
    'until [ -p "$d/from-head" ]; do sleep 0.05; done; '
    'exec 3<&0 4<"$d/to-head"; cat <&3 4<&- 1<>"$d/from-head" & exec cat <&4 3<&-'
)

# Why a remote shell failed is all that is known until the next could have failed in the same way.
_EARLIER_S = 10.0


class PeerError(Exception):
    """A node cannot be reached."""


class Message(NamedTuple):
    """What one side says to the other: a word, and values that go with it."""

    word: str
    values: dict[str, Any]


def dump(word: str, **values: Any) -> bytes:
    """Return the line that says ``word``."""
    return json.dumps({"word": word, **values}).encode("ascii") + b"\n"


def load(line: bytes) -> Message:
    """Return what a line says."""
    values = json.loads(line.decode("ascii"))
    return Message(values.pop("word"), values)


class Lines:
    """Puts pieces of a stream together to lines.

    Args:
        limit_bytes: Of a line that is longer, what has come so far is dropped; 0 for no limit.
    """

    def __init__(self, limit_bytes: int = 0) -> None:
        self._rest = b""
        self._limit_bytes = limit_bytes

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that are complete with ``data``."""
        *found, self._rest = (self._rest + data).split(b"\n")
        if 0 < self._limit_bytes < len(self._rest):
            self._rest = b""
        return found


def shell_command(node: NodeEnv, host: str, command: str, ssh_config: str) -> list[str]:
    """Return the argv that runs ``command`` in a shell on ``host``."""
    shell = remote_shell(node, ssh_config)
    if not node.remote_shell:
        # bash reads ~/.bashrc for a command that sshd runs, unless it is not the first shell
        # (SHLVL). A user's takes its time there, modules and conda, and our line needs none of it.
        shell += ("-o", "SetEnv=SHLVL=1")
    return [*shell, host, command]


class Peer:
    """A worker, as the head sees it."""

    def __init__(self, node: NodeEnv, index: int, log: str, ssh_config: str) -> None:
        self.index = index
        self.host = node.hosts[index]
        self.facts: dict[str, Any] = {}
        self.is_idle = False
        self.is_gone = False
        # Whether the worker has reported that its outputs are stored, or why they are not.
        self.has_left = False
        self.trouble = ""
        self.clock_ahead_s = 0.0
        self._command = shell_command(node, self.host, _JOIN % node.job, ssh_config)
        self._log = log
        self._earlier = ""
        self._opened_at = 0.0
        self._lines = Lines()
        self._session: subprocess.Popen[bytes] | Session | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the worker's entry has answered."""
        return bool(self.facts)

    @property
    def process(self) -> int:
        """The process id of the remote shell, 0 when there is none."""
        return self._session.pid if self._session else 0

    def open(self, wires: Wires | None = None) -> None:
        """Open the line, and greet the worker's entry.

        Args:
            wires: The lines to all workers, where those are no remote shells.
        """
        if wires is not None:
            self._session = wires.open(self.index)
        else:
            self._session = self._shell()
        self._lines = Lines()
        self.tell("hello")

    def _shell(self) -> subprocess.Popen[bytes]:
        self._earlier, self._opened_at = self.words(), time.monotonic()
        with open(self._log, "wb") as log:
            try:
                return subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    bufsize=0,
                    start_new_session=True,
                )
            except OSError as error:
                raise PeerError(
                    f"opening a remote shell to {self.host}: {self._command[0]}: {error.strerror}"
                ) from error

    def fileno(self) -> int:
        """The descriptor on which the worker is heard."""
        assert self._session is not None
        assert self._session.stdout is not None
        return self._session.stdout.fileno()

    def hear(self) -> list[Message] | None:
        """Return what the worker has said, None when the remote shell has ended."""
        data = os.read(self.fileno(), 65536)
        if not data:
            return None
        messages = [load(line) for line in self._lines.feed(data)]
        for word, values in messages:
            if word == "ready":
                self.facts = values
                self.clock_ahead_s = values["at_s"] - time.time()
            elif word == "idle":
                self.is_idle = True
            elif word == "left":
                self.trouble = values["trouble"]
                self.has_left = True
                # The worker waits for this: ended earlier, it could take its last message with it.
                self._hang_up()
        return messages

    def tell(self, word: str, **values: Any) -> None:
        """Say ``word`` to the worker, if it is there."""
        if self._session is None or self._session.stdin is None:
            return
        with contextlib.suppress(OSError, ValueError):
            self._session.stdin.write(dump(word, **values))

    def close(self, patience_s: float) -> None:
        """Hang up, and wait until the session has ended."""
        if self._session is None:
            return
        self._hang_up()
        try:
            self._session.wait(patience_s)
        except subprocess.TimeoutExpired:
            if self._session.pid:
                # The remote shell, and what a script in the place of ssh has started.
                with contextlib.suppress(OSError):
                    os.killpg(self._session.pid, signal.SIGKILL)
            else:
                self._session.kill()
            self._session.wait()
        assert self._session.stdout is not None
        self._session.stdout.close()

    def _hang_up(self) -> None:
        assert self._session is not None
        assert self._session.stdin is not None
        with contextlib.suppress(OSError):
            self._session.stdin.close()

    def forget(self) -> None:
        """Forget a worker whose session has ended: who answers next is another."""
        self.close(patience_s=1.0)
        self.facts = {}
        self.is_idle = self.is_gone = self.has_left = False

    def words(self) -> str:
        """Return the last of what the remote shell said, in one line."""
        try:
            with open(self._log, "rb") as file:
                text = file.read()[-2000:].decode("utf-8", "replace")
        except OSError:
            return ""
        said = "; ".join(line.strip() for line in text.split("\n")[-4:] if line.strip())
        is_young = time.monotonic() - self._opened_at < _EARLIER_S
        return said or (self._earlier if is_young else "")

"""A worker: its ranks are started over the remote shell; it serves until the head says end."""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import signal
import time
from typing import Any, Callable

from jobentry import peers
from jobentry.contract import exits
from jobentry.contract.env import NodeEnv
from jobentry.contract.paths import NodePaths
from jobentry.output import say
from jobentry.ranks import End
from jobentry.supervise import ABORT_S, STOP_SIGNALS, NodeLoop, adopt_orphans

# How long the line to the head may be full.
_PATIENCE_S = 10.0


class Worker:
    """A worker: its ranks are started over the remote shell; it serves until the head says end."""

    def __init__(
        self,
        node: NodeEnv,
        paths: NodePaths,
        facts: Callable[[], dict[str, Any]],
        keep: tuple[int, ...] = (),
    ) -> None:
        self._node = node
        # The sshd of this node: the line to the head goes through it, to the very end.
        self._keep = keep
        self._loop = NodeLoop(node, paths)
        self._loop.on_end = self._rank_ended
        self._loop.on_start = lambda rank: self._tell("start", rank=rank)
        self._loop.on_signal = self._signalled
        # Read and write: messages wait in the FIFO until the head's session reads it.
        self._to_head = os.open(paths.to_head, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._path = paths.from_head
        self._from_head = -1
        self._was_greeted = False
        self._listen()
        self._lines = peers.Lines()
        self._facts = facts
        self._code: int | None = None
        self._is_stopping = False
        # When the job was stopped, on the clock that never jumps.
        self.stopped_at: float | None = None
        self.on_idle: Callable[[], None] = lambda: None

    def run(self) -> int:
        """Serve the head, and return the exit code of the job."""
        adopt_orphans()
        self._loop.at("head", self._node.start_timeout_s, self._head_never_came)
        while self._code is None:
            self._loop.step()
            if self._is_stopping and not self._loop.ranks.running:
                self._is_stopping = False
                self._tell("idle")
                self.on_idle()
        self._loop.close(self._keep)
        return self._code

    def leave(self, trouble: str) -> None:
        """Tell the head that this node is done, and what went wrong with its outputs."""
        self._tell("left", trouble=trouble)

    def _tell(self, word: str, **values: object) -> None:
        rest = peers.dump(word, **values)
        while rest:
            # The head reads at its own pace; one that does not read at all is dead, or as good.
            if not select.select([], [self._to_head], [], _PATIENCE_S)[1]:
                return
            with contextlib.suppress(BlockingIOError):
                rest = rest[os.write(self._to_head, rest) :]

    def _listen(self) -> None:
        if self._from_head >= 0:
            self._loop.selector.unregister(self._from_head)
            os.close(self._from_head)
        self._from_head = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._loop.selector.register(self._from_head, selectors.EVENT_READ, self._hear)

    def _hear(self) -> None:
        self._loop.drop("head")
        data = os.read(self._from_head, 65536)
        if not data and not self._was_greeted:
            # A remote shell that got nowhere; the head tries again.
            self._listen()
        elif not data and self._code is None:
            say(f"the head ({self._node.hosts[0]}) is gone: ending the ranks of this node")
            self._code = exits.ENTRY_FAILED
        for line in self._lines.feed(data):
            self._obey(peers.load(line))

    def _obey(self, message: peers.Message) -> None:
        word, values = message
        if word == "hello":
            self._was_greeted = True
            # Now, and not when this node was up: the head reads its clock off this.
            self._tell("ready", **self._facts(), at_s=time.time())
        elif word == "end":
            self._code = values["code"]
        elif word == "end-ranks":
            self._is_stopping = True
            self._loop.ranks.pass_on(signal.SIGTERM)
        elif word == "stop":
            self._is_stopping = True
            self.stopped_at = time.monotonic()
            self._loop.ranks.stop()
        elif word == "kill":
            self._loop.ranks.kill()
            self._loop.ranks.release()
        elif word == "signal":
            self._loop.ranks.pass_on(values["number"])

    def _rank_ended(self, end: End) -> None:
        failure = self._loop.ranks.failure(end, self._node.node, self._node.host)
        self._tell(
            "end",
            rank=end.rank,
            at_s=end.at_s,
            was_told=end.was_told,
            is_said=end.is_said,
            failure=failure._asdict(),
        )

    def _signalled(self, number: int) -> None:
        # The head decides; it tells every node, this one too.
        self._tell("signal", number=number)
        if number in STOP_SIGNALS and not self._was_greeted:
            self._leave(number)
        elif number in STOP_SIGNALS:
            self._loop.at("alone", self._node.grace_s + ABORT_S, lambda: self._leave(number))

    def _leave(self, number: int) -> None:
        self.stopped_at = self.stopped_at or time.monotonic()
        self._code = exits.code_of_signal(number)

    def _head_never_came(self) -> None:
        patience_s = self._node.start_timeout_s
        say(f"waiting for the head ({self._node.hosts[0]}): nothing in {patience_s:g} s")
        self._code = exits.ENTRY_FAILED

"""A worker: it serves the head until that says end, and starts its ranks if mpirun does not."""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import signal
import time
from typing import TYPE_CHECKING, Any, Callable

from jobentry import peers
from jobentry.contract import exits
from jobentry.contract.env import NodeEnv
from jobentry.contract.paths import NodePaths
from jobentry.output import say
from jobentry.plan import LaunchPlan
from jobentry.ranks import End
from jobentry.starters import Starters
from jobentry.supervise import (
    ABORT_S,
    STOP_SIGNALS,
    NodeLoop,
    adopt_orphans,
    end_daemons,
    remove_sessions,
)

if TYPE_CHECKING:
    from jobentry.errands import Errands
    from jobentry.outputs import Outputs

# How long the line to the head may be full.
_PATIENCE_S = 10.0


class Worker:
    """A worker: it serves the head until that says end, and starts its ranks if mpirun does not.

    Args:
        facts: Says what this node has.
        keep: Processes that stay until the end: the sshd of this node, as the line to the head goes
            through it.
        own: The children of this process that somebody else waits for.
    """

    def __init__(
        self,
        node: NodeEnv,
        paths: NodePaths,
        plan: LaunchPlan,
        facts: Callable[[], dict[str, Any]],
        keep: tuple[int, ...] = (),
        own: tuple[int, ...] = (),
    ) -> None:
        self._node = node
        self._keep = keep
        self._loop = NodeLoop(node, paths)
        self._loop.own.update(own)
        self._loop.on_end = self._rank_ended
        self._loop.on_start = lambda rank: self._tell("start", rank=rank)
        self._loop.on_signal = self._signalled
        self._plan = plan
        self._starters = Starters(self._loop, is_quiet=lambda: self._is_stopping)
        self._paths = paths
        self._errands: Errands | None = None
        self._has_launched = False
        self._is_served_no_more = False
        # Read and write: messages wait in the FIFO until the head's session reads it.
        self._to_head = os.open(paths.to_head, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._path = paths.from_head
        self._node_dir = paths.node_dir
        self._from_head = -1
        self._was_greeted = False
        self._has_head = False
        self._listen()
        self._lines = peers.Lines()
        self._facts = facts
        self._code: int | None = None
        # Whether the job has run to its own end, as the head says.
        self.is_over = False
        self._is_stopping = False
        # When the job was stopped, on the clock that never jumps.
        self.stopped_at: float | None = None
        self._on_idle: Callable[[], None] = lambda: None

    @property
    def failed_at(self) -> float | None:
        """When the first rank of this node ended badly; None when none did."""
        return self._loop.ranks.failed_at

    def attach(self, outputs: Outputs) -> None:
        """Let ``outputs`` know when ranks of this node are ended, and when all have."""
        self._loop.ranks.before_end = outputs.look_for_writers
        self._on_idle = lambda: outputs.hurry(self.failed_at)

    def run(self) -> int:
        """Serve the head, and return the exit code of the job."""
        adopt_orphans()
        self._loop.at("head", self._node.start_timeout_s, self._head_never_came)
        while self._code is None:
            self._loop.step()
            self._watch_starters()
            if self._errands is not None:
                self._errands.look()
            if self._is_stopping and not self._loop.ranks.running:
                self._is_stopping = False
                self._tell("idle")
                self._on_idle()
        self._loop.close(self._keep)
        return self._code

    def leave(self, trouble: str) -> None:
        """Tell the head that this node is done, and what went wrong with its outputs.

        Returns when the head has hung up, which is how it confirms: this node may end a moment
        later, and a message that is still on its way would be lost with it.
        """
        self._tell("left", trouble=trouble)
        deadline = time.monotonic() + _PATIENCE_S
        while self._has_head and time.monotonic() < deadline:
            if select.select([self._from_head], [], [], _PATIENCE_S)[0]:
                self._has_head = bool(os.read(self._from_head, 65536))

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
            self._has_head = False
            say(f"the head ({self._node.hosts[0]}) is gone: ending the ranks of this node")
            self._code = exits.ENTRY_FAILED
        for line in self._lines.feed(data):
            self._obey(peers.load(line))

    def _obey(self, message: peers.Message) -> None:
        word, values = message
        if word == "hello":
            self._was_greeted = self._has_head = True
            # Now, and not when this node was up: the head reads its clock off this.
            self._tell("ready", **self._facts(), at_s=time.time())
        elif word == "end":
            self._code = values["code"]
            self.is_over = values["is_over"]
            if values["reason"] and not self._loop.ranks.doors:
                # Else the log of the job says it.
                say("the head (%s) ends the job: %s" % (self._node.hosts[0], values["reason"]))
        elif word == "launch":
            self._launch()
        elif word == "run":
            self._run(values["number"], values["command"])
        else:
            self._obey_on_ranks(word, values)

    def _obey_on_ranks(self, word: str, values: dict[str, Any]) -> None:
        ranks = self._loop.ranks
        if word == "end-ranks":
            self._is_stopping = True
            ranks.pass_on(signal.SIGTERM)
        elif word == "stop":
            self._is_stopping = True
            self.stopped_at = time.monotonic()
            ranks.stop()
        elif word == "kill":
            ranks.note_end()
            self._starters.kill()
            self._end_errands()
            ranks.kill()
            ranks.release()
        elif word == "clean-up":
            self._end_errands()
            ranks.kill()
            ranks.release()
            remove_sessions(end_daemons(self._node_dir))
            self._tell("cleaned-up")
        elif word == "signal":
            ranks.pass_on(values["number"])

    def _run(self, number: int, command: str) -> None:
        """Run what mpirun wants of this node: its daemon."""
        if self._errands is None:
            from jobentry.errands import Errands

            self._errands = Errands(self._paths, self._loop, self._tell)
        self._errands.run(number, command)

    def _end_errands(self) -> None:
        if self._errands is not None:
            self._errands.kill()

    def _launch(self) -> None:
        """Start the ranks of this node: the launcher is one that has every node do so."""
        self._has_launched = True
        fault = self._starters.start(self._plan.processes, self._plan.cwd)
        if fault:
            say(fault)
            self._has_launched = False
            self._tell("over", name=self._starters.name, code=exits.NOT_FOUND, lines=[fault])

    def _watch_starters(self) -> None:
        starters = self._starters
        are_running = starters.are_running
        end = starters.server_end
        if end is not None and not self._is_served_no_more:
            self._is_served_no_more = True
            self._tell("served-no-more", name=end.name, code=end.code, lines=list(end.lines))
        if self._has_launched and not are_running:
            self._has_launched = False
            self._tell("over", name=starters.name, code=starters.code, lines=list(starters.lines))

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
        elif number in STOP_SIGNALS and not self._loop.is_planned("alone"):
            self._loop.at("alone", self._node.grace_s + ABORT_S, lambda: self._leave(number))

    def _leave(self, number: int) -> None:
        self.stopped_at = self.stopped_at or time.monotonic()
        self._code = exits.code_of_signal(number)

    def _head_never_came(self) -> None:
        patience_s = self._node.start_timeout_s
        say(f"waiting for the head ({self._node.hosts[0]}): nothing in {patience_s:g} s")
        self._code = exits.ENTRY_FAILED

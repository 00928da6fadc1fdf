"""All workers, as the head sees them: found, greeted, compared with the head, and let go."""

from __future__ import annotations

import resource
import time
from typing import TYPE_CHECKING, Any, Callable, Sequence

from jobentry.contract.env import NodeEnv
from jobentry.control import connection
from jobentry.control.event_loop import NodeLoop
from jobentry.control.messages import Message
from jobentry.control.worker_link import Peer
from jobentry.log import say

if TYPE_CHECKING:
    from jobentry.control import node_table

# After this we say what is being waited for; and again each time the wait has doubled.
_LATE_S = 30.0
_TICK_S = 1.0
# Of a head that was itself suspended, so much counts as the silence of others.
_LONGEST_TICK_S = 3.0
_NAMED = 8


class Workers:
    """The control connections from the head to its workers.

    Args:
        facts: What the head has, which the workers must have in common with it.
        on_message: Called with each message of a worker.
        on_lost: Called when a worker that had answered is gone, or one has ended before it did.
    """

    def __init__(
        self,
        node: NodeEnv,
        loop: NodeLoop,
        facts: dict[str, Any],
        on_message: Callable[[Peer, Message], None],
        on_lost: Callable[[Peer], None],
    ) -> None:
        self._loop = loop
        self._facts = facts
        self._lose = on_lost
        self._is_ending = False
        self._begun = 0.0
        self._is_late = False
        self._head = node.hosts[0]
        self._stall_s = node.stall_s
        self._ticked_at = 0.0
        # The silent workers, each with the silence after which it is reported next.
        self._silent: dict[int, float] = {}
        self.peers = [
            Peer(node, index, loop, on_message, self._lost) for index in range(1, node.nodes)
        ]

    @property
    def absent(self) -> list[Peer]:
        """The workers that have not answered yet."""
        return [peer for peer in self.peers if not peer.is_ready]

    @property
    def are_idle(self) -> bool:
        """Whether no worker has a rank that runs."""
        return all(peer.is_idle or peer.is_absent for peer in self.peers)

    @property
    def are_in_doubt(self) -> bool:
        """Whether a worker's connection has ended and nobody knows yet whether the worker has."""
        return any(not peer.is_absent and not peer.link.is_attached for peer in self.peers)

    def open(self, key: bytes, port: int) -> None:
        """Start to look for every worker.

        Args:
            key: The private key of the job.
            port: Where workers listen.
        """
        _allow_open_files(len(self.peers))
        self._begun = self._ticked_at = time.monotonic()
        self._loop.at("late", _LATE_S, self._are_late)
        if not self.peers:
            return
        from jobentry.control.dial import Caller, Resolver

        caller = Caller(connection.secret(key), connection.nonce())
        resolver = Resolver(self._loop)
        for peer in self.peers:
            peer.open(caller, resolver, port)
        self._loop.at("tick", _TICK_S, self._tick)

    def stop_looking(self, *, for_good: bool = True) -> None:
        """Give up on the workers that have not answered, or rest: all have.

        Args:
            for_good: Else those that come later are welcome all the same.
        """
        self._loop.drop("late")
        if self._is_late and not self.absent:
            say("all workers are there after %.0f s" % (time.monotonic() - self._begun))
        if for_good:
            for peer in self.absent:
                peer.close()

    def look_again(self, peer: Peer) -> None:
        """Look for a worker that is gone: it may come back."""
        peer.look_again()

    def tell(self, word: str, **values: Any) -> None:
        """Send a message to every worker."""
        for peer in self.peers:
            peer.tell(word, **values)

    def end(
        self,
        code: int,
        *,
        is_over: bool,
        patience_s: float,
        reason: str = "",
        silent_limit_s: float = float("inf"),
    ) -> list[Peer]:
        """Tell every worker how and why the job ended, and wait until each has left.

        Args:
            silent_limit_s: A worker that has been silent for so long is not waited for.

        Returns:
            The workers that have not confirmed that their outputs are stored.
        """
        self._is_ending = True
        self.stop_looking()
        self.tell("end", code=code, is_over=is_over, reason=reason)
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            if all(peer.is_absent or peer.silent_s >= silent_limit_s for peer in self.peers):
                break
            self._loop.step()
        for peer in self.peers:
            peer.close()
        self._loop.drop("tick")
        return [peer for peer in self.peers if peer.is_ready and not peer.has_left]

    def warnings(self) -> list[str]:
        """Return what is odd about workers that work all the same."""
        if not self.peers:
            return []
        from jobentry.control import node_table

        ahead = [peer for peer in self.peers if abs(peer.clock_ahead_s) > node_table.CLOCK_S]
        found = [
            "the clock of node %d (%s) is %+.0f s from the head's"
            % (peer.index, peer.host, peer.clock_ahead_s)
            for peer in ahead[: node_table.SHOWN]
        ]
        if found:
            found.append("hint: times in logs and records mislead; set the clocks (NTP)")
        return found

    def unfit(self) -> list[node_table.Row]:
        """Return the workers that are not there, or cannot work with the head."""
        if not self.peers:
            return []
        from jobentry.control import node_table

        head = node_table.Row(0, self._head, facts=self._facts)
        rows = (_row(peer, head) for peer in self.peers)
        return [row for row in rows if row.trouble]

    def show(self, message: str = "") -> None:
        """Say what each node has and lacks, ``message``, and what to do about it."""
        from jobentry.control import node_table

        head = node_table.Row(0, self._head, facts=self._facts)
        rows = [head, *(_row(peer, head) for peer in self.peers)]
        say("the nodes after %.0f s:" % (time.monotonic() - self._begun))
        for line in node_table.lines(rows):
            say("  " + line)
        for line in [message, *node_table.hints(rows)]:
            if line:
                say(line)

    def _are_late(self) -> None:
        waited_s = time.monotonic() - self._begun
        self._is_late = True
        self.show()
        self._loop.at("late", waited_s, self._are_late)

    # -- silence ----------------------------------------------------------------------------------

    def _tick(self) -> None:
        now = time.monotonic()
        elapsed_s = min(now - self._ticked_at, _LONGEST_TICK_S)
        self._ticked_at = now
        for peer in self.peers:
            peer.tick(elapsed_s)
        self._report_silence()
        self._loop.at("tick", _TICK_S, self._tick)

    def _report_silence(self) -> None:
        """Say which workers have become silent, are still, and are back."""
        silent, back = [], []
        for peer in self.peers:
            due_s = self._silent.get(peer.index)
            if peer.silent_s >= (due_s or connection.SILENT_S):
                silent.append(peer)
                self._silent[peer.index] = 2 * peer.silent_s
            elif due_s is not None and peer.silent_s < connection.SILENT_S:
                del self._silent[peer.index]
                if not peer.is_gone:
                    back.append(peer)
        if silent:
            say(
                "silent for %.0f s: %s; a node may be silent for %.0f s (network.stall_min)"
                % (max(peer.silent_s for peer in silent), _named(silent), self._stall_s)
            )
        if back:
            say("no longer silent: %s" % _named(back))

    def _lost(self, peer: Peer) -> None:
        if not self._is_ending:
            self._lose(peer)


def _named(peers: Sequence[Peer]) -> str:
    text = ", ".join("node %d (%s)" % (peer.index, peer.host) for peer in peers[:_NAMED])
    return text + (" and %d more" % (len(peers) - _NAMED) if len(peers) > _NAMED else "")


def _row(peer: Peer, head: node_table.Row) -> node_table.Row:
    from jobentry.control import node_table

    step = peer.step
    is_open = step.is_listening if step.address else None
    row = node_table.Row(peer.index, peer.host, step.address, is_open)
    if peer.is_ready:
        known = row._replace(line=True, facts=peer.facts, clock_ahead_s=peer.clock_ahead_s)
        return node_table.compared(known, head)
    return row._replace(line=step.line, trouble=step.trouble, hint=step.hint)


def _allow_open_files(workers: int) -> None:
    """Raise the limit on open files where the connections to the workers need more.

    The usual one, 1,024, ends at 384 workers. What this process starts inherits it, so jobs that do
    not need it keep what they were given.
    """
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # One each, and another while a silent worker is looked for. The rest is the node's.
    needed = 2 * workers + 256
    if soft != resource.RLIM_INFINITY and soft < needed:
        enough = needed if most == resource.RLIM_INFINITY else min(needed, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (enough, most))

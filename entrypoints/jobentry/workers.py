"""All workers, as the head sees them: found, greeted, compared with the head, and let go."""

from __future__ import annotations

import os
import resource
import selectors
import time
from typing import TYPE_CHECKING, Any, Callable

from jobentry.contract.env import NodeEnv
from jobentry.contract.paths import NodePaths
from jobentry.output import say
from jobentry.peers import Message, Peer
from jobentry.supervise import NodeLoop

if TYPE_CHECKING:
    from jobentry import table
    from jobentry.probe import Greet, Probe, Step
    from jobentry.wire import Wires

# The wait before a remote shell that got nowhere is tried again, growing up to the second figure.
_PAUSE_S = (0.05, 1.0)
# After this we say what is being waited for; and again each time the wait has doubled.
_LATE_S = 30.0
# A worker that refuses our key for so long is told sooner: waiting seldom mends that.
_REFUSED_S = 5.0
_REFUSALS = ("Permission denied", "Host key verification failed")
_WRONG_KEY = "every node of a job must be given the same key (CLOUDJOB_SSH_KEY)"
_NO_ENTRY = "it can be reached, and its entry does not answer: what does its own log say?"


class Workers:
    """The lines from the head to its workers.

    Args:
        facts: What the head has, which the workers must have in common with it.
        on_message: Called with what a worker says.
        on_lost: Called when a worker that had answered is gone.
    """

    def __init__(
        self,
        node: NodeEnv,
        where: NodePaths,
        loop: NodeLoop,
        facts: dict[str, Any],
        on_message: Callable[[Peer, Message], None],
        on_lost: Callable[[Peer], None],
    ) -> None:
        self._loop = loop
        self._facts = facts
        self._on_message = on_message
        self._on_lost = on_lost
        self._probe: Probe | None = None
        self._steps: dict[int, Step] = {}
        self._pauses: dict[int, float] = {}
        self._refused_since: dict[int, float] = {}
        self._is_ending = False
        self._begun = 0.0
        self._is_late = False
        self._head = node.hosts[0]
        self._port = node.sshd_port
        self._wires: Wires | None = None
        self._is_probed = not node.remote_shell
        self.peers = [
            Peer(node, index, os.path.join(where.node_dir, "peer-%d.log" % index), where.ssh_config)
            for index in range(1, node.nodes)
        ]

    @property
    def absent(self) -> list[Peer]:
        """The workers that have not answered yet."""
        return [peer for peer in self.peers if not peer.is_ready]

    @property
    def are_idle(self) -> bool:
        """Whether no worker has a rank that runs."""
        return all(peer.is_idle or peer.is_gone or not peer.is_ready for peer in self.peers)

    @property
    def processes(self) -> list[int]:
        """The process ids of the remote shells."""
        return [peer.process for peer in self.peers if peer.process]

    def open(self, wires: Wires | None = None) -> None:
        """Begin to look for every worker.

        Args:
            wires: The lines to them, where those are no remote shells.
        """
        self._wires = wires
        _allow_open_files(len(self.peers))
        self._begun = time.monotonic()
        self._loop.at("late", _LATE_S, self._are_late)
        if not self._is_probed:
            for peer in self.peers:
                self._open(peer)
        elif self.peers:
            from jobentry.probe import Probe

            hosts = {peer.index: peer.host for peer in self.peers}
            self._probe = Probe(hosts, self._port, self._greet)
            self._steps = self._probe.steps
            self._loop.selector.register(self._probe, selectors.EVENT_READ, self._found)

    def stop_looking(self, *, for_good: bool = True) -> None:
        """Give up on the workers that have not answered, or rest: all have.

        Args:
            for_good: Else those that come later are welcome all the same.
        """
        self._loop.drop("late")
        if self._is_late and not self.absent:
            say("all workers are there after %.0f s" % (time.monotonic() - self._begun))
        if self._probe and for_good:
            self._loop.selector.unregister(self._probe)
            self._probe.close()
            self._probe = None

    def look_again(self, peer: Peer) -> None:
        """Look for a worker that is gone: it may come back."""
        self._loop.own.discard(peer.process)
        peer.forget()
        self._again(peer)

    def tell(self, word: str, **values: Any) -> None:
        """Say ``word`` to every worker."""
        for peer in self.peers:
            peer.tell(word, **values)

    def end(self, code: int, *, is_over: bool, patience_s: float, reason: str = "") -> list[Peer]:
        """Tell every worker how and why the job ended, and wait until each has left.

        Returns:
            The workers that have not confirmed that their outputs are stored.
        """
        self._is_ending = True
        self.stop_looking()
        self.tell("end", code=code, is_over=is_over, reason=reason)
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            if all(peer.is_gone or not peer.is_ready for peer in self.peers):
                break
            self._loop.step()
        for peer in self.peers:
            peer.close(patience_s=1.0)
        return [peer for peer in self.peers if peer.is_ready and not peer.has_left]

    def warnings(self) -> list[str]:
        """Return what is odd about workers that work all the same."""
        if not self.peers:
            return []
        from jobentry import table

        ahead = [peer for peer in self.peers if abs(peer.clock_ahead_s) > table.CLOCK_S]
        found = [
            "the clock of node %d (%s) is %+.0f s from the head's"
            % (peer.index, peer.host, peer.clock_ahead_s)
            for peer in ahead[: table.SHOWN]
        ]
        if found:
            found.append("hint: times in logs and records mislead; set the clocks (NTP)")
        return found

    def unfit(self) -> list[table.Row]:
        """Return the workers that are not there, or cannot work with the head."""
        if not self.peers:
            return []
        from jobentry import table

        head = table.Row(0, self._head, facts=self._facts)
        rows = (self._row(peer, head) for peer in self.peers)
        return [row for row in rows if row.trouble]

    def show(self, message: str = "") -> None:
        """Say what each node has and lacks, ``message``, and what to do about it."""
        from jobentry import table
        from jobentry.probe import look

        has_sshd = self._is_probed and self._wires is None
        step = look(self._head, self._port) if has_sshd else None
        head = table.Row(0, self._head, facts=self._facts)
        if step is not None:
            head = head._replace(
                address=step.address,
                port=step.is_listening if step.address else None,
                trouble=step.trouble,
                hint=step.hint,
            )
        rows = [head, *(self._row(peer, head) for peer in self.peers)]
        say("the nodes after %.0f s:" % (time.monotonic() - self._begun))
        for line in table.lines(rows):
            say("  " + line)
        for line in [message, *table.hints(rows)]:
            if line:
                say(line)

    def _are_late(self) -> None:
        waited_s = time.monotonic() - self._begun
        self._is_late = True
        self.show()
        self._loop.at("late", waited_s, self._are_late)

    def _row(self, peer: Peer, head: table.Row) -> table.Row:
        from jobentry import table

        step = self._steps.get(peer.index)
        address = step.address if step else ""
        is_open = step.is_listening if step and address else None
        row = table.Row(peer.index, peer.host, address, is_open)
        if peer.is_ready:
            known = row._replace(line=True, facts=peer.facts, clock_ahead_s=peer.clock_ahead_s)
            return table.compared(known, head)
        if step is not None and not step.is_there:
            return row._replace(trouble=step.trouble, hint=step.hint)
        said = peer.words()
        if _is_refusal(said):
            trouble = f"it has another key for ssh: {said}"
            return row._replace(line=False, trouble=trouble, hint=_WRONG_KEY)
        if said:
            trouble = f"its remote shell says: {said}"
            return row._replace(line=False, trouble=trouble, hint=_NO_ENTRY)
        return row._replace(trouble="its entry has not answered", hint=_NO_ENTRY)

    def _greet(self, index: int) -> Greet | None:
        """Return what meets a worker where its line is a connection of our own."""
        wires = self._wires
        if wires is None:
            return None
        from jobentry.wire import meeting

        return meeting(wires, index)

    def _found(self) -> None:
        assert self._probe is not None
        found = self._probe.found()
        for peer in self.peers:
            if peer.index in found:
                self._open(peer)

    def _open(self, peer: Peer) -> None:
        peer.open(self._wires)
        self._loop.own.add(peer.process)
        self._loop.selector.register(peer.fileno(), selectors.EVENT_READ, lambda: self._hear(peer))

    def _hear(self, peer: Peer) -> None:
        messages = peer.hear()
        if messages is None:
            self._loop.selector.unregister(peer.fileno())
            self._ended(peer)
            return
        for message in messages:
            self._on_message(peer, message)

    def _ended(self, peer: Peer) -> None:
        """A remote shell has ended: too early is tried again, later is a node that is lost."""
        if peer.is_ready:
            peer.is_gone = True
            if not self._is_ending:
                self._on_lost(peer)
            return
        peer.close(patience_s=1.0)
        self._loop.own.discard(peer.process)
        if self._is_ending:
            return
        if _is_refusal(peer.words()):
            since = self._refused_since.setdefault(peer.index, time.monotonic())
            if not self._is_late and time.monotonic() - since > _REFUSED_S:
                self._are_late()
        self._again(peer)

    def _again(self, peer: Peer) -> None:
        if self._probe:
            self._probe.again(peer.index)
            return
        pause = self._pauses.get(peer.index, _PAUSE_S[0])
        self._pauses[peer.index] = min(2 * pause, _PAUSE_S[1])
        self._loop.at("open-%d" % peer.index, pause, lambda: self._open(peer))


def _is_refusal(said: str) -> bool:
    """Whether a remote shell ended because of its keys."""
    return any(word in said for word in _REFUSALS)


def _allow_open_files(workers: int) -> None:
    """Raise the limit on open files where the lines to the workers need more.

    The usual one, 1,024, ends at 500 workers. What this process starts inherits it, so jobs that do
    not need it keep what they were given.
    """
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # A connection of our own has five with its pipes, a remote shell two. The rest is the node's.
    needed = 5 * workers + 256
    if soft != resource.RLIM_INFINITY and soft < needed:
        enough = needed if most == resource.RLIM_INFINITY else min(needed, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (enough, most))

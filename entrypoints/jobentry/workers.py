"""All workers, as the head sees them: found, greeted, compared with the head, and let go."""

from __future__ import annotations

import os
import resource
import selectors
import time
from typing import Any, Callable

from jobentry.contract.env import NodeEnv
from jobentry.contract.paths import NodePaths
from jobentry.peers import Message, Peer
from jobentry.probe import Probe
from jobentry.supervise import NodeLoop

# The wait before a remote shell that got nowhere is tried again, growing up to the second figure.
_PAUSE_S = (0.05, 1.0)
# Further apart than this, the times in logs and records of two nodes mislead.
_CLOCK_S = 60.0
# A table of a thousand lines says less than one of the nodes that lack something.
_SHOWN = 32


class Workers:
    """The lines from the head to its workers.

    Args:
        on_message: Called with what a worker says.
        on_lost: Called when a worker that had answered is gone.
    """

    def __init__(
        self,
        node: NodeEnv,
        where: NodePaths,
        loop: NodeLoop,
        on_message: Callable[[Peer, Message], None],
        on_lost: Callable[[Peer], None],
    ) -> None:
        self._loop = loop
        self._on_message = on_message
        self._on_lost = on_lost
        self._probe: Probe | None = None
        self._pauses: dict[int, float] = {}
        self._is_ending = False
        self._port = node.sshd_port
        self._needs_sshd = not node.remote_shell
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
        return all(peer.is_idle or peer.is_gone for peer in self.peers)

    @property
    def processes(self) -> list[int]:
        """The process ids of the remote shells."""
        return [peer.process for peer in self.peers if peer.process]

    def open(self) -> None:
        """Begin to look for every worker."""
        _allow_open_files(len(self.peers))
        if not self._needs_sshd:
            for peer in self.peers:
                self._open(peer)
        elif self.peers:
            self._probe = Probe({peer.index: peer.host for peer in self.peers}, self._port)
            self._loop.selector.register(self._probe, selectors.EVENT_READ, self._found)

    def stop_looking(self) -> None:
        """Give up on the workers that have not answered, or rest: all have."""
        if self._probe:
            self._loop.selector.unregister(self._probe)
            self._probe.close()
            self._probe = None

    def tell(self, word: str, **values: Any) -> None:
        """Say ``word`` to every worker."""
        for peer in self.peers:
            peer.tell(word, **values)

    def end(self, code: int, patience_s: float) -> None:
        """Tell every worker how the job ended, and wait until each has left."""
        self._is_ending = True
        self.stop_looking()
        self.tell("end", code=code)
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            if all(peer.is_gone or not peer.is_ready for peer in self.peers):
                break
            self._loop.step()
        for peer in self.peers:
            peer.close(patience_s=1.0)

    def differences(self, facts: dict[str, Any]) -> list[str]:
        """Return what keeps the workers from working with the head, a line each."""
        found = []
        for peer in self.peers:
            for key, what in (("code", "other code"), ("mpi", "another Open MPI")):
                if peer.facts.get(key) != facts.get(key):
                    found.append(
                        "node %d (%s) has %s: %s, and the head has %s"
                        % (peer.index, peer.host, what, peer.facts.get(key), facts.get(key))
                    )
        return found

    def warnings(self) -> list[str]:
        """Return what is odd about workers that work all the same."""
        return [
            "the clock of node %d (%s) is %+.0f s from the head's"
            % (peer.index, peer.host, peer.clock_ahead_s)
            for peer in self.peers
            if abs(peer.clock_ahead_s) > _CLOCK_S
        ]

    def table(self) -> list[str]:
        """Return how far the way to each worker goes, the ones that lack something first."""
        lines = []
        for peer in sorted(self.peers, key=lambda peer: peer.is_ready)[:_SHOWN]:
            lines.append("node %-4d %s: %s" % (peer.index, peer.host, self._progress(peer)))
        if len(self.peers) > _SHOWN:
            lines.append("... and %d more" % (len(self.peers) - _SHOWN))
        return lines

    def _progress(self, peer: Peer) -> str:
        if peer.is_ready:
            facts = peer.facts
            return "ready (Open MPI {}, Python {})".format(facts.get("mpi"), facts.get("python"))
        step = self._probe.steps.get(peer.index) if self._probe else None
        said = peer.words()
        if step is not None and not step.is_there:
            place = f" at {step.address}" if step.address else ""
            return f"not there{place}: {step.trouble}"
        if said:
            return f"its remote shell says: {said}"
        return "its remote shell answers, but its entry has not come up"

    def _found(self) -> None:
        assert self._probe is not None
        found = self._probe.found()
        for peer in self.peers:
            if peer.index in found:
                self._open(peer)

    def _open(self, peer: Peer) -> None:
        peer.open()
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
        if self._is_ending:
            return
        if self._probe:
            self._probe.again(peer.index)
            return
        pause = self._pauses.get(peer.index, _PAUSE_S[0])
        self._pauses[peer.index] = min(2 * pause, _PAUSE_S[1])
        self._loop.at("open-%d" % peer.index, pause, lambda: self._open(peer))


def _allow_open_files(workers: int) -> None:
    """Raise the limit on open files where the lines to the workers need more.

    The usual one, 1,024, ends at 500 workers. What this process starts inherits it, so jobs that do
    not need it keep what they were given.
    """
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # A line has two; a third is open while its remote shell starts. The rest is the node's own.
    needed = 3 * workers + 256
    if soft != resource.RLIM_INFINITY and soft < needed:
        enough = needed if most == resource.RLIM_INFINITY else min(needed, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (enough, most))

"""A worker: it serves the head until the job ends, and starts its ranks if mpirun does not."""

from __future__ import annotations

import os
import signal
import socket
import time
from typing import TYPE_CHECKING, Any, Callable, NamedTuple, Sequence

from jobentry.contract import exits, hangs, names, slow
from jobentry.contract.env import NodeEnv
from jobentry.contract.paths import NodePaths
from jobentry.control import handshake, transport
from jobentry.control.commands import CommandRunner, LaunchProcesses, end_daemons, remove_sessions
from jobentry.control.handshake import Listener
from jobentry.control.insight import NodeInsight
from jobentry.control.loop import ABORT_S, STOP_SIGNALS, NodeEvents, NodeLoop, NodeSetup
from jobentry.control.transport import Break, Link, Message
from jobentry.control.verdict import RankEnd
from jobentry.errors import EntryError
from jobentry.launchers.common import Launch
from jobentry.log import log_message
from jobentry.node.local_ranks import End, RankFailure
from jobentry.node.prepare import control_port, read_key
from jobentry.system.processes import adopt_orphans

if TYPE_CHECKING:
    from jobentry.contract.hangs import Standing
    from jobentry.contract.slow import RankShare

# A running head reconnects within this time after a connection was closed.
_CLOSED_S = 3.0
# Seconds that the head of a stopped job has to confirm that this node is done.
_LEAVE_S = 3.0


class ControlSocket(NamedTuple):
    """The listening socket on which a worker waits for its head, and the job's private key."""

    server: socket.socket
    key: bytes


def listen(node: NodeEnv, node_paths: NodePaths) -> ControlSocket:
    """Listen for the head.

    Raises:
        EntryError: The port is taken, or the job's key cannot be read.
    """
    key = read_key(node)
    port = 0 if node.control_dir else control_port(node, node_paths)
    try:
        if not node.control_dir:
            return ControlSocket(handshake.listen(port), key)
        address = os.environ.get(names.MA_CURRENT_IP, "")
        # A port of an emulated node must not be reachable from other machines.
        server = handshake.listen(port, address if address.startswith("127.") else "127.0.0.1")
        handshake.announce(server, node.control_dir, node.node)
        return ControlSocket(server, key)
    except OSError as error:
        raise EntryError(
            f"listening for the head on port {port}: {error.strerror}",
            hint=f"give {names.SSHD_PORT} another number on all nodes",
        ) from error


class Worker:
    """A worker: it serves the head until the job ends, and starts its ranks if mpirun does not.

    Args:
        facts: Returns the facts about this node.
        control_socket: The socket on which the head connects.
    """

    def __init__(
        self,
        setup: NodeSetup,
        plan: Launch,
        facts: Callable[[], dict[str, Any]],
        control_socket: ControlSocket,
    ) -> None:
        self._node = setup.node
        self._paths = setup.paths
        self._journal = setup.journal
        self._outputs = setup.outputs
        self._child_ids = setup.child_ids
        self._preflight = setup.preflight
        self._plan = plan
        self._facts = facts
        self._parent = os.getppid()
        self._has_launched = False
        self._has_server_ended = False
        self._was_greeted = False
        self._has_head = False
        self._reported_s = transport.SILENT_S
        self._code: int | None = None
        # The exit code of the head, if the nodes end together.
        self._final_code: int | None = None
        # Whether the job is complete, as reported by the head.
        self.is_over = False
        self._is_stopping = False
        # When the job was stopped, on the monotonic clock.
        self.stopped_at: float | None = None
        self._link = Link(self._handle, self._disconnected)
        events = NodeEvents(
            rank_started=lambda rank: self._send("rank-started", rank=rank),
            rank_ended=self._rank_ended,
            signalled=self._signalled,
            ranks_stand=self._send_standing,
            ranks_share=self._send_shares,
        )
        self._loop = NodeLoop(setup, events)
        self._launcher = LaunchProcesses(self._loop, is_quiet=lambda: self._is_stopping)
        self._commands = CommandRunner(self._paths, self._loop, self._command_output)
        self._insight = NodeInsight(setup, self._loop)
        self._listener = Listener(
            self._loop,
            control_socket.server,
            transport.secret(control_socket.key),
            self._node.node,
            self._link,
            on_attach=lambda: self._loop.cancel("broken"),
        )

    @property
    def rank_failure(self) -> RankFailure | None:
        """How ranks of this node failed; None if none did."""
        return self._loop.ranks.rank_failure

    def run(self) -> int:
        """Serve the head, and return the exit code of the job."""
        adopt_orphans()
        self._journal.begin("bring-up")
        self._loop.schedule("head", self._node.start_timeout_s, self._head_never_came)
        self._loop.start_clock(self._tick)
        while self._code is None:
            self._loop.step()
            self._check_launcher()
            self._commands.check()
            if self._is_stopping and not self._loop.ranks.running:
                self._is_stopping = False
                self._send("idle")
                if self._outputs is not None:
                    self._outputs.start_final_upload(self.rank_failure)
        self._loop.close(keep=self._child_ids)
        for name in ("bring-up", "run"):
            self._journal.end(name)
        return self._code

    def run_in_thread(self, work: Callable[[], str]) -> str:
        """Run ``work`` while this node continues to answer its head, and return its result."""
        try:
            return self._loop.run_in_thread(work, lambda: self.stopped_at)
        except TimeoutError:
            return "storing the outputs was not done in time when the job was stopped"

    def leave(self, problem: str) -> int:
        """Report to the head that this node is done, and return the exit code of this node.

        Returns when the head has confirmed it, or is gone: this node may end a moment later, and a
        message still on its way would be lost.

        Args:
            problem: A problem with the outputs of this node; empty for none.
        """
        phases = [phase[:3] for phase in self._journal.phases]
        relay = self._loop.relay
        log = {"missing_bytes": relay.missing_bytes, "reason": relay.reason}
        self._send("left", trouble=problem, phases=phases, log=log)
        left_at = time.monotonic()
        while self._has_head:
            if self.stopped_at and time.monotonic() > max(left_at, self.stopped_at) + _LEAVE_S:
                break
            self._loop.step()
        self._listener.close()
        self._link.detach()
        if self._final_code is not None:
            return self._final_code
        assert self._code is not None
        # A head that has sent no final exit code has failed, and every node is needed again.
        return self._code or (exits.ENTRY_FAILED if self._node.ends_together else 0)

    def _send(self, kind: str, **values: object) -> None:
        self._link.send(kind, **values)

    # -- the head ---------------------------------------------------------------------------------

    def _disconnected(self, how: Break) -> None:
        """Handle the end of the connection; a running head reconnects at once."""
        if not self._has_head:
            return
        patience_s = _CLOSED_S if how is Break.CLOSED else transport.SILENT_S
        self._loop.schedule("broken", patience_s, self._head_is_gone)

    def _tick(self, elapsed_s: float) -> None:
        self._link.tick(elapsed_s)
        silent_s = self._link.silent_s
        if not self._has_head:
            return
        if silent_s >= min(self._reported_s, self._node.stall_s):
            self._reported_s = 2 * silent_s
            log_message(
                "the head (%s) has been silent for %.0f s" % (self._node.hosts[0], silent_s)
            )
            if silent_s >= self._node.stall_s:
                self._head_is_gone()
        elif silent_s < transport.SILENT_S < self._reported_s:
            self._reported_s = transport.SILENT_S
            log_message("the head (%s) is no longer silent" % self._node.hosts[0])

    def _head_is_gone(self) -> None:
        self._has_head = False
        if self._code is None:
            log_message(f"the head ({self._node.hosts[0]}) is gone: ending the ranks of this node")
            self._code = exits.ENTRY_FAILED

    def _handle(self, message: Message) -> None:
        self._loop.cancel("head")
        kind, values = message
        ranks = self._loop.ranks
        actions: dict[str, Callable[..., None]] = {
            "hello": self._greeted,
            "bye": self._dismissed,
            "job-ended": self._job_ended,
            "launch": self._launch,
            # A command of mpirun, to start its daemon here.
            "run-command": self._commands.run,
            "stop": self._stop,
            "end-ranks": self._end_ranks,
            "kill-others": ranks.kill_others,
            "kill": self._kill,
            "signal": ranks.forward_signal,
            "report": self._report,
            "clean-up": self._clean_up,
            "question": self._answer,
            "preflight": self._take_part_in_check,
        }
        if kind in actions:
            actions[kind](**values)

    def _take_part_in_check(self, **question: Any) -> None:
        if self._preflight is not None:
            self._preflight.start(question, self._send_preflight)

    def _send_preflight(self, answer: dict[str, Any]) -> None:
        # From a thread of the check.
        self._loop.post(lambda: self._send("preflight-is", **answer))

    def _greeted(self) -> None:
        if not self._was_greeted:
            self._journal.end("bring-up")
            self._journal.begin("run")
        self._was_greeted = self._has_head = True
        # Sent only now, as the head derives this node's clock from it.
        self._send("ready", **self._facts(), at_s=time.time())

    def _dismissed(self, code: int | None = None) -> None:
        self._has_head = False
        self._final_code = code

    def _job_ended(self, code: int, reason: str, *, is_over: bool) -> None:
        self._code = code
        self.is_over = is_over
        if reason and not self._loop.ranks.wrappers:
            # Otherwise the reason is in the log of the job.
            log_message("the head (%s) ends the job: %s" % (self._node.hosts[0], reason))

    def _stop(self) -> None:
        self._is_stopping = True
        self.stopped_at = time.monotonic()
        self._loop.ranks.stop()

    def _end_ranks(self, *, are_held: bool) -> None:
        self._is_stopping = True
        if are_held:
            self._loop.ranks.stop()
        else:
            self._loop.ranks.forward_signal(signal.SIGTERM)

    def _answer(self, number: int, request: dict[str, Any]) -> None:
        def send(answer: object) -> None:
            self._send("answer", number=number, answer=answer)

        self._insight.answer(request, send)

    def _send_standing(self, standing: list[Standing]) -> None:
        self._send("ranks-stand", ranks=[hangs.to_row(each) for each in standing])

    def _send_shares(self, shares: list[RankShare]) -> None:
        self._send("ranks-share", ranks=[slow.to_row(each) for each in shares])

    def _kill(self) -> None:
        self._loop.ranks.note_end()
        self._launcher.kill()
        self._commands.kill()
        self._loop.kill_ranks()

    def _report(self) -> None:
        self._loop.read_events()
        self._loop.handle_lost_ranks()
        self._send("reported")

    def _clean_up(self) -> None:
        self._commands.kill()
        self._loop.kill_ranks()
        remove_sessions(end_daemons(self._paths.node_dir))
        self._send("cleaned-up")

    def _command_output(self, number: int, lines: list[str], code: int | None) -> None:
        self._send("command-output", number=number, lines=lines, code=code)

    def _launch(self) -> None:
        """Start the ranks of this node, for a launcher with which every node does so."""
        self._has_launched = True
        error = self._launcher.start(self._plan.processes, self._plan.cwd)
        if error:
            log_message(error)
            self._launcher_ended(exits.NOT_FOUND, [error])

    def _launcher_ended(self, code: int, lines: Sequence[str]) -> None:
        self._has_launched = False
        self._send("launcher-ended", name=self._launcher.name, code=code, lines=list(lines))

    def _check_launcher(self) -> None:
        launcher = self._launcher
        are_running = launcher.are_running
        end = launcher.server_end
        if end is not None and not self._has_server_ended:
            self._has_server_ended = True
            self._send("server-ended", name=end.name, code=end.code, lines=list(end.lines))
        if self._has_launched and not are_running:
            self._launcher_ended(launcher.code, launcher.lines)

    def _rank_ended(self, end: End) -> None:
        failure = self._loop.ranks.failure(end, self._node.node, self._node.host)
        self._send("rank-ended", rank=end.rank, end=RankEnd.of(end, failure).to_values())

    def _signalled(self, number: int) -> None:
        if number in STOP_SIGNALS and os.getppid() != self._parent:
            # The process that emulates this machine was killed; this is not a cancel.
            self._has_head = False
            self._listener.close()
            self._link.detach()
            self._leave(number)
            return
        # The head decides, and signals every node, including this one.
        self._send("signal", number=number)
        if number in STOP_SIGNALS and not self._was_greeted:
            self._leave(number)
        elif number in STOP_SIGNALS and not self._loop.is_scheduled("alone"):
            self._loop.schedule("alone", self._node.grace_s + ABORT_S, lambda: self._leave(number))

    def _leave(self, number: int) -> None:
        self.stopped_at = self.stopped_at or time.monotonic()
        self._code = exits.code_of_signal(number)

    def _head_never_came(self) -> None:
        patience_s = self._node.start_timeout_s
        log_message(f"waiting for the head ({self._node.hosts[0]}): nothing in {patience_s:g} s")
        self._code = exits.ENTRY_FAILED

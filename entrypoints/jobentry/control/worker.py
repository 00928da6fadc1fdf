"""A worker: it serves the head until the job ends, and starts its ranks if mpirun does not."""

from __future__ import annotations

import os
import signal
import socket
import time
from typing import TYPE_CHECKING, Any, Callable, NamedTuple, Sequence

from jobentry.contract import exits, hangs, names, profiles, slow
from jobentry.contract.env import NodeEnv
from jobentry.contract.paths import NodePaths
from jobentry.control import connection, listener
from jobentry.control.connection import Link
from jobentry.control.event_loop import (
    ABORT_S,
    STOP_SIGNALS,
    NodeLoop,
    is_late,
)
from jobentry.control.launch_processes import LaunchProcesses
from jobentry.control.messages import Message
from jobentry.control.mpirun_cleanup import end_daemons, remove_sessions
from jobentry.control.remote_commands import CommandRunner
from jobentry.control.stack_requests import NodeStacks
from jobentry.errors import EntryError
from jobentry.launchers.plan import LaunchPlan
from jobentry.log import log_message
from jobentry.node.journal import Journal
from jobentry.node.local_ranks import End, RankFailure
from jobentry.node.prepare import control_port, read_key
from jobentry.system.processes import adopt_orphans

if TYPE_CHECKING:
    from jobentry.contract.hangs import Standing
    from jobentry.contract.profiles import Profile
    from jobentry.contract.slow import RankShare
    from jobentry.contract.stacks import ProcessStacks
    from jobentry.preflight.node import NodePreflight
    from jobentry.staging.outputs import Outputs

_TICK_S = 1.0
# If this worker was itself suspended, one tick counts at most this much silence of the head.
_MAX_TICK_S = 3.0
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
            return ControlSocket(listener.listen(port), key)
        address = os.environ.get(names.MA_CURRENT_IP, "")
        # A port of an emulated node must not be reachable from other machines.
        server = listener.listen(port, address if address.startswith("127.") else "127.0.0.1")
        listener.announce(server, node.control_dir, node.node)
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
        own: The children of this process that other code waits for, and ends.
    """

    def __init__(
        self,
        node: NodeEnv,
        paths: NodePaths,
        plan: LaunchPlan,
        facts: Callable[[], dict[str, Any]],
        control_socket: ControlSocket,
        own: tuple[int, ...] = (),
    ) -> None:
        self._node = node
        self._own = own
        self._parent = os.getppid()
        self._loop = NodeLoop(node, paths)
        self._loop.own_children.update(own)
        self._loop.on_end = self._rank_ended
        self._loop.on_start = lambda rank: self._send("rank-started", rank=rank)
        self._loop.on_signal = self._signalled
        self._plan = plan
        self._launcher = LaunchProcesses(self._loop, is_quiet=lambda: self._is_stopping)
        self._paths = paths
        self._commands = CommandRunner(paths, self._loop, self._command_output)
        self._stacks = NodeStacks(node, paths, self._loop)
        self._has_launched = False
        self._has_server_ended = False
        self._was_greeted = False
        self._has_head = False
        self._ticked_at = time.monotonic()
        self._reported_s = connection.SILENT_S
        self._link = Link(self._handle, self._disconnected)
        self._listener = listener.Listener(
            self._loop,
            control_socket.server,
            connection.secret(control_socket.key),
            node.node,
            self._link,
        )
        self._listener.on_attach = lambda: self._loop.cancel("broken")
        self._facts = facts
        self._journal = Journal()
        self._code: int | None = None
        # Whether the job is complete, as reported by the head.
        self.is_over = False
        self._is_stopping = False
        # When the job was stopped, on the monotonic clock.
        self.stopped_at: float | None = None
        # This node's part of the check before the ranks start; None if the job has none.
        self.preflight: NodePreflight | None = None
        self._on_idle: Callable[[], None] = lambda: None

    @property
    def rank_failure(self) -> RankFailure | None:
        """How ranks of this node failed; None if none did."""
        return self._loop.ranks.rank_failure

    def attach(self, journal: Journal, outputs: Outputs | None) -> None:
        """Write to ``journal``; notify ``outputs`` before ranks are ended and after all have."""
        self._journal = journal
        self._loop.attach_journal(journal, self._paths)
        self._loop.look_for_hangs(journal, self._paths, self._send_standing, self._send_shares)
        if outputs is not None:
            self._loop.ranks.before_end = outputs.note_open_files
            self._on_idle = lambda: outputs.start_final_upload(self.rank_failure)

    def run(self) -> int:
        """Serve the head, and return the exit code of the job."""
        adopt_orphans()
        self._journal.begin("bring-up")
        self._loop.schedule("head", self._node.start_timeout_s, self._head_never_came)
        self._loop.schedule("tick", _TICK_S, self._tick)
        while self._code is None:
            self._loop.step()
            self._check_launcher()
            self._commands.check()
            if self._is_stopping and not self._loop.ranks.running:
                self._is_stopping = False
                self._send("idle")
                self._on_idle()
        self._loop.close(keep=self._own)
        for name in ("bring-up", "run"):
            self._journal.end(name)
        return self._code

    def run_in_thread(self, work: Callable[[], str]) -> str:
        """Run ``work`` while this node continues to answer its head, and return its result."""
        try:
            return self._loop.run_in_thread(work, lambda: is_late(self.stopped_at, self._node))
        except TimeoutError:
            return "storing the outputs was not done in time when the job was stopped"

    def leave(self, problem: str) -> None:
        """Report to the head that this node is done, and any problem with its outputs.

        Returns when the head has confirmed it, or is gone: this node may end a moment later, and a
        message still on its way would be lost.
        """
        phases = [phase[:3] for phase in self._journal.phases]
        self._send("left", trouble=problem, phases=phases)
        deadline = time.monotonic() + (_LEAVE_S if self.stopped_at else float("inf"))
        while self._has_head and time.monotonic() < deadline:
            self._loop.step()
        self._listener.close()
        self._link.detach()

    def _send(self, kind: str, **values: object) -> None:
        self._link.send(kind, **values)

    # -- the head ---------------------------------------------------------------------------------

    def _disconnected(self, why: str) -> None:
        """Handle the end of the connection; a running head reconnects at once."""
        if not self._has_head:
            return
        patience_s = _CLOSED_S if why == connection.CLOSED else connection.SILENT_S
        self._loop.schedule("broken", patience_s, self._head_is_gone)

    def _tick(self) -> None:
        now = time.monotonic()
        self._link.tick(min(now - self._ticked_at, _MAX_TICK_S))
        self._ticked_at = now
        self._loop.schedule("tick", _TICK_S, self._tick)
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
        elif silent_s < connection.SILENT_S < self._reported_s:
            self._reported_s = connection.SILENT_S
            log_message("the head (%s) is no longer silent" % self._node.hosts[0])

    def _head_is_gone(self) -> None:
        self._has_head = False
        if self._code is None:
            log_message(f"the head ({self._node.hosts[0]}) is gone: ending the ranks of this node")
            self._code = exits.ENTRY_FAILED

    def _handle(self, message: Message) -> None:
        self._loop.cancel("head")
        kind, values = message
        if kind == "hello":
            if not self._was_greeted:
                self._journal.end("bring-up")
                self._journal.begin("run")
            self._was_greeted = self._has_head = True
            # Sent only now, as the head derives this node's clock from it.
            self._send("ready", **self._facts(), at_s=time.time())
        elif kind == "bye":
            self._has_head = False
        elif kind == "job-ended":
            self._code = values["code"]
            self.is_over = values["is_over"]
            if values["reason"] and not self._loop.ranks.wrappers:
                # Otherwise the reason is in the log of the job.
                log_message(
                    "the head (%s) ends the job: %s" % (self._node.hosts[0], values["reason"])
                )
        elif kind == "launch":
            self._launch()
        elif kind == "run-command":
            # A command of mpirun, to start its daemon here.
            self._commands.run(values["number"], values["command"])
        else:
            self._handle_for_ranks(kind, values)

    def _handle_for_ranks(self, kind: str, values: dict[str, Any]) -> None:
        ranks = self._loop.ranks
        simple = {
            "kill-others": ranks.kill_others,
            "kill": self._kill,
            "report": self._report,
            "clean-up": self._clean_up,
        }
        if kind in simple:
            simple[kind]()
        elif kind == "stop" or (kind == "end-ranks" and values["are_held"]):
            self._is_stopping = True
            if kind == "stop":
                self.stopped_at = time.monotonic()
            ranks.stop()
        elif kind == "end-ranks":
            self._is_stopping = True
            ranks.forward_signal(signal.SIGTERM)
        elif kind == "signal":
            ranks.forward_signal(values["number"])
        elif kind in ("stacks", "profile"):
            (self._send_stacks if kind == "stacks" else self._send_profile)(**values)
        elif kind == "preflight" and self.preflight is not None:
            self.preflight.start(values, self._send_preflight)

    def _send_preflight(self, found: dict[str, Any]) -> None:
        # From a thread of the check.
        self._loop.post(lambda: self._send("preflight-is", **found))

    def _send_stacks(self, number: int, *, with_threads: bool, with_native: bool) -> None:
        def send(found: list[ProcessStacks]) -> None:
            self._send("stacks-are", number=number, processes=found)

        self._stacks.read(send, with_threads=with_threads, with_native=with_native)

    def _send_profile(self, number: int, rank: int, seconds: float) -> None:
        def send(found: Profile | None) -> None:
            values = None if found is None else profiles.to_values(found)
            self._send("profile-is", number=number, profile=values)

        self._stacks.profile(send, rank, seconds)

    def _send_standing(self, standing: list[Standing]) -> None:
        self._send("ranks-stand", ranks=[hangs.to_row(each) for each in standing])

    def _send_shares(self, shares: list[RankShare]) -> None:
        self._send("ranks-share", ranks=[slow.to_row(each) for each in shares])

    def _kill(self) -> None:
        self._loop.ranks.note_end()
        self._launcher.kill()
        self._commands.kill()
        self._loop.ranks.kill()
        self._loop.ranks.release()

    def _report(self) -> None:
        self._loop.read_events()
        self._loop.handle_lost_ranks()
        self._send("reported")

    def _clean_up(self) -> None:
        self._commands.kill()
        self._loop.ranks.kill()
        self._loop.ranks.release()
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
        self._send(
            "rank-ended",
            rank=end.rank,
            at_s=end.at_s,
            was_asked_to_end=end.was_asked_to_end,
            is_reported=end.is_reported,
            is_leaving=end.is_leaving,
            failure=failure._asdict(),
        )

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

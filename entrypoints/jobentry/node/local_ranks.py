"""The ranks of this node: what their wrappers report, and how they are stopped."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from typing import TYPE_CHECKING, Callable, NamedTuple

from jobentry.contract import journal, variables
from jobentry.contract.exits import MEMORY_GUESS, NOT_FOR_MEMORY, OUT_OF_MEMORY, Failure
from jobentry.contract.paths import NodePaths
from jobentry.log import last_lines, log_message
from jobentry.node import limits
from jobentry.node.memory_kills import Lately, MemoryKills, describe
from jobentry.node.rank_usage import RankProcesses, RankState, mib
from jobentry.rank import crash_file
from jobentry.system import linux

if TYPE_CHECKING:
    from jobentry.node import crashes

# Lines and bytes of a rank's log in its report; fewer for a rank that ended with 0, which is to
# blame only if it should not have ended.
_KEPT = ((20, 16384), (5, 1024))


# The largest process id that Linux assigns, and the largest exit code that is accepted.
_LAST_PROCESS, _MOST = 1 << 22, 1 << 31
# Seconds in which a script fails because a process that it has forked crashed.
_CRASH_S = 60.0
# Before the reason, if the kernel has killed something, but not the rank.
_OTHER_KILL = "; just before, the kernel killed a process in the control group of this rank"
# More memory than any machine has.
_MOST_KIB = 1 << 40


class End(NamedTuple):
    """How a rank's program ended.

    Args:
        signal: The signal that ended it; 0 for none.
        was_asked_to_end: Whether it had been asked to end, and so is not to blame.
        is_reported: Whether its wrapper reported it; False if the wrapper was killed.
        is_leaving: Whether its program still runs its exit handlers.
        at_s: When, by the clock of its node.
    """

    rank: int
    code: int
    signal: int
    was_asked_to_end: bool
    at_s: float
    message: str
    is_reported: bool = True
    is_leaving: bool = False


class RankFailure(NamedTuple):
    """How the ranks of a node failed.

    Args:
        at_s: When the first of them failed, by the clock of this node.
        is_kill: Whether a signal ended one of them, in the middle of whatever it was doing.
    """

    at_s: float
    is_kill: bool


class LocalRanks:
    """The ranks that mpirun started on this node."""

    def __init__(self, paths: NodePaths) -> None:
        self._paths = paths
        self._stopping = os.path.join(paths.node_dir, "stopping")
        self.wrappers: dict[int, int] = {}
        self._programs: dict[int, int] = {}
        self._memory_kills = MemoryKills()
        # The most memory, in MiB, that a process of a rank used which was killed.
        self._peaks: dict[int, float] = {}
        # When the wrappers and programs have started, by process id.
        self._start_ticks: dict[int, bytes] = {}
        self._failing: dict[int, End] = {}
        self.ends: dict[int, End] = {}
        # When this node asked a running rank to end, and the ranks that it killed.
        self._asked: dict[int, float] = {}
        self._killed: set[int] = set()
        # Called before ranks that run are signalled to end, or killed.
        self.before_end: Callable[[], None] = lambda: None
        # Returns the errors that devices of this node reported in the last seconds, in words.
        self.device_errors: Callable[[], str] = str

    @property
    def rank_failure(self) -> RankFailure | None:
        """How the ranks have failed; None if all have succeeded.

        A rank that is still running counts as killed, as it is about to be.
        """
        ended = [*self.ends.values(), *self._failing.values()]
        times = [end.at_s for end in ended if end.code]
        times += [time.time()] if self.running else []
        is_kill = bool(self.running) or any(end.signal for end in ended)
        return RankFailure(min(times), is_kill) if times else None

    @property
    def running(self) -> list[int]:
        """The ranks whose program has not ended."""
        return [rank for rank in self.wrappers if rank not in self.ends]

    def states(self) -> dict[int, RankState]:
        """Return the state of each rank; other threads may call this."""
        programs, ends = dict(self._programs), {**self._failing, **self.ends}
        return {
            rank: RankState(wrapper, programs[rank], self._kind_of_end(rank, ends.get(rank)))
            for rank, wrapper in dict(self.wrappers).items()
            if rank in programs
        }

    def _kind_of_end(self, rank: int, end: End | None) -> journal.State | None:
        if end is None:
            return journal.State.STOPPED if rank in self._killed else None
        if end.code == 0:
            return journal.State.ENDED
        was_asked = end.at_s >= self._asked.get(rank, math.inf)
        if was_asked or (end.was_asked_to_end and end.signal):
            return journal.State.STOPPED
        return journal.State.FAILED if end.is_reported else journal.State.LOST

    def handle_event(self, line: str) -> tuple[str, End | None]:
        """Handle a line from the FIFO of events; return its kind, and the end that it reports.

        Scripts can write to the FIFO too: an invalid line is ignored, and the returned kind is
        empty.
        """
        try:
            return self._handle_event(line)
        except (ValueError, IndexError, KeyError, OverflowError):
            return "", None

    def _handle_event(self, line: str) -> tuple[str, End | None]:
        kind, _, rest = line.partition(" ")
        if kind not in ("output", "start", "gone", "waits", "peak", "fail", "end"):
            return "", None
        if kind == "output":
            return kind, None
        if kind == "start":
            return (kind if self._note_start(rest) else ""), None
        if kind == "gone":
            rank = int(rest)
            self.ends[rank] = self._failing[rank]
            return kind, None
        if kind == "peak":
            return (kind if self._note_peak(rest) else ""), None
        if kind == "waits":
            rank_text, count, commands = rest.split(" ", 2)
            log_message(
                f"rank {int(rank_text)}: its script has ended, but it started processes that still"
                f" run ({int(count)}: {commands}); the rank waits for them"
            )
            return kind, None
        numbers = rest.split(" ", 5)
        end = End(
            rank=int(numbers[0]),
            code=int(numbers[1]),
            signal=int(numbers[2]),
            was_asked_to_end=numbers[3] == "1",
            at_s=float(numbers[4]),
            message=numbers[5],
            is_leaving=kind == "fail",
        )
        if end.rank not in self.wrappers or abs(end.code) > _MOST or not math.isfinite(end.at_s):
            return "", None
        # A failed rank still runs its exit handlers and must not be disturbed.
        (self._failing if kind == "fail" else self.ends)[end.rank] = end
        return kind, end

    def _note_peak(self, text: str) -> bool:
        """Note how much memory a killed rank had used; return whether the report is valid."""
        rank, peak_kib = (int(number) for number in text.split())
        if rank not in self.wrappers or not 0 <= peak_kib <= _MOST_KIB:
            return False
        self._peaks[rank] = peak_kib / 1024
        return True

    def _note_start(self, text: str) -> bool:
        """Note the rank that has started, and its processes; return whether the report is valid."""
        rank, wrapper, program = (int(number) for number in text.split())
        # Signals to the process ids 0, 1 and -1 would reach other processes.
        if rank < 0 or not all(1 < process <= _LAST_PROCESS for process in (wrapper, program)):
            return False
        self.wrappers[rank] = wrapper
        # Its launcher may start a rank again.
        self.ends.pop(rank, None)
        self._failing.pop(rank, None)
        self._peaks.pop(rank, None)
        self._asked.pop(rank, None)
        self._killed.discard(rank)
        self._programs[rank] = program
        for process in (wrapper, program):
            self._start_ticks[process] = linux.start_ticks(process)
        self._memory_kills.watch(wrapper)
        if os.path.exists(self._stopping):
            # The wrapper checked before the job was stopped, but its report arrived afterwards.
            self._asked[rank] = time.time()
            self._signal_group(wrapper, signal.SIGTERM)
        return True

    @property
    def missing(self) -> list[int]:
        """The ranks whose wrapper is gone without having reported their end."""
        return [rank for rank in self.running if not self._is_alive(self.wrappers[rank])]

    def lost(self) -> list[End]:
        """Treat missing ranks as killed, and return their ends."""
        ends = []
        for rank in self.missing:
            killed = End(
                rank,
                128 + signal.SIGKILL,
                signal.SIGKILL,
                False,
                time.time(),
                "",
                is_reported=False,
            )
            if rank not in self._failing:
                ends.append(killed)
            self.ends[rank] = self._failing.get(rank, killed)
            self._signal(self._programs[rank], signal.SIGKILL)
        return ends

    def stop(self) -> None:
        """Ask every rank to end; the wrappers stay, so that mpirun ends none of them early."""
        with open(self._stopping, "w", encoding="ascii"):
            pass
        self.forward_signal(signal.SIGTERM)

    def forward_signal(self, number: int) -> None:
        """Send a signal to every rank that is not ending."""
        if number == signal.SIGTERM:
            self.note_end()
            self._note_asked()
        for rank in self.running:
            if rank not in self._failing:
                # The wrapper's process group: the program and its children.
                self._signal_group(self.wrappers[rank], number)

    def _note_asked(self) -> None:
        for rank in self.running:
            if rank not in self._failing:
                self._asked.setdefault(rank, time.time())

    def kill_others(self) -> None:
        """End every rank that is not about to exit; the wrappers stay."""
        groups = {self.wrappers[rank] for rank in self.running if rank not in self._failing}
        for process in linux.processes():
            with contextlib.suppress(OSError, IndexError, ValueError):
                if process not in groups and int(linux.stat(process)[2]) in groups:
                    os.kill(process, signal.SIGKILL)

    def note_end(self) -> None:
        """Announce that the running ranks are about to be ended."""
        if self.running:
            self.before_end()

    def kill(self) -> None:
        """End every rank, and what it has started, at once."""
        self.note_end()
        self._note_asked()
        self._killed.update(self._asked)
        for rank, wrapper in self.wrappers.items():
            if rank not in self.ends or self._is_alive(wrapper):
                self._signal_group(wrapper, signal.SIGKILL)
            if rank not in self.ends:
                self._signal(self._programs[rank], signal.SIGKILL)

    def release(self) -> None:
        """Release the wrappers that stayed."""
        with contextlib.suppress(OSError):
            os.unlink(self._stopping)

    def failure(self, end: End, node: int, host: str) -> Failure:
        """Return the report on a rank that ended badly."""
        crash = self._crash(end) if end.code else None
        has_failed = end.code and not end.was_asked_to_end
        errors = self.device_errors() if has_failed else ""
        why_killed = self._why_killed(end) if has_failed else ""
        context = why_killed + (errors and f"; {errors}")
        return Failure(
            node=node,
            host=host,
            rank=end.rank,
            signal=end.signal or None,
            exit_code=end.code,
            message=_message(end, crash, context),
            last_lines=tuple(last_lines(self._paths.rank_log(end.rank), *_KEPT[end.code == 0])),
            stack_lines=crash.stack_lines if crash else (),
        )

    def _why_killed(self, end: End) -> str:
        """Return what the kernel's counter and limits say about the end of a rank."""
        wrapper = self.wrappers.get(end.rank, 0)
        lately = self._memory_kills.lately(wrapper)
        is_kill = end.code == 128 + signal.SIGKILL
        if lately is Lately.KILLED or (lately is Lately.KILLED_ON_MACHINE and is_kill):
            use = describe(self._memory_kills.limit_text(wrapper), self._used_mib())
            return f"{'' if is_kill else _OTHER_KILL}{OUT_OF_MEMORY}{use}"
        guess = NOT_FOR_MEMORY if lately is Lately.NOTHING else MEMORY_GUESS
        is_sigkill = end.signal == signal.SIGKILL
        return (guess if is_sigkill else "") + limits.of_cpu_time(end.signal)

    def _used_mib(self) -> dict[int, float]:
        """Return the memory of each rank: what it uses, or what it used when it was killed."""
        used = {
            rank: sum(mib(process.pages) for process in processes.values())
            for rank, processes in RankProcesses(self, self._paths).members().items()
        }
        return {**used, **self._peaks}

    def note_memory(self) -> None:
        """Note now and then how many processes the kernel has killed for lack of memory."""
        self._memory_kills.note()

    def _crash(self, end: End) -> crashes.Crash | None:
        """Return the crash that ended a rank, or a process of it; None if Python wrote none."""
        # Imported late, with all that reads stacks: most jobs have no crash.
        from jobentry.node import crashes

        folder = self._working_folder()
        wrapper = self.wrappers.get(end.rank, 0)
        candidates = crashes.of_file(crash_file.path_of(self._paths.node_dir, wrapper), folder)
        if not candidates and (end.signal or end.code - 128) in crashes.SIGNALS:
            candidates = crashes.of_log(self._paths.rank_log(end.rank), folder)
        crash = candidates[0] if candidates else None
        # A script may have replaced a process that crashed, and fail for another reason later.
        is_old = crash is not None and crash.process and end.at_s - crash.at_s > _CRASH_S
        return None if is_old else crash

    def _working_folder(self) -> str:
        """Return the folder in which the ranks start, as the wrappers read it."""
        with contextlib.suppress(OSError), open(self._paths.node_env, "rb") as file:
            return variables.load(file.read()).get("PWD") or self._paths.code
        return self._paths.code

    # -- the processes: an id may belong to another one by now ------------------------------------

    def _is_known(self, process: int) -> bool:
        """Whether this is still the process that was reported."""
        return linux.start_ticks(process) == self._start_ticks[process]

    def _is_alive(self, process: int) -> bool:
        """Whether a process exists and is not a zombie."""
        try:
            return linux.stat(process)[0] not in (b"Z", b"X") and self._is_known(process)
        except FileNotFoundError:
            return not os.path.isdir("/proc/self")
        except (OSError, IndexError):
            return False

    def _signal(self, process: int, number: int) -> None:
        with contextlib.suppress(OSError):
            if self._is_known(process):
                os.kill(process, number)

    def _signal_group(self, leader: int, number: int) -> None:
        """Signal the process group of ``leader``, or it alone when it leads none."""
        with contextlib.suppress(OSError):
            if not self._is_known(leader):
                return
            if os.getpgid(leader) == leader:
                os.killpg(leader, number)
            else:
                os.kill(leader, number)


def _message(end: End, crash: crashes.Crash | None, context: str) -> str:
    """Return why a rank ended, with the line at which it, or a process of it, crashed.

    Args:
        context: What the kernel's counter and the devices say, as the rest of a sentence.
    """
    why = end.message or _exit(end)
    if crash is None or not crash.place:
        return f"{why}{context}"
    from jobentry.node import crashes

    if end.signal in crashes.SIGNALS and not crash.process:
        return f"{why} in {crash.place}{context}"
    process = f"its process {crash.process}: " if crash.process else ""
    return f"{why}{context}; {process}{crash.reason} in {crash.place}"


def _exit(end: End) -> str:
    if not end.signal:
        return "ended with exit code %d" % end.code
    try:
        name = signal.Signals(end.signal).name
    except ValueError:
        name = "signal %d" % end.signal
    return f"killed by {name}"

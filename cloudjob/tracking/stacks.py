"""What the ranks of a running job execute: stacks that are equal are merged, the odd ones first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from cloudjob.errors import BackendError
from jobentry.contract.lists import ranges
from jobentry.contract.stacks import (
    Frame,
    NativeCall,
    ProcessStacks,
    Stacks,
    StacksError,
    ThreadStack,
    load,
)
from jobentry.contract.waits import OF_RANKS, cause_of
from jobentry.system.requests import STACKS, request


@dataclass(frozen=True, slots=True)
class StackGroup:
    """Threads with the same stack.

    Args:
        ranks: Their ranks, in order.
        nodes: The nodes of these ranks, in order.
        processes: Each with its id on its node.
        command: The command line of one of them; empty for programs of ranks.
        is_main: Whether these are main threads.
        waits_for_ranks: Whether the innermost call waits for other ranks.
        does: What the threads do, in words.
        frames: The innermost call first.
        problem: Why the stack is missing; empty if it is not.
        native: Calls of C and C++ code in one of the threads, the innermost first; approximate.
    """

    ranks: tuple[int, ...]
    nodes: tuple[int, ...]
    processes: tuple[int, ...]
    command: str
    is_main: bool
    waits_for_ranks: bool
    does: str
    frames: tuple[Frame, ...]
    problem: str = ""
    native: tuple[NativeCall, ...] = ()

    @property
    def who(self) -> str:
        """The ranks and the process as text: ``ranks 0-2,4 on node 1``."""
        text = _ranks_text(self.ranks)
        if len(self.nodes) == 1:
            text += f" on node {self.nodes[0]}"
        if self.command:
            many = len(self.processes)
            which = f"process {self.processes[0]}" if many == 1 else f"{many} processes"
            text += f", {which} ({self.command})"
        return text if self.is_main else f"{text}, another thread"


@dataclass(frozen=True, slots=True)
class JobStacks:
    """The stacks of a job.

    Args:
        at: When they were read, in seconds since 1970.
        groups: Those that do not wait for other ranks first, small groups before large ones.
        silent: The nodes that did not answer in time.
        processes: The stacks as they were read.
    """

    at: float
    groups: tuple[StackGroup, ...]
    silent: tuple[int, ...]
    processes: tuple[ProcessStacks, ...]

    @property
    def odd_ranks(self) -> tuple[int, ...]:
        """The ranks that others may wait for: they do not wait, and at least half of all do."""
        waiting = {
            rank for group in self._programs if group.waits_for_ranks for rank in group.ranks
        }
        others = {rank for group in self._programs for rank in group.ranks} - waiting
        return tuple(sorted(others)) if others and len(waiting) >= len(others) else ()

    @property
    def waiting_ranks(self) -> tuple[int, ...]:
        """The ranks that wait for others."""
        groups = (group for group in self._programs if group.waits_for_ranks)
        return tuple(sorted({rank for group in groups for rank in group.ranks}))

    @property
    def conclusion(self) -> str:
        """Which ranks wait, and which do not, as a sentence; empty if that tells nothing."""
        if not self.odd_ranks:
            return ""
        wait = "waits" if len(self.waiting_ranks) == 1 else "wait"
        do = "does" if len(self.odd_ranks) == 1 else "do"
        waiting, odd = _ranks_text(self.waiting_ranks), _ranks_text(self.odd_ranks)
        return f"{waiting.capitalize()} {wait} for others; {odd} {do} not."

    @property
    def _programs(self) -> list[StackGroup]:
        return [group for group in self.groups if group.is_main and not group.command]


def read(
    ask: Callable[[bytes], bytes],
    handle: str,
    rank: int | None,
    *,
    with_threads: bool,
    with_native: bool,
) -> JobStacks:
    """Return the stacks of a running job.

    Args:
        ask: Returns the answer of its head to a request.
        rank: Only those of this rank.

    Raises:
        BackendError: The nodes cannot be asked, or do not answer.
    """
    answer = ask(request(STACKS, with_threads=with_threads, with_native=with_native))
    try:
        stacks = load(answer)
    except StacksError as error:
        raise BackendError(f"reading the stacks of {handle}: {error}") from error
    return merged(stacks, rank)


def merged(stacks: Stacks, rank: int | None = None) -> JobStacks:
    """Return stacks with equal ones merged.

    Args:
        rank: Only those of this rank.
    """
    processes = tuple(item for item in stacks.processes if rank in (None, item.rank))
    groups: dict[object, list[tuple[ProcessStacks, ThreadStack]]] = {}
    for process in processes:
        for thread in process.threads:
            groups.setdefault(_key(process, thread), []).append((process, thread))
    groups_of_stacks = [_group(members) for members in groups.values()]
    groups_of_stacks.sort(
        key=lambda group: (
            bool(group.command),
            not group.is_main,
            group.waits_for_ranks,
            len(group.processes),
            group.ranks,
        )
    )
    return JobStacks(stacks.at, tuple(groups_of_stacks), stacks.silent, processes)


def _ranks_text(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {ranges(ranks)}"


def _key(process: ProcessStacks, thread: ThreadStack) -> object:
    is_main = thread.thread == process.process
    # Descendants of one rank that differ only in their command line are shown apart.
    command = "" if process.is_program else process.command
    calls = tuple((frame.file, frame.line, frame.function) for frame in thread.frames)
    # Native calls are approximate: they tell threads apart only if nothing else does.
    native = () if calls else thread.native
    return command, is_main, calls, native, cause_of(thread).text, process.problem


def _group(members: Iterable[tuple[ProcessStacks, ThreadStack]]) -> StackGroup:
    members = list(members)
    process, thread = members[0]
    return StackGroup(
        ranks=tuple(sorted({item.rank for item, _ in members})),
        nodes=tuple(sorted({item.node for item, _ in members})),
        processes=tuple(item.process for item, _ in members),
        command="" if process.is_program else process.command or "?",
        is_main=thread.thread == process.process,
        waits_for_ranks=cause_of(thread).wait in OF_RANKS,
        does=cause_of(thread).text,
        frames=thread.frames,
        problem=process.problem,
        native=thread.native,
    )

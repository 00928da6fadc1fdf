"""Reads the stack of a rank many times a second, and counts. The rank is not stopped for it."""

from __future__ import annotations

import contextlib
import linecache
import time
from collections import Counter
from typing import TYPE_CHECKING, Sequence

from jobentry.contract.profiles import (
    MOST_NAMES,
    MOST_PIECE_S,
    MOST_STACKS,
    RATE_HZ,
    CountedStack,
    Profile,
)
from jobentry.contract.stacks import MOST_FRAMES, Frame, ThreadStack
from jobentry.contract.waits import Wait, cause_of, is_ours, of_script
from jobentry.node.rank_stacks import relative, source_line, state_of, uses_device
from jobentry.node.rank_usage import RankProcesses
from jobentry.secrets import masking
from jobentry.stacks.memory import UnreadableError
from jobentry.stacks.python_stacks import MainThread
from jobentry.system import linux

if TYPE_CHECKING:
    from jobentry.contract.paths import NodePaths
    from jobentry.node.local_ranks import LocalRanks
    from jobentry.stacks.python_stacks import RawFrame

# A look during which the stack changed is repeated at once.
_TRIES = 4


def take_profile(
    ranks: LocalRanks, paths: NodePaths, node: int, rank: int, seconds: float
) -> Profile | None:
    """Return a profile of the main thread of a rank; None if the rank does not run on this node.

    Args:
        seconds: At most ``MOST_PIECE_S`` count.
    """
    state = ranks.states().get(rank)
    if state is None or state.end:
        return None
    members = RankProcesses(ranks, paths).members().get(rank, {})
    processes = sorted(members, key=lambda number: (number != state.program, number))
    target, problem = _opened(processes)
    if target is None:
        return Profile(rank, node, 0.0, 0.0, 0, (), (), problem=problem)
    with contextlib.closing(target):
        sampler = _Sampler(target)
        sampler.run(min(seconds, MOST_PIECE_S))
        return sampler.profile(rank, node)


def _opened(processes: Sequence[int]) -> tuple[MainThread | None, str]:
    """Return the first of these processes that can be read, or else why the first cannot."""
    problem = ""
    for process in processes:
        try:
            target = MainThread(process)
        except UnreadableError as error:
            problem = problem or str(error)
            continue
        if target.runs_python:
            return target, ""
        target.close()
        problem = problem or "it has not begun to run Python, or is at its end"
    return None, problem or "it has no process"


class _Sampler:
    """Looks at one thread again and again."""

    def __init__(self, target: MainThread) -> None:
        self._target = target
        self._frames: dict[tuple[int, int], Frame] = {}
        self._sources: dict[Frame, str] = {}
        self._counts: Counter[tuple[tuple[Frame, ...], Wait]] = Counter()
        self._missed = 0
        self._has_ended = False
        self._seconds = self._cpu_s = 0.0
        self._has_device = uses_device(target.process)
        self._folder = linux.working_folder(target.process)

    def run(self, seconds: float) -> None:
        """Look for so long, or until the process ends."""
        began_s, cpu_s = time.monotonic(), time.thread_time()
        due_s = began_s
        while time.monotonic() < began_s + seconds and not self._has_ended:
            self._look()
            # A node that is busy skips looks; it does not make up for them later.
            due_s = max(due_s + 1 / RATE_HZ, time.monotonic())
            time.sleep(max(0.0, min(due_s, began_s + seconds) - time.monotonic()))
        self._seconds = time.monotonic() - began_s
        self._cpu_s = time.thread_time() - cpu_s
        linecache.clearcache()

    def profile(self, rank: int, node: int) -> Profile:
        """Return what was seen."""
        indices: dict[Frame, int] = {}
        stacks = []
        for (frames, wait), count in self._counts.most_common(MOST_STACKS):
            for frame in frames:
                indices.setdefault(frame, len(indices))
            if len(indices) > MOST_NAMES:
                break
            stacks.append(CountedStack(tuple(indices[frame] for frame in frames), wait, count))
        looks = sum(each.looks for each in stacks)
        missed = self._missed + sum(self._counts.values()) - looks
        frames = tuple(indices)[:MOST_NAMES]
        return Profile(
            rank,
            node,
            self._seconds,
            self._cpu_s,
            missed,
            frames,
            tuple(stacks),
            self._has_ended,
        )

    def _look(self) -> None:
        for _ in range(_TRIES):
            try:
                calls = self._target.steady_calls()
                frames = tuple(self._frame(raw) for raw in calls[:MOST_FRAMES])
            except UnreadableError:
                continue
            self._counts[tuple(of_script(frames)), self._wait(frames)] += 1
            return
        self._missed += 1
        self._has_ended = not linux.start_ticks(self._target.process)

    def _wait(self, frames: Sequence[Frame]) -> Wait:
        process = self._target.process
        state, waits_in = state_of(process, process)
        named = [frame for frame in frames if not is_ours(frame.file)]
        if named:
            named[0] = named[0]._replace(source=self._source(named[0]))
        thread = ThreadStack(process, state, waits_in, False, tuple(named), self._has_device)
        return cause_of(thread).wait

    def _source(self, frame: Frame) -> str:
        if frame not in self._sources:
            self._sources[frame] = source_line(frame.file, frame.line, self._folder)
        return self._sources[frame]

    def _frame(self, raw: RawFrame) -> Frame:
        key = (raw.code, raw.instruction)
        frame = self._frames.get(key)
        if frame is None:
            file, line, function = self._target.frame(raw)
            frame = self._frames[key] = Frame(
                masking.hide(relative(file, self._folder)), line, masking.hide(function)
            )
        return frame

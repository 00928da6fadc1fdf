"""Where a rank of a running job spends its time, from its stacks in a row of short pieces."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cloudjob.errors import BackendError, UsageError
from cloudjob.model import flame_graph
from cloudjob.model.flame_graph import Call
from jobentry.contract.profiles import MOST_PIECE_S, Profile, ProfileError, load
from jobentry.contract.waits import Wait
from jobentry.system.requests import PROFILE, request

if TYPE_CHECKING:
    from cloudjob.backends.base import Backend

# A shorter rest of the time is not worth another request.
_LEAST_S = 0.05
# What a rank that is not computing waits for, in words.
WAITS = {
    Wait.NOTHING: "",
    Wait.STOPPED: "stopped",
    Wait.RANKS: "waits for other ranks",
    Wait.START: "waits for other ranks to start",
    Wait.DEVICE: "waits for its device",
    Wait.DATA: "waits for its data loader",
    Wait.LOCK: "waits for a lock or a thread",
    Wait.CHILD: "waits for a child process",
    Wait.FILE: "reads or writes a file",
    Wait.NETWORK: "waits for the network",
    Wait.SLEEP: "sleeps",
    Wait.INPUT: "waits for input",
    Wait.EVENTS: "waits for events",
    Wait.KERNEL: "waits in the kernel",
    Wait.OTHER: "waits",
}


@dataclass(frozen=True, slots=True)
class JobProfile:
    """Where the main thread of a rank spent its time.

    Args:
        job: The id of the job.
        seconds: For how long the rank was looked at.
        cpu_s: The CPU time that its node took for that.
        looks: How often its stack was seen.
        missed: How often it was not, because it changed meanwhile.
        has_ended: Whether the rank ended, or its job no longer answered, before the time was over.
        stacks: Each stack, the outermost call first, with what it waits for and how often it was
            seen.
    """

    job: str
    rank: int
    node: int
    at: float
    seconds: float
    cpu_s: float
    looks: int
    missed: int
    has_ended: bool
    stacks: tuple[tuple[tuple[Call, ...], Wait, int], ...]

    @property
    def waits(self) -> dict[str, float]:
        """What the rank waits for, and for which share of the time; computing is ``computes``."""
        counts: Counter[str] = Counter()
        for _, wait, looks in self.stacks:
            counts[WAITS[wait] or "computes"] += looks
        return {name: looks / self.looks for name, looks in counts.most_common()}

    @property
    def functions(self) -> list[tuple[Call, float]]:
        """The innermost calls, by function, with their shares of the time, the largest first."""
        counts: Counter[tuple[str, str]] = Counter()
        lines: dict[tuple[str, str], Counter[int]] = {}
        for calls, _, looks in self.stacks:
            if calls:
                key = (calls[-1].file, calls[-1].function)
                counts[key] += looks
                lines.setdefault(key, Counter())[calls[-1].line] += looks
        return [
            (Call(file, lines[file, name].most_common(1)[0][0], name), looks / self.looks)
            for (file, name), looks in counts.most_common()
        ]

    @property
    def cpu_percent(self) -> float:
        """What looking cost the node, in percent of one CPU."""
        return 100 * self.cpu_s / self.seconds if self.seconds else 0.0

    def html(self) -> str:
        """Return a page with a flame graph, which loads nothing from anywhere."""
        title = f"{self.job}, rank {self.rank} on node {self.node}"
        return flame_graph.page(title, self.notes, self._rows())

    @property
    def notes(self) -> list[str]:
        """How the profile was taken, and what it cost, as sentences."""
        notes = [
            f"{self.looks} looks in {self.seconds:.1f} s at the main thread.",
            "The rank was neither stopped nor signalled; looking took "
            f"{self.cpu_percent:.1f} % of one CPU of its node.",
        ]
        if self.missed:
            share = 100 * self.missed / (self.looks + self.missed)
            notes.append(f"{share:.1f} % of the looks saw no whole stack and are left out.")
        if self.has_ended:
            notes.append("The rank ended meanwhile, or its job no longer answered.")
        return notes

    def _rows(self) -> Iterator[tuple[Sequence[Call], str, int]]:
        for calls, wait, looks in self.stacks:
            yield calls, WAITS[wait], looks


def take(backend: Backend[object], handle: str, job: str, rank: int, seconds: float) -> JobProfile:
    """Return a profile of a rank of a running job.

    Args:
        seconds: For how long to look at it.

    Raises:
        UsageError: The backend cannot reach its nodes.
        BackendError: The nodes cannot be asked, do not answer, or cannot read the rank.
    """
    at = time.time()
    pieces: list[Profile] = []
    while (left_s := seconds - sum(each.seconds for each in pieces)) > _LEAST_S:
        try:
            piece = _piece(backend, handle, rank, min(left_s, MOST_PIECE_S))
        except BackendError:
            if not pieces:
                raise
            piece = pieces[-1]._replace(problem="it does not answer")
        if piece.problem and not pieces:
            raise BackendError(f"profiling rank {rank} of {handle}: {piece.problem}")
        if piece.problem:
            # It could be read before, so what was seen until then is the profile.
            pieces[-1] = pieces[-1]._replace(has_ended=True)
            break
        pieces.append(piece)
        if piece.has_ended:
            break
    return merged(job, at, pieces)


def merged(job: str, at: float, pieces: Sequence[Profile]) -> JobProfile:
    """Return the pieces of a profile as one."""
    counts: Counter[tuple[tuple[Call, ...], Wait]] = Counter()
    for piece in pieces:
        calls = [Call(frame.file, frame.line, frame.function) for frame in piece.frames]
        for stack in piece.stacks:
            counts[tuple(calls[index] for index in reversed(stack.frames)), stack.wait] += (
                stack.looks
            )
    return JobProfile(
        job,
        pieces[0].rank,
        pieces[0].node,
        at,
        sum(each.seconds for each in pieces),
        sum(each.cpu_s for each in pieces),
        sum(counts.values()),
        sum(each.missed for each in pieces),
        any(each.has_ended for each in pieces),
        tuple((calls, wait, looks) for (calls, wait), looks in counts.most_common()),
    )


def _piece(backend: Backend[object], handle: str, rank: int, seconds: float) -> Profile:
    try:
        answer = backend.ask(handle, request(PROFILE, rank=rank, seconds=round(seconds, 3)))
    except UsageError as error:
        hint = "`cloudjob top` shows on every platform where each rank is, and how much it waits"
        raise UsageError(error.message, hint=f"{error.hint}; {hint}") from error
    try:
        return load(answer)
    except ProfileError as error:
        raise BackendError(f"profiling rank {rank} of {handle}: {error}") from error

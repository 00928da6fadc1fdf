"""The journals of a job's nodes: phases, ranks and resources.

Times are from the clock of each node.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

from cloudjob.errors import BackendError, StoreError
from cloudjob.model import times
from cloudjob.model.progress import log_once
from cloudjob.model.status import Hang, Phase, SlowRanks
from cloudjob.store.files import logged_if_unreadable
from cloudjob.store.parallel import call_with_timeout, in_parallel
from cloudjob.tracking import log
from cloudjob.tracking.access import JobAccess
from cloudjob.tracking.verdict import hang_of, slow_of
from jobentry.contract import hangs, journal, slow
from jobentry.contract.journal import Device, RankSample, Sample
from jobentry.contract.paths import JobPaths

# Seconds to wait for the ends of the logs of a job's nodes.
_LOG_ENDS_S = 5.0
# The head repeats which ranks are slow every minute; an older report may not be true any more.
_SLOW_FRESH_S = 600.0
# Over how much time the waiting of a rank is averaged, and over how many samples at most.
_RECENT_S, _MOST_RECENT = 60.0, 64
# The most entries of a job and ranks in them that are read, of about 200 bytes each in memory.
# Compressed lines that others have stored may stand for any number of them.
_MOST_VALUES = 5_000_000


class RankPoint(NamedTuple):
    """The resources that a rank used at one moment.

    Args:
        at: Seconds since 1970.
    """

    at: float
    node: int
    sample: RankSample


# The values of a series: its name, the field of a sample, and the index in the field.
_SERIES = (
    ("cpu_percent", "own_cpu", 0),
    ("cpu_held_back_percent", "own_cpu", 1),
    ("machine_cpu_user_percent", "cpu", 0),
    ("machine_cpu_system_percent", "cpu", 1),
    ("machine_cpu_wait_percent", "cpu", 2),
    ("memory_mib", "memory", 0),
    ("memory_limit_mib", "memory", 1),
    ("pressure_cpu_percent", "pressure", 0),
    ("pressure_memory_percent", "pressure", 1),
    ("pressure_io_percent", "pressure", 3),
    ("disk_read_kib_s", "disk", 0),
    ("disk_written_kib_s", "disk", 1),
    ("network_received_kib_s", "network", 0),
    ("network_sent_kib_s", "network", 1),
    ("disk_used_mib", "space", 0),
    ("disk_size_mib", "space", 1),
    ("rdma_received_kib_s", "rdma", 0),
    ("rdma_sent_kib_s", "rdma", 1),
)
_DEVICE_FIELDS = Device._fields[2:]


def series(samples: Iterable[Sample]) -> list[tuple[str, tuple[float | None, ...]]]:
    """Return the values of the samples by name, without names that no sample has."""
    columns: dict[str, list[float | None]] = {}
    rows = tuple(samples)
    for name, field, place in _SERIES:
        lists = [getattr(sample, field) for sample in rows]
        columns[name] = [numbers[place] if numbers else None for numbers in lists]
    columns["oom_kills"] = [sample.oom_kills for sample in rows]
    for number, sample in enumerate(rows):
        for device in sample.devices:
            for field in _DEVICE_FIELDS:
                name = f"{device.kind}{device.number}_{field}"
                column = columns.setdefault(name, [None] * len(rows))
                column[number] = getattr(device, field)
    return [
        (name, tuple(values))
        for name, values in columns.items()
        if any(value is not None for value in values)
    ]


class Journals:
    """The journals of one job's nodes so far; ``add`` adds lines.

    To follow a running job: ``job.pieces(follow=True, on_journal=journals.add)``. One thread may
    add lines while others read.

    Args:
        is_short: Keep only the last sample of each node, for a job that is followed for weeks.
    """

    def __init__(self, *, is_short: bool = False) -> None:
        self._is_short = is_short
        self._room = _MOST_VALUES
        self._phases: dict[tuple[int, str, float], journal.Phase] = {}
        self._samples: dict[int, list[Sample]] = {}
        # What the head reported last, and which node that was.
        self._hang: tuple[int, hangs.Hang] | None = None
        self._slow: tuple[int, slow.Slow] | None = None

    def add(self, node: int, lines: Iterable[bytes]) -> None:
        """Add lines of the journal of ``node``; damaged lines are skipped."""
        for line in lines:
            entry, is_full = journal.load(line), self._room <= 0
            if is_full:
                log_once("the journals of the nodes are long: only their last samples are kept")
            self._room -= 0 if self._is_short else _values_of(entry)
            if isinstance(entry, journal.Phase):
                key = node, entry.name, entry.started_at
                if not is_full or key in self._phases:
                    self._phases[key] = entry
            elif isinstance(entry, hangs.Hang):
                self._hang = (node, entry)
            elif isinstance(entry, slow.Slow):
                self._slow = (node, entry)
            elif entry is not None:
                self._add_sample(node, entry, is_full=is_full)

    def _add_sample(self, node: int, sample: Sample, *, is_full: bool) -> None:
        samples = self._samples.setdefault(node, [])
        if self._is_short or is_full:
            samples[-1:] = [sample]
        else:
            samples.append(sample)

    def add_missing(self, other: Journals) -> None:
        """Add the journals in ``other`` of nodes that are missing here."""
        missing = other.nodes - self.nodes
        if other._hang and other._hang[0] in missing:
            self._hang = other._hang
        if other._slow and other._slow[0] in missing:
            self._slow = other._slow
        self._phases.update({key: each for key, each in other._phases.items() if key[0] in missing})
        self._samples.update(
            {node: each for node, each in other._samples.items() if node in missing}
        )

    @property
    def last_hang(self) -> hangs.Hang | None:
        """How the job hung last, even if it moves again; None if it never hung."""
        return self._hang[1] if self._hang else None

    @property
    def hang(self) -> Hang | None:
        """How the job hangs, as its head reported it last; None if it does not."""
        return hang_of(self.last_hang)

    def hang_at(self, now_s: float) -> Hang | None:
        """Return how a running job hangs, and for how long at a time; None if it does not.

        Args:
            now_s: The time, in seconds since 1970.
        """
        hang = self.last_hang
        if hang is None or now_s <= hang.at:
            return hang_of(hang)
        # The head repeats its reports only after 10, 20, 40 … minutes.
        return hang_of(hang._replace(at=now_s, lasted_s=hang.lasted_s + now_s - hang.at))

    def slow_at(self, now_s: float) -> SlowRanks | None:
        """Return which ranks slow a running job down at a time; None if none stands out.

        Args:
            now_s: The time, in seconds since 1970.
        """
        if self._slow is None or now_s - self._slow[1].at > _SLOW_FRESH_S:
            return None
        return slow_of(self._slow[1])

    @property
    def nodes(self) -> frozenset[int]:
        """The nodes that have recorded anything."""
        return frozenset(self._samples) | {node for node, _, _ in list(self._phases)}

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases of all nodes by start time; ``ended_at`` is None until one has ended."""
        ordered = sorted(
            dict(self._phases).items(), key=lambda item: (item[1].started_at, item[0][0])
        )
        return tuple(
            Phase(
                node=node,
                name=phase.name,
                started_at=times.rfc3339(phase.started_at),
                ended_at=None if phase.ended_at is None else times.rfc3339(phase.ended_at),
                done_bytes=phase.done_bytes,
                total_bytes=phase.total_bytes,
            )
            for (node, _, _), phase in ordered
        )

    @property
    def current_phases(self) -> Mapping[int, journal.Phase]:
        """The last phase of each node that has not ended."""
        phase_of: dict[int, journal.Phase] = {}
        for (node, _, started_at), phase in list(self._phases.items()):
            is_later = node not in phase_of or started_at >= phase_of[node].started_at
            if phase.ended_at is None and is_later:
                phase_of[node] = phase
        return phase_of

    @property
    def resources(self) -> Mapping[int, tuple[Sample, ...]]:
        """The samples of each node, oldest first."""
        return {node: tuple(samples) for node, samples in sorted(dict(self._samples).items())}

    def waits_percent(self, rank: int) -> float | None:
        """Return for how much of the last minute a rank waited for others; None if not known."""
        points = self.ranks.get(rank, ())[-_MOST_RECENT:]
        percentages = [
            each.sample.waits_percent
            for each in points
            if each.sample.waits_percent is not None and points[-1].at - each.at < _RECENT_S
        ]
        return sum(percentages) / len(percentages) if percentages else None

    @property
    def running(self) -> list[RankPoint]:
        """The last sample of each rank that has not ended."""
        return [
            RankPoint(samples[-1].at, node, each)
            for node, samples in self.resources.items()
            for each in samples[-1].ranks
            if each.state not in journal.ENDS
        ]

    @property
    def silent_s(self) -> float:
        """Seconds since any running rank has printed something; 0 if none runs."""
        return min((each.sample.quiet_s for each in self.running), default=0)

    @property
    def ranks(self) -> Mapping[int, tuple[RankPoint, ...]]:
        """The samples of each rank, oldest first."""
        points_of: dict[int, list[RankPoint]] = {}
        for node, samples in self.resources.items():
            for sample in samples:
                for each in sample.ranks:
                    points_of.setdefault(each.rank, []).append(RankPoint(sample.at, node, each))
        return {rank: tuple(points) for rank, points in sorted(points_of.items())}


def _values_of(entry: journal.Entry | None) -> int:
    """Return how many values an entry has that may stand for few bytes."""
    if isinstance(entry, Sample):
        return 1 + len(entry.ranks)
    if isinstance(entry, slow.Slow):
        return 1 + len(entry.ranks) + len(entry.nodes)
    groups = entry.groups if isinstance(entry, hangs.Hang) else ()
    return 1 + sum(len(group.ranks) + len(group.nodes) for group in groups)


def read(access: JobAccess, *, has_ended: bool) -> Journals:
    """Return the journals of a job's nodes: the stored ones, or else those in its log.

    Raises:
        CloudJobError: Neither can be read.
    """
    result = Journals()
    if has_ended:
        _add_stored(result, access)
    if len(result.nodes) < access.record.nodes:
        rest = Journals()
        try:
            for _ in log.pieces(log.read(access, None, follow=False), on_journal=rest.add):
                pass
        except BackendError:
            # The log may be gone while the stored journals still exist.
            if not result.nodes:
                raise
        result.add_missing(rest)
    return result


def _add_stored(result: Journals, access: JobAccess) -> None:
    """Add the journals in the store; a node that was killed has not stored its own."""

    def load(node: int) -> None:
        with suppress(StoreError), logged_if_unreadable():
            key = JobPaths(access.record.job).journal(node)
            data = access.store.get_bytes(key, limit_bytes=journal.LIMIT_BYTES)
            result.add(node, journal.unpack(data))

    in_parallel(load, range(access.record.nodes), abort=access.store.abort)


def at_log_ends(access: JobAccess) -> Journals:
    """Return the journals at the ends of the logs of a running job."""
    result = Journals()

    def load() -> None:
        for node, data in access.backend.log_ends(access.record.handle):
            result.add(node, journal.split(data)[1])

    with suppress(BackendError, TimeoutError):
        call_with_timeout(_LOG_ENDS_S, load)
    return result

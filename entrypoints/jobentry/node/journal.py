"""Write the journal of this node: its phases, and samples of the resources in use.

A thread takes a sample every few seconds. The interval depends on the size of a sample and on the
CPU time that it takes, so that the journal stays small and the node free for the job (ADR 45).
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Callable, Iterator, Sequence

from jobentry.contract import journal
from jobentry.contract.journal import Phase, RankSample, Sample
from jobentry.log import log_message

if TYPE_CHECKING:
    from jobentry.contract.paths import NodePaths
    from jobentry.node.accelerators import Accelerators
    from jobentry.node.local_ranks import LocalRanks
    from jobentry.node.log_store import LogStore
    from jobentry.node.rank_usage import RankProcesses
    from jobentry.node.standing import StandingRanks

# The interval between two samples: a tenth of the job's age, within these limits, so that even a
# short job has some.
MIN_PERIOD_S = 1.0
PERIOD_S = 5.0
_PERIOD_SHARE = 0.1
# How many bytes may be written at once, and how many a second: in the first hour, and at least. In
# between, the rate falls as the job ages.
BURST_BYTES = 20_000
RATE_BYTES = 40.0
MIN_RATE_BYTES = 5.0
_HOUR_S = 3600.0
# The minimum interval between two lines with only the time, while ranks write output, and the share
# of the journal's bytes that these lines may take.
TIME_PERIOD_S = 2.0
_TIME_SHARE = 1 / 5
# The share of one CPU that sampling may use.
_CPU_SHARE = 0.003
# How long the end of a job may wait for a sample that hangs in a driver, and for the store.
_JOIN_S = 1.0
STORE_LIMIT_S = 5.0


class Transfer:
    """A running phase, with the number of bytes transferred so far; any thread may use it."""

    def __init__(self, name: str, started_at: float | None = None) -> None:
        self.name = name
        self.started_at = time.time() if started_at is None else started_at
        self.ended_at: float | None = None
        self.total_bytes = 0
        self._lock = threading.Lock()
        self._done_bytes = self._written_bytes = 0

    def add(self, moved_bytes: int) -> None:
        """Count transferred bytes."""
        with self._lock:
            self._done_bytes += moved_bytes

    @property
    def has_moved(self) -> bool:
        """Whether bytes were added since the last ``phase``."""
        return self._done_bytes != self._written_bytes

    def phase(self) -> Phase:
        """Return its present state as an entry of the journal."""
        done_bytes = self._written_bytes = self._done_bytes
        total_bytes = max(done_bytes, self.total_bytes)
        return Phase(
            self.name, self.started_at, self.ended_at, time.time(), done_bytes, total_bytes
        )


class Journal:
    """The journal of this node.

    Args:
        write: Writes the line of an entry to the node's log; None if nothing reads that log.
    """

    def __init__(self, write: Callable[[bytes], None] | None = None) -> None:
        # The log to store with the journal.
        self.log_store: LogStore | None = None
        self._write = write
        self._lock = threading.Lock()
        self._begun_s = time.monotonic()
        self._lines: list[bytes] = []
        self._spent_bytes = 0
        self._time_due_s = 0.0
        self._folder = "/"
        self._open: dict[str, Transfer] = {}
        self._phases: dict[str, Phase] = {}
        self._ranks: RankProcesses | None = None
        self._standing: StandingRanks | None = None
        # The devices of this node at the last sample.
        self.devices: tuple[journal.Device, ...] = ()
        self._accelerators: Accelerators | None = None
        self._make_standing: Callable[[], StandingRanks] | None = None
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="journal", daemon=True)

    # -- phases -----------------------------------------------------------------------------------

    @property
    def phases(self) -> list[Phase]:
        """The last phase of each name so far; one that is running has no end."""
        with self._lock:
            phases_by_name = {
                **self._phases,
                **{name: each.phase() for name, each in self._open.items()},
            }
        return sorted(phases_by_name.values(), key=lambda phase: phase.started_at)

    def begin(self, name: str, started_at: float | None = None) -> Transfer:
        """Begin a phase, by default now."""
        transfer = Transfer(name, started_at)
        with self._lock:
            self._open[name] = transfer
        self.add(transfer.phase())
        return transfer

    def end(self, name: str) -> None:
        """End a phase; do nothing if it has not begun or has already ended."""
        with self._lock:
            transfer = self._open.pop(name, None)
        if transfer is not None:
            self.add_transfer(transfer)

    @contextlib.contextmanager
    def during(self, name: str) -> Iterator[Transfer]:
        """Record the phase ``name`` around a block."""
        transfer = self.begin(name)
        try:
            yield transfer
        finally:
            self.end(name)

    def add_transfer(self, transfer: Transfer) -> None:
        """Record a phase that ends now."""
        transfer.ended_at = max(transfer.started_at, time.time())
        phase = transfer.phase()
        with self._lock:
            self._phases[transfer.name] = phase
        self.add(phase)

    # -- samples ----------------------------------------------------------------------------------

    def start(self, folder: str = "/") -> None:
        """Start sampling; if no thread can be started, there are no samples.

        Args:
            folder: The node's folder: whether its disk is full is recorded.
        """
        self._folder = folder
        with contextlib.suppress(RuntimeError, MemoryError):
            self._thread.start()

    def watch(self, ranks: LocalRanks, paths: NodePaths) -> None:
        """Sample these ranks as well."""
        from jobentry.node.rank_usage import RankProcesses

        self._ranks = RankProcesses(ranks, paths)

    def look_for_hangs(self, make: Callable[[], StandingRanks]) -> None:
        """Have the thread that samples look at the places of the ranks as well.

        Args:
            make: Called in that thread at its first look: the modules take a while to import.
        """
        self._make_standing = make

    def _wait(self, pause_s: float) -> bool:
        """Wait for the next sample, and look at the places of the ranks meanwhile.

        Returns:
            Whether the journal has ended.
        """
        due_s = time.monotonic() + pause_s
        while True:
            pause_s = max(0.0, due_s - time.monotonic())
            if self._make_standing is not None:
                looks_s = self._standing.pause_s if self._standing else MIN_PERIOD_S
                pause_s = min(pause_s, looks_s)
            has_ended = self._has_ended.wait(pause_s)
            if has_ended or time.monotonic() >= due_s:
                return has_ended
            self._look()

    def _look(self) -> None:
        if self._make_standing is None:
            return
        try:
            self._standing = self._standing or self._make_standing()
            self._standing.look()
        except Exception as error:  # noqa: BLE001 (the job goes on, and so do samples)
            self._make_standing = self._standing = None
            log_message("looking for hangs: %s" % (str(error) or type(error).__name__))

    def _follow(self) -> None:
        # An error here must not affect the job; sampling only stops.
        with contextlib.suppress(Exception):
            from jobentry.node import accelerators
            from jobentry.node.resources import Resources

            resources = Resources(folder=self._folder)
            self._accelerators = devices = accelerators.find()
            resources.rates()
            cost_s = 0.0
            has_ended = False
            while not has_ended:
                # The last sample, at the end, shows how the ranks ended.
                age_s = time.monotonic() - self._begun_s
                has_ended = self._wait(pause_s(age_s, self._spent_bytes, cost_s))
                begun_s = time.thread_time()
                ranks = self._rank_samples()
                used = resources.rates()
                self.devices = used["devices"] = devices.read()
                self.add(Sample(at=time.time(), ranks=ranks, **used))
                for transfer in list(self._open.values()):
                    if transfer.has_moved:
                        self.add(transfer.phase())
                cost_s = time.thread_time() - begun_s

    def _rank_samples(self) -> tuple[RankSample, ...]:
        samples = self._ranks.sample() if self._ranks is not None else ()
        if self._standing is None:
            return samples
        recent = self._standing.recent()
        unknown = (None, "")
        return tuple(
            each._replace(waits_percent=percent, place=place)
            for each in samples
            for percent, place in (recent.get(each.rank, unknown),)
        )

    def device_errors(self) -> str:
        """Return the errors that devices reported in the last seconds; empty if there were none."""
        return self._accelerators.recent_errors() if self._accelerators is not None else ""

    # -- lines ------------------------------------------------------------------------------------

    def mark_time(self) -> None:
        """Write the time to the log if the last line with a time is too old."""
        now_s = time.monotonic()
        if self._write is None or now_s < self._time_due_s:
            return
        line = journal.time_mark(time.time())
        self._time_due_s = now_s + time_period_s(now_s - self._begun_s, len(line))
        with self._lock:
            self._spent_bytes += len(line)
        self._write(line)

    def add(self, entry: journal.Entry) -> None:
        """Write an entry."""
        line = journal.dump(entry)
        self._time_due_s = time.monotonic() + TIME_PERIOD_S
        with self._lock:
            self._lines.append(line)
            self._spent_bytes += len(line) + len(journal.MARK)
        if self._write is not None:
            self._write(journal.MARK + line)

    def finish(self) -> None:
        """Stop sampling, and end the phases that last."""
        self._has_ended.set()
        if self._thread.ident is not None:
            self._thread.join(_JOIN_S)
        for name in list(self._open):
            self.end(name)

    def store(self, uris: Sequence[str], limit_s: float) -> None:
        """Store the journal as objects, and the log; give up if the store does not answer.

        The log holds the same lines, so a failure here does not fail the job.
        """
        from jobentry import objects

        end_s = time.monotonic() + limit_s
        if self.log_store is not None:
            self.log_store.finish()
        with self._lock:
            data = journal.pack(self._lines)

        def write() -> None:
            with contextlib.suppress(Exception):
                for uri in uris:
                    objects.write(data, uri)

        thread = threading.Thread(target=write, name="journal-store", daemon=True)
        with contextlib.suppress(RuntimeError):
            thread.start()
            thread.join(limit_s)
        if self.log_store is not None:
            self.log_store.join(max(0.0, end_s - time.monotonic()))


def pause_s(age_s: float, spent_bytes: float, cost_s: float) -> float:
    """Return how long to wait for the next sample.

    Args:
        age_s: The age of the journal.
        spent_bytes: Its size.
        cost_s: The CPU time that the last sample took.
    """
    period_s = min(PERIOD_S, max(MIN_PERIOD_S, _PERIOD_SHARE * age_s))
    debt_bytes = spent_bytes - allowance_bytes(age_s)
    return max(period_s, debt_bytes / rate_bytes(age_s), cost_s / _CPU_SHARE)


def time_period_s(age_s: float, line_bytes: int) -> float:
    """Return the minimum interval between two lines that only give the time."""
    return max(TIME_PERIOD_S, line_bytes / (_TIME_SHARE * rate_bytes(age_s)))


def rate_bytes(age_s: float) -> float:
    """Return how many bytes a second may be added to the journal of a job of this age."""
    return max(MIN_RATE_BYTES, RATE_BYTES * _HOUR_S / max(_HOUR_S, age_s))


def allowance_bytes(age_s: float) -> float:
    """Return how many bytes the journal of a job of this age may have: the integral of the rate."""
    from math import log

    knee_s = _HOUR_S * RATE_BYTES / MIN_RATE_BYTES
    falling_s = min(max(age_s, _HOUR_S), knee_s)
    allowance = BURST_BYTES + RATE_BYTES * min(age_s, _HOUR_S)
    allowance += RATE_BYTES * _HOUR_S * log(falling_s / _HOUR_S)
    return allowance + MIN_RATE_BYTES * max(0.0, age_s - knee_s)

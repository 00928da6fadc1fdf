"""A job of the emulator that another client created; only its log is available."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from cloudjob.emulator import daemon
from cloudjob.emulator.database import FINAL
from cloudjob.emulator.job_context import logs_of
from cloudjob.emulator.node_logs import NodeLog
from cloudjob.emulator.state import JOBS
from cloudjob.errors import JobNotFound
from cloudjob.tracking import log
from cloudjob.tracking.log import LogPiece, OnJournal
from cloudjob.tracking.metrics import MetricReader

# Distinguishes the ids of these jobs from others.
PREFIX = "emulator:"
_BLOCK_BYTES = 1 << 20
_POLL_S = 0.5


class EmulatedJob:
    """The log of a job of the emulator on this machine.

    Args:
        key: Its id in the emulator.

    Raises:
        JobNotFound: The emulator has no such job.
        CloudJobError: The emulator does not answer.
    """

    last_status = None
    # The number of ranks is unknown; a job of another client may have none.
    ranks = 0

    def __init__(self, home: Path, key: str) -> None:
        self._home = home
        self._key = key
        self.id = PREFIX + key
        details = next((job for job in daemon.jobs(home)["jobs"] if job["id"] == key), None)
        if details is None:
            raise JobNotFound(f"looking for a job of the emulator: {key}: there is none")
        self.name: str = details["name"]
        self.nodes: int = details["nodes"]
        self.phase: str = details["phase"]

    @property
    def has_final_status(self) -> bool:
        """Whether the job had ended when this object was created."""
        return self.phase in FINAL

    def metric_reader(self) -> MetricReader:
        """Return a reader that finds metrics in printed JSON objects only."""
        return MetricReader({}, detects=True)

    def pieces(
        self, *, follow: bool, is_timed: bool, on_journal: OnJournal | None
    ) -> Iterator[LogPiece]:
        """Yield the log in whole lines; an empty piece means that there is nothing new.

        Raises:
            CloudJobError: The emulator does not answer.
        """
        data = self._read(follow=follow)
        return log.pieces(data, is_exact=True, is_timed=is_timed, on_journal=on_journal)

    def _read(self, *, follow: bool) -> Iterator[tuple[int, bytes]]:
        folder = logs_of(daemon.folder(self._home) / JOBS, self._key)
        logs = [NodeLog(folder / str(node)) for node in range(self.nodes)]
        offsets = [0] * self.nodes
        is_over = not follow
        while True:
            has_news = False
            for node, node_log in enumerate(logs):
                data = node_log.read(offsets[node], offsets[node] + _BLOCK_BYTES)
                if whole := _whole_lines(data, is_over):
                    has_news = True
                    offsets[node] += len(whole)
                    yield node, whole if whole.endswith(b"\n") else whole + b"\n"
            if has_news:
                continue
            if is_over:
                return
            yield 0, b""
            time.sleep(_POLL_S)
            is_over = EmulatedJob(self._home, self._key).has_final_status


def _whole_lines(data: bytes, is_over: bool) -> bytes:
    """Return the part up to the last newline, or all data if its last line cannot be completed."""
    end = data.rfind(b"\n") + 1
    has_no_end = is_over or len(data) == _BLOCK_BYTES
    return data[:end] if end or not has_no_end else data

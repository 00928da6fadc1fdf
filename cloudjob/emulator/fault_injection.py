"""Faults that users inject: the kind, the number or duration, and the affected job."""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import dataclass
from typing import Any

# kind -> its text in `cloudjob emulator fault --help`.
KINDS = {
    "throttle": "requests are refused with 429",
    "error": "requests are refused with 500",
    "lost-answer": "requests are carried out, but the connection closes unanswered",
    "expire-tokens": "all tokens and temporary keys expire now",
    "clock-skew": "the service's clock is ahead by --amount seconds (default 3600)",
    "slow-obs": "each request to OBS waits --amount seconds (default 1)",
    "obs-error": "requests to OBS are refused with 503",
    "full-obs": "nothing can be written to OBS",
    "hang-pending": "jobs stay Pending",
    "image-pull": "the image of a job cannot be pulled",
    "bad-node": "a job with fault tolerance finds a bad node: --node",
    "lose-node": "a node of a running job is lost: --job, and --node (default 0)",
}
# Faults that take effect once, when they are injected.
AT_ONCE = ("expire-tokens", "lose-node")


@dataclass(slots=True)
class Fault:
    """One fault.

    Args:
        kind: One of ``KINDS``.
        count: The number of requests or jobs that it still affects; 0 for all.
        until_s: When it ends, in seconds since the epoch; 0 for never.
        job: The id of the job that it affects; empty for all jobs.
        node: The index of a node.
        amount: The seconds for kinds that have a duration or delay.
        path: A text that the path of an affected request contains.
    """

    id: int
    kind: str
    count: int = 0
    until_s: float = 0.0
    job: str = ""
    node: int = 0
    amount: float = 0.0
    path: str = ""


class Faults:
    """The injected faults of an emulator, which are gone when it stops."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._faults: list[Fault] = []
        self._ids = itertools.count(1)

    def add(self, **values: Any) -> Fault:
        """Add a fault, unless its kind takes effect at once."""
        fault = Fault(next(self._ids), **values)
        if fault.kind not in AT_ONCE:
            with self._lock:
                self._faults.append(fault)
        return fault

    def active(self) -> list[Fault]:
        """Return the faults that have not ended."""
        now_s = time.time()
        with self._lock:
            return [fault for fault in self._faults if not fault.until_s or now_s < fault.until_s]

    def clear(self) -> int:
        """End all faults; return how many there were."""
        with self._lock:
            count = len(self._faults)
            self._faults.clear()
        return count

    def find(self, kind: str, *, job: str = "", path: str = "") -> Fault | None:
        """Return an active fault for this job or request, without counting it."""
        for fault in self.active():
            if fault.kind == kind and fault.job in ("", job) and fault.path in path:
                return fault
        return None

    def take(self, kind: str, *, job: str = "", path: str = "") -> Fault | None:
        """Return an active fault for this job or request, and count one use of it."""
        with self._lock:
            fault = self.find(kind, job=job, path=path)
            if fault and fault.count:
                fault.count -= 1
                if not fault.count:
                    self._faults.remove(fault)
        return fault

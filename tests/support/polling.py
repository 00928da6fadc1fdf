"""Wait for a condition or for text in a job's log, with a deadline."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Followed:
    """The log of a job, followed by one process, as reading all of it repeatedly is expensive."""

    process: subprocess.Popen[bytes] | subprocess.Popen[str]
    path: Path

    def __enter__(self) -> Followed:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def await_all(self, *texts: bytes, limit_s: float) -> None:
        """Wait until all of these texts are in the log."""

        def are_logged() -> bool:
            has_ended, out = self.process.poll() is not None, self.path.read_bytes()
            is_complete = all(text in out for text in texts)
            assert is_complete or not has_ended, f"the job ended without {texts!r}: {out!r}"
            return is_complete

        poll(are_logged, f"{texts!r} in the log", limit_s)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def poll(claim: Callable[[], object], what: str, limit_s: float = 180.0) -> None:
    """Wait until ``claim`` returns a true value; ``what`` describes it in the error message."""
    end = time.monotonic() + limit_s
    while not claim():
        assert time.monotonic() < end, f"after {limit_s:g} s there is no {what}"
        time.sleep(0.1)

"""Faults that users inject: what fails, how often or how long, and for which job."""

from __future__ import annotations

from dataclasses import dataclass

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
# They take effect once, when they are injected.
AT_ONCE = ("expire-tokens", "lose-node")


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Args:
        kind: One of ``KINDS``.
        count: How many requests or jobs it affects; 0 for all.
        until_s: When it ends, in seconds since the epoch; 0 for never.
        job: The id of the job that it affects; empty for all jobs.
        node: The index of a node.
        amount: Seconds, where the kind takes them.
        path: It affects only requests whose path contains this text.
    """

    id: int
    kind: str
    count: int = 0
    until_s: float = 0.0
    job: str = ""
    node: int = 0
    amount: float = 0.0
    path: str = ""

    def concerns(self, *, now_s: float, job: str = "", path: str = "") -> bool:
        """Whether it is active for this job or this request."""
        if self.until_s and now_s >= self.until_s:
            return False
        if self.job and self.job != job:
            return False
        return self.path in path

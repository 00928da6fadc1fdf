"""Faults that a user asks for: what goes wrong, how often or how long, and for which job."""

from __future__ import annotations

from dataclasses import dataclass

# kind -> what it does, in the words of `cloudjob emulator fault --help`.
KINDS = {
    "throttle": "requests are refused with 429",
    "error": "requests are refused with 500",
    "lost-answer": "requests are done, and their answer is lost: the connection closes",
    "expire-tokens": "every token and temporary key given out so far has expired",
    "clock-skew": "the service's clock is ahead by --amount seconds (default 3600)",
    "slow-obs": "each request to OBS waits --amount seconds (default 1)",
    "obs-error": "requests to OBS are refused with 503",
    "full-obs": "nothing can be written to OBS",
    "hang-pending": "jobs stay Pending",
    "image-pull": "the image of a job cannot be pulled",
    "bad-node": "the node check of a job with fault tolerance finds a bad node: --node",
    "lose-node": "a node of a running job is lost: --job, and --node (default 0)",
}
# What happens once, and not for a while or for so many requests.
AT_ONCE = ("expire-tokens", "lose-node")


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Args:
        kind: One of ``KINDS``.
        count: For how many requests or jobs it holds; 0 for any number.
        until_s: When it ends by itself, seconds since the epoch; 0 for never.
        job: The id of the job it concerns, empty for every one.
        node: The index of a node.
        amount: Seconds, where the kind takes them.
        path: Only requests whose path holds this text.
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
        """Whether it holds now, for this job or this request."""
        if self.until_s and now_s >= self.until_s:
            return False
        if self.job and self.job != job:
            return False
        return self.path in path

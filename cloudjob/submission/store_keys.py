"""Compares when temporary keys of the job's store expire with how long the job may run."""

from __future__ import annotations

import time
from collections.abc import Iterator

from cloudjob.backends.base import Check
from cloudjob.model.job import JobSpec

# The backends on which ``Backend.refresh`` works.
REFRESHING_BACKENDS = ("docker", "kubernetes", "slurm")
# Keys that last longer than this are not compared with a job without a time limit.
_LONG_S = 24 * 3600.0
_HINT = "without valid keys, nodes store neither outputs nor the record: {}"
_REFRESHED = "log in again while the job runs, then `cloudjob refresh JOB`"
_LONGER = "use keys that last longer, or set a shorter timeout_min"


def checks(spec: JobSpec, end_at: float, now: float | None = None) -> Iterator[Check]:
    """Yield a check that fails if the keys end before the job may.

    Args:
        end_at: When the keys expire, in seconds since 1970; 0 for never or unknown.
    """
    left_s = end_at - (time.time() if now is None else now)
    if not end_at:
        return
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(end_at))
    if left_s <= 0:
        yield Check("keys", False, f"those of the store expired at {when}", hint="log in again")
        return
    limit_s = 60.0 * spec.timeout_min * (spec.retries + 1)
    if limit_s and limit_s > left_s:
        may = f"the job may run for {_duration(limit_s)}"
    elif not limit_s and left_s < _LONG_S:
        may = "the job has no timeout_min"
    else:
        return
    found = f"those of the store expire in {_duration(left_s)} (at {when}), and {may}"
    can_refresh = spec.backend in REFRESHING_BACKENDS
    hint = _HINT.format(_REFRESHED if can_refresh else _LONGER)
    yield Check("keys", False, found, hint=hint, is_needed=False)


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    hours, rest = divmod(minutes, 60)
    return f"{hours} h {rest} min" if hours and rest else f"{hours} h" if hours else f"{rest} min"

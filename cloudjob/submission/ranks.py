"""Chooses the number of ranks of each node, if the job does not give it."""

from __future__ import annotations

from typing import Any

from cloudjob.backends.base import Backend
from cloudjob.model import validation
from jobentry.contract import devices
from jobentry.contract.launchers import LAUNCHERS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cloudjob.model.job import JobSpec


def choose(spec: JobSpec, backend: Backend[Any], *, may_query: bool) -> tuple[JobSpec, str]:
    """Return the job with a number of ranks, and the choice as a message; empty if it is obvious.

    If only the nodes know their devices, no number is chosen, and each node counts its devices.

    Args:
        may_query: Whether the platform may be queried.
    """
    if spec.procs_per_node:
        return spec, ""
    count, why = 1, ""
    if spec.mindspore.devices:
        count, why = len(devices.parse(spec.mindspore.devices[0]).devices), "mindspore.devices"
    elif not LAUNCHERS[spec.launcher].is_one_a_node:
        found = backend.devices(spec, may_query=may_query)
        if found is None:
            return spec, "procs_per_node auto: each node starts a rank for each of its GPUs or NPUs"
        count, why = max(1, found.per_node), found.source
    chosen = spec.with_values(procs_per_node=count)
    validation.check(chosen)
    return chosen, f"procs_per_node {count}: {why}" if count > 1 else ""

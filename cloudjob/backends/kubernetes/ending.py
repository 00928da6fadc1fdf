"""Ends that cloudjob decides: of a job that cannot start, or whose head is over and keeps its pod.

No controller does either. Whoever asks for the status of such a job, with the right to cancel it,
ends it: an annotation says how, and everybody reads that. No I/O.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from cloudjob.backends.kubernetes import engine as engines
from cloudjob.backends.kubernetes import reasons, state
from cloudjob.backends.kubernetes.engine import PENDING, START_TIMEOUT, Stage
from cloudjob.backends.kubernetes.state import Decision, Pod
from cloudjob.model import summary, times
from cloudjob.model.status import JobState, Outlook, Wait
from jobentry.contract.malformed import MALFORMED, whole

# The annotation of the job's object that says how cloudjob has ended it.
_ENDED = "cloudjob.ended"


class Limits(NamedTuple):
    """How many seconds a job of which no node runs may wait; 0 for as long as it likes.

    Args:
        stuck_s: For something that does not come by itself.
        pending_s: For anything.
    """

    stuck_s: float
    pending_s: float


def limits_of(job: Mapping[str, Any]) -> Limits:
    """Return the limits of a job; none if an earlier version has submitted it."""
    notes = job["metadata"].get("annotations") or {}
    return Limits(*(_minutes(notes.get(name)) * 60 for name in (START_TIMEOUT, PENDING)))


def _minutes(text: object) -> float:
    try:
        return float(str(text or 0))
    except ValueError:
        return 0.0


def annotation(decision: Decision | None) -> dict[str, str | None]:
    """Return the annotation that tells everybody how a job was ended; for None, its removal."""
    return {_ENDED: dump(decision) if decision else None}


def decision_of(job: Mapping[str, Any]) -> Decision | None:
    """Return how cloudjob has ended a job; None if it has not."""
    return load(str((job["metadata"].get("annotations") or {}).get(_ENDED) or ""))


def dump(decision: Decision) -> str:
    """Return a decision as text."""
    return json.dumps(decision._asdict())


def load(text: str) -> Decision | None:
    """Return the decision in a text; None for any other text."""
    try:
        values = json.loads(text)
        code = values["exit_code"]
        return Decision(None if code is None else whole(code), str(values["message"]))
    except MALFORMED:
        return None


def decide(
    job: Mapping[str, Any], stage: Stage, pods: Iterable[Pod], waits: Iterable[Wait], now_s: float
) -> Decision | None:
    """Return how to end a job that its operator has not ended; None if it may still run.

    Args:
        waits: What the queue and the quota say.
    """
    limits = limits_of(job)
    nodes = state.current(stage, pods)
    head = held_head(nodes)
    if head is not None:
        return Decision(head.exit_code, state.message_of(head) if head.exit_code else "")
    head = lost_head(job, stage, nodes)
    if head is not None and 0 < limits.stuck_s <= now_s - _lost_since_s(head, nodes):
        return Decision(None, state.message_of(replace(head, reason=reasons.LOST)))
    # The entries of nodes that run end the job themselves.
    if is_running(nodes):
        return None
    all_waits = [*state.waits_of(nodes), *waits]
    for wait in all_waits:
        if wait.outlook is not Outlook.OPEN and _is_over(wait, limits, now_s):
            return Decision(None, f"it cannot start: {state.text_of(wait)}")
    has_started = any(pod.has_started for pod in nodes)
    # Between two attempts, the pods of the last one have started.
    is_between = bool(stage.attempts) and has_started and not _is_suspended(job)
    is_pending = stage.state is JobState.PENDING and not is_between
    is_new = is_pending or (bool(nodes) and not has_started)
    if is_new and 0 < limits.pending_s <= now_s - _pending_since_s(job, stage, nodes):
        what = state.text_of(all_waits[0]) if all_waits else "it has no pods"
        span = summary.span(int(limits.pending_s))
        return Decision(None, f"it has not started in {span} (kubernetes.pending_min): {what}")
    return None


def held_head(pods: Iterable[Pod]) -> Pod | None:
    """Return the head if its container has ended, and sidecars keep its pod; None otherwise."""
    return next((pod for pod in pods if pod.node == 0 and pod.is_held), None)


def lost_head(job: Mapping[str, Any], stage: Stage, pods: Iterable[Pod]) -> Pod | None:
    """Return the head if its machine does not report, and only its return would end the job.

    Either the operator waits for the head to start the job again, or all other nodes have ended: a
    pod may tolerate for ever that its machine does not report, and then the cluster does not give
    it up. A queue that has suspended the job starts it again.
    """
    nodes = state.current(stage, pods)
    head = next((pod for pod in nodes if pod.node == 0 and pod.is_cut_off), None)
    if head is None or _is_suspended(job):
        return None
    others = [pod for pod in nodes if pod.node]
    is_alone = bool(others) and all(pod.is_over for pod in others)
    is_awaited = stage.may_restart if head.is_leaving else is_alone
    return head if is_awaited else None


def _is_suspended(job: Mapping[str, Any]) -> bool:
    return "Suspended" in engines.held_conditions(job.get("status") or {})


def _lost_since_s(head: Pod, nodes: Iterable[Pod]) -> float:
    """Return since when nothing is to be expected of a lost head; infinity if no time is known."""
    ends = [pod.ended_at for pod in nodes]
    moments_s = [times.seconds_of(at) for at in (head.silent_since, head.leaves_at, *ends) if at]
    return max(moments_s, default=math.inf)


def is_left(pods: Iterable[Pod]) -> bool:
    """Whether a node's pod was not asked to end."""
    nodes = [pod for pod in pods if pod.node is not None and not pod.is_leaving]
    return any(pod.is_held or not pod.is_over for pod in nodes)


def is_running(pods: Iterable[Pod]) -> bool:
    """Whether a node of the job runs."""
    return any(pod.node is not None and pod.has_started and not pod.is_over for pod in pods)


def _pending_since_s(job: Mapping[str, Any], stage: Stage, nodes: Iterable[Pod]) -> float:
    """Return since when a job may start: its creation, or when a queue last stopped or resumed it.

    The last attempt counts, too. Of one whose begin is not known, it is that of its first pod;
    before that pod exists, the attempt has only begun. A suspended job has no such attempt.
    """
    has_begun = stage.is_again or stage.state is not JobState.PENDING
    if has_begun and not stage.attempt_at and not _is_suspended(job):
        return min((times.seconds_of(pod.created_at) for pod in nodes), default=math.inf)
    conditions = (job.get("status") or {}).get("conditions") or ()
    suspended = [item for item in conditions if item.get("type") == "Suspended"]
    moments = [job["metadata"].get("creationTimestamp"), stage.attempt_at]
    moments += [item.get("lastTransitionTime") for item in suspended]
    return max(times.seconds_of(str(moment or "")) for moment in moments)


def _is_over(wait: Wait, limits: Limits, now_s: float) -> bool:
    if wait.outlook is Outlook.HOPELESS:
        return limits.stuck_s > 0
    waited_s = now_s - times.seconds_of(wait.since) if wait.since else 0.0
    return 0 < limits.stuck_s <= waited_s

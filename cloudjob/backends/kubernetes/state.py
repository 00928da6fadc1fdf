"""The status of a job, from its engine's status and its pods. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

from cloudjob.backends.kubernetes import reasons, waiting
from cloudjob.backends.kubernetes.engine import Engine, Stage
from cloudjob.backends.kubernetes.pod import CONTAINER, FAILURES
from cloudjob.backends.native import CAUSES, Ended, NativeStatus, OutOfMemory, Stop, unended
from cloudjob.model import times
from cloudjob.model.status import Attempt, JobState, Wait, WaitPhase
from jobentry.contract.exits import Cause, Failure

_GOOD = "Succeeded"
_OVER = (_GOOD, "Failed")
_DISRUPTED = "DisruptionTarget"
_IS_LOST = "but its head is lost"
_RESTARTING = "Restarting"


@dataclass(frozen=True, slots=True)
class Pod:
    """One node as the API shows it.

    Args:
        node: None for a pod that is not a node.
        host: The name of the machine that it runs on.
        wait: What it waits for; None if it has started or ended.
        has_started: Whether its container has run, so that there is a log.
        reason: Why the cluster ended it: ``OOMKilled``, ``Evicted``, ``PreemptionByScheduler``.
        message: The cluster's message about that.
        leaves_at: When its grace period ends if it was deleted; empty if it was not.
        silent_since: When the cluster noticed that the machine of its container does not report;
            empty if it does not say when, None if the machine reports.
        is_over: Whether its container will write nothing more; sidecars may still run.
        is_held: Whether its container has ended, and sidecars keep it from ending.
        failures: How many pods of this node have failed before, if its controller counts them.
    """

    name: str
    uid: str
    node: int | None
    phase: str
    created_at: str
    host: str = ""
    wait: Wait | None = None
    has_started: bool = False
    started_at: str = ""
    ended_at: str = ""
    exit_code: int | None = None
    reason: str = ""
    message: str = ""
    memory: str = ""
    leaves_at: str = ""
    silent_since: str | None = None
    is_over: bool = False
    is_held: bool = False
    failures: int = 0

    @property
    def is_in_trouble(self) -> bool:
        """Whether it waits for something that may never come."""
        return self.wait is not None and self.wait.is_trouble

    @property
    def is_leaving(self) -> bool:
        """Whether it was deleted and is in its grace period."""
        return bool(self.leaves_at)

    @property
    def is_cut_off(self) -> bool:
        """Whether its container runs on a machine that no longer reports to the cluster."""
        return self.silent_since is not None

    @property
    def is_lost(self) -> bool:
        """Whether the cluster has given up the pod, and its machine cannot end it."""
        return self.is_cut_off and self.is_leaving and not self.is_over


class Decision(NamedTuple):
    """How cloudjob has ended a job that its operator would have kept for ever.

    Args:
        exit_code: That of the head; None if it has not run.
    """

    exit_code: int | None
    message: str


def pod_of(
    item: Mapping[str, Any],
    node_of: Callable[[Mapping[str, Any]], int | None],
    container: str = CONTAINER,
) -> Pod:
    """Return a pod of the API's list.

    Args:
        container: The name of our container; sidecars may come before it in the list.
    """
    metadata, status, spec = item["metadata"], item.get("status") or {}, item.get("spec") or {}
    state = _of_container(status.get("containerStatuses"), container).get("state") or {}
    ended = state.get("terminated") or {}
    began = state.get("running") or ended
    resources = _of_container(spec.get("containers"), container).get("resources") or {}
    phase = str(status.get("phase") or "")
    is_over = phase in _OVER
    # A restarted container continues to write.
    has_ended = bool(ended) and spec.get("restartPolicy") == "Never"
    reason, message = _why_ended(status, ended)
    return Pod(
        name=metadata["name"],
        uid=metadata["uid"],
        node=node_of(item),
        phase=phase,
        created_at=_time(metadata.get("creationTimestamp")),
        host=str(spec.get("nodeName") or ""),
        wait=None if is_over else waiting.of_pod(metadata, spec, status, container),
        has_started=bool(began),
        started_at=_time(began.get("startedAt")),
        ended_at=_time(ended.get("finishedAt")),
        exit_code=ended.get("exitCode"),
        reason=reason,
        message=message,
        memory=str((resources.get("limits") or {}).get("memory") or ""),
        leaves_at=_time(metadata.get("deletionTimestamp")),
        silent_since=_silent_since(status) if "running" in state else None,
        is_over=has_ended or is_over,
        is_held=has_ended and not is_over and _has_running(status),
        failures=_failures(metadata.get("annotations") or {}),
    )


def _failures(annotations: Mapping[str, Any]) -> int:
    text = str(annotations.get(FAILURES) or "")
    return int(text) if text.isascii() and text.isdecimal() else 0


def _has_running(status: Mapping[str, Any]) -> bool:
    return any("running" in (s.get("state") or ()) for s in status.get("containerStatuses") or ())


def _of_container(items: Iterable[Mapping[str, Any]] | None, name: str) -> Mapping[str, Any]:
    return next((item for item in items or () if item.get("name") == name), {})


def _silent_since(status: Mapping[str, Any]) -> str | None:
    """Return when the node controller has marked the pod, as its machine sends no heartbeats.

    The node controller changes only Ready. If a container's own probe fails, ContainersReady
    changes, too.
    """
    conditions = {item.get("type"): item for item in status.get("conditions") or ()}
    ready, containers = (conditions.get(name) or {} for name in ("Ready", "ContainersReady"))
    is_cut_off = ready.get("status") == "False" and containers.get("status") == "True"
    return _time(ready.get("lastTransitionTime")) if is_cut_off else None


def status_of(
    engine: Engine,
    job: Mapping[str, Any],
    pods: list[Pod],
    *,
    is_cancelled: bool,
    waits: Iterable[Wait] = (),
    decision: Decision | None = None,
) -> NativeStatus:
    """Return the state of a job.

    Args:
        job: The operator's manifest with its status.
        pods: The job's pods that exist.
        waits: What the queue and the quota say, the best explanation first.
        decision: How cloudjob has ended it; None if it has not.
    """
    nodes = [pod for pod in pods if pod.node is not None]
    stage = stage_of(engine, job, nodes, is_cancelled=is_cancelled)
    # Those of earlier attempts count, too.
    starts = [pod.started_at for pod in nodes if pod.started_at]
    nodes = current(stage, nodes)
    stage = _with_pods(engine, stage, nodes, is_cancelled=is_cancelled)
    started_at = min(starts, default="") or _time(stage.started_at) or None
    if decision is not None and stage.state is not JobState.SUCCEEDED:
        return _decided(stage, nodes, decision, started_at)
    if stage.state.is_final:
        return _ended(started_at, stage, nodes, waits)
    worst_wait = _wait(nodes, waits)
    native = stage.native
    if worst_wait and worst_wait.is_trouble:
        native = f"{stage.native} ({worst_wait.message})"
    silent = [pod for pod in nodes if pod.is_cut_off]
    wait = _wait(_absent(nodes), waits) or _wait(silent, ())
    awaits_pods = stage.state is JobState.PENDING or stage.native == _RESTARTING
    # These keep the pods of an attempt that has failed.
    is_kept = bool(stage.attempts) and (stage.has_asked or stage.native == _RESTARTING)
    if wait is None and awaits_pods and (is_kept or not nodes):
        wait = _without_pods(job, stage, nodes)
    return unended(stage.state, native, started_at, wait, _attempt(stage, nodes))


def current(stage: Stage, pods: Iterable[Pod]) -> list[Pod]:
    """Return the last pod of each node, in order: those of earlier attempts may still exist."""
    nodes = [pod for pod in pods if pod.node is not None]
    if not stage.may_restart:
        return nodes
    last = {pod.node: pod for pod in sorted(nodes, key=lambda pod: pod.created_at)}
    return sorted(last.values(), key=lambda pod: pod.node or 0)


def stage_of(
    engine: Engine, job: Mapping[str, Any], pods: Iterable[Pod], *, is_cancelled: bool
) -> Stage:
    """Return what the operator says of a job, unless it has ended it before the head has ended."""
    stage = _with_attempt(engine.stage(job, is_cancelled), pods)
    if stage.state not in engine.early_ends:
        return stage
    head = next((pod for pod in pods if pod.node == 0), None)
    if is_cancelled and (head is None or head.is_leaving):
        # The operator may have called the job a success before its head was told to end.
        return stage._replace(state=JobState.CANCELLED)
    if head is None:
        return stage._replace(state=JobState.FAILED, is_unwatched=True)
    if head.is_lost:
        return stage._replace(state=JobState.FAILED, native=f"{stage.native}, {_IS_LOST}")
    if stage.state is JobState.FAILED and (head.is_leaving or head.is_cut_off):
        return stage
    if head.has_started and not head.is_over:
        # It stores outputs and writes the record.
        native = f"{stage.native}, but its head is still running"
        return stage._replace(state=JobState.RUNNING, native=native, message="", ended_at="")
    if stage.state is JobState.SUCCEEDED and (head.exit_code or head.phase == "Failed"):
        return stage._replace(state=JobState.FAILED)
    return stage


def _with_attempt(stage: Stage, pods: Iterable[Pod]) -> Stage:
    """Return the status of a job that has failed before if one of its pods says so.

    The controller counts a failed pod in the job's status only after it has replaced the pod.
    """
    if stage.attempts and any(pod.failures for pod in pods):
        return stage._replace(is_again=True, attempt_at="")
    return stage


def _with_pods(engine: Engine, stage: Stage, nodes: list[Pod], *, is_cancelled: bool) -> Stage:
    """Return the status of a job of whose pods its operator does not tell everything."""
    heads = [pod for pod in nodes if pod.node == 0]
    if stage.state is JobState.FAILED and any(head.phase == _GOOD for head in heads):
        # It ends last: what happens to a worker after it changes nothing.
        return stage._replace(state=JobState.SUCCEEDED)
    if not (stage.state.is_final or is_cancelled):
        stage = _with_lost_head(stage, nodes)
    if engine.reads_pods and not stage.state.is_final:
        stage = _counted(stage, nodes)
    if not (stage.state.is_final or stage.may_restart or is_cancelled):
        stage = _without_head(stage, nodes, reads_pods=engine.reads_pods)
    return stage


def _with_lost_head(stage: Stage, nodes: list[Pod]) -> Stage:
    """Return the status of a job whose controller waits for ever for a head on a dead machine.

    The entries notice a lost worker, and the head then ends the job. An operator may restart a job
    as soon as somebody removes the machine from the cluster (jobset#576). A queue that has
    preempted the job has removed the pod itself, and starts the job again.
    """
    is_lost = any(pod.node == 0 and pod.is_lost for pod in nodes)
    if not is_lost or stage.has_asked or stage.may_restart:
        return stage
    native = f"{stage.native}, {_IS_LOST}"
    return stage._replace(state=JobState.FAILED, native=native, has_asked=True)


def _counted(stage: Stage, nodes: list[Pod]) -> Stage:
    """Return the status of a job whose controller only counts pods."""
    if any(pod.node == 0 and pod.is_over and pod.exit_code == 0 for pod in nodes):
        # Workers on a machine that is gone never end.
        native = f"{stage.native}, but its head has succeeded"
        return stage._replace(state=JobState.SUCCEEDED, native=native)
    # A suspended job keeps pods that had ended before.
    kept = [pod for pod in nodes if not (pod.is_leaving or (stage.has_asked and pod.is_over))]
    if stage.state is JobState.PENDING and any(pod.has_started for pod in kept):
        stage = stage._replace(state=JobState.RUNNING, native="Running")
    has_failed = stage.is_again or any(pod.is_over for pod in nodes)
    if stage.attempts and has_failed and not stage.has_asked:
        return _between(stage, nodes)
    return stage


def _between(stage: Stage, nodes: list[Pod]) -> Stage:
    """Return the status of a job that has failed before, if its next attempt has not begun."""
    heads = [pod for pod in nodes if pod.node == 0]
    if all(pod.is_over and pod.failures + 1 < stage.attempts for pod in heads):
        return stage._replace(native=_RESTARTING)
    # A worker that is over has given up waiting for the head, and is replaced.
    if not any(pod.has_started and not (pod.node and pod.is_over) for pod in nodes):
        return stage._replace(state=JobState.PENDING, native="Pending")
    return stage


def _without_head(stage: Stage, nodes: list[Pod], *, reads_pods: bool) -> Stage:
    """Return the status of a job whose head had not started when a worker ended.

    A controller waits for such a head for ever; if it starts after all, it ends soon, too.
    """
    ended = [pod for pod in nodes if pod.node and pod.is_over and not pod.is_leaving]
    has_failed = any(pod.exit_code for pod in ended) and not stage.has_asked
    heads = [pod for pod in nodes if pod.node == 0]
    # A controller of Kubernetes counts a head that was removed; one without a pod never had any.
    is_absent = reads_pods or stage.state is JobState.PENDING
    is_late = all(pod.wait for pod in heads) if heads else is_absent
    if not (has_failed and is_late):
        return stage
    native = f"{stage.native}, but a worker has ended before its head started"
    return stage._replace(state=JobState.FAILED, native=native)


def _ended(started_at: str | None, stage: Stage, nodes: list[Pod], waits: Iterable[Wait]) -> Ended:
    head = next((pod for pod in nodes if pod.node == 0), None)
    blamed = _blamed(nodes)
    ends = [pod.ended_at for pod in nodes if pod.ended_at]
    ended_at = (head.ended_at if head else "") or _time(stage.ended_at) or max(ends, default="")
    code = head.exit_code if head else None
    has_failed = stage.state is JobState.FAILED
    is_asked = stage.has_asked and stage.state is not JobState.CANCELLED
    failure = Failure(exit_code=code)
    reason = _reason(nodes)
    if has_failed:
        absent = _wait(_absent(nodes), waits)
        reason = reason or (text_of(absent) if absent else "")
        node = blamed.node if blamed else None
        failure = failure._replace(node=node, message=_failure(stage, head, blamed, str(reason)))
    return Ended(
        stage.native,
        CAUSES[stage.state],
        None if stage.state is JobState.SUCCEEDED else failure,
        started_at=started_at,
        ended_at=ended_at or None,
        attempt_at=_attempt_at(stage, nodes),
        reason=reason,
        # A head that was asked to end without a cancel of the job was drained or preempted; every
        # cancel is annotated on the job.
        stop=Stop.PLATFORM if is_asked or has_failed else Stop.OUTSIDE,
        is_unwatched=stage.is_unwatched,
        attempt=_attempt(stage, nodes),
    )


def _attempt(stage: Stage, nodes: list[Pod]) -> Attempt | None:
    """Return which attempt of a job this is; None if its pods do not tell.

    When a job is suspended, the pods of its last attempt are deleted.
    """
    head = next((pod for pod in nodes if pod.node == 0), None)
    if head is None or not stage.attempts or stage.has_asked:
        return None
    return Attempt(head.failures + 1, stage.attempts)


def _decided(stage: Stage, nodes: list[Pod], decision: Decision, started_at: str | None) -> Ended:
    """Return the end of a job that cloudjob has ended, whatever its operator makes of that."""
    head = next((pod for pod in nodes if pod.node == 0), None)
    cause, failure = _outcome(decision)
    return Ended(
        f"{stage.native}, and ended by cloudjob",
        cause,
        failure,
        started_at=started_at,
        ended_at=(head.ended_at if head else "") or _time(stage.ended_at) or None,
        attempt_at=_attempt_at(stage, nodes),
        # The head was told to end only because the job was given up.
        stop=Stop.PLATFORM,
        # Nobody saw the end of a head whose machine does not report.
        is_unwatched=decision.exit_code is None,
    )


def of_deleted(decision: Decision | None) -> Ended:
    """Return the end of a job that this machine has stopped by deleting it.

    Args:
        decision: How cloudjob has ended it; None if it was cancelled.
    """
    cause, failure = _outcome(decision) if decision else (Cause.CANCELLED, Failure())
    return Ended("deleted", cause, failure, stop=Stop.OUTSIDE)


def _outcome(decision: Decision) -> tuple[Cause, Failure | None]:
    if decision.exit_code == 0:
        return Cause.NONE, None
    return Cause.PLATFORM, Failure(**decision._asdict())


def _attempt_at(stage: Stage, nodes: list[Pod]) -> str:
    """Return when the last attempt began: with its head, if the engine does not say so."""
    if stage.is_again and not stage.attempt_at:
        # A worker may be replaced while the head of the attempt before writes its record.
        heads = [pod for pod in nodes if pod.node == 0]
        return min((pod.created_at for pod in heads or nodes if pod.created_at), default="")
    return _time(stage.attempt_at)


def _failure(stage: Stage, head: Pod | None, blamed: Pod | None, reason: str) -> str:
    if blamed is not None:
        return reason if blamed.reason == reasons.OUT_OF_MEMORY else message_of(blamed)
    if reason or stage.has_asked or (head is not None and not head.is_leaving):
        return stage.message or reason
    detail = f" ({stage.message})" if stage.message else ""
    return f"node 0: its pod was removed: drained, preempted or deleted{detail}"


def waits_of(nodes: Iterable[Pod]) -> list[Wait]:
    """Return what each node waits for that does not run, troubles first."""
    by_node = sorted(((pod.node or 0, pod.name, pod) for pod in nodes), key=itemgetter(0, 1))
    waits = [(node, wait) for node, _, pod in by_node if (wait := _wait_of(pod))]
    named = [wait._replace(message=f"node {node}: {wait.message}") for node, wait in waits]
    return sorted(named, key=lambda wait: not wait.is_trouble)


def _wait(nodes: Iterable[Pod], job_waits: Iterable[Wait]) -> Wait | None:
    """Return what keeps nodes from running: their troubles, what is given, or what is normal."""
    waits = waits_of(nodes)
    troubles = [wait for wait in waits if wait.is_trouble]
    for wait in () if troubles else job_waits:
        return wait
    chosen = troubles or waits
    if not chosen:
        return None
    more = f", and {len(chosen) - 1} more" if len(chosen) > 1 else ""
    return chosen[0]._replace(message=f"{chosen[0].message}{more}")


def _absent(nodes: list[Pod]) -> list[Pod]:
    return [pod for pod in nodes if not pod.has_started]


def _wait_of(pod: Pod) -> Wait | None:
    """Return why a node does not run, or is not known to run."""
    if pod.is_cut_off:
        text = f"its machine {pod.host} no longer reports to the cluster; it may be lost"
        wait = waiting.trouble(WaitPhase.MACHINE, pod.silent_since or "", "", text)
        # Without --now, a cancel waits for a pod that nothing can end.
        return wait._replace(hint="`cloudjob cancel --now` ends the job")
    if pod.is_leaving and pod.reason:
        return waiting.trouble(WaitPhase.SCHEDULING, "", pod.reason, pod.message)
    return pod.wait


def _without_pods(job: Mapping[str, Any], stage: Stage, nodes: list[Pod]) -> Wait:
    """Return what a job waits for whose next pods do not exist, if nothing else is known."""
    since = _time(job["metadata"].get("creationTimestamp"))
    if stage.attempts and stage.native == _RESTARTING:
        since = max((pod.ended_at for pod in nodes), default="") or since
        text = "its last attempt has failed, and the cluster starts it again"
        return Wait(phase=WaitPhase.CREATION, since=since, message=text)
    if stage.native == "Suspended":
        text = "it is suspended, and a queue or a user may resume it"
        return Wait(phase=WaitPhase.QUEUE, since=since, message=text)
    return Wait(phase=WaitPhase.CREATION, since=since, message="it has no pods yet")


def _why_ended(status: Mapping[str, Any], ended: Mapping[str, Any]) -> tuple[str, str]:
    """Return why the cluster ended a pod, and its message; empty if it did not.

    Args:
        ended: How our container ended.
    """
    reason = str(status.get("reason") or _own_reason(ended))
    message = status.get("message") or ended.get("message") or ""
    if not reason and not ended:
        reason, message = _init_failure(status)
    if not reason and status.get("phase") != "Succeeded":
        for condition in status.get("conditions") or ():
            if condition.get("type") == _DISRUPTED and condition.get("status") == "True":
                reason = str(condition.get("reason") or "")
                message = condition.get("message") or ""
    return reason, waiting.shortened(message)


def _init_failure(status: Mapping[str, Any]) -> tuple[str, str]:
    """Return which init container has failed, with kubectl's word for it; empty if none has."""
    for item in status.get("initContainerStatuses") or ():
        ended = (item.get("state") or {}).get("terminated") or {}
        if ended.get("exitCode"):
            text = f"its init container {item['name']} ended with exit code {ended['exitCode']}"
            return f"Init:{ended.get('reason') or 'Error'}", text
    return "", ""


def _own_reason(ended: Mapping[str, Any]) -> str:
    """Return why a container ended, if that is more specific than its exit code."""
    reason = str(ended.get("reason") or "")
    return "" if reason in ("Completed", "Error") else reason


def _blamed(nodes: list[Pod]) -> Pod | None:
    """Return the node that explains a failure best: not one that was ended from outside."""
    bad = [pod for pod in nodes if _reason_of(pod) or pod.exit_code or pod.phase == "Failed"]
    self_caused = [pod for pod in bad if _reason_of(pod) or pod.exit_code not in (None, 143)]
    return min(
        self_caused or bad, key=lambda pod: (not _reason_of(pod), pod.ended_at or "~"), default=None
    )


def _reason_of(pod: Pod) -> str:
    return pod.reason or (reasons.LOST if pod.is_lost else "")


def message_of(pod: Pod) -> str:
    """Return how a node has failed."""
    reason = _reason_of(pod)
    if reason:
        advice = reasons.advice(reason)
        message = pod.message.rstrip(".") if advice else pod.message
        detail = f": {message}" if message else ""
        return f"node {pod.node} ({pod.name}): {reason}{detail}{advice}"
    return f"node {pod.node} ({pod.name}) ended with exit code {pod.exit_code}"


def text_of(wait: Wait) -> str:
    """Return what a node waits for, and what to do about it."""
    hint = f"; {wait.hint}" if wait.hint else ""
    return f"{wait.message}{hint}"


def _reason(nodes: list[Pod]) -> str | OutOfMemory:
    """Return which nodes ran out of memory, were evicted or left out, which no entry can know."""
    full = [pod for pod in nodes if pod.reason == reasons.OUT_OF_MEMORY]
    if full:
        listed = ", ".join(f"node {pod.node} ({pod.name})" for pod in full)
        limit = f"limited to {full[0].memory}" if full[0].memory else ""
        return OutOfMemory(listed, limit, reasons.advice(reasons.OUT_OF_MEMORY))
    ended = [pod for pod in nodes if _reason_of(pod)]
    return message_of(ended[0]) if ended else _left_out(nodes)


def _left_out(nodes: list[Pod]) -> str:
    """Return which node had ended when a queue let the job start again, for which it stays ended.

    A Job does not start an index again that has succeeded (jobset#1208).
    """
    began = max((pod.created_at for pod in nodes if pod.node == 0), default="")
    for pod in nodes:
        has_ended = pod.node and pod.is_over and pod.ended_at
        # The machine tells when a pod has ended, and its clock may be slow.
        if has_ended and max(pod.created_at, pod.ended_at) < began:
            text = f"node {pod.node} ({pod.name}) ended before the pod of node 0 was created"
            return f"{text}, and nothing starts it again; submit the job again"
    return ""


def _time(text: object) -> str:
    return times.normalised(str(text or ""))

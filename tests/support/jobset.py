"""What becomes of a JobSet whose only Job has failed; no I/O.

Written from the documentation of JobSet 0.12 (failure policies) and of Jobs (pod failure policies,
backoff limits per index, success policies).
"""

from __future__ import annotations

from typing import Any

from tests.support.operators import INDEX

Object = dict[str, Any]


def end_of_job(spec: Object, pods: list[Object]) -> str:
    """Return the reason with which the controller of Jobs ends a Job; empty if it goes on."""
    has_failed = {}
    for pod in pods:
        # A pod that is being deleted counts when it has ended (podReplacementPolicy: Failed).
        if pod["status"].get("phase") in ("Succeeded", "Failed"):
            index = int(pod["metadata"]["annotations"][INDEX])
            has_failed[index] = pod["status"]["phase"] == "Failed"
            if has_failed[index] and _fails_job(spec, pod):
                return "PodFailurePolicy"
    if has_failed.get(0) is False:
        return "SuccessPolicy"
    return "FailedIndexes" if len(has_failed) == spec["completions"] else ""


def _fails_job(spec: Object, pod: Object) -> bool:
    """Whether the first rule that matches a failed pod ends the Job."""
    held = {(item["type"], item["status"]) for item in pod["status"].get("conditions") or ()}
    for rule in (spec.get("podFailurePolicy") or {}).get("rules") or ():
        assert set(rule) == {"action", "onPodConditions"}, "what other rules do is not known here"
        if held & {(item["type"], item["status"]) for item in rule["onPodConditions"]}:
            return bool(rule["action"] == "FailJob")
    return False


def after_failure(manifest: Object, reason: str) -> Object:
    """Return what a JobSet's status becomes when its Job fails: it restarts, or has failed.

    Args:
        reason: The reason of the Job's condition Failed.
    """
    policy, status = manifest["spec"].get("failurePolicy") or {}, manifest.get("status") or {}
    rules = policy.get("rules") or ()
    matching = [x for x in rules if reason in (x.get("onJobFailureReasons") or [reason])]
    action = matching[0]["action"] if matching else "RestartJobSet"
    counted = status.get("restartsCountTowardsMax") or 0
    is_counted = action == "RestartJobSet"
    if action == "FailJobSet" or (is_counted and counted >= (policy.get("maxRestarts") or 0)):
        return {}
    assert action in ("RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts")
    restarts = (status.get("restarts") or 0) + 1
    return {"restarts": restarts, "restartsCountTowardsMax": counted + is_counted}

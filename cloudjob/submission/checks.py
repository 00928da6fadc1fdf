"""Checks before a job is sent: the script, its secrets, and when the keys of its store expire."""

from __future__ import annotations

import time
from collections.abc import Container, Iterable, Iterator

from cloudjob.backends.base import Check
from cloudjob.errors import NotReady
from cloudjob.model.job import JobSpec
from cloudjob.model.progress import OnProgress, Progress
from cloudjob.model.rules import BACKENDS, Telling
from cloudjob.model.text import one_line, secret_texts, secrets_masked
from cloudjob.model.times import local, rfc3339
from cloudjob.submission import launcher_choice, script_check
from cloudjob.submission.script_check import Script
from jobentry.contract import retry_kinds

# If a job has no time limit, keys that are valid for longer than this pass the check.
_LONG_S = 24 * 3600.0
_HINT = "without valid keys, nodes store neither outputs nor the record: {}"
_REFRESHED = "log in again while the job runs, then `cloudjob refresh JOB`"
_LONGER = "use keys that last longer, or set a shorter timeout_min"


def require(checks: Iterable[Check], on_progress: OnProgress) -> None:
    """Check that a job can be sent.

    Raises:
        NotReady: With every failed check that the job needs.
    """
    wrong = [check for check in checks if not check.is_ok]
    needed = [check for check in wrong if check.is_needed]
    if needed:
        raise NotReady([(f"{check.name}: {check.found}", check.hint) for check in needed])
    for check in wrong:
        on_progress(Progress("warning", f"{check.name}: {check.found}", check.hint))


def script_checks(spec: JobSpec, script: Script) -> Iterator[Check]:
    """Yield the problems of a script and of the way the job passes its secrets."""
    problem = script.problem
    if problem:
        yield Check("script", False, problem.what, problem.hint, is_needed=False)
    ignored = launcher_choice.ignored_exit_code(spec, script.nested)
    if ignored:
        hint = "with --strict, the job fails with that exit code"
        yield Check("script", False, f"{ignored}; {hint}", is_needed=False)
    repeated = launcher_choice.what_is_repeated(spec, script.nested)
    if repeated and spec.script.endswith(".py"):
        repeated = f"{repeated}, and cloudjob runs it once for each rank"
        hint = "with --launcher python, the script runs once on each node"
        yield Check("script", False, f"{repeated}; {hint}", is_needed=False)
    if preset_hint := script_check.preset_hint(spec, script.files):
        what = f"nothing passes the options --rank and --world_size of {one_line(spec.script)}"
        yield Check("script", False, what, preset_hint, is_needed=False)
    yield from script_check.python_checks(spec, script.files)
    yield from retry_checks(spec)
    yield from secret_checks(spec)


def retry_checks(spec: JobSpec) -> Iterator[Check]:
    """Yield a check that fails if the platform repeats failures after which no repeat is wanted."""
    if not spec.retries:
        return
    repeated = _repeated(spec)
    wrong = [each for each in retry_kinds.WORDS if each not in spec.retry.on and each in repeated]
    if wrong:
        more = f"{spec.backend} cannot tell {', '.join(wrong)} from other failures, and tries again"
        hint = ""
        if BACKENDS[spec.backend].telling is Telling.PLATFORM:
            hint = "`retries: {on: [platform, hang]}` starts only after the platform's own faults"
        yield Check("retries", False, f"{more} after these, too", hint, is_needed=False)


def _repeated(spec: JobSpec) -> Container[str]:
    """Return the kinds of failures that a backend repeats although they are not named."""
    telling = BACKENDS[spec.backend].telling
    if telling is Telling.RECORD:
        return ()
    if telling is Telling.EXIT_CODE:
        return [kind for kind in retry_kinds.WORDS if kind not in ("user", "hang")]
    if telling is Telling.PLATFORM and retry_kinds.OF_PLATFORM.issuperset(spec.retry.on):
        return ("platform", "preempted")
    return retry_kinds.WORDS


def secret_checks(spec: JobSpec) -> Iterator[Check]:
    """Yield a check for each secret that is visible in arguments or ordinary variables."""
    texts_sent = (*spec.args, *spec.env.values())
    for name, value in spec.secrets.items():
        texts = secret_texts([value])
        if any(text in each for text in texts for each in texts_sent):
            problem = f"the value of {name} is in arguments or variables, which the platform shows"
            hint = f"read it in the script from the variable {name}"
            yield Check("secrets", False, problem, hint, is_needed=False)
    for name, value in secrets_masked(spec.env).items():
        if spec.env[name] != value:
            problem = f"{name} is an ordinary variable, which the platform shows"
            hint = f"export it, and pass it with --secret {name} or under `secrets:`"
            yield Check("secrets", False, problem, hint, is_needed=False)


def key_checks(spec: JobSpec, end_at: float, now: float | None = None) -> Iterator[Check]:
    """Yield a check that fails if the keys may expire before the job ends.

    Args:
        end_at: When the keys expire, in seconds since 1970; 0 for never or unknown.
    """
    left_s = end_at - (time.time() if now is None else now)
    if not end_at:
        return
    from cloudjob.model.summary import span

    when = local(rfc3339(end_at))
    if left_s <= 0:
        yield Check("keys", False, f"the store's keys expired at {when}", hint="log in again")
        return
    # Elsewhere the limit is that of each attempt.
    is_total = BACKENDS[spec.backend].telling is Telling.RECORD
    limit_s = 60.0 * spec.timeout_min * (1 if is_total else spec.retries + 1)
    if limit_s and limit_s > left_s:
        may = f"the job may run for {span(int(limit_s))}"
    elif not limit_s and left_s < _LONG_S:
        may = "the job has no timeout_min"
    else:
        return
    problem = f"the store's keys expire in {span(int(left_s))} (at {when}), and {may}"
    can_refresh = BACKENDS[spec.backend].refreshes_keys
    hint = _HINT.format(_REFRESHED if can_refresh else _LONGER)
    yield Check("keys", False, problem, hint=hint, is_needed=False)

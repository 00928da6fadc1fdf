"""The status of a job, from the notes in its folder and Slurm's commands. No I/O."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from cloudjob.backends.native import Ended, NativeStatus, OutOfMemory, Stop, unended
from cloudjob.backends.slurm.script import EARLY_S, JOB_NAME
from cloudjob.model.status import JobState, Wait, WaitPhase
from cloudjob.model.times import rfc3339
from jobentry.contract.exits import ENTRY_FAILED, TIMED_OUT, Cause, Failure

# Slurm's state -> ours; any other state is UNKNOWN. (squeue(1), JOB STATE CODES)
_STATES = {
    "PENDING": JobState.PENDING,
    "CONFIGURING": JobState.PENDING,
    "REQUEUED": JobState.PENDING,
    "REQUEUE_FED": JobState.PENDING,
    "REQUEUE_HOLD": JobState.PENDING,
    "RESV_DEL_HOLD": JobState.PENDING,
    "SPECIAL_EXIT": JobState.PENDING,
    "RUNNING": JobState.RUNNING,
    "COMPLETING": JobState.RUNNING,
    "STAGE_OUT": JobState.RUNNING,
    "SIGNALING": JobState.RUNNING,
    "STOPPED": JobState.RUNNING,
    "SUSPENDED": JobState.RUNNING,
    "RESIZING": JobState.RUNNING,
    "COMPLETED": JobState.SUCCEEDED,
    "FAILED": JobState.FAILED,
    "TIMEOUT": JobState.FAILED,
    "DEADLINE": JobState.FAILED,
    "NODE_FAIL": JobState.FAILED,
    "BOOT_FAIL": JobState.FAILED,
    "OUT_OF_MEMORY": JobState.FAILED,
    "PREEMPTED": JobState.FAILED,
    "LAUNCH_FAILED": JobState.FAILED,
    "RECONFIG_FAIL": JobState.FAILED,
    "CANCELLED": JobState.CANCELLED,
    "REVOKED": JobState.CANCELLED,
}
_REASONS = {
    "TIMEOUT": "the job reached its time limit on Slurm",
    "DEADLINE": "the job reached its deadline on Slurm",
    "NODE_FAIL": "a node has failed",
    "BOOT_FAIL": "a node did not boot",
    "OUT_OF_MEMORY": "Slurm ended the job",
    "PREEMPTED": "Slurm gave its nodes to a job of higher priority (slurm.requeue starts it again)",
    "LAUNCH_FAILED": "Slurm could not start it on its nodes",
    "RECONFIG_FAIL": "Slurm could not set up its nodes",
    "FAILED": "the job's script failed before it could note that it had started",
}
_UNSEEN = (
    "{host} does not see the job's folder: it must be on a disk that all nodes share, under the"
    " same path (slurm.folder names another)"
)
_EARLY_SIGNAL = (
    "SIGUSR1 ended it long before its time limit: a user sent the signal, or a job of higher"
    " priority needs the nodes (slurm.requeue starts it again)"
)
_PROLOG = "(sinfo -R shows the drained node: tell the administrator of the cluster)"
# Parts of srun's messages about a node that does not accept its credentials.
_REFUSALS = ("zero bytes", "munge", "credential", "authentication", "protocol")
_FULL = "and could not note it in the job's folder (is it full, out of quota or read-only?)"
# Exit codes from here on mean that a signal has killed the process.
_KILLED = 128
_NO_LOG = (
    "the first node does not see the job's folder or cannot write there: it must be on a disk that"
    " all nodes share, under the same path (slurm.folder names another), and not be full, out of"
    " quota or read-only"
)
# The beginning of Slurm's reason -> why the job waits. (squeue(1), JOB REASON CODES)
_WAITING_REASONS = (
    ("Resources", "waits for free nodes"),
    ("Priority", "waits behind jobs of higher priority"),
    ("BeginTime", "waits for its start time"),
    ("DependencyNeverSatisfied", "never starts, as a job that it waits for has failed"),
    ("Dependency", "waits for another job"),
    ("Reservation", "waits for its reservation"),
    ("Licenses", "waits for a licence"),
    ("ReqNodeNotAvail", "a node that it asks for is down, drained or reserved"),
    ("Nodes required for job are DOWN", "nodes that it asks for are down or drained"),
    ("NodeDown", "a node that it asks for is down"),
    ("PartitionNodeLimit", "asks for more nodes than the partition has or allows"),
    ("PartitionTimeLimit", "asks for more time than the partition allows"),
    ("PartitionDown", "its partition is down"),
    ("PartitionInactive", "its partition starts no jobs now"),
    ("PartitionConfig", "its partition does not allow what it asks for"),
    ("BadConstraints", "no node has what it asks for"),
    ("JobHeldUser", "is held: scontrol release starts it"),
    ("JobHeldAdmin", "is held by the administrator"),
    ("JobArrayTaskLimit", "waits for other tasks of its array"),
    ("InvalidAccount", "its account is not one of yours"),
    ("InvalidQOS", "its QOS is not one of yours"),
    ("AccountNotAllowed", "its partition does not accept its account"),
    ("QOSNotAllowed", "its partition does not accept its QOS"),
    ("QOS", "its QOS has reached a limit"),
    ("MaxQOS", "its QOS has reached a limit"),
    ("Assoc", "its account has reached a limit"),
    ("MaxMem", "asks for more memory than is allowed"),
    ("MaxCpu", "asks for more processors than are allowed"),
    ("launch failed requeued held", "is held after a node could not start it: scontrol release"),
    ("user env retrieval failed", "is held after a node could not log you in: scontrol release"),
    ("job requeued in held state", "is held: scontrol release starts it"),
)
# Other programs' messages are cut after this many characters.
_TEXT_CHARS = 400
# The columns requested from squeue and sacct. The reason comes last, as it is free text. Only sacct
# has the exit code and the signal; that column of squeue is empty.
QUEUE_COLUMNS = "%A|%T|%S|%e|%j||%B|%r"
ACCOUNTING_COLUMNS = "JobIDRaw,State,Start,End,JobName,ExitCode,NodeList,Reason"
_SUBMITTED = re.compile(r"Submitted batch job ([0-9]{1,10})\b")
_NUMBER = re.compile(r"(?<!\S)([0-9]{1,10})(?=;|\s|$)")
# The first of "n[1-2],n7".
_FIRST_HOST = re.compile(r"([\w.-]+)(?:\[([0-9]+))?")
_EXIT_CODE = re.compile(r"([0-9]{1,3}):([0-9]{1,3})")


class StopReason(Enum):
    """Why the script has asked the head to end."""

    CANCEL = "cancel"
    # Slurm has announced a signal, of a time limit or a preemption.
    WARNED = "warned"
    PREEMPTED = "preempted"
    # Slurm ends the job.
    SLURM = "slurm"


@dataclass(frozen=True, slots=True)
class Marks:
    """The script's notes in the job's folder about its last attempt.

    Args:
        id: Slurm's number of the job; empty if the job has not started.
        stop_reason: Why the script has asked the head to end; None if it has not.
        left_s: The time left at Slurm's warning, as Slurm reported it; None for no limit.
        due_s: The time left at which Slurm warns of the job's time limit.
        lost: The worker that failed while the head would have waited for it, with its exit code.
        code: The job's exit code; None while it runs, or when the script was killed.
        unseen_by: The host of a node that does not see the job's folder.
        out_of_memory: The host on which a process was killed because the job's memory was short.
        memory: The memory that Slurm had granted the job; empty for no limit.
        down: The hosts that have failed.
        setup: The node on which ``slurm.setup`` ended the shell, and how.
        prolog: The host on which Slurm's prolog failed: Slurm then cancels the job.
        launch: The host that could not start its part of the job, and srun's message.
        srun: The first other error of srun.
        given_up: Why the script ended before it started anything.
        is_silent: Whether the head ended without a note of how.
    """

    id: str = ""
    began_at: float = 0.0
    hosts: tuple[str, ...] = ()
    stop_reason: StopReason | None = None
    left_s: float | None = None
    due_s: float = 0.0
    lost: tuple[int, int] | None = None
    code: int | None = None
    ended_at: float = 0.0
    unseen_by: str = ""
    out_of_memory: str = ""
    memory: str = ""
    down: str = ""
    setup: Failed | None = None
    prolog: str = ""
    launch: tuple[str, str] | None = None
    srun: str = ""
    given_up: str = ""
    is_silent: bool = False


class Failed(NamedTuple):
    """A node that failed before its entry started."""

    node: int
    text: str


@dataclass(frozen=True, slots=True)
class Facts:
    """What Slurm reports of a job; the state is empty if Slurm does not know the job.

    Args:
        exit_code: The exit code of the job's script, and the signal that killed it, or 0; None if
            unknown.
        head: The host of its first node; empty if unknown.
    """

    id: str = ""
    state: str = ""
    reason: str = ""
    started_at: float = 0.0
    ended_at: float = 0.0
    exit_code: tuple[int, int] | None = None
    head: str = ""


def read_marks(text: str) -> Marks:
    """Parse the lines of the file ``state``; an incomplete line is skipped."""
    marks = Marks()
    for line in text.splitlines():
        fields = line.split()
        try:
            marks = _with_line(marks, fields, float(fields[-1]))
        except (IndexError, ValueError):
            continue
    return marks


def _with_line(marks: Marks, fields: list[str], at: float) -> Marks:
    match fields[:-1]:
        case ["begin", number, _, hosts]:
            return Marks(id=number, began_at=at, hosts=tuple(hosts.split(",")))
        case ["asked", why, *times]:
            left_s, warn_s = map(float, times or (-1, 0))
            known_s = None if left_s < 0 else left_s
            reason = StopReason(why)
            return replace(marks, stop_reason=reason, left_s=known_s, due_s=warn_s + EARLY_S)
        case ["lost", node, code]:
            return replace(marks, lost=(int(node), int(code)))
        case ["memory", host, *limit]:
            return replace(marks, out_of_memory=host, memory=" ".join(limit))
        case ["down", host]:
            return replace(marks, down=host)
        case ["unseen", host]:
            return replace(marks, unseen_by=host)
        case ["end", code]:
            return replace(marks, code=int(code), ended_at=at)
    return _with_cause(marks, fields[:-1])


def _with_cause(marks: Marks, fields: list[str]) -> Marks:
    """Add a note about why the job has failed, which may quote another program."""
    match fields:
        case ["setup", node, *words]:
            return replace(marks, setup=Failed(int(node), _text(words)))
        case ["prolog", host]:
            return replace(marks, prolog=host)
        case ["launch", host, *words]:
            return replace(marks, launch=(host, _text(words)))
        case ["srun", *words]:
            return replace(marks, srun=_text(words))
        case ["gave-up", *words]:
            return replace(marks, given_up=_text(words))
        case ["silent"]:
            return replace(marks, is_silent=True)
    return marks


def _text(words: list[str]) -> str:
    """Return words that another program printed, without control characters."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(words))[:_TEXT_CHARS]


def read_jobs(text: str, *, renamed: str = "") -> dict[str, Facts]:
    """Parse the output of squeue or sacct in these columns, by the id of each of our jobs.

    Times are in seconds since the epoch.

    Args:
        renamed: The id of the job in the output, if its name is no longer ours.
    """
    facts_of: dict[str, Facts] = {}
    for line in text.splitlines():
        number, state, start, end, name, code, hosts, reason = (
            *line.split("|", 7),
            *[""] * 8,
        )[:8]
        is_ours = renamed or name.startswith(JOB_NAME)
        if is_ours and number.isdecimal() and state.strip():
            facts_of[renamed or name.removeprefix(JOB_NAME)] = Facts(
                id=number,
                # "CANCELLED by 1000"
                state=state.split()[0],
                reason="" if reason in ("None", "(null)", "N/A") else reason,
                started_at=_seconds(start),
                ended_at=_seconds(end),
                exit_code=read_exit_code(code),
                head=_first_host(hosts),
            )
    return facts_of


def _first_host(hosts: str) -> str:
    match = _FIRST_HOST.match(hosts)
    # "n/a" or "None assigned", if it has none.
    if not match or hosts.lower().startswith(("n/a", "none assigned")):
        return ""
    return f"{match[1]}{match[2] or ''}"


def read_number(output: str) -> str:
    """Return the job's number in sbatch's output; empty if there is none.

    It is "123", or "123;cluster" if there are several clusters. At some sites, sbatch is a script
    that prints more lines, or "Submitted batch job 123" whatever the options.
    """
    numbers = _SUBMITTED.findall(output) or _NUMBER.findall(output)
    return numbers[-1] if numbers else ""


def read_exit_code(text: str) -> tuple[int, int] | None:
    """Return the first exit code and signal, as in ``7:0``; None if there are none."""
    match = _EXIT_CODE.search(text)
    return (int(match[1]), int(match[2])) if match else None


def may_lack_prolog(marks: Marks, facts: Facts, *, is_cancelled: bool) -> bool:
    """Whether Slurm may have cancelled the job because a prolog failed on its first node."""
    return facts.state == "CANCELLED" and not marks.id and not is_cancelled


def with_prolog(marks: Marks, facts: Facts, log: str) -> Marks:
    """Add what Slurm itself wrote to the log of a job whose script it never started."""
    has_failed = "running slurm prolog" in log
    return replace(marks, prolog=facts.head or "the first node") if has_failed else marks


def lacks_exit_code(marks: Marks, facts: Facts) -> bool:
    """Whether the job has failed and only Slurm can know with which exit code."""
    has_failed = _STATES.get(facts.state) is JobState.FAILED
    return has_failed and marks.code is None and facts.exit_code is None


def is_settled(marks: Marks) -> bool:
    """Whether the folder alone shows how the job ended."""
    return marks.code == 0 and not marks.stop_reason


def is_waiting(facts: Facts) -> bool:
    """Whether the job has not started, or waits to start again."""
    return _STATES.get(facts.state) is JobState.PENDING and facts.state != "CONFIGURING"


def is_running(facts: Facts) -> bool:
    """Whether the job's processes run, and so receive signals."""
    is_stopped = facts.state in ("SUSPENDED", "STOPPED")
    return _STATES.get(facts.state) is JobState.RUNNING and not is_stopped


def is_over(facts: Facts) -> bool:
    """Whether Slurm has finished with the job."""
    return _STATES.get(facts.state, JobState.UNKNOWN).is_final


def status_of(marks: Marks, facts: Facts, *, is_cancelled: bool) -> NativeStatus:
    """Return the status of the job.

    Args:
        is_cancelled: Whether the job was cancelled through cloudjob.
    """
    started_at = rfc3339(marks.began_at or facts.started_at) if marks.id else None
    end = _success(marks, facts, is_cancelled=is_cancelled)
    state = _STATES.get(facts.state, JobState.UNKNOWN)
    if end is None and facts.state and not state.is_final:
        started_at = started_at or rfc3339(facts.started_at) or None
        return unended(state, _native(facts), started_at, _wait(facts))
    end = end or _end(marks, facts, is_cancelled=is_cancelled)
    return Ended(
        facts.state or end.native,
        end.cause,
        end.failure,
        started_at=started_at,
        ended_at=rfc3339(marks.ended_at or facts.ended_at or marks.began_at) or None,
        attempt_at=rfc3339(marks.began_at),
        reason=_short_of_memory(marks, facts),
        stop=end.stop,
    )


class _End(NamedTuple):
    """What ended a job, its failure, and what a record means that says it was told to end.

    Args:
        native: The state of a job that Slurm no longer knows.
    """

    cause: Cause
    failure: Failure | None
    stop: Stop = Stop.PLATFORM
    native: str = "gone"


def _success(marks: Marks, facts: Facts, *, is_cancelled: bool) -> _End | None:
    """Return how a job ended that has succeeded; None for any other."""
    has_ended_well = facts.state == "COMPLETED" and not marks.code and not is_cancelled
    if is_settled(marks) or has_ended_well:
        return _End(Cause.NONE, None, Stop.CANCEL, "COMPLETED")
    return None


def _end(marks: Marks, facts: Facts, *, is_cancelled: bool) -> _End:
    """Return how a job ended that did not succeed."""
    was_cancelled = facts.state in ("CANCELLED", "REVOKED") and not marks.prolog
    if is_cancelled or was_cancelled or marks.stop_reason is StopReason.CANCEL:
        end = _End(Cause.CANCELLED, Failure(exit_code=marks.code), Stop.CANCEL)
    else:
        end = _failed(marks, facts)
    return end._replace(native="FAILED") if marks.code else end


def _short_of_memory(marks: Marks, facts: Facts) -> str | OutOfMemory:
    """Return where the job's memory limit ended a process; empty if it did not."""
    if not marks.out_of_memory and facts.state != "OUT_OF_MEMORY":
        return ""
    host = marks.out_of_memory or "a node"
    where = f"the job used more on {host} than Slurm allows it"
    return OutOfMemory(where, marks.memory, "; slurm.memory_gib requests more")


def _failed(marks: Marks, facts: Facts) -> _End:
    if facts.state in ("TIMEOUT", "DEADLINE") or _was_time(marks):
        message = f"{_REASONS['TIMEOUT']} (slurm.time_min, or the partition's limit)"
        return _End(Cause.TIMEOUT, Failure(exit_code=TIMED_OUT, message=message))
    if marks.stop_reason in (StopReason.WARNED, StopReason.PREEMPTED) or facts.state == "PREEMPTED":
        is_sure = marks.stop_reason is StopReason.PREEMPTED or facts.state == "PREEMPTED"
        message = _REASONS["PREEMPTED"] if is_sure else _EARLY_SIGNAL
        return _End(Cause.PLATFORM, Failure(exit_code=marks.code, message=message))
    not_started = _not_started(marks, facts)
    if not_started:
        return _End(Cause.PLATFORM, not_started._replace(exit_code=ENTRY_FAILED))
    if marks.lost is not None:
        node, code = marks.lost
        message = f"node {node} ({_host(marks, node)}) ended with exit code {code}"
        return _End(Cause.PLATFORM, Failure(node, exit_code=code, message=message))
    has_lost_node = facts.state == "NODE_FAIL"
    if marks.code is not None and not marks.stop_reason and not has_lost_node:
        return _head_failed(marks, marks.code)
    if marks.code is None and facts.exit_code and facts.exit_code[0]:
        return _head_failed(replace(marks, is_silent=True), facts.exit_code[0])
    message = _failure_cause(marks, facts)
    return _End(Cause.PLATFORM, Failure(exit_code=marks.code, message=message))


def _head_failed(marks: Marks, code: int) -> _End:
    failure = Failure(0, exit_code=code, message=_end_of_head(marks, code))
    return _End(Cause.PLATFORM, failure, Stop.CANCEL)


def _not_started(marks: Marks, facts: Facts) -> Failure | None:
    """Return why the job has failed if that was before its entries had started; else None."""
    if marks.given_up:
        return Failure(0, message=f"{_host(marks, 0)}: {marks.given_up}")
    if marks.unseen_by:
        return Failure(message=_UNSEEN.format(host=marks.unseen_by))
    if facts.reason == "JobLaunchFailure" and not marks.id:
        return Failure(message=_NO_LOG)
    if marks.prolog:
        return Failure(message=f"Slurm's prolog failed on {marks.prolog} {_PROLOG}")
    if marks.setup:
        node, text = marks.setup
        return Failure(node, message=f"node {node} ({_host(marks, node)}): {text}")
    if marks.launch:
        host, text = marks.launch
        index = marks.hosts.index(host) if host in marks.hosts else None
        name = host if index is None else f"node {index} ({host})"
        is_refused = any(part in text.lower() for part in _REFUSALS)
        hint = f" (does munged run on {host}, with the cluster's key?)" if is_refused else ""
        return Failure(index, message=f"Slurm could not start {name}: {text}{hint}")
    return None


def _end_of_head(marks: Marks, code: int) -> str:
    host = f" ({marks.hosts[0]})" if marks.hosts else ""
    text = f"node 0{host} ended with exit code {code}"
    if marks.srun:
        return f"{text}: srun: {marks.srun}"
    # A process that was killed could not note its end on any disk.
    lacks_notes = marks.is_silent or not marks.hosts
    return f"{text} {_FULL}" if lacks_notes and code < _KILLED else text


def _host(marks: Marks, node: int) -> str:
    return marks.hosts[node] if node < len(marks.hosts) else "?"


def _failure_cause(marks: Marks, facts: Facts) -> str:
    why = _REASONS.get(facts.state, "")
    if facts.state == "NODE_FAIL":
        # The head's host runs the script, which would have noted that it was asked to end.
        was_head = marks.id and marks.code is None and not marks.stop_reason
        host = marks.down or (_host(marks, 0) if was_head else "")
        why = f"{host} has failed" if host else why
    if facts.state == "FAILED" and marks.id:
        killed_by = f" by signal {facts.exit_code[1]}" if facts.exit_code else ""
        why = f"the job's script was killed{killed_by}"
    if not facts.state:
        detail = "its script was killed" if marks.id else "it never started: submit it again"
        why = f"Slurm no longer knows the job, and {detail}"
    if facts.reason:
        why = f"{why} ({facts.reason})"
    return why


def _was_time(marks: Marks) -> bool:
    was_warned = marks.stop_reason is StopReason.WARNED
    return was_warned and marks.left_s is not None and marks.left_s <= marks.due_s


def _native(facts: Facts) -> str:
    """Return Slurm's state, and why a waiting job waits."""
    if not facts.state:
        return "unknown to Slurm"
    wait = _wait(facts)
    return f"{facts.state} ({wait.message})" if wait else facts.state


def _wait(facts: Facts) -> Wait | None:
    if not facts.reason or _STATES.get(facts.state) is not JobState.PENDING:
        return None
    message = f"{facts.reason}: {waiting_reason(facts.reason)}"
    return Wait(phase=WaitPhase.QUEUE, since="", message=message)


def waiting_reason(reason: str) -> str:
    """Return why a job waits, in plain English."""
    for beginning, text in _WAITING_REASONS:
        if reason.lstrip("(").startswith(beginning):
            return text
    return "waits"


def _seconds(text: str) -> float:
    return float(text) if text.isascii() and text.isdecimal() and len(text) < 12 else 0.0

"""Tests of a job's status, derived from Slurm's output and the notes in the job's folder."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloudjob.backends.native import Stop, Unknown, Waiting
from cloudjob.backends.slurm import state
from cloudjob.backends.slurm.state import Facts, Marks
from cloudjob.model.status import Cause, JobState

BEGIN = "begin 8 0 n1,n2 1795258477\n"


def facts_of(slurm_state: str, reason: str = "None") -> Facts:
    """Return the facts read from the output of ``squeue`` for a job."""
    text = f"8|{slurm_state}|1795258477|1795258481|cloudjob-sleep-gr8frw4v|||{reason}\n"
    return state.read_jobs(text)["sleep-gr8frw4v"]


def status(marks: str, slurm_state: str = "", *, reason: str = "None", **options):
    """Return the status of a job with these notes in its folder and this state in Slurm."""
    facts = facts_of(slurm_state, reason) if slurm_state else Facts()
    return state.status_of(state.read_marks(marks), facts, **{"is_cancelled": False, **options})


def test_a_reason_may_contain_any_character():
    assert facts_of("PENDING", "ReqNodeNotAvail, UnavailableNodes:n[1-2] | all") == Facts(
        id="8",
        state="PENDING",
        reason="ReqNodeNotAvail, UnavailableNodes:n[1-2] | all",
        started_at=1795258477.0,
        ended_at=1795258481.0,
    )


def test_jobs_of_others_and_steps_are_skipped():
    text = (
        "7|RUNNING|1|2|interactive||n1|None\n"
        "8.batch|COMPLETED|1|2|batch|0:0|n1|\n"
        "8|CANCELLED by 0|1795258477|1795258481|cloudjob-a-gr8frw4v|7:9|n[08-12],x1|None\n"
        "9|PENDING|N/A|N/A|cloudjob-b-gr8frw4v||n/a|Resources\n"
    )

    assert state.read_jobs(text) == {
        "a-gr8frw4v": Facts("8", "CANCELLED", "", 1795258477.0, 1795258481.0, (7, 9), "n08"),
        "b-gr8frw4v": Facts("9", "PENDING", "Resources"),
    }


@pytest.mark.parametrize(
    ("slurm_state", "reason", "native"),
    [
        ("PENDING", "Resources", "PENDING (Resources: waits for free nodes)"),
        (
            "PENDING",
            "DependencyNeverSatisfied",
            "PENDING (DependencyNeverSatisfied: never starts, as a job",
        ),
        ("PENDING", "Priority", "PENDING (Priority: waits behind jobs of higher priority)"),
        ("PENDING", "QOSMaxJobsPerUserLimit", "PENDING (QOSMaxJobsPerUserLimit: its QOS has"),
        ("PENDING", "AssocGrpNodeLimit", "PENDING (AssocGrpNodeLimit: its account has reached"),
        ("PENDING", "ReqNodeNotAvail, UnavailableNodes:n1", "PENDING (ReqNodeNotAvail, Unavail"),
        ("PENDING", "SomethingNew", "PENDING (SomethingNew: waits)"),
        ("PENDING", "None", "PENDING"),
    ],
)
def test_a_waiting_job_is_reported_with_the_reason(slurm_state, reason, native):
    """The status has Slurm's state and cloudjob's."""
    status_now = status("", slurm_state, reason=reason)

    assert status_now.state is JobState.PENDING
    assert status_now.native.startswith(native)
    assert isinstance(status_now, Waiting)


@pytest.mark.parametrize(
    ("slurm_state", "expected", "cause", "message"),
    [
        ("TIMEOUT", JobState.FAILED, Cause.TIMEOUT, "its time limit on Slurm"),
        ("DEADLINE", JobState.FAILED, Cause.TIMEOUT, "its time limit on Slurm"),
        ("NODE_FAIL", JobState.FAILED, Cause.PLATFORM, "n1 has failed"),
        ("BOOT_FAIL", JobState.FAILED, Cause.PLATFORM, "a node did not boot"),
        ("OUT_OF_MEMORY", JobState.FAILED, Cause.PLATFORM, "out of memory"),
        ("PREEMPTED", JobState.FAILED, Cause.PLATFORM, "a job of higher priority"),
        ("CANCELLED", JobState.CANCELLED, Cause.CANCELLED, ""),
        ("FAILED", JobState.FAILED, Cause.PLATFORM, "the job's script was killed"),
    ],
)
def test_a_job_whose_script_was_killed_has_slurms_final_state(
    slurm_state, expected, cause, message
):
    """The notes in the folder show only that the script had started."""
    status_now = status(BEGIN, slurm_state)

    assert (status_now.state, status_now.cause, status_now.native) == (expected, cause, slurm_state)
    assert message in f"{status_now.failure.message}: {status_now.reason}"
    assert status_now.ended_at == "2026-11-21T10:54:41.000Z"


@pytest.mark.parametrize("slurm_state", ["RUNNING", "COMPLETING", "SUSPENDED", "RESIZING"])
def test_a_running_job_has_the_start_of_its_script(slurm_state):
    status_now = status(BEGIN, slurm_state)

    assert (status_now.state, status_now.native) == (JobState.RUNNING, slurm_state)
    assert status_now.started_at == "2026-11-21T10:54:37.000Z"


def test_an_unrecognised_state_of_slurm_is_unknown():
    """An unknown state is neither a success nor final."""
    status_now = status(BEGIN, "TELEPORTING")

    assert status_now == Unknown("TELEPORTING", started_at="2026-11-21T10:54:37.000Z")


def test_a_success_is_known_without_asking_slurm():
    """The last line of the script's notes is enough."""
    status_now = status(BEGIN + "end 0 1795258490\n")

    assert (status_now.state, status_now.exit_code) == (JobState.SUCCEEDED, 0)
    assert status_now.ended_at == "2026-11-21T10:54:50.000Z"


def test_a_job_has_ended_only_when_slurm_agrees():
    """Only Slurm knows whether the job will be started again, and why it was terminated."""
    text = BEGIN + "asked slurm 1795258488\nend 143 1795258490\n"

    assert status(text, "COMPLETING").state is JobState.RUNNING
    assert status(text, "PENDING").state is JobState.PENDING
    assert status(text, "CANCELLED").state is JobState.CANCELLED
    assert status(BEGIN + "end 3 1795258490\n", "FAILED").exit_code == 3


def test_a_job_unknown_to_slurm_gets_its_status_from_its_notes():
    """The last line of its notes decides; if it is not an ``end`` line, the script was killed."""
    ended = status(BEGIN + "end 3 1795258490\n")
    killed = status(BEGIN)

    assert (ended.state, ended.exit_code, ended.failure.node) == (JobState.FAILED, 3, 0)
    assert ended.failure.message == "node 0 (n1) ended with exit code 3"
    assert killed.state is JobState.FAILED
    assert killed.failure.message == "Slurm no longer knows the job, and its script was killed"


def test_the_warning_of_a_limit_is_not_a_preemption():
    """The time left decides; Slurm may warn a minute early."""
    late = status(BEGIN + "asked warned 40 40 1795258488\nend 143 1795258490\n", "FAILED")
    early = status(BEGIN + "asked warned 3500 40 1795258488\nend 143 1795258490\n", "FAILED")
    endless = status(BEGIN + "asked warned -1 40 1795258488\nend 143 1795258490\n", "FAILED")

    assert (late.cause, late.exit_code, late.stop) == (Cause.TIMEOUT, 124, Stop.PLATFORM)
    for unannounced in (early, endless):
        assert "a user sent the signal, or a job of higher priority" in unannounced.failure.message


def test_a_job_is_cancelled_whoever_cancelled_it():
    notes = BEGIN + "asked cancel 1795258488\nend 143 1795258490\n"

    assert status(notes, "FAILED").state is JobState.CANCELLED
    assert status(BEGIN, "FAILED", is_cancelled=True).state is JobState.CANCELLED
    # The cancel came too late: the job had already succeeded.
    ended = BEGIN + "end 0 1795258490\n"
    assert status(ended, "COMPLETED", is_cancelled=True).state is JobState.SUCCEEDED


def test_a_worker_that_never_reported_is_blamed():
    status_now = status(BEGIN + "lost 1 125 1795258488\nend 143 1795258490\n", "FAILED")

    assert (status_now.failure.node, status_now.exit_code, status_now.stop) == (
        1,
        125,
        Stop.PLATFORM,
    )
    assert status_now.failure.message == "node 1 (n2) ended with exit code 125"


def test_a_script_that_slurm_could_not_start_is_not_reported_as_killed():
    assert status("", "FAILED").failure.message.startswith("the job's script failed before it")
    killed = status(BEGIN, "FAILED", reason="JobLaunchFailure")
    assert killed.failure.message == "the job's script was killed (JobLaunchFailure)"


@pytest.mark.parametrize("note", ["asked slurm", "silent"])
def test_a_node_that_failed_is_named(note):
    marks = f"{BEGIN}{note} 1795258488\ndown n2 1795258489\nend 143 1795258490\n"
    status_now = status(marks, "NODE_FAIL", reason="NodeDown")

    assert status_now.failure.message == "n2 has failed (NodeDown)"
    # The head may have noted a cancel, as Slurm sends SIGTERM if its node was set down.
    assert (status_now.cause, status_now.stop) == (Cause.PLATFORM, Stop.PLATFORM)


def test_a_job_that_ran_out_of_memory_is_reported_with_its_limit():
    status_now = status(BEGIN + "memory n2 308M a node 1795258489\nend 137 1795258490\n", "FAILED")

    assert str(status_now.reason) == (
        "out of memory: the job used more on n2 than Slurm allows it, 308M a node;"
        " slurm.memory_gib requests more"
    )
    without_limit = status(BEGIN + "memory n2 1795258489\nend 137 1795258490\n", "FAILED")
    assert "than Slurm allows it;" in str(without_limit.reason)


@pytest.mark.parametrize(
    ("marks", "reason", "message"),
    [
        ("", "JobLaunchFailure", "the first node does not see the job's folder or cannot write"),
        (
            BEGIN + "unseen n2 1795258488\nend 143 1795258490\n",
            "NonZeroExitCode",
            "n2 does not see the job's folder: it must be on a disk",
        ),
    ],
)
def test_a_folder_that_a_node_does_not_see_is_named_as_the_cause(marks, reason, message):
    status_now = status(marks, "FAILED", reason=reason)

    assert (status_now.state, status_now.exit_code, status_now.stop) == (
        JobState.FAILED,
        125,
        Stop.PLATFORM,
    )
    assert status_now.failure.message.startswith(message)


def test_only_the_last_attempt_of_a_job_counts():
    """Only notes from the last ``begin`` line on count."""
    again = "begin 8 1 n3,n4 1795258600\n"
    text = BEGIN + "asked warned 3500 40 1795258488\n" + again

    assert state.read_marks(text) == Marks(id="8", began_at=1795258600.0, hosts=("n3", "n4"))
    assert status(text, "RUNNING").started_at == "2026-11-21T10:56:40.000Z"
    assert status(text, "NODE_FAIL").attempt_at == "2026-11-21T10:56:40.000Z"


@given(st.text())
def test_any_text_is_parsed_without_an_error(text):
    marks = state.read_marks(text)
    assert state.waiting_reason(text)
    for facts in [Facts(), *state.read_jobs(text).values()]:
        state.status_of(marks, facts, is_cancelled=False)


NOTE_WORDS = st.sampled_from(
    [*state._STATES, "begin", "asked", "lost", "memory", "down", "unseen", "end"]
)


@given(st.lists(st.one_of(NOTE_WORDS, st.text(max_size=8), st.integers().map(str))).map(" ".join))
def test_marks_in_any_order_are_parsed_without_an_error(text):
    marks = state.read_marks(text.replace("begin", "\nbegin"))
    facts = facts_of(
        text.replace("|", "").split()[0] if text.replace("|", "").split() else "FAILED"
    )
    result = state.status_of(marks, facts, is_cancelled=False)

    assert result.state is not JobState.SUCCEEDED or marks.code == 0 or facts.state == "COMPLETED"


END = "end 143 1795258490\n"


@pytest.mark.parametrize(
    ("notes", "slurm_state", "message", "node", "code"),
    [
        (
            f'setup 1 slurm.setup: "exit 3" ended it\x1b[2J 1795258488\n{END}',
            "FAILED",
            'node 1 (n2): slurm.setup: "exit 3" ended it?[2J',
            1,
            125,
        ),
        (
            "launch n2 Zero Bytes were transmitted 1795258488\nend 141 1795258490\n",
            "FAILED",
            "Slurm could not start node 1 (n2): Zero Bytes were transmitted (does munged run on"
            " n2, with the cluster's key?)",
            1,
            125,
        ),
        (
            f"asked slurm 1795258488\nprolog n2 1795258488\n{END}",
            "CANCELLED",
            "Slurm's prolog failed on n2 (sinfo -R",
            None,
            125,
        ),
        (
            "silent 1795258488\nsrun Unable to create step for job 8: Invalid 1795258488\n"
            "end 1 1795258490\n",
            "FAILED",
            "node 0 (n1) ended with exit code 1: srun: Unable to create step for job 8: Invalid",
            0,
            1,
        ),
        (
            "silent 1795258488\nend 7 1795258490\n",
            "FAILED",
            "node 0 (n1) ended with exit code 7 and could not note it in the job's folder",
            0,
            7,
        ),
        (
            "silent 1795258488\nend 137 1795258490\n",
            "FAILED",
            "node 0 (n1) ended with exit code 137",
            0,
            137,
        ),
        (
            "gave-up creating /x/ssh-key: is the disk full? 1795258488\nend 125 1795258490\n",
            "FAILED",
            "n1: creating /x/ssh-key: is the disk full?",
            0,
            125,
        ),
    ],
)
def test_a_job_that_did_not_run_is_reported_with_its_cause(notes, slurm_state, message, node, code):
    """Notes that quote another program have no control characters."""
    status_now = status(BEGIN + notes, slurm_state)

    assert (status_now.state, status_now.failure.node, status_now.exit_code) == (
        JobState.FAILED,
        node,
        code,
    )
    assert status_now.failure.message.startswith(message)


@pytest.mark.parametrize(
    ("exit_code", "message", "code"),
    [
        ((7, 0), "node 0 (n1) ended with exit code 7 and could not note it in the job's", 7),
        ((0, 9), "the job's script was killed by signal 9", None),
    ],
)
def test_slurms_exit_code_counts_if_the_script_noted_none(exit_code, message, code):
    """The script cannot note it on a full disk, or was killed."""
    marks, facts = state.read_marks(BEGIN), facts_of("FAILED")
    assert state.lacks_exit_code(marks, facts)
    facts = dataclasses.replace(facts, exit_code=exit_code)
    status_now = state.status_of(marks, facts, is_cancelled=False)

    assert not state.lacks_exit_code(marks, facts)
    assert (status_now.state, status_now.exit_code) == (JobState.FAILED, code)
    assert status_now.failure.message.startswith(message)


def test_only_slurms_own_log_shows_that_the_first_nodes_prolog_failed():
    """Then Slurm cancels the job before its script has started."""
    marks, facts = state.read_marks(""), facts_of("CANCELLED")
    assert state.may_lack_prolog(marks, facts, is_cancelled=False)
    assert not state.may_lack_prolog(marks, facts, is_cancelled=True)
    failed = state.with_prolog(marks, facts, "Error running slurm prolog: 1\n")
    named = state.with_prolog(
        marks, dataclasses.replace(facts, head="n7"), "Error running slurm prolog: 1\n"
    )

    assert state.status_of(failed, facts, is_cancelled=False).state is JobState.FAILED
    assert (failed.prolog, named.prolog) == ("the first node", "n7")
    assert state.with_prolog(marks, facts, "slurmstepd: error: *** CANCELLED") == marks


def test_a_preemption_is_none_of_the_jobs_time():
    """Slurm announces both with the same signal; the script asks it which one this is."""
    status_now = status(f"{BEGIN}asked preempted 1795258488\n{END}", "FAILED")

    assert status_now.failure.message.startswith("Slurm gave its nodes to a job of higher priority")
    assert status_now.cause is Cause.PLATFORM

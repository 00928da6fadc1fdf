"""The status of a job, from Slurm's answers and the notes in the job's folder."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloudjob.backends.slurm import state
from cloudjob.backends.slurm.state import Facts, Marks
from cloudjob.model.status import JobState

# As Slurm 22.05 wrote it, with SLURM_TIME_FORMAT=%s.
SHOWN = (
    "JobId=8 JobName=cloudjob-sleep-gr8frw4v UserId=root(0) GroupId=root(0) MCS_label=N/A "
    "Priority=4294901753 Nice=0 Account=(null) QOS=(null) JobState={state} Reason={reason} "
    "Dependency=(null) Requeue=0 Restarts={restarts} BatchFlag=1 Reboot=0 ExitCode=137:0 "
    "RunTime=00:00:04 TimeLimit=01:00:00 TimeMin=N/A SubmitTime=1795258476 "
    "EligibleTime=1795258476 AccrueTime=1795258476 StartTime=1795258477 EndTime=1795258481 "
    "Deadline=N/A Partition=main NodeList=n[1-2] BatchHost=n1 NumNodes=2 "
    "Command=/home/me/my jobs/job.sh WorkDir=/home/me/JobState=FAILED "
)
BEGIN = "begin 8 0 n1,n2 1795258477\n"


def facts(word: str, reason: str = "None", restarts: int = 0) -> Facts:
    """Return the output of scontrol."""
    return state.read_facts(SHOWN.format(state=word, reason=reason, restarts=restarts))


def status(marks: str, word: str = "", *, reason: str = "None", restarts: int = 0, **given):
    """Return the state of a job by its folder and Slurm."""
    said = facts(word, reason, restarts) if word else Facts()
    return state.status_of(state.read_marks(marks), said, **{"is_cancelled": False, **given})


def test_the_output_of_scontrol_is_parsed():
    """Values with blanks, and a path that looks like a key, too."""
    assert facts("PENDING", "ReqNodeNotAvail, UnavailableNodes:n[1-2]", 2) == Facts(
        id="8",
        state="PENDING",
        reason="ReqNodeNotAvail, UnavailableNodes:n[1-2]",
        restarts=2,
        started_at=1795258477.0,
        ended_at=1795258481.0,
    )


def test_the_output_of_sacct_is_parsed():
    text = "8.batch|COMPLETED||1|2\n8|CANCELLED by 0|None|1795258477|1795258481\n"

    assert state.read_accounting(text) == Facts("8", "CANCELLED", "", 0, 1795258477.0, 1795258481.0)


@pytest.mark.parametrize(
    ("word", "reason", "native"),
    [
        ("PENDING", "Resources", "PENDING (Resources: waits for free nodes)"),
        ("PENDING", "Priority", "PENDING (Priority: waits behind jobs of higher priority)"),
        ("PENDING", "QOSMaxJobsPerUserLimit", "PENDING (QOSMaxJobsPerUserLimit: its QOS has"),
        ("PENDING", "AssocGrpNodeLimit", "PENDING (AssocGrpNodeLimit: its account has reached"),
        ("PENDING", "ReqNodeNotAvail, UnavailableNodes:n1", "PENDING (ReqNodeNotAvail, Unavail"),
        ("PENDING", "SomethingNew", "PENDING (SomethingNew: waits)"),
        ("PENDING", "None", "PENDING"),
    ],
)
def test_a_waiting_job_is_reported_with_the_reason(word, reason, native):
    """The status has Slurm's state and ours."""
    found = status("", word, reason=reason)

    assert found.state is JobState.PENDING
    assert found.native.startswith(native)
    assert found.started_at is None


@pytest.mark.parametrize(
    ("word", "expected", "cause", "message"),
    [
        ("TIMEOUT", JobState.FAILED, "timeout", "time on Slurm was over"),
        ("DEADLINE", JobState.FAILED, "timeout", "time on Slurm was over"),
        ("NODE_FAIL", JobState.FAILED, "", "a node has failed"),
        ("BOOT_FAIL", JobState.FAILED, "", "a node did not boot"),
        ("OUT_OF_MEMORY", JobState.FAILED, "", "out of memory"),
        ("PREEMPTED", JobState.FAILED, "", "a job of higher priority"),
        ("CANCELLED", JobState.CANCELLED, "", ""),
        ("FAILED", JobState.FAILED, "", "the job's script was killed"),
    ],
)
def test_a_job_whose_script_was_killed_has_slurms_final_state(word, expected, cause, message):
    """The folder only shows that it had started."""
    found = status(BEGIN, word)

    assert (found.state, found.cause, found.native) == (expected, cause, word)
    assert message in f"{found.message}: {found.reason}"
    assert found.ended_at == "2026-11-21T10:54:41.000Z"


@pytest.mark.parametrize("word", ["RUNNING", "COMPLETING", "SUSPENDED", "RESIZING"])
def test_a_job_that_runs(word):
    """Its start is that of its script."""
    found = status(BEGIN, word)

    assert (found.state, found.native) == (JobState.RUNNING, word)
    assert found.started_at == "2026-11-21T10:54:37.000Z"


def test_a_word_that_slurm_had_not_is_unknown():
    """An unknown state is neither a success nor final."""
    found = status(BEGIN, "TELEPORTING")

    assert (found.state, found.native, found.ended_at) == (JobState.UNKNOWN, "TELEPORTING", None)


def test_a_success_needs_no_word_of_slurm():
    """The last line of the script's notes is enough."""
    found = status(BEGIN + "end 0 1795258490\n")

    assert (found.state, found.exit_code) == (JobState.SUCCEEDED, 0)
    assert found.ended_at == "2026-11-21T10:54:50.000Z"


def test_an_end_that_slurm_has_not_seen_is_none_yet():
    """Only Slurm knows whether the job begins again, and why it was ended."""
    text = BEGIN + "asked slurm 1795258488\nend 143 1795258490\n"

    assert status(text, "COMPLETING").state is JobState.RUNNING
    assert status(text, "PENDING", restarts=1).state is JobState.PENDING
    assert status(text, "CANCELLED").state is JobState.CANCELLED
    assert status(BEGIN + "end 3 1795258490\n", "FAILED").exit_code == 3


def test_a_job_that_slurm_has_forgotten():
    """The last line of its notes decides; without one, it was killed."""
    ended = status(BEGIN + "end 3 1795258490\n")
    killed = status(BEGIN)

    assert (ended.state, ended.exit_code, ended.node) == (JobState.FAILED, 3, 0)
    assert ended.message == "node 0 (n1) ended with exit code 3"
    assert killed.state is JobState.FAILED
    assert killed.message == "Slurm no longer knows the job, and its script was killed"


def test_the_warning_of_a_limit_is_not_a_preemption():
    """The time left decides; Slurm may warn a minute early."""
    late = status(BEGIN + "asked warned 40 40 1795258488\nend 143 1795258490\n", "FAILED")
    early = status(BEGIN + "asked warned 3500 40 1795258488\nend 143 1795258490\n", "FAILED")
    endless = status(BEGIN + "asked warned -1 40 1795258488\nend 143 1795258490\n", "FAILED")

    assert (late.cause, late.exit_code, late.has_asked) == ("timeout", 124, True)
    assert "higher priority" in early.message
    assert "higher priority" in endless.message


def test_a_job_is_cancelled_whoever_cancelled_it():
    asked = BEGIN + "asked cancel 1795258488\nend 143 1795258490\n"

    assert status(asked, "FAILED").state is JobState.CANCELLED
    assert status(BEGIN, "FAILED", is_cancelled=True).state is JobState.CANCELLED
    # It was too late: the job had ended well.
    ended = BEGIN + "end 0 1795258490\n"
    assert status(ended, "COMPLETED", is_cancelled=True).state is JobState.SUCCEEDED


def test_a_worker_that_never_reported_is_to_blame():
    found = status(BEGIN + "lost 1 125 1795258488\nend 143 1795258490\n", "FAILED")

    assert (found.node, found.exit_code, found.has_asked) == (1, 125, True)
    assert found.message == "node 1 (n2) ended with exit code 125"


def test_a_script_that_slurm_could_not_start_is_not_one_that_was_killed():
    assert status("", "FAILED").message.startswith("the job's script failed before a node was")
    killed = status(BEGIN, "FAILED", reason="JobLaunchFailure")
    assert killed.message == "the job's script was killed (JobLaunchFailure)"


def test_a_node_that_failed_is_named():
    marks = BEGIN + "asked slurm 1795258488\ndown n2 1795258489\nend 143 1795258490\n"

    assert status(marks, "NODE_FAIL", reason="NodeDown").message == "n2 has failed (NodeDown)"


def test_memory_that_was_short_is_named_with_its_limit():
    shown = SHOWN.replace("BatchHost=n1", "BatchHost=n1 MinCPUsNode=1 MinMemoryNode=308M Min=0")
    said = state.read_facts(shown.format(state="FAILED", reason="NonZeroExitCode", restarts=0))
    marks = state.read_marks(BEGIN + "memory n2 1795258489\nend 137 1795258490\n")

    assert state.status_of(marks, said, is_cancelled=False).reason == (
        "out of memory: the job used more on n2 than Slurm had given it, 308M a node;"
        " slurm.memory_gib asks for more"
    )


@pytest.mark.parametrize(
    ("marks", "reason", "host"),
    [
        ("", "JobLaunchFailure", "the first node"),
        (BEGIN + "unseen n2 1795258488\nend 143 1795258490\n", "NonZeroExitCode", "n2"),
    ],
)
def test_a_folder_that_a_node_does_not_see_is_named_as_the_cause(marks, reason, host):
    found = status(marks, "FAILED", reason=reason)

    assert (found.state, found.exit_code, found.has_asked) == (JobState.FAILED, 125, True)
    assert found.message.startswith(f"{host} does not see the job's folder: it must be on a disk")


def test_a_job_that_begins_again_has_forgotten_its_first_time():
    """Only lines after the last beginning count."""
    again = "begin 8 1 n3,n4 1795258600\n"
    text = BEGIN + "asked warned 3500 40 1795258488\n" + again

    assert state.read_marks(text) == Marks(
        id="8", restarts=1, began_at=1795258600.0, hosts=("n3", "n4")
    )
    assert status(text, "RUNNING", restarts=1).attempt_at == "2026-11-21T10:56:40.000Z"
    # It ended well, and somebody has requeued it.
    assert status(BEGIN + "end 0 1795258490\n", "PENDING", restarts=1).state is JobState.PENDING


@given(st.text())
def test_no_text_is_more_than_one_line_of_nothing(text):
    state.read_marks(text)
    state.read_accounting(text)
    found = state.read_facts(text)
    assert state.waits(found.reason)
    state.status_of(state.read_marks(text), found, is_cancelled=False)


WORDS = st.sampled_from(
    [*re.findall(r"[A-Z_]{4,}", " ".join(state._STATES)), "JobState=", "Reason=", "begin", "end"]
)


@given(st.lists(st.one_of(WORDS, st.text(max_size=8), st.integers().map(str))).map(" ".join))
def test_words_in_any_order_are_read(text):
    """Random orders of Slurm's own keys are parsed."""
    marks, found = state.read_marks(text.replace("begin", "\nbegin")), state.read_facts(text)
    result = state.status_of(marks, found, is_cancelled=False)

    assert result.state is not JobState.SUCCEEDED or marks.code == 0 or found.state == "COMPLETED"


@given(
    st.sampled_from(sorted(state._STATES)),
    st.text(st.characters(exclude_categories=("C", "Z"), exclude_characters="=")),
    st.integers(0, 99),
)
def test_what_scontrol_writes_is_what_is_read(word, reason, restarts):
    found = facts(word, reason or "None", restarts)

    assert (found.state, found.restarts, found.id) == (word, restarts, "8")
    assert found.reason == ("" if reason in ("", "None", "(null)", "N/A") else reason)

"""Jobs with retries: which failures are repeated, and what is kept of each attempt."""

from __future__ import annotations

import json

import pytest

from cloudjob.store import open_store

COUNT = """
tries = len([name for name in os.listdir(results) if name.startswith(f"try-{rank}-")])
write_result(f"try-{rank}-{tries}")
print("try", tries, flush=True)
"""


def tries(cloud) -> int:
    return len([name for name in cloud.results_written() if name.startswith("try-0-")])


@pytest.mark.surroundings
def test_an_exception_of_the_script_is_not_repeated_blindly(cloud):
    script = cloud.script(COUNT + 'raise ValueError("always the same")')

    done = cloud.submit("--retries", "3", script)

    assert (done.code, tries(cloud)) == (1, 1), done
    assert b"attempt 1 of 4 failed (cause: user); the job is not tried again" in done.err


def test_an_exception_that_is_to_be_repeated_ends_the_attempts_the_second_time(cloud):
    """The third attempt would fail at the same line, too."""
    script = cloud.script(COUNT + 'raise ValueError("always the same")')
    cloud.write("job.yaml", "retries: {max: 5, on: [user], backoff_s: 0.1}\n")

    done = cloud.submit("--config", "job.yaml", script)

    assert (done.code, tries(cloud)) == (1, 2), done
    assert b"attempt 2 of 6 begins in 0.1 s" in done.err
    assert b"not tried again: the attempt before ended in the same way" in done.err


@pytest.mark.surroundings
def test_each_attempt_is_kept_and_knows_the_one_before(cloud):
    script = cloud.script(
        """
        attempt = os.environ["CLOUDJOB_ATTEMPT"]
        print("this is attempt", attempt, flush=True)
        # Otherwise the failure of one rank may end the other one before it prints.
        write_result(f"up-{attempt}-{rank}")
        await_file(f"up-{attempt}-{1 - rank}")
        if attempt == "1":
            os.kill(os.getpid(), signal.SIGSEGV)
        folder = os.environ["CLOUDJOB_PREVIOUS_DIR"]
        record = open(folder + "/exit.json").read()
        write_result(f"rank-{rank}", os.environ["CLOUDJOB_PREVIOUS_CAUSE"] + "\\n" + record)
        sys.exit(0 if attempt == "3" else 9)
        """
    )

    done = cloud.submit("--nodes", "2", "--retries", "2", script)

    assert done.code == 0, done
    before = cloud.results_written()["rank-1"].partition(b"\n")
    assert before[0] == b"exit"
    assert json.loads(before[2])["exit_code"] == 9
    status = cloud.status(done.job)
    assert status["attempt"] == {"number": 3, "most": 3, "previous_cause": "exit"}
    for attempt in (b"1", b"2", b"3"):
        log = cloud.cli("logs", done.job, "--attempt", attempt.decode(), "--rank", "0")
        assert log.lines == [b"[0] this is attempt " + attempt], log
    unknown = cloud.cli("logs", done.job, "--attempt", "4")
    assert (unknown.code, b"have stored logs of 3" in unknown.err) == (2, True), unknown
    store_uri = status["code"]["uri"].partition(f"/{done.job}/")[0]
    store = open_store(store_uri, environ=cloud.environ)
    for attempt, code in ((1, 139), (2, 9), (3, 0)):
        kept = f"{done.job}/record/attempt-{attempt}"
        record = store.get_bytes(f"{kept}/exit.json", limit_bytes=1 << 20)
        assert json.loads(record)["exit_code"] == code
        assert store.get_bytes(f"{kept}/journal-1.jsonl.gz", limit_bytes=1 << 20)

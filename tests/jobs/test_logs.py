"""The ranks' output arrives byte for byte, in whole lines, and as soon as it is written."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal

import pytest

from cloudjob.model.text import size_text

CASES = {
    "progress": b"".join(b"\repoch 1: %3d%%" % n for n in range(101)) + b"\n",
    "open_progress": b"\r 10%\r 20%\r 30%",
    "no_final_newline": b"first\nlast",
    "invalid": b"\xff\xfe\x80 \xc3(\n" + bytes(range(256)) * 3,
    "nul": b"a\0b\n\0\0\n",
    "empty_lines": b"\n\n\n \n",
    "marks": b"[0] not mine\n[12]+ part\n[1]+ \njobentry: not ours\n[99999999999] x\n",
    "long_line": b"y" * 1_000_000 + b"\n" + b"z" * 1_000_000,
    "crlf": b"dos\r\nline\r\n",
    "escape": b"\x1b[31mred\x1b[0m\n\x1b]0;title\x07",
    "nothing": b"",
    "one_byte": b"x",
}
WRITE = """
data = open(os.path.join(os.path.dirname(os.path.abspath(__file__)), f"data-{rank}"), "rb").read()
marked = b"%d:" % rank + data
os.write(1, marked[:len(marked) // 2]) if len(marked) < 60000 else None
rest = marked[len(marked) // 2:] if len(marked) < 60000 else marked
while rest: rest = rest[os.write(1, rest):]
"""


@pytest.mark.parametrize("first", range(0, len(CASES), 4))
def test_the_log_of_a_rank_keeps_every_byte(cloud, first):
    """`logs --raw --rank R` prints the output of rank R; each rank prints something different."""
    cases = list(CASES.values())[first : first + 4]
    for rank, data in enumerate(cases):
        cloud.write(f"data-{rank}", data)

    done = cloud.submit("--nodes", "2", "--procs-per-node", "2", cloud.script(WRITE))

    assert done.code == 0, done
    for rank, data in enumerate(cases):
        assert cloud.raw(done.job, rank) == b"%d:" % rank + data


@pytest.mark.parametrize("launcher", ["mpirun", "python"])
def test_opening_stderr_by_its_path_loses_no_output(cloud, launcher):
    """The traceback at the end is in the log and in the report."""
    text = """if True:
        import os, sys
        print("before")
        os.system("echo warning >/dev/stderr")
        open("/dev/stdout", "w").write("opened\\n")
        raise ValueError("at the end")
        """
    cloud.write("opens.py", text.encode())

    done = cloud.submit("--nodes", "2", "--launcher", launcher, "opens.py")

    assert done.code == 1, done
    failure = cloud.status(done.job)["failure"]
    assert failure["last_lines"][-1] == "ValueError: at the end"
    raw = cloud.raw(done.job, failure["rank"])
    assert raw.startswith(b"before\nwarning\nopened\nTraceback (most recent call last):\n")


def test_a_line_written_in_pieces_is_one_line(cloud):
    script = cloud.script(
        """
        for piece in ("one ", "two ", "three"):
            os.write(1, piece.encode()); time.sleep(0.5)
        os.write(1, b" end\\nlast without newline")
        """
    )

    done = cloud.submit("--nodes", "2", script)

    expected = b"one two three end\nlast without newline"
    for rank in range(2):
        assert cloud.raw(done.job, rank) == expected
    assert sorted(done.lines) == sorted(
        b"[%d] %s" % (rank, line) for rank in range(2) for line in expected.split(b"\n")
    ), done
    later = cloud.cli("logs", done.job)
    assert sorted(later.lines) == sorted(done.lines)
    timed = cloud.cli("logs", "--timestamps", "--since", "1h", done.job)
    assert sorted(line[line.index(b"[") :] for line in timed.lines) == sorted(done.lines)
    time = rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (UTC|[+-]\d\d:\d\d) \["
    assert all(re.match(time, line) for line in timed.lines)
    # A line that was written in pieces has the time of its last piece.
    assert cloud.cli("logs", "--since", "2100-01-01", done.job).out == b""
    refused = cloud.cli("logs", "--since", "soon", done.job)
    assert (refused.code, refused.err.splitlines()[0][:26]) == (2, b"error: reading the filter ")


@pytest.mark.every_mpi
def test_many_lines_of_many_ranks_stay_whole(cloud):
    """Four ranks write 5 MB each at once; no line is lost, split or out of order."""
    script = cloud.script(
        """
        line = "%07d " + "abcdefghij" * 9 + "\\n"
        write_result(f"up-{rank}")
        for other in range(size): await_file(f"up-{other}")
        for n in range(50_000): sys.stdout.write(line % n)
        """
    )

    done = cloud.submit(
        "--nodes", "2", "--procs-per-node", "2", "-e", "PYTHONUNBUFFERED=", script, limit_s=300
    )

    assert done.code == 0, done
    tail = b" " + b"abcdefghij" * 9
    expected = [b"%07d" % n + tail for n in range(50_000)]
    by_rank = {rank: [] for rank in range(4)}
    for line in done.lines:
        match = re.match(rb"\[([0-3])\] ", line)
        assert match, line[:200]
        by_rank[int(match[1])].append(line[4:])
    for rank in range(4):
        assert by_rank[rank] == expected
    assert (
        hashlib.sha256(cloud.raw(done.job, 2)).digest()
        == hashlib.sha256(b"".join(line + b"\n" for line in expected)).digest()
    )


def test_lines_appear_while_the_rank_runs(cloud, poll):
    """Submit and `logs -f` show lines of the head and of a worker at once."""
    script = cloud.script(
        'write_result(f"at-{rank}", time.time())\nprint("now", rank)\nawait_file("go")'
    )
    running = cloud.start_submit("--nodes", "2", script)
    job = running.job
    following = cloud.start("logs", "-f", job)
    cloud.await_results("at-0", "at-1")

    for run in (running, following):
        for line in (b"[0] now 0\n", b"[1] now 1\n"):
            poll(lambda run=run, line=line: line in run.out, f"{line!r}")

    (cloud.results / "go").touch()
    assert running.end().code == 0
    assert following.end().code == 0


def test_a_progress_bar_appears_before_its_newline(cloud, poll):
    script = cloud.script(
        'os.write(1, b"\\r 10%")\nwrite_result("wrote")\n'
        'await_file("go")\nos.write(1, b"\\r100%\\n")'
    )
    job = cloud.detach(script)
    following = cloud.start("logs", "-f", "--raw", "--rank", "0", job)
    cloud.await_results("wrote")
    poll(lambda: following.out == b"\r 10%", lambda: f"progress bar: {following.out!r}")

    (cloud.results / "go").touch()

    assert following.end().out == b"\r 10%\r100%\n"
    assert cloud.cli("wait", job).code == 0


def test_a_status_names_the_silent_rank_of_a_job_that_prints_nothing(cloud, poll):
    script = cloud.script(
        """
        print("starts", flush=True)
        if rank == 0: write_result("up")
        await_file("go")
        """
    )
    job = cloud.detach("--procs-per-node", "2", script)
    cloud.await_results("up")
    poll(
        lambda: b"silent   all 2 ranks for " in cloud.cli("status", job).out,
        lambda: cloud.cli("status", job).out,
    )
    assert b"the longest" in cloud.cli("status", job).out

    (cloud.results / "go").touch()
    assert cloud.cli("wait", job).code == 0
    assert b"silent " not in cloud.cli("status", job).out


@pytest.mark.every_mpi
@pytest.mark.parametrize("how", ["SIGKILL", "cancel"])
def test_the_log_is_complete_however_the_job_ends(cloud, how):
    script = cloud.script(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for n in range(20_000): os.write(1, b"line %d\\n" % n)
        os.write(1, b"the last words")
        write_result(f"up-{rank}", os.getpid())
        for other in range(size): await_file(f"up-{other}")
        if rank == 3 and sys.argv[1] == "SIGKILL": os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
        """
    )
    job = cloud.detach("--nodes", "2", "--procs-per-node", "2", "--grace-s", "1", script, how)
    cloud.await_results(*(f"up-{rank}" for rank in range(4)))

    if how == "cancel":
        cloud.cli("cancel", job)
    code = cloud.cli("wait", job).code

    assert code != 0
    expected = b"".join(b"line %d\n" % n for n in range(20_000)) + b"the last words"
    for rank in range(4):
        assert cloud.raw(job, rank) == expected
    if how == "SIGKILL":
        assert cloud.status(job)["failure"]["last_lines"][-2:] == ["line 19999", "the last words"]


def test_the_log_outlives_a_node(cloud, poll):
    """After a node's keeper is killed, the log has the ranks' output up to a second before."""
    script = cloud.script('print("before", rank)\nwrite_result(f"up-{rank}")\ntime.sleep(60)')
    running = cloud.start_submit("--nodes", "2", script)
    cloud.await_results("up-0", "up-1")
    job = running.job
    poll(lambda: b"[1] before 1" in running.out, "line of the worker")

    os.kill(cloud.state(job)["nodes"][1]["process"], signal.SIGKILL)
    running.end()

    assert cloud.raw(job, 1) == b"before 1\n"
    assert cloud.raw(job, 0) == b"before 0\n"


@pytest.mark.surroundings
def test_node_and_rank_filters_select_lines(cloud):
    done = cloud.submit(
        "--nodes", "2", "--procs-per-node", "2", cloud.script('print("line of", rank)')
    )
    job = done.job

    def ranks(*arguments):
        answer = cloud.cli("logs", *arguments, job)
        assert answer.code == 0, answer
        return sorted(line for line in answer.lines)

    lines = [b"[%d] line of %d" % (rank, rank) for rank in range(4)]
    assert ranks() == lines
    assert ranks("--node", "0") == lines[:2]
    assert ranks("--node", "1") == lines[2:]
    assert ranks("--rank", "3") == lines[3:]
    assert ranks("--node", "1", "--rank", "2") == lines[2:3]
    assert ranks("--node", "0", "--rank", "2") == []


def test_an_unknown_node_or_rank_is_an_error(cloud):
    done = cloud.submit("--nodes", "2", cloud.script(""))

    for arguments in (("--node", "2"), ("--rank", "2"), ("--rank", "99999999999")):
        answer = cloud.cli("logs", *arguments, done.job)

        assert answer.code == 2, answer
        assert b"error: " in answer.err, answer
        assert b"Traceback" not in answer.err


def test_output_of_grandchildren_is_in_the_log(cloud):
    script = cloud.script(
        """
        import subprocess
        if rank == 0:
            late = f"sleep 0.7; echo late words; touch {results}/late"
            subprocess.Popen(["sh", "-c", late])
            sys.exit(0)
        await_file("late")
        """
    )

    done = cloud.submit("--nodes", "2", script)

    assert done.code == 0, done
    assert b"[0] late words" in done.lines, done


@pytest.mark.surroundings
def test_stdout_and_stderr_keep_their_common_order(cloud):
    script = cloud.script(
        'for n in range(50):\n    print("out", n)\n    print("err", n, file=sys.stderr)'
    )

    done = cloud.submit(script)

    assert cloud.raw(done.job, 0) == b"".join(b"out %d\nerr %d\n" % (n, n) for n in range(50))


@pytest.mark.surroundings
def test_rank_output_goes_to_stdout_and_messages_to_stderr(cloud):
    done = cloud.submit("--nodes", "2", cloud.script('print("x")\nsys.exit(3)'))

    assert done.code == 3
    assert all(re.match(rb"\[[01]\] ", line) for line in done.lines), done
    assert b"FAILED" in done.err


def test_with_json_only_one_object_goes_to_stdout(cloud):
    done = cloud.submit("--json", "--nodes", "2", cloud.script('print("x")'))

    assert done.code == 0, done
    assert json.loads(done.out)["state"] == "SUCCEEDED"
    assert b"[0] x" in done.err


def test_following_the_log_of_an_ended_job_ends(cloud):
    done = cloud.submit(cloud.script('print("x")'))

    assert cloud.cli("logs", "-f", done.job).out == b"[0] x\n"


def test_a_rank_may_close_its_stdout(cloud):
    done = cloud.submit("--nodes", "2", cloud.script("os.close(1); os.close(2); os._exit(0)"))

    assert done.code == 0, done


def test_a_log_that_its_disk_cuts_is_no_silent_success(cloud):
    """The limit on the size of files stands for a disk that stays full."""
    lines = 20_000
    script = cloud.script(f"""for line in range({lines} * rank): print("line", line, "x" * 20)""")
    cloud.prefix = ("bash", "-c", 'ulimit -f 512; exec "$@"', "bash")
    job = cloud.detach("--nodes", "2", script)
    cloud.prefix = ()

    done = cloud.cli("wait", job)
    assert done.code == 0, done
    (cut,) = cloud.status(job)["cut_logs"]
    log, stored = cloud.cli("logs", job), cloud.cli("logs", "--stored", job)
    warning = (
        f"the log of node 1 ends too early: {size_text(cut['missing_bytes'])} of output could not"
        " be written (File too large); `logs --stored` reads the copy in the store"
    ).encode()

    assert (cut["node"], cut["reason"]) == (1, "File too large")
    # A line that was cut within "[1] " is none of the rank; any other is shown with a newline.
    begun = re.search(rb"^\[node 1\] (\[?1?\]?)$", log.err, re.MULTILINE)
    printed_bytes = len(log.out) + (len(begun[1]) if begun else 0)
    assert printed_bytes + cut["missing_bytes"] - len(stored.out) in (0, 1)
    assert len(stored.out.splitlines()) == lines
    assert b"warning: " + warning in done.err
    assert b"warning: " + warning in log.err
    assert warning in cloud.cli("status", job).out
    assert b"too early" not in stored.err

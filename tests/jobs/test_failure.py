"""Every failure of a rank ends the job at once, with that rank's exit code."""

from __future__ import annotations

import os
import re

import pytest

# The other ranks would go on for a minute.
SOON_S = 180.0
# How a rank ends -> the statement, the job's exit code, the signal, and text in the message.
FAILURES = {
    "os._exit": ("os._exit(7)", 7, None, "7"),
    "sys.exit": ("sys.exit(7)", 7, None, "7"),
    "sys.exit-text": ("sys.exit('no more data')", 1, None, "no more data"),
    "sys.exit-large": ("sys.exit(-1)", 255, None, "-1"),
    "exception": ("raise ValueError('bad batch 17')", 1, None, "ValueError: bad batch 17"),
    "SIGKILL": ("os.kill(os.getpid(), 9)", 137, 9, "SIGKILL"),
    "SIGSEGV": ("import ctypes; ctypes.string_at(0)", 139, 11, "SIGSEGV in <module> at "),
    "SIGTERM": ("os.kill(os.getpid(), 15); time.sleep(60)", 143, 15, "SIGTERM"),
    "SIGABRT": ("os.abort()", 134, 6, "SIGABRT in <module> at "),
}
MPI_FAILURES = {
    "MPI_Abort": ("MPI.COMM_WORLD.Abort(7)", 7, None, "7"),
    "exit-0-without-finalize": ("sys.stdout.flush(); os._exit(0)", None, None, ""),
    "thread": (
        "import threading; threading.Thread(target=lambda: os._exit(7)).start(); time.sleep(60)",
        7,
        None,
        "7",
    ),
}
# Failures that Open MPI itself also notices; for the others, MPI_Init makes no difference.
NOTICED_BY_MPI = ("sys.exit", "SIGKILL", "SIGABRT")
WITHOUT_MPI = """
write_result(f"pid-{rank}", os.getpid())
for other in range(size): await_file(f"pid-{other}")
print("step", rank)
if rank == %d:
    print("failing at", time.time(), flush=True)
    %s
time.sleep(600)
"""
# While one rank fails, rank 0 computes and the others wait in a barrier.
WITH_MPI = """
from mpi4py import MPI
write_result(f"pid-{rank}", os.getpid())
MPI.COMM_WORLD.Barrier()
print("step", rank)
if rank == %d:
    print("failing at", time.time(), flush=True)
    %s
if rank == 0:
    end = time.monotonic() + 600
    while time.monotonic() < end: sum(range(10000))
MPI.COMM_WORLD.Barrier()
"""


def check(cloud, done, rank, failure):
    """Check that the job ended soon, because of this rank and with its exit code."""
    _, code, signal, text = failure
    # The rank's last lines are shown after a bar, so this would be a traceback of cloudjob.
    assert not re.search(rb"^Traceback", done.err, re.MULTILINE), done
    status = cloud.status(done.job)
    failed_at = float(re.search(rb"failing at ([0-9.]+)", done.out)[1])
    assert done.ended_at - failed_at < SOON_S, (done.ended_at - failed_at, done)
    assert status["state"] == "FAILED", status
    assert status["cause"] == "user", status
    record = status["failure"]
    if code is None:
        assert done.code != 0
    else:
        assert (done.code, record["exit_code"]) == (code, code), (done, status)
    assert status["exit_code"] == done.code
    assert record["rank"] == rank, (status, str(done))
    assert (record["node"], record["signal"]) == (rank // 2, signal), status
    assert record["host"].endswith(f"-worker-{rank // 2}.ma-job-{done.job}"), status
    assert text in record["message"], status
    lines = record["last_lines"]
    if signal in (6, 11):
        assert lines  # Open MPI's own handler writes more than the record holds.
    else:
        assert f"step {rank}" in lines, status
        assert any(line.startswith("failing at") for line in lines), status
    pids = [int(text) for text in cloud.results_written("pid-*").values()]
    assert len(pids) == 4


@pytest.mark.parametrize("rank", [1, 3], ids=["head", "worker"])
@pytest.mark.parametrize("failure", [name for name in FAILURES if name not in NOTICED_BY_MPI])
def test_a_script_that_fails_before_mpi_init_ends_the_job(cloud, failure, rank):
    script = cloud.script(WITHOUT_MPI % (rank, FAILURES[failure][0]))

    done = cloud.submit("--nodes", "2", "--procs-per-node", "2", script)

    check(cloud, done, rank, FAILURES[failure])


@pytest.mark.every_mpi
@pytest.mark.parametrize("rank", [1, 3], ids=["head", "worker"])
@pytest.mark.parametrize("failure", [*NOTICED_BY_MPI, *MPI_FAILURES])
def test_a_script_that_fails_after_mpi_init_ends_the_job(cloud, failure, rank):
    """The other ranks wait in MPI; with some of these failures, plain mpirun would hang."""
    script = cloud.script(WITH_MPI % (rank, (FAILURES | MPI_FAILURES)[failure][0]))

    done = cloud.submit("--nodes", "2", "--procs-per-node", "2", script)

    check(cloud, done, rank, (FAILURES | MPI_FAILURES)[failure])
    # Open MPI's stack of C functions, which it leaves out if a signal has a handler already.
    is_crash = failure in ("SIGSEGV", "SIGABRT")
    assert (b"*** Process received signal ***" in done.out) == is_crash, done


@pytest.mark.every_mpi
def test_a_failing_shell_script_ends_the_job(cloud):
    cloud.write(
        "job.sh",
        'echo up >"$RESULTS/up-$OMPI_COMM_WORLD_RANK"\n'
        'while [ ! -e "$RESULTS/up-3" ]; do sleep 0.05; done\n'
        '[ "$OMPI_COMM_WORLD_RANK" = 3 ] && exit 7\nsleep 60\n',
    )

    done = cloud.submit("--nodes", "2", "--procs-per-node", "2", "job.sh")

    assert done.code == 7, done
    failure = cloud.status(done.job)["failure"]
    assert (failure["rank"], failure["node"], failure["exit_code"]) == (3, 1, 7), failure


@pytest.mark.every_mpi
@pytest.mark.parametrize(
    ("first", "second"), [(3, 0), (0, 3), pytest.param(2, 3, marks=pytest.mark.lengthy)]
)
@pytest.mark.parametrize("interval_s", [0.05, 0.3])
def test_the_record_names_the_first_of_two_failing_ranks(cloud, first, second, interval_s):
    script = cloud.script(
        f"""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        write_result(f"up-{{rank}}")
        for other in range(size): await_file(f"up-{{other}}")
        if rank == {first}:
            write_result("failed", os.getpid())
            os._exit(5)
        if rank == {second}:
            await_file("failed")
            # The process exists until its rank wrapper has seen its end.
            with open(f"{{results}}/failed") as file:
                process = file.read()
            while os.path.exists(f"/proc/{{process}}"):
                time.sleep(0.01)
            time.sleep({interval_s})
            os._exit(6)
        time.sleep(60)
        """
    )

    done = cloud.submit("--nodes", "2", "--procs-per-node", "2", script)

    assert done.code == 5, done
    assert cloud.status(done.job)["failure"]["rank"] == first, done


@pytest.mark.every_mpi
def test_the_record_names_one_rank_when_all_fail_together(cloud):
    script = cloud.script(
        'write_result(f"up-{rank}")\nfor i in range(size): await_file(f"up-{i}")\nsys.exit(9)'
    )

    done = cloud.submit("--nodes", "2", "--procs-per-node", "2", script)

    assert done.code == 9, done
    failure = cloud.status(done.job)["failure"]
    assert failure["rank"] in range(4)
    assert failure["exit_code"] == 9


def test_a_syntax_error_is_reported_with_its_place(cloud):
    cloud.write("model.py", "import os\nx = = 1\n")
    cloud.write("job.py", "import model\n")

    done = cloud.submit("--nodes", "2", "job.py")

    assert done.code == 1, done
    assert b"SyntaxError" in done.out + done.err, done
    assert b"jobentry" not in b"".join(line for line in done.lines if b"File" in line), done
    status = cloud.status(done.job)
    assert status["cause"] == "user"
    assert "SyntaxError" in status["failure"]["message"]


@pytest.mark.surroundings
def test_a_traceback_shows_only_frames_of_the_user(cloud):
    cloud.write("job.py", "def inner():\n    raise KeyError('k')\ninner()\n")

    done = cloud.submit("job.py")

    assert done.code == 1, done
    lines = [re.sub(rb'"/.*/', b'"', line) for line in done.lines if line.startswith(b"[0]")]
    assert lines == [
        b"[0] Traceback (most recent call last):",
        b'[0]   File "job.py", line 3, in <module>',
        b"[0]     inner()",
        b'[0]   File "job.py", line 2, in inner',
        b"[0]     raise KeyError('k')",
        b"[0] KeyError: 'k'",
    ], done


def test_exit_handlers_run_and_output_is_kept_when_a_script_fails(cloud):
    """atexit, finally and buffered output work although a rank wrapper watches the script."""
    script = cloud.script(
        """
        import atexit
        atexit.register(lambda: write_result(f"atexit-{rank}"))
        sys.stdout.write("no newline at the end")
        try:
            raise RuntimeError("x")
        finally:
            write_result(f"finally-{rank}")
        """
    )

    done = cloud.submit(script)

    assert done.code == 1, done
    assert set(cloud.results_written()) == {"atexit-0", "finally-0"}
    assert b"no newline at the end" in done.out


@pytest.mark.every_mpi
@pytest.mark.parametrize("rank", [1, 3], ids=["head", "worker"])
@pytest.mark.parametrize("grace_s", [60, 2])
def test_a_failed_script_has_the_grace_period_for_its_threads_and_exit_handlers(
    cloud, rank, grace_s
):
    """Longer than the other ranks have; those end in the meantime."""
    script = cloud.script(
        f"""
        import atexit, threading
        write_result(f"pid-{{rank}}", os.getpid())
        for other in range(size): await_file(f"pid-{{other}}")
        def save():
            time.sleep(5)
            write_result("saved", 1)
        if rank == {rank}:
            atexit.register(lambda: write_result("at-exit", 1))
            threading.Thread(target=save).start()
            raise ValueError("failed")
        time.sleep(600)
        """
    )

    done = cloud.submit("--nodes", "2", "--procs-per-node", "2", "--grace-s", str(grace_s), script)

    assert done.code == 1, done
    failure = cloud.status(done.job)["failure"]
    assert (failure["rank"], failure["message"]) == (rank, "ValueError: failed")
    assert (cloud.results / "saved").exists() == (grace_s > 5)
    assert (cloud.results / "at-exit").exists() == (grace_s > 5)


def test_a_failing_child_process_of_a_rank_does_not_end_the_job(cloud):
    script = cloud.script(
        """
        import multiprocessing, subprocess
        def fail(): sys.exit(4)
        child = multiprocessing.get_context("fork").Process(target=fail)
        child.start(); child.join()
        assert child.exitcode == 4
        if os.fork() == 0:
            raise ValueError("only the child")
        os.wait()
        assert subprocess.run([sys.executable, "-c", "raise SystemExit(5)"]).returncode == 5
        time.sleep(0.7)
        write_result(f"ok-{rank}")
        """
    )

    done = cloud.submit("--nodes", "2", script)

    assert done.code == 0, done
    assert len(cloud.results_written("ok-*")) == 2


def test_processes_that_ranks_started_end_with_the_job(cloud, poll):
    """Grandchildren in their own sessions that ignore SIGTERM and SIGHUP end with the job."""
    script = cloud.script(
        """
        import subprocess
        code = "import signal, time\\nfor n in (1, 2, 15): signal.signal(n, 1)\\ntime.sleep(60)"
        subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
        subprocess.Popen(["setsid", "sh", "-c", "trap '' TERM HUP; sleep 60 & sleep 60"])
        write_result(f"up-{rank}")
        for other in range(size): await_file(f"up-{other}")
        sys.exit(int(sys.argv[1]) if rank == 0 else 0)
        """
    )

    for code in (0, 7):
        for path in cloud.results.iterdir():
            path.unlink()
        done = cloud.submit("--nodes", "2", script, str(code))
        assert done.code == code, done
        poll(lambda: not cloud.leftovers(), lambda: f"end of {cloud.leftovers()}")


@pytest.mark.surroundings
def test_the_record_has_the_last_lines_of_the_failed_rank(cloud):
    script = cloud.script('for n in range(1000): print("line", n)\nos._exit(7)')

    done = cloud.submit(script)

    lines = cloud.status(done.job)["failure"]["last_lines"]
    assert lines[-1] == "line 999"
    assert 5 <= len(lines) <= 50


@pytest.mark.surroundings
def test_wait_and_status_report_the_jobs_exit_code_later(cloud):
    script = cloud.script("sys.exit(7)")
    job = cloud.detach("--nodes", "2", script)

    codes = [cloud.cli("wait", job).code for _ in range(2)]
    first, second = cloud.status(job), cloud.status(job)

    assert codes == [7, 7]
    assert first == second
    assert first["exit_code"] == 7
    assert [item["job"] for item in [first]] == [job]


@pytest.mark.every_mpi
def test_a_rank_that_fails_while_others_start_ends_the_job(cloud):
    script = cloud.script(
        "if rank == 0: os._exit(7)\nfrom mpi4py import MPI\nMPI.COMM_WORLD.Barrier()"
    )

    done = cloud.submit("--nodes", "2", "--procs-per-node", "2", script)

    assert done.code == 7, done


def test_the_record_names_a_worker_that_cannot_start(cloud, tmp_path):
    missing = f"file://{tmp_path}/missing"
    arguments = ("--nodes", "2", "--input", f"X={missing}", "--input-nodes", "X=1")

    done = cloud.submit(*arguments, cloud.script("print('never')"))

    assert done.code == 125, done
    host = cloud.status(done.job)["failure"]["host"]
    text = f"node 1 ({host}) ended with exit code 125 before it joined the job"
    assert f"jobentry: {text}\n".encode() in done.err, done
    assert b"cancelled" not in done.err, done
    assert missing.encode() in done.err, done
    assert cloud.status(done.job)["cause"] == "entry"


def test_a_head_that_cannot_stage_its_inputs_reports_the_reason_to_the_workers(cloud, tmp_path):
    missing = f"file://{tmp_path}/missing"
    arguments = ("--nodes", "2", "--input", f"X={missing}", "--input-nodes", "X=0")

    done = cloud.submit(*arguments, cloud.script("print('never')"))

    assert done.code == 125, done
    [line] = re.findall(
        rb"(?m)^\[node 1\] jobentry: the head \(\S+\) ends the job: (.*)$", done.err
    )
    assert missing.encode() in line, done


def test_submit_wait_and_status_explain_a_variable_that_only_the_caller_has(cloud):
    """The values of variables are not shown."""
    script = cloud.script('print(os.environ["DATA_DIR"])')
    env = {**os.environ, "DATA_DIR": "/the/value"}

    done = cloud.cli(*cloud.submit_arguments((script,)), env=env)

    hint = 'DATA_DIR is set in this shell, and a job gets only what it is given: add -e DATA_DIR="'
    assert done.code == 1, done
    assert f"hint: {hint}".encode() in done.err, done
    assert b"/the/value" not in done.out + done.err, done
    assert f"hint: {hint}".encode() in cloud.cli("wait", done.job, env=env).err
    assert hint.encode() in cloud.cli("status", done.job, env=env).out


def test_the_report_of_a_crash_shows_the_stack_and_the_status_keeps_all_threads(cloud):
    script = cloud.script(
        """
        import ctypes, threading
        ready = threading.Event()
        def load():
            ready.set()
            threading.Event().wait()
        def step():
            ctypes.string_at(0)
        threading.Thread(target=load, daemon=True).start()
        ready.wait()
        step()
        """
    )

    done = cloud.submit(script)

    failure = cloud.status(done.job)["failure"]
    assert done.code == 139, done
    assert re.fullmatch(
        r"killed by SIGSEGV in step\(\) at job\.py:\d+: ctypes\.string_at\(0\)", failure["message"]
    ), failure
    report = done.err.decode()
    assert re.search(r"the thread that crashed:\n.*\n    step\(\) at job\.py:\d+: ", report), report
    assert any(line.startswith("  load() at job.py:") for line in failure["stack_lines"]), failure
    # Nothing of it is in the log.
    assert b"Fatal Python error" not in done.out, done


def test_the_line_of_a_crash_under_a_shell_is_read_from_the_log(cloud):
    cloud.write("crash.py", "import ctypes\nctypes.string_at(0)\n")
    cloud.write("job.sh", "python3 crash.py\n")

    done = cloud.submit("-e", "PYTHONFAULTHANDLER=1", "job.sh")

    assert done.code == 139, done
    message = cloud.status(done.job)["failure"]["message"]
    assert message == (
        "ended with exit code 139; Segmentation fault in <module> at crash.py:2:"
        " ctypes.string_at(0)"
    )

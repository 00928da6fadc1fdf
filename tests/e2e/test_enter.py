"""`cloudjob exec` and `cloudjob shell` run something on a node of a job, as a rank would."""

from __future__ import annotations

import os
import pty
import subprocess

import pytest

WAITS = """
write_result(f"up-{rank}", os.getcwd())
await_file("go")
"""
FOUR_RANKS = ("--nodes", "2", "--procs-per-node", "2")
ALL_UP = ("up-0", "up-1", "up-2", "up-3")


@pytest.fixture
def job(cloud):
    """A job with four ranks on two nodes, which runs until the test has ended."""
    cloud.environ["TOKEN"] = "s3cr3t"
    options = ("-e", "TEXT= a\nb ", "--secret", "TOKEN")
    job = cloud.detach(*FOUR_RANKS, *options, cloud.script(WAITS))
    cloud.await_results(*ALL_UP)
    yield job
    (cloud.results / "go").touch()
    assert cloud.cli("wait", job).code == 0


def test_a_command_gets_the_environment_and_the_folder_of_a_rank(cloud, job):
    program = 'hostname; pwd; printf \'%s|\' "$TEXT" "$TOKEN" "$OMPI_COMM_WORLD_RANK"; exit 7'

    done = cloud.cli("exec", job, "--rank", "3", "--", "sh", "-c", program)

    assert done.code == 7, done
    host, folder, values = done.out.decode().split("\n", 2)
    assert host == f"ma-job-{job}-worker-1"
    assert folder == (cloud.results / "up-3").read_text()
    assert values == " a\nb |s3cr3t|3|"


@pytest.mark.parametrize(
    ("options", "rank"), [((), "0"), (("--node", "1"), "2"), (("--rank", "1"), "1")]
)
def test_the_model_is_the_lowest_rank_of_the_node_or_the_given_one(cloud, job, options, rank):
    done = cloud.cli("exec", *options, job, "printenv", "OMPI_COMM_WORLD_RANK")

    assert (done.code, done.out) == (0, f"{rank}\n".encode()), done


def test_input_and_output_pass_byte_for_byte(cloud, job):
    data = bytes(range(256)) * 4096

    command = cloud.start("exec", job, "cat", stdin=subprocess.PIPE)
    command.process.communicate(data)
    done = command.end()

    assert (done.code, done.out, done.err) == (0, data, b"")


def test_a_shell_has_a_terminal_on_the_node(cloud, job):
    controller, terminal = pty.openpty()
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
    shell = cloud.start("shell", "--node", "1", job, **streams, start_new_session=True)
    os.close(terminal)
    os.write(controller, b'tty && echo "on $(hostname), $((40 + 2))"; exit 5\n')
    shown = b""
    while True:
        try:
            shown += os.read(controller, 4096)
        except OSError:  # the terminal has no process any more
            break

    assert shell.end().code == 5, shown
    assert f"on ma-job-{job}-worker-1, 42".encode() in shown


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        (("exec", "JOB", "nothing"), 127, "jobentry: starting nothing: not found on PATH"),
        (("exec", "JOB", "/etc"), 126, "jobentry: starting /etc: Permission denied"),
        (("exec", "--node", "2", "JOB", "true"), 2, "it has 2 nodes and 4 ranks"),
        (("exec", "--rank", "4", "JOB", "true"), 2, "it has 2 nodes and 4 ranks"),
        (("exec", "JOB", "--"), 2, "no command was given"),
        (("shell", "JOB"), 2, "the input is not a terminal"),
        (("exec", "none", "true"), 6, "no job"),
    ],
)
def test_a_refusal_says_why(cloud, job, command, code, message):
    done = cloud.cli(*(job if word == "JOB" else word for word in command))

    assert done.code == code, done
    assert message in done.err.decode().partition("\n")[0], done


def test_a_job_that_has_ended_has_no_nodes(cloud):
    job = cloud.detach(cloud.script("pass"))
    assert cloud.cli("wait", job).code == 0

    done = cloud.cli("exec", job, "true")

    assert done.code == 2, done
    assert done.err.decode().startswith(f"error: entering a node of {job}: it is SUCCEEDED")

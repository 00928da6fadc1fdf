"""`cloudjob exec` and `cloudjob shell` run something on a node of a job, as a rank would."""

from __future__ import annotations

import contextlib
import os
import pty
import shutil
import socket
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


def test_the_model_is_the_lowest_rank_of_the_node_or_the_given_one(cloud, job):
    for options, rank in [((), "0"), (("--node", "1"), "2"), (("--rank", "1"), "1")]:
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
    output = b""
    while True:
        try:
            output += os.read(controller, 4096)
        except OSError:  # the terminal has no process any more
            break

    assert shell.end().code == 5, output
    assert f"on ma-job-{job}-worker-1, 42".encode() in output


REFUSALS = [
    (("exec", "JOB", "nothing"), 127, "jobentry: starting nothing: not found on PATH"),
    (("exec", "JOB", "/etc"), 126, "jobentry: starting /etc: Permission denied"),
    (("exec", "--node", "2", "JOB", "true"), 2, "it has 2 nodes and 4 ranks"),
    (("exec", "--rank", "4", "JOB", "true"), 2, "it has 2 nodes and 4 ranks"),
    (("exec", "JOB", "--"), 2, "no command was given"),
    (("shell", "JOB"), 2, "the input is not a terminal"),
    (("exec", "none", "true"), 6, "no such job"),
]


def test_a_refusal_says_why(cloud, job):
    for command, code, message in REFUSALS:
        done = cloud.cli(*(job if word == "JOB" else word for word in command))

        assert done.code == code, done
        assert message in done.err.decode().partition("\n")[0], done


def test_a_job_that_has_ended_has_no_nodes(cloud):
    job = cloud.detach(cloud.script("pass"))
    assert cloud.cli("wait", job).code == 0

    done = cloud.cli("exec", job, "true")

    assert done.code == 2, done
    assert done.err.decode().startswith(f"error: entering a node of {job}: it is SUCCEEDED")


SERVES = """
import socketserver
class Echo(socketserver.StreamRequestHandler):
    def handle(self):
        self.wfile.write(b"rank %d: " % rank + self.rfile.read())
with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo) as server:
    write_result(f"port-{rank}", server.server_address[1])
    server.serve_forever()
"""


@pytest.fixture
def forwarded(cloud, poll):
    """The port of this machine that leads to a server of rank 1, on node 1."""
    job = cloud.detach("--nodes", "2", cloud.script(SERVES))
    cloud.await_results("port-0", "port-1")
    port = (cloud.results / "port-1").read_text()
    command = cloud.start("forward", "--port", "0", "--node", "1", job, port)
    poll(lambda: command.out.endswith(b"\n"), lambda: str(command))
    yield command, int(command.out.decode().strip().rpartition(":")[2])
    command.process.kill()
    cloud.cli("cancel", "--now", job)


def exchange(port: int, data: bytes) -> bytes:
    """Send data to a port, and return everything that comes back."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def test_a_port_of_a_node_is_reached_from_this_machine(forwarded):
    _, port = forwarded
    data = os.urandom(3_000_000)

    assert exchange(port, data) == b"rank 1: " + data
    assert exchange(port, b"again") == b"rank 1: again"


@pytest.mark.skipif(os.getuid() != 0, reason="only root becomes another user")
def test_a_program_of_another_user_is_refused(forwarded, poll):
    command, port = forwarded
    connect = f"exec 3<>/dev/tcp/127.0.0.1/{port}; echo x >&3; cat <&3"
    bash = shutil.which("bash") or "/bin/bash"

    other = subprocess.run([bash, "-c", connect], user=65534, capture_output=True, check=False)

    assert b"rank" not in other.stdout
    poll(lambda: b"refused a program of another user (65534)" in command.err, str(command))


def test_a_port_without_a_server_says_so(cloud, job, poll):
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = server.getsockname()[1]
    command = cloud.start("forward", "--port", "0", job, str(free))
    poll(lambda: command.out.endswith(b"\n"), lambda: str(command))

    with contextlib.suppress(ConnectionError):
        assert exchange(int(command.out.decode().strip().rpartition(":")[2]), b"x") == b""

    message = b"connecting to port %d of this node: Connection refused" % free
    poll(lambda: message in command.err, lambda: str(command))
    command.process.kill()

"""Horovod's two controllers: the variables of ranks, and the store through which Gloo connects."""

from __future__ import annotations

import http.client
import threading

import pytest

from jobentry.contract.env import NodeEnv, OpenMpi
from jobentry.contract.paths import NodePaths
from jobentry.launchers import plan
from jobentry.launchers.common import ArgsError, Mpi, Site
from jobentry.rank import horovod_store

NODE = NodeEnv(job="j", hosts=("a", "b"), slots=2, start_timeout_s=90, open_mpi=OpenMpi(x_args=""))
PATHS = NodePaths("/h", "/j", "/m", "/l", "/n")
TOOLS = ("python", ("python3", "/e.pyz"), Mpi("/usr/bin/mpirun", (4, 1)))


def make(launcher, node=0, outputs=(), **environment):
    """Return the plan of a node."""
    here = NODE._replace(launcher=launcher, node=node, outputs=outputs)
    return plan.make(Site(here, {"PWD": "/code", **environment}, PATHS, *TOOLS), ("x.py",))


def test_with_gloo_each_node_starts_ranks_and_the_head_the_store():
    head = make("horovod-gloo", MASTER_PORT="2345", GLOO_SOCKET_IFNAME="eth7")
    worker = make("horovod-gloo", 1, MASTER_PORT="2345", HOROVOD_GLOO_TIMEOUT_SECONDS="7")

    store, first, second = head.processes
    assert store.argv[-4:] == ("--rendezvous", "2345", "2", "2")
    assert (store.is_server, first.is_server) == (True, False)
    assert [first.name, second.name] == ["rank 0", "rank 1"]
    assert [process.name for process in worker.processes] == ["rank 2", "rank 3"]
    variables = {
        key: value for key, value in worker.processes[1].env.items() if key[:8] == "HOROVOD_"
    }
    assert variables == {
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_HOSTNAME": "b",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "a",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": "2345",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "7",
        "HOROVOD_RANK": "3",
        "HOROVOD_SIZE": "4",
        "HOROVOD_LOCAL_RANK": "1",
        "HOROVOD_LOCAL_SIZE": "2",
        "HOROVOD_CROSS_RANK": "1",
        "HOROVOD_CROSS_SIZE": "2",
    }
    assert first.env["HOROVOD_GLOO_IFACE"] == "eth7"
    assert first.env["HOROVOD_GLOO_TIMEOUT_SECONDS"] == "90"
    assert (head.is_everywhere, head.ranks) == (True, 4)


def test_with_mpi_mpirun_carries_the_variables():
    launch = make("horovod", HOROVOD_CPU_OPERATIONS="ccl")

    (process,) = launch.processes
    command_line = " ".join(process.argv)
    assert "-x HOROVOD_CONTROLLER" in command_line
    assert "-x HOROVOD_CPU_OPERATIONS" in command_line
    assert process.env["HOROVOD_CONTROLLER"] == "mpi"
    assert process.env["HOROVOD_CPU_OPERATIONS"] == "ccl"
    assert make("horovod", 1).processes == ()


@pytest.mark.parametrize("launcher", ["horovod", "horovod-gloo"])
def test_a_timeline_that_is_an_output_is_a_file_in_it(launcher):
    """Horovod expects a file, and the variable of an output names a folder."""
    launch = make(launcher, outputs=(("HOROVOD_TIMELINE", "file:///t"),))
    plain = make(launcher, HOROVOD_TIMELINE="/t.json")

    folder = PATHS.output("HOROVOD_TIMELINE")
    assert launch.processes[-1].env["HOROVOD_TIMELINE"] == f"{folder}/timeline.json"
    assert plain.processes[-1].env["HOROVOD_TIMELINE"] == "/t.json"


@pytest.mark.parametrize(
    ("launcher", "controller", "message"),
    [
        ("horovod", "GLOO", "the launcher horovod is for mpi, and horovod-gloo for that"),
        ("horovod-gloo", "mpi", "the launcher horovod-gloo is for gloo, and horovod for that"),
        ("horovod", "nccl", "HOROVOD_CONTROLLER=nccl: the launcher horovod is for mpi"),
    ],
)
def test_a_controller_of_another_launcher_is_refused(launcher, controller, message):
    with pytest.raises(ArgsError, match=message):
        make(launcher, HOROVOD_CONTROLLER=controller)


# -- the store ------------------------------------------------------------------------------------


@pytest.fixture
def ask():
    """A function that sends requests to the store of a job of two nodes with two ranks each."""
    server = horovod_store.Server(("127.0.0.1", 0), 2, 2)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()

    def run(method, path, body=None, **headers):
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        result = answer.status, answer.read()
        connection.close()
        return result

    yield run
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_store_keeps_values_by_scope_and_key(ask):
    value = bytes(range(256))

    assert ask("GET", "/global/0") == (404, b"")
    assert ask("PUT", "/global/0", value) == (200, b"")
    assert ask("GET", "/global/0") == (200, value)
    assert ask("GET", "/local_a/0") == (404, b"")
    assert ask("PUT", "/global/a/b", b"") == (200, b"")
    assert ask("GET", "/global/a/b") == (200, b"")


@pytest.mark.parametrize("scope", ["global", "local_a.b", "cross_0"])
def test_a_scope_is_emptied_when_all_ranks_have_finished(ask, scope):
    """A script may call ``hvd.init`` again, and must not get the values of the first call."""
    size = {"global": 4, "local": 2, "cross": 2}[scope.partition("_")[0]]
    for meeting in (b"one", b"two"):
        ask("PUT", f"/{scope}/0", meeting)
        for rank in range(size):
            assert ask("GET", f"/{scope}/0") == (200, meeting)
            assert ask("DELETE", f"/{scope}/{rank}") == (200, b"")
        assert ask("GET", f"/{scope}/0") == (404, b"")


@pytest.mark.parametrize("length", ["", "x", "-1", "1000000000000"])
def test_an_invalid_request_is_refused(ask, length):
    assert ask("PUT", "/global/0", **{"Content-Length": length})[0] == 400
    assert ask("PUT", "/global/0", b"x")[0] == 200


def test_a_port_in_use_is_reported(ask, capsys):
    server = horovod_store.Server(("", 0), 1, 1)

    code = horovod_store.main(str(server.server_port), "1", "1")

    server.server_close()
    assert code == 125
    message = f"listening on port {server.server_port}: Address already in use; set MASTER_PORT"
    assert capsys.readouterr().err.startswith(message)

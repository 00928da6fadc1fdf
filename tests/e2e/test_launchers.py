"""What every launcher promises, on whole jobs: the same suite for each that needs no framework."""

from __future__ import annotations

import json
import os
import signal

import pytest

from jobentry.contract.launchers import LAUNCHERS

pytestmark = pytest.mark.one_mpi

# Those that start one process a node and import nothing.
EVERY_NODE = ("python", "pytorch-modelarts", "tensorflow", "command")
PRELUDE = """\
import json, os, signal, sys, time
node = int(os.environ["VC_TASK_INDEX"])
results = os.environ["RESULTS"]
def leave(name, text=""):
    path = f"{results}/{name}"
    with open(path + ".new", "wb") as file:
        file.write(text if isinstance(text, bytes) else str(text).encode())
    os.rename(path + ".new", path)
"""
STAYS = """
leave(f"up-{node}", os.getpid())
while True: time.sleep(0.05)
"""


@pytest.fixture(params=EVERY_NODE)
def launcher(request):
    """The name of a launcher."""
    return request.param


@pytest.fixture
def words(cloud, launcher):
    """Make the words of a submit that runs a script with the launcher."""

    def make(text: str, *args: str | bytes, nodes: int = 2) -> tuple[str | bytes, ...]:
        cloud.write("job.py", PRELUDE + text)
        program = ("python3", "job.py") if launcher == "command" else ("job.py",)
        return ("--nodes", str(nodes), "--launcher", launcher, *program, *args)

    return make


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_it_runs_once_on_every_node(cloud, words, nodes):
    """Each node runs the script, in the folder of the code, with its own variables and log."""
    text = 'leave(f"node-{node}", os.path.exists("job.py")); print("node", node)'

    done = cloud.submit(*words(text, nodes=nodes))

    assert done.code == 0, done
    assert cloud.left() == {f"node-{node}": b"True" for node in range(nodes)}
    assert sorted(done.lines) == [b"[%d] node %d" % (node, node) for node in range(nodes)]
    status = cloud.status(done.job)
    assert (status["state"], status["exit_code"]) == ("SUCCEEDED", 0), status
    assert cloud.raw(done.job, nodes - 1) == b"node %d\n" % (nodes - 1)


def test_arguments_and_variables_are_exact(cloud, words, launcher, ugly_values):
    """Byte for byte; a convention may put its own words in front."""
    text = """
leave(f"args-{node}", b"\\0".join(os.fsencode(word) for word in sys.argv[1:]))
for name, value in os.environb.items():
    if name.startswith(b"UGLY_"): leave(f"{node}-{name.decode()}", value)
"""
    args = ["--", "a b", "", "'\"", "$HOME", ":", "%3A", "--rank", b"\xff\n"]
    given = [
        word
        for name, value in ugly_values.items()
        for word in ("-e", b"UGLY_%s=%s" % (name.encode(), value))
    ]

    done = cloud.submit(*given, *words(text, *args))

    assert done.code == 0, done
    left = cloud.left()
    for node in range(2):
        own = left[f"args-{node}"].split(b"\0")
        if launcher == "pytorch-modelarts":
            assert own[0] == b"--init_method"
            assert own[1].startswith(b"tcp://ma-job-")
            assert own[2:6] == [b"--rank", b"%d" % node, b"--world_size", b"2"]
            own = own[6:]
        assert own == [os.fsencode(word) for word in args]
        for name, value in ugly_values.items():
            assert left[f"{node}-UGLY_{name}"] == value, name


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize(
    ("how", "code"),
    [("os._exit(7)", 7), ("sys.exit(9)", 9), ("os.kill(os.getpid(), signal.SIGKILL)", 137)],
)
def test_a_failing_rank_ends_the_job(cloud, words, bad, how, code):
    """With its exit code, and its node, rank and last lines in the record."""
    text = f"""
leave(f"up-{{node}}")
if node == {bad}:
    while not os.path.exists(results + "/up-{1 - bad}"): time.sleep(0.01)
    print("that was it", flush=True)
    {how}
while True: time.sleep(0.05)
"""

    done = cloud.submit(*words(text))

    assert done.code == code, done
    status = cloud.status(done.job)
    failure = status["failure"]
    assert (status["state"], status["cause"]) == ("FAILED", "user"), status
    assert (failure["node"], failure["rank"], failure["exit_code"]) == (bad, bad, code), status
    assert failure["last_lines"][-1] == "that was it", status


def test_a_node_that_is_lost_ends_the_job(cloud, words):
    """The others do not wait for it."""
    job = cloud.detach(*words(STAYS))
    cloud.await_left("up-0", "up-1")

    os.kill(cloud.state(job)["nodes"][1]["process"], signal.SIGKILL)

    waited = cloud.cli("wait", job)
    status = cloud.status(job)
    assert waited.code != 0, waited
    assert (status["state"], status["cause"]) == ("FAILED", "platform"), status
    assert status["failure"]["node"] == 1, status


def test_cancel_gives_every_rank_its_grace(cloud, words):
    """SIGTERM first; what a rank does then is waited for."""
    text = (
        """
def end(number, frame):
    leave(f"told-{node}", number)
    time.sleep(0.3)
    leave(f"bye-{node}")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
"""
        + STAYS
    )
    job = cloud.detach(*words(text))
    cloud.await_left("up-0", "up-1")

    done = cloud.cli("cancel", job)

    assert done.code == 0, done
    assert cloud.status(job)["state"] == "CANCELLED"
    assert {"told-0", "told-1", "bye-0", "bye-1"} <= set(cloud.left())


def test_a_rank_that_ignores_sigterm_ends_all_the_same(cloud, words):
    """When its grace is over."""
    job = cloud.detach(
        "--grace-s", "0.5", *words("signal.signal(signal.SIGTERM, signal.SIG_IGN)" + STAYS)
    )
    cloud.await_left("up-0", "up-1")

    assert cloud.cli("cancel", job).code == 0

    for node in range(2):
        with pytest.raises(ProcessLookupError):
            os.kill(int(cloud.left()[f"up-{node}"]), 0)


def test_tensorflow_is_told_of_its_cluster(cloud):
    """All workers by name, and which one this is."""
    cloud.write("job.py", PRELUDE + 'leave(f"config-{node}", os.environ["TF_CONFIG"])')

    done = cloud.submit("--nodes", "2", "--launcher", "tensorflow", "job.py")

    assert done.code == 0, done
    configs = [json.loads(cloud.left()[f"config-{node}"]) for node in range(2)]
    assert [config["task"] for config in configs] == [
        {"type": "worker", "index": 0},
        {"type": "worker", "index": 1},
    ]
    assert configs[0]["cluster"] == configs[1]["cluster"]
    assert len(set(configs[0]["cluster"]["worker"])) == 2


def test_no_mpirun_is_needed(cloud, words):
    """A launcher that starts the ranks itself asks no mpirun, not even for its version."""
    folder = cloud.folder / "bin"
    folder.mkdir()
    trap = folder / "mpirun"
    trap.write_text(f"#!/bin/sh\ntouch {cloud.results}/called\nexit 1\n")
    trap.chmod(0o755)

    text = 'import shutil; leave(f"node-{node}", shutil.which("mpirun"))'

    path = f"{folder}:{cloud.environ['PATH']}"
    done = cloud.submit(*words(text), env={"PATH": path})

    assert done.code == 0, done
    assert cloud.left() == dict.fromkeys(("node-0", "node-1"), os.fsencode(trap))


@pytest.mark.parametrize(
    "name", sorted(name for name in LAUNCHERS if LAUNCHERS[name].is_one_a_node)
)
def test_several_ranks_a_node_are_refused_where_there_is_one(cloud, name):
    """With a word on why."""
    cloud.write("job.py", "")

    done = cloud.submit("--procs-per-node", "2", "--launcher", name, "job.py")

    assert done.code == 2, done
    assert b"starts one process a node" in done.err, done


def test_a_command_that_is_not_there(cloud):
    """The job ends with 127 and says what was not found."""
    done = cloud.submit("--launcher", "command", "no-such-program")

    assert done.code == 127, done
    assert b"no-such-program: not found on PATH" in done.err + done.out, done

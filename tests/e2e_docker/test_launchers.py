"""Guarantees of every launcher in real containers, as in ``tests/jobs/test_launchers.py``.

Launchers that need a framework run in the images that ``.ci/run heavy`` builds,
``$CLOUDJOB_TEST_TORCH_IMAGE`` and ``$CLOUDJOB_TEST_MINDSPORE_IMAGE``.
"""

from __future__ import annotations

import hashlib
import json
import os

import pytest

from jobentry.contract.launchers import LAUNCHERS

pytestmark = pytest.mark.docker

# Launchers for which the base image is enough.
LIGHT = (
    *("mpirun", "python", "command", "pytorch-modelarts"),
    *("tensorflow", "tensorflow-ps", "rank-table"),
)
# Launchers of a framework -> its marker, which is also in the name of its image's variable.
HEAVY = {
    **dict.fromkeys(("torchrun", "horovod", "horovod-gloo"), "torch"),
    **dict.fromkeys(("msrun", "dynamic-cluster", "mindspore-mpi"), "mindspore"),
}
LIMIT_S = 300.0
FOLDER = "/home/ma-user/modelarts/user-job-dir/code"
PRELUDE = """\
import hashlib, json, os, signal, sys, time
if sys.argv[3:5] == ["--job_name", "ps"]:
    time.sleep(600)  # a parameter server runs until it is ended
node = int(os.environ["VC_TASK_INDEX"])
variables = ("CLOUDJOB_RANK", "OMPI_COMM_WORLD_RANK", "RANK", "RANK_ID")
rank = int(next(os.environ[name] for name in variables if name in os.environ))
def report(*values): print(*values, flush=True)
"""


def slots_of(launcher):
    """The number of ranks per node in tests that need more ranks than nodes."""
    return 1 if LAUNCHERS[launcher].is_one_a_node else 2


def each(names=(), cases=lambda slots: [()]):
    """Parametrize a test with every launcher and its cases, which depend on the ranks per node."""
    return pytest.mark.parametrize(
        ("launcher", *names),
        [
            pytest.param(
                name, *case, marks=[getattr(pytest.mark, HEAVY[name])] if name in HEAVY else []
            )
            for name in (*LIGHT, *HEAVY)
            for case in cases(slots_of(name))
        ],
    )


@pytest.fixture
def submit_arguments(cloud, launcher, request):
    """Return a function that makes the arguments of a submit with the launcher."""

    def make(text: str, *args: str, size=()) -> list[str]:
        cloud.script(PRELUDE + text)
        nodes, ranks = map(str, size or (2, slots_of(launcher)))
        options = ["--nodes", nodes, "--procs-per-node", ranks, "--launcher", launcher]
        if launcher in HEAVY:
            image = os.environ[f"CLOUDJOB_TEST_{HEAVY[launcher].upper()}_IMAGE"]
            options += ["--image", request.getfixturevalue("with_entry")(image)]
        if launcher == "rank-table":
            devices = " ".join(f"{index}=192.168.{index}.1" for index in range(int(ranks)))
            lines = [f"10.0.0.{node} {devices}" for node in range(int(nodes))]
            table = f"mindspore: {{device_target: Ascend, devices: {lines}}}\n"
            (cloud.source / "job.yaml").write_text(table)
            options += ["--config", "job.yaml"]
        program = ("python3", "train.py") if launcher == "command" else ("train.py",)
        return [*options, *program, *args]

    return make


@pytest.fixture
def submit(cloud, submit_arguments):
    """Run a job to its end."""

    def run(*arguments, first=(), **more):
        head = ("submit", "--backend", "docker", *first)
        return cloud.run(*head, *submit_arguments(*arguments, **more), limit_s=LIMIT_S)

    return run


@pytest.fixture
def begin(cloud, submit_arguments):
    """Start a job, and return its id once all ranks have reported that they are up."""

    def run(text, launcher, *first):
        head = ("submit", "--backend", "docker", "--detach", *first)
        done = cloud.run(*head, *submit_arguments(text), limit_s=LIMIT_S)
        assert done.code == 0, done
        ups = (b"[%d] up\n" % rank for rank in range(2 * slots_of(launcher)))
        cloud.await_log(done.job, *ups, limit_s=LIMIT_S)
        return done.job

    return run


@each(["size"], lambda slots: [((nodes, ranks),) for nodes in (1, 2) for ranks in {1, slots}])
def test_each_rank_has_the_jobs_arguments_variables_code_and_log(
    cloud, submit, launcher, ugly_values, size
):
    text = """
values = {name[5:].decode(): hashlib.sha256(value).hexdigest()
          for name, value in os.environb.items() if name.startswith(b"UGLY_")}
report(json.dumps([node, os.getcwd() == os.environ["PWD"], os.getcwd(), sys.argv[1:], values]))
"""
    args = ["--", "a b", "", "'\"", "$HOME", ":", "%3A", "--rank", "Grüße\n"]
    first = [
        option
        for name, value in ugly_values.items()
        for option in ("-e", b"UGLY_%s=%s" % (name.encode(), value))
    ]

    done = submit(text, *args, size=size, first=first)

    assert done.code == 0, done
    status = cloud.status(done.job)
    assert (status["state"], status["exit_code"]) == ("SUCCEEDED", 0), status
    printed = dict(line.split(b" ", 1) for line in done.out.splitlines())
    assert sorted(printed) == [b"[%d]" % rank for rank in range(size[0] * size[1])], done
    for rank in range(size[0] * size[1]):
        answer = cloud.run("logs", done.job, "--rank", str(rank), "--raw").out
        assert answer == printed[b"[%d]" % rank] + b"\n"
        node, is_here, folder, job_args, values = json.loads(answer)
        assert (node, is_here, folder) == (rank // size[1], True, FOLDER)
        # Two launchers prepend their own arguments.
        assert job_args[-len(args) :] == args
        assert len(job_args) - len(args) == {"pytorch-modelarts": 6, "tensorflow-ps": 8}.get(
            launcher, 0
        )
        assert values == {
            name: hashlib.sha256(value).hexdigest() for name, value in ugly_values.items()
        }


@each(
    ["bad", "how", "code"],
    lambda slots: [
        (0, "os._exit(7)", 7),
        (2 * slots - 1, "os.kill(os.getpid(), signal.SIGKILL)", 137),
    ],
)
def test_a_failing_rank_ends_the_job(cloud, submit, launcher, bad, how, code):
    text = f"""
if rank == {bad}:
    report("that was it")
    {how}
while True: time.sleep(0.05)
"""

    done = submit(text)

    assert done.code == code, done
    status = cloud.status(done.job)
    failure = status["failure"]
    assert (status["state"], status["cause"]) == ("FAILED", "user"), status
    place = bad // slots_of(launcher), bad, code
    assert (failure["node"], failure["rank"], failure["exit_code"]) == place, status
    assert failure["last_lines"][-1] == "that was it", status


@each()
def test_the_loss_of_a_node_ends_the_job(cloud, begin, launcher):
    job = begin('report("up")\nwhile True: time.sleep(0.05)', launcher)

    cloud.engine.kill(cloud.containers(job)[1]["Id"], "SIGKILL")

    waited = cloud.run("wait", job)
    status = cloud.status(job)
    assert waited.code == 137, waited
    assert (status["state"], status["cause"]) == ("FAILED", "platform"), status
    assert status["failure"]["node"] == 1, status


@each()
def test_cancel_gives_every_rank_its_grace_period(cloud, begin, launcher):
    text = f"""
def end(number, frame):
    time.sleep(0.3)
    report("bye")
    sys.exit(0)
signal.signal(signal.SIGTERM, signal.SIG_IGN if rank == {2 * slots_of(launcher) - 1} else end)
report("up")
while True: time.sleep(0.05)
"""
    job = begin(text, launcher, "--grace-s", "2")

    done = cloud.run("cancel", job)

    assert done.code == 0, done
    assert cloud.status(job)["state"] == "CANCELLED"
    lines = cloud.run("logs", job).out.splitlines()
    farewells = [b"[%d] bye" % rank for rank in range(2 * slots_of(launcher) - 1)]
    assert sorted(line for line in lines if line.endswith(b"bye")) == farewells, lines

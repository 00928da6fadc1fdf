"""The promises of every launcher, tested on whole jobs.

A launcher that needs a framework is tested if a variable has the path of an interpreter with it:
``$CLOUDJOB_TEST_TORCH``, ``$CLOUDJOB_TEST_HOROVOD`` or ``$CLOUDJOB_TEST_MINDSPORE``. MPICH is
tested if ``$CLOUDJOB_TEST_MPICH`` has the path of its folder (.ci/run heavy).
"""

from __future__ import annotations

import json
import os
import signal
import sys

import pytest

from jobentry.contract.launchers import LAUNCHERS

# Launchers that start one process per node and import nothing.
EVERY_NODE = ("python", "pytorch-modelarts", "tensorflow", "tensorflow-ps", "command")
# These start and end a process as the launcher python does, with other arguments and variables.
LIKE_PYTHON = ("pytorch-modelarts", "tensorflow", "command")
# The launchers of frameworks, with the marker of their tests.
HEAVY = {
    "torchrun": "torch",
    **dict.fromkeys(("horovod", "horovod-gloo"), "horovod"),
    **dict.fromkeys(("msrun", "dynamic-cluster", "mindspore-mpi"), "mindspore"),
}
# The launcher mpirun, with the MPICH that .ci/mpich installs.
HEAVY["mpich"] = "mpich"
ALL = (*EVERY_NODE, "mpirun", "rank-table", *HEAVY)
LIMIT_S = 180.0
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PRELUDE = """\
import json, os, signal, sys, time
if sys.argv[3:5] == ["--job_name", "ps"]:
    time.sleep(600)  # a parameter server runs until it is ended
node = int(os.environ["VC_TASK_INDEX"])
variables = ("CLOUDJOB_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK", "RANK_ID")
rank = int(next(os.environ[name] for name in variables if name in os.environ))
results = os.environ["RESULTS"]
def write_result(name, text=""):
    path = f"{results}/{name}"
    with open(path + ".new", "wb") as file:
        file.write(text if isinstance(text, bytes) else str(text).encode())
    os.rename(path + ".new", path)
"""
RUNS_FOREVER = """
write_result(f"up-{rank}", json.dumps([node, os.getpid()]))
while True: time.sleep(0.05)
"""


def each(names, cases=lambda slots: [()]):
    """Parametrize a test with every launcher and its cases, which depend on the ranks per node."""
    return pytest.mark.parametrize(
        ("launcher", *names),
        [
            pytest.param(name, *case, marks=marks_of(name, names))
            for name in ALL
            for case in cases(slots_of(name))
        ],
    )


def marks_of(launcher, names):
    """Return the marks of a launcher in a test of how ranks start or end."""
    if launcher in HEAVY:
        return [getattr(pytest.mark, HEAVY[launcher])]
    return [pytest.mark.lengthy] * (launcher in LIKE_PYTHON and "size" not in names)


def slots_of(launcher):
    """Return the number of ranks per node: 2 if the launcher supports that, else 1."""
    return 1 if launcher in LAUNCHERS and LAUNCHERS[launcher].is_one_a_node else 2


@pytest.fixture
def submit_arguments(cloud, launcher):
    """Return the arguments of a submit that runs a script with the launcher."""

    def make(text: str, *args: str | bytes, size=()) -> list[str | bytes]:
        cloud.write("job.py", PRELUDE + text)
        program = ("python3", "job.py") if launcher == "command" else ("job.py",)
        nodes, ranks = map(str, size or (2, slots_of(launcher)))
        options: list[str | bytes] = ["--nodes", nodes, "--procs-per-node", ranks]
        if launcher == "mpich":
            cloud.environ["PATH"] = f"{os.environ['CLOUDJOB_TEST_MPICH']}/usr/bin:{SYSTEM_PATH}"
            return [*options, "--launcher", "mpirun", *program, *args]
        if launcher in HEAVY:
            python = os.environ[f"CLOUDJOB_TEST_{HEAVY[launcher].upper()}"]
            cloud.write("job.yaml", f"process: {{python: {python}}}\n")
            options += ["--config", "job.yaml"]
        if launcher == "rank-table":
            devices = " ".join(f"{index}=192.168.{index}.1" for index in range(int(ranks)))
            lines = [f"10.0.0.{node} {devices}" for node in range(int(nodes))]
            cloud.write("job.yaml", f"mindspore: {{device_target: Ascend, devices: {lines}}}\n")
            options += ["--config", "job.yaml"]
        if launcher == "horovod":
            # Only Debian's Open MPI, which Horovod is built for.
            cloud.environ["PATH"] = SYSTEM_PATH
        return [*options, "--launcher", launcher, *program, *args]

    return make


def add_fake_mpirun(cloud):
    """Put an mpirun first on PATH that leaves the result ``called``."""
    path = cloud.folder / "bin" / "mpirun"
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\ntouch {cloud.results}/called\nexit 1\n")
    path.chmod(0o755)
    cloud.environ["PATH"] = f"{path.parent}:{cloud.environ['PATH']}"
    return os.fsencode(path)


@each(["size"], lambda slots: [((nodes, slots),) for nodes in (1, 2)])
def test_each_rank_has_the_jobs_arguments_variables_code_and_log(
    cloud, submit_arguments, launcher, ugly_values, size
):
    """Launchers without MPI do not start the mpirun on PATH."""
    text = """
import shutil
write_result(f"mpirun-{rank}", shutil.which("mpirun") or "")
write_result(f"args-{rank}", b"\\0".join(os.fsencode(argument) for argument in sys.argv[1:]))
for name, value in os.environb.items():
    if name.startswith(b"UGLY_"): write_result(f"{rank}-{name.decode()}", value)
import moxing
has_moxing = os.path.isdir(moxing.__path__[0])
print("rank", rank, os.path.exists("job.py"), os.environ["PWD"] == os.getcwd(), has_moxing)
"""
    args = ["--", "a b", "", "'\"", "$HOME", ":", "%3A", "--rank", b"\xff\n"]
    options = [
        argument
        for name, value in ugly_values.items()
        for argument in ("-e", b"UGLY_%s=%s" % (name.encode(), value))
    ]
    options += ["-e", "MOX_SILENT_MODE=1"]
    fake_mpirun = add_fake_mpirun(cloud) if launcher in EVERY_NODE else None

    done = cloud.submit(*options, *submit_arguments(text, *args, size=size), limit_s=LIMIT_S)

    assert done.code == 0, done
    ranks = range(size[0] * size[1])
    status = cloud.status(done.job)
    assert (status["state"], status["exit_code"]) == ("SUCCEEDED", 0), status
    assert sorted(done.lines) == [b"[%d] rank %d True True True" % (rank, rank) for rank in ranks]
    results = cloud.results_written()
    assert "called" not in results
    for rank in ranks:
        assert fake_mpirun in (None, results[f"mpirun-{rank}"])
        assert cloud.raw(done.job, rank) == b"rank %d True True True\n" % rank
        answer = results[f"args-{rank}"].split(b"\0")
        if launcher == "pytorch-modelarts":
            assert answer[1].startswith(b"tcp://ma-job-")
            place = [b"--rank", b"%d" % rank, b"--world_size", b"%d" % size[0]]
            assert [answer[0], *answer[2:6]] == [b"--init_method", *place]
            answer = answer[6:]
        if launcher == "tensorflow-ps":
            assert answer[:4] == [b"--task_index", b"%d" % rank, b"--job_name", b"worker"]
            assert (answer[4], answer[6]) == (b"--ps_hosts", b"--worker_hosts")
            answer = answer[8:]
        assert answer == [os.fsencode(argument) for argument in args]
        for name, value in ugly_values.items():
            assert results[f"{rank}-UGLY_{name}"] == value, name


@each(
    ["bad", "how", "code"],
    lambda slots: [
        (0, "os._exit(7)", 7),
        (2 * slots - 1, "sys.exit(9)", 9),
        (2 * slots - 1, "os.kill(os.getpid(), signal.SIGKILL)", 137),
    ],
)
def test_a_failing_rank_ends_the_job(cloud, submit_arguments, launcher, bad, how, code):
    text = f"""
write_result(f"up-{{rank}}", node)
if rank == {bad}:
    others = [f"{{results}}/up-{{other}}" for other in range({2 * slots_of(launcher)})]
    while not all(map(os.path.exists, others)): time.sleep(0.01)
    print("that was it", flush=True)
    {how}
while True: time.sleep(0.05)
"""

    done = cloud.submit(*submit_arguments(text), limit_s=LIMIT_S)

    assert done.code == code, done
    status = cloud.status(done.job)
    failure = status["failure"]
    node = int(cloud.results_written()[f"up-{bad}"])
    assert (status["state"], status["cause"]) == ("FAILED", "user"), status
    assert (failure["node"], failure["rank"], failure["exit_code"]) == (node, bad, code), status
    assert failure["last_lines"][-1] == "that was it", status


@each([])
def test_the_loss_of_a_node_ends_the_job(cloud, submit_arguments, launcher):
    job = cloud.detach(*submit_arguments(RUNS_FOREVER))
    ranks = range(2 * slots_of(launcher))
    cloud.await_results(*(f"up-{rank}" for rank in ranks), limit_s=LIMIT_S)

    os.kill(cloud.state(job)["nodes"][1]["process"], signal.SIGKILL)

    waited = cloud.cli("wait", job)
    status = cloud.status(job)
    assert waited.code != 0, waited
    assert (status["state"], status["cause"]) == ("FAILED", "platform"), status
    assert status["failure"]["node"] == 1, status


@each([])
def test_cancel_gives_every_rank_its_grace_period(cloud, submit_arguments, launcher):
    text = (
        """
def end(number, frame):
    write_result(f"signalled-{rank}", number)
    time.sleep(0.3)
    write_result(f"bye-{rank}")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
"""
        + RUNS_FOREVER
    )
    job = cloud.detach(*submit_arguments(text))
    ranks = range(2 * slots_of(launcher))
    cloud.await_results(*(f"up-{rank}" for rank in ranks), limit_s=LIMIT_S)

    done = cloud.cli("cancel", job)

    assert done.code == 0, done
    assert cloud.status(job)["state"] == "CANCELLED"
    assert {f"{prefix}-{rank}" for prefix in ("signalled", "bye") for rank in ranks} <= set(
        cloud.results_written()
    )


@each([])
def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace_period(
    cloud, submit_arguments, launcher
):
    text = "signal.signal(signal.SIGTERM, signal.SIG_IGN)" + RUNS_FOREVER
    job = cloud.detach("--grace-s", "0.5", *submit_arguments(text))
    ranks = range(2 * slots_of(launcher))
    cloud.await_results(*(f"up-{rank}" for rank in ranks), limit_s=LIMIT_S)

    assert cloud.cli("cancel", job).code == 0

    for rank in ranks:
        with pytest.raises(ProcessLookupError):
            os.kill(json.loads(cloud.results_written()[f"up-{rank}"])[1], 0)


def test_tensorflow_gets_the_list_of_workers_and_its_own_index(cloud):
    cloud.write("job.py", PRELUDE + 'write_result(f"config-{node}", os.environ["TF_CONFIG"])')

    done = cloud.submit("--nodes", "2", "--launcher", "tensorflow", "job.py")

    assert done.code == 0, done
    configs = [json.loads(cloud.results_written()[f"config-{node}"]) for node in range(2)]
    assert [config["task"] for config in configs] == [
        {"type": "worker", "index": 0},
        {"type": "worker", "index": 1},
    ]
    assert configs[0]["cluster"] == configs[1]["cluster"]
    assert len(set(configs[0]["cluster"]["worker"])) == 2


def test_workers_and_parameter_servers_get_each_others_addresses(cloud):
    text = """
import json, os, sys, time
options = dict(zip(sys.argv[1:9:2], sys.argv[2:9:2]))
name = options["--job_name"] + options["--task_index"]
path = f"{os.environ['RESULTS']}/{name}"
with open(path + ".new", "w") as file:
    json.dump([options, os.environ["TF_CONFIG"], os.environ["VC_TASK_INDEX"], sys.argv[9:]], file)
os.rename(path + ".new", path)
print(name, "runs", flush=True)
names = ("ps0", "ps1", "worker0", "worker1")
others = [os.path.join(os.environ["RESULTS"], name) for name in names]
while options["--job_name"] == "ps" or not all(map(os.path.exists, others)):
    time.sleep(0.02)
"""
    cloud.write("job.py", text)

    done = cloud.submit("--nodes", "2", "--launcher", "tensorflow-ps", "job.py", "--lr", "a b")

    assert done.code == 0, done
    results = {name: json.loads(data) for name, data in cloud.results_written().items()}
    assert sorted(results) == ["ps0", "ps1", "worker0", "worker1"]
    for name, (options, config, node, args) in results.items():
        cluster = {kind: options[f"--{kind}_hosts"].split(",") for kind in ("ps", "worker")}
        task = {"type": name[:-1], "index": int(name[-1])}
        assert json.loads(config) == {"cluster": cluster, "task": task}
        assert (node, args) == (name[-1], ["--lr", "a b"])
        assert len({*cluster["ps"], *cluster["worker"]}) == 4
    assert sorted(done.lines) == [b"[0] worker0 runs", b"[1] worker1 runs"]
    assert b"parameter server 1: ps1 runs" in done.err, done


@pytest.mark.parametrize("node", [0, 1])
def test_a_parameter_server_that_fails_ends_the_job(cloud, node):
    """Without this, the workers would wait for it forever."""
    text = f"""
import os, sys, time
if sys.argv[1:5] == ["--task_index", "{node}", "--job_name", "ps"]:
    while not all(os.path.exists(os.environ["RESULTS"] + name) for name in ("/up0", "/up1")):
        time.sleep(0.02)
    sys.exit("no memory")
if sys.argv[4] == "worker":
    open(os.environ["RESULTS"] + "/up" + sys.argv[2], "w").close()
time.sleep(600)
"""
    cloud.write("job.py", text)

    done = cloud.submit("--nodes", "2", "--launcher", "tensorflow-ps", "job.py")

    assert done.code == 1, done
    failure = cloud.status(done.job)["failure"]
    message = f"the parameter server {node} of the ranks ended with exit code 1"
    assert (failure["node"], failure["rank"], failure["message"]) == (node, None, message)
    assert failure["last_lines"][-1] == "no memory"


@pytest.mark.parametrize(
    "name", sorted(name for name in LAUNCHERS if LAUNCHERS[name].is_one_a_node)
)
def test_several_ranks_per_node_are_refused_for_launchers_with_one(cloud, name):
    cloud.write("job.py", "")

    done = cloud.query("submit", "--procs-per-node", "2", "--launcher", name, "job.py")

    assert done.code == 2, done
    assert b"starts one process per node" in done.err, done


def test_a_missing_command_ends_the_job_with_127(cloud):
    done = cloud.submit("--launcher", "command", "no-such-program")

    assert done.code == 127, done
    assert b"no-such-program: not found on PATH" in done.err + done.out, done


def test_the_launcher_chosen_by_the_imports_is_reported_and_recorded(cloud):
    cloud.write("net.py", "from mpi4py import MPI")
    cloud.write("job.py", "import net\nprint(net.MPI.COMM_WORLD.size)")

    done = cloud.submit("--nodes", "2", "job.py")
    copied = cloud.cli("cp", done.job)

    assert done.code == 0, done
    assert done.err.startswith(
        b"launcher mpirun: net.py, which job.py imports, imports mpi4py\n"
    ), done
    assert sorted(done.lines) == [b"[0] 2", b"[1] 2"]
    assert copied.code == 0, copied
    assert b"launcher " not in copied.err, copied


def test_a_dry_run_shows_the_chosen_launcher(cloud):
    cloud.write("job.py", "import torch.distributed")

    dry_run = cloud.submit("--dry-run", "--json", "job.py")
    named = cloud.submit("--dry-run", "--json", "--launcher", "python", "job.py")

    assert dry_run.err == b"launcher torchrun: job.py imports torch.distributed\n"
    assert json.loads(dry_run.out)["submission"]["launcher"] == "torchrun"
    assert "torch.distributed.run" in json.loads(dry_run.out)["plans"][0]["argv"]
    assert named.err == b""
    assert json.loads(named.out)["submission"]["launcher"] == "python"


@pytest.mark.parametrize("controller", ["mpi", "gloo"])
def test_a_missing_framework_is_reported_before_any_rank_starts(cloud, controller):
    cloud.write("job.py", "import horovod.torch as hvd")

    done = cloud.submit("--nodes", "2", "-e", f"HOROVOD_CONTROLLER={controller}", "job.py")

    assert done.code == 127, done
    launcher = {"mpi": "horovod", "gloo": "horovod-gloo"}[controller]
    message = (
        f"looking for horovod: {sys.executable} has no such module,"
        f" and the launcher {launcher} needs it"
    )
    assert f"jobentry: {message}\n" in done.err.decode() + done.out.decode(), done
    assert b"Traceback" not in done.err + done.out, done
    failure = cloud.status(done.job)["failure"]
    assert (failure["message"], failure["rank"]) == (message, None)

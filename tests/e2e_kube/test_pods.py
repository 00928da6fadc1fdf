"""Pods of the manifests run as containers, set up as an operator and a kubelet would do it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import docker
import pytest
import yaml

from tests.e2e_kube.conftest import LIMIT_S, Lab, log_in, may_edit, new_lab
from tests.e2e_kube.machine import PodRunner
from tests.support import containers, macos, portable_job
from tests.support.kube_cluster import Cluster
from tests.support.polling import Followed

pytestmark = [pytest.mark.kubernetes, pytest.mark.docker]

TRAIN = """
import os, socket, sys
rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
size = int(os.environ["OMPI_COMM_WORLD_SIZE"])
print("rank", rank, "of", size, "on", socket.gethostname(), os.environ["PRICE"],
      os.environ["TOKEN"] == "a b$(HOME)$$", os.environ["MA_CURRENT_INSTANCE_NAME"], sys.argv[1:],
      len(open("/dev/shm/x" + str(rank), "w").name))
"""


ROOT = Path(__file__).parents[2]


def test_workers_of_the_mpi_operator_may_come_before_their_launcher(
    cluster: Cluster, tmp_path: Path, engine: docker.APIClient, base_image: str
):
    """With ``launcher_creation: WaitForWorkersReady``, the workers wait for the head."""
    lab = Lab(cluster, tmp_path / "lab", engine="mpi-operator")
    lab.write(launcher_creation="WaitForWorkersReady")
    with PodRunner(lab, engine, base_image):
        done = lab.run("submit", "--config", "job.yaml", "-n", "2", "train.py")

    assert done.code == 0, done
    assert sorted(done.out.split()) == ["[0]", "[1]", "hello", "hello"]


@pytest.mark.parametrize("image", ["base_image", "open_mpi_5_image"])
def test_an_mpi_job_runs_on_open_mpi_4_and_5(
    mpi_lab: Lab, engine: docker.APIClient, image: str, request: pytest.FixtureRequest
):
    """Check variables, a secret, arguments, shm and names on two nodes with two ranks each."""
    lab = mpi_lab
    (lab.source / "train.py").write_text(TRAIN)
    lab.environ["TOKEN"] = "a b$(HOME)$$"
    arguments = ["-n", "2", "--procs-per-node", "2", "-e", "PRICE=5$(A)", "--secret", "TOKEN"]
    with PodRunner(lab, engine, request.getfixturevalue(image)):
        done = lab.run("submit", "--config", "job.yaml", *arguments, "train.py", "$(B)", "$$")

    assert done.code == 0, done
    job = done.job
    hosts = {
        "volcano": [f"{job}-worker-0", f"{job}-worker-1"],
        "mpi-operator": [f"{job}-launcher", f"{job}-worker-0"],
        "job": [f"{job}-0", f"{job}-1"],
    }[lab.engine]
    for rank in range(4):
        host = hosts[rank // 2]
        (line,) = [x for x in done.out.split("\n") if x.startswith(f"[{rank}] ")]
        assert f"rank {rank} of 4 on {host} 5$(A) True {host}" in line
        assert "['$(B)', '$$']" in line
    status = lab.status(job)
    assert status["state"] == "SUCCEEDED"
    assert {phase["name"] for phase in status["phases"]} >= {"stage"}


def test_a_laptop_with_macos_submits_follows_and_cancels(
    cluster: Cluster, tmp_path: Path, engine: docker.APIClient, base_image: str
):
    # Each PodRunner runs one job only.
    first, second = (Lab(cluster, tmp_path / name) for name in ("first", "second"))
    for lab in (first, second):
        lab.environ.update(macos.environ())
    with PodRunner(first, engine, base_image):
        done = first.run("submit", "--config", "job.yaml", "-n", "2", "train.py")
    (second.source / "train.py").write_text("import time\nprint('begun')\ntime.sleep(600)\n")
    with PodRunner(second, engine, base_image):
        job = second.submit()
        second.await_log(job, b"begun")
        cancelled = second.run("cancel", job)

    assert done.code == 0, done
    expected = ["[0] hello", "[1] hello"]
    assert sorted(done.out.splitlines()) == expected
    assert sorted(first.run("logs", done.job).out.splitlines()) == expected
    assert cancelled.code == 0, cancelled
    assert second.status(job)["state"] == "CANCELLED"


@pytest.mark.surroundings
def test_a_rank_that_fails_ends_the_job_with_its_code(
    mpi_lab: Lab, engine: docker.APIClient, base_image: str
):
    """The head's record has the script's exit code, with which submit exits."""
    lab = mpi_lab
    (lab.source / "train.py").write_text(
        "import os, sys, time\n"
        "if os.environ['OMPI_COMM_WORLD_RANK'] == '1':\n"
        "    print('no good'); sys.exit(3)\n"
        "time.sleep(600)\n"
    )
    with PodRunner(lab, engine, base_image):
        done = lab.run("submit", "--config", "job.yaml", "-n", "2", "train.py")

    assert done.code == 3, done
    status = lab.status(done.job)
    assert status["state"] == "FAILED"
    assert status["cause"] == "user"
    assert (status["failure"]["node"], status["failure"]["rank"]) == (1, 1)
    assert "[1] no good" in done.out


def test_a_cancelled_job_gets_its_grace_period_and_its_last_lines_are_shown(
    mpi_lab: Lab, engine: docker.APIClient, base_image: str
):
    """The operator deletes the pods; their output up to the end is kept."""
    lab = mpi_lab
    (lab.source / "train.py").write_text(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), sys.exit(0)))\n"
        "print('begun', flush=True)\n"
        "time.sleep(600)\n"
    )
    with PodRunner(lab, engine, base_image):
        job = lab.submit("-n", "2")
        lab.await_log(job, b"[0] begun", b"[1] begun")
        done = lab.run("cancel", job)

    assert done.code == 0, done
    status = lab.status(job)
    assert (status["state"], status["exit_code"]) == ("CANCELLED", 143), status
    assert lab.run("logs", job).out.count("saved") == 2


# A stand-in for a MindSpore cluster: a scheduler that listens on the address and port in its
# variables, and ranks that register with it.
COMMUNICATION = """
import json, os, socket

def init():
    role = os.environ["MS_ROLE"]
    at = os.environ["MS_SCHED_HOST"], int(os.environ["MS_SCHED_PORT"])
    ranks = int(os.environ["MS_WORKER_NUM"])
    if role == "MS_SCHED":
        with socket.create_server(at) as server:
            lines = [server.accept()[0].makefile("rw") for _ in range(ranks)]
        found = sorted(int(line.readline()) for line in lines)
        for line in lines:
            print(json.dumps([found, at[1]]), file=line, flush=True)
        [line.read() for line in lines]
        return None
    while True:
        try:
            line = socket.create_connection(at, 5).makefile("rw")
            break
        except ConnectionRefusedError:
            pass
    print(os.environ["MS_NODE_ID"], file=line, flush=True)
    return json.loads(line.readline())
"""
CLUSTER = """
import os, socket
from mindspore.communication import init
print(init(), socket.gethostname(), os.environ["RANK_ID"], os.environ.get("MS_SERVER_NUM"))
"""
CODE = "/home/ma-user/modelarts/user-job-dir/code"


def with_stand_in(lab: Lab, text: str) -> list[str]:
    """Put the stand-in for MindSpore beside the script; return the arguments of a submit for it."""
    (lab.source / "mindspore").mkdir()
    (lab.source / "mindspore" / "__init__.py").write_text("")
    (lab.source / "mindspore" / "communication.py").write_text(COMMUNICATION)
    (lab.source / "train.py").write_text(text)
    return ["--config", "job.yaml", "-e", f"PYTHONPATH={CODE}"]


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_cluster_of_mindspore_is_formed_in_the_pods_of_its_operator(
    mindspore_lab: Lab, engine: docker.APIClient, base_image: str, nodes: int
):
    """All ranks of all pods find the scheduler behind the operator's service, on its port."""
    lab = mindspore_lab
    arguments = with_stand_in(lab, CLUSTER)
    with PodRunner(lab, engine, base_image):
        done = lab.run("submit", *arguments, "-n", str(nodes), "--procs-per-node", "2", "train.py")

    assert done.code == 0, done
    ranks = [*range(2 * nodes)]
    hosts = [f"{done.job}-worker-0", f"{done.job}-worker-0"]
    if nodes == 2:
        hosts = [f"{done.job}-scheduler-0"] * 2 + hosts
    lines = sorted(line for line in done.out.split("\n") if line)
    for rank, line in zip(ranks, lines, strict=True):
        assert line.startswith(f"[{rank}] [{ranks}, "), done
        assert line.endswith(f"] {hosts[rank]} {rank} None"), done
        assert nodes == 1 or "], 2222] " in line, done
    status = lab.status(done.job)
    assert status["state"] == "SUCCEEDED"
    assert status["exit_code"] == 0


def test_a_failed_rank_ends_the_job_also_where_the_operator_ends_it_early(
    mindspore_lab: Lab, engine: docker.APIClient, base_image: str
):
    lab = mindspore_lab
    mark = str(lab.folder / "store" / "mark")
    arguments = with_stand_in(
        lab,
        "import os, sys, time\n"
        "from mindspore.communication import init\n"
        "init()\n"
        f"mark = {mark!r}\n"
        "if os.environ['RANK_ID'] == '1':\n"
        "    while not os.path.exists(mark):\n"
        "        time.sleep(0.01)\n"
        "    print('no good'); sys.exit(3)\n"
        "with open(os.path.join(os.environ['OUT'], 'x'), 'w') as file:\n"
        "    file.write('kept')\n"
        "open(mark, 'w').close()\n"
        "time.sleep(600)\n",
    )
    with PodRunner(lab, engine, base_image):
        done = lab.run("submit", *arguments, "-n", "2", "--output", "OUT=", "train.py")
        kept = lab.run("outputs", done.job, "--to", str(lab.folder / "kept"))

    assert done.code == 3, done
    status = lab.status(done.job)
    assert (status["state"], status["cause"]) == ("FAILED", "user"), status
    assert (status["failure"]["node"], status["failure"]["rank"]) == (1, 1), status
    assert kept.code == 0, kept
    assert [path.read_text() for path in sorted((lab.folder / "kept").rglob("x"))] == ["kept"]


def test_a_head_keeps_its_outputs_after_its_operator_took_the_job_for_failed(
    mindspore_lab: Lab,
    engine: docker.APIClient,
    base_image: str,
    until: Callable[..., None],
):
    """After a worker is killed, the head ends its ranks, stores its outputs and its record."""
    lab = mindspore_lab
    arguments = with_stand_in(
        lab,
        "import os, time\n"
        "from mindspore.communication import init\n"
        "init()\n"
        "open(os.path.join(os.environ['OUT'], 'x'), 'w').write('saved')\n"
        "print('begun', flush=True)\n"
        "time.sleep(600)\n",
    )
    with PodRunner(lab, engine, base_image) as runner:
        done = lab.run("submit", *arguments, "--detach", "-n", "2", "--output", "OUT=", "train.py")
        job = done.job
        lab.await_log(job, b"[0] begun", b"[1] begun")
        with runner.paused(f"{job}-scheduler-0"):
            runner.kill(f"{job}-worker-0")
            seen = [lab.status(job)]
            until(
                lambda: seen.append(lab.status(job)) or seen[-1]["native_state"] != "Running",
                "report of the operator that a pod has failed",
            )
        assert seen[-1]["native_state"] == "Failed, but its head is still running", seen
        assert {status["state"] for status in seen} == {"RUNNING"}, seen
        done = lab.run("wait", job)
        kept = lab.run("outputs", job, "--to", str(lab.folder / "kept"))

    assert done.code not in (0, 143), done
    status = lab.status(job)
    assert status["state"] == "FAILED", status
    assert status["cause"] != "cancelled", status
    assert status["failure"]["node"] == 1, status
    assert kept.code == 0, kept
    assert [path.read_text() for path in sorted((lab.folder / "kept").rglob("x"))] == ["saved"]


def test_a_cancelled_mindspore_cluster_gets_its_grace_period(
    mindspore_lab: Lab,
    engine: docker.APIClient,
    base_image: str,
):
    """Cancelling sets a deadline of 1 s, after which the operator deletes the pods."""
    lab = mindspore_lab
    arguments = with_stand_in(
        lab,
        "import signal, sys, time\n"
        "from mindspore.communication import init\n"
        "init()\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), sys.exit(0)))\n"
        "print('begun', flush=True)\n"
        "time.sleep(600)\n",
    )
    with PodRunner(lab, engine, base_image):
        done = lab.run("submit", *arguments, "--detach", "-n", "2", "train.py")
        job = done.job
        lab.await_log(job, b"[0] begun", b"[1] begun")
        done = lab.run("cancel", job)

    assert done.code == 0, done
    status = lab.status(job)
    assert (status["state"], status["cause"]) == ("CANCELLED", "cancelled"), status
    assert lab.run("logs", job).out.count("saved") == 2


@pytest.mark.mindspore
def test_the_quick_start_of_mindspore_runs_in_the_pods_of_its_operator(
    mindspore_lab: Lab, engine: docker.APIClient, with_entry: Callable[[str], str]
):
    """With MindSpore itself, the ranks of both pods have the same losses."""
    lab = mindspore_lab
    lab.write(mindspore={"device_target": "CPU", "parallel_mode": "data_parallel"})
    for path in (ROOT / "examples" / "mindspore_quickstart").glob("*.py"):
        (lab.source / path.name).write_bytes(path.read_bytes())
    with PodRunner(lab, engine, with_entry(os.environ["CLOUDJOB_TEST_MINDSPORE_IMAGE"])):
        done = lab.run("submit", "--config", "job.yaml", "-n", "2", "-e", "GLOG_v=3", "train.py")

    assert done.code == 0, done
    losses: dict[str, list[str]] = {}
    for rank, loss in re.findall(r"\[(\d)\] rank \1 of 2 .* loss ([\d.]+)", done.out):
        losses.setdefault(rank, []).append(loss)
    assert losses["0"] == losses["1"], done
    assert float(losses["0"][-1]) < 0.24 < 0.37 < float(losses["0"][0])
    assert lab.status(done.job)["state"] == "SUCCEEDED"


def test_volcano_starts_a_failed_job_again(
    volcano_lab: Lab, engine: docker.APIClient, base_image: str
):
    lab = volcano_lab
    mark = Path(lab.folder, "store", "mark")
    (lab.source / "train.py").write_text(
        "import os, sys\n"
        f"if not os.path.exists({str(mark)!r}):\n"
        f"    open({str(mark)!r}, 'a').close()\n"
        "    print('first attempt', flush=True); sys.exit(9)\n"
        "print('second attempt')\n"
    )
    with PodRunner(lab, engine, base_image) as runner:
        done = lab.run("submit", "--config", "job.yaml", "--retries", "1", "train.py")

    assert runner.attempts == 2
    assert done.code == 0, done
    assert [line for line in done.out.split("\n") if line] == [
        "[0] first attempt",
        "[0] second attempt",
    ], done
    assert lab.status(done.job)["state"] == "SUCCEEDED"


@pytest.mark.parametrize(("kind", "retries"), [("jobset", 1), ("job", 2)])
def test_all_nodes_start_again_after_a_disruption_and_after_a_failure(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    engine: docker.APIClient,
    base_image: str,
    kind: str,
    retries: int,
):
    """The worker is drained first, for which JobSet counts no restart; then its rank fails."""
    lab = new_lab(request, tmp_path, kind)
    marks = Path(lab.folder, "store", "mark")
    (lab.source / "train.py").write_text(
        "import glob, os, socket, sys, time\n"
        "rank = os.environ['OMPI_COMM_WORLD_RANK']\n"
        f"marks = {str(marks)!r}\n"
        "attempt = len(glob.glob(f'{marks}-{rank}-*')) + 1\n"
        "print('attempt', attempt, 'on', socket.gethostname(), flush=True)\n"
        "assert os.environ.get('CLOUDJOB_ATTEMPT', str(attempt)) == str(attempt)\n"
        "open(f'{marks}-{rank}-{attempt}', 'a').close()\n"
        # The failure of one rank ends the other, even before its script has started.
        "while attempt == 2 and not os.path.exists(f'{marks}-0-2'):\n"
        "    time.sleep(0.1)\n"
        "if attempt < 3:\n"
        "    sys.exit(9) if (attempt, rank) == (2, '1') else time.sleep(600)\n"
    )
    path = lab.folder / "submit.log"
    arguments = ("--config", "job.yaml", "-n", "2", "--retries", str(retries), "train.py")
    with PodRunner(lab, engine, base_image) as runner, path.open("wb") as file:
        submitting = lab.start("submit", *arguments, out=file)
        with Followed(submitting, path) as followed:
            followed.await_all(b"[0] attempt 1", b"[1] attempt 1", limit_s=LIMIT_S)
            runner.delete(runner.pod_of(1), "EvictionByEvictionAPI", "drained")
            # Each attempt has the time that others have for a job.
            for attempt in (b"2", b"3"):
                followed.await_all(b"[0] attempt " + attempt, limit_s=LIMIT_S)
            code = submitting.wait(LIMIT_S)

    text = path.read_text()
    assert code == 0, text
    assert runner.attempts == 3
    (body,) = lab.get(lab.path())["items"]
    job = body["metadata"]["name"]
    group = "-node-0" if kind == "jobset" else ""
    assert sorted(line for line in text.split("\n") if "] attempt" in line) == [
        f"[{rank}] attempt {attempt} on {job}{group}-{rank}"
        for rank in (0, 1)
        for attempt in (1, 2, 3)
    ], text
    status = lab.status(job)
    assert (status["state"], status["exit_code"]) == ("SUCCEEDED", 0)
    if kind == "jobset":
        counts = [body["status"][key] for key in ("restarts", "restartsCountTowardsMax")]
        assert counts == [2, 1]
        return
    assert status["attempt"] == {"number": 3, "most": 3, "previous_cause": ""}
    # The nodes end an attempt together, so no index has failed more often than another.
    assert (body["status"]["failed"], body["status"]["failedIndexes"]) == (4, "")
    records = lab.folder / "store" / job / "record"
    codes = [
        json.loads((records / f"attempt-{number}" / "exit.json").read_text())["exit_code"]
        for number in (1, 2, 3)
    ]
    assert codes[0] not in (0, 9)
    assert codes[1:] == [9, 0]
    second = lab.run("logs", "--attempt", "2", job)
    assert [line for line in second.out.split("\n") if "] attempt" in line] == [
        f"[{rank}] attempt 2 on {job}-{rank}" for rank in (0, 1)
    ]


def test_one_job_file_runs_on_every_backend(
    mpi_lab: Lab, engine: docker.APIClient, base_image: str
):
    """Processes, containers and pods print the same lines and save the same outputs."""
    lab = mpi_lab
    more = {**yaml.safe_load((lab.source / "job.yaml").read_text()), "image": base_image}
    for backend in ("process", "docker", "kubernetes"):
        portable_job.write(lab.source, backend, more)
        is_pods = backend == "kubernetes"
        with PodRunner(lab, engine, base_image) if is_pods else contextlib.nullcontext():
            done = lab.run("submit", "--config", "job.yaml")
        job = json.loads(lab.run("list", "--json").out)[0]["job"]
        target = lab.folder / backend
        fetched = lab.run("outputs", job, "--to", str(target))

        assert done.code == 0, f"{backend}: {done}"
        assert fetched.code == 0, f"{backend}: {fetched}"
        assert sorted(done.out.splitlines()) == portable_job.LINES, backend
        assert portable_job.files(target) == portable_job.FILES, backend


def test_an_image_without_cloudjob_runs_a_job(
    volcano_lab: Lab, engine: docker.APIClient, base_image: str
):
    """The image has only python3; the entry is in a ConfigMap, home and cache are empty volumes.

    Its two nodes connect without ssh.
    """
    lab = volcano_lab
    (lab.source / "train.py").write_text(
        "import json, os, sys\n"
        "print(json.dumps({'home': os.access(os.environ['HOME'], os.W_OK), 'uid': os.getuid(),\n"
        "                  'cache': os.access('/cache', os.W_OK)}))\n"
    )
    lines = (
        "USER 0\nRUN rm -r /opt/cloudjob /home/ma-user && userdel ma-user"
        " && rm /usr/sbin/sshd /usr/bin/ssh /usr/bin/ssh-keygen\nENTRYPOINT []\n"
    )
    dockerfile = io.BytesIO(f"FROM {base_image}\n{lines}".encode())
    tag = f"cloudjob-test/bare-{os.getpid()}"
    output = list(engine.build(fileobj=dockerfile, tag=tag, rm=True, decode=True))
    assert not [line for line in output if "error" in line], output
    with PodRunner(lab, engine, tag):
        arguments = ("--nodes", "2", "--launcher", "python")
        done = lab.run("submit", "--config", "job.yaml", *arguments, "train.py")

    assert done.code == 0, done
    reports = [json.loads(line.partition("] ")[2]) for line in done.out.splitlines()]
    assert reports == 2 * [{"home": True, "uid": 1000, "cache": True}]
    containers.remove(engine, tag)


# -- Kubernetes without an operator ---------------------------------------------------------------

WAITS = "import time\nprint('begun', flush=True)\ntime.sleep(600)\n"
MEMORY = "The node was low on resource: memory."


def start(lab: Lab, *arguments: str) -> tuple[str, list[str]]:
    """Start a job of two nodes that waits, and return its id and its pods."""
    (lab.source / "train.py").write_text(WAITS)
    job = lab.submit("-n", "2", *arguments)
    lab.await_log(job, b"[0] begun", b"[1] begun")
    items = lab.get(lab.core("Pod"))["items"]
    return job, sorted(item["metadata"]["name"] for item in items)


SUM_OF_MPI = """
from mpi4py import MPI
total = MPI.COMM_WORLD.allreduce(MPI.COMM_WORLD.Get_rank() + 1)
"""
SUM_OF_TORCH = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(value)
total = value.item()
"""
SUM_OF_MINDSPORE = """
import os
import mindspore as ms
from mindspore.communication import get_rank, init
ms.set_device("CPU")
init()
value = ms.ops.AllReduce()(ms.Tensor([float(get_rank() + 1)]))
total = int(value.asnumpy()[0])
"""
SAVE = """
import os, pathlib
rank = os.environ.get("RANK_ID") or os.environ.get("RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
pathlib.Path(os.environ["MODEL"], "rank-" + rank).write_text(str(total))
print("the sum is", total)
"""


class Framework(NamedTuple):
    """A launcher, a script that adds the numbers of the ranks, and an image for it."""

    launcher: str
    script: str
    image: str


@pytest.fixture(
    params=[
        ("mpirun", SUM_OF_MPI),
        pytest.param(("torchrun", SUM_OF_TORCH), marks=pytest.mark.torch),
        pytest.param(("dynamic-cluster", SUM_OF_MINDSPORE), marks=pytest.mark.mindspore),
    ],
    ids=lambda param: param[0],
)
def framework(
    request: pytest.FixtureRequest, build: Callable[..., str], with_entry: Callable[[str], str]
) -> Framework:
    """Each framework that needs no operator."""
    launcher, script = request.param
    name = {"torchrun": "TORCH", "dynamic-cluster": "MINDSPORE"}.get(launcher)
    is_ours = name is None
    image = build("examples") if is_ours else with_entry(os.environ[f"CLOUDJOB_TEST_{name}_IMAGE"])
    return Framework(launcher, script, image)


def test_edit_in_one_namespace_is_enough_for_two_nodes_of_each_framework(
    job_lab: Lab, cluster: Cluster, engine: docker.APIClient, framework: Framework
):
    """The cluster has no operator, and its users nothing but this role."""
    lab = job_lab
    may_edit(lab, cluster, "guest")
    (lab.source / "train.py").write_text(framework.script + SAVE)
    options = ("--config", "job.yaml", "-n", "2", "-e", "GLOG_v=3")
    options += ("--launcher", framework.launcher)
    target = lab.folder / "results"
    with PodRunner(lab, engine, framework.image):
        log_in(lab, lab.cluster.guest)
        done = lab.run("submit", *options, "--output", "MODEL=", "train.py")
        fetched = lab.run("outputs", done.job, "--to", str(target))
        status = lab.status(done.job)

    assert done.code == 0, done
    lines = [line for line in done.out.splitlines() if "the sum" in line]
    assert sorted(lines) == ["[0] the sum is 3", "[1] the sum is 3"], done
    assert fetched.code == 0, fetched
    files = {path.name: path.read_text() for path in target.rglob("rank-*")}
    assert files == {"rank-0": "3", "rank-1": "3"}
    assert (status["state"], status["backend"]) == ("SUCCEEDED", "kubernetes"), status


@pytest.mark.parametrize("node", [0, 1])
def test_a_deleted_pod_ends_an_indexed_job(
    job_lab: Lab, engine: docker.APIClient, base_image: str, node: int
):
    """Nothing replaces the pod: its successor would wait for nodes that have ended."""
    lab = job_lab
    with PodRunner(lab, engine, base_image) as runner:
        job, pods = start(lab)
        runner.delete(pods[node])
        done = lab.run("wait", job)
        ended = [item["metadata"]["name"] for item in lab.get(lab.core("Pod"))["items"]]

    assert done.code not in (0, 124), done
    assert runner.attempts == 1
    assert set(ended) <= set(pods)
    status = lab.status(job)
    assert (status["state"], status["cause"]) == ("FAILED", "platform"), status


@pytest.mark.parametrize("node", [0, 1])
def test_a_preempted_pod_of_an_indexed_job_is_named_with_the_reason(
    job_lab: Lab, engine: docker.APIClient, base_image: str, node: int
):
    """The watch of a submit has seen the pod before the cluster deleted it."""
    lab = job_lab
    (lab.source / "train.py").write_text(WAITS)
    path = lab.folder / "submit.log"
    with PodRunner(lab, engine, base_image) as runner, path.open("wb") as file:
        submitting = lab.start("submit", "--config", "job.yaml", "-n", "2", "train.py", out=file)
        with Followed(submitting, path) as followed:
            followed.await_all(b"[0] begun", b"[1] begun", limit_s=LIMIT_S)
            pods = sorted(x["metadata"]["name"] for x in lab.get(lab.core("Pod"))["items"])
            runner.delete(pods[node], "PreemptionByScheduler", "for a pod of higher priority")
            assert submitting.wait(LIMIT_S) != 0

    status = lab.status(pods[0].rpartition("-")[0].rpartition("-")[0])
    assert (status["state"], status["cause"]) == ("FAILED", "platform"), status
    assert "PreemptionByScheduler: for a pod of higher priority" in status["failure"]["message"]


def test_an_evicted_worker_of_an_indexed_job_is_named(
    job_lab: Lab, engine: docker.APIClient, base_image: str
):
    lab = job_lab
    with PodRunner(lab, engine, base_image) as runner:
        job, pods = start(lab)
        runner.evict(pods[1], MEMORY)
        done = lab.run("wait", job)

    assert done.code not in (0, 124), done
    status = lab.status(job)
    assert (status["state"], status["cause"]) == ("FAILED", "platform"), status
    assert status["failure"]["node"] == 1, status
    assert f"node 1 ({pods[1]}): Evicted: {MEMORY.rstrip('.')}; " in status["failure"]["message"]


def test_an_indexed_job_without_room_for_a_node_fails_at_its_start_timeout(
    job_lab: Lab, engine: docker.APIClient, base_image: str, until: Callable[..., None]
):
    """The controller would wait for the pod for ever, but the job ends with its head."""
    lab = job_lab
    with PodRunner(lab, engine, base_image, held=(1,)):
        job = lab.submit("-n", "2", "--start-timeout-min", "0.3")
        until(
            lambda: "(node 1: Unschedulable: no room)" in lab.status(job)["native_state"],
            "reason why a pod waits",
        )
        done = lab.run("wait", job)
        status = lab.status(job)

    assert done.code not in (0, 124), done
    assert status["state"] == "FAILED", status
    assert status["failure"]["node"] == 1, status
    assert status["native_state"] == "Running, but its head has failed", status
    assert "(node 1: Unschedulable: no room; " in status["failure"]["message"], status


def test_a_head_looks_up_a_worker_until_its_name_resolves(
    job_lab: Lab, engine: docker.APIClient, base_image: str, until: Callable[..., None]
):
    """The cluster's DNS knows the name of a pod only some time after the pod has started."""
    lab = job_lab
    with PodRunner(lab, engine, base_image, held=(1,)) as runner:
        submitting = lab.start("submit", "--config", "job.yaml", "-n", "2", "train.py")
        until(
            lambda: any(
                log.lines
                for key, log in lab.cluster.kubelet.logs.items()
                if key.startswith(f"{lab.namespace}/")
            ),
            "the first line of the head",
        )
        runner.release()
        done = lab.end(submitting)

    assert done.code == 0, done
    assert sorted(done.out.split()) == ["[0]", "[1]", "hello", "hello"]

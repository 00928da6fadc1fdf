"""MindSpore's launchers with a real MindSpore: its Python is $CLOUDJOB_TEST_MINDSPORE.

test_launchers.py tests the promises of all launchers. Rank tables are for Ascend devices; what a
script gets from them is tested without MindSpore.
"""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests.support.emulator import SETTINGS, bucket_of, running

mindspore = pytest.mark.mindspore

LIMIT_S = 240
EXAMPLE = Path(__file__).parents[2] / "examples" / "mindspore_quickstart"
CLUSTERS = ("msrun", "dynamic-cluster", "mindspore-mpi")
PRELUDE = """\
import os, sys, time
import numpy as np
import mindspore as ms
from mindspore import Tensor, ops
from mindspore.communication import init, get_rank, get_group_size
ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
init()
rank = get_rank()
results = os.environ["RESULTS"]
def all_sum(value):
    return float(ops.AllReduce()(Tensor(np.array([value], np.float32)))[0])
"""


@pytest.fixture
def submit(cloud):
    """Submit a script under a Python that has MindSpore, and wait for its end."""
    python = os.environ["CLOUDJOB_TEST_MINDSPORE"]

    def run(launcher: str, text: str, *arguments: str, flags: tuple[str, ...] = ()):
        cloud.write("train.py", PRELUDE + text)
        cloud.write("job.yaml", f"process: {{python: {python}}}\n")
        return cloud.submit(
            *("--config", "job.yaml", "--launcher", launcher, "-e", "GLOG_v=3", "--nodes", "2"),
            *(*flags, "train.py", *arguments),
            limit_s=LIMIT_S,
        )

    return run


@mindspore
@pytest.mark.parametrize(
    "launcher", [pytest.param("msrun", marks=pytest.mark.surroundings), *CLUSTERS[1:]]
)
def test_ranks_of_all_nodes_form_one_cluster(cloud, submit, launcher):
    """An allreduce is right, each rank has its node's number, and arguments arrive unchanged."""
    args = ("--worker", "--rank_table_file", "a b", "", "-I", "--", "%3A", ":")
    done = submit(
        launcher,
        """
node = int(os.environ["VC_TASK_INDEX"])
print("sum", all_sum(rank + 1), get_group_size(), rank == node, sys.argv[1:])
""",
        *args,
    )

    assert done.code == 0, done
    text = f"sum 3.0 2 True {list(args)}".encode()
    assert sorted(line for line in done.lines if b"sum" in line) == [
        b"[%d] %s" % (rank, text) for rank in range(2)
    ]
    assert cloud.status(done.job)["state"] == "SUCCEEDED"


@mindspore
def test_a_dynamic_cluster_has_parameter_servers(cloud, submit):
    """Each node runs one, which joins the cluster; MindSpore 2.10 supports no more of this mode."""
    done = submit(
        "dynamic-cluster",
        """
role, node = os.environ["MS_ROLE"], os.environ["VC_TASK_INDEX"]
print(role, node, sys.argv[1:], flush=True)
open(f"{results}/{role}-{node}", "w").close()
# A server that leaves before a worker has seen it in the cluster lets that worker wait for it.
other = "MS_WORKER" if role == "MS_PSERVER" else "MS_PSERVER"
while not all(os.path.exists(f"{results}/{other}-{node}") for node in (0, 1)):
    time.sleep(0.1)
""",
        "--lr=1",
        flags=("-e", "MS_SERVER_NUM=2", "--timeout-min", "3"),
    )

    assert done.code == 0, done
    assert sorted(line for line in done.lines if b"MS_WORKER" in line) == [
        b"[%d] MS_WORKER %d ['--lr=1']" % (rank, rank) for rank in range(2)
    ]


@mindspore
def test_a_failing_rank_ends_the_job(cloud, submit):
    done = submit(
        "msrun",
        """
if rank == 1:
    print("that was it", flush=True)
    os._exit(7)
all_sum(1)
time.sleep(600)
""",
    )

    assert done.code == 7, done
    status = cloud.status(done.job)
    failure = status["failure"]
    assert (status["state"], status["cause"]) == ("FAILED", "user"), status
    assert (failure["rank"], failure["node"], failure["exit_code"]) == (1, 1, 7), status
    assert failure["last_lines"][-1] == "that was it", status


@pytest.mark.long
@mindspore
def test_retries_recover_a_failed_job(cloud, submit):
    """MindSpore's own recovery is on: it waits for the failed rank, but does not restart it."""
    done = submit(
        "msrun",
        """
first = f"{results}/first"
if rank == 1 and not os.path.exists(first):
    open(first, "w").close()
    os._exit(9)
print("sum", all_sum(rank + 1))
""",
        flags=(
            "--retries",
            "1",
            "-e",
            "MS_ENABLE_RECOVERY=1",
            "-e",
            f"MS_RECOVERY_PATH={cloud.folder}",
        ),
    )

    assert done.code == 0, done
    assert b"attempt 2 of 2 begins" in done.err, done
    assert sorted(line for line in done.lines if b"sum" in line) == [b"[0] sum 3.0", b"[1] sum 3.0"]


@mindspore
def test_the_record_names_a_scheduler_that_died(cloud, poll):
    python = os.environ["CLOUDJOB_TEST_MINDSPORE"]
    cloud.write("train.py", PRELUDE + 'open(f"{results}/up-{rank}", "w").close(); time.sleep(600)')
    cloud.write("job.yaml", f"process: {{python: {python}}}\n")
    arguments = (
        "--config",
        "job.yaml",
        "--launcher",
        "dynamic-cluster",
        "--nodes",
        "2",
        "train.py",
    )
    job = cloud.detach("-e", "GLOG_v=3", *arguments)
    cloud.await_results("up-0", "up-1", limit_s=LIMIT_S)
    [scheduler] = cloud.find(lambda _, argv: "--scheduler" in argv)

    os.kill(scheduler, signal.SIGKILL)

    done = cloud.cli("wait", job)
    assert done.code == 137, done
    status = cloud.status(job)
    failure = status["failure"]
    assert (status["state"], status["cause"]) == ("FAILED", "platform"), status
    assert failure["message"] == "the scheduler of the ranks was killed by SIGKILL", status
    assert (failure["node"], failure["rank"]) == (0, None), status


@mindspore
def test_cancel_reaches_every_rank_with_its_grace_period(cloud):
    """MindSpore's own msrun would kill the ranks at once."""
    python = os.environ["CLOUDJOB_TEST_MINDSPORE"]
    text = """
import signal
def end(number, frame):
    open(f"{results}/bye-{rank}", "w").close()
    sys.stdout.flush()
    os._exit(0)
signal.signal(signal.SIGTERM, end)
open(f"{results}/up-{rank}", "w").close()
while True: time.sleep(0.05)
"""
    cloud.write("train.py", PRELUDE + text)
    cloud.write("job.yaml", f"process: {{python: {python}}}\n")
    arguments = ("--config", "job.yaml", "--launcher", "msrun", "--nodes", "2", "train.py")
    job = cloud.detach("-e", "GLOG_v=3", *arguments)
    cloud.await_results("up-0", "up-1", limit_s=LIMIT_S)

    assert cloud.cli("cancel", job).code == 0

    assert cloud.status(job)["state"] == "CANCELLED"
    assert len(cloud.results_written("bye-*")) == 2


@pytest.mark.long
@mindspore
def test_the_quick_start_has_the_same_losses_on_every_rank(cloud):
    """Four data-parallel ranks on two nodes have the losses that the script says to expect."""
    python = os.environ["CLOUDJOB_TEST_MINDSPORE"]
    text = (EXAMPLE / "job.yaml").read_text()
    job = cloud.write("job.yaml", f"{text}  python: {python}\n")
    arguments = ("--config", job, "--source", EXAMPLE, "--output", "SAVED=")

    done = cloud.submit(*arguments, "train.py", "--unknown", "option", limit_s=LIMIT_S)

    assert done.code == 0, done
    losses: dict[int, list[float]] = {}
    for line in done.lines:
        match = re.match(rb"\[(\d)\] rank \1 of 4 epoch \d step \d loss ([\d.]+)", line)
        if match:
            losses.setdefault(int(match[1]), []).append(float(match[2]))
    assert sorted(losses) == [0, 1, 2, 3], done
    assert all(match == losses[0] for match in losses.values()), losses
    assert len(losses[0]) == 20
    assert losses[0] == sorted(losses[0], reverse=True)
    [expected] = re.findall(
        rb"to expect .*: ([\d.]+) in .* ([\d.]+) in epoch 3, ([\d.]+) ", done.out
    )
    assert [losses[0][step] for step in (0, 8, 19)] == [
        pytest.approx(float(text), abs=0.0006) for text in expected
    ]

    folder = cloud.folder / "results-of-job"
    assert cloud.cli("outputs", done.job, "--to", str(folder)).code == 0
    for rank in range(4):
        saved = folder / "SAVED" / f"rank_{rank}"
        names = {path.name for path in saved.glob("checkpoints/*.ckpt")}
        assert names == {"quickstart-4_4.ckpt", "quickstart-5_4.ckpt"}
        assert list(saved.glob("graphs/**/*.ir"))


@mindspore
def test_the_quick_start_trains_on_a_single_rank(cloud):
    python = os.environ["CLOUDJOB_TEST_MINDSPORE"]
    text = (EXAMPLE / "job.yaml").read_text().replace("data_parallel", "stand_alone")
    job = cloud.write("job.yaml", f"{text}  python: {python}\n")
    one = ("--nodes", "1", "--procs-per-node", "1")

    done = cloud.submit("--config", job, "--source", EXAMPLE, *one, "train.py", limit_s=LIMIT_S)

    assert done.code == 0, done
    losses = [float(text) for text in re.findall(rb"rank 0 of 1 epoch .* loss ([\d.]+)", done.out)]
    assert len(losses) == 20, done
    assert losses == sorted(losses, reverse=True)


def test_a_launcher_that_fails_on_one_node_ends_the_job(cloud):
    """The other node would wait for ranks that never start; a shell script stands in for Python."""
    cloud.write("train.py", "")
    python = cloud.folder / "python"
    python.write_text("""\
#!/bin/sh
case "$1 $VC_TASK_INDEX" in
    -c*) echo 2.10.0 ;;
    "-m 1") echo "cannot open libmindspore.so" && exit 3 ;;
    *) exec sleep 600 ;;
esac
""")
    python.chmod(0o755)
    cloud.write("job.yaml", f"process: {{python: {python}}}\n")

    done = cloud.submit("--config", "job.yaml", "--launcher", "msrun", "--nodes", "2", "train.py")

    assert done.code == 125, done
    status = cloud.status(done.job)
    failure = status["failure"]
    assert (status["state"], status["cause"]) == ("FAILED", "entry"), status
    assert failure["message"] == (
        "msrun on node 1 ended with exit code 3 before all ranks had started"
    ), status
    assert failure["last_lines"] == ["cannot open libmindspore.so"], status


def test_modes_that_need_an_accelerator_are_refused_on_a_cpu(cloud):
    cloud.write(
        "job.yaml",
        "launcher: msrun\nmindspore: {parallel_mode: auto_parallel, device_target: CPU}\n",
    )
    cloud.write("train.py", "")

    done = cloud.submit("--config", "job.yaml", "train.py")

    assert done.code == 2, done
    assert b"auto_parallel does not work on CPU: use data_parallel" in done.err, done


@mindspore
def test_an_unsupported_mode_can_be_forced_and_mindspore_reports_it(cloud):
    python = os.environ["CLOUDJOB_TEST_MINDSPORE"]
    text = (EXAMPLE / "job.yaml").read_text().replace("data_parallel", "semi_auto_parallel")
    job = cloud.write("job.yaml", f"{text}  python: {python}\n")

    done = cloud.submit(
        *("--config", job, "--source", EXAMPLE, "--no-hardware-check"),
        *("--nodes", "1", "train.py"),
        limit_s=LIMIT_S,
    )

    assert done.code == 1, done
    status = cloud.status(done.job)
    assert (status["state"], status["cause"]) == ("FAILED", "user"), status
    text = " ".join(status["failure"]["last_lines"])
    assert "only support" in text, status


PRESET = b"""\
import os
import numpy as np, mindspore as ms
from mindspore import Tensor, ops
import moxing as mox
ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
rank, size, device = (os.environ[name] for name in ("RANK_ID", "RANK_SIZE", "DEVICE_ID"))
one = Tensor(np.ones(1, np.float32))
if os.environ.get("MA_RUN_METHOD"):
    from mindspore.communication import init
    init()
    one = ops.AllReduce()(one)
value = float((one + one)[0])
print("rank", rank, "of", size, "device", device, "value", value, mox.file.exists("obs://data"))
"""


@mindspore
def test_the_presets_of_the_emulator_run_mindspore():
    """One job starts a process per device with a rank table, and one uses msrun on two nodes."""
    python = os.environ["CLOUDJOB_TEST_MINDSPORE"]
    engine = "mindspore_2.2.12-cann_7.0.1-py_3.9-euler_2.10-aarch64"
    flavors = "".join(
        f"  - {{id: cards{cards}, kind: Ascend, max_nodes: 2, cpu_cores: 8, memory_gb: 64,"
        f" cards: {cards}}}\n"
        for cards in (1, 2)
    )
    with running(f"{SETTINGS}python: {python}\nflavors:\n{flavors}") as api:
        s3 = bucket_of(api)
        s3.put_object(Bucket="data", Key="code/train.py", Body=PRESET)

        def create(nodes: int, cards: int, method: str) -> str:
            flavor = {"flavor_id": f"cards{cards}", "node_count": nodes}
            algorithm = {
                "engine": {"engine_id": engine},
                "code_dir": "/data/code/",
                "boot_file": "/data/code/train.py",
                "environments": {"MA_RUN_METHOD": method} if method else {},
            }
            return api.create("", algorithm=algorithm, spec={"resource": flavor})

        jobs = [create(1, 2, ""), create(2, 1, "msrun")]
        logs = []
        for job in jobs:
            details = api.await_phase(job, limit_s=LIMIT_S)
            logs.append(api.log(job) + api.log(job, 1))
            assert details["status"]["phase"] == "Completed", logs[-1]

    for rank in (0, 1):
        assert f"rank {rank} of 2 device {rank} value 2.0 True" in logs[0], logs
        assert f"rank {rank} of 2 device 0 value 4.0 True" in logs[1], logs


# -- rank tables, without MindSpore -------------------------------------------------------------

REPORT_RANK_TABLE = """\
import json, os
table = json.load(open(os.environ["RANK_TABLE_FILE"]))
names = ("RANK_ID", "RANK_SIZE", "DEVICE_ID", "ASCEND_DEVICE_ID")
variables = {name: os.environ[name] for name in names}
path = f"{os.environ['RESULTS']}/{variables['RANK_ID']}"
open(path, "w").write(json.dumps([variables, table, os.environ["VC_TASK_INDEX"]]))
"""


def test_each_rank_in_a_rank_table_gets_its_number(cloud):
    cloud.write("train.py", REPORT_RANK_TABLE)
    cloud.write(
        "job.yaml",
        """
launcher: rank-table
nodes: 2
procs_per_node: 2
mindspore:
  device_target: Ascend
  devices:
    - 10.0.0.1 0=192.168.1.1 1=192.168.2.1
    - 10.0.0.2 0=192.168.1.2 1=192.168.2.2
""",
    )

    done = cloud.submit("--config", "job.yaml", "train.py")

    assert done.code == 0, done
    results = {name: json.loads(text) for name, text in cloud.results_written().items()}
    assert {name: variables for name, (variables, _, _) in results.items()} == {
        str(rank): {
            "RANK_ID": str(rank),
            "RANK_SIZE": "4",
            "DEVICE_ID": str(rank % 2),
            "ASCEND_DEVICE_ID": str(rank % 2),
        }
        for rank in range(4)
    }
    assert [results[str(rank)][2] for rank in range(4)] == ["0", "0", "1", "1"]
    tables = [table for _, table, _ in results.values()]
    assert all(table == tables[0] for table in tables)
    assert [server["server_id"] for server in tables[0]["server_list"]] == ["10.0.0.1", "10.0.0.2"]


def test_the_platforms_rank_table_is_used(cloud):
    """``RANK_TABLE_FILE`` is the path of the table or of its folder."""
    cloud.write("train.py", REPORT_RANK_TABLE)
    instance = {
        "pod_name": "p-0",
        "server_id": "10.0.0.1",
        "devices": [{"device_id": "3", "device_ip": "192.168.4.1"}],
    }
    (cloud.folder / "jobstart_hccl.json").write_text(
        json.dumps({"status": "completed", "group_list": [{"instance_list": [instance]}]})
    )
    cloud.write("job.yaml", "launcher: rank-table\nmindspore: {device_target: Ascend}\n")

    done = cloud.submit("--config", "job.yaml", "-e", f"RANK_TABLE_FILE={cloud.folder}", "train.py")

    assert done.code == 0, done
    variables, table, _ = json.loads(cloud.results_written()["0"])
    assert variables == {
        "RANK_ID": "0",
        "RANK_SIZE": "1",
        "DEVICE_ID": "3",
        "ASCEND_DEVICE_ID": "3",
    }
    assert table["version"] == "1.0"


def test_a_dry_run_needs_no_rank_table(cloud):
    """It shows the ranks, and a table without the addresses, which only the platform knows."""
    cloud.write("train.py", "")
    cloud.write("job.yaml", "launcher: rank-table\nmindspore: {device_target: Ascend}\n")

    done = cloud.submit(
        *("--config", "job.yaml", "--nodes", "2", "--procs-per-node", "2"),
        *("--dry-run", "--json", "train.py"),
    )

    assert done.code == 0, done
    plans = json.loads(done.out)["plans"]
    ranks = [process["env"]["RANK_ID"] for plan in plans for process in plan["processes"]]
    assert ranks == ["0", "1", "2", "3"]
    assert '"device_ip": "?"' in plans[0]["files"][0]["text"]


def test_a_missing_rank_table_is_reported_with_a_hint(cloud):
    cloud.write("train.py", "")
    cloud.write("job.yaml", "launcher: rank-table\nmindspore: {device_target: Ascend}\n")

    done = cloud.submit(
        *("--config", "job.yaml", "--start-timeout-min", "0.02"),
        *("-e", f"RANK_TABLE_FILE={cloud.folder}/none.json", "train.py"),
    )

    assert done.code == 125, done
    assert b"none.json: it does not exist after 1.2 s" in done.err + done.out, done
    assert b"mindspore.devices" in done.err + done.out, done


@pytest.mark.parametrize("device", ["CPU", "GPU"])
def test_the_launcher_rank_table_is_refused_without_ascend(cloud, device):
    cloud.write("train.py", REPORT_RANK_TABLE)
    text = f"mindspore: {{device_target: {device}, devices: [s 0=1.1.1.1]}}\n"
    cloud.write("job.yaml", "launcher: rank-table\n" + text)

    refused = cloud.submit("--config", "job.yaml", "train.py")
    forced = cloud.submit("--config", "job.yaml", "--no-hardware-check", "train.py")

    assert refused.code == 2, refused
    assert f"rank-table does not work on {device}: use msrun".encode() in refused.err, refused
    assert forced.code == 0, forced
    assert list(cloud.results_written()) == ["0"]

"""The environment variables, command and folders of a node."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloudjob.emulator import models, node_plan, settings
from cloudjob.emulator.database import JobRow, StopRequest
from cloudjob.emulator.docker_nodes import bridge_address
from cloudjob.emulator.node_plan import WORK, NodeContext
from cloudjob.emulator.nodes import folder
from jobentry.contract.sigv4 import Keys
from jobentry.launchers import rank_table

SETTINGS = settings.defaults()
KEYS = Keys("ak", "sk", "token")
CONTAINER = NodeContext("", "python3", ("python3", "/entry.pyz"), "http://10.0.0.1:1")
PROCESS = NodeContext("/state/nodes/1", "/venv/bin/python", ("py", "entry"), "http://127.0.0.1:1")
ID = "11111111-2222-3333-4444-555555555555"
PYTORCH = "pytorch_1.8.0-cuda_10.2-py_3.7-ubuntu_18.04-x86_64"
ASCEND = "mindspore_2.2.12-cann_7.0.1-py_3.9-euler_2.10-aarch64"
MPI = "mindspore_1.3.0-cuda_10.1-py_3.7-ubuntu_1804-x86_64"


def row(nodes: int = 2, flavor: str = "modelarts.vm.cpu.2u", **algorithm: Any) -> JobRow:
    """Return the database row of a job."""
    defaults = {"engine": {"image_url": "i:1"}, "command": "bash run.sh", **algorithm}
    job = models.job(
        {
            "metadata": {"name": "j"},
            "algorithm": defaults,
            "spec": {"resource": {"flavor_id": flavor, "node_count": nodes}},
        },
        SETTINGS,
    )
    return JobRow(
        ID,
        "j",
        "0",
        "job",
        "Pending",
        "Queuing",
        1,
        "",
        "u",
        1,
        0,
        0,
        nodes,
        "",
        StopRequest.NONE,
        job,
        models.Run(),
    )


def channel(name: str, url: str, **more: Any) -> dict[str, Any]:
    """Return an input or output."""
    return {"name": name, "remote": {"obs": {"obs_url": url}}, **more}


def test_a_node_has_the_documented_variables():
    env = node_plan.environment(row(), 1, "10.0.0.3", CONTAINER, SETTINGS, KEYS)
    job = f"modelarts-job-{ID}"

    assert env["VC_WORKER_HOSTS"] == f"{job}-worker-0.{job},{job}-worker-1.{job}"
    assert env["MA_CURRENT_INSTANCE_NAME"] == f"{job}-worker-1"
    assert env["MA_VJ_NAME"] == f"ma-job-{ID}"
    assert (env["VC_TASK_INDEX"], env["VK_TASK_INDEX"], env["VC_WORKER_NUM"]) == ("1", "1", "2")
    assert (env["MA_NUM_HOSTS"], env["MA_NUM_GPUS"], env["MA_TASK_NAME"]) == ("2", "0", "worker")
    assert env["MA_CURRENT_IP"] == "10.0.0.3"
    assert env["MA_JOB_DIR"] == "/home/ma-user/modelarts/user-job-dir"
    assert env["S3_ENDPOINT"] == "http://10.0.0.1:1"
    assert (env["MA_TASK_INDEX"], env["HOSTNAME"]) == ("1", f"{job}-worker-1")
    assert (env["MA_SCRIPT_INTERPRETER"], env["MA_DETECT_TRAIN_INJECT_CODE"]) == ("", "0")
    assert "MA_PIP_URL" not in env
    names = ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SECURITY_TOKEN")
    assert tuple(env[name] for name in names) == KEYS
    assert not [name for name in env if name.startswith("CLOUDJOB_")]


def test_a_node_has_the_package_index_of_the_settings():
    index = replace(SETTINGS, pip_url="https://packages.example.com/simple/")
    env = node_plan.environment(row(), 0, "a", CONTAINER, index, KEYS)

    assert env["MA_PIP_URL"] == "https://packages.example.com/simple/"
    assert env["MA_PIP_HOST"] == "packages.example.com"


def test_a_node_has_the_variables_of_the_first_version_on_request():
    job = row(
        inputs=[channel("data_url", "/bkt/in/")],
        parameters=[{"name": "train_url", "value": "obs://bkt/out"}],
    )
    older = replace(SETTINGS, first_version=True)
    env = node_plan.environment(job, 1, "a", CONTAINER, older, KEYS)
    host = f"modelarts-job-{ID}-worker-1.modelarts-job-{ID}"

    assert (env["DLS_TASK_INDEX"], env["DLS_TASK_NUMBER"]) == ("1", "2")
    assert env["BATCH_CUSTOM1_HOSTS"] == f"{host}:6666"
    assert (env["DLS_DATA_URL"], env["DLS_TRAIN_URL"]) == ("s3://bkt/in/", "obs://bkt/out")
    assert env["DLS_LOCAL_CACHE_PATH"] == "/cache"
    names = ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN")
    assert tuple(env[f"USER_AWS_{name}"] for name in names) == KEYS
    assert env["USER_S3_ENDPOINT"] == env["S3_ENDPOINT"]
    assert (env["USER_S3_USE_HTTPS"], env["USER_S3_VERIFY_SSL"]) == ("0", "0")
    assert not any(
        name.startswith(("DLS_", "BATCH_CUSTOM", "USER_"))
        for name in node_plan.environment(job, 1, "a", CONTAINER, SETTINGS, KEYS)
    )


def test_a_node_with_cards_has_variables_for_them():
    env = node_plan.environment(
        row(1, "modelarts.vm.p100.2xlarge"), 0, "a", CONTAINER, SETTINGS, KEYS
    )

    assert env["MA_NUM_GPUS"] == "2"
    assert env["NCCL_IB_HCA"] == "^mlx5_bond_0"
    assert env["NCCL_VERSION"] == "2.7.8"


def ascend(**variables: str) -> dict[str, str]:
    """Return the variables of the second of two nodes with an Ascend preset."""
    job = row(
        2,
        "modelarts.kat1.8xlarge",
        command="",
        engine={"engine_name": "Ascend-Powered-Engine", "engine_version": ASCEND},
        code_dir="/bkt/a/proj/",
        boot_file="/bkt/a/proj/t.py",
        environments=variables,
    )
    return node_plan.environment(job, 1, "a", CONTAINER, SETTINGS, KEYS)


def test_an_ascend_preset_has_a_rank_for_each_device_of_each_node():
    env = ascend()

    assert (env["MA_NUM_GPUS"], env["MA_NUM_NPUS"], env["JOB_ID"]) == ("8", "8", ID)
    assert env["CLOUDJOB_LAUNCHER"] == "rank-table"
    assert [line.split()[:2] for line in env["CLOUDJOB_DEVICES"].splitlines()] == [
        ["192.168.0.1", "0=192.168.1.1"],
        ["192.168.0.2", "0=192.168.1.2"],
    ]
    assert len(env["CLOUDJOB_DEVICES"].splitlines()[1].split()) == 9
    assert "NCCL_DEBUG" not in env


def test_the_platforms_rank_table_lists_the_devices_of_every_node():
    job = row(2, "modelarts.kat1.8xlarge")
    env = node_plan.environment(job, 1, "a", CONTAINER, SETTINGS, KEYS)
    table = json.loads(node_plan.rank_table(job, ["10.0.0.2", "10.0.0.3"], SETTINGS))
    (group,) = table["group_list"]

    assert env["RANK_TABLE_FILE"] == "/user/config"
    assert (table["status"], group["device_count"], group["instance_count"]) == (
        "completed",
        "16",
        "2",
    )
    assert [item["server_id"] for item in group["instance_list"]] == ["10.0.0.2", "10.0.0.3"]
    assert group["instance_list"][1]["pod_name"] == env["MA_CURRENT_INSTANCE_NAME"]
    assert len(group["instance_list"][1]["devices"]) == 8
    assert json.loads(node_plan.rank_table(job, (), SETTINGS))["status"] == "initializing"
    assert not node_plan.has_rank_table(row(2, "modelarts.vm.cpu.2u"), SETTINGS)
    ranks = rank_table.from_text(json.dumps(table)).nodes
    assert [[rank for rank, _ in node] for node in ranks] == [list(range(8)), list(range(8, 16))]


@pytest.mark.parametrize("method", ["torchrun", "msrun"])
def test_the_run_method_of_an_ascend_preset_replaces_the_rank_table(method):
    env = ascend(MA_RUN_METHOD=method)

    assert env["CLOUDJOB_LAUNCHER"] == method
    assert "CLOUDJOB_DEVICES" not in env
    assert "RANK_TABLE_FILE" not in env


def test_the_users_variables_override_the_platforms():
    env = node_plan.environment(
        row(
            environments={"NCCL_DEBUG": "WARN", "S3_VERIFY_SSL": "1"},
            inputs=[channel("data", "/bkt/in/", access_method="env")],
        ),
        0,
        "a",
        CONTAINER,
        SETTINGS,
        KEYS,
    )

    assert (env["NCCL_DEBUG"], env["S3_VERIFY_SSL"]) == ("WARN", "1")
    assert env["data"] == "/home/ma-user/modelarts/inputs/data_0"
    assert json.loads(env["MA_INPUTS"])["inputs"][0]["remote"]["obs"]["obs_url"] == "s3://bkt/in/"


def test_parameters_and_channels_are_appended_to_the_command():
    command = node_plan.command(
        row(
            command="cd /home/ma-user/x && sh run.sh ",
            parameters=[{"name": "lr", "value": "0.1 $x"}, {"name": "flag", "value": ""}],
            inputs=[channel("data_url", "/bkt/in/")],
            outputs=[
                channel("train_url", "/bkt/out/"),
                channel("e", "/bkt/e/", access_method="env"),
            ],
        ),
        0,
        CONTAINER,
    )

    assert command == (
        "cd /home/ma-user/x && sh run.sh '--lr=0.1 $x' --flag= "
        "--data_url=/home/ma-user/modelarts/inputs/data_url_0 "
        "--train_url=/home/ma-user/modelarts/outputs/train_url_0"
    )


def preset(engine: str, nodes: int, index: int = 1, context: NodeContext = CONTAINER) -> str:
    """Return the command of a node that runs a preset."""
    return node_plan.command(
        row(
            nodes,
            command="",
            engine={"engine_id": engine},
            code_dir="/bkt/a/proj/",
            boot_file="/bkt/a/proj/sub/t.py",
            parameters=[{"name": "n", "value": "1"}],
        ),
        index,
        context,
    )


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """The code folder of a node; a boot file in a subfolder prints what it was started with."""
    folder = tmp_path / "home/ma-user/modelarts/user-job-dir/proj"
    (folder / "sub").mkdir(parents=True)
    (folder / "beside_sub.py").write_text("")
    (folder / "sub/t.py").write_text(
        "import json, os, sys, beside_sub\n"
        "names = ('SHELL_HOOK', 'PYTHON_HOOK', 'PYTHONPATH')\n"
        "print(json.dumps([sys.argv[1:], os.getcwd(), *map(os.environ.get, names)]))\n"
    )
    return folder


def run_preset(
    code: Path, *, first_version: bool = False, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run a preset on a node that is a process, not a container."""
    context = NodeContext(
        str(code.parents[4]),
        sys.executable,
        (),
        "",
        archive="/a b/entry",
        first_version=first_version,
    )
    job = row(
        1,
        command="",
        engine={"engine_id": PYTORCH},
        code_dir="/bkt/a/proj/",
        boot_file="/bkt/a/proj/sub/t.py",
        parameters=[{"name": "n", "value": "two words"}],
    )
    return subprocess.run(
        ["/bin/sh", "-c", node_plan.start(job, 0, context)],
        env={"PATH": os.environ["PATH"], "PYTHONUNBUFFERED": "1", **environ},
        capture_output=True,
        text=True,
        check=False,
    )


def printed_values(done: subprocess.CompletedProcess[str]) -> list[Any]:
    """Return the values in the last line that the boot file printed."""
    assert done.returncode == 0, done.stderr
    values: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return values


def test_a_preset_runs_the_boot_file_in_the_code_folder(code: Path):
    """A boot file in a subfolder can import from the code folder; the image takes precedence."""
    path = f"/image lib:{code}:/a b/entry/emulated"

    assert printed_values(run_preset(code, PYTHONPATH="/image lib")) == [
        ["--n=two words"],
        str(code),
        None,
        None,
        path,
    ]


def test_a_preset_of_the_first_version_runs_in_its_working_folder_after_its_hooks(code: Path):
    old = code.parents[4] / "home/work"
    old.mkdir()
    (code / "ma-pre-start.sh").write_text("export SHELL_HOOK=$PWD\n")
    done = run_preset(code, first_version=True)

    assert printed_values(done)[:3] == [["--n=two words"], str(old), str(code)]


@pytest.mark.parametrize("prefix", ["", "sub/"])
@pytest.mark.parametrize("end", ["", "exit 0\n"])
def test_hooks_run_before_the_boot_file_and_their_exports_stay(code: Path, prefix: str, end: str):
    """Hooks may be beside the boot file or in the code folder, and may change the shell's state."""
    shell = f"export SHELL_HOOK='a b'\nset -- x\ncd /\necho from the shell\n{end}"
    (code / f"{prefix}ma-pre-start.sh").write_text(shell)
    python = "import os, sys\nos.environ['PYTHON_HOOK'] = os.environ['SHELL_HOOK'] + ' c'\n"
    (code / f"{prefix}ma-pre-start.py").write_text(python + ("sys.exit(0)\n" if end else ""))
    done = run_preset(code)

    assert printed_values(done)[:4] == [["--n=two words"], str(code), "a b", "a b c"]
    assert done.stdout.startswith("from the shell\n")


def test_the_hook_beside_the_boot_file_comes_before_that_of_the_code_folder(code: Path):
    for prefix in ("", "sub/"):
        (code / f"{prefix}ma-pre-start.sh").write_text(f"export SHELL_HOOK=in-{prefix}\n")

    assert printed_values(run_preset(code))[2] == "in-sub/"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ma-pre-start.sh", "exit 5"),
        ("ma-pre-start.sh", "set -e\n(exit 5)\ntrue"),
        ("ma-pre-start.py", "raise SystemExit(5)"),
    ],
)
def test_a_hook_that_fails_ends_the_job_with_its_exit_code(code: Path, name: str, text: str):
    (code / name).write_text(text)
    done = run_preset(code)

    assert (done.returncode, done.stdout) == (5, "")


def test_requirements_are_not_installed_where_they_would_change_this_machine():
    assert "pip install" not in preset(PYTORCH, 1, 0, PROCESS)
    assert 'echo "not installed, as nodes share' in preset(PYTORCH, 1, 0, PROCESS)


def test_pytorch_presets_on_several_nodes_get_one_rank_per_node():
    job = f"modelarts-job-{ID}"
    address = f"t.py --init_method=tcp://{job}-worker-0.{job}:"
    port, _, options = preset(PYTORCH, 2).partition(address)[2].partition(" ")

    assert 1000 <= int(port) <= 9999
    assert options.startswith("--rank=1 --world_size=2 --n=1;")


def test_pytorch_presets_of_different_jobs_use_different_ports():
    """Nodes that run as processes share the ports of this host."""
    engine = {"engine_id": PYTORCH}
    job = row(code_dir="/bkt/c/", boot_file="/bkt/c/t.py", command="", engine=engine)
    texts = [node_plan.command(replace(job, id=name), 0, CONTAINER) for name in ("a", "b")]

    assert len({port for text in texts for port in re.findall(r":(\d{4}) --rank", text)}) == 2


def test_mpi_presets_run_under_the_entry():
    assert "set -- python3 /entry.pyz /home/ma-user" in preset(MPI, 2)


def test_paths_of_the_platform_become_those_of_a_process_without_its_own_files():
    job = row(
        command="cd /home/ma-user/modelarts/x; "
        f"ls /cache/a /cached /x/cache /home/ma-user2 {WORK}/b /data/in/f",
        inputs=[channel("d", "/bkt/in/", local_dir="/data/in")],
        environments={"X": "/home/ma-user/y:/cache"},
    )
    root = PROCESS.root

    assert node_plan.command(job, 0, PROCESS) == (
        f"cd {root}/home/ma-user/modelarts/x; ls {root}/cache/a /cached /x/cache /home/ma-user2 "
        f"{root}{WORK}/b {root}/data/in/f --d={root}/data/in"
    )
    env = node_plan.environment(job, 0, "a", PROCESS, SETTINGS, KEYS)
    assert env["X"] == f"{root}/home/ma-user/y:{root}/cache"
    assert env["HOME"] == f"{root}/home/ma-user"


def test_mounts_contain_every_folder_once():
    job = row(inputs=[channel("d", "/bkt/in/", local_dir="/data/in"), channel("e", "/bkt/e/")])
    job_dir = "/home/ma-user/modelarts/user-job-dir"

    assert node_plan.mounts(job) == {
        "/cache": "/cache",
        "/data/in": "/data/in",
        "/home/ma-user/modelarts": "/home/ma-user/modelarts",
        "/home/work": "/home/work",
        "/home/ma-user/user-job-dir": job_dir,
        f"{WORK}/user-job-dir": job_dir,
        f"{WORK}/modelarts": "/home/ma-user/modelarts",
    }


@given(
    st.lists(st.sampled_from(("..", ".", "", "a", "/", "home", "ma-user", "modelarts")), max_size=9)
)
def test_no_path_of_a_request_leaves_the_node(parts):
    path = "/" + "/".join(parts)
    nodes = Path("/state/nodes")
    place = folder(nodes, 1, path)

    assert f"{place}/".startswith("/state/nodes/1/")
    assert ".." not in place.parts


@pytest.mark.parametrize(
    ("pools", "address"),
    [
        ([{"Subnet": "172.17.0.0/16", "Gateway": "172.17.0.5"}], "172.17.0.5"),
        ([{"Subnet": "172.17.0.0/16"}], "172.17.0.1"),
        ([{}], ""),
        (None, ""),
    ],
)
def test_the_address_of_the_bridge_is_found_even_if_it_is_not_configured(pools, address):
    assert bridge_address({"IPAM": {"Config": pools}}) == address

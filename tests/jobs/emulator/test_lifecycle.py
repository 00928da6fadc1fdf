"""Jobs from creation to completion; their nodes are processes."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from cloudjob.emulator import daemon, models
from cloudjob.emulator.node_plan import HOME
from tests.support import recipe
from tests.support.emulator import Api, await_true, keys, new_name, running

PYTORCH = "pytorch_2.1.0-cuda_12.1-py_3.10.6-ubuntu_22.04-x86_64"
MPI = "mindspore_1.3.0-cuda_10.1-py_3.7-ubuntu_1804-x86_64"
ASCEND = "mindspore_2.2.12-cann_7.0.1-py_3.9-euler_2.10-aarch64"
SCRIPT = b"""\
import os, sys
import moxing
words = dict(word[2:].split("=", 1) for word in sys.argv[1:])
index = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["VC_TASK_INDEX"]
text = open(words["data_url"] + "/in.txt").read()
open(words["train_url"] + "/out-" + index, "w").write(text + words["lr"])
for folder in ("/tmp", "/cache", "/home/ma-user", "/home/work"):
    open(folder + "/copy_sync.lock0", "x").close()
for folder in ("/home/ma-user/modelarts", "/home/ma-user", "/home/work"):
    assert "proj" in os.listdir(folder + "/user-job-dir")
print("done by", index, "of", words.get("world_size"), os.path.basename(os.getcwd()))
"""


def code(s3: Any, name: str, files: dict[str, bytes] | None = None) -> str:
    """Upload code and input data to OBS, and return the URL of the code folder."""
    for path, data in (files or {"train.py": SCRIPT}).items():
        s3.put_object(Bucket="data", Key=f"{name}/proj/{path}", Body=data)
    s3.put_object(Bucket="data", Key=f"{name}/in/in.txt", Body=b"in ")
    return f"/data/{name}/proj/"


def channels(name: str) -> dict[str, Any]:
    """Return one input, one output and one parameter."""
    return {
        "inputs": [{"name": "data_url", "remote": {"obs": {"obs_url": f"obs://data/{name}/in/"}}}],
        "outputs": [{"name": "train_url", "remote": {"obs": {"obs_url": f"/data/{name}/out/"}}}],
        "parameters": [{"name": "lr", "value": "0.1 'x"}],
    }


KINDS = {
    "preset": {"engine": {"engine_id": PYTORCH}, "command": ""},
    "preset with an image": {
        "engine": {"engine_id": PYTORCH, "image_url": "any/image:1"},
        "command": "",
    },
    "mpi preset": {"engine": {"engine_id": MPI}, "command": ""},
    "image with a command": {
        "command": f"cd {HOME}/modelarts/user-job-dir/proj && python train.py"
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_job_runs_on_two_nodes_with_data_in_obs(api: Api, s3: Any, kind: str):
    name = new_name()
    algorithm = {"code_dir": code(s3, name), **channels(name), **KINDS[kind]}
    if not algorithm.get("command"):
        algorithm["boot_file"] = algorithm["code_dir"] + "train.py"
    log_path = {"log_export_path": {"obs_url": f"/data/{name}/log/"}}
    job = api.create("", nodes=2, algorithm=algorithm, spec=log_path)
    details = api.await_phase(job)

    assert details["status"]["phase"] == "Completed", (api.log(job), api.events(job))
    assert keys(s3, f"{name}/out/") == [f"{name}/out/out-0", f"{name}/out/out-1"]
    content = s3.get_object(Bucket="data", Key=f"{name}/out/out-1")["Body"].read()
    assert content == b"in 0.1 'x"
    assert keys(s3, f"{name}/log/") == [
        f"{name}/log/modelarts-job-{job}-worker-{index}.log" for index in (0, 1)
    ]
    stored_log = s3.get_object(Bucket="data", Key=f"{name}/log/modelarts-job-{job}-worker-0.log")
    assert stored_log["Body"].read().decode() == api.log(job)
    assert "done by 0" in api.log(job)
    assert details["status"]["task_statuses"] == [
        {"task": f"worker-{index}", "exit_code": 0, "message": ""} for index in (0, 1)
    ]
    assert details["status"]["start_time"] >= details["metadata"]["create_time"]
    expected = [
        "Training job created.",
        "Training job is running.",
        "[worker-1] training started.",
        "[worker-1] Training finished. Exit code 0.",
        "Training job completed.",
    ]
    events = api.events(job)
    assert [message for message in events if message in expected] == expected


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_recipe_for_the_platform_runs_unchanged_twice_in_a_row(api: Api, s3: Any, nodes: int):
    """A PyTorch preset runs the script once on each node, an Ascend preset once on each device."""
    recipe.run_twice(api, s3, {"PyTorch": PYTORCH, "Ascend": ASCEND}, nodes)


def wheel() -> bytes:
    """Return a wheel that pip can install without a network."""
    info = "cjpackage-1.0.dist-info"
    files = {
        "cjpackage.py": "",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: cjpackage\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    archive_file = io.BytesIO()
    with zipfile.ZipFile(archive_file, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return archive_file.getvalue()


def test_a_preset_installs_the_requirements_of_the_code_for_its_job_only(api: Api, s3: Any):
    name = new_name()
    files = {
        "cjpackage-1.0-py3-none-any.whl": wheel(),
        "requirements.txt": b"--no-index\n./cjpackage-1.0-py3-none-any.whl\n",
        "train.py": b"import cjpackage, os; print('has it', os.system('pip -q uninstall -y pip'))",
    }
    url = code(s3, name, files)
    algorithm = {"engine": {"engine_id": PYTORCH}, "code_dir": url, "boot_file": url + "train.py"}
    job = api.create("", nodes=2, algorithm=algorithm)

    assert api.await_phase(job)["status"]["phase"] == "Completed", api.log(job)
    assert "has it 0" in api.log(job)
    assert importlib.util.find_spec("cjpackage") is None
    assert importlib.util.find_spec("pip") is not None


def test_nodes_resolve_each_other_by_both_documented_names(api: Api):
    job = api.create(
        "getent hosts ${VC_WORKER_HOSTS##*,} && "
        "getent hosts $MA_VJ_NAME-$MA_TASK_NAME-1.$MA_VJ_NAME && hostname",
        nodes=2,
    )
    api.await_phase(job)
    log = api.log(job)

    assert log.count("127.0.0.2") == 2, log
    assert f"modelarts-job-{job}-worker-0\n" in log


def test_a_failed_node_ends_the_others_and_gives_its_exit_code(api: Api):
    job = api.create("sleep $(( VC_TASK_INDEX == 1 ? 0 : 600 )); exit 7", nodes=2)
    details = api.await_phase(job)

    assert details["status"]["phase"] == "Failed"
    codes = [item["exit_code"] for item in details["status"]["task_statuses"]]
    assert codes[1] == 7
    assert codes[0] != 0
    assert details["status"]["running_records"][0]["end_related_task"] == "worker-1"


def test_a_node_that_ends_early_does_not_end_the_others(api: Api, s3: Any):
    job = api.create("sleep $((VC_TASK_INDEX * 3)); echo ready $VC_TASK_INDEX", nodes=3)

    assert api.await_phase(job)["status"]["phase"] == "Completed"
    assert "ready 2" in api.log(job, 2)


def test_terminate_sends_sigterm_first(api: Api):
    job = api.create("trap 'echo asked; exit 3' TERM; echo up; while :; do sleep 0.1; done")
    api.await_log(job, "up")
    path = f"{{p}}/training-jobs/{job}/actions"
    status, values, _ = api.ask("POST", path, {"action_type": "terminate"})

    assert (status, values["status"]["phase"]) == (202, "Terminating")
    assert api.await_phase(job)["status"]["phase"] == "Terminated"
    assert "asked" in api.log(job)
    status, values, _ = api.ask("POST", path, {"action_type": "terminate"})
    assert (status, values["error_code"]) == (409, "ModelArts.2796")


def test_a_job_terminated_at_any_moment_of_its_start_is_terminated(api: Api):
    jobs = []
    for number in range(8):
        jobs.append(api.create("sleep 60", nodes=2))
        # The delays range from before the code is in place to the start of the nodes.
        time.sleep(number * 0.03)
        api.ask("POST", f"{{p}}/training-jobs/{jobs[-1]}/actions", {"action_type": "terminate"})

    phases = [api.await_phase(job)["status"]["phase"] for job in jobs]

    assert phases == ["Terminated"] * 8, [api.events(job) for job in jobs]


def test_terminate_kills_after_the_grace_period(api: Api):
    job = api.create("trap '' TERM; echo up; while :; do sleep 0.1; done")
    api.await_log(job, "up")
    api.ask("POST", f"{{p}}/training-jobs/{job}/actions", {"action_type": "terminate"})
    details = api.await_phase(job)

    assert details["status"]["phase"] == "Terminated"
    assert details["status"]["task_statuses"][0]["exit_code"] == 137


def test_outputs_are_uploaded_while_the_job_runs_and_again_when_they_change(api: Api, s3: Any):
    name = new_name()
    job = api.create(
        "T=$1; echo 1 > ${train}/a; while [ ! -e ${train}/../stop ]; do sleep 0.1; done; #",
        algorithm={
            "outputs": [
                {
                    "name": "train",
                    "access_method": "env",
                    "remote": {"obs": {"obs_url": f"/data/{name}/"}},
                }
            ]
        },
    )
    await_true(lambda: keys(s3, name + "/"), lambda: api.log(job))
    folder = Path(api.home, "emulator/jobs", job, "nodes/0/home/ma-user/modelarts/outputs")
    (folder / "train_0/a").write_text("22")
    await_true(
        lambda: s3.get_object(Bucket="data", Key=f"{name}/a")["Body"].read() == b"22",
        lambda: api.events(job),
    )
    assert api.show(job)["status"]["phase"] == "Running"
    (folder / "stop").touch()
    assert api.await_phase(job)["status"]["phase"] == "Completed"


def test_auto_stop_terminates_a_job_after_its_hours(api: Api):
    stop = {"auto_stop": {"time_unit": "HOURS", "duration": 1}}
    job = api.create("sleep 100", spec=stop)
    details = api.await_phase(job)

    assert details["status"]["phase"] == "Terminated"
    assert 2000 <= details["status"]["duration"] < 40_000


def test_the_preview_has_the_end_of_a_log_and_the_url_all_of_it(api: Api):
    import urllib.request

    job = api.create(
        "i=0; while [ $i -lt 4000 ]; do echo line $i $(printf %040d 0); i=$((i+1)); done"
    )
    path = f"{{p}}/training-jobs/{job}/tasks/worker-0/logs"
    api.await_phase(job)
    preview = api.ok("GET", path + "/preview")
    url = api.ok("GET", path + "/url?Content-Type=text/plain")["obs_url"]
    with urllib.request.urlopen(url) as answer:
        full_log = answer.read()

    assert preview["current_size"] == 100_000 == len(preview["content"].encode())
    assert preview["full_size"] == len(full_log) > 150_000
    assert full_log.decode().endswith(preview["content"])
    assert b"line 0 " in full_log
    lines = api.ok("GET", f"{{p}}/training-jobs/{job}/logs/worker-0?lines=3&order=desc")
    assert lines["lines"] == 3
    assert preview["content"].endswith(lines["content"])


def test_logs_and_metrics_of_a_waiting_job_are_answered_with_204(api: Api):
    api.fault("hang-pending")
    job = api.create("true")
    for path in ("tasks/worker-0/logs/preview", "tasks/worker-0/logs/url", "metrics/worker-0"):
        status, values, _ = api.ask("GET", f"{{p}}/training-jobs/{job}/{path}")
        assert (status, values) == (204, None)


def test_a_job_has_metrics_stages_and_tasks(api: Api):
    job = api.create("python3 -c 'while True: pass'", nodes=2)
    await_true(lambda: api.ask("GET", f"{{p}}/training-jobs/{job}/metrics/worker-1")[0] == 200)
    time.sleep(1)
    metrics = {
        item["metric"]: item["value"]
        for item in api.ok("GET", f"{{p}}/training-jobs/{job}/metrics/worker-1")["metrics"]
    }
    stages = api.ok("GET", f"{{p}}/training-jobs/{job}/stages")
    tasks = api.ok("GET", f"{{p}}/training-jobs/{job}/tasks")
    api.ok("DELETE", f"{{p}}/training-jobs/{job}")

    assert max(metrics["cpuUsage"]) > 0
    assert max(metrics["memUsage"]) > 0
    assert set(metrics["gpuUtil"]) == {-1.0}
    assert [item["name"] for item in stages["running_records"][0]["stages"]] == [
        "Queuing",
        "Running",
    ]
    assert [(item["task"], item["ip"]) for item in tasks] == [
        ("worker-0", "127.0.0.1"),
        ("worker-1", "127.0.0.2"),
    ]


def test_delete_leaves_no_process_folder_or_row(api: Api):
    marker = new_name()
    job = api.create(f"exec -a {marker} sleep 500 || exec sleep 500")
    api.await_phase(job, "Running")
    folder = Path(api.home, "emulator/jobs", job)
    assert api.ask("DELETE", f"{{p}}/training-jobs/{job}")[0] == 202
    await_true(lambda: api.ask("GET", f"{{p}}/training-jobs/{job}")[0] == 400)
    status, values, _ = api.ask("GET", f"{{p}}/training-jobs/{job}")

    assert (status, values["error_code"]) == (400, "ModelArts.2775")
    assert values["error_msg"] == f"Training job (ID: {job}) not found."
    await_true(lambda: not folder.exists())
    assert not _processes_below(str(folder))


def _processes_below(text: str) -> list[str]:
    pids = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if text.encode() in path.read_bytes():
                pids.append(path.parent.name)
    return pids


# -- fault tolerance ------------------------------------------------------------------------------


def test_fault_tolerance_alone_does_not_retry_a_failed_script(api: Api):
    job = api.create("exit 5", annotations={models.RETRY_NUM: "2"})
    details = api.await_phase(job)

    assert details["status"]["phase"] == "Failed"
    assert len(details["status"]["running_records"]) == 1


def test_an_unconditional_retry_runs_in_the_same_folders(api: Api):
    notes = {models.RETRY_NUM: "2", models.RETRY_ALWAYS: "true"}
    job = api.create(
        "echo x >> $HOME/n; wc -l < $HOME/n; [ $(wc -l < $HOME/n) = 3 ]", annotations=notes
    )
    details = api.await_phase(job)
    records = details["status"]["running_records"]

    assert details["status"]["phase"] == "Completed", api.log(job)
    assert [item.get("end_recover") for item in records] == ["proc_restart", "proc_restart", None]
    failing = api.create("exit 4", annotations=notes)
    details = api.await_phase(failing)
    assert details["status"]["phase"] == "Failed"
    assert len(details["status"]["running_records"]) == 3


def test_hang_detection_restarts_a_job_in_place(api: Api):
    notes = {models.RETRY_NUM: "1", models.RETRY_HANG: "true"}
    job = api.create(
        "echo up; [ -e $HOME/mark ] && exit 0; touch $HOME/mark; sleep 300",
        nodes=2,
        annotations=notes,
    )
    details = api.await_phase(job)
    records = details["status"]["running_records"]

    assert details["status"]["phase"] == "Completed", api.events(job)
    assert (records[0]["end_recover"], records[0]["end_reason"]) == ("proc_restart", "the job hung")
    assert "Training job hangs: no node computes or writes." in api.events(job)


def test_a_job_that_loses_a_node_is_rescheduled_on_clean_nodes(api: Api, tmp_path: Path):
    notes = {models.RETRY_NUM: "1"}
    job = api.create(
        "ls $HOME/mark; touch $HOME/mark; echo up; "
        f"[ -e {tmp_path}/$VC_TASK_INDEX ] && exit 0; touch {tmp_path}/$VC_TASK_INDEX; sleep 100",
        nodes=2,
        annotations=notes,
    )
    for index in (0, 1):
        await_true((tmp_path / str(index)).exists)
    api.fault("lose-node", job=job, node=1)
    details = api.await_phase(job)
    records = details["status"]["running_records"]

    assert details["status"]["phase"] == "Completed", (api.log(job, 1), api.events(job))
    assert records[0]["end_recover"] == "pod_reschedule"
    assert records[0]["end_related_task"] == "worker-1"
    assert api.log(job, 1).count("No such file") == 2
    assert [
        item["schedule_count"] for item in api.ok("GET", f"{{p}}/training-jobs/{job}/tasks")
    ] == [
        1,
        1,
        2,
        2,
    ]


def test_a_job_without_fault_tolerance_fails_when_it_loses_a_node(api: Api):
    job = api.create("echo up; sleep 60", nodes=2)
    api.await_log(job, "up", 1)
    api.fault("lose-node", job=job, node=1)
    details = api.await_phase(job)

    assert details["status"]["phase"] == "Failed"
    assert details["status"]["task_statuses"][1] == {
        "task": "worker-1",
        "exit_code": 137,
        "message": "the node was lost",
    }


def test_the_node_check_replaces_a_bad_node(api: Api):
    api.fault("bad-node", count=1, node=1)
    job = api.create("true", nodes=2, annotations={models.RETRY_NUM: "1"})

    assert api.await_phase(job)["status"]["phase"] == "Completed"
    assert any("Node check failed" in event for event in api.events(job))


# -- capacity -------------------------------------------------------------------------------------


def test_jobs_wait_for_capacity_in_their_pool_by_priority(api: Api):
    pool = {"resource": {"pool_id": "pool-a", "node_count": 3}}
    first = api.create("sleep 8", spec=pool)
    api.await_phase(first, "Running")
    low = api.create("true", spec={**pool, "schedule_policy": {"priority": 1}})
    high = api.create("true", spec={**pool, "schedule_policy": {"priority": 3}})
    assert api.show(low)["status"]["phase"] in ("Creating", "Pending")
    starts = [api.await_phase(job)["status"]["start_time"] for job in (first, high, low)]

    assert starts == sorted(starts)
    assert starts[1] - starts[0] >= 8000


def test_more_jobs_than_the_quota_are_refused():
    with running("engine: process\nmax_jobs: 1\n") as api:
        api.create("sleep 30")
        status, values, _ = api.ask("POST", "{p}/training-jobs", api.body("true"))

    assert (status, values["error_code"]) == (400, "ModelArts.0118")


def test_an_output_or_a_name_that_another_job_uses_is_refused(api: Api, s3: Any):
    name = new_name()
    output = {"outputs": [{"name": "o", "remote": {"obs": {"obs_url": f"obs://data/{name}"}}}]}
    api.fault("hang-pending")
    body = api.body("true", algorithm=output)
    first = api.ok("POST", "{p}/training-jobs", body)["metadata"]["id"]
    output["outputs"][0]["remote"]["obs"]["obs_url"] = f"/data/{name}/"
    status, values, _ = api.ask("POST", "{p}/training-jobs", api.body("true", algorithm=output))
    assert (status, values["error_code"]) == (400, "ModelArts.2753")
    status, values, _ = api.ask("POST", "{p}/training-jobs", body)
    assert (status, values["error_code"]) == (400, "ModelArts.2751")
    daemon.clear_faults(api.home)
    api.await_phase(first)
    assert api.create("true", algorithm=output)


# -- code -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({f"f{i}.py": b"" for i in range(31)}, "2759"),
        ({"a/b/c/d/e/f.py": b""}, "2760"),
        ({"big.bin": b"x" * 2_000_001}, "2761"),
        ({"other.py": b""}, "2758"),
    ],
    ids=["files", "depth", "size", "boot file"],
)
def test_code_above_a_limit_is_refused_at_creation(
    api: Api, s3: Any, files: dict[str, bytes], expected: str
):
    folder = code(s3, new_name(), files)
    algorithm = {"code_dir": folder, "boot_file": folder + "train.py", **KINDS["preset"]}
    status, values, _ = api.ask("POST", "{p}/training-jobs", api.body("", algorithm=algorithm))

    assert (status, values["error_code"]) == (400, f"ModelArts.{expected}")


def test_a_code_folder_without_objects_is_refused(api: Api, s3: Any):
    for folder in ("/data/nothing/", "/nobody-has-it/x/"):
        algorithm = {"code_dir": folder, "boot_file": folder + "t.py", **KINDS["preset"]}
        status, values, _ = api.ask("POST", "{p}/training-jobs", api.body("", algorithm=algorithm))
        assert (status, values["error_code"]) == (400, "ModelArts.2757")


def test_an_output_in_an_unknown_bucket_is_refused(api: Api, s3: Any):
    output = {"outputs": [{"name": "o", "remote": {"obs": {"obs_url": "/nobody-has-it/x/"}}}]}
    status, values, _ = api.ask("POST", "{p}/training-jobs", api.body("true", algorithm=output))

    assert (status, values["error_code"]) == (400, "ModelArts.2791")


def test_symbolic_links_in_outputs_are_not_uploaded(api: Api, s3: Any, tmp_path: Path):
    (tmp_path / "secret").write_text("secret")
    name = new_name()
    outputs = [
        {
            "name": output,
            "remote": {"obs": {"obs_url": f"/data/{name}/{output}/"}},
            "local_dir": f"{HOME}/kept/{output}",
        }
        for output in ("plain", "linked")
    ]
    job = api.create(
        f"cd {HOME}/kept; echo kept > plain/file; mkfifo plain/fifo; ln -s {tmp_path} plain/folder;"
        f" ln -s {tmp_path}/secret plain/link; rmdir linked; ln -s {tmp_path} linked #",
        algorithm={"outputs": outputs},
    )
    details = api.await_phase(job)

    assert details["status"]["phase"] == "Completed", (api.log(job), api.events(job))
    assert keys(s3, f"{name}/") == [f"{name}/plain/file"]


def test_an_ended_job_leaves_no_zombie_process(api: Api):
    for _ in range(2):
        api.await_phase(api.create("true"))

    def zombies() -> list[str]:
        pid = api.address.pid
        children = Path(f"/proc/{pid}/task").glob("*/children")
        descendants = [child for path in children for child in path.read_text().split()]
        states = {
            child: Path(f"/proc/{child}/stat").read_text().split()[2] for child in descendants
        }
        return [child for child, state in states.items() if state == "Z"]

    await_true(lambda: not zombies(), zombies)

"""The emulator with containers as nodes: the vendor's documented flows for custom images."""

from __future__ import annotations

import io
import os
import re
import shlex
import signal
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cloudjob.backends.docker.engine import connect
from cloudjob.emulator import daemon, docker_nodes, models, server, state
from cloudjob.emulator.node_plan import HOME
from cloudjob.emulator.settings import Settings
from tests.support import recipe
from tests.support.emulator import Api, await_true, bucket_of, keys, new_name, running

pytestmark = [pytest.mark.docker, pytest.mark.e2e]

SETTINGS = """\
engine: docker
image: {image}
poll_s: 0.05
upload_period_s: 1
metric_period_s: 1
grace_s: 5
engines:
  - {{name: MPI, version: mindspore_1.3.0-cuda_10.1-py_3.7-ubuntu_1804-x86_64, image: {image}}}
  - {{name: PyTorch, version: pytorch_2.1.0-cuda_12.1-py_3.10.6, image: {image}}}
  - {{name: Ascend-Powered-Engine, version: mindspore_2.2.12-cann_7.0.1, image: {image}}}
"""
PYTORCH, ASCEND = "pytorch_2.1.0-cuda_12.1-py_3.10.6", "mindspore_2.2.12-cann_7.0.1"
# The documented way to start on several nodes: the first one listens, the others connect to it.
CONNECT = b"""\
import os, socket, sys, time
head = os.environ["VC_WORKER_HOSTS"].split(",")[0]
index, count = int(os.environ["VC_TASK_INDEX"]), int(os.environ["MA_NUM_HOSTS"])
arguments = dict(text[2:].split("=", 1) for text in sys.argv[1:])
text = open(os.path.join(arguments["data_url"], "in.txt")).read()
if index == 0:
    server = socket.create_server(("", 6000))
    met = [server.accept()[1][0] for _ in range(count - 1)]
    print("met", len(met), flush=True)
else:
    for _ in range(600):
        try:
            socket.create_connection((head, 6000), 5)
            break
        except OSError:
            time.sleep(0.1)
    else:
        sys.exit("nobody there")
open(os.path.join(arguments["train_url"], "out-%d" % index), "w").write(text)
for folder in ("/tmp", "/cache", "/home/ma-user", "/home/work"):
    open(folder + "/copy_sync.lock0", "x").close()
for folder in ("/home/ma-user/modelarts", "/home/ma-user", "/home/work"):
    assert "proj" in os.listdir(folder + "/user-job-dir")
print("who", os.getuid(), os.getgid(), os.getcwd(), os.environ["HOME"])
"""
RANKS = b"""\
import os, sys
rank, size = os.environ["OMPI_COMM_WORLD_RANK"], os.environ["OMPI_COMM_WORLD_SIZE"]
node = os.environ["VC_TASK_INDEX"]
print("rank", rank, "of", size, "on node", node, "in", os.getcwd(), sys.argv[1:])
"""
GUIDE = (Path(__file__).parents[2] / "docs/guides/own-image.md").read_text()
# Turns our base image into one as the platform documents it, with SSH keys and without our entry.
DOCUMENTED_IMAGE = (
    "rm -r /opt/cloudjob",
    "mkdir -m 700 /home/ma-user/.ssh",
    "cd /home/ma-user/.ssh",
    "ssh-keygen -q -t rsa -N '' -f id_rsa",
    "cp id_rsa.pub authorized_keys",
    "chown -R 1000:100 .",
)
RUN = b'cd $(dirname $0)\nexec python3 meet.py "$@"\n'


@pytest.fixture(scope="module")
def api(base_image: str) -> Iterator[Api]:
    """An emulator whose nodes are containers."""
    with running(SETTINGS.format(image=base_image)) as emulator:
        assert emulator.address.engine == "docker"
        emulator.image = base_image
        yield emulator


ASK = """\
import json, os, time, urllib.error, urllib.request
for name in ("MA_APIGW_ENDPOINT", "S3_ENDPOINT"):
    try:
        urllib.request.urlopen(os.environ[name] + "/v3/projects", timeout=20)
    except urllib.error.HTTPError as error:
        print(name, error.code, flush=True)
path = os.environ["RANK_TABLE_FILE"] + "/jobstart_hccl.json"
for _ in range(600):
    table = json.load(open(path))
    if table["status"] == "completed":
        break
    time.sleep(0.1)
node = table["group_list"][0]["instance_list"][int(os.environ["VC_TASK_INDEX"])]
print("address", os.environ["MA_CURRENT_IP"], node["server_id"], node["pod_name"])
try:
    open(path, "a")
except OSError as error:
    print("table", error.strerror)
"""


def test_a_node_reaches_every_endpoint_and_has_the_address_that_the_service_shows(api: Api):
    command = f"python3 -c {shlex.quote(ASK)}"
    flavor = {"flavor_id": "modelarts.kat1.xlarge", "node_count": 2}
    job = api.create(command, spec={"resource": flavor})
    details = api.await_phase(job)
    tasks = api.ok("GET", f"{{p}}/training-jobs/{job}/tasks")
    addresses = [item["ip"] for item in tasks]

    assert details["status"]["phase"] == "Completed", api.log(job)
    assert [item["ip"] for item in details["status"]["task_ips"]] == addresses
    for node, address in enumerate(addresses):
        log = api.log(job, node)
        assert f"address {address} {address} modelarts-job-{job}-worker-{node}" in log, log
        assert "MA_APIGW_ENDPOINT 401" in log
        assert "S3_ENDPOINT 403" in log
        assert "table " in log, "a job may not change it"
    for hosts, expected in ((addresses[1:], [job]), (["192.0.2.1"], [])):
        listed = api.ok("POST", "{p}/training-job-searches", {"host_ips": hosts})["items"]
        assert [item["metadata"]["id"] for item in listed] == expected


def test_the_base_image_has_the_tools_of_public_scripts(api: Api):
    tools = "unzip wget curl git ip ifconfig netstat"
    command = f"for tool in {tools}; do command -v $tool || exit 9; done"
    job = api.create(command)

    assert api.await_phase(job)["status"]["phase"] == "Completed", api.log(job)


def test_an_image_that_presets_lack_is_reported():
    kind, _, note = server.kind_of(Settings(engine="docker", image="cloudjob/none:1"))

    assert kind == "docker"
    assert "does not have the image cloudjob/none:1" in note
    assert server.kind_of(Settings(image="cloudjob/none:1"))[0] == "process"


def test_an_engine_without_a_bridge_gets_a_network_whose_address_is_this_machine():
    client = connect()
    name = f"cloudjob-{new_name()}"
    try:
        for _ in range(2):
            address = docker_nodes.bridge_address(docker_nodes.inspected(client, name))
        server.bridge_socket(address, 0).close()
    finally:
        client.remove_network(name)


@pytest.fixture(scope="module")
def s3(api: Api) -> Any:
    """An S3 client of the emulator's OBS."""
    client = bucket_of(api)
    client.put_object(Bucket="data", Key="code/proj/meet.py", Body=CONNECT)
    client.put_object(Bucket="data", Key="code/proj/run.sh", Body=RUN)
    client.put_object(Bucket="data", Key="in/in.txt", Body=b"text")
    return client


def channels(name: str) -> dict[str, Any]:
    """Return the code folder, an input and an output of an algorithm."""
    return {
        "code_dir": "/data/code/proj/",
        "inputs": [{"name": "data_url", "remote": {"obs": {"obs_url": "obs://data/in/"}}}],
        "outputs": [{"name": "train_url", "remote": {"obs": {"obs_url": f"/data/{name}/"}}}],
    }


def containers(job: str) -> list[str]:
    """Return the ids of a job's containers that still exist in the engine."""
    command = ["docker", "ps", "-aq", "--filter", f"name=modelarts-job-{job}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def test_a_custom_image_runs_in_two_containers(api: Api, s3: Any, base_image: str):
    """As in the vendor's guide: an image, `bash run.sh` as the command, an input and an output."""
    name = new_name()
    job = api.create(
        "bash /home/ma-user/modelarts/user-job-dir/proj/run.sh",
        nodes=2,
        algorithm={**channels(name), "engine": {"image_url": base_image}},
    )
    details = api.await_phase(job)

    assert details["status"]["phase"] == "Completed", (api.log(job), api.log(job, 1))
    assert keys(s3, name + "/") == [f"{name}/out-0", f"{name}/out-1"]
    assert "met 1\n" in api.log(job)
    assert "who 1000 100 /home/ma-user/modelarts/user-job-dir/proj /home/ma-user" in api.log(job, 1)
    assert containers(job) == []


@pytest.mark.parametrize(
    "preset",
    ["pytorch_2.1.0-cuda_12.1-py_3.10.6", "mindspore_1.3.0-cuda_10.1-py_3.7-ubuntu_1804-x86_64"],
)
@pytest.mark.parametrize("has_image", [False, True])
def test_a_preset_image_runs_in_two_containers(
    api: Api, s3: Any, base_image: str, preset: str, has_image: bool
):
    name = new_name()
    s3.put_object(
        Bucket="data",
        Key=f"code/{name}/t.py",
        Body=b"import os, sys, socket\n"
        b"import moxing as mox\n"
        b"assert mox.file.read('obs://data/in/in.txt') == 'text'\n"
        b"print('rank', os.environ.get('OMPI_COMM_WORLD_RANK', sys.argv[2]), socket.gethostname())",
    )
    requested = {"engine_id": preset, **({"image_url": base_image} if has_image else {})}
    algorithm = {
        **channels(name),
        "engine": requested,
        "command": "",
        "code_dir": f"/data/code/{name}/",
        "boot_file": f"/data/code/{name}/t.py",
    }
    job = api.create("", nodes=2, algorithm=algorithm)
    details = api.await_phase(job)
    log = api.log(job) + api.log(job, 1)

    assert details["status"]["phase"] == "Completed", log
    for index in (0, 1):
        assert f"modelarts-job-{job}-worker-{index}\n" in log


def test_the_entry_replaces_the_start_script_of_an_own_image(
    api: Api, s3: Any, derive: Any, base_image: str
):
    """Use the Dockerfile and the boot command of our guide in an image with its own SSH keys."""
    dockerfile = GUIDE.split("```dockerfile\n")[1].split("```")[0]
    start = GUIDE.split("```sh\n")[1].split("```")[0].strip()
    added = dockerfile.partition("\n")[2].replace("cloudjob/base", base_image)
    image = derive("own", "RUN " + " && ".join(DOCUMENTED_IMAGE) + "\nENTRYPOINT []\n" + added)
    name = new_name()
    s3.put_object(Bucket="data", Key=f"{name}/code/train.py", Body=RANKS)
    job = api.create(
        f"{start.replace('boot.sh', 'boot.sh --dry-run')} && {start}",
        nodes=2,
        algorithm={
            "engine": {"image_url": image},
            "code_dir": f"/data/{name}/code/",
            "parameters": [{"name": "lr", "value": "0.1"}],
        },
    )
    details = api.await_phase(job)
    logs = api.log(job), api.log(job, 1)

    assert details["status"]["phase"] == "Completed", logs
    for rank, log in enumerate(logs):
        assert f"[{rank}] rank {rank} of 2 on node {rank} in /home/ma-user ['--lr=0.1']" in log
        assert "the nodes use the key /home/ma-user/.ssh/id_rsa" in log


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_recipe_for_the_platform_runs_unchanged_twice_in_a_row(api: Api, s3: Any, nodes: int):
    """The PyTorch preset starts it once per node, the Ascend preset once per device."""
    recipe.run_twice(api, s3, {"PyTorch": PYTORCH, "Ascend": ASCEND}, nodes)


def test_a_job_with_a_missing_image_fails_with_an_event(api: Api):
    job = api.create("true", algorithm={"engine": {"image_url": "nobody/has:it"}})

    assert api.await_phase(job)["status"]["phase"] == "Failed"
    assert any("Failed to pull image" in event for event in api.events(job))


def test_the_emulator_runs_any_image(api: Api):
    image = {"engine": {"image_url": "debian:bookworm-slim"}}
    job = api.create("cat /etc/volcano/worker.host; id -u", nodes=2, algorithm=image)

    assert api.await_phase(job)["status"]["phase"] == "Completed", api.log(job)
    assert "1000\n" in api.log(job)
    assert f"modelarts-job-{job}-worker-1.modelarts-job-{job}\n" in api.log(job)


def test_a_container_cannot_have_host_folders_uploaded(
    api: Api, s3: Any, base_image: str, tmp_path: Path
):
    """The emulator can read more files than the container and may run as root."""
    (tmp_path / "secret").write_text("secret")
    name = new_name()
    outputs = f"{HOME}/modelarts/outputs"
    job = api.create(
        f"cd {outputs} && echo kept > train_url_0/file && ln -s {tmp_path} train_url_0/folder"
        f" && rmdir train_url_1 && ln -s {tmp_path} train_url_1 #",
        algorithm={
            "engine": {"image_url": base_image},
            "outputs": [
                {"name": "train_url", "remote": {"obs": {"obs_url": f"/data/{name}/0/"}}},
                {
                    "name": "linked",
                    "local_dir": f"{outputs}/train_url_1",
                    "remote": {"obs": {"obs_url": f"/data/{name}/1/"}},
                },
            ],
        },
    )
    details = api.await_phase(job)

    assert details["status"]["phase"] == "Completed", (api.log(job), api.events(job))
    assert keys(s3, f"{name}/") == [f"{name}/0/file"]


def test_a_saved_image_has_the_files_of_the_job_and_none_of_its_secrets(
    api: Api, s3: Any, base_image: str
):
    """The job runs on two MPI nodes, whose containers also have an SSH key."""
    name = new_name()
    code = (
        b"import os, time, pathlib; pathlib.Path('/home/ma-user/installed').write_text('kept')\n"
        b"for name in 'ACCESS_KEY_ID', 'SECRET_ACCESS_KEY', 'SECURITY_TOKEN':\n"
        b"    print('hex', os.environ[name].encode().hex(), flush=True)\n"
        b"print('written', flush=True); time.sleep(600)\n"
    )
    s3.put_object(Bucket="data", Key=f"code/{name}/t.py", Body=code)
    algorithm = {
        "engine": {"engine_id": "mindspore_1.3.0-cuda_10.1-py_3.7-ubuntu_1804-x86_64"},
        "command": "",
        "code_dir": f"/data/code/{name}/",
        "boot_file": f"/data/code/{name}/t.py",
    }
    job = api.create("", nodes=2, algorithm=algorithm)
    await_true(lambda: (api.log(job) + api.log(job, 1)).count("written") == 2)
    path = f"{{p}}/training-jobs/{job}/tasks/worker-1/save-image-job"
    description = {"namespace": "cloudjob-test", "name": name, "tag": "1", "description": "d"}
    client, image = connect(), f"cloudjob-test/{name}:1"
    try:
        assert api.ask("GET", path)[1]["error_code"] == "ModelArts.2858"
        assert api.ok("POST", path, description)["status"] == "CREATING"
        await_true(lambda: api.ok("GET", path)["status"] != "CREATING")
        registered = api.ok("GET", path)
        assert registered == {**registered, **description, "status": "ACTIVE", "message": ""}
        assert "exists" in api.ask("POST", path, description)[1]["error_msg"]

        saved_config, base = (client.inspect_image(each)["Config"] for each in (image, base_image))
        for key in ("Env", "Cmd", "Entrypoint", "User", "WorkingDir"):
            assert (saved_config.get(key) or None) == (base.get(key) or None), key
        secrets = {
            bytes.fromhex(each) for each in re.findall(r"hex (\S+)", api.log(job) + api.log(job, 1))
        }
        assert len(secrets) == 3
        registered = client.create_container(image, command=["true"])["Id"]
        try:
            data = b"".join(client.export(registered))
        finally:
            client.remove_container(registered)
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            files = {each.name: tar.extractfile(each).read() for each in tar if each.isreg()}
        assert [name for name, text in files.items() if any(each in text for each in secrets)] == []
        assert "run/cloudjob/ssh-key" not in files
        again = api.create(
            "cat /home/ma-user/installed", algorithm={"engine": {"image_url": image}}
        )
        assert api.await_phase(again)["status"]["phase"] == "Completed", api.log(again)
        assert "kept" in api.log(again)
    finally:
        api.ask("DELETE", f"{{p}}/training-jobs/{job}")
        client.remove_image(image, force=True)


def test_a_lost_container_is_replaced(api: Api, base_image: str):
    """Fault tolerance is on; no container of the first attempt remains in the engine."""
    job = api.create(
        "echo up; sleep 15",
        nodes=2,
        annotations={models.RETRY_NUM: "1"},
        algorithm={"engine": {"image_url": base_image}},
    )
    api.await_log(job, "up", 1)
    api.fault("lose-node", job=job, node=1)
    details = api.await_phase(job)

    assert details["status"]["phase"] == "Completed", api.events(job)
    assert details["status"]["running_records"][0]["end_recover"] == "pod_reschedule"
    assert containers(job) == []


def test_a_container_reaches_obs_and_gets_sigterm_on_terminate(api: Api, base_image: str):
    """A container reaches OBS at the same address as the laptop; SIGTERM reaches the command.

    A shell above the command would keep the signal, as the first process of a container.
    """
    job = api.create(
        'python3 -c "import urllib.request as u, urllib.error, os, signal, sys\n'
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit('asked'))\n"
        "try: u.urlopen(os.environ['S3_ENDPOINT'] + '/data')\n"
        "except urllib.error.HTTPError as e: print('status', e.code, flush=True)\n"
        'while True: signal.pause()"',
        algorithm={"engine": {"image_url": base_image}},
    )
    api.await_log(job, "status 403")
    api.ok("POST", f"{{p}}/training-jobs/{job}/actions", {"action_type": "terminate"})

    assert api.await_phase(job)["status"]["phase"] == "Terminated"
    assert "asked" in api.log(job)
    assert containers(job) == []


def test_a_failed_job_is_restarted_in_the_same_containers(api: Api, base_image: str):
    job = api.create(
        "echo x >> /tmp/n; echo line $(wc -l < /tmp/n); [ $(wc -l < /tmp/n) = 2 ]",
        annotations={models.RETRY_NUM: "1", models.RETRY_ALWAYS: "true"},
        algorithm={"engine": {"image_url": base_image}},
    )
    details = api.await_phase(job)
    lines = [line for line in api.log(job).splitlines() if line.startswith(("line", "[Model"))]

    assert details["status"]["phase"] == "Completed", api.log(job)
    assert details["status"]["running_records"][0]["end_recover"] == "proc_restart"
    assert [line for line in lines if line.startswith("line")] == ["line 1", "line 2"]
    # Both attempts append to the same log.
    assert "return code: 1" in lines[1]
    assert "return code: 0" in lines[3]
    assert containers(job) == []


def test_containers_and_logs_survive_a_kill_of_the_emulator(base_image: str):
    """The containers keep running, and the next emulator continues their logs without a gap."""
    with running(SETTINGS.format(image=base_image)) as api:
        job = api.create(
            "n=0; while [ $n -lt 120 ]; do n=$((n+1)); echo tick $n; sleep 0.1; done",
            nodes=2,
            algorithm={"engine": {"image_url": base_image}},
        )
        api.await_log(job, "tick 5", 1)
        os.kill(api.address.pid, signal.SIGKILL)
        await_true(lambda: not state.is_running(daemon.folder(api.home)))
        again = Api(daemon.up(api.home), api.home)
        details = again.await_phase(job)
        ticks = [line for line in again.log(job, 1).splitlines() if line.startswith("tick")]

        assert details["status"]["phase"] == "Completed", again.events(job)
        assert ticks == [f"tick {number}" for number in range(1, 121)]

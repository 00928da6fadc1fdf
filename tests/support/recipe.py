"""A script that uses ModelArts in the ways that public recipes do; the emulator runs it unchanged.

It copies data and results with MoXing, and uses folders and lock files of the node. The boot file
is in a subfolder, gets variables from a hook, rejects unknown arguments, and starts another Python.
"""

from __future__ import annotations

from typing import Any

from tests.support.emulator import LIMIT_S, Api, keys, new_name

_TRAIN = b"""\
import argparse, json, os, socket, subprocess, sys
import moxing as mox
import helpers
from moxing.framework.file import file_io

parser = argparse.ArgumentParser()
for name in ("data_url", "train_url", "init_method", "rank", "world_size"):
    parser.add_argument("--" + name)
known = parser.parse_args()  # an unknown argument is fatal
task, count = os.environ["VC_TASK_INDEX"], os.environ["MA_NUM_HOSTS"]
head = os.environ["VC_WORKER_HOSTS"].split(",")[0].split(":")[0]
job = os.environ["MA_VJ_NAME"]
own = "%s-%s-%s.%s" % (job, os.environ["MA_TASK_NAME"], task, job)
assert socket.gethostbyname(own) == os.environ["MA_CURRENT_IP"]
socket.gethostbyname(head)
assert os.environ["FROM_HOOK"] == "set"
assert os.environ["HOSTNAME"].endswith("-worker-" + task)
if known.init_method:
    assert known.init_method[6:-5] == head  # cut by position
    assert int(known.init_method[-4:])
    assert (known.rank, known.world_size) == (task, count)
if "RANK_TABLE_FILE" in os.environ:
    table = json.load(open(os.environ["RANK_TABLE_FILE"]))
    assert table["server_count"] == os.environ["RANK_SIZE"] == count
    assert os.environ["DEVICE_ID"] == os.environ["ASCEND_DEVICE_ID"] == "0"
    assert os.environ["JOB_ID"] in job
    task = os.environ["RANK_ID"]
for folder in ("/tmp", "/cache", "/home/ma-user", "/home/work"):
    open(folder + "/copy_sync.lock0", "x").close()
mox.file.copy_parallel(src_url=known.data_url, dst_url="local/data")
mox.file.copy_parallel("local/data", "/cache/data")
mox.file.make_dirs(known.train_url)
os.environ["OUT"] = known.train_url + "//" + task + ".txt"
nested = "import os, sys, moxing.file; moxing.file.write(os.environ['OUT'], sys.argv[1])"
sys.exit(subprocess.call(["python", "-c", nested, helpers.text("/cache/data")]))
"""
_FILES = {
    "sub/train.py": _TRAIN,
    "sub/ma-pre-start.sh": b"export FROM_HOOK=set\nexit 0\n",
    "helpers.py": b"def text(folder): return open(folder + '/in.txt').read() + 'out'\n",
}
# The flavor of each kind of preset.
FLAVORS = {"PyTorch": "modelarts.vm.cpu.2u", "Ascend": "modelarts.kat1.xlarge"}


def run_twice(api: Api, s3: Any, engines: dict[str, str], nodes: int) -> None:
    """Run the recipe with each preset, and again when all jobs have ended.

    Args:
        engines: The engine of each kind in ``FLAVORS``.
    """
    for _ in range(2):
        jobs = [_create(api, s3, kind, engines[kind], nodes) for kind in FLAVORS]
        for job, name in jobs:
            details = api.await_phase(job, limit_s=2 * LIMIT_S)
            assert details["status"]["phase"] == "Completed", api.log(job) + api.log(job, nodes - 1)
            expected = [f"{name}/out/{node}.txt" for node in range(nodes)]
            assert [key for key in keys(s3, f"{name}/out/") if key[-1] != "/"] == expected
            for key in expected:
                assert s3.get_object(Bucket="data", Key=key)["Body"].read() == b"in out"


def _create(api: Api, s3: Any, kind: str, engine: str, nodes: int) -> tuple[str, str]:
    """Create a job, and return its id and its folder in OBS."""
    name = new_name()
    for path, data in _FILES.items():
        s3.put_object(Bucket="data", Key=f"{name}/proj/{path}", Body=data)
    s3.put_object(Bucket="data", Key=f"{name}/in/in.txt", Body=b"in ")
    parameters = {"data_url": f"s3://data/{name}/in/", "train_url": f"obs://data/{name}/out"}
    job = api.create(
        "",
        algorithm={
            "engine": {"engine_id": engine},
            "code_dir": f"/data/{name}/proj/",
            "boot_file": f"/data/{name}/proj/sub/train.py",
            "parameters": [{"name": key, "value": value} for key, value in parameters.items()],
        },
        spec={"resource": {"flavor_id": FLAVORS[kind], "node_count": nodes}},
    )
    return job, name

"""The modelarts backend on the emulator, with a real container for each node."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = [pytest.mark.docker, pytest.mark.e2e]

SCRIPT = """
import json, os, sys
rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
folder = os.environ["OUT"]
facts = {
    "rank": rank,
    "size": int(os.environ["OMPI_COMM_WORLD_SIZE"]),
    "node": int(os.environ["VC_TASK_INDEX"]),
    "token": os.environ["TOKEN"],
    "ugly": os.environ["UGLY"],
    "argv": sys.argv[1:],
    "keys": sorted(name for name in os.environ if name.startswith("CLOUDJOB_S3")),
}
with open(f"{folder}/rank-{rank}.json", "w") as file:
    json.dump(facts, file)
print("rank", rank, "is done")
"""


@pytest.fixture
def emulated_cloud(cloud: Any, base_image: str) -> Iterator[Any]:
    """A command line with an emulator whose nodes are containers."""
    settings = cloud.folder / "settings.yaml"
    settings.write_text(f"engine: docker\nimage: {base_image}\nupload_period_s: 1\ngrace_s: 5\n")
    cloud.environ["TOKEN"] = "s3$cr t"
    done = cloud.run("emulator", "up", "--settings", str(settings), "--json")
    assert done.code == 0, done
    assert json.loads(done.out)["engine"] == "docker"
    yield cloud
    assert cloud.run("emulator", "down").code == 0


def test_a_job_runs_in_two_containers(emulated_cloud: Any, base_image: str):
    """Our sshd joins the nodes with the job's key; the platform moves code, secrets and outputs."""
    emulated_cloud.script(SCRIPT)
    done = emulated_cloud.run(
        *("submit", "--backend", "modelarts", "--image", base_image, "--nodes", "2"),
        *("--procs-per-node", "2", "--secret", "TOKEN", "-e", "UGLY=a\n$b ", "--output", "OUT="),
        *("--name", "two", "train.py", "--lr", "a b"),
    )
    assert done.code == 0, done
    assert done.out.count(b"is done\n") == 4

    fetched = emulated_cloud.run("outputs", "two", "--to", str(emulated_cloud.folder / "got"))
    assert fetched.code == 0, fetched
    files = sorted((emulated_cloud.folder / "got" / "OUT").glob("rank-*.json"))
    environments = [json.loads(path.read_text()) for path in files]
    assert [item["node"] for item in environments] == [0, 0, 1, 1]
    for rank, item in enumerate(environments):
        assert item == {
            "rank": rank,
            "size": 4,
            "node": rank // 2,
            "token": "s3$cr t",
            "ugly": "a\n$b ",
            "argv": ["--lr", "a b"],
            "keys": [],
        }
    assert emulated_cloud.status("two")["state"] == "SUCCEEDED"


def test_a_missing_image_is_reported_before_anything_is_sent(emulated_cloud: Any):
    """A missing tag is an error; an unlisted image causes only a warning, as it may be shared."""
    emulated_cloud.script("pass")
    arguments = ("submit", "--backend", "modelarts", "--image")
    refused = emulated_cloud.run(*arguments, "cloudjob/base:nonsense", "train.py")
    assert refused.code == 5, refused
    assert "error: image: cloudjob/base:nonsense: there is no tag nonsense" in refused.err
    assert json.loads(emulated_cloud.run("list", "--json").out) == []

    warned = emulated_cloud.run(*arguments, "cloudjob/nonsense:v1", "train.py")
    assert "warning: image: the registry lists no cloudjob/nonsense" in warned.err, warned
    assert "Failed to pull image" in warned.err, warned


def test_the_status_names_a_failed_rank_in_a_container(emulated_cloud: Any, base_image: str):
    emulated_cloud.script(
        "import os, sys\nsys.exit(7 if os.environ['VC_TASK_INDEX'] == '1' else 0)\n"
    )
    done = emulated_cloud.run(
        *("submit", "--backend", "modelarts", "--image", base_image, "--nodes", "2"),
        *("--name", "fails", "train.py"),
    )
    status = emulated_cloud.status("fails")

    assert done.code == 7, done
    assert (status["failure"]["node"], status["failure"]["exit_code"]) == (1, 7)
    assert status["cause"] == "user"

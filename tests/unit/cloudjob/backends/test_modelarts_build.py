"""Tests of the request for a ModelArts job, and of the files delivered beside the code."""

from __future__ import annotations

import json
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloudjob.backends.modelarts import delivery, request
from cloudjob.backends.modelarts.site import Site
from cloudjob.errors import SpecError
from cloudjob.model import submission as submissions
from cloudjob.model.job import JobSpec
from cloudjob.model.submission import StoredCode, Submission
from jobentry.contract import env, variables
from tests.support.modelarts import KEYS, PROJECT

ROOT = Path(__file__).parents[4]
GOLDEN = ROOT / "tests" / "golden"
SITE = Site(
    "https://modelarts.cn-north-4.myhuaweicloud.com", "https://iam", "cn-north-4", PROJECT, KEYS
)
STORE = "obs://bucket/jobs"


def submission(**values: Any) -> Submission:
    """Return a job of two nodes."""
    spec = JobSpec(
        **{
            "script": "train.py",
            "launcher": "mpirun",
            "args": ("--lr", "0.1"),
            "nodes": 2,
            "procs_per_node": 4,
            "backend": "modelarts",
            "image": "swr.cn-north-4.myhuaweicloud.com/me/torch:2.4",
            "flavor": "modelarts.vm.gpu.8",
            **values,
        }
    )
    plain = submissions.submission_of(
        spec,
        "train-2345678b",
        code=StoredCode(f"{STORE}/train-2345678b/code.json", "sha256:" + "0" * 64),
        record_uri=f"{STORE}/train-2345678b/record/exit.json",
        outputs_uri=f"{STORE}/train-2345678b/outputs",
    )
    return plain._replace(access={"CLOUDJOB_S3_SECRET_KEY": "the-secret-key"})


EVERYTHING = {
    "env": {"SEED": "7", "MONEY": "$5", "EMPTY": ""},
    "secrets": {"TOKEN": "s3cr3t"},
    "inputs": {"DATA": "obs://data/digits/", "WEIGHTS": "https://example.com/w.bin"},
    "outputs": {"OUT": "", "CKPT": "obs://other/ckpt"},
    "timeout_min": 90.0,
    "retries": 2,
    "modelarts": {
        "workspace_id": "7",
        "pool_id": "pool-a",
        "description": "what the console shows",
        "parameters": {"epochs": "3"},
        "priority": 2,
        "preemptible": "true",
        "affinity": "cabinet",
        "affinity_group_size": 2,
        "hang_retry": "true",
        "ssh_keys": ("mine",),
        "volumes": [{"nfs": {"nfs_server_path": "10.0.0.1:/d", "local_path": "/mnt/d"}}],
        "annotations": {"tensorboard/enable": "true"},
        "tags": {"team": "vision"},
        "body": {"spec": {"notification": {"topic_urn": "urn:x", "events": ["JobFailed"]}}},
    },
}
PRESET = {
    "image": "",
    "modelarts": {"engine": "PyTorch:pytorch_2.1.0", "access_method": "parameter"},
    "inputs": {"data_url": "obs://data/digits/"},
}
BODIES = {
    "modelarts-image": {},
    "modelarts-everything": EVERYTHING,
    "modelarts-preset": PRESET,
    "modelarts-preset-image": {**PRESET, "image": "me/torch:2.4"},
    "modelarts-engine-id": {"image": "", "modelarts": {"engine": "ascend-1"}},
}


@pytest.mark.parametrize("name", BODIES)
def test_the_body_matches_the_golden_file(name: str):
    """Covers each way to select an image or engine, and a job that uses every key."""
    description = request.show(request.build(submission(**BODIES[name]), SITE))
    text = json.dumps(description, indent=1, sort_keys=True) + "\n"
    path = GOLDEN / f"{name}.json"

    assert path.exists(), f"when this is right, write it to {path.relative_to(ROOT)}:\n{text}"
    assert text == path.read_text(), (
        f"when this is right, write it to {path.relative_to(ROOT)}:\n{text}"
    )


def test_the_body_contains_no_secret():
    """Every user of the workspace can read the body."""
    job_request = request.build(submission(**EVERYTHING), SITE)
    text = json.dumps(job_request.body)

    assert "s3cr3t" not in text
    assert "the-secret-key" not in text
    assert job_request.env["TOKEN"] == "s3cr3t"
    assert "s3cr3t" not in json.dumps(request.show(job_request))
    assert "s3cr3t" not in repr(job_request)


def test_the_keys_of_the_store_are_delivered_only_when_an_entry_needs_them():
    """The platform copies objects in OBS with its own permissions."""
    without = request.build(submission(inputs={"A": "obs://b/c"}), SITE)
    needed = request.build(submission(inputs={"A": "s3://b/c"}), SITE)

    assert "CLOUDJOB_S3_SECRET_KEY" not in without.env
    assert needed.env["CLOUDJOB_S3_SECRET_KEY"] == "the-secret-key"


@given(
    st.dictionaries(
        st.from_regex(r"[A-Z][A-Z0-9_]{0,6}", fullmatch=True).map(lambda name: "U" + name),
        st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=30)
        | st.integers(4090, 4100).map(lambda length: "x" * length),
        max_size=8,
    )
)
def test_every_variable_is_delivered_exactly_once(environ: dict[str, str]):
    job_request = request.build(submission(env=environ), SITE)
    visible = job_request.body["algorithm"]["environments"]
    delivered = variables.load(request.delivered_env(job_request))

    assert {**{k: visible[k] for k in environ if k in visible}, **delivered} == environ
    assert not set(visible) & set(delivered)
    assert all(len(value) <= 4096 and "$" not in value and value for value in visible.values())
    assert not any(name.startswith("MA_") for name in visible)


def test_the_hundredth_variable_is_the_last_in_the_body():
    """The remaining variables are delivered in a file beside the code."""
    environ = {f"VARIABLE_{index}": "x" for index in range(150)}
    job_request = request.build(submission(env=environ), SITE)

    assert len(job_request.body["algorithm"]["environments"]) == 100
    # cloudjob's own variables come first in the body, since the entry cannot start without them.
    assert {name for name in job_request.env if name.startswith("CLOUDJOB_")} == set()
    visible = job_request.body["algorithm"]["environments"]
    assert {name for name in visible if name in environ} | set(job_request.env) == set(environ)


def test_each_node_reads_its_own_environment():
    job_request = request.build(submission(**EVERYTHING), SITE)
    nodes = [env.read(dict(environ)) for environ in job_request.environments]

    assert [node.node for node in nodes] == [0, 1]
    assert nodes[0].slots == 4
    assert dict(nodes[0].inputs) == {"WEIGHTS": "https://example.com/w.bin"}
    assert job_request.environments[1]["SEED"] == "7"


@pytest.mark.parametrize("arguments", [("--lr", "0.1"), ("a b", "'", '"', "$HOME", "\n", "*", "")])
def test_the_command_passes_every_argument_and_those_the_platform_appends(
    arguments: tuple[str, ...], tmp_path: Path
):
    folder = tmp_path / "job dir" / "node"
    folder.mkdir(parents=True)
    (folder / "boot.sh").write_text('printf "%s\\0" "$CLOUDJOB_DELIVERY" "$@"\n')
    command = request.command(submission(args=arguments).spec)
    environ = {"MA_JOB_DIR": str(folder.parent), "PATH": "/usr/bin:/bin"}
    expected = [str(folder), "train.py", *arguments, "--data_url=/home/x y"]

    for argv in (
        ["sh", "-c", command + " '--data_url=/home/x y'"],
        [*shlex.split(command), "--data_url=/home/x y"],
    ):
        done = subprocess.run(argv, env=environ, capture_output=True, check=True)
        assert done.stdout.decode().split("\0")[:-1] == expected


def test_a_preset_engine_runs_our_boot_file_with_the_same_arguments(tmp_path: Path):
    """Its command takes no arguments, so a file beside the boot file contains them."""
    job_request = request.build(submission(**{**PRESET, "args": ("a b", "\n")}), SITE)
    for name, data in delivery.companions(job_request).items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "boot.sh").write_text('printf "%s\\0" "$CLOUDJOB_DELIVERY" "$@"\n')
    done = subprocess.run(
        ["python3", str(tmp_path / "boot.py"), "--data_url=/x"], capture_output=True, check=True
    )

    assert job_request.body["algorithm"]["boot_file"] == "/bucket/jobs/train-2345678b/node/boot.py"
    assert done.stdout.decode().split("\0")[:-1] == [
        str(tmp_path),
        "train.py",
        "a b",
        "\n",
        "--data_url=/x",
    ]


def test_the_delivered_folder_has_entry_variables_and_key():
    """Each job has a new key. A single-node job without secrets needs neither env nor ssh-key."""
    job_request = request.build(submission(secrets={"TOKEN": "s3cr3t"}), SITE)
    files, other = delivery.companions(job_request), delivery.companions(job_request)

    assert set(files) == {"jobentry.pyz", "boot.sh", "env", "ssh-key"}
    assert variables.load(files["env"]) == {"TOKEN": "s3cr3t"}
    assert files["ssh-key"] != other["ssh-key"]
    assert set(delivery.companions(request.build(submission(nodes=1), SITE))) == {
        "jobentry.pyz",
        "boot.sh",
    }


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"image": ""}, "image: is missing"),
        ({"flavor": ""}, "flavor: is missing"),
        ({"retries": 4}, "retries: is out of range"),
        ({"outputs": {"O": "file:///x"}}, "outputs.O: ModelArts stores outputs in OBS only"),
        ({"inputs": {"I": "file:///x"}}, "inputs.I: nodes cannot read files of this machine"),
        ({"restore_outputs": "own"}, "restore_outputs: ModelArts does not copy outputs back"),
        ({"args": ("\udcff",)}, "args[0]: contains bytes that are not UTF-8"),
        (
            {"inputs": {"I": "obs://b/k"}, "input_nodes": {"I": "0"}},
            "input_nodes.I: ModelArts copies an input to every node",
        ),
        *(
            (
                {"image": "", "modelarts": {"engine": engine}},
                "modelarts.engine: this engine starts mpirun itself",
            )
            for engine in (
                "Horovod:horovod_0.22",
                "horovod_0.22.1-pytorch_1.8.0-cuda_10.2-py_3.7-ubuntu_18.04-x86_64",
                "MPI:any",
                "MindSpore-GPU:any",
                "mindspore_1.3.0-cuda_10.1-py_3.7-ubuntu_1804-x86_64",
            )
        ),
        (
            {"modelarts": {"engine": "pytorch_2"}},
            "modelarts.engine: with an image it must be NAME:VERSION",
        ),
        (
            {"modelarts": {"description": "x" * 257}},
            "modelarts.description: is too long",
        ),
        (
            {"args": ("x" * 70_000, "'" * 30_000)},
            "args: too long for ModelArts' start command (given 220",
        ),
    ],
)
def test_settings_that_modelarts_does_not_support_are_refused(
    values: dict[str, Any], expected: str
):
    with pytest.raises(SpecError) as caught:
        request.build(submission(**values), SITE)

    assert [problem for problem in caught.value.problems if problem.startswith(expected)]
    assert len(caught.value.problems) == 1


def test_a_store_that_is_not_obs_is_refused():
    """ModelArts copies code only from OBS."""
    plain = submission()
    other = plain._replace(code=StoredCode("file:///x/train-2345678b/code.json", plain.code.digest))
    with pytest.raises(SpecError) as caught:
        request.build(other, SITE)

    assert caught.value.problems[0].startswith("store: ModelArts copies code from OBS only")


def test_a_null_in_the_body_removes_a_key():
    """A user can thus remove a key that cloudjob sets."""
    tree = {"spec": {"log_export_path": None}, "algorithm": {"policies": None, "summary": {"a": 1}}}
    job_request = request.build(submission(modelarts={"body": tree}), SITE)

    assert "log_export_path" not in job_request.body["spec"]
    assert "policies" not in job_request.body["algorithm"]
    assert job_request.body["algorithm"]["summary"] == {"a": 1}
    assert job_request.body["spec"]["resource"]["flavor_id"] == "modelarts.vm.gpu.8"


def test_the_platforms_timeout_is_later_than_that_of_the_entry():
    """The entry ends a job within its grace period; the platform's limit is the fallback."""
    job_request = request.build(submission(timeout_min=61.0), SITE)
    with_limit = request.build(submission(timeout_min=61.0, modelarts={"auto_stop_hours": 2}), SITE)

    assert job_request.body["spec"]["auto_stop"] == {"time_unit": "HOURS", "duration": 3}
    assert with_limit.body["spec"]["auto_stop"]["duration"] == 2


def test_an_emulator_has_defaults():
    site = replace(SITE, default_image="cloudjob/base:latest", default_flavor="cpu")
    job_request = request.build(submission(image="", flavor=""), site)

    assert job_request.body["algorithm"]["engine"] == {"image_url": "cloudjob/base:latest"}
    assert job_request.body["spec"]["resource"]["flavor_id"] == "cpu"


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (("exit", "platform"), {"job-unconditional-retry": "true"}),
        (("platform",), {}),
        (("platform", "preempted", "hang"), {"hang-retry": "true"}),
    ],
)
def test_the_platform_restarts_a_job_after_the_failures_that_it_can_notice(kinds, expected):
    job_request = request.build(submission(retries=2, retry={"on": kinds}), SITE)

    written = job_request.body["metadata"]["annotations"]
    assert written == {
        "fault-tolerance/job-retry-num": "2",
        **{f"fault-tolerance/{name}": value for name, value in expected.items()},
    }

"""Settings that MindSpore does not support on a device are refused, with an alternative."""

from __future__ import annotations

import pytest

from cloudjob.model.job import JobSpec
from cloudjob.model.submission import StoredCode, node_env, submission_of
from cloudjob.model.validation import conflicts, valid_part
from jobentry.contract.env import MindSpore

MODES = ("stand_alone", "data_parallel", "semi_auto_parallel", "auto_parallel", "hybrid_parallel")


def spec(launcher: str = "msrun", **settings) -> JobSpec:
    """Return a job; values that are not fields of a job go to its section ``mindspore``."""
    job_values = {
        key: settings.pop(key)
        for key in ("nodes", "procs_per_node", "hardware_check")
        if key in settings
    }
    return JobSpec(script="x.py", launcher=launcher, mindspore=settings, **job_values)


def problems(job: JobSpec) -> list[str]:
    """Return the conflicts between the settings of a job."""
    return [f"{key}: {what}" for key, what in conflicts(job)]


def node_settings(job: JobSpec) -> MindSpore:
    """Return the MindSpore settings that the nodes of a job get."""
    sent = submission_of(job, "j", code=StoredCode("u", "d"), record_uri="r", outputs_uri="o")
    return node_env(sent, 0, ("a",)).mindspore


@pytest.mark.parametrize("launcher", ["msrun", "dynamic-cluster", "mindspore-mpi", "rank-table"])
@pytest.mark.parametrize("target", ["CPU", "GPU", "Ascend"])
def test_launchers_are_allowed_on_the_documented_devices(launcher, target):
    """Only the launcher rank-table is restricted: it requires Ascend."""
    problems_there = problems(spec(launcher, device_target=target))

    if launcher == "rank-table" and target != "Ascend":
        assert problems_there == [
            f"launcher: rank-table does not work on {target}: use msrun"
            f" (given mindspore.device_target {target}; allowed Ascend;"
            " --no-hardware-check starts it anyway)"
        ]
    else:
        assert problems_there == []


@pytest.mark.parametrize("launcher", ["msrun", "dynamic-cluster", "mindspore-mpi", "rank-table"])
def test_a_job_without_a_device_target_accepts_every_launcher(launcher):
    assert problems(spec(launcher)) == []
    assert node_settings(spec(launcher)).device_target == ""
    assert problems(spec(launcher, parallel_mode="auto_parallel")) == []


@pytest.mark.parametrize(
    ("launcher", "servers", "problem"),
    [
        ("msrun", "1", "only the launcher dynamic-cluster starts parameter servers (given '1'"),
        ("mindspore-mpi", "1", "only the launcher dynamic-cluster starts parameter servers"),
        ("dynamic-cluster", "x", "is not a number of parameter servers (given 'x'"),
        ("dynamic-cluster", "2", ""),
        ("msrun", "0", ""),
        ("python", "1", ""),
    ],
)
def test_parameter_servers_need_the_dynamic_cluster(launcher, servers, problem):
    job = spec(launcher).with_values(env={"MS_SERVER_NUM": servers})

    problems_there = problems(job)

    assert len(problems_there) == bool(problem)
    assert all(text.startswith(f"env.MS_SERVER_NUM: {problem}") for text in problems_there)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("target", ["CPU", "GPU", "Ascend"])
def test_modes_are_allowed_on_the_documented_devices(mode, target):
    """On a CPU, MindSpore supports only stand-alone and data-parallel training."""
    problems_there = problems(spec(device_target=target, parallel_mode=mode))

    is_refused = target == "CPU" and mode not in ("stand_alone", "data_parallel")
    assert [problem.partition(" (")[0] for problem in problems_there] == (
        [f"mindspore.parallel_mode: {mode} does not work on CPU: use data_parallel"]
        if is_refused
        else []
    )


def test_a_flag_overrides_the_table_of_hardware():
    job = spec("rank-table", parallel_mode="auto_parallel", hardware_check="off")
    misplaced = spec("torchrun", parallel_mode="data_parallel", hardware_check="off")

    assert problems(job) == []
    assert problems(misplaced) == [
        "mindspore.parallel_mode: needs a MindSpore launcher (given launcher torchrun; allowed"
        " msrun, dynamic-cluster, mindspore-mpi)"
    ]


@pytest.mark.parametrize(
    "search", ["dynamic_programming", "recursive_programming", "sharding_propagation"]
)
def test_a_search_is_for_auto_parallel(search):
    """No other parallel mode searches for a strategy."""
    good = spec(device_target="GPU", parallel_mode="auto_parallel", search_mode=search)
    bad = spec(device_target="GPU", parallel_mode="semi_auto_parallel", search_mode=search)

    assert problems(good) == []
    assert problems(bad) == [
        "mindspore.search_mode: is only for the parallel_mode auto_parallel"
        " (given semi_auto_parallel)"
    ]


def test_an_unknown_value_is_refused_with_a_suggestion():
    values = {"device_target": "NPU", "parallel_mode": "data-paralel"}
    problem_of = dict(valid_part({"mindspore": values})[1])

    assert problem_of["mindspore", "device_target"].startswith("is not known")
    assert "did you mean 'data_parallel'?" in problem_of["mindspore", "parallel_mode"]


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (["s 0=1.1.1.1"], "mindspore.devices: needs a line for each node (given 1; allowed 2)"),
        (
            ["s 0=1.1.1.1", "t 0=1.1.1.2 1=1.1.1.3"],
            "mindspore.devices[1]: needs a device for each rank of the node"
            " (given 2; allowed 1, see procs_per_node)",
        ),
        (
            ["s 0=1.1.1.1", "t"],
            "mindspore.devices[1]: names no devices"
            " (given 't'; allowed SERVER[@SUPER_POD] DEVICE=ADDRESS[/SUPER_DEVICE]...)",
        ),
    ],
)
def test_the_devices_must_match_the_nodes_and_ranks_of_the_job(lines, problem):
    """There is one line for each node, and one device for each rank."""
    values = {"nodes": 2, "procs_per_node": 1, "device_target": "Ascend"}
    job = spec("rank-table", **values, devices=tuple(lines))

    assert problems(job) == [problem]


def test_the_nodes_get_the_settings_that_the_script_does_not_choose():
    """Jobs of other frameworks get no settings."""
    job = spec(
        "msrun", device_target="GPU", parallel_mode="auto_parallel",
        search_mode="sharding_propagation",
    )  # fmt: skip

    assert node_settings(job) == MindSpore("GPU", "auto_parallel", "sharding_propagation")
    assert node_settings(JobSpec(script="x.py", launcher="msrun")) == MindSpore()
    assert node_settings(JobSpec(script="x.py", launcher="torchrun")) == MindSpore()
    assert node_settings(JobSpec(script="x.py")) == MindSpore()
